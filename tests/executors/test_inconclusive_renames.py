"""A search for renames that loses work: a tensor that was not compared is not reported as renamed, added or removed."""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import statecli as package
from statecli.core.errors import UnreadableError
from statecli.values import fingerprints

FAILED_TASK_MESSAGE = "executor='FailingExecutor': a worker stopped during a task (OSError)"


@pytest.fixture(autouse=True)
def _files(in_tmp_path, one_task_per_batch):
    """`x.w` is renamed to `y.w`, and `x.v` to `y.v`; `gone` is removed and `new` is added. Only `gone` and `new` have
    other shapes.
    """
    torch.manual_seed(0)
    w, v, k = torch.randn(3, 50).unbind()
    save_file({"x.w": w.clone(), "x.v": v.clone(), "k": k.clone(), "gone": torch.ones(7)}, "a")
    save_file({"y.w": w.clone(), "y.v": v.clone(), "k": k.clone(), "new": torch.zeros(8)}, "b")


class FailingExecutor(Executor):
    """Lose all tasks of a function, or only the tasks for whose number `is_lost` is true."""

    def __init__(self, function, is_lost=lambda n: True):
        self.function, self.is_lost, self.count = function, is_lost, 0

    def submit(self, do, sent):
        """Run the task at once, or lose the task."""
        future = Future()
        matches = self.function in bytes(sent.getbuffer()).decode("latin-1")
        self.count += matches
        if matches and self.is_lost(self.count - 1):
            future.set_exception(OSError())
        else:
            future.set_result(do(sent))
        return future


def list_statuses(diff):
    return {change.fqn: change.status.value for change in diff.changes if change.status.value != "identical"}


@pytest.mark.parametrize("function", ["fingerprint_batch", "run_batch"])
def test_failed_search_makes_all_possible_renames_broken(function):
    """The fingerprints or their confirmation are lost: each possibly renamed tensor is broken, and the others are
    reported.
    """
    diff = package.diff("a", "b", executor=FailingExecutor(function))
    assert {tensor.fqn for tensor in diff.broken} - {"k"} == {"x.w", "x.v", "y.w", "y.v"}
    assert {tensor.message for tensor in diff.broken if tensor.fqn != "k"} == {FAILED_TASK_MESSAGE}
    assert list_statuses(diff) == {"gone": "removed", "new": "added"}


def test_failed_fingerprint_breaks_only_its_possible_rename():
    """A certain rename is reported; the tensor with the lost work and its possible partner are broken."""
    for failed_number in range(4):
        diff = package.diff("a", "b", executor=FailingExecutor("fingerprint_batch", lambda n: n == failed_number))  # noqa: B023
        (renamed,) = {"y.w", "y.v"} & list_statuses(diff).keys()
        assert list_statuses(diff) == {renamed: "renamed", "gone": "removed", "new": "added"}
        other = {"y.w": "v", "y.v": "w"}[renamed]
        assert {tensor.fqn for tensor in diff.broken} == {f"x.{other}", f"y.{other}"}
        assert {finding.message for finding in diff.broken} == {FAILED_TASK_MESSAGE}


def test_command_line_reports_only_certain_changes(statecli, monkeypatch):
    """Status 2 and a single line; the document reports no possibly renamed tensor as added or removed."""
    monkeypatch.setattr(fingerprints, "fingerprint_batch", _fail_fetches)
    result = statecli("diff", "a", "b", "-f", "json")
    assert (result.code, result.err) == (2, "statecli: https://h/m.pt: no bytes came\n")
    assert {change["fqn"] for change in result.json["changes"] if change["status"] != "identical"} == {"gone", "new"}


def _fail_fetches(_, works):
    return [UnreadableError("https://h/m.pt: no bytes came")] * len(works)


def test_tensor_without_a_fingerprint_is_not_an_error(statecli):
    """Tensors with endlessly overlapping windows have no fingerprint: they are added and removed without an error."""
    for name in ("a", "b"):
        torch.save({f"{name}.w": torch.ones(1).expand(2**62), "k": torch.ones(3)}, f"{name}.pt")
    result = statecli("diff", "a.pt", "b.pt", "-f", "json")
    assert (result.code, result.err) == (1, "")


def test_merge_reports_the_failure_of_a_part(statecli, monkeypatch):
    """If a part contains the failure, the merge exits with status 2 and reports the same line."""
    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "fingerprint_batch", _fail_fetches)
        _fail_fetches.__name__ = "fingerprint_batch"
        for n in (1, 2):
            statecli("diff", "a", "b", "--shard", f"{n}/2", "-o", f"part{n}")
    result = statecli("merge", "part1", "part2", "-f", "json")
    assert result.code == 2
    assert result.err == "statecli: https://h/m.pt: no bytes came\n"
    assert {change["fqn"] for change in result.json["changes"] if change["status"] != "identical"} == {"gone", "new"}


def test_file_missing_during_the_search_is_named(statecli):
    """The file is missing when its values are read, although its header was read: the error names the file, and the
    document names each tensor.
    """
    real = fingerprints.compute_fingerprints

    def read_without_file(rows, **options):
        os.rename("b", "c")
        try:
            return real(rows, **options)
        finally:
            os.rename("c", "b")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "compute_fingerprints", read_without_file)
        result = statecli("diff", str(Path("a").absolute()), "b", "-f", "json", "--jobs", "1")
    assert result.code == 2
    assert "b: cannot be opened: no such file or directory" in result.err
    unreadable_names = {row["fqn"] for row in result.json["broken"] if row["message"].startswith("b: cannot be opened")}
    assert unreadable_names == {"x.w", "x.v", "y.w", "y.v"}
