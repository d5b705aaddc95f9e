"""A set of weights has the same lock, byte for byte, in every format."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import hypothesis.strategies as st
import jsonschema
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from safetensors.torch import save_file, save_model
from torch import nn

from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import lock_file, run
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import NothingMatched


def build_lock_bytes(*targets, **options):
    request = run.Request(tuple(map(str, targets)), **options)
    return b"".join(lock_file.encode_lock(run.build_lock(run.read_targets(request), request)))


def map_tensors(raw):
    """Return the tensors of a lock with a single target, by name."""
    (target,) = json.loads(raw)["targets"]
    return {line["fqn"]: line for line in target["tensors"]}


def write_shards(state, folder, count=3):
    """Write the state as `count` shards and an index, as transformers does."""
    folder.mkdir()
    files = {name: f"model-{n % count + 1:05}-of-{count:05}.safetensors" for n, name in enumerate(state)}
    for shard in set(files.values()):
        save_file(
            {name: state[name].contiguous() for name, file_name in files.items() if file_name == shard}, folder / shard
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@st.composite
def draw_states(draw):
    """Names, dtypes, shapes and strides; no shared storage."""
    names = draw(st.lists(st.from_regex(r"[a-z]{1,3}(\.[a-z0-9é]{1,3}){0,2}", fullmatch=True), min_size=3, unique=True))
    state = {}
    for n, name in enumerate(names):
        dtype = draw(
            st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool))
        )
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(n)).to(dtype)
        state[name] = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    return state


@given(draw_states())
def test_every_container_has_the_same_lock(tmp_path_factory, state):
    """A zip, the older pickles, safetensors, and three shards with their index; in any order of names."""
    path = tmp_path_factory.mktemp("a")
    torch.save(state, path / "zip.pt")
    torch.save(dict(reversed(state.items())), path / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "one.safetensors")
    texts = {build_lock_bytes(path / name) for name in ("zip.pt", "legacy.pt", "one.safetensors")}
    texts.add(build_lock_bytes(write_shards(state, path / "shards")))
    assert len(texts) == 1


def test_line_of_a_lock_describes_a_tensor(tmp_path):
    """Tensors are in the order of names, the digest is of the tensor's bytes, and unknown fields are null."""
    state = {"b": torch.tensor([1.0, 2.0]), "a": torch.zeros(1, 2, dtype=torch.int16)}
    torch.save(state, tmp_path / "a.pt")
    raw = build_lock_bytes(tmp_path / "a.pt")
    assert list(map_tensors(raw)) == ["a", "b"]
    assert map_tensors(raw)["b"] == {
        "fqn": "b",
        "section": "model",
        "kind": None,
        "dtype": "float32",
        "shape": [2],
        "requires_grad": None,
        "digest": blake3(state["b"].numpy().tobytes()).hexdigest(),
    }
    assert [line for line in raw.splitlines() if b'"fqn"' in line] == raw.splitlines()[2:4]


def test_lock_depends_on_neither_path_nor_time(tmp_path, monkeypatch):
    """The same file at another path and time has the same lock; an absolute path becomes relative to this folder."""
    state = {"w": torch.ones(2)}
    (tmp_path / "here").mkdir()
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "here" / "b.pt")
    os.utime(tmp_path / "a.pt", (0, 0))
    monkeypatch.chdir(tmp_path / "here")
    assert build_lock_bytes(tmp_path / "a.pt") == build_lock_bytes("b.pt")
    document = json.loads(build_lock_bytes(tmp_path / "a.pt", "./b.pt"))
    assert [target["target"] for target in document["targets"]] == ["../a.pt", "b.pt"]
    assert str(tmp_path).encode() not in build_lock_bytes(tmp_path / "a.pt", "b.pt")


def test_targets_are_sorted_and_listed_once(in_tmp_path):
    """Targets are sorted, in whatever order they were typed."""
    for name in ("b.pt", "a.pt"):
        torch.save({"w": torch.ones(2)}, name)
    assert build_lock_bytes("b.pt", "a.pt", "./a.pt") == build_lock_bytes("a.pt", "b.pt") == build_lock_bytes("*.pt")


def test_checkpoints_of_a_folder_are_named_by_file(in_tmp_path):
    """A folder with a single checkpoint is named by file too, because a second checkpoint may follow."""
    Path("all").mkdir()
    torch.save({"w": torch.ones(2)}, "all/a.pt")
    assert [target["target"] for target in json.loads(build_lock_bytes("all"))["targets"]] == ["all/a.pt"]


def test_names_are_relative_to_the_folder_of_the_lock(tmp_path, monkeypatch, statecli):
    """The lock has the same bytes from any folder and for any spelling of the target, and is valid from any folder."""
    monkeypatch.chdir(tmp_path)
    Path("ck").mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, f"ck/{name}")
    locks = set()
    lines = [(".", "ck", "lock.json"), ("ck", ".", "../lock.json"), (".", tmp_path / "ck", tmp_path / "lock.json")]
    for folder, target, lock in lines:
        monkeypatch.chdir(tmp_path / folder)
        assert statecli("lock", target, "-o", lock).code == 0
        locks.add((tmp_path / "lock.json").read_bytes())
        assert statecli("audit", target, "--lock", lock, "--select", "lock").code == 0
    assert len(locks) == 1
    assert [target["target"] for target in json.loads(locks.pop())["targets"]] == ["ck/a.pt", "ck/b.pt"]


def test_the_configured_lock_is_found_from_a_folder_below(tmp_path, monkeypatch, statecli):
    """Names are relative to the lock file's folder, not to the current folder."""
    monkeypatch.chdir(tmp_path)
    Path(".git").mkdir()
    Path("ck").mkdir()
    torch.save({"w": torch.ones(2)}, "ck/a.pt")
    Path("statecli.toml").write_text('lock = "lock.json"\n')
    assert statecli("lock", "ck", "-o", "lock.json").code == 0
    monkeypatch.chdir("ck")
    assert statecli("audit", ".", "--select", "lock").code == 0
    torch.save({"w": torch.zeros(2)}, "a.pt")
    assert statecli("audit", ".", "--select", "lock").code == 1


def test_link_is_locked_under_the_name_of_its_target(in_tmp_path, statecli):
    """The folder's lock contains the file once, under its real name, and the link is checked against this entry."""
    Path("lk").mkdir()
    torch.save({"w": torch.ones(2)}, "lk/model.pt")
    Path("lk/best.pt").symlink_to("model.pt")
    for targets in (("lk",), ("lk/best.pt", "lk/model.pt")):
        assert statecli("lock", *targets, "-o", "lock.json").code == 0
        assert [target["target"] for target in json.loads(Path("lock.json").read_text())["targets"]] == ["lk/model.pt"]
    for target in ("lk", "lk/best.pt"):
        assert statecli("audit", target, "--lock", "lock.json", "--select", "lock").code == 0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def test_ties_recorded_by_a_format_are_in_both_locks(tmp_path):
    """safetensors keeps only the first of two tied names; `save_model` of safetensors records the other name."""
    torch.manual_seed(0)
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    save_model(model, str(tmp_path / "a.safetensors"))
    raw = build_lock_bytes(tmp_path / "a.pt")
    assert raw == build_lock_bytes(tmp_path / "a.safetensors")
    assert {name: line.get("tied") for name, line in map_tensors(raw).items() if "tied" in line} == {
        "embed.weight": "embed.weight",
        "head.weight": "embed.weight",
    }


def test_slices_of_one_storage_are_not_tied(tmp_path):
    """A format that stores each part separately loses nothing."""
    vector = torch.arange(6.0)
    torch.save({"a": vector[:3], "b": vector[3:]}, tmp_path / "a.pt")
    save_file({"a": vector[:3].clone(), "b": vector[3:].clone()}, tmp_path / "a.safetensors")
    assert build_lock_bytes(tmp_path / "a.pt") == build_lock_bytes(tmp_path / "a.safetensors")


def test_lock_records_kind_and_requires_grad(tmp_path):
    """A pickled Parameter is recorded as a parameter with its requires_grad; an optimizer's state as optimizer."""
    model = nn.Linear(2, 2)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"frozen": frozen, "plain": torch.ones(1)}, tmp_path / "p.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
    actual = map_tensors(build_lock_bytes(tmp_path / "p.pt"))
    assert (actual["frozen"]["kind"], actual["frozen"]["requires_grad"]) == ("parameter", False)
    assert (actual["plain"]["kind"], actual["plain"]["requires_grad"]) == (None, None)
    kinds = {(line["section"], line["kind"]) for line in map_tensors(build_lock_bytes(tmp_path / "t.pt")).values()}
    assert kinds == {("model", "parameter"), ("optimizer", "optimizer")}


def test_lock_of_a_class_has_no_digests(statecli):
    """The initial values of a class are random: names, kinds, dtypes and shapes are locked, and a note says so."""
    result = statecli("lock", "sample_models/net.py:Net")
    assert result.code == 0
    actual_lines = map_tensors(result.out)
    assert actual_lines
    assert all(line["digest"] is None and line["kind"] for line in actual_lines.values())
    assert "values of" in result.err
    assert "not locked" in result.err
    assert statecli("lock", "sample_models/net.py:Net", "-q").err == ""


def test_filters_exclude_tensors_from_the_lock(tmp_path, statecli):
    """Tensors are filtered by name and by kind, as in other commands."""
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.pt")
    assert list(map_tensors(statecli("lock", tmp_path / "a.pt", "-x", "a").out)) == ["b"]
    result = statecli("lock", tmp_path / "a.pt", "--kind", "optimizer")
    assert (result.code, result.out) == (2, "")


def test_lock_names_its_digest_algorithm(tmp_path, statecli):
    """The lock records sha256 if the user requests sha256."""
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    result = statecli("lock", tmp_path / "a.pt", "--digest", "sha256", "-o", tmp_path / "lock.json")
    assert (result.code, result.out, result.err) == (0, "", "")
    assert lock_file.read_lock(str(tmp_path / "lock.json")).digest is Algorithm.SHA256


def test_lock_file_is_valid_under_its_schema(tmp_path, statecli):
    """The lock file can be read and written again without a change."""
    torch.save({"w": torch.ones(1), "\x1b[31m\u202e": torch.ones(1)}, tmp_path / "a.pt")
    raw = statecli("lock", tmp_path / "a.pt").out
    jsonschema.validate(json.loads(raw), json.loads(statecli("schema", "lock").out))
    assert "\x1b" not in raw
    (tmp_path / "lock.json").write_text(raw, "utf-8")
    assert b"".join(lock_file.encode_lock(lock_file.read_lock(str(tmp_path / "lock.json")))).decode() == raw


def test_nothing_is_written_if_a_target_cannot_be_locked(tmp_path, statecli):
    """A lock without a target or a tensor would promise less than the user expects."""
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:300])
    result = statecli("lock", tmp_path / "a.pt", tmp_path / "b.pt", "-o", tmp_path / "lock.json")
    assert result.code == 2
    assert "b.pt" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "lock.json").exists()


def test_a_damaged_file_is_not_locked(tmp_path, statecli):
    """The zip contains checksums of the saved bytes: a lock of other bytes would approve the damage."""
    torch.save({"w": torch.full((100,), 7.0)}, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    position = raw.index(torch.full((100,), 7.0).numpy().tobytes())
    (tmp_path / "a.pt").write_bytes(raw[:position] + b"\1" + raw[position + 1 :])
    result = statecli("lock", tmp_path / "a.pt")
    assert (result.code, result.out) == (2, "")
    assert "checksum" in result.err


def test_lock_that_cannot_be_written_fails(tmp_path, statecli):
    """The command fails before it reads a target."""
    for path in (tmp_path, tmp_path / "none" / "lock.json"):
        result = statecli("lock", tmp_path / "missing.pt", "-o", path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "cannot be written" in result.err


def test_file_that_changes_while_it_is_read_is_not_locked(tmp_path):
    """A mix of old and new values is neither version."""
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    request = run.Request((str(tmp_path / "a.pt"),))
    targets = run.read_targets(request)
    os.utime(tmp_path / "a.pt", (1, 1))
    with pytest.raises(run.UnreadableError, match=r"a\.pt: changed while statecli read it"):
        run.build_lock(targets, request)


LINE = (
    '{"fqn": "w", "section": "model", "kind": null, "dtype": "float32", "shape": [1], '
    '"requires_grad": null, "digest": %s}'
)
HEAD = '{"schema": "statecli.lock/1", "digest": "%s", "targets": [{"target": null, "tensors": ['


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is an empty file"),
        ("[]", "not a JSON object"),
        ('{"schema": "statecli.lock/2"}', "statecli.lock/2"),
        ('{"schema": "statecli.inspect/1"}', "statecli.inspect/1"),
        ("{}", "the schema None"),
        (HEAD % "md5" + "]}]}", "md5"),
        (HEAD % "blake3" + LINE % "null" + "," + LINE % "null" + "]}]}", "model.w twice"),
        (HEAD % "blake3" + LINE % '"abc"' + "]}]}", "not a digest"),
        (HEAD % "blake3" + (LINE % "null").replace("[1]", "[-1]") + "]}]}", r"has shape \[-1\]"),
        (HEAD % "blake3" + (LINE % "null").replace('"w"', '"w", "fqn": "v"') + "]}]}", "twice"),
        (HEAD % "blake3" + (LINE % "null").replace("null", '"x"', 1) + "]}]}", "'x'"),
        (HEAD % "blake3" + (LINE % "null").replace('"w"', "1") + "]}]}", "fqn"),
        ('{"schema": "statecli.lock/1", "digest": "blake3", "targets": []}', "has no targets; run"),
        (HEAD % "blake3" + ']}, {"target": "a", "tensors": []}]}', "2 targets"),
        ("<<<<<<< ours\n{}\n", "conflict markers"),
        ("{\n<<<<<<< ours\n{}\n", "conflict markers"),
        ("{\n||||||| 0f3a\n{}\n", "conflict markers"),
        ("{\n=======\n{}\n", "conflict markers"),
        ("{\n>>>>>>> theirs\n{}\n", "conflict markers"),
        ('{"schema": "\\ud800"}', r"the schema '\\ud800'"),
        ("\0" * 100, "not valid JSON"),
    ],
)
def test_invalid_lock_file_is_a_one_line_error(tmp_path, statecli, text, message):
    """The command fails with status 2 before any target is read; the message names the file and the fault."""
    (tmp_path / "lock.json").write_text(text)
    result = statecli("audit", tmp_path / "missing.pt", "--lock", tmp_path / "lock.json")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "lock.json" in result.err
    assert re.search(message, result.err), result.err


def test_lock_of_names_that_are_not_utf8_can_be_read(tmp_path, statecli):
    """The names of a target and of a tensor that UTF-8 cannot encode are written to the lock as JSON escapes."""
    paths = [tmp_path / os.fsdecode(b"\xff.pt"), tmp_path / "a.pt"]
    for path in paths:
        torch.save({"w\ud800": torch.ones(2)}, path)
    lock = tmp_path / "statecli.lock.json"
    assert statecli("lock", *paths, "-o", lock).code == 0
    assert statecli("audit", *paths, "--lock", lock, "--select", "lock").code == 0
    torch.save({"w\ud800": torch.zeros(2)}, paths[0])
    assert statecli("audit", *paths, "--lock", lock, "--select", "lock").code == 1


def test_named_folder_without_checkpoint_is_not_left_out(tmp_path, statecli):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    result = statecli("lock", tmp_path / "a.pt", tmp_path / "empty")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"statecli: {tmp_path}/empty: contains no checkpoint, nothing to lock\n"


def test_missing_lock_file_is_a_one_line_error(tmp_path, statecli):
    """A folder, a pipe without a writer and an endless device fail in the same way."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "pipe", "/dev/zero"):
        result = statecli("audit", "x.pt", "--lock", path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def build_lightning_checkpoint(folder):
    """A Lightning checkpoint of a run in `folder`: a callback stores scores under the paths of their files."""
    score = torch.tensor(0.5)
    callback = {"best_model_score": score, "best_k_models": {f"{folder}/epoch=0.ckpt": score}}
    return {"epoch": 1, "state_dict": {"w": torch.ones(2)}, "callbacks": {"ModelCheckpoint{'monitor': 'vl'}": callback}}


def test_lock_does_not_depend_on_paths_in_callbacks(tmp_path):
    """The state of callbacks contains paths of the machine; it is bookkeeping, not weights, and alone an error."""
    torch.save(build_lightning_checkpoint("/here"), tmp_path / "a.ckpt")
    torch.save(build_lightning_checkpoint("/there"), tmp_path / "b.ckpt")
    locked = build_lock_bytes(tmp_path / "a.ckpt")
    assert locked == build_lock_bytes(tmp_path / "b.ckpt")
    assert list(map_tensors(locked)) == ["w"]
    with pytest.raises(NothingMatched, match="contains only the state of callbacks"):
        build_lock_bytes(f"{tmp_path / 'a.ckpt'}#callbacks")


def test_note_reports_tensors_of_callbacks_as_not_locked(statecli, tmp_path):
    """A note on stderr says so, and an audit does not report the callbacks' tensors as new."""
    torch.save(build_lightning_checkpoint("/here"), tmp_path / "a.ckpt")
    result = statecli("lock", tmp_path / "a.ckpt", "-o", tmp_path / "lock.json")
    assert result.code == 0
    assert "a.ckpt: 2 tensors of callbacks are not locked" in result.err
    assert statecli("audit", tmp_path / "a.ckpt", "--lock", tmp_path / "lock.json").code == 0


def test_locked_tensors_of_callbacks_are_checked(tmp_path):
    """Tensors of callbacks in an older lock are still checked."""
    torch.save(build_lightning_checkpoint("/here"), tmp_path / "a.ckpt")
    (tmp_path / "lock.json").write_bytes(build_lock_bytes(tmp_path / "a.ckpt"))
    old = json.loads((tmp_path / "lock.json").read_text())
    line = old["targets"][0]["tensors"][0]
    scores = line | {"fqn": "ModelCheckpoint{'monitor': 'vl'}['best_model_score']", "section": "callbacks"}
    old["targets"][0]["tensors"].insert(0, scores | {"shape": [], "digest": "0" * 64})
    (tmp_path / "lock.json").write_text(json.dumps(old))
    lock = lock_file.read_lock(str(tmp_path / "lock.json"))
    (target,) = audit(Request((str(tmp_path / "a.ckpt"),), lock=lock, select=("lock-mismatch",))).targets
    assert [(finding.rule, finding.section) for finding in target.findings] == [("lock-mismatch", "callbacks")]
