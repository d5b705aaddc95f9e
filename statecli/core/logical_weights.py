"""Describe each quantized weight as a single weight: its shape, its elements, the type of its codes, and its tensors.

The shape of packed codes is in other tensors of the weight: `quant_state` (bitsandbytes) or `weight_shape`
(compressed-tensors). Or the shape follows from the shapes of codes, scales and zero points together. Otherwise the
shape is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

import msgspec

from statecli.core.model_state import Scalar, TensorInfo
from statecli.core.quantized_layouts import DEFAULT_BLOCK, E8M0_DTYPES, QuantizedLayout, QuantizedPart
from statecli.core.quantized_weights import QuantizedWeight
from statecli.core.units import format_shape, join_names

Shape = tuple[int, ...]

#: Number of four-bit codes in a byte.
_CODES_PER_BYTE = 2
#: Number of values with a common scale in NVFP4 and MXFP4.
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
_MAX_BITS = 8


class LogicalWeight(msgspec.Struct, frozen=True, gc=False):
    """A quantized weight, described as the weight before its quantization.

    Attributes:
        fqn: Name of the weight before its quantization.
        codes: The tensor of the codes; the weight has its section.
        parts: All tensors of the weight, the codes first.
        names: Names of the tensors below the module of the weight, or of the inner tensors of a subclass.
        dtype: Type of the codes: `nf4`, `int4`, `float8_e4m3fn`.
        bits: Bits of a code; None if not known.
        shape: None if the tensors do not record the shape.
        elements: None if not known. Without a shape, an upper limit.
        missing: Full names of tensors that the layout requires and the checkpoint lacks.
        defect: The problem with the tensors, in one line; "" without a problem.
    """

    fqn: str
    layout: QuantizedLayout
    codes: TensorInfo
    parts: tuple[TensorInfo, ...]
    names: tuple[str, ...]
    dtype: str
    bits: int | None
    shape: Shape | None
    elements: int | None
    missing: tuple[str, ...] = ()
    defect: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all tensors of the weight together, in bytes."""
        return sum(part.nbytes for part in self.parts)


class StoredShape(NamedTuple):
    """Shape of a weight and number of values per scale, read from a small tensor in the checkpoint."""

    shape: Shape
    block: int | None = None


class _Source(msgspec.Struct, frozen=True):
    """Data from which a weight is described: its tensors, its recorded shape and the settings."""

    weight: QuantizedWeight
    stored_shape: StoredShape | None
    settings: Mapping[str, Scalar]


class _Named(msgspec.Struct):
    data: str = msgspec.field(name="_data")


class _Attributes(msgspec.Struct):
    target_dtype: _Named


class _FlattenedWeight(msgspec.Struct):
    """The entry of a weight in the metadata of torchao's safetensors."""

    data: _Attributes = msgspec.field(name="_data")


class _Facts(NamedTuple):
    """Facts about a weight, derived from its tensors. If `shape` is None, `elements` is only an upper limit."""

    dtype: str
    bits: int | None
    shape: Shape | None = None
    elements: int | None = None
    defect: str = ""
    layout: QuantizedLayout | None = None


def describe_weight(
    weight: QuantizedWeight, stored_shape: StoredShape | None = None, settings: Mapping[str, Scalar] | None = None
) -> LogicalWeight:
    """Describe a quantized weight: its shape, its elements, the type of its codes, and its defect.

    `stored_shape` is from `quant_state` or `weight_shape`, `settings` are the settings of the checkpoint.
    """
    facts = _DESCRIBE[weight.layout](_Source(weight, stored_shape, settings or {}))
    defect = facts.defect
    module = f"{weight.fqn.rpartition('.')[0]}."
    if weight.missing:
        names = [name.removeprefix(module) for name in weight.missing]
        defect = f"{join_names(names)} {'is' if len(names) == 1 else 'are'} missing"
    elements = math.prod(facts.shape) if facts.shape is not None else facts.elements
    parts = (weight.codes, *(row for part, row in weight.parts.items() if part is not QuantizedPart.CODES))
    return LogicalWeight(
        fqn=weight.fqn,
        layout=facts.layout or weight.layout,
        codes=weight.codes,
        parts=parts,
        names=tuple(part.fqn.removeprefix(module) for part in parts),
        dtype=facts.dtype,
        bits=facts.bits,
        shape=facts.shape,
        elements=elements,
        missing=weight.missing,
        defect=defect,
    )


def describe_subclass(row: TensorInfo, settings: Mapping[str, Scalar]) -> LogicalWeight | None:
    """Describe a tensor subclass of torchao as a quantized weight, by its inner tensors. Return None for other tensors.

    The subclass has the shape of the weight, and may record the type of its codes (`target_dtype`).
    """
    inner = dict(row.parts)
    codes = inner.get("qdata")
    if codes is None or "scale" not in inner or not row.elements:
        return None
    stored_bytes = sum(data.storage.length for data in inner.values())
    target = settings.get(f"{row.fqn}.target_dtype") or settings.get(f"{row.section}.{row.fqn}.target_dtype")
    dtype, bits = codes.dtype, count_bits(codes.dtype)
    if isinstance(target, str) and (target_dtype := target.strip("<>").removeprefix("torch.")).startswith(
        ("int", "uint")
    ):
        dtype, bits = target_dtype, count_bits(target_dtype)
    elif math.prod(codes.shape) != row.elements:
        code_bits = math.prod(codes.shape) * (bits or 0)
        dtype, bits = (
            (f"int{code_bits // row.elements}", code_bits // row.elements)
            if code_bits and not code_bits % row.elements
            else (codes.dtype, None)
        )
    sized_row = msgspec.structs.replace(row, nbytes=stored_bytes)
    return LogicalWeight(
        row.fqn, QuantizedLayout.SCALED, row, (sized_row,), tuple(inner), dtype, bits, row.shape, row.elements
    )


def count_bits(dtype: str) -> int | None:
    """Return the number of bits in a dtype's name, such as 4 for `int4`, or None if the name has no number."""
    digits = dtype.partition("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits) if digits.isdigit() else None


# --- layouts ---------------------------------------------------------------------------------------------------------


def _describe_scaled(source: _Source) -> _Facts:
    weight = source.weight
    codes, shape = weight.codes, weight.codes.shape
    scales = weight.parts.get(QuantizedPart.SCALES)
    if codes.dtype == "int8" and scales is not None and scales.dtype in E8M0_DTYPES:
        return _Facts(codes.dtype, None)  # a byte may hold two codes of four bits
    defect = _find_misfit(source, shape) if shape is not None else ""
    dtype = _find_target_dtype(source.settings.get(weight.fqn)) or codes.dtype
    return _Facts(dtype, count_bits(dtype), shape, defect=defect)


def _find_target_dtype(text: Scalar) -> str | None:
    """Return the dtype of a weight's codes, such as `int4`, from torchao's JSON text. Return None if not recorded."""
    if not isinstance(text, str) or "target_dtype" not in text:
        return None
    try:
        return msgspec.json.decode(text, type=_FlattenedWeight).data.target_dtype.data
    except msgspec.MsgspecError:
        return None


def _find_misfit(source: _Source, shape: Shape) -> str:
    """Return the defect if the scales do not fit a weight of this shape, or "" if they fit or do not exist."""
    scales = source.weight.parts.get(QuantizedPart.SCALES)
    if scales is None or _fits_scales(shape, scales.shape or (), source.weight, source.settings):
        return ""
    return _format_misfit(scales, source.weight.codes, shape)


def _fits_scales(shape: Shape, scales: Shape, weight: QuantizedWeight, settings: Mapping[str, Scalar]) -> bool:
    """Return True if the scales fit the weight: one scale per tensor, row, part of a row, or block.

    Blocks must have a known size. LLM.int8() has a scale for each row only.
    """
    is_by_row = bool(scales) and scales[0] == shape[0] and math.prod(scales) == shape[0]
    if is_by_row or weight.divisor != 1:
        return is_by_row
    if math.prod(scales) == 1:
        return True
    if len(shape) < 2 or len(scales) != len(shape) or scales[:-2] != shape[:-2]:
        return False
    (rows, columns), (scale_rows, scale_columns) = shape[-2:], scales[-2:]
    if (scale_rows == rows and scale_columns and columns % scale_columns == 0) or scale_rows == scale_columns == 1:
        return True
    blocks = _list_block_sizes(weight, settings)
    return any(-(-rows // block) == scale_rows for block in blocks) and any(
        -(-columns // block) == scale_columns for block in blocks
    )


def _list_block_sizes(weight: QuantizedWeight, settings: Mapping[str, Scalar]) -> set[int]:
    """Return the block sizes that the configuration names, and the usual block sizes."""
    keys = ("weight_block_size", "block_structure")
    configured_sizes = {
        value
        for key, value in settings.items()
        if any(word in key for word in keys) and isinstance(value, int) and value > 0
    }
    return configured_sizes | {weight.square or DEFAULT_BLOCK, 64, DEFAULT_BLOCK, 256}


def _describe_bitsandbytes(source: _Source) -> _Facts:
    weight = source.weight
    elements = weight.codes.nbytes * _CODES_PER_BYTE
    state = weight.parts.get(QuantizedPart.STATE)
    kind = source.settings.get("config.quantization_config.bnb_4bit_quant_type")
    dtype = state.fqn.rpartition("__")[2] if state is not None else kind if kind in ("nf4", "fp4") else "4-bit"
    facts = _Facts(str(dtype), 4, elements=elements)
    if source.stored_shape is None:
        return facts._replace(defect="" if state is None else "quant_state cannot be read")
    shape, block = source.stored_shape
    if math.prod(shape) not in (elements, elements - 1):
        return facts._replace(
            defect=f"quant_state records shape {format_shape(shape)}, but weight has {elements:,} quantized values"
        )
    scales = weight.parts.get(QuantizedPart.SCALES)
    count = -(-math.prod(shape) // block) if block else None
    if scales is None or count is None or math.prod(scales.shape or ()) == count:
        return facts._replace(shape=shape)
    return facts._replace(shape=shape, defect=_format_misfit(scales, weight.codes, shape))


def _describe_gptq(source: _Source) -> _Facts:
    """Describe a GPTQ weight. The shape of qzeros [groups, out * bits / 32] gives the bits, also with act-order."""
    weight = source.weight
    codes = weight.codes.shape or ()
    zeros, scales, groups = (
        weight.parts.get(part) for part in (QuantizedPart.ZEROS, QuantizedPart.SCALES, QuantizedPart.GROUPS)
    )
    unknown = _Facts(weight.codes.dtype, None)
    if not _is_matrix(codes):
        return unknown._replace(defect=_format_not_matrix(weight.codes))
    if _is_awq_gemv(codes, scales, zeros):
        return _Facts("int4", 4, (codes[0], codes[1] * 8), layout=QuantizedLayout.AWQ_GEMV)
    bits: Scalar = None
    if source.settings.get("config.quantization_config.quant_method") == "gptq":
        bits = source.settings.get("config.quantization_config.bits")
    if groups is not None:
        width = math.prod(groups.shape or ())
        bits = codes[0] * 32 // width if width and not codes[0] * 32 % width else None
    if scales is not None and not (_is_matrix(scales.shape) and scales.shape[-1] == codes[1]):
        return unknown._replace(defect=_format_misfit(scales, weight.codes))
    if zeros is not None and scales is not None:
        sizes = zeros.shape or ()
        if not _is_matrix(sizes) or sizes[0] != (scales.shape or ())[0] or sizes[1] * 32 % codes[1]:
            return unknown._replace(defect=_format_misfit(zeros, scales))
        if groups is not None and bits != sizes[1] * 32 // codes[1]:
            return unknown._replace(defect=_format_misfit(groups, weight.codes))
        bits = sizes[1] * 32 // codes[1]
    if not isinstance(bits, int) or not 1 <= bits <= _MAX_BITS or codes[0] * 32 % bits:
        return unknown
    return _Facts(f"int{bits}", bits, (codes[1], codes[0] * 32 // bits))


def _is_awq_gemv(codes: tuple[int, int], scales: TensorInfo | None, zeros: TensorInfo | None) -> bool:
    """Return True for AWQ's GEMV layout: qweight [out, in / 8], qzeros [out, groups / 8], scales [out, groups].

    The groups are padded (`WQLinear_GEMV` of autoawq).
    """
    if scales is None or zeros is None or not _is_matrix(scales.shape) or not _is_matrix(zeros.shape):
        return False
    return scales.shape[0] == zeros.shape[0] == codes[0] and scales.shape[1] == zeros.shape[1] * 8


def _describe_awq(source: _Source) -> _Facts:
    weight = source.weight
    codes = weight.codes.shape or ()
    scales, zeros = (weight.parts.get(part) for part in (QuantizedPart.SCALES, QuantizedPart.ZEROS))
    if not _is_matrix(codes):
        return _Facts(weight.codes.dtype, None, defect=_format_not_matrix(weight.codes))
    if zeros is not None and scales is not None and zeros.shape != ((scales.shape or (0,))[0], codes[1]):
        return _Facts(weight.codes.dtype, None, defect=_format_misfit(zeros, scales))
    return _Facts("int4", 4, (codes[1] * 8, codes[0]))


def _describe_packed(source: _Source) -> _Facts:
    """Describe packed codes. Each row of codes fills whole 32-bit words: [out, in * bits / 32], rounded up."""
    weight = source.weight
    codes = weight.codes.shape or ()
    configured_bits = {value for key, value in source.settings.items() if key.endswith("weights.num_bits")}
    bits = configured_bits.pop() if len(configured_bits) == 1 else None
    unknown = _Facts(f"int{bits}" if isinstance(bits, int) else "packed int", bits if isinstance(bits, int) else None)
    if source.stored_shape is None:
        return unknown._replace(defect="weight_shape cannot be read" if QuantizedPart.SHAPE in weight.parts else "")
    if not (_is_matrix(codes) and _is_matrix(source.stored_shape.shape)) or source.stored_shape.shape[0] != codes[0]:
        return unknown._replace(defect=_format_stored(source.stored_shape.shape, weight.codes))
    width = source.stored_shape.shape[1]
    fitting_bits = [bits for bits in range(1, _MAX_BITS + 1) if -(-width * bits // 32) == codes[1]]
    if not fitting_bits or (bits is not None and bits not in fitting_bits):
        return unknown._replace(defect=_format_stored(source.stored_shape.shape, weight.codes))
    bit_width = bits if isinstance(bits, int) else fitting_bits[0] if len(fitting_bits) == 1 else None
    shape = source.stored_shape.shape
    return _Facts(
        f"int{bit_width}" if bit_width else "packed int",
        bit_width,
        shape,
        defect=_find_misfit(source, shape),
    )


def _describe_fp4(source: _Source) -> _Facts:
    """Describe four-bit floats [out, in / 2], two codes in a byte. 16 (NVFP4) or 32 (MXFP4) values share a scale."""
    weight = source.weight
    codes = weight.codes.shape or ()
    group = _NVFP4_GROUP if weight.layout is QuantizedLayout.NVFP4 else _MXFP4_GROUP
    if not _is_matrix(codes):
        return _Facts(weight.layout.value, 4, defect=_format_not_matrix(weight.codes))
    shape = codes[0], codes[1] * _CODES_PER_BYTE
    scales = weight.parts.get(QuantizedPart.SCALES)
    scales_fit = scales is None or scales.shape == (shape[0], -(-shape[1] // group))
    return _Facts(
        weight.layout.value,
        4,
        shape,
        defect="" if scales_fit or scales is None else _format_misfit(scales, weight.codes),
    )


def _describe_experts(source: _Source) -> _Facts:
    """Describe MXFP4 experts: blocks of 32 values in 16 bytes. transformers swaps the last two dimensions."""
    weight = source.weight
    *leading, groups, size = weight.codes.shape or (0, 0)
    shape = (*leading, groups * _MXFP4_GROUP)
    scales = weight.parts.get(QuantizedPart.SCALES)
    defect = ""
    if size * _CODES_PER_BYTE != _MXFP4_GROUP:
        codes = format_shape(weight.codes.shape)
        expected_size = _MXFP4_GROUP // _CODES_PER_BYTE
        return _Facts("mxfp4", 4, defect=f"blocks have shape {codes}, but the last size must be {expected_size}")
    if scales is not None and scales.shape != (*leading, groups):
        defect = _format_misfit(scales, weight.codes)
    if weight.codes.fqn.endswith("_blocks") and len(shape) > 2:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return _Facts("mxfp4", 4, shape, defect=defect)


_DESCRIBE = {
    QuantizedLayout.SCALED: _describe_scaled,
    QuantizedLayout.BITSANDBYTES: _describe_bitsandbytes,
    QuantizedLayout.GPTQ: _describe_gptq,
    QuantizedLayout.AWQ: _describe_awq,
    QuantizedLayout.PACKED: _describe_packed,
    QuantizedLayout.NVFP4: _describe_fp4,
    QuantizedLayout.MXFP4: _describe_fp4,
    QuantizedLayout.MXFP4_EXPERTS: _describe_experts,
}


def _is_matrix(shape: Shape | None) -> TypeGuard[tuple[int, int]]:
    return shape is not None and len(shape) == 2 and min(shape) > 0


def _format_not_matrix(codes: TensorInfo) -> str:
    return f"{codes.fqn.rpartition('.')[2]} {format_shape(codes.shape)} is not a matrix"


def _format_misfit(part: TensorInfo, codes: TensorInfo, shape: Shape | None = None) -> str:
    """Return a text such as `absmax [7] does not fit weight [64,64]`."""
    size = codes.shape if shape is None else shape
    name, of = (row.fqn.rpartition(".")[2] for row in (part, codes))
    return f"{name} {format_shape(part.shape)} does not fit {of} {format_shape(size)}"


def _format_stored(shape: Shape, codes: TensorInfo) -> str:
    name = codes.fqn.rpartition(".")[2]
    return f"weight_shape {format_shape(shape)} does not fit {name} {format_shape(codes.shape)}"
