"""Layouts of quantized weights: the last names of the tensors that together store a weight, and their roles.

layout              tensors of one weight [out, in]
scaled              weight, weight_scale_inv (DeepSeek-V3) | weight_scale (compressed-tensors) | SCB, weight_format
                    (LLM.int8()); _weight_qdata, _weight_scale, _weight_zero_point (torchao,
                    `flatten_tensor_state_dict`), or qdata, scale and zero_point as the inner tensors of one subclass;
                    NAME [experts, out, in], NAME_scale_inv (experts of transformers)
bitsandbytes 4-bit  weight [out * in / 2, 1], weight.absmax, weight.quant_map, weight.quant_state.bitsandbytes__nf4;
                    with double quantization also weight.nested_absmax, weight.nested_quant_map
GPTQ                qweight [in * bits / 32, out], qzeros, scales [groups, out], g_idx [in]
AWQ                 qweight [in, out / 8], qzeros, scales [groups, out]
AWQ GEMV            qweight [out, in / 8], qzeros [out, groups / 8], scales [out, groups]; described, not dequantized
packed              weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point,
                    weight_g_idx, weight_shape
NVFP4               weight_packed [out, in / 2], weight_scale [out, in / 16], weight_global_scale (compressed-tensors);
                    weight, weight_scale, weight_scale_2 (ModelOpt)
MXFP4               weight_packed [out, in / 2], weight_scale uint8 [out, in / 32]
MXFP4 experts       NAME_blocks uint8 [experts, out, in / 32, 16], NAME_scales [experts, out, in / 32] (gpt-oss in
                    transformers), NAME.blocks and NAME.scales (gpt-oss of OpenAI)
GGUF                one tensor of blocks, with their scales: its values are read like the values of any tensor
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from statecli.core.quantized_layout_names import Layout as Layout


class Part(str, Enum):
    """Role of a tensor in a quantized weight."""

    CODES = "codes"
    SCALES = "scales"
    ZEROS = "zeros"
    GROUPS = "groups"
    VALUES = "values"
    NESTED_SCALES = "nested_scales"
    NESTED_VALUES = "nested_values"
    STATE = "state"
    GLOBAL_SCALE = "global_scale"
    GLOBAL_FACTOR = "global_factor"
    SHAPE = "shape"
    FORMAT = "format"
    INPUT_SCALE = "input_scale"
    INPUT_GLOBAL_SCALE = "input_global_scale"
    INPUT_ZERO = "input_zero"


class LayoutNames(NamedTuple):
    """Last names of a layout's tensors; names in `optional` may be missing. `owner` is the weight's last name."""

    layout: Layout
    required: Mapping[str, Part]
    optional: Mapping[str, Part] = {}
    dtypes: tuple[str, ...] = ()
    divisor: float = 1.0
    square: int | None = None
    owner: str = "weight"

    @property
    def codes(self) -> str:
        """Last name of the codes."""
        return next(name for name, part in self.required.items() if part is Part.CODES)


_CODES_AND_SCALES = {"qweight": Part.CODES, "qzeros": Part.ZEROS, "scales": Part.SCALES}
NESTED = {"weight.nested_absmax": Part.NESTED_SCALES, "weight.nested_quant_map": Part.NESTED_VALUES}
_STATE_NAMES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
SCALED_DTYPES = (*FLOAT8_DTYPES, "int8")
#: dtypes of a scale that is a power of two.
E8M0_DTYPES = ("uint8", "float8_e8m0fnu")
#: Names of parts about the activations, in static quantization.
_INPUT_PARTS = {
    "input_scale": Part.INPUT_SCALE,
    "input_global_scale": Part.INPUT_GLOBAL_SCALE,
    "input_zero_point": Part.INPUT_ZERO,
}
_PACKED_AND_SCALES = {"weight_packed": Part.CODES, "weight_scale": Part.SCALES}
LAYOUTS = (
    LayoutNames(
        Layout.BITSANDBYTES,
        {"weight": Part.CODES, "weight.absmax": Part.SCALES, "weight.quant_map": Part.VALUES},
        {**NESTED, **dict.fromkeys(_STATE_NAMES, Part.STATE)},
        # dtypes other than uint8 hold the same bytes (`bnb_4bit_quant_storage`), so that FSDP can shard them.
        ("uint8", "bfloat16", "float16", "float32"),
    ),
    LayoutNames(Layout.GPTQ, _CODES_AND_SCALES, {"g_idx": Part.GROUPS}, ("int32",)),
    LayoutNames(Layout.AWQ, _CODES_AND_SCALES, {}, ("int32",)),
    LayoutNames(
        Layout.NVFP4, {**_PACKED_AND_SCALES, "weight_global_scale": Part.GLOBAL_SCALE}, _INPUT_PARTS, ("uint8",)
    ),
    LayoutNames(
        Layout.NVFP4,
        {"weight": Part.CODES, "weight_scale": Part.SCALES, "weight_scale_2": Part.GLOBAL_FACTOR},
        _INPUT_PARTS,
        ("uint8",),
    ),
    LayoutNames(Layout.MXFP4, _PACKED_AND_SCALES, _INPUT_PARTS, ("uint8",)),
    LayoutNames(
        Layout.PACKED,
        _PACKED_AND_SCALES,
        {"weight_zero_point": Part.ZEROS, "weight_g_idx": Part.GROUPS, "weight_shape": Part.SHAPE, **_INPUT_PARTS},
        ("int32",),
    ),
    LayoutNames(
        Layout.SCALED,
        {"weight": Part.CODES, "weight_scale_inv": Part.SCALES},
        {"input_scale": Part.INPUT_SCALE, "activation_scale": Part.INPUT_SCALE},
        SCALED_DTYPES,
        square=128,
    ),
    LayoutNames(
        Layout.SCALED,
        {"weight": Part.CODES, "weight_scale": Part.SCALES},
        {"weight_zero_point": Part.ZEROS, **_INPUT_PARTS},
        SCALED_DTYPES,
    ),
    LayoutNames(
        Layout.SCALED,
        {"weight": Part.CODES, "SCB": Part.SCALES},
        {"weight_format": Part.FORMAT},
        SCALED_DTYPES,
        divisor=127.0,
    ),
    LayoutNames(
        Layout.SCALED,
        {"_weight_qdata": Part.CODES, "_weight_scale": Part.SCALES},
        {"_weight_zero_point": Part.ZEROS},
        SCALED_DTYPES,
    ),
    LayoutNames(Layout.SCALED, {"": Part.CODES, "_scale_inv": Part.SCALES}, {}, FLOAT8_DTYPES, square=128, owner=""),
    LayoutNames(Layout.MXFP4_EXPERTS, {"_blocks": Part.CODES, "_scales": Part.SCALES}, {}, ("uint8",), owner=""),
    LayoutNames(Layout.MXFP4_EXPERTS, {"blocks": Part.CODES, "scales": Part.SCALES}, {}, ("uint8",), owner=""),
)
#: Number of rows and columns of a block with one scale, if the configuration has no other number.
DEFAULT_BLOCK = 128
