"""torch's settings of the process: each instance is built from the same, and its code runs under what it set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from statecli.live import torch_settings
from statecli.live.build import build
from statecli.live.built_model import BuiltModel
from statecli.live.spec import parse_spec

#: What a constructor calls, and what shows it.
SET = {
    "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
    'torch.set_default_device("meta")': lambda: torch.empty(0).device,
    "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled,
    "torch.set_num_threads(torch.get_num_threads() + 1)": torch.get_num_threads,
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with torch_settings.keep_settings():
        yield


@pytest.fixture
def built(write):
    """A model whose constructor ends with this call."""

    def build_one(call: str) -> BuiltModel:
        source = f"""
        class Net(nn.Linear):
            def __init__(self):
                super().__init__(3, 3)
                {call}
        """
        spec = parse_spec(write(source))
        assert spec is not None
        return build(spec)

    return build_one


@pytest.mark.parametrize("call", SET)
def test_what_a_constructor_sets_holds_for_its_own_code_alone(built, call):
    """Its forward may rely on it; the next instance starts from where the first one did."""
    start = SET[call]()
    found = built(call)
    assert SET[call]() == start
    with found.user_code("calling it"):
        inside = SET[call]()
    assert inside != start
    assert SET[call]() == start
    found.build_again()
    assert SET[call]() == start


@pytest.mark.parametrize("values", [False, True])
def test_each_instance_starts_from_the_same_settings(built, values):
    """The second one's parameters are float32 as the first one's, though that ended with another default dtype."""
    actual = built("torch.set_default_dtype(torch.float64)")
    assert actual.build_again(values=values).weight.dtype is actual.module.weight.dtype is torch.float32


def test_what_a_call_sets_is_gone_with_the_next(built):
    """Forward is called as the constructor left the settings, each time."""
    found = built("torch.set_default_dtype(torch.float64)")
    with found.user_code("calling it"):
        torch.set_default_dtype(torch.float16)
    with found.user_code("calling it"):
        assert torch.get_default_dtype() is torch.float64


def test_what_the_file_sets_at_import_holds_for_all(write):
    """It is in force before any instance is built, for the building and for the calls."""
    source = """
    torch.set_default_dtype(torch.float64)
    Net = lambda: nn.Linear(3, 3)
    """
    actual_built = build(parse_spec(write(source)))
    assert actual_built.module.weight.dtype is actual_built.build_again().weight.dtype is torch.float64
    with actual_built.user_code("calling it"):
        assert torch.get_default_dtype() is torch.float64


def test_a_second_attempt_at_building_starts_anew(write):
    """A constructor that fails for want of its initial values is run again, not from where it failed."""
    source = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Linear(2, 2)
            torch.set_default_dtype(torch.float64)
            self.fc = nn.Linear(1000, 1000)
            assert self.fc.weight.any()
    """
    assert build(parse_spec(write(source))).module.small.weight.dtype is torch.float32


def test_a_constructor_cannot_turn_gradients_off_for_others(built):
    """The proofs say themselves when they want a graph."""
    found = built("torch.set_grad_enabled(False)")
    assert torch.is_grad_enabled()
    found.build_again()
    assert torch.is_grad_enabled()
