"""Comparisons and counts do not depend on the calling thread's mode for denormal numbers."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch

import statecli as api
from statecli.commands.audit.run import Request as AuditRequest, audit
from statecli.core.denormals import flushes_denormals, keep_denormals
from statecli.core.errors import StateError
from statecli.values import audit_facts, compiled_kernel, facts_kernel
from statecli.values.stats import compute_live_stats
from statecli.workers.executors import use_executor

from .forked_python import run_python


@pytest.fixture
def flush_mode():
    """Set the mode in which 2e-39 is zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(params=["C", "numpy"])
def kernel(request, monkeypatch):
    """Both ways of adding up."""
    if request.param == "numpy":
        monkeypatch.setattr(compiled_kernel, "native", None)
        monkeypatch.setattr(facts_kernel, "_native", None)
    elif compiled_kernel.native is None:
        pytest.skip("no compiled kernel")


#: By dtype two denormal numbers.
DENORMALS = {
    "float64": (2e-310, 3e-310),
    "float32": (2e-39, 3e-39),
    "bfloat16": (2e-39, 3e-39),
    "float16": (1e-7, 2e-7),
}


@pytest.fixture
def files(request, tmp_path):
    """Two files whose only tensor differs in a denormal number, of float32 unless a test has other dtypes."""
    dtype = getattr(request, "param", "float32")
    for name, number in zip("ab", DENORMALS[dtype], strict=True):
        tensor = torch.full((9,), number, dtype=torch.float64).to(getattr(torch, dtype))
        torch.save({"w": tensor, "empty": torch.zeros(1), "note": number}, tmp_path / f"{name}.pt")
    return str(tmp_path / "a.pt"), str(tmp_path / "b.pt")


each_dtype = pytest.mark.parametrize("files", DENORMALS, indirect=True)


@each_dtype
def test_a_diff_is_the_same_in_either_mode(files, kernel):
    """Changed elements, distances and settings."""
    expected = api.diff(*files)
    assert torch.set_flush_denormal(True)
    try:
        diff = api.diff(*files)
    finally:
        torch.set_flush_denormal(False)
    assert diff == expected
    assert [change.values.changed for change in diff.changes if change.values] == [9]
    assert [change.key for change in diff.scalars] == ["note"]


@each_dtype
def test_statistics_are_the_same_in_either_mode(files, kernel):
    """Statistics of a file and of a live tensor, and the facts for the rules, are equal in both modes."""

    tensor = torch.full((9,), 2e-39)

    def compute_all():
        state = api.inspect(files[0], stats=True).state
        live = compute_live_stats(tensor)
        return [row.stats for row in state.tensors], live, audit_facts.read_facts(state.tensors)

    expected = compute_all()
    assert torch.set_flush_denormal(True)
    try:
        actual = compute_all()
    finally:
        torch.set_flush_denormal(False)
    assert actual == expected
    assert actual[0][0].zeros == 0
    assert actual[0][0].max > 0


def test_an_audit_is_the_same_in_either_mode(tmp_path):
    """The findings about denormal numbers among them."""
    values = torch.full((5000,), 2e-39)
    torch.save({"w": torch.cat([values, torch.ones(100)])}, tmp_path / "a.pt")
    request = AuditRequest((str(tmp_path / "a.pt"),), values=True)
    expected = audit(request)
    assert torch.set_flush_denormal(True)
    try:
        assert audit(request) == expected
    finally:
        torch.set_flush_denormal(False)


def test_threads_compute_with_denormals(files, flush_mode, monkeypatch):
    """A thread inherits the mode of its starting thread; a worker of an engine has a mode of its own."""
    with use_executor("threads:2"):
        assert [change.values.changed for change in api.diff(*files).changes if change.values] == [9]


def test_the_callers_mode_is_restored(files, flush_mode):
    """After the call 2e-39 is zero again, as it was for the caller."""
    api.diff(*files)
    assert flushes_denormals()
    with keep_denormals():
        assert not flushes_denormals()
    assert flushes_denormals()
    with pytest.raises(StateError):
        api.diff(files[0], "missing.pt")
    assert flushes_denormals()


def test_a_denormal_number_is_written_as_it_is(tmp_path, flush_mode):
    """The setting 2e-310 is read and printed, although Python itself prints 0.0 in this mode."""
    torch.save({"w": torch.ones(1), "note": 2e-310}, tmp_path / "a.pt")
    settings = api.inspect(str(tmp_path / "a.pt")).state.metadata.values
    with keep_denormals():
        assert settings["note"] == 2e-310


def test_a_mode_that_cannot_be_changed_is_an_error(files, flush_mode, monkeypatch):
    """No answer is better than a wrong answer."""

    class Deaf:
        def fegetenv(self, *_):
            return 0

        fesetenv = fegetenv

    monkeypatch.setattr(ctypes, "CDLL", lambda *_: Deaf())
    with pytest.raises(StateError, match=r"call torch\.set_flush_denormal"):
        api.diff(*files)


def test_a_model_class_may_change_the_mode(tmp_path, statecli):
    """Code of the user may set the mode while statecli runs; the numbers do not change."""
    (tmp_path / "net.py").write_text(
        "import torch\ntorch.set_flush_denormal(True)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.tensor([1.0]))\n        self.w.data.view(torch.int32)[0] = 1427253\n"
    )
    ran = run_python(["-m", "statecli", "inspect", f"{tmp_path / 'net.py'}:Net", "--stats", "-f", "json"])
    assert json.loads(ran.stdout)["tensors"][0]["stats"]["max"] == pytest.approx(2e-39, rel=1e-5)
