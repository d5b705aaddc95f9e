"""A layer of a stack that differs from its siblings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

RULE = "sibling-gap"


def build_stack(count=12):
    """Blocks of a transformer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, count).state_dict()


@pytest.fixture
def list_gaps(run_rule, tmp_path):
    """Save a state and return the messages of the rule."""

    def report(state):
        torch.save(state, tmp_path / "a.pt")
        return [finding.message for finding in run_rule(RULE, tmp_path / "a.pt", values=True)]

    return report


def test_sibling_gap_finds_a_dtype_of_one_layer(list_gaps):
    """The message names the tensor and both dtypes."""
    state = build_stack() | {"layers.5.linear1.weight": torch.randn(16, 8).half()}
    (message,) = list_gaps(state)
    assert message.startswith("layers.5.linear1.weight: dtype is float16, but float32 in the other 11 layers")


def test_a_tensor_that_one_layer_lacks_is_found(list_gaps):
    """The message names the layer and the tensor."""
    state = build_stack()
    del state["layers.5.norm1.bias"]
    assert list_gaps(state) == ["layers.5: lacks norm1.bias, which 11 other layers have"]


def test_a_layer_that_is_missing_is_found(list_gaps):
    """The numbers of the layers have a gap."""
    state = {key: value for key, value in build_stack().items() if not key.startswith("layers.5.")}
    assert list_gaps(state) == ["layers.5: layer is missing; the other 11 layers have 12 tensors in common"]


@pytest.mark.parametrize("number", ["9" * 5000, str(10**9), str(10**8)])
def test_distant_layer_number_is_not_a_gap(list_gaps, number):
    """The rule does not create the numbers in between, and Python converts no number of thousands of digits."""
    state = build_stack()
    assert list_gaps(state | {f"layers.{number}.linear1.weight": state["layers.0.linear1.weight"]}) == []


def test_values_of_another_scale_are_found(list_gaps):
    """A scale was applied twice."""
    state = build_stack()
    state["layers.5.linear1.weight"] *= 1000
    (message,) = list_gaps(state)
    assert message.startswith("layers.5.linear1.weight: values are")
    assert message.endswith("times larger than in the other layers")


def test_sibling_gap_spares_the_first_and_the_last_layer(list_gaps):
    """Many models keep the first and last layers in another dtype and with other tensors."""
    state = build_stack() | {"layers.0.linear1.weight": torch.randn(16, 8).half()}
    del state["layers.11.norm1.bias"]
    assert list_gaps(state) == []


def test_a_stack_of_few_layers_or_of_two_architectures_is_spared(list_gaps):
    """Seven layers are too few, and a single layer of attention among layers of another kind is ordinary."""
    few_layers = build_stack(7) | {"layers.3.linear1.weight": torch.randn(16, 8).half()}
    assert list_gaps(few_layers) == []
    hybrid = {f"layers.{n}.mixer.A": torch.randn(8) for n in range(8) if n != 4} | {"layers.4.attn.q": torch.randn(8)}
    assert list_gaps(hybrid) == []


def build_small_stack(count=32):
    """Layers of three tensors, with a scale of a single element as in a quantized checkpoint."""
    torch.manual_seed(0)
    layers = [f"layers.{n}." for n in range(count)]
    weights = {f"{layer}mlp.weight": torch.randn(64, 64) / 50 for layer in layers}
    scales = {f"{layer}mlp.scale": torch.tensor([0.01 + n % 5 / 1000]) for n, layer in enumerate(layers)}
    return weights | scales | {f"{layer}norm.weight": torch.ones(64) for layer in layers}


def test_a_small_layer_that_is_missing_is_found(list_gaps):
    """Three tensors of the same shapes in each layer."""
    state = {key: value for key, value in build_small_stack().items() if not key.startswith("layers.17.")}
    assert list_gaps(state) == ["layers.17: layer is missing; the other 31 layers have 3 tensors in common"]


def test_missing_layer_is_found_among_two_architectures(list_gaps):
    """Three dense layers come before layers with experts, and all layers have attention."""
    last_names = {n: "mlp.gate" if n < 3 else "mlp.router" for n in range(32) if n != 17}
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    state = {
        f"layers.{n}.{name}.weight": torch.randn(8, 8) for n, last in last_names.items() for name in (*names, last)
    }
    assert list_gaps(state) == ["layers.17: layer is missing; the other 31 layers have 4 tensors in common"]


def test_a_tensor_that_only_one_layer_has_is_found(list_gaps):
    """The message names the layer and the tensor."""
    state = build_small_stack() | {"layers.17.attn.weight": torch.randn(4, 4)}
    assert list_gaps(state) == ["layers.17: has attn.weight, which 31 other layers lack"]


def test_a_tensor_that_two_of_32_layers_lack_is_found(list_gaps):
    """Each layer is a finding."""
    state = build_small_stack()
    del state["layers.3.mlp.weight"], state["layers.9.mlp.weight"]
    expected = [f"layers.{n}: lacks mlp.weight, which 30 other layers have" for n in (3, 9)]
    assert list_gaps(state) == expected


def test_gap_is_found_if_the_first_layer_has_an_extra_tensor(list_gaps):
    """T5 has a relative attention bias in its first layer."""
    state = build_small_stack() | {"layers.0.attn.bias_table": torch.randn(4, 4)}
    assert list_gaps(state) == []
    del state["layers.17.norm.weight"]
    assert list_gaps(state) == ["layers.17: lacks norm.weight, which 31 other layers have"]


def test_another_shape_in_one_layer_is_found(list_gaps):
    """The message gives both shapes."""
    (message,) = list_gaps(build_small_stack() | {"layers.17.mlp.weight": torch.randn(32, 64) / 50})
    assert message == "layers.17.mlp.weight: shape is [32,64], but [64,64] in the other 31 layers"


def test_a_weight_of_zeros_in_one_layer_is_found(list_gaps):
    """Its siblings are not zero."""
    (message,) = list_gaps(build_small_stack() | {"layers.17.mlp.weight": torch.zeros(64, 64)})
    assert message == "layers.17.mlp.weight: all 4,096 values are 0, unlike in the other 31 layers"


@pytest.mark.parametrize(("value", "end"), [(0.0, "0"), (-0.01, "-0.01")])
def test_a_scale_that_is_not_positive_in_one_layer_is_found(list_gaps, value, end):
    """The other scales are positive and of similar size."""
    (message,) = list_gaps(build_small_stack() | {"layers.17.mlp.scale": torch.tensor([value])})
    assert message == f"layers.17.mlp.scale: value is {end}, but 0.01 to 0.014 in the other 31 layers"


def test_a_scale_that_is_a_thousand_times_as_large_is_found(list_gaps):
    """The values of a tensor with a single element are compared as well."""
    (message,) = list_gaps(build_small_stack() | {"layers.17.mlp.scale": torch.tensor([20.0])})
    assert message == "layers.17.mlp.scale: values are 1,667 times larger than in the other layers"


@pytest.mark.parametrize(
    "change",
    [
        {"layers.17.q.lora_A.weight": torch.randn(4, 64), "layers.17.q.lora_B.weight": torch.randn(64, 4)},
        {f"layers.{n}.mlp.gate": torch.randn(8) for n in (0, 1, 31)},
        {f"layers.{n}.mlp.gate": torch.randn(8) for n in range(7, 32, 8)},
        {f"layers.{n}.mlp.gate": torch.randn(8) for n in range(32) if n % 8},
        {f"layers.{n}.mlp.alpha": torch.tensor([0.01 * (n - 17.0)]) for n in range(32)},
        {f"layers.{n}.mlp.alpha": torch.tensor([-1.0 if n == 17 else 1.0]) for n in range(32)},
        {f"layers.{n}.mlp.bias": torch.ones(64) * (n != 17) for n in range(32)},
        {f"layers.{n}.mlp.weight": torch.randn(32 if n in (9, 17) else 64, 64) / 50 for n in range(32)},
    ],
)
def test_layers_that_differ_on_purpose_are_spared(list_gaps, change):
    """A LoRA of a single layer, first and last layers, every eighth layer, any sign, an untrained bias."""
    assert list_gaps(build_small_stack() | change) == []


def test_the_skip_of_a_plain_stack_is_spared(list_gaps):
    """A layer of NeRF takes the input again. Linear layers have no names for their parts."""
    state = {f"lin.{n}.weight": torch.randn(64, 100 if n == 5 else 64) for n in range(10)}
    assert list_gaps(state | {f"lin.{n}.bias": torch.randn(64) for n in range(10)}) == []


def test_ordinary_checkpoints_of_torch_have_no_finding(run_rule, tmp_path):
    """A sample of the 204 checkpoints without findings in `benchmarks/honest_checkpoints.py`."""
    path = Path(__file__).parents[2] / "benchmarks" / "honest_checkpoints.py"
    spec = importlib.util.spec_from_file_location("honest_checkpoints", path)
    honest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(honest)
    for name, state in honest._of_torch():
        torch.save(state, tmp_path / "a.pt")
        for rule in honest.RULES:
            assert not run_rule(rule, tmp_path / "a.pt", values=True), name


@pytest.mark.parametrize("seed", range(3))
def test_weights_a_hundred_times_as_large_are_found(list_gaps, seed):
    """The largest values of random layers differ a little, so the measured factor may be below 100."""
    generator = torch.Generator().manual_seed(seed)
    state = {f"layers.{n}.weight": torch.randn(64, 64, generator=generator) for n in range(12)}
    state["layers.5.weight"] *= 100
    (message,) = list_gaps(state)
    assert message.startswith("layers.5.weight: ")
