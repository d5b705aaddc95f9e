"""One layer of a stack that differs from its siblings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

RULE = "sibling-gap"


def stack(count=12):
    """Blocks of a transformer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, count).state_dict()


@pytest.fixture
def gaps(found, tmp_path):
    """Save a state and return what the rule reports."""

    def report(state):
        torch.save(state, tmp_path / "a.pt")
        return [finding.message for finding in found(RULE, tmp_path / "a.pt", values=True)]

    return report


def test_sibling_gap_finds_a_dtype_of_one_layer(gaps):
    """It names the tensor and both dtypes."""
    state = stack() | {"layers.5.linear1.weight": torch.randn(16, 8).half()}
    (message,) = gaps(state)
    assert message.startswith("layers.5.linear1.weight: is float16, float32 in the other 11 layers")


def test_a_tensor_that_one_layer_lacks_is_found(gaps):
    """It names the layer and the tensor."""
    state = stack()
    del state["layers.5.norm1.bias"]
    assert gaps(state) == ["layers.5: lacks norm1.bias, which the other 11 layers have"]


def test_a_layer_that_is_missing_is_found(gaps):
    """The numbers have a hole."""
    state = {key: value for key, value in stack().items() if not key.startswith("layers.5.")}
    assert gaps(state) == ["layers.5: layer is missing; the other 11 layers have 12 tensors each"]


def test_values_of_another_scale_are_found(gaps):
    """A scale that was applied twice."""
    state = stack()
    state["layers.5.linear1.weight"] *= 1000
    (message,) = gaps(state)
    assert message.startswith("layers.5.linear1.weight: its values are")
    assert message.endswith("times larger than in the other layers")


def test_sibling_gap_spares_the_first_and_the_last_layer(gaps):
    """They are kept in another dtype, and have other tensors, in many models."""
    state = stack() | {"layers.0.linear1.weight": torch.randn(16, 8).half()}
    del state["layers.11.norm1.bias"]
    assert gaps(state) == []


def test_a_stack_of_few_layers_or_of_two_architectures_is_spared(gaps):
    """Seven layers; a layer of attention among others that are not."""
    few = stack(7) | {"layers.3.linear1.weight": torch.randn(16, 8).half()}
    assert gaps(few) == []
    hybrid = {f"layers.{n}.mixer.A": torch.randn(8) for n in range(8) if n != 4} | {"layers.4.attn.q": torch.randn(8)}
    assert gaps(hybrid) == []


def test_honest_checkpoints_of_torch_have_no_finding(found, tmp_path):
    """A sample of those that `benchmarks/honest_checkpoints.py` measures: 0 findings on 204."""
    path = Path(__file__).parents[2] / "benchmarks" / "honest_checkpoints.py"
    spec = importlib.util.spec_from_file_location("honest_checkpoints", path)
    honest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(honest)
    for name, state in honest._of_torch():
        torch.save(state, tmp_path / "a.pt")
        for rule in honest.RULES:
            assert not found(rule, tmp_path / "a.pt", values=True), name
