"""A missing locked target is reported when its folder is audited, and not when single files are audited."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture(autouse=True)
def _locked_folder(in_tmp_path, statecli):
    """Lock a folder with a checkpoint, a second checkpoint in a subfolder, and a model in shards."""
    os.makedirs("ck/in")
    for name in ("ck/a.pt", "ck/in/b.pt"):
        torch.save({"w": torch.ones(2)}, name)
    write_shards("ck/m")
    assert statecli("lock", "ck", "-o", "l.json").code == 0


def write_shards(folder):
    os.makedirs(folder, exist_ok=True)
    shards = {name: f"model-0000{n}-of-00002.safetensors" for n, name in ((1, "x"), (2, "y"))}
    for name, shard in shards.items():
        save_file({name: torch.ones(2)}, f"{folder}/{shard}")
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return [f"{folder}/{shard}" for shard in shards.values()]


def audit(statecli, *words, lock="l.json"):
    """Return the exit status, and the targets and messages of the findings."""
    result = statecli("audit", *words, "--lock", lock, "-f", "json")
    return result.code, [(finding["target"], finding["message"]) for finding in result.json["findings"]]


LINKED_TARGET = ("ck/in/b.pt", "the lock has 1 tensor of this target, but the target is the same file as ck/a.pt")
MISSING_TARGET = ("ck/in/b.pt", "the lock has 1 tensor of this target, but the target was not found")


@pytest.mark.parametrize("path", ["ck", ".", "ck/", "./ck/in/..", "c*", "ck/**", "ck/*", "*/i[n]/*.pt"])
def test_missing_locked_file_is_reported(statecli, path):
    """The audited path is the file's folder or a glob that would have matched the file."""
    assert audit(statecli, path) == (0, [])
    Path("ck/in/b.pt").unlink()
    Path("ck/in/rest.pt").write_bytes(Path("ck/a.pt").read_bytes())
    Path("l.json").write_text(
        Path("l.json").read_text().replace('{"target": "ck/m"', build_lock_lines("ck/in/rest.pt"))
    )
    assert audit(statecli, path) == (1, [MISSING_TARGET])


def build_lock_lines(name):
    """Return the lock's lines of `ck/a.pt` under another name, followed by the start of the model's lines."""
    target = next(
        target for target in json.loads(Path("l.json").read_text())["targets"] if target["target"] == "ck/a.pt"
    )
    return f'{json.dumps(target | {"target": name})},\n{{"target": "ck/m"'


@pytest.mark.parametrize("path", ["ck/a.pt", "ck/*.pt", "ck/m", "ck/m/model-00001-of-00002.safetensors"])
def test_locked_file_outside_the_audited_paths_is_not_reported(statecli, path):
    """A hook passes single files, and a glob stands only for the files that it matches."""
    Path("ck/in/b.pt").unlink()
    assert audit(statecli, path) == (0, [])


def test_missing_file_is_not_reported_if_a_filter_excludes_it(statecli):
    """If a filter excludes all locked tensors of a missing file, the file is not reported."""
    Path("ck/in/b.pt").unlink()
    assert audit(statecli, "ck", "-x", "w") == (0, [])
    assert audit(statecli, "ck", "-x", "y") == (1, [MISSING_TARGET])


def test_model_without_its_files_is_reported_missing(statecli):
    """The model is missing although its folder exists; so is a checkpoint that was replaced by a link to another."""
    for name in os.listdir("ck/m"):
        Path("ck/m", name).unlink()
    assert audit(statecli, "ck") == (
        1,
        [("ck/m", "the lock has 2 tensors of this target, but the target was not found")],
    )
    write_shards("ck/m")
    Path("ck/in/b.pt").unlink()
    Path("ck/in/b.pt").symlink_to("../a.pt")
    assert audit(statecli, "ck") == (1, [LINKED_TARGET])


@pytest.mark.parametrize("name", ["ck/in/b.pt", "./ck/in/b.pt"])
def test_locked_file_replaced_by_a_link_is_reported(statecli, name):
    """The file is now a link to the other, and the lock's tensors of its name were not compared."""
    assert audit(statecli, "ck/a.pt", name) == (0, [])
    Path("ck/in/b.pt").unlink()
    Path("ck/in/b.pt").symlink_to("../a.pt")
    assert audit(statecli, "ck/a.pt", name) == (1, [(name, LINKED_TARGET[1])])


def test_accepted_finding_of_a_missing_file_is_not_fixed(statecli):
    """The baseline accepts that the file is missing, and the entry is not reported as fixed."""
    Path("ck/in/b.pt").unlink()
    words = ("audit", "ck", "--lock", "l.json")
    assert statecli(*words, "--write-baseline", "b.json", "--reason", "moved").code == 0
    result = statecli(*words, "--baseline", "b.json")
    assert (result.code, result.err) == (0, "")


def test_shards_are_checked_as_their_locked_model(statecli):
    """The model is checked once, however many shards are named, also if the lock names its index. A shard that is
    locked under its own name is checked as a single file.
    """
    shards = write_shards("ck/m")
    assert audit(statecli, *shards) == (0, [])
    for locked_path in ("ck/m/model.safetensors.index.json", shards[0]):
        assert statecli("lock", locked_path, "ck/a.pt", "-o", "other.json").code == 0
        assert audit(statecli, locked_path, lock="other.json") == (0, [])
    save_file({"y": torch.zeros(2)}, shards[1])
    code, [(target, message)] = audit(statecli, *shards)
    assert (code, target) == (1, "ck/m")
    assert message.startswith("y: values differ from the lock")


def test_locked_shard_is_missing_only_if_its_file_is_deleted(statecli):
    """The model itself is not in the lock. A deleted shard is missing from the model, and from the lock's targets."""
    assert statecli("lock", *write_shards("ck/m"), "ck/a.pt", "-o", "shards.json").code == 0
    result = statecli("audit", "ck/m", "--lock", "shards.json", "-f", "json")
    assert (result.code, result.json["findings"]) == (2, [])
    assert result.err.startswith("statecli: ck/m: is not in the lock")
    Path("ck/m/model-00001-of-00002.safetensors").unlink()
    result = statecli("audit", "ck/m", "--lock", "shards.json", "-f", "json")
    assert result.code == 2
    missing_shard, mismatch = result.json["findings"]
    assert (missing_shard["target"], missing_shard["rule"]) == ("ck/m", "missing-shard")
    assert (mismatch["target"], mismatch["rule"], mismatch["message"]) == (
        "ck/m/model-00001-of-00002.safetensors",
        "lock-mismatch",
        MISSING_TARGET[1],
    )


def test_tensors_that_differ_are_one_problem(statecli):
    """The title counts the tensors; each line describes one difference."""
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, "two.pt")
    assert statecli("lock", "two.pt", "-o", "two.json").code == 0
    torch.save({"a": torch.zeros(2), "c": torch.ones(2)}, "two.pt")
    output = statecli("audit", "two.pt", "--lock", "two.json", "-f", "table").out
    assert "error[lock-mismatch]: 3 tensors do not match the lock\n" in output
    for line in (
        "| a: values differ: digest ",
        "| b: missing from the checkpoint; the lock has float32 [2]",
        "c: not in the lock",
    ):
        assert line in output


def test_frozen_only_ignores_missing_files_without_frozen_tensors(statecli):
    """With --frozen-only, a locked file without frozen tensors may be missing."""
    Path("ck/in/b.pt").unlink()
    for glob, expected in (("x", []), ("w", [MISSING_TARGET])):
        Path("statecli.toml").write_text(f'policy = {{ frozen = "{glob}" }}')
        findings = statecli("audit", "ck", "--lock", "l.json", "--frozen-only", "-f", "json").json["findings"]
        assert [
            (finding["target"], finding["message"]) for finding in findings if finding["rule"] == "lock-mismatch"
        ] == expected


def test_as_found_audits_files_of_a_commit_as_their_model(statecli):
    """Shards and the files next to them stand for their model; a text file in a commit is ignored."""
    shards = write_shards("ck/m")
    assert statecli("lock", "ck/m", "-o", "one.json").code == 0
    Path("notes.txt").write_text("hello")
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, "ck/m/optimizer.pt")
    for words in (shards, ["ck/m/optimizer.pt"], ["notes.txt", *shards, "ck/m/optimizer.pt"]):
        assert audit(statecli, "--as-found", *words, lock="one.json") == (0, []), words
    assert audit(statecli, *shards, lock="one.json")[0] == 1


def test_unlocked_target_error_lists_the_locked_targets(statecli):
    """The message lists the locked targets and both remedies: leave the target out, or lock again."""
    assert statecli("lock", "ck/in", "-o", "one.json").code == 0
    torch.save({"w": torch.ones(2)}, "new.pt")
    advice = (
        "if you expect this target, run `statecli lock` again; otherwise leave the target out, or delete the file\n"
    )
    result = statecli("audit", "new.pt", "--lock", "one.json")
    assert result.err == f"statecli: new.pt: is not in the lock, which has only ck/in/b.pt: {advice}"
    result = statecli("audit", "new.pt", "--lock", "l.json")
    assert result.err == f"statecli: new.pt: is not in the lock, which has ck/a.pt and 2 more: {advice}"


def test_line_break_in_a_name_is_escaped_on_both_streams(statecli):
    """A line break in a name is printed as a backslash and an n, not as a space."""
    Path("a\nb.pt").write_bytes(b"")
    result = statecli("audit", "a\nb.pt", "-f", "plain")
    assert result.err.startswith("statecli: a\\nb.pt: ")
    assert "a\\nb.pt" in result.out


def test_the_verdict_says_how_many_tensors_match_the_lock(statecli):
    """The number covers all targets; without the number, a passed check would look like an audit without a lock."""
    assert "; all 4 tensors match the lock l.json; " in statecli("audit", "ck", "--lock", "l.json").out
    assert "; 1 tensor matches the lock l.json; " in statecli("audit", "ck/a.pt", "--lock", "l.json").out
    torch.save({"w": torch.zeros(2)}, "ck/a.pt")
    result = statecli("audit", "ck", "--lock", "l.json", "-f", "json")
    assert "; 3 of 4 tensors match the lock l.json; " in result.json["verdict"]


def test_the_verdict_names_no_lock_without_a_comparison(statecli):
    """The rules about the lock are ignored, or the command has no `--lock`."""
    assert "match" not in statecli("audit", "ck", "--lock", "l.json", "--ignore", "lock").out
    assert "match" not in statecli("audit", "ck").out


def test_a_section_that_a_lock_leaves_out_is_a_note_without_a_rule(statecli):
    """The left-out section is not a mismatch: nothing fails with --fail-on note, and the line names no rule."""
    momentum = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": momentum}, "train.pt")
    assert statecli("lock", "train.pt", "-i", "model.*", "-o", "m.json").code == 0
    result = statecli("audit", "train.pt", "--lock", "m.json", "--fail-on", "note", "-f", "table")
    assert (result.code, "lock-mismatch" in result.out) == (0, False)
    assert "note: optimizer: not part of a model and not in the lock, so not compared" in result.out
    assert "note: " not in statecli("audit", "train.pt", "--lock", "m.json", "-q", "-f", "table").out
