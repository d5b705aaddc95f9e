"""A quantized weight is listed as one weight: files of the real libraries, copies with a lost or wrong part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from statecli.core import dtypes, quantized_weights
from statecli.core.logical_weights import StoredShape, describe_weight
from statecli.core.model_state import TensorInfo

DATA = Path(__file__).parent / "data"

#: Form -> type of the codes, bits of a code; the weight is [32, 64], with one exception.
FORMS = {
    "gptq": ("int4", 4),
    "gptq_v2": ("int4", 4),
    "gptq_8_act_order": ("int8", 8),
    "gptq_3": ("int3", 3),
    "awq": ("int4", 4),
    "nf4": ("nf4", 4),
    "nf4_double": ("nf4", 4),
    "fp4": ("fp4", 4),
    "packed_4": ("int4", 4),
    "packed_4_asymmetric": ("int4", 4),
    "packed_3": ("int3", 3),
    "packed_8_channel": ("int8", 8),
    "torchao_int8": ("int8", 8),
    "torchao_fp8": ("float8_e4m3fn", 8),
    "llm_int8": ("int8", 8),
    "nf4_bfloat16": ("nf4", 4),
    "w4a16_asym": ("int4", 4),
    "w8a8": ("int8", 8),
    "fp8": ("float8_e4m3fn", 8),
    "fp8_dynamic": ("float8_e4m3fn", 8),
    "fp8_block": ("float8_e4m3fn", 8),
    "nvfp4": ("nvfp4", 4),
    "mxfp4": ("mxfp4", 4),
}
SHAPES = {"fp8_block": (130, 260)}
#: Libraries that register the tensors as buffers: gptqmodel and autoawq.
BUFFERS = ("gptq", "awq")


@pytest.fixture(scope="module")
def quantized_tensors() -> dict[str, torch.Tensor]:
    return load_file(DATA / "quantized.safetensors") | load_file(DATA / "quantized_layers.safetensors")


def select_parts(stored, form, prefix="proj"):
    start = f"{form}."
    return {
        f"{prefix}.{name.removeprefix(start)}": tensor
        for name, tensor in stored.items()
        if name.startswith(start) and not name.endswith("dequantized")
    }


@pytest.fixture
def save(tmp_path):
    """Write a state_dict as .pt or .safetensors."""

    def write(tensors, name):
        path = tmp_path / name
        tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        if name.endswith(".pt"):
            torch.save(tensors, path)
        else:
            save_file(tensors, path)
        return path

    return write


@pytest.fixture
def document(statecli, save):
    """The JSON of a listing of the tensors as .safetensors, or of any path."""

    def run(tensors, *args):
        path = tensors
        if isinstance(tensors, dict):
            path = save(tensors, "listed.safetensors")
        return json.loads(statecli("inspect", path, "-f", "json", *args).out)

    return run


def join_lines(result):
    """The text without the breaks of a narrow terminal."""
    return " ".join(result.out.split())


def count_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# --- real files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_has_its_own_shape_and_all_its_tensors(document, quantized_tensors, form):
    """The shape is that before the quantization, the size is the sum of all tensors, and the codes are a parameter.

    gptqmodel and autoawq register buffers.
    """
    tensors = select_parts(quantized_tensors, form)
    result = document(tensors | {"norm.weight": torch.ones(7)})
    (weight,) = result["quantized"]
    shape = SHAPES.get(form, (32, 64))
    assert weight["fqn"] == "proj.weight"
    assert (weight["dtype"], weight["bits"], tuple(weight["shape"])) == (*FORMS[form], shape)
    assert weight["elements"] == math.prod(shape)
    assert weight["bytes"] == count_bytes(tensors)
    assert set(weight["tensors"]) == set(tensors)
    assert weight["defect"] is None
    assert result["weights"] == {
        "parameters": math.prod(shape) + 7,
        "quantized": 1,
        "tensors": len(tensors),
        "unknown_shapes": 0,
        "unknown_elements": 0,
    }
    assert {row["fqn"]: row.get("part_of") for row in result["tensors"]} == (
        dict.fromkeys(tensors, "proj.weight") | {"norm.weight": None}
    )
    kinds = {row["fqn"]: (row["kind"], row["evidence"]) for row in result["tensors"]}
    assert kinds[weight["tensors"][0]] == ("buffer" if form.startswith(BUFFERS) else "parameter", "convention")
    if form.startswith(BUFFERS):
        assert {kinds[name] for name in tensors} == {("buffer", "convention")}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_has_one_row_a_weight(statecli, save, quantized_tensors, form):
    """A file of torch gives the same row and number of parameters as the JSON of safetensors."""
    path = save(select_parts(quantized_tensors, form) | {"norm.weight": torch.ones(7)}, "a.pt")
    table = statecli("inspect", path, "-f", "table").out
    height, width = SHAPES.get(form, (32, 64))
    (row,) = [line for line in table.splitlines() if line.strip().startswith("proj.")]
    assert row.split()[:3] == ["proj.weight", FORMS[form][0], f"[{height},{width}]"]
    count = height * width + 7
    assert f"{count / 1000:.3g} K parameters" in " ".join(table.split())


def test_parts_lists_the_tensors_below_the_weight(statecli, save, quantized_tensors):
    path = save(select_parts(quantized_tensors, "nf4"), "a.safetensors")
    names = list(select_parts(quantized_tensors, "nf4"))
    for output in ("table", "plain", "markdown"):
        text = statecli("inspect", path, "--parts", "-f", output).out
        assert all(name in text for name in names)
    short = statecli("inspect", path, "-f", "plain").out
    assert not any(f"{name} " in short for name in names if name != "proj.weight")


def test_programs_get_every_tensor(statecli, save, quantized_tensors):
    """JSON lines and CSV have a row for each tensor of the file, with or without --parts."""
    path = save(select_parts(quantized_tensors, "nf4"), "a.safetensors")
    for output in ("csv", "jsonl"):
        assert statecli("inspect", path, "-f", output).out == statecli("inspect", path, "-f", output, "--parts").out
        assert "proj.weight.absmax" in statecli("inspect", path, "-f", output).out


def test_repeated_layers_share_a_line(statecli, save, quantized_tensors):
    tensors = {k: v for n in range(3) for k, v in select_parts(quantized_tensors, "awq", f"layers.{n}.proj").items()}
    table = statecli("inspect", save(tensors, "a.safetensors"), "-f", "table").out
    assert "layers.{0..2}.proj.weight" in table
    assert "3 weights in 9 tensors" in " ".join(table.split())


def test_a_torchao_subclass_is_one_weight(document, statecli):
    """The row had the size of bfloat16; int4 codes of torchao take a byte each, and the scales their own."""
    path = DATA / "quantized_subclass.pt"
    (weight,) = document(path)["quantized"]
    assert (weight["fqn"], weight["dtype"], weight["bits"], weight["shape"]) == ("proj.weight", "int4", 4, [32, 64])
    state = torch.load(path, weights_only=False)["proj.weight"] if _has_torchao() else None
    expected = 32 * 64 + 32 * 4 + 32
    if state is not None:
        expected = sum(t.numel() * t.element_size() for t in (state.qdata, state.scale, state.zero_point))
    assert weight["bytes"] == expected
    assert "from qdata, scale, zero_point" in statecli("inspect", path, "-f", "table").out


def _has_torchao() -> bool:
    try:
        import torchao.quantization  # noqa: F401
    except ImportError:
        return False
    return True


def test_torchao_says_the_type_of_flattened_codes(document, tmp_path):
    """The type of int4 codes in bytes is in the metadata, written by `flatten_tensor_state_dict` of torchao 0.18."""
    text = (
        '{"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, '
        '"block_size": [1, 64]}, "_tensor_data_names": ["qdata", "scale", "zero_point"]}'
    )
    tensors = {"proj._weight_qdata": torch.zeros(32, 64, dtype=torch.int8), "proj._weight_scale": torch.ones(32, 1)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"proj.weight": text})
    (weight,) = document(tmp_path / "a.safetensors")["quantized"]
    assert (weight["dtype"], weight["bits"]) == ("int4", 4)


@pytest.mark.parametrize("name", ["experts.gate_up_proj_{}", "mlp.mlp1_weight.{}"])
def test_mxfp4_experts_have_the_shape_of_the_dequantized_tensor(document, name):
    """transformers dequantizes `_blocks` and transposes (`convert_moe_packed_tensors`); OpenAI does not transpose."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.zeros(3, 20, 2, 16, dtype=torch.uint8)
    scales = torch.full((3, 20, 2), 127, dtype=torch.uint8)
    (weight,) = document({name.format("blocks"): blocks, name.format("scales"): scales})["quantized"]
    dense = mxfp4.convert_moe_packed_tensors(blocks, scales)
    expected = dense if name.endswith("_{}") else dense.transpose(1, 2)
    assert weight["shape"] == list(expected.shape)
    assert weight["fqn"] == name.removesuffix("_{}").removesuffix(".{}")


def test_experts_of_transformers_in_float8(document):
    """`FP8Experts` of transformers 5.23, integrations/finegrained_fp8.py: one tensor for all experts."""
    codes = torch.zeros(3, 256, 384).to(torch.float8_e4m3fn)
    for scales, defect in ((torch.ones(3, 2, 3), None), (torch.ones(3, 1, 1), None), (torch.ones(3, 2, 5), "misfit")):
        (weight,) = document({"experts.up_proj": codes, "experts.up_proj_scale_inv": scales})["quantized"]
        assert (weight["fqn"], weight["shape"]) == ("experts.up_proj", [3, 256, 384])
        assert bool(weight["defect"]) == bool(defect)
        assert weight["tensors"] == ["experts.up_proj", "experts.up_proj_scale_inv"]


def test_bytes_with_scales_of_powers_of_two_may_be_pairs(document):
    """int8 with exponents for scales may be two float4 in a byte: the shape is not claimed."""
    tensors = {
        "proj.weight": torch.zeros(32, 32, dtype=torch.int8),
        "proj.weight_scale_inv": torch.zeros(32, 2).to(torch.float8_e8m0fnu),
    }
    (weight,) = document(tensors)["quantized"]
    assert (weight["shape"], weight["bits"], weight["defect"]) == (None, None, None)


def test_awq_gemv_layout_has_its_shape(document):
    """Buffers of `WQLinear_GEMV` of autoawq 0.2.9, awq/modules/linear/gemv.py: rows of codes are outputs."""
    tensors = {
        "proj.qweight": torch.zeros(96, 16, dtype=torch.int32),
        "proj.qzeros": torch.zeros(96, 1, dtype=torch.int32),
        "proj.scales": torch.ones(96, 8).half(),
    }
    (weight,) = document(tensors)["quantized"]
    assert (weight["layout"], weight["dtype"], weight["shape"]) == ("awq-gemv", "int4", [96, 128])
    assert weight["defect"] is None


def test_nvfp4_of_modelopt_has_its_shape_and_bytes(document):
    """Names and shapes of ModelOpt: hf_quant_config.json with NVFP4, export/quant_utils.py of nvidia-modelopt."""
    tensors = {
        "proj.weight": torch.zeros(32, 32, dtype=torch.uint8),
        "proj.weight_scale": torch.ones(32, 4).to(torch.float8_e4m3fn),
        "proj.weight_scale_2": torch.tensor(1.0),
        "proj.input_scale": torch.tensor(1.0),
    }
    (weight,) = document(tensors)["quantized"]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("nvfp4", [32, 64], 32 * 32 + 32 * 4 + 8)


def test_bits_of_gguf_blocks_are_shown(statecli, tmp_path):
    """A tensor of GGUF is already one weight: 256 values of q4_k take 144 bytes, 4.5 bits each."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q4_K
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((64, 144), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = statecli("inspect", tmp_path / "a.gguf", "-f", "table").out
    (row,) = [line.split() for line in table.splitlines() if line.strip().startswith("blk.0")]
    assert row[:4] == ["blk.0.ffn_up.weight", "q4_k", "[64,256]", "4.5"]
    assert "16.4 K parameters" in table


def test_plain_checkpoints_are_listed_as_before(document, statecli, save):
    """Integer buffers and float weights make no quantized weight, and no column of bits."""
    tensors = {"bn.weight": torch.ones(4), "bn.num_batches_tracked": torch.tensor(3), "ids": torch.arange(4).int()}
    result = document(tensors)
    assert result.get("quantized", []) == []
    assert "weights" not in result
    assert "bits" not in statecli("inspect", save(tensors, "a.safetensors"), "-f", "table").out


def test_stats_and_moves_list_the_tensors(statecli, save, quantized_tensors):
    """Values belong to the tensors of the file."""
    path = save(select_parts(quantized_tensors, "nf4"), "a.safetensors")
    for args in (("--stats",), ("--to", "cpu")):
        table = statecli("inspect", path, "-f", "table", *args).out
        assert "proj.weight.absmax" in table
        assert "2.05 K parameters" in table


def test_a_selection_of_parts_lists_them(statecli, save, quantized_tensors):
    """Without its codes among the selected tensors, a weight has no row."""
    path = save(select_parts(quantized_tensors, "nf4"), "a.safetensors")
    parts_table = statecli("inspect", path, "-f", "table", "-i", "*absmax").out
    assert "proj.weight.absmax" in parts_table
    weight_table = statecli("inspect", path, "-f", "table", "-i", "proj.weight").out
    assert "[32,64]" in weight_table


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_selected_by_its_own_name_dtype_and_shape(document, quantized_tensors, form):
    """`-i '*.weight'` selects a GPTQ weight without a tensor of this name; `-x` leaves out all its tensors."""
    tensors = select_parts(quantized_tensors, form) | {"norm.bias": torch.ones(7)}
    shape = "x".join(map(str, SHAPES.get(form, (32, 64))))
    for args in (("-i", "*.weight"), ("--dtype", FORMS[form][0]), ("--shape", shape)):
        selected = {row["fqn"] for row in document(tensors, *args)["tensors"]}
        assert selected == set(tensors) - {"norm.bias"}, args
    assert [row["fqn"] for row in document(tensors, "-x", "proj.weight")["tensors"]] == ["norm.bias"]


# --- copies with a missing or wrong part ----------------------------------------------------------------------------

MISSING_PARTS = [
    ("gptq", "scales", "scales is missing"),
    ("gptq", "qzeros", "qzeros is missing"),
    ("awq", "scales", "scales is missing"),
    ("nf4", "weight.absmax", "weight.absmax is missing"),
    ("nf4", "weight.quant_map", "weight.quant_map is missing"),
    ("packed_4", "weight_scale", "weight_scale is missing"),
    ("nvfp4", "weight_scale", "weight_scale is missing"),
    ("nvfp4", "weight_global_scale", "weight_global_scale is missing"),
    ("mxfp4", "weight_scale", "weight_scale is missing"),
    ("llm_int8", "SCB", "SCB is missing"),
    ("w8a8", "weight_scale", "weight_scale is missing"),
    ("fp8_dynamic", "weight_scale", "weight_scale is missing"),
    ("torchao_int8", "_weight_scale", "_weight_scale is missing"),
]


def list_gaps(statecli, path):
    """Return the messages of sibling-gap in a whole audit, including values."""
    findings = json.loads(statecli("audit", path, "-f", "json").out)["findings"]
    return [finding["message"] for finding in findings if finding["rule"] == "sibling-gap"]


def build_layers(stored, form, count=9):
    return {k: v for n in range(count) for k, v in select_parts(stored, form, f"layers.{n}.proj").items()}


@pytest.mark.parametrize(("form", "name", "defect"), MISSING_PARTS)
def test_a_missing_part_is_named(document, statecli, quantized_tensors, save, form, name, defect):
    """A part is missing in one of nine layers: the weight names the part, and the audit has a finding."""
    tensors = build_layers(quantized_tensors, form)
    del tensors[f"layers.4.proj.{name}"]
    result = document(tensors)
    defects = {weight["fqn"]: weight["defect"] for weight in result["quantized"]}
    assert len(defects) == 9
    assert {fqn for fqn, text in defects.items() if text} == {"layers.4.proj.weight"}
    assert defects["layers.4.proj.weight"] == defect
    shapes = {tuple(weight["shape"]) for weight in result["quantized"] if weight["shape"] is not None}
    assert shapes == {(32, 64)}
    path = save(tensors, "a.safetensors")
    assert defect in join_lines(statecli("inspect", path, "-f", "table"))
    findings = json.loads(statecli("audit", path, "-f", "json", "--select", "sibling-gap").out)["findings"]
    (message,) = [finding["message"] for finding in findings]
    assert "layers.4.proj" in message
    assert name.rpartition(".")[2] in message


@pytest.mark.parametrize(
    ("form", "name"), [("nf4", "weight.quant_state.bitsandbytes__nf4"), ("packed_4", "weight_shape"), ("gptq", "g_idx")]
)
def test_a_missing_optional_part_is_a_gap(statecli, quantized_tensors, save, form, name):
    """One of nine layers lacks a part of the other eight layers."""
    tensors = build_layers(quantized_tensors, form)
    del tensors[f"layers.4.proj.{name}"]
    result = json.loads(statecli("audit", save(tensors, "a.pt"), "-f", "json", "--select", "sibling-gap").out)
    (message,) = [finding["message"] for finding in result["findings"]]
    assert message == f"layers.4.proj.weight: {name} is missing; 8 other weights of this layout have all their tensors"


@pytest.mark.parametrize("form", ["w8a8", "fp8", "fp8_dynamic", "llm_int8", "gptq", "packed_4", "nf4"])
def test_a_layer_that_is_not_quantized_lacks_no_scales(statecli, quantized_tensors, save, form):
    """A list of ignored layers is usual. The dtype is reported, as for a layer forgotten by a conversion."""
    tensors = build_layers(quantized_tensors, form)
    for name in [name for name in tensors if ".4." in name]:
        del tensors[name]
    tensors["layers.4.proj.weight"] = torch.ones(32, 64).bfloat16()
    assert all("lacks" not in message for message in list_gaps(statecli, save(tensors, "a.pt")))


@pytest.mark.parametrize(("form", "name"), [("gptq", "scales"), ("awq", "scales"), ("packed_4", "weight_scale")])
def test_the_scales_of_one_layer_are_compared_with_the_others(statecli, quantized_tensors, save, form, name):
    """A scale applied twice, and scales of another dtype; buffers are part of the stack if they are of a weight."""
    tensors = build_layers(quantized_tensors, form)
    fqn = f"layers.4.proj.{name}"
    for wrong, expected in (
        (tensors[fqn] * 2.0**12, f"{fqn}: values are 4,096 times larger than in the other layers"),
        (tensors[fqn].double(), f"{fqn}: dtype is float64, but "),
    ):
        path = save(tensors | {fqn: wrong}, "a.pt")
        (message,) = list_gaps(statecli, path)
        assert message.startswith(expected)


@pytest.mark.parametrize("form", FORMS)
def test_whole_stacks_have_no_finding(statecli, save, quantized_tensors, form):
    path = save(build_layers(quantized_tensors, form), "a.safetensors")
    assert list_gaps(statecli, path) == []


WRONG = [
    ("gptq", "scales", (2, 31)),
    ("gptq", "qzeros", (3, 4)),
    ("gptq_8_act_order", "g_idx", (63,)),
    ("awq", "scales", (2, 31)),
    ("awq", "qzeros", (2, 5)),
    ("nf4", "weight.absmax", (31,)),
    ("packed_4", "weight_scale", (32, 3)),
    ("packed_4", "weight_scale", (31, 2)),
    ("nvfp4", "weight_scale", (32, 3)),
    ("mxfp4", "weight_scale", (31, 2)),
    ("llm_int8", "SCB", (31,)),
    ("llm_int8", "SCB", (1,)),
    ("w8a8", "weight_scale", (31, 1)),
    ("fp8_dynamic", "weight_scale", (31, 1)),
    ("fp8_block", "weight_scale", (5, 3)),
]


@pytest.mark.parametrize(("form", "name", "shape"), WRONG)
def test_a_part_of_the_wrong_shape_is_named(document, statecli, save, quantized_tensors, form, name, shape):
    """The weight names the tensor that does not fit; its shape is the true shape or unknown."""
    tensors = select_parts(quantized_tensors, form)
    old = tensors[f"proj.{name}"]
    tensors[f"proj.{name}"] = torch.ones(shape).to(old.dtype)
    (weight,) = document(tensors)["quantized"]
    last = name.rpartition(".")[2]
    assert f"{last} [{','.join(map(str, shape))}] does not fit" in weight["defect"]
    assert weight["shape"] in (None, list(SHAPES.get(form, (32, 64))))
    findings = json.loads(statecli("audit", save(tensors, "a.pt"), "-f", "json", "--select", "sibling-gap").out)
    (message,) = [finding["message"] for finding in findings["findings"]]
    assert message == f"proj.weight: {weight['defect']}"


@pytest.mark.parametrize("form", ["nf4", "fp4", "nf4_bfloat16"])
def test_without_quant_state_the_shape_is_not_stored(document, statecli, save, quantized_tensors, form):
    """The codes say the number of values, rounded up to a byte, and not the shape."""
    tensors = {name: part for name, part in select_parts(quantized_tensors, form).items() if "quant_state" not in name}
    result = document(tensors)
    (weight,) = result["quantized"]
    assert (weight["shape"], weight["elements"], weight["dtype"], weight["defect"]) == (None, 2048, "4-bit", None)
    assert result["weights"]["unknown_shapes"] == 1
    table = join_lines(statecli("inspect", save(tensors, "a.safetensors"), "-f", "table"))
    assert "shape not stored" in table
    assert "2.05 K parameters at most" in table


def test_without_weight_shape_the_size_is_not_known(document, statecli, save, quantized_tensors):
    """Codes fill whole words, and their bits are not stored."""
    tensors = select_parts(quantized_tensors, "packed_4")
    del tensors["proj.weight_shape"]
    result = document(tensors | {"norm": torch.ones(7)})
    (weight,) = result["quantized"]
    assert (weight["shape"], weight["elements"], weight["bits"]) == (None, None, None)
    assert result["weights"] == {
        "parameters": 7,
        "quantized": 1,
        "tensors": 2,
        "unknown_shapes": 1,
        "unknown_elements": 1,
    }
    table = join_lines(statecli("inspect", save(tensors | {"norm": torch.ones(7)}, "a.safetensors"), "-f", "table"))
    assert "7 parameters and 1 weight of unknown size" in table


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"shape": [32, 63]}',
        b'{"shape": [-32, -64]}',
        b'{"shape": []}',
        b'{"shape": [0, 5]}',
        b'{"shape": [99999999999999999999, 2]}',
        b'{"shape": "32"}',
        b'{"shape": [32, 64], "blocksize": 0}',
        b"\xff" * 5000,
    ],
)
def test_a_hostile_quant_state_gives_no_shape(document, quantized_tensors, text):
    tensors = select_parts(quantized_tensors, "nf4")
    name = next(name for name in tensors if "quant_state" in name)
    tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    (weight,) = document(tensors)["quantized"]
    assert weight["shape"] is None
    assert "quant_state" in weight["defect"]


@pytest.mark.parametrize("sizes", [(32, 63), (31, 64), (-32, 64), (0, 0), (32, 64, 1), (2**62, 4)])
def test_a_hostile_weight_shape_gives_no_shape(document, quantized_tensors, sizes):
    """[32, 63] also fits the packed words: a width is refused only if no number of bits fits the width."""
    tensors = select_parts(quantized_tensors, "packed_4") | {"proj.weight_shape": torch.tensor(sizes)}
    (weight,) = document(tensors)["quantized"]
    assert (weight["shape"] is None) == (sizes != (32, 63))


def test_float8_without_scales_is_a_plain_weight(document):
    """Unscaled float8 is a dtype like any other, if no layer of the file has scales."""
    result = document({f"layers.{n}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn) for n in range(4)})
    assert result.get("quantized", []) == []


def test_norms_next_to_quantized_weights_are_plain_weights(document, quantized_tensors):
    tensors = build_layers(quantized_tensors, "nf4") | {f"layers.{n}.norm.weight": torch.ones(64) for n in range(9)}
    tensors |= {"lm_head.weight": torch.ones(5, 64).bfloat16()}
    result = document(tensors)
    assert len(result["quantized"]) == 9
    assert result["weights"]["parameters"] == 9 * (2048 + 64) + 320


def test_real_metadata_is_in_the_data():
    """The file of this test was written by the libraries, not by its own hand."""
    with safe_open(DATA / "quantized_layers.safetensors", "pt") as file:
        assert "llm_int8.weight_format" in file.keys()  # noqa: SIM118 - not a dict


NAMES = sorted(quantized_weights._LAST_NAMES | {"bias", "gate_blocks", "gate_scales", "weight.SCB"})
DTYPES = ["uint8", "int8", "int32", "int64", "float8_e4m3fn", "bfloat16", "float32"]
SIZES_OF_PARTS = st.one_of(
    st.none(), st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 31, 32, 64, 128]), max_size=4).map(tuple)
)
ROW = st.tuples(st.sampled_from(NAMES), st.sampled_from(DTYPES), SIZES_OF_PARTS)
STORED = st.one_of(
    st.none(),
    st.builds(
        StoredShape, st.lists(st.integers(1, 128), min_size=1, max_size=3).map(tuple), st.sampled_from([None, 1, 64])
    ),
)


@given(
    rows=st.lists(ROW, max_size=8, unique_by=lambda row: row[0]), stored=STORED, bits=st.sampled_from([None, 0, 4, 64])
)
@settings(max_examples=400, deadline=None)
def test_any_names_types_and_shapes_give_a_consistent_shape(rows, stored, bits):
    """No combination fails, and a shape is never of another size than its elements, nor larger than the codes allow."""
    tensors = [
        TensorInfo(f"proj.{name}", dtype, shape, math.prod(shape or ()), dtypes.nbytes(dtype, math.prod(shape or ())))
        for name, dtype, shape in rows
    ]
    keys = {"config.quantization_config.quant_method": "gptq", "config.quantization_config.bits": bits}
    for weight in quantized_weights.find_quantized_by_section(tensors):
        described = describe_weight(weight, stored, keys | {"config.groups.weights.num_bits": bits})
        if described.shape is not None:
            assert described.elements == math.prod(described.shape)
            assert all(size >= 0 for size in described.shape)
            if described.bits is not None:
                assert described.elements * described.bits <= 8 * described.codes.nbytes + 8
        assert described.nbytes == sum(part.nbytes for part in described.parts)


# --- copies of a few weights with a missing part --------------------------------------------------------------------

#: LOST has the layers that are incomplete without a comparison with other layers.
MISSING_PARTS_WITH_A_SIBLING = [
    ("fp8_block", "weight_scale_inv"),
    ("fp8_dynamic", "weight_scale"),
    ("fp8", "weight_scale"),
    ("w8a8", "weight_scale"),
    ("llm_int8", "SCB"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ("nf4_double", "weight.quant_state.bitsandbytes__nf4"),
    ("fp4", "weight.quant_state.bitsandbytes__fp4"),
    ("packed_4", "weight_shape"),
    ("packed_3", "weight_shape"),
    ("gptq", "g_idx"),
]


def remove_tensor(tensors, fqn):
    """Return the tensors without `fqn`; the argument is not changed."""
    assert fqn in tensors
    return {name: tensor for name, tensor in tensors.items() if name != fqn}


@pytest.mark.parametrize(("form", "name"), MISSING_PARTS_WITH_A_SIBLING)
@pytest.mark.parametrize("others", [["mlp.down"], ["attn.q", "attn.k", "attn.v"]])
def test_a_part_that_a_sibling_has_is_missing(statecli, save, quantized_tensors, form, name, others):
    """One sibling in the same block, or three in another block, are enough: no stack of layers is needed."""
    if f"{form}.{name}" not in quantized_tensors:
        name = name.replace("weight_scale_inv", "weight_scale")
    tensors = {
        k: v
        for prefix in ("mlp.up", *others)
        for k, v in select_parts(quantized_tensors, form, f"block.{prefix}").items()
    }
    assert list_gaps(statecli, save(tensors, "whole.safetensors")) == []
    (message,) = list_gaps(statecli, save(remove_tensor(tensors, f"block.mlp.up.{name}"), "a.safetensors"))
    assert message.startswith(f"block.mlp.up.weight: {name} is missing; ")


def test_missing_scales_are_reported_if_a_layer_has_scales(statecli, save):
    """One of eight layers kept its scales: one layer of the same name with scales is enough."""
    layers = {f"layers.{n}.up.weight": torch.ones(256, 128).to(torch.float8_e4m3fn) for n in range(8)}
    scale = {"layers.5.up.weight_scale_inv": torch.ones(2, 1)}
    gaps = list_gaps(statecli, save(layers | scale, "a.safetensors"))
    assert [message.partition(":")[0] for message in gaps] == [f"layers.{n}.up.weight" for n in range(8) if n != 5]


def test_float8_with_only_an_input_scale_is_incomplete(statecli, save):
    """The scale of the activations is of a quantized layer, so its weight has a scale."""
    tensors = {"up.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "up.input_scale": torch.ones(1)}
    (message,) = list_gaps(statecli, save(tensors, "a.safetensors"))
    assert message.startswith("up.weight: weight_scale")


@pytest.mark.parametrize("name", ["weight.nested_absmax", "weight.nested_quant_map"])
def test_double_quantization_needs_both_tables(statecli, save, quantized_tensors, name):
    """bitsandbytes restores `absmax` from both tables; a single weight shows a missing table."""
    (message,) = list_gaps(
        statecli, save(remove_tensor(select_parts(quantized_tensors, "nf4_double"), f"proj.{name}"), "a.safetensors")
    )
    assert message == f"proj.weight: {name} is missing"


def test_codes_of_scales_need_both_tables(statecli, save, quantized_tensors):
    """`absmax` in bytes are codes, so double quantization is known without its tables."""
    tensors = {
        name: part for name, part in select_parts(quantized_tensors, "nf4_double").items() if "nested" not in name
    }
    (message,) = list_gaps(statecli, save(tensors, "a.safetensors"))
    assert message == "proj.weight: weight.nested_absmax, weight.nested_quant_map are missing"


@pytest.mark.parametrize("form", FORMS)
def test_two_forms_in_one_file_have_no_gap(statecli, save, quantized_tensors, form):
    """Mixed precision is usual: other layers have other parts."""
    for other in ("packed_4_asymmetric", "fp8_dynamic", "nf4_double", "gptq", "w8a8"):
        tensors = select_parts(quantized_tensors, form, "mlp.up") | select_parts(quantized_tensors, other, "mlp.down")
        assert list_gaps(statecli, save(tensors, "a.safetensors")) == [], other


def test_float8_of_another_component_needs_no_scales(statecli, save):
    """A file of several models: one model is cast to float8, another model is quantized with scales."""
    codes = torch.ones(256, 128).to(torch.float8_e4m3fn)
    tensors = {f"text.layers.{n}.up.weight": codes for n in range(4)}
    tensors |= {"unet.out.weight": codes, "unet.out.weight_scale_inv": torch.ones(2, 1)}
    assert list_gaps(statecli, save(tensors, "a.safetensors")) == []


@pytest.mark.parametrize(
    ("form", "codes", "scales"),
    [
        ("fp8_dynamic", "weight", "weight_scale"),
        ("llm_int8", "weight", "SCB"),
        ("nf4", "weight", "weight.absmax"),
        ("packed_4", "weight_packed", "weight_scale"),
        ("gptq", "qweight", "scales"),
        ("torchao_int8", "_weight_qdata", "_weight_scale"),
    ],
)
def test_missing_codes_are_named(statecli, save, quantized_tensors, form, codes, scales):
    """The scales are there, and a sibling has both."""
    tensors = select_parts(quantized_tensors, form, "mlp.up") | select_parts(quantized_tensors, form, "mlp.down")
    (message,) = list_gaps(statecli, save(remove_tensor(tensors, f"mlp.up.{codes}"), "a.safetensors"))
    others = "1 other weight of this layout has all its tensors"
    assert message == f"mlp.up.{codes}: is missing, but mlp.up.{scales} is its scale; {others}"


def test_scales_of_codes_with_another_name_are_not_a_gap(statecli, save, quantized_tensors):
    """A library of its own may use the same name for the scales."""
    tensors = select_parts(quantized_tensors, "w8a8", "mlp.up") | {
        "mlp.down.weight_int4": torch.zeros(32, 32, dtype=torch.uint8),
        "mlp.down.weight_scale": torch.ones(32, 1),
    }
    assert list_gaps(statecli, save(tensors, "a.safetensors")) == []
