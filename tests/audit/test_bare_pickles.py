"""Pickles that are not checkpoints are checked for the code that runs when they are loaded."""

from __future__ import annotations

import pickle

import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.targets.target_result import TargetStatus


@pytest.fixture
def write_folder(tmp_path):
    """Write a folder with a checkpoint and, next to the checkpoint, a bare pickle with the given name."""

    def write_pickle(raw, name="data.pkl"):
        torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
        (tmp_path / name).write_bytes(raw)
        return tmp_path

    return write_pickle


def find_target(folder, name, **options):
    return next(target for target in audit(Request((str(folder),), **options)).targets if target.target.endswith(name))


PLAIN = pickle.dumps({"a": [1.0], "b": "text"})
SYSTEM = b"cposix\nsystem\n(S'true'\ntR."


@pytest.mark.parametrize("name", ["data.pkl", "vocab.pickle", "cache"])
@pytest.mark.parametrize("protocol", range(6))
def test_bare_pickle_in_a_folder_is_audited(write_folder, name, protocol):
    """The pickle is checked for code, and the checkpoint next to the pickle is audited."""
    folder = write_folder(pickle.dumps({"a": [1.0], "b": "text"}, protocol), name)
    result = find_target(folder, name)
    assert (result.status, result.format, result.tensors, result.findings) == (TargetStatus.AUDITED, "pickle", 0, ())
    assert find_target(folder, "model.pt").status is TargetStatus.AUDITED


def test_call_in_a_bare_pickle_is_a_finding(write_folder):
    """Only the rules about pickles ran."""
    result = find_target(write_folder(SYSTEM), "data.pkl")
    assert result.status is TargetStatus.AUDITED
    assert [finding.rule for finding in result.findings] == ["unsafe-global"]
    assert "unsafe-global" in result.ran
    assert "nan" in {skipped_rule.rule for skipped_rule in result.skipped}


def test_bare_pickle_is_not_audited_without_pickle_rules(write_folder):
    """The pickle counts as not checked; a pickle named as a target fails."""
    folder = write_folder(PLAIN)
    change = find_target(folder, "data.pkl", select=("nan",))
    assert (change.status, [entry.why for entry in change.not_checked]) == (TargetStatus.SKIPPED, ["bare pickle"])
    (target,) = audit(Request((str(folder / "data.pkl"),), select=("nan",))).targets
    assert target.status is TargetStatus.FAILED


@pytest.mark.parametrize(("raw", "code"), [(PLAIN, 0), (pickle.dumps({"a": 1}, 0), 0), (SYSTEM, 1), (PLAIN[:-1], 1)])
def test_named_bare_pickle_sets_the_exit_status(raw, code, write_folder, statecli):
    """A clean pickle exits with status 0, a finding with status 1."""
    result = statecli("audit", write_folder(raw) / "data.pkl")
    assert result.code == code, result.out + result.err


@pytest.mark.parametrize("raw", [PLAIN, SYSTEM])
def test_bare_pickle_named_like_a_checkpoint_fails(write_folder, raw):
    """A `.pt` file is expected to be a checkpoint, whatever its content."""
    assert find_target(write_folder(raw, "weights.pt"), "weights.pt").status is TargetStatus.FAILED


def test_folder_with_only_a_bare_pickle_is_audited(tmp_path):
    """A note says that the target contains no tensors."""
    (tmp_path / "data.pkl").write_bytes(PLAIN)
    (target,) = audit(Request((str(tmp_path),))).targets
    assert target.status is TargetStatus.AUDITED
    assert [note.name for note in target.notes] == ["no-tensors"]


def test_bare_pickle_that_cannot_be_compared_does_not_pass(write_folder, statecli):
    """--against and --lock compare only checkpoints."""
    folder = write_folder(PLAIN)
    result = statecli("audit", folder / "data.pkl", "--against", folder / "model.pt")
    assert result.code == 2
    assert "data.pkl is a pickle that is not a checkpoint" in result.err
    assert statecli("lock", folder / "model.pt", "-o", folder / "lock.json").code == 0
    assert statecli("audit", folder / "data.pkl", "--lock", folder / "lock.json").code == 2
    assert statecli("audit", folder / "data.pkl", folder / "model.pt", "--lock", folder / "lock.json").code == 0
