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
SETTINGS = {
    "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
    'torch.set_default_device("meta")': lambda: torch.empty(0).device,
    "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled,
    "torch.set_num_threads(torch.get_num_threads() + 1)": torch.get_num_threads,
}


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    with torch_settings.keep_settings():
        yield


@pytest.fixture
def build_net(write):
    """Return a function that builds a model whose constructor ends with a given call."""

    def build_from_call(call: str) -> BuiltModel:
        source = f"""
        class Net(nn.Linear):
            def __init__(self):
                super().__init__(3, 3)
                {call}
        """
        spec = parse_spec(write(source))
        assert spec is not None
        return build(spec)

    return build_from_call


@pytest.mark.parametrize("call", SETTINGS)
def test_setting_of_a_constructor_applies_only_to_its_model(build_net, call):
    """forward may rely on the settings of its constructor; the next instance starts from the original settings."""
    start = SETTINGS[call]()
    built_model = build_net(call)
    assert SETTINGS[call]() == start
    with built_model.user_code("calling it"):
        inside = SETTINGS[call]()
    assert inside != start
    assert SETTINGS[call]() == start
    built_model.build_again()
    assert SETTINGS[call]() == start


@pytest.mark.parametrize("values", [False, True])
def test_each_instance_starts_from_the_same_settings(build_net, values):
    """The second instance has float32 parameters like the first, although the first set another default dtype."""
    actual = build_net("torch.set_default_dtype(torch.float64)")
    assert actual.build_again(values=values).weight.dtype is actual.module.weight.dtype is torch.float32


def test_setting_of_a_call_does_not_reach_the_next_call(build_net):
    """Each call of forward starts from the settings of the constructor."""
    built_model = build_net("torch.set_default_dtype(torch.float64)")
    with built_model.user_code("calling it"):
        torch.set_default_dtype(torch.float16)
    with built_model.user_code("calling it"):
        assert torch.get_default_dtype() is torch.float64


def test_setting_at_import_applies_to_every_instance(write):
    """The setting applies before any instance is built, for building and for calls."""
    source = """
    torch.set_default_dtype(torch.float64)
    Net = lambda: nn.Linear(3, 3)
    """
    actual_built = build(parse_spec(write(source)))
    assert actual_built.module.weight.dtype is actual_built.build_again().weight.dtype is torch.float64
    with actual_built.user_code("calling it"):
        assert torch.get_default_dtype() is torch.float64


def test_second_build_attempt_starts_from_the_original_settings(write):
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


def test_a_constructor_cannot_turn_gradients_off_for_others(build_net):
    """The proofs enable gradients where they need a graph."""
    built_model = build_net("torch.set_grad_enabled(False)")
    assert torch.is_grad_enabled()
    built_model.build_again()
    assert torch.is_grad_enabled()
