"""Pickles that are not checkpoints are checked for the code that runs when they are loaded."""

from __future__ import annotations

import pickle

import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.targets.target_result import Status


@pytest.fixture
def hub(tmp_path):
    """Write a folder with a checkpoint and, next to the checkpoint, a bare pickle with the given name."""

    def write_pickle(raw, name="data.pkl"):
        torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
        (tmp_path / name).write_bytes(raw)
        return tmp_path

    return write_pickle


def of(folder, name, **options):
    return next(target for target in audit(Request((str(folder),), **options)).targets if target.target.endswith(name))


PLAIN = pickle.dumps({"a": [1.0], "b": "text"})
SYSTEM = b"cposix\nsystem\n(S'true'\ntR."


@pytest.mark.parametrize("name", ["data.pkl", "vocab.pickle", "cache"])
@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_in_a_folder_is_judged(hub, name, protocol):
    """The pickle is checked for code, and the checkpoint next to the pickle is audited."""
    folder = hub(pickle.dumps({"a": [1.0], "b": "text"}, protocol), name)
    result = of(folder, name)
    assert (result.status, result.format, result.tensors, result.findings) == (Status.AUDITED, "pickle", 0, ())
    assert of(folder, "model.pt").status is Status.AUDITED


def test_what_loading_it_would_run_is_a_finding(hub):
    """Only the rules about pickles ran."""
    result = of(hub(SYSTEM), "data.pkl")
    assert result.status is Status.AUDITED
    assert [finding.rule for finding in result.findings] == ["unsafe-global"]
    assert "unsafe-global" in result.ran
    assert "nan" in {skipped.rule for skipped in result.skipped}


def test_it_is_not_judged_without_a_rule_about_pickles(hub):
    """The pickle counts as not checked; a pickle named as a target fails."""
    folder = hub(PLAIN)
    change = of(folder, "data.pkl", select=("nan",))
    assert (change.status, [entry.why for entry in change.not_checked]) == (Status.SKIPPED, ["bare pickle"])
    (named,) = audit(Request((str(folder / "data.pkl"),), select=("nan",))).targets
    assert named.status is Status.FAILED


@pytest.mark.parametrize(("raw", "code"), [(PLAIN, 0), (pickle.dumps({"a": 1}, 0), 0), (SYSTEM, 1), (PLAIN[:-1], 1)])
def test_the_exit_status_of_one_that_is_named(raw, code, hub, statecli):
    """A clean pickle exits with status 0, a finding with status 1."""
    done = statecli("audit", hub(raw) / "data.pkl")
    assert done.code == code, done.out + done.err


@pytest.mark.parametrize("raw", [PLAIN, SYSTEM])
def test_one_that_is_called_a_checkpoint_has_failed(hub, raw):
    """A `.pt` file is expected to be a checkpoint, whatever its content."""
    assert of(hub(raw, "weights.pt"), "weights.pt").status is Status.FAILED


def test_a_folder_of_nothing_else_is_audited(tmp_path):
    """A note says that the target contains no tensors."""
    (tmp_path / "data.pkl").write_bytes(PLAIN)
    (target,) = audit(Request((str(tmp_path),))).targets
    assert target.status is Status.AUDITED
    assert [note.name for note in target.notes] == ["no-tensors"]


def test_one_that_nothing_could_be_compared_with_is_no_pass(hub, statecli):
    """--against and --lock compare only checkpoints."""
    folder = hub(PLAIN)
    done = statecli("audit", folder / "data.pkl", "--against", folder / "model.pt")
    assert done.code == 2
    assert "data.pkl is a pickle that is not a checkpoint" in done.err
    assert statecli("lock", folder / "model.pt", "-o", folder / "lock.json").code == 0
    assert statecli("audit", folder / "data.pkl", "--lock", folder / "lock.json").code == 2
    assert statecli("audit", folder / "data.pkl", folder / "model.pt", "--lock", folder / "lock.json").code == 0
