"""Layouts of quantized weights: the tensors that together store a weight, by the end of their names, and their roles.

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

import msgspec

from statecli.core.quantized_layout_names import QuantizedLayout as QuantizedLayout


class QuantizedPart(str, Enum):
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


class LayoutNames(msgspec.Struct, frozen=True):
    """Last name components of a layout's tensors. Tensors in `optional` may be missing; `owner` names the weight."""

    layout: QuantizedLayout
    required: Mapping[str, QuantizedPart]
    optional: Mapping[str, QuantizedPart] = {}
    dtypes: tuple[str, ...] = ()
    divisor: float = 1.0
    square: int | None = None
    owner: str = "weight"

    @property
    def codes(self) -> str:
        """Last name component of the tensor with the codes."""
        return next(name for name, part in self.required.items() if part is QuantizedPart.CODES)


_CODES_AND_SCALES = {"qweight": QuantizedPart.CODES, "qzeros": QuantizedPart.ZEROS, "scales": QuantizedPart.SCALES}
NESTED = {"weight.nested_absmax": QuantizedPart.NESTED_SCALES, "weight.nested_quant_map": QuantizedPart.NESTED_VALUES}
_STATE_NAMES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
SCALED_DTYPES = (*FLOAT8_DTYPES, "int8")
#: dtypes of a scale that is a power of two.
E8M0_DTYPES = ("uint8", "float8_e8m0fnu")
#: Names of parts about the activations, in static quantization.
_INPUT_PARTS = {
    "input_scale": QuantizedPart.INPUT_SCALE,
    "input_global_scale": QuantizedPart.INPUT_GLOBAL_SCALE,
    "input_zero_point": QuantizedPart.INPUT_ZERO,
}
_PACKED_AND_SCALES = {"weight_packed": QuantizedPart.CODES, "weight_scale": QuantizedPart.SCALES}
LAYOUTS = (
    LayoutNames(
        QuantizedLayout.BITSANDBYTES,
        {
            "weight": QuantizedPart.CODES,
            "weight.absmax": QuantizedPart.SCALES,
            "weight.quant_map": QuantizedPart.VALUES,
        },
        {**NESTED, **dict.fromkeys(_STATE_NAMES, QuantizedPart.STATE)},
        # dtypes other than uint8 hold the same bytes (`bnb_4bit_quant_storage`), so that FSDP can shard them.
        ("uint8", "bfloat16", "float16", "float32"),
    ),
    LayoutNames(QuantizedLayout.GPTQ, _CODES_AND_SCALES, {"g_idx": QuantizedPart.GROUPS}, ("int32",)),
    LayoutNames(QuantizedLayout.AWQ, _CODES_AND_SCALES, {}, ("int32",)),
    LayoutNames(
        QuantizedLayout.NVFP4,
        {**_PACKED_AND_SCALES, "weight_global_scale": QuantizedPart.GLOBAL_SCALE},
        _INPUT_PARTS,
        ("uint8",),
    ),
    LayoutNames(
        QuantizedLayout.NVFP4,
        {
            "weight": QuantizedPart.CODES,
            "weight_scale": QuantizedPart.SCALES,
            "weight_scale_2": QuantizedPart.GLOBAL_FACTOR,
        },
        _INPUT_PARTS,
        ("uint8",),
    ),
    LayoutNames(QuantizedLayout.MXFP4, _PACKED_AND_SCALES, _INPUT_PARTS, ("uint8",)),
    LayoutNames(
        QuantizedLayout.PACKED,
        _PACKED_AND_SCALES,
        {
            "weight_zero_point": QuantizedPart.ZEROS,
            "weight_g_idx": QuantizedPart.GROUPS,
            "weight_shape": QuantizedPart.SHAPE,
            **_INPUT_PARTS,
        },
        ("int32",),
    ),
    LayoutNames(
        QuantizedLayout.SCALED,
        {"weight": QuantizedPart.CODES, "weight_scale_inv": QuantizedPart.SCALES},
        {"input_scale": QuantizedPart.INPUT_SCALE, "activation_scale": QuantizedPart.INPUT_SCALE},
        SCALED_DTYPES,
        square=128,
    ),
    LayoutNames(
        QuantizedLayout.SCALED,
        {"weight": QuantizedPart.CODES, "weight_scale": QuantizedPart.SCALES},
        {"weight_zero_point": QuantizedPart.ZEROS, **_INPUT_PARTS},
        SCALED_DTYPES,
    ),
    LayoutNames(
        QuantizedLayout.SCALED,
        {"weight": QuantizedPart.CODES, "SCB": QuantizedPart.SCALES},
        {"weight_format": QuantizedPart.FORMAT},
        SCALED_DTYPES,
        divisor=127.0,
    ),
    LayoutNames(
        QuantizedLayout.SCALED,
        {"_weight_qdata": QuantizedPart.CODES, "_weight_scale": QuantizedPart.SCALES},
        {"_weight_zero_point": QuantizedPart.ZEROS},
        SCALED_DTYPES,
    ),
    LayoutNames(
        QuantizedLayout.SCALED,
        {"": QuantizedPart.CODES, "_scale_inv": QuantizedPart.SCALES},
        {},
        FLOAT8_DTYPES,
        square=128,
        owner="",
    ),
    LayoutNames(
        QuantizedLayout.MXFP4_EXPERTS,
        {"_blocks": QuantizedPart.CODES, "_scales": QuantizedPart.SCALES},
        {},
        ("uint8",),
        owner="",
    ),
    LayoutNames(
        QuantizedLayout.MXFP4_EXPERTS,
        {"blocks": QuantizedPart.CODES, "scales": QuantizedPart.SCALES},
        {},
        ("uint8",),
        owner="",
    ),
)
#: Number of rows and columns of a block with one scale, if the configuration has no other number.
DEFAULT_BLOCK = 128
