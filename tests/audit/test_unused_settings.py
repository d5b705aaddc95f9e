"""Settings and options that no rule could apply are reported once, also without -v."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit import unused_settings
from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import lock_file, run as lock
from statecli.core.errors import UsageError
from statecli.requests import audit as audit_requests
from statecli.requests.options import AuditOptions
from statecli.rules.policy_config import Policy

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"


@pytest.fixture(autouse=True)
def _two_checkpoints(in_tmp_path):
    """A folder with two checkpoints; only `a.pt` records devices."""
    torch.save({"w": torch.ones(2)}, "a.pt")
    save_file({"w": torch.ones(2)}, "b.safetensors")


def list_notes(*targets, **options):
    request = Request(targets, **options)
    return [note.message for note in unused_settings.build_notes(audit(request), request)]


def test_policy_rule_that_did_not_run_is_reported():
    """The note names the key, the target and the reason; a target on which the rule ran is not named."""
    (note,) = list_notes("a.pt", "b.safetensors", policy=Policy(device=("cpu",)))
    assert (
        note
        == "policy.device: accelerator-device did not run on b.safetensors: the file format does not record devices"
    )


def test_targets_with_the_same_reason_share_a_note():
    """Neither target had its values read; with values, the rule gives no note."""
    (note,) = list_notes("a.pt", "b.safetensors", policy=Policy(dtype=("float32",)), values=False)
    assert note.startswith(
        "policy.dtype: overflows-dtype did not run on a.pt, b.safetensors: values not read, because of --no-values"
    )
    assert not list_notes("a.pt", policy=Policy(dtype=("float32",)), values=True)


def test_rules_that_no_policy_needs_are_not_reported():
    """Without a policy, rules that cannot run are only counted, and -v gives the reasons."""
    assert not list_notes("a.pt", "b.safetensors")


def test_reference_class_gives_no_note():
    """A class used only as reference gives no note; a class that is a target does."""
    model = f"{SAMPLES / 'net_fixed.py'}:Net"
    policy = Policy(require_metadata=("license",))
    assert not list_notes("b.safetensors", model=model, policy=policy)
    assert "a class has no metadata" in list_notes(model, policy=policy)[0]


@pytest.mark.parametrize("key", ["must-change", "must-not-change"])
def test_change_policy_needs_a_reference(tmp_path, key):
    """The reference is configured or given with --against; without a reference, nothing could be compared."""
    (tmp_path / "statecli.toml").write_text(f'policy = {{ {key} = "*" }}')
    with pytest.raises(UsageError, match=rf"statecli\.toml: policy\.{key}: .*policy\.reference, or give --against"):
        audit_requests.build_request(AuditOptions(targets=("a.pt",)))
    assert audit_requests.build_request(AuditOptions(targets=("a.pt",), against="b.safetensors"))
    (tmp_path / "statecli.toml").write_text(f'policy = {{ {key} = "*", reference = "a.pt" }}')
    assert audit_requests.build_request(AuditOptions(targets=("a.pt",)))


def test_allow_empty_accepts_a_glob_without_matches(statecli):
    """Without `--allow-empty`, the same glob is an error."""
    result = statecli("audit", "zz*.pt", "--allow-empty")
    assert (result.code, result.err) == (0, "")
    assert "zz*.pt" in result.out
    assert statecli("audit", "zz*.pt").code == 2


def test_note_on_stderr_is_also_in_the_json(statecli):
    """`-q` removes the note from stderr only, because a program reads only the document."""
    Path("statecli.toml").write_text('policy = { device = "cpu" }')
    result = statecli("audit", "b.safetensors", "-f", "json")
    (note,) = result.json["notes"]
    assert (note["rule"], note["severity"], note["target"]) == ("policy-not-judged", "note", "b.safetensors")
    assert result.err == f"note[policy-not-judged]: {note['message']}\n"
    assert (result.code, statecli("audit", "b.safetensors").err) == (0, result.err)
    quiet_result = statecli("audit", "b.safetensors", "-q", "-f", "json")
    assert (quiet_result.err, quiet_result.json["notes"]) == ("", [note])


def test_unneeded_baseline_entry_is_in_the_json(statecli):
    """The note names the entry's target, also if its file was deleted."""
    torch.save({"w": torch.ones(2), "W": torch.ones(2)}, "a.pt")
    torch.save({"w": torch.ones(2), "W": torch.ones(2)}, "gone.pt")
    statecli("audit", ".", "--write-baseline", "known.json", "--reason", "for a test")
    torch.save({"w": torch.ones(2)}, "a.pt")
    Path("gone.pt").unlink()
    result = statecli("audit", ".", "--baseline", "known.json", "-f", "json")
    assert [(note["rule"], note["target"]) for note in result.json["notes"]] == [
        ("baseline-fixed", "a.pt"),
        ("baseline-fixed", "gone.pt"),
    ]


def test_ignore_glob_without_a_matching_file_is_reported(statecli):
    """A misspelt glob would never accept anything; a glob for existing files outside this run is not reported."""
    ignored = '[per-target-ignore."{}"]\nrules = "nan"\nreason = "why"\n'
    Path("statecli.toml").write_text("".join(map(ignored.format, ("b.*", "a.pt", "no/*.pt", "./b.safetensors"))))
    result = statecli("audit", "a.pt", "-f", "json")
    message = "per-target-ignore.no/*.pt: has no effect, because no target or file matches the pattern"
    assert (result.code, [note["message"] for note in result.json["notes"]]) == (0, [message])
    assert result.err == f"note[ignored-nothing]: {message}\n"


@pytest.mark.parametrize("folder", [".", "sub"])
def test_configuration_cannot_name_a_model_class(statecli, folder):
    """A class in `policy.reference` would run code that arrives with a pull request."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "evil.py").write_text("open('ran', 'w')\nimport torch\nclass Net(torch.nn.Module): pass\n")
    Path(folder, "own.toml").write_text('policy.reference = "evil.py:Net"\n')
    result = statecli("audit", "a.pt", "--config", f"{folder}/own.toml")
    assert (result.code, result.out) == (2, "")
    assert "policy.reference: is a model class, and a configuration must not run code; give --against" in result.err
    assert not Path("ran").exists()


def build_lock(target):
    """Return a lock of a single target."""
    request = lock.Request((target,))
    lines = b"".join(lock_file.encode_lock(lock.build_lock(lock.read_targets(request), request)))
    Path("one.lock.json").write_bytes(lines)
    return lock_file.read_lock("one.lock.json")


def test_several_targets_that_differ_from_a_lock_of_one_target_are_noted():
    """There is no note for a single target, or for copies of the locked target in any format."""
    locked = build_lock("a.pt")
    torch.save({"w": torch.zeros(2)}, "c.pt")
    assert not list_notes("a.pt", "b.safetensors", lock=locked)
    assert not list_notes("c.pt", lock=locked)
    assert list_notes("a.pt", "b.safetensors", "c.pt", lock=locked) == [
        "the lock was created from one target, and 3 targets were compared with this lock; audit only the copies of "
        "the locked target, or lock the folder"
    ]
