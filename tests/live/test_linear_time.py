"""The work for a live model grows linearly with its size."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import statecli  # noqa: E402

from ..forked_python import run_python  # noqa: E402

#: Number of tied tensors: more than a row lists, so that each list of tied tensors has its full length.
TIED = 70


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x + self.w


def _build_net(**attributes: Any) -> nn.Module:
    net = _Net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def _build_registered(register: str, tensors: list[Any]) -> nn.Module:
    net = _Net()
    for number, tensor in enumerate(tensors):
        getattr(net, register)(f"t{number}", tensor)
    return net


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "list": lambda n: _build_net(ts=[torch.zeros(2) for _ in range(n)]),
    "dict": lambda n: _build_net(ts={f"k.{i}": torch.zeros(2) for i in range(n)}),
    "modules": lambda n: _build_net(ms=nn.ModuleList(nn.Linear(1, 1) for _ in range(n))),
    "unregistered modules": lambda n: _build_net(ms=[nn.Linear(1, 1) for _ in range(n)]),
    "aliases": lambda n: _build_net(ts=[torch.zeros(2)] * n),
    "views": lambda n: _build_net(ts=list(torch.zeros(n, 2))),
    "views of a row": lambda n: (lambda whole: _build_net(whole=whole, ts=list(whole)))(torch.zeros(n, 2)),
    "buffers in one storage": lambda n: _build_registered("register_buffer", list(torch.zeros(n, 2))),
    "one buffer under many names": lambda n: _build_registered("register_buffer", [torch.zeros(2)] * n),
    "one parameter under many names": lambda n: _build_registered(
        "register_parameter", [nn.Parameter(torch.zeros(2))] * n
    ),
    "attributes": lambda n: _build_net(**{f"a{i}": torch.zeros(2) for i in range(n)}),
}


def _count_steps(action: Callable[[], object]) -> int:
    """Count the lines of statecli and of `copy` that `action` runs, and the calls of all other code."""
    count = 0

    def in_frame(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return in_frame

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        path = frame.f_code.co_filename
        return in_frame if f"{os.sep}statecli{os.sep}" in path or path.endswith(f"{os.sep}copy.py") else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def _measure_growth(build_model: Callable[[int], nn.Module], action: Callable[[nn.Module], object], size: int) -> float:
    """Return the steps of the second doubling divided by the steps of the first: 2 if each tensor costs the same."""
    action(build_model(4))  # run the code that runs once in a process
    models = [build_model(n) for n in (size, 2 * size, 4 * size)]
    small, middle, large = (_count_steps(functools.partial(action, model)) for model in models)
    return (large - middle) / (middle - small)


@pytest.mark.parametrize("model", MODELS)
def test_inspect_takes_linear_steps(model):
    """Twice as many tensors or modules take twice as many steps."""
    assert _measure_growth(MODELS[model], statecli.inspect, 20 if "modules" in model else TIED) < 2.1


@pytest.mark.parametrize(
    ("check", "model", "size"),
    [
        ("move", "list", 20),
        ("cast", "one buffer under many names", TIED),
        ("save", "one parameter under many names", TIED),
        ("copy", "list", 20),
        ("step", "unregistered modules", 10),
    ],
)
def test_each_proof_takes_linear_steps(check, model, size):
    """A proof costs the same for each tensor, and for each finding."""
    verify = lambda net: statecli.verify(net, inputs=torch.zeros(2), checks=check)  # noqa: E731
    assert _measure_growth(MODELS[model], verify, size) < 2.1


def test_a_report_of_findings_takes_linear_steps():
    """Each oddity that a finding reports is left out of the notes without a search of all findings."""
    from statecli.report import RowView, inspect

    def report(net: nn.Module) -> object:
        return inspect.build_inspect_report(statecli.inspect(net, to="meta"), RowView())

    assert _measure_growth(MODELS["one buffer under many names"], report, TIED) < 2.1


HUGE = """
import resource, torch
from torch import nn
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
torch.set_num_threads(1)
import statecli
net = nn.Linear(1, 1)
net.ts = [torch.zeros(2) for _ in range(4_000)]
net.us = [torch.zeros(2)] * 4_000
print(len(statecli.inspect(net).state.tensors))
"""


def test_4000_tensors_in_a_list_take_less_than_20_seconds():
    """4,000 tensors in a list must take less than 20 s; with quadratic time they took 45 s."""
    result = run_python(["-c", HUGE], timeout=120, check=True)
    assert int(result.stdout) == 4_003


def test_search_of_10_000_nested_modules_is_cut_and_reported():
    """The names of deeper modules would take quadratic space; torch itself cannot save or move such a model."""
    inner = nn.Sequential(nn.Linear(1, 1))
    for _ in range(10_000):
        inner = nn.Sequential(inner)
    state = statecli.inspect(_build_net(top=inner)).state
    assert [row.fqn for row in state.tensors] == ["w"]
    (note,) = [oddity for oddity in state.oddities if oddity.name == "not-searched"]
    assert "nests more than 1,000 modules" in note.message


def test_repeated_names_are_numbered_in_linear_steps():
    """Each tensor with a repeated name gets the next number and keeps its number."""
    from statecli.live.walk import WalkResult

    tensors = [torch.zeros(1) for _ in range(800)]
    walk_result = WalkResult()
    names = [walk_result.make_unique_name("a.b", tensor) for tensor in tensors]
    assert names == ["a.b", *(f"a.b ({n})" for n in range(2, 801))]
    assert walk_result.make_unique_name("a.b", tensors[5]) == "a.b (6)"
    steps = [
        _count_steps(lambda n=n, result=result: [result.make_unique_name("a", tensor) for tensor in tensors[:n]])
        for n, result in ((200, WalkResult()), (400, WalkResult()))
    ]
    assert steps[1] < 2.1 * steps[0]
