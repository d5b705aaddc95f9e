"""Pickles that hold no checkpoint, in folders that do: scanned, and no failure of the walk."""

from __future__ import annotations

import pickle

import pytest
import torch

from statecli.auditing.result import Status
from statecli.auditing.run import Request, audit


@pytest.fixture
def hub(tmp_path):
    """A folder with a checkpoint, and a bare pickle beside it of that name."""

    def made(raw, name="data.pkl"):
        torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
        (tmp_path / name).write_bytes(raw)
        return tmp_path

    return made


def of(folder, name, **options):
    return next(one for one in audit(Request((str(folder),), **options)).targets if one.target.endswith(name))


PLAIN = pickle.dumps({"a": [1.0], "b": "text"})
SYSTEM = b"cposix\nsystem\n(S'true'\ntR."


@pytest.mark.parametrize("name", ["data.pkl", "vocab.pickle", "cache"])
def test_a_bare_pickle_in_a_folder_is_skipped(hub, name):
    """And said to be what it is; the checkpoint beside it is audited."""
    folder = hub(PLAIN, name)
    one = of(folder, name)
    assert one.status is Status.SKIPPED
    assert "is a bare pickle" in one.reason
    assert one.findings == ()
    assert of(folder, "model.pt").status is Status.AUDITED


def test_what_loading_it_would_run_is_judged_all_the_same(hub):
    """No skip hides a call."""
    one = of(hub(SYSTEM), "data.pkl")
    assert one.status is Status.SKIPPED
    assert [finding.rule for finding in one.findings] == ["unsafe-global"]
    assert "unsafe-global" in one.ran


def test_one_that_is_named_has_failed(hub):
    """Whoever names a file wants it audited."""
    path = hub(PLAIN) / "data.pkl"
    (one,) = audit(Request((str(path),))).targets
    assert one.status is Status.FAILED


def test_one_that_is_called_a_checkpoint_has_failed(hub):
    """A `.pt` is meant to be one, whatever it is."""
    assert of(hub(PLAIN, "weights.pt"), "weights.pt").status is Status.FAILED


def test_a_folder_of_nothing_else_audits_nothing(tmp_path):
    """Which is no pass."""
    (tmp_path / "data.pkl").write_bytes(PLAIN)
    found = audit(Request((str(tmp_path),)))
    assert [one.status for one in found.targets] == [Status.SKIPPED]
    assert found.count(Status.AUDITED) == 0
