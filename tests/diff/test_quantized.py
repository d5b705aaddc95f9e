"""Quantized weights are dequantized by the rule of their library, with the files and errors of the libraries."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from statecli.commands.diff.result import Status, TransformationKind
from statecli.commands.diff.transformations import quantized
from statecli.core.errors import MalformedError
from statecli.core.quantized_layouts import QuantizedLayout, QuantizedPart
from statecli.core.quantized_weights import find_quantized_weights
from statecli.values import dequantize

from .conftest import map_changes

DATA = Path(__file__).parent.parent / "data" / "quantized.safetensors"
KIND = TransformationKind


@pytest.fixture(scope="module")
def quantized_forms() -> dict[str, torch.Tensor]:
    """Return a weight [32, 64], its quantized forms and, for each form, the weight that its library dequantizes."""
    return load_file(DATA)


@pytest.fixture(scope="module")
def weight(quantized_forms) -> torch.Tensor:
    return quantized_forms["weight"]


@pytest.fixture(scope="module")
def dense() -> torch.Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(1)) * 0.02


def select_parts(stored: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    start = f"{name}."
    return {
        key.removeprefix(start): tensor
        for key, tensor in stored.items()
        if key.startswith(start) and not key.endswith("dequantized")
    }


def compute_relative_error(weight: torch.Tensor, dequantized: torch.Tensor) -> float:
    return ((weight.double() - dequantized.double()).norm() / weight.double().norm()).item()


def compare(diff, weight: torch.Tensor, parts: dict[str, torch.Tensor], *, is_reversed: bool = False):
    """Return the diff of a module with the weight and a module with its parts, next to an unchanged tensor."""
    norm = {"norm.weight": torch.ones(8)}
    sides = {"proj.weight": weight} | norm, {f"proj.{name}": part for name, part in parts.items()} | norm
    return diff(*(reversed(sides) if is_reversed else sides))


def get_transformation(result):
    (transformation,) = [
        change.transformation for change in map_changes(result).values() if change.transformation is not None
    ]
    return transformation


# --- each layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "codes", "block"),
    [
        ("gptq", QuantizedLayout.GPTQ, "int4", (1, 32)),
        ("gptq_v2", QuantizedLayout.GPTQ, "int4", (1, 32)),
        ("gptq_8_act_order", QuantizedLayout.GPTQ, "int8", (1, 32)),
        ("gptq_3", QuantizedLayout.GPTQ, "int3", (1, 64)),
        ("awq", QuantizedLayout.AWQ, "int4", (1, 32)),
        ("nf4", QuantizedLayout.BITSANDBYTES, "nf4", (64,)),
        ("nf4_double", QuantizedLayout.BITSANDBYTES, "nf4", (64,)),
        ("fp4", QuantizedLayout.BITSANDBYTES, "fp4", (64,)),
        ("packed_4", QuantizedLayout.PACKED, "int4", (1, 32)),
        ("packed_4_asymmetric", QuantizedLayout.PACKED, "int4", (1, 32)),
        ("packed_3", QuantizedLayout.PACKED, "int3", (1, 64)),
        ("packed_8_channel", QuantizedLayout.PACKED, "int8", (1, 64)),
        ("nvfp4", QuantizedLayout.NVFP4, "fp4", (1, 16)),
        ("torchao_int8", QuantizedLayout.SCALED, "int8", (1, 64)),
        ("torchao_fp8", QuantizedLayout.SCALED, "float8_e4m3fn", (1, 64)),
    ],
)
def test_error_is_computed_from_the_dequantized_weight(diff, quantized_forms, weight, name, layout, codes, block):
    """The codes have zero points with and without an offset of one, any order of groups, and nested scales.

    They may lie across two words or in the column order of AWQ. compressed-tensors dequantizes NVFP4 into bfloat16.
    """
    parts = select_parts(quantized_forms, name)
    transformation = get_transformation(compare(diff, weight, parts))
    assert (transformation.kind, transformation.exceptions, transformation.quantization.layout) == (
        KIND.QUANTIZED,
        0,
        layout,
    )
    assert (transformation.quantization.codes, transformation.quantization.block) == (codes, block)
    error = compute_relative_error(weight, quantized_forms[f"{name}.dequantized"])
    assert transformation.relative_l2 == pytest.approx(error, rel=5e-3 if name == "nvfp4" else 1e-3)
    assert 0 < error < 0.25
    assert len(transformation.sources) == len(parts)
    reverse = get_transformation(compare(diff, weight, parts, is_reversed=True))
    assert reverse == replace(transformation, kind=KIND.DEQUANTIZED)


def test_factors_of_input_channels_are_removed_from_the_error(diff, quantized_forms, weight):
    """AWQ multiplies salient channels before rounding and divides the previous layer."""
    transformation = get_transformation(compare(diff, weight, select_parts(quantized_forms, "awq_channels")))
    assert transformation.quantization.has_channel_factors
    assert (
        0.05
        < transformation.relative_l2
        <= compute_relative_error(weight, quantized_forms["awq_channels.dequantized"]) + 1e-6
    )


@pytest.mark.parametrize(
    "name", ["gptq", "gptq_3", "awq", "nf4_double", "packed_4_asymmetric", "nvfp4", "torchao_int8"]
)
def test_codes_of_other_rows_do_not_match(diff, quantized_forms, weight, name):
    """The same codes and scales in another order do not match the dense weight."""
    transformation = get_transformation(compare(diff, weight.flip(0), select_parts(quantized_forms, name)))
    assert transformation.kind is KIND.QUANTIZED
    assert transformation.exceptions == weight.numel()
    assert transformation.relative_l2 > 1
    reverse = get_transformation(compare(diff, weight.flip(0), select_parts(quantized_forms, name), is_reversed=True))
    assert (reverse.kind, reverse.exceptions) == (KIND.DEQUANTIZED, weight.numel())


def test_a_dequantized_checkpoint_has_the_values_of_its_codes(diff, statecli, save, quantized_forms):
    """The opposite direction is one line: the error is only the rounding of the dtype."""
    parts = {
        f"layers.{n}.proj.{key}": part for n in range(3) for key, part in select_parts(quantized_forms, "gptq").items()
    }
    dense = {f"layers.{n}.proj.weight": quantized_forms["gptq.dequantized"].bfloat16() for n in range(3)}
    before, after = save(parts, "a.safetensors"), save(dense, "b.safetensors")
    lines = statecli("diff", before, after).out.splitlines()
    start = "3 dequantized int4 (GPTQ) → bfloat16: dequantized with scales (a scale for each 32 values of a row): "
    (line,) = [line for line in lines if line.startswith(start)]
    assert float(line.removeprefix(start + "rel. error ")) < 0.003


@pytest.mark.parametrize("error_kind", ["twice", "inverse", "negated columns", "a column"])
@pytest.mark.parametrize("scales", ["SCB", "weight_scale_inv", "weight_scale"])
def test_wrong_scales_are_not_factors_of_input_channels(diff, dense, error_kind, scales):
    """No loader divides by such factors, so the weights differ, even if a factor would fit."""
    largest = dense.abs().amax(1)
    codes = (dense / largest[:, None] * 127).round().to(torch.int8)
    scale = largest if scales == "SCB" else (largest / 127)[:, None]
    if error_kind == "twice":
        scale = scale * 4
    elif error_kind == "inverse":
        scale = 1 / scale
    elif error_kind == "negated columns":
        codes[:, :90] *= -1
    else:
        scale = scale * 3
        codes[:, 5] //= 2
    transformation = get_transformation(compare(diff, dense, {"weight": codes, scales: scale}))
    assert (transformation.exceptions, transformation.quantization.has_channel_factors) == (dense.numel(), False)


@pytest.mark.parametrize("name", ["gptq_8_act_order", "awq"])
def test_wrong_scale_increases_the_error(diff, quantized_forms, weight, name):
    parts = select_parts(quantized_forms, name)
    honest = get_transformation(compare(diff, weight, parts)).relative_l2
    parts["scales"][0, 5] *= 3
    assert get_transformation(compare(diff, weight, parts)).relative_l2 > 1.3 * honest


def test_a_group_without_scales_is_not_recognised(diff, quantized_forms, weight):
    """Codes that point outside of their scales are not described as quantized."""
    parts = select_parts(quantized_forms, "gptq")
    parts["g_idx"] = parts["g_idx"] + 9
    result = compare(diff, weight, parts)
    assert all(change.transformation is None for change in map_changes(result).values())
    assert map_changes(result)["proj.weight"].status is Status.REMOVED


@pytest.mark.parametrize("is_reversed", [False, True])
def test_wrong_weight_is_listed_first(statecli, save, is_reversed):
    """Added scales belong to their weights and come last; another added tensor is listed before them."""
    torch.manual_seed(0)
    before = {f"l.{n}.weight": torch.randn(64, 64) for n in range(6)}
    after = {}
    for name, weight in before.items():
        scales = weight.abs().amax(1)
        after |= {name: (weight * 127 / scales[:, None]).round().to(torch.int8), name.replace("weight", "SCB"): scales}
    after["l.3.SCB"] = after["l.3.SCB"] * 1.7
    sides = [save(before, "a.safetensors"), save(after, "b.safetensors")]
    sides = sides[::-1] if is_reversed else sides
    output = statecli("diff", *sides, "--top", "1", "-f", "table").out
    assert "M l.3.weight" in output
    assert "SCB  " not in output.partition("recognised changes")[0]
    paths = [save(before, "a.safetensors"), save(after | {"other": torch.ones(3)}, "b.safetensors")]
    output = statecli("diff", *paths[:: -1 if is_reversed else 1], "--top", "1", "-f", "table").out
    assert f"{'D' if is_reversed else 'A'} other" in output


# --- inconclusive codes ----------------------------------------------------------------------------------------------


def test_codes_without_known_scales_are_not_numbers(diff, statecli, save, dense):
    """int8 codes next to scales of an unknown name are not compared as numbers."""
    codes = (dense * 3000).round().clamp(-127, 127).to(torch.int8)
    after = {"proj.weight": codes, "proj.strange_scale": torch.ones(96)}
    change = map_changes(diff({"proj.weight": dense}, after))["proj.weight"]
    assert change.transformation.kind is KIND.CODES
    output = statecli(
        "diff", save({"proj.weight": dense}, "a.safetensors"), save(after, "b.safetensors"), "-f", "table"
    ).out
    assert "int8 quantized values, not compared as numbers" in " ".join(output.split())


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_float8_codes_without_known_scales_are_not_numbers(diff, statecli, save, dense, is_reversed, by_row):
    """The codes are not in the total, and their NaN values are counted; a cast and a trained cast have no codes."""
    scale = (dense.abs().amax(1, keepdim=True) if by_row else dense.abs().max()) / 448
    codes = (dense / scale).to(torch.float8_e4m3fn)
    pair = ({"proj.weight": dense, "b": torch.ones(9)}, {"proj.weight": codes, "b": torch.full((9,), 1.5)})
    pair = pair[::-1] if is_reversed else pair
    change = map_changes(diff(*pair))["proj.weight"]
    assert (change.transformation.kind, change.values) == (KIND.CODES, None)
    paths = save(pair[0], "a.safetensors"), save(pair[1], "b.safetensors")
    output = " ".join(statecli("diff", *paths, "-f", "table").out.split())
    assert "float8_e4m3fn quantized values, not compared as numbers" in output
    assert "checked on every element" not in output
    assert "e+0" not in output

    for noise in (0.0, 0.1):
        cast = (dense * (1 + noise * torch.randn_like(dense))).to(torch.float8_e4m3fn)
        weight_change = map_changes(diff({"proj.weight": dense}, {"proj.weight": cast}))["proj.weight"]
        assert (weight_change.transformation and weight_change.transformation.kind) is (None if noise else KIND.CAST)
        assert weight_change.values.l2 is not None


@pytest.mark.parametrize("is_reversed", [False, True])
def test_rows_have_the_error_after_dequantizing(diff, statecli, save, dense, is_reversed):
    """Every row, the order of rows and the documents use this error; the difference of raw codes is meaningless."""
    scale = dense.abs().amax(1, keepdim=True) / 127
    codes = (dense / scale).round().to(torch.int8)
    other = 1.01 * torch.ones(8)
    sides = (
        {"proj.weight": dense, "norm.weight": torch.ones(8)},
        {"proj.weight": codes, "proj.weight_scale": scale, "norm.weight": other},
    )
    sides = sides[::-1] if is_reversed else sides
    change = map_changes(diff(*sides, ranks=True, histograms=2))["proj.weight"]
    error = compute_relative_error(dense, codes.float() * scale)
    assert change.values.relative_l2 == change.transformation.relative_l2 == pytest.approx(error, rel=1e-3)
    assert (change.values.max_abs, change.values.l2, change.values.cosine, change.values.rank) == (None,) * 4
    assert change.values.changed == int((dense != codes * scale).sum())
    paths = save(sides[0], "a.safetensors"), save(sides[1], "b.safetensors")
    (document,) = [
        c for c in json.loads(statecli("diff", *paths, "-f", "json").out)["changes"] if c["fqn"] == change.fqn
    ]
    assert document["values"]["relative_l2"] == pytest.approx(error, rel=1e-3)
    (row,) = [
        row
        for row in csv.DictReader(statecli("diff", *paths, "-f", "csv").out.splitlines())
        if row["fqn"] == change.fqn
    ]
    assert float(row["relative_l2"]) == pytest.approx(error, rel=1e-3)
    for options in (["--all"], ["-v"], ["--sort", "change"], ["--top", "3"], ["--tree"]):
        output = statecli("diff", *paths, "-f", "table", *options).out
        assert f"{error:.2g}" in output, options
        assert "e+0" not in output, options
        if options[0] == "--sort":
            assert output.index("M norm.weight") < output.index("M proj.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_that_cannot_be_dequantized_have_no_difference(diff, dense, dtype):
    """Codes with a scale that is not finite stay codes, whatever their type, and their NaN values are counted."""
    codes = (dense * 3000).clamp(-127, 127).to(dtype)
    scales = torch.full((96, 1), math.nan)
    change = map_changes(diff({"proj.weight": dense}, {"proj.weight": codes, "proj.weight_scale": scales}))[
        "proj.weight"
    ]
    assert (change.transformation.kind, change.values) == (KIND.CODES, None)


@pytest.mark.parametrize(
    "state",
    [
        b"{",
        b"[]",
        b'{"blocksize": 0}',
        b'{"blocksize": -4}',
        b'{"blocksize": "64"}',
        b'{"blocksize": 1}',
        b"\xff" * 9000,
    ],
)
def test_invalid_state_of_bitsandbytes_is_not_dequantized(diff, dense, state):
    """For any text in the state, no quantization is reported and diff does not fail."""
    parts = {
        "weight": torch.zeros(96 * 64, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(192),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }
    result = compare(diff, dense, parts)
    assert all(c.transformation is None or c.transformation.kind is KIND.CODES for c in map_changes(result).values())


def _build_damaged_parts(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the part in other shapes, and with other values."""
    flat = part.reshape(-1)
    shapes = [flat, flat[:1], flat[:0], flat[:3], flat[0].clone(), part.t() if part.dim() == 2 else part[None]]
    values = [torch.full_like(part, -3 if part.dtype.is_signed else 255), torch.zeros_like(part)]
    return [*shapes, *values, part.float() * 1000 + 0.5 if part.dtype is torch.uint8 else part]


FORMS = sorted({key.partition(".")[0] for key in load_file(DATA)} - {"weight"})


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_part_never_ends_the_diff(diff, quantized_forms, weight, name):
    """Each part of each layout in wrong shapes and with wrong values has an answer, not an error."""
    parts = select_parts(quantized_forms, name)
    for part in parts:
        for damaged in _build_damaged_parts(parts[part]):
            result = compare(diff, weight, parts | {part: damaged.contiguous()})
            assert result.broken == (), (part, damaged.shape)


@pytest.mark.parametrize("state", [b'{"blocksize": 1000000000000000000000}', b'{"blocksize": 64}'])
def test_a_state_with_huge_blocks_allocates_nothing(diff, quantized_forms, weight, state):
    """The number of scales in a block of second-level scales is the file's: 16 GB for each of them before."""
    parts = select_parts(quantized_forms, "nf4_double")
    name = "weight.quant_state.bitsandbytes__nf4"
    document = json.loads(bytes(parts[name].tolist())) | json.loads(state) | {"nested_blocksize": 1 << 62}
    parts[name] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    assert not compare(diff, weight, parts).broken


@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_stream_is_unpacked_like_struct(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, 64)
    stream = sum(int(code) << place * bits for place, code in enumerate(codes))
    words = np.array(struct.unpack(f"<{2 * bits}I", stream.to_bytes(8 * bits, "little")), np.uint32)
    assert dequantize._unpack(words[None], bits, 64, "w")[0].tolist() == codes.tolist()


def test_too_few_words_are_an_error():
    with pytest.raises(MalformedError, match="w: 2 packed words are too few for 17 quantized codes"):
        dequantize._unpack(np.zeros((1, 2), np.uint32), 4, 17, "w")


def test_weights_without_scales_or_zero_points_are_not_found(diff, quantized_forms, weight):
    """Without their zero points or scales, codes are ordinary tensors."""
    rows = [
        change.after for change in compare(diff, weight, select_parts(quantized_forms, "gptq")).changes if change.after
    ]
    (tensor,) = find_quantized_weights(rows)
    assert (tensor.fqn, tensor.layout) == ("proj.weight", QuantizedLayout.GPTQ)
    assert not list(find_quantized_weights(row for row in rows if row is not tensor.parts[QuantizedPart.ZEROS]))
    assert not list(find_quantized_weights(row for row in rows if row is not tensor.parts[QuantizedPart.SCALES]))
    moved = [replace(row, fqn=row.fqn.removeprefix("proj.")) for row in rows]
    assert [quantized_weight.fqn for quantized_weight in find_quantized_weights(moved)] == ["weight"]


def test_transformation_round_trips_through_json(diff, quantized_forms, weight):
    transformation = get_transformation(compare(diff, weight, select_parts(quantized_forms, "awq")))
    assert msgspec.json.decode(msgspec.json.encode(transformation), type=type(transformation)) == transformation


@pytest.fixture
def subclass(monkeypatch):
    """A tensor subclass with the name, the inner tensors and the attributes of torchao's; torchao has no wheel here."""

    class Int8Tensor(torch.Tensor):
        @staticmethod
        def __new__(cls, qdata, scale):
            return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype)

        def __init__(self, qdata, scale):
            self.qdata, self.scale, self.block_size, self.act_pre_scale = qdata, scale, [1, qdata.shape[1]], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return cls(args[0].qdata, args[0].scale)
            raise NotImplementedError(function)

    module = ModuleType("torchao.quantization")
    module.Int8Tensor = Int8Tensor
    Int8Tensor.__module__, Int8Tensor.__qualname__ = module.__name__, "Int8Tensor"
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Int8Tensor


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_tensor_subclass_is_one_weight(statecli, save, dense, subclass, is_reversed):
    """Its attributes are not settings of the checkpoint, and its codes are dequantized."""
    scale = dense.abs().amax(1, keepdim=True) / 127
    codes = (dense / scale).round().to(torch.int8)
    paths = [
        save({"model": {"proj.weight": dense, "norm": torch.ones(3)}, "step": 1}, "a.pt"),
        save({"model": {"proj.weight": subclass(codes, scale), "norm": torch.ones(3)}, "step": 2}, "b.pt"),
    ]
    output = statecli("diff", *(reversed(paths) if is_reversed else paths)).out
    types = "dequantized int8 → float32" if is_reversed else "quantized float32 → int8"
    error = compute_relative_error(dense, codes.float() * scale)
    assert f"1 {types}: dequantized with scale (a scale for each row): rel. error {error:.2g}" in output
    assert "attributes of quantized tensors" in output
    assert "block_size" not in output
    frozen = statecli("diff", *paths, "--must-not-change", "*block_size*")
    assert frozen.code == 1
    assert "error[frozen-changed]" in frozen.out
    assert "model.proj.weight.block_size.0: " in frozen.out
    assert "step" in output


def test_a_weight_with_a_much_larger_error_is_named(statecli, save):
    """The range of all errors does not name the weight, so the weight is listed."""
    torch.manual_seed(0)
    before = {f"l.{n}.weight": torch.randn(20, 40) for n in range(6)}
    after = {}
    for n in range(6):
        weight = before[f"l.{n}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 127
        after[f"l.{n}.weight"] = (weight / scale).round().to(torch.int8)
        after[f"l.{n}.weight_scale"] = scale * (1.2 if n == 4 else 1)
    paths = save(before, "a.safetensors"), save(after, "b.safetensors")
    lines = statecli("diff", *paths).out.splitlines()
    assert [line for line in lines if line.startswith("l.") and "rel. error" in line] == ["l.4.weight: rel. error 0.2"]
    all_lines = statecli("diff", *paths, "--all").out.splitlines()
    assert sum(line.startswith("l.") and ": rel. error" in line for line in all_lines) == 6


@pytest.mark.parametrize("wrong_count", [1, 2])
def test_the_number_of_wrong_weights_is_shown(statecli, save, wrong_count):
    torch.manual_seed(0)
    before = {f"l.{n}.weight": torch.randn(20, 40) for n in range(6)}
    after = {}
    for n in range(6):
        weight = before[f"l.{n}.weight"]
        largest = weight.abs().amax(1)
        after[f"l.{n}.weight"] = (weight * 127 / largest[:, None]).round().to(torch.int8)
        after[f"l.{n}.SCB"] = largest * (1.7 if n < wrong_count else 1)
    output = statecli("diff", save(before, "a.safetensors"), save(after, "b.safetensors"), "-f", "markdown").out
    assert f"{wrong_count} very different from the weight" in " ".join(output.split())


LAYERS = load_file(DATA.with_name("quantized_layers.safetensors"))


@pytest.mark.parametrize(
    ("form", "error"), [("mxfp4", 0.16), ("fp8_block", 0.03), ("w8a8", 0.01), ("llm_int8", 0.01), ("w4a16_asym", 0.09)]
)
def test_a_layer_of_a_library_is_recognised(diff, form, error):
    """The dense weight is the weight of `linear` in make_quantized_layers.py. MXFP4 has exponents as scales."""
    torch.manual_seed(3)
    height, width = (130, 260) if form == "fp8_block" else (32, 64)
    dense = torch.nn.Linear(width, height, bias=False).weight.detach()
    transformation = get_transformation(compare(diff, dense, select_parts(LAYERS, form)))
    assert transformation.kind is KIND.QUANTIZED
    assert error / 3 < transformation.relative_l2 < error


def test_nvfp4_of_modelopt_multiplies_by_its_second_scale(diff, quantized_forms, weight):
    """The factor is one divided by the global scale of compressed-tensors."""
    parts = select_parts(quantized_forms, "nvfp4")
    renamed = {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": (1 / parts["weight_global_scale"]).reshape(()),
    }
    first, second = (get_transformation(compare(diff, weight, parts)).relative_l2 for parts in (parts, renamed))
    assert first == pytest.approx(second, rel=1e-6)


def test_search_reads_only_the_changed_module(tmp_path, statecli, monkeypatch):
    """If one of thousands of tensors changed, the search for codes and scales reads only the names of its module."""
    state = {f"layers.{n}.weight": torch.randn(4, 4) for n in range(1000)}
    save_file(state, tmp_path / "a.safetensors")
    save_file({**state, "layers.7.weight": torch.randn(4, 4)}, tmp_path / "b.safetensors")
    searched_rows = []
    search = quantized.find_quantized_weights
    monkeypatch.setattr(quantized, "find_quantized_weights", lambda rows: search(searched_rows.extend(rows) or rows))
    assert statecli("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").code == 1
    assert {row.fqn for row in searched_rows} == {"layers.7.weight"}
