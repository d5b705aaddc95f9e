"""All changes to a live model during the proofs of its copies are undone, and an unchanged model is not written to."""

from __future__ import annotations

import random

import numpy
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import statecli  # noqa: E402
from statecli.commands.verify import live_model  # noqa: E402


def build_model():
    sequential = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sequential[0].weight.grad = torch.ones(4, 4)
    return sequential


def describe_tensors(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return [
        (
            name,
            id(tensor),
            tensor.dtype,
            str(tensor.device),
            tensor.requires_grad,
            id(tensor.grad),
            None if tensor.is_meta else tensor.tolist(),
        )
        for name, tensor in named
    ]


CHANGES = {
    "moved": lambda net: net.to("meta"),
    "cast": lambda net: net.double(),
    "halved twice": lambda net: net.half().bfloat16(),
    "run in train mode": lambda net: net(torch.randn(6, 4)),
    "trained": lambda net: net(torch.randn(6, 4)).sum().backward(),
    "gradients dropped": lambda net: net.zero_grad(),
    "frozen": lambda net: net.requires_grad_(False),
    "in eval mode": lambda net: net.eval(),
    "a parameter replaced": lambda net: setattr(net[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "a buffer taken away": lambda net: delattr(net[1], "running_mean"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_the_model_is_undone(change):
    """The model has the same objects with the same values, devices, dtypes, gradients and modes."""
    module = build_model()
    before = describe_tensors(module), [part.training for part in module.modules()]
    with live_model.keep_unchanged(module):
        CHANGES[change](module)
        assert (describe_tensors(module), [part.training for part in module.modules()]) != before
    assert (describe_tensors(module), [part.training for part in module.modules()]) == before


def test_change_is_undone_after_an_interrupt():
    """Changes are also undone after Ctrl-C."""
    module = build_model()
    before = describe_tensors(module)

    def interrupt_change():
        with live_model.keep_unchanged(module):
            module.double()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_change()
    assert describe_tensors(module) == before


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda: torch.manual_seed(3), lambda: torch.get_rng_state().tolist()),
        (lambda: random.seed(3), random.getstate),
        (lambda: numpy.random.seed(3), lambda: [str(part) for part in numpy.random.get_state()]),
        (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
        (lambda: torch.set_default_device("meta"), torch.get_default_device),
        (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
        (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    ],
)
def test_process_settings_are_restored(change, read):
    """Random generators, torch's defaults and the grad mode are restored."""
    before = read()
    with live_model.keep_unchanged():
        change()
        assert read() != before
    assert read() == before


def test_unchanged_model_is_not_written_to():
    """torch's count of writes to each tensor is unchanged."""
    module = build_model()
    counts = [tensor._version for tensor in (*module.parameters(), *module.buffers())]
    with live_model.keep_unchanged(module):
        pass
    assert [tensor._version for tensor in (*module.parameters(), *module.buffers())] == counts


@pytest.mark.filterwarnings("ignore")
def test_frozen_script_can_be_verified():
    """Freezing removes `training` and makes all tensors constants: the checks are skipped or inconclusive."""
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
    assert not hasattr(frozen, "training")
    verification = statecli.verify(frozen, inputs="1x2")
    assert {check.verdict.value for check in verification.checks} <= {"skipped", "inconclusive"}
    assert [note.name for note in verification.notes] == ["script-module", "no-tensors"]
