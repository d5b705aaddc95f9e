"""What travels to a worker: plain data by relative or absolute paths, refused where it would mean something else."""

from __future__ import annotations

import pickle

import pytest
import torch

from statecli import files, formats
from statecli.engines import parcel
from statecli.engines.parcel import do, pack, unpack, work
from statecli.errors import EngineError, MalformedError, UnreadableError
from statecli.values.stats import Task, stats, stats_batch


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Of a file that is named by its relative path."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.randn(10), "v": torch.ones(3)}, "a.pt")
    return tuple(Task(tensor, tensor.ranges) for tensor in formats.read("a.pt").tensors)


def sent(one):
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(one))


def test_a_worker_stands_in_another_folder(tasks, tmp_path, monkeypatch):
    """Relative paths mean those of the command, in what is read and in what is said of it."""
    expected = [stats(task.tensor) for task in tasks]
    packed = sent(pack(stats_batch, None, tasks))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert unpack(sent(do(sent(packed)))) == expected
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content.replace(torch.ones(3).numpy().tobytes(), b"\x13" * 12))
    good, damaged = unpack(sent(do(sent(packed))))
    assert good == expected[0]
    assert isinstance(damaged, MalformedError)
    assert str(damaged).startswith("a.pt: v: checksum wrong")
    assert damaged.place.path == "a.pt"


@pytest.mark.parametrize(("content", "said"), [(None, "is not there"), (b"12345", "has 5 bytes, and ")])
def test_a_file_that_the_worker_does_not_share(tasks, tmp_path, content, said):
    """It has none of that name, or another one: an error that says what workers need."""
    packed = pack(stats_batch, None, tasks)
    (tmp_path / "a.pt").unlink()
    if content is not None:
        (tmp_path / "a.pt").write_bytes(content)
    error = unpack(sent(do(sent(packed))))
    assert isinstance(error, UnreadableError)
    assert str(error).startswith(f"a.pt: {said}")
    assert "workers read files by the path that this command reads them by" in str(error)


@pytest.mark.parametrize("made", [("0.0.9", "C"), ("0.1.0", "abacus")])
def test_another_statecli_is_refused(tasks, made, monkeypatch):
    """Its fields may mean something else, its kernel rounds otherwise; not even the tasks are unpacked."""
    packed = pack(stats_batch, None, tasks)
    monkeypatch.setattr(parcel, "made_here", lambda: made)
    monkeypatch.setattr(parcel, "_unpacked", None)
    answer = do(sent(packed))
    monkeypatch.undo()
    with pytest.raises(EngineError, match=rf"it is statecli {made[0]} with its kernel in {made[1]}, this command is "):
        unpack(sent(answer))


def test_a_worker_does_what_the_table_says():
    """And nothing that a parcel names beside it; each entry is there."""
    import importlib

    nothing = pickle.dumps(("/", {}, None, pickle.dumps((None, ()))))
    assert unpack(work(parcel.made_here(), "stats_batch", nothing)) == []
    with pytest.raises(RuntimeError, match="KeyError"):
        unpack(work(parcel.made_here(), "system", nothing))
    for name, module in parcel.FUNCTIONS.items():
        assert getattr(importlib.import_module(module), name).__module__ == module


def test_a_bug_is_told_where_the_command_is(tasks):
    """It is no error of a tensor."""
    with pytest.raises(RuntimeError, match="AttributeError: 'str' object has no attribute"):
        unpack(do(pack(stats_batch, None, ("no task",))))


def test_what_is_shown_of_a_parcel_holds_no_secret(tasks, monkeypatch):
    """Engines log the repr of what failed; access to remote files travels with it, and is given to the worker."""
    given = []
    monkeypatch.setattr(files, "access", lambda: {"token": "s3cr3t"})
    monkeypatch.setattr(files, "accept", given.append)
    packed = pack(stats_batch, None, tasks)
    assert "s3cr3t" not in f"{packed!r} {packed} {[packed]}"
    assert "a.pt" not in repr(packed)
    unpack(do(sent(packed)))
    assert given == [{"token": "s3cr3t"}]
