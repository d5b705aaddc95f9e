"""Find the quantized weights of a checkpoint: the tensors that together hold one weight, by their names and shapes.

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
GGUF                one tensor of blocks, with their scales: its values are read as those of any tensor
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.model_state import Kind, TensorInfo


class Layout(str, Enum):
    """How the tensors of a quantized weight hold its values."""

    SCALED = "scaled"
    BITSANDBYTES = "bitsandbytes-4bit"
    GPTQ = "gptq"
    AWQ = "awq"
    AWQ_GEMV = "awq-gemv"
    PACKED = "packed"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP4_EXPERTS = "mxfp4-experts"
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
    GLOBAL_FACTOR = "global_factor"
    SHAPE = "shape"
    FORMAT = "format"
    INPUT_SCALE = "input_scale"
    INPUT_GLOBAL_SCALE = "input_global_scale"
    INPUT_ZERO = "input_zero"


class QuantizedWeight(NamedTuple):
    """A weight stored as codes: `fqn` is the name it has when it is not quantized.

    Attributes:
        divisor: Divisor of the scales.
        square: Size of the square blocks with one scale each, if the layout has them.
        in_one_row: True if the parts are the inner tensors of one tensor.
        missing: Full names of the tensors that the layout needs and the checkpoint lacks.
    """

    fqn: str
    layout: Layout
    parts: Mapping[Part, TensorInfo]
    divisor: float = 1.0
    square: int | None = None
    in_one_row: bool = False
    missing: tuple[str, ...] = ()

    @property
    def codes(self) -> TensorInfo:
        """The tensor of the codes."""
        return self.parts[Part.CODES]


class _Names(NamedTuple):
    """Last names of a layout's tensors; those in `optional` may be missing. `owner` is the last name of the weight."""

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
_NESTED = {"weight.nested_absmax": Part.NESTED_SCALES, "weight.nested_quant_map": Part.NESTED_VALUES}
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_SCALED_DTYPES = (*FLOAT8_DTYPES, "int8")
#: Types of a scale that is a power of two.
E8M0_DTYPES = ("uint8", "float8_e8m0fnu")
#: Of the activations, in static quantization.
_INPUT = {
    "input_scale": Part.INPUT_SCALE,
    "input_global_scale": Part.INPUT_GLOBAL_SCALE,
    "input_zero_point": Part.INPUT_ZERO,
}
_PACKED_AND_SCALES = {"weight_packed": Part.CODES, "weight_scale": Part.SCALES}
_LAYOUTS = (
    _Names(
        Layout.BITSANDBYTES,
        {"weight": Part.CODES, "weight.absmax": Part.SCALES, "weight.quant_map": Part.VALUES},
        {**_NESTED, **dict.fromkeys(_STATES, Part.STATE)},
        # The other types hold the same bytes (`bnb_4bit_quant_storage`), so that FSDP can shard them.
        ("uint8", "bfloat16", "float16", "float32"),
    ),
    _Names(Layout.GPTQ, _CODES_AND_SCALES, {"g_idx": Part.GROUPS}, ("int32",)),
    _Names(Layout.AWQ, _CODES_AND_SCALES, {}, ("int32",)),
    _Names(Layout.NVFP4, {**_PACKED_AND_SCALES, "weight_global_scale": Part.GLOBAL_SCALE}, _INPUT, ("uint8",)),
    _Names(
        Layout.NVFP4,
        {"weight": Part.CODES, "weight_scale": Part.SCALES, "weight_scale_2": Part.GLOBAL_FACTOR},
        _INPUT,
        ("uint8",),
    ),
    _Names(Layout.MXFP4, _PACKED_AND_SCALES, _INPUT, ("uint8",)),
    _Names(
        Layout.PACKED,
        _PACKED_AND_SCALES,
        {"weight_zero_point": Part.ZEROS, "weight_g_idx": Part.GROUPS, "weight_shape": Part.SHAPE, **_INPUT},
        ("int32",),
    ),
    _Names(
        Layout.SCALED,
        {"weight": Part.CODES, "weight_scale_inv": Part.SCALES},
        {"input_scale": Part.INPUT_SCALE, "activation_scale": Part.INPUT_SCALE},
        _SCALED_DTYPES,
        square=128,
    ),
    _Names(
        Layout.SCALED,
        {"weight": Part.CODES, "weight_scale": Part.SCALES},
        {"weight_zero_point": Part.ZEROS, **_INPUT},
        _SCALED_DTYPES,
    ),
    _Names(
        Layout.SCALED,
        {"weight": Part.CODES, "SCB": Part.SCALES},
        {"weight_format": Part.FORMAT},
        _SCALED_DTYPES,
        divisor=127.0,
    ),
    _Names(
        Layout.SCALED,
        {"_weight_qdata": Part.CODES, "_weight_scale": Part.SCALES},
        {"_weight_zero_point": Part.ZEROS},
        _SCALED_DTYPES,
    ),
    _Names(Layout.SCALED, {"": Part.CODES, "_scale_inv": Part.SCALES}, {}, FLOAT8_DTYPES, square=128, owner=""),
    _Names(Layout.MXFP4_EXPERTS, {"_blocks": Part.CODES, "_scales": Part.SCALES}, {}, ("uint8",), owner=""),
    _Names(Layout.MXFP4_EXPERTS, {"blocks": Part.CODES, "scales": Part.SCALES}, {}, ("uint8",), owner=""),
)
_CODE_DTYPES = frozenset(["uint8", "int32", *_SCALED_DTYPES])
_INNER_TENSORS = {"qdata": Part.CODES, "scale": Part.SCALES, "zero_point": Part.ZEROS}
_LAST_NAMES = frozenset(name for layout in _LAYOUTS for name in (*layout.required, *layout.optional))
#: Rows and columns of a block with one scale, if no configuration says another number.
DEFAULT_BLOCK = 128
#: Last names that only codes have; `weight` is also the name of a weight that is not quantized.
_OWN_NAMES_OF_CODES = frozenset(["qweight", "weight_packed", "_weight_qdata", "_blocks"])
#: Whole weights of a layout for each incomplete one, at least, so that float8 without scales counts as incomplete.
_MIN_WHOLE_PER_INCOMPLETE = 4


def find_quantized_weights(rows: Iterable[TensorInfo]) -> Iterator[QuantizedWeight]:
    """Yield the quantized weights among the tensors of one section."""
    for module, named in _group_by_module(rows).items():
        if (names := _find_layout(named)) is not None:
            yield _build_weight(module, named, names)


def find_all_quantized_weights(rows: Iterable[TensorInfo]) -> list[QuantizedWeight]:
    """Return the quantized weights of one section, also those that lack tensors or whose tensors do not fit."""
    modules = _group_by_module(rows)
    layouts = {module: _find_layout(named) for module, named in modules.items()}
    whole = Counter(map(id, filter(None, layouts.values())))
    chosen = {
        module: names
        for module, named in modules.items()
        if layouts[module] is None and (names := _choose_incomplete(named, whole)) is not None
    }
    incomplete = Counter(map(id, chosen.values()))
    for module, names in chosen.items():
        is_float8 = names.codes == "weight" and modules[module]["weight"].dtype.startswith("float8")
        has_scales = any(name in modules[module] for name in names.required if name != names.codes)
        if not is_float8 or has_scales or whole[id(names)] >= _MIN_WHOLE_PER_INCOMPLETE * incomplete[id(names)]:
            layouts[module] = names
    return [_build_weight(module, modules[module], names) for module, names in layouts.items() if names is not None]


def find_quantized_by_section(tensors: Sequence[TensorInfo]) -> list[QuantizedWeight]:
    """Return the quantized weights of all sections of models, also the incomplete ones; quickly [] without codes."""
    if not any(tensor.dtype in _CODE_DTYPES or tensor.fqn.endswith(".quant_map") for tensor in tensors):
        return []
    sections: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        if tensor.kind not in (Kind.OPTIMIZER, Kind.OTHER):
            sections.setdefault(tensor.section, []).append(tensor)
    return [weight for rows in sections.values() for weight in find_all_quantized_weights(rows)]


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


def _group_by_module(rows: Iterable[TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    rows = list(rows)
    for row in rows:
        module, name = _split(row.fqn)
        if name in _LAST_NAMES:
            modules.setdefault(module, {})[name] = row
    owners = {module for module, named in modules.items() if "_scale_inv" in named}
    for row in rows if owners else ():
        if row.fqn in owners:
            modules[row.fqn][""] = row
    return modules


def _split(fqn: str) -> tuple[str, str]:
    """Return the module and the last name, which begins at `weight.` if the name has that component.

    `experts.down_proj_blocks` is `_blocks` of `experts.down_proj`.
    """
    start, found, end = fqn.rpartition("weight.")
    if found and (not start or start.endswith(".")):
        return start.rstrip("."), found + end
    if fqn.endswith(("_blocks", "_scales")):
        return fqn[: -len("_blocks")], fqn[-len("_blocks") :]
    if fqn.endswith("_scale_inv") and not fqn.endswith("weight_scale_inv"):
        return fqn.removesuffix("_scale_inv"), "_scale_inv"
    module, _, name = fqn.rpartition(".")
    return module, name


def _find_layout(named: Mapping[str, TensorInfo]) -> _Names | None:
    """Return the layout of which a module has all tensors, in shapes that can be of the layout."""
    for names in _LAYOUTS:
        parts = _take_parts(names, named) if named.keys() >= names.required.keys() else None
        if parts is not None and _has_layout(names.layout, parts):
            return names
    return None


def _build_weight(module: str, named: Mapping[str, TensorInfo], names: _Names) -> QuantizedWeight:
    separator = "" if names.owner == "" and names.codes in ("", "_blocks") else "." if module else ""
    missing = tuple(f"{module}{separator}{name}" for name in names.required if name not in named)
    fqn = ".".join(filter(None, (module, names.owner)))
    parts = _take_parts(names, named) or {}
    return QuantizedWeight(fqn, names.layout, parts, names.divisor, names.square, missing=missing)


def _take_parts(names: _Names, named: Mapping[str, TensorInfo]) -> dict[Part, TensorInfo] | None:
    """Return the tensors of the layout by their role; None if the codes are missing or have another dtype."""
    parts = {part: named[name] for name, part in {**names.required, **names.optional}.items() if name in named}
    return parts if Part.CODES in parts and parts[Part.CODES].dtype in names.dtypes else None


def _has_layout(layout: Layout, parts: Mapping[Part, TensorInfo]) -> bool:
    """Return True if the shapes of codes and scales can be of this layout: GPTQ and AWQ have the same names."""
    codes, scales = (parts[part].shape or () for part in (Part.CODES, Part.SCALES))
    if layout is Layout.GPTQ:
        return len(codes) == len(scales) == 2 and codes[1] == scales[1]
    if layout is Layout.AWQ:
        return len(codes) == len(scales) == 2 and codes[1] * 8 == scales[1] and codes[0] % max(scales[0], 1) == 0
    if layout is Layout.BITSANDBYTES:
        return math.prod(codes) > 0
    if layout is Layout.MXFP4:
        return len(codes) == 2 and parts[Part.SCALES].dtype in E8M0_DTYPES
    if layout is Layout.MXFP4_EXPERTS:
        return len(codes) > 2 and codes[-1] == 16
    return len(codes) >= 2 if layout is Layout.SCALED else len(codes) == 2


def _choose_incomplete(named: Mapping[str, TensorInfo], whole: Mapping[int, int]) -> _Names | None:
    """Return the layout of codes that lack tensors, or whose tensors do not fit; None if they may be a plain weight.

    A tensor called `weight` is codes if other tensors of the layout belong to it, or if it is an integer or float8 and
    whole weights have the layout. `whole` counts the whole weights of each layout.
    """

    def rank(names: _Names) -> tuple[int, int]:
        return sum(name in named for name in (*names.required, *names.optional)), whole.get(id(names), 0)

    candidates = [
        names
        for names in _LAYOUTS
        if (parts := _take_parts(names, named)) is not None
        and len(parts[Part.CODES].shape or ()) > 1
        and (names.codes in _OWN_NAMES_OF_CODES or rank(names)[0] > 1 or _may_be_codes(parts[Part.CODES], names, whole))
    ]
    return max(candidates, key=rank, default=None)


def _may_be_codes(tensor: TensorInfo, names: _Names, whole: Mapping[int, int]) -> bool:
    return bool(whole.get(id(names))) and (tensor.dtype in INTEGER_DTYPES or tensor.dtype.startswith("float8"))
