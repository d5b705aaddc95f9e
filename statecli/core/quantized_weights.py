"""Find the quantized weights of a checkpoint: the tensors that together hold one weight, by their names and shapes.

layout              tensors of one weight [out, in]
scaled              weight, weight_scale_inv (DeepSeek-V3) | weight_scale (compressed-tensors) | SCB (LLM.int8());
                    _weight_qdata, _weight_scale, _weight_zero_point (torchao, `flatten_tensor_state_dict`), or qdata,
                    scale and zero_point as the inner tensors of one subclass
bitsandbytes 4-bit  weight [out * in / 2, 1], weight.absmax, weight.quant_map, weight.quant_state.bitsandbytes__nf4;
                    with double quantization also weight.nested_absmax, weight.nested_quant_map
GPTQ                qweight [in * bits / 32, out], qzeros, scales [groups, out], g_idx [in]
AWQ                 qweight [in, out / 8], qzeros, scales [groups, out]
packed              weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point,
                    weight_g_idx, weight_shape
NVFP4               weight_packed [out, in / 2], weight_scale [out, in / 16], weight_global_scale
GGUF                one tensor of blocks, with their scales: its values are read as those of any tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from statecli.core.model_state import TensorInfo


class Layout(str, Enum):
    """How the tensors of a quantized weight hold its values."""

    SCALED = "scaled"
    BITSANDBYTES = "bitsandbytes-4bit"
    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "packed"
    NVFP4 = "nvfp4"
    GGUF = "gguf"


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
    SHAPE = "shape"


class QuantizedWeight(NamedTuple):
    """A weight stored as codes: `fqn` is the name it has when it is not quantized.

    Attributes:
        divisor: Divisor of the scales.
        square: Size of the square blocks with one scale each, if the layout has them.
        in_one_row: True if the parts are the inner tensors of one tensor.
    """

    fqn: str
    layout: Layout
    parts: Mapping[Part, TensorInfo]
    divisor: float = 1.0
    square: int | None = None
    in_one_row: bool = False

    @property
    def codes(self) -> TensorInfo:
        """The tensor of the codes."""
        return self.parts[Part.CODES]


class _Names(NamedTuple):
    """Last names of a layout's tensors; those in `optional` may be missing."""

    layout: Layout
    required: Mapping[str, Part]
    optional: Mapping[str, Part] = {}
    dtypes: tuple[str, ...] = ()
    divisor: float = 1.0
    square: int | None = None


_CODES_AND_SCALES = {"qweight": Part.CODES, "qzeros": Part.ZEROS, "scales": Part.SCALES}
_NESTED = {"weight.nested_absmax": Part.NESTED_SCALES, "weight.nested_quant_map": Part.NESTED_VALUES}
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_SCALED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
_LAYOUTS = (
    _Names(
        Layout.BITSANDBYTES,
        {"weight": Part.CODES, "weight.absmax": Part.SCALES, "weight.quant_map": Part.VALUES},
        {**_NESTED, **dict.fromkeys(_STATES, Part.STATE)},
        ("uint8",),
    ),
    _Names(Layout.GPTQ, _CODES_AND_SCALES, {"g_idx": Part.GROUPS}, ("int32",)),
    _Names(Layout.AWQ, _CODES_AND_SCALES, {}, ("int32",)),
    _Names(
        Layout.NVFP4,
        {"weight_packed": Part.CODES, "weight_scale": Part.SCALES, "weight_global_scale": Part.GLOBAL_SCALE},
        {},
        ("uint8",),
    ),
    _Names(
        Layout.PACKED,
        {"weight_packed": Part.CODES, "weight_scale": Part.SCALES},
        {"weight_zero_point": Part.ZEROS, "weight_g_idx": Part.GROUPS, "weight_shape": Part.SHAPE},
        ("int32",),
    ),
    _Names(Layout.SCALED, {"weight": Part.CODES, "weight_scale_inv": Part.SCALES}, dtypes=_SCALED_DTYPES, square=128),
    _Names(
        Layout.SCALED,
        {"weight": Part.CODES, "weight_scale": Part.SCALES},
        {"weight_zero_point": Part.ZEROS},
        _SCALED_DTYPES,
    ),
    _Names(Layout.SCALED, {"weight": Part.CODES, "SCB": Part.SCALES}, dtypes=_SCALED_DTYPES, divisor=127.0),
    _Names(
        Layout.SCALED,
        {"_weight_qdata": Part.CODES, "_weight_scale": Part.SCALES},
        {"_weight_zero_point": Part.ZEROS},
        _SCALED_DTYPES,
    ),
)
_INNER_TENSORS = {"qdata": Part.CODES, "scale": Part.SCALES, "zero_point": Part.ZEROS}
_LAST_NAMES = frozenset(name for layout in _LAYOUTS for name in (*layout.required, *layout.optional))


def find_quantized_weights(rows: Iterable[TensorInfo]) -> Iterator[QuantizedWeight]:
    """Yield the quantized weights among the tensors of one section."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for row in rows:
        module, name = _split(row.fqn)
        if name in _LAST_NAMES:
            modules.setdefault(module, {})[name] = row
    for module, named in modules.items():
        fqn = f"{module}.weight" if module else "weight"
        for names in _LAYOUTS:
            parts = _take_parts(names, named)
            if parts is not None and _has_layout(names.layout, parts):
                yield QuantizedWeight(fqn, names.layout, parts, names.divisor, names.square)
                break


def split_codes(row: TensorInfo) -> QuantizedWeight | None:
    """Return the quantized weight in one row: a tensor subclass of torchao, with inner tensors as parts."""
    if not row.parts:
        return None
    parts = {
        _INNER_TENSORS[name]: replace(
            row, fqn=f"{row.fqn}.{name}", dtype=data.dtype, shape=data.shape, data=data, parts=()
        )
        for name, data in row.parts
        if name in _INNER_TENSORS
    }
    if len(parts) < len(row.parts) or not {Part.CODES, Part.SCALES} <= parts.keys():
        return None
    is_scaled = parts[Part.CODES].dtype in _SCALED_DTYPES and parts[Part.CODES].shape == row.shape
    return QuantizedWeight(row.fqn, Layout.SCALED, parts, in_one_row=True) if is_scaled else None


def _split(fqn: str) -> tuple[str, str]:
    """Return the module and the last name, which begins at `weight.` if the name has that component."""
    start, found, end = fqn.rpartition("weight.")
    if found and (not start or start.endswith(".")):
        return start.rstrip("."), found + end
    module, _, name = fqn.rpartition(".")
    return module, name


def _take_parts(names: _Names, named: Mapping[str, TensorInfo]) -> dict[Part, TensorInfo] | None:
    """Return the tensors of the layout by their role; None if one is missing or the codes have another dtype."""
    if not named.keys() >= names.required.keys():
        return None
    parts = {part: named[name] for name, part in {**names.required, **names.optional}.items() if name in named}
    return parts if parts[Part.CODES].dtype in names.dtypes else None


def _has_layout(layout: Layout, parts: Mapping[Part, TensorInfo]) -> bool:
    """Return True if the shapes of codes and scales can be of this layout: GPTQ and AWQ have the same names."""
    codes, scales = (parts[part].shape or () for part in (Part.CODES, Part.SCALES))
    if layout is Layout.GPTQ:
        return len(codes) == len(scales) == 2 and codes[1] == scales[1]
    if layout is Layout.AWQ:
        return len(codes) == len(scales) == 2 and codes[1] * 8 == scales[1] and codes[0] % max(scales[0], 1) == 0
    if layout is Layout.BITSANDBYTES:
        return math.prod(codes) > 0
    return len(codes) == 2
