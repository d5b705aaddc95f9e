"""Each instance is built with the same process-wide settings of torch, and runs under the settings that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from statecli.live import torch_settings
from statecli.live.build import build
from statecli.live.built_model import BuiltModel
from statecli.live.spec import parse_spec

#: Call in a constructor -> function that returns the setting.
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
    """Return a function that builds a model whose constructor ends with a given call."""

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
    """forward may rely on the settings of its constructor; the next instance starts from the original settings."""
    start = SET[call]()
    built_model = built(call)
    assert SET[call]() == start
    with built_model.user_code("calling it"):
        inside = SET[call]()
    assert inside != start
    assert SET[call]() == start
    built_model.build_again()
    assert SET[call]() == start


@pytest.mark.parametrize("values", [False, True])
def test_each_instance_starts_from_the_same_settings(built, values):
    """The second instance has float32 parameters like the first, although the first set another default dtype."""
    actual = built("torch.set_default_dtype(torch.float64)")
    assert actual.build_again(values=values).weight.dtype is actual.module.weight.dtype is torch.float32


def test_what_a_call_sets_is_gone_with_the_next(built):
    """Each call of forward starts from the settings of the constructor."""
    built_model = built("torch.set_default_dtype(torch.float64)")
    with built_model.user_code("calling it"):
        torch.set_default_dtype(torch.float16)
    with built_model.user_code("calling it"):
        assert torch.get_default_dtype() is torch.float64


def test_what_the_file_sets_at_import_holds_for_all(write):
    """The setting applies before any instance is built, for building and for calls."""
    source = """
    torch.set_default_dtype(torch.float64)
    Net = lambda: nn.Linear(3, 3)
    """
    actual_built = build(parse_spec(write(source)))
    assert actual_built.module.weight.dtype is actual_built.build_again().weight.dtype is torch.float64
    with actual_built.user_code("calling it"):
        assert torch.get_default_dtype() is torch.float64


def test_a_second_attempt_at_building_starts_anew(write):
    """A constructor that fails without its initial values is run again with the original settings."""
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
    """The proofs enable gradients where they need a graph."""
    built_model = built("torch.set_grad_enabled(False)")
    assert torch.is_grad_enabled()
    built_model.build_again()
    assert torch.is_grad_enabled()
