"""Recognise quantized weights, and compare their dequantized values with the weight on the other side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from statecli.commands.diff.result import Change, Field, Quantization, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.ordinary_training import MAX_COSINE
from statecli.commands.diff.transformations.views import get_data
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import TensorInfo
from statecli.core.quantized_layouts import DEFAULT_BLOCK, FLOAT8_DTYPES, QuantizedLayout, QuantizedPart
from statecli.core.quantized_weights import QuantizedWeight, find_quantized_weights, split_codes
from statecli.values.data_task import compute_derived
from statecli.values.delta import Delta
from statecli.values.dequantize import DequantizeRule
from statecli.values.quantized_error import QuantizedError, QuantizedTask, StoredPart

#: Largest relative error of rounding to codes: codes of another weight have an error of about 1.4.
_MAX_ERROR = 0.5
#: Smallest relative change by which float8 values in another direction than the weight show that they are codes.
_MIN_RATIO_OF_CODES = 10.0
#: Numbers to add to the stored zero points of GPTQ: `gptq` stores zero points less one, `gptq_v2` unchanged.
_ZERO_OFFSETS = (1, 0)
#: Factors for input channels are reported if the error without the factors exceeds this multiple of the error with
#: them.
_MIN_CHANNEL_GAIN = 4.0
#: Layouts and scales with factors for input channels: AWQ, and SmoothQuant in the files of compressed-tensors.
_LAYOUTS_WITH_FACTORS = (QuantizedLayout.AWQ, QuantizedLayout.PACKED)
_SCALES_WITH_FACTORS = ("weight_scale",)
#: Largest number of names below the module in the name of a part.
_MAX_PART_NAMES = 3
#: Dtypes of codes, whose values mean nothing without a scale.
_CODE_DTYPES = ("int8", "uint8", "int4", "uint4")
#: Reason why the difference of codes has only a relative error.
_DEQUANTIZING_REASON = "error after dequantizing"
_COUNTS_OF_NOT_FINITE = ("nan_before", "nan_after", "inf_before", "inf_after", "left_out")


class _Pair(NamedTuple):
    """A quantized weight and the unquantized weight on the other side. `number`: index of the codes in `changes`."""

    number: int
    weight: QuantizedWeight
    dense: TensorInfo
    quantization: Quantization
    tasks: list[QuantizedTask]


class ComparedCodes(msgspec.Struct, frozen=True):
    """Transformation of quantized codes, and how the dequantized values differ."""

    transformation: Transformation
    values: Delta | None


def find_quantized(changes: Sequence[Change], sections: Mapping[str, str], *, jobs: int) -> dict[int, ComparedCodes]:
    """Return the weights that were quantized or dequantized, keyed by the index of their codes in `changes`.

    `sections` maps old to new sections. If codes are far from the weight of the other side, all elements are
    exceptions. Codes of an unknown layout, or that cannot be dequantized, are not compared as numbers.
    """
    reversed_sections = {new: old for old, new in sections.items()}
    reversed_changes = [_reverse(change) for change in changes]
    quantized = _find_in_one_direction(changes, sections, TransformationKind.QUANTIZED, jobs)
    return quantized | _find_in_one_direction(reversed_changes, reversed_sections, TransformationKind.DEQUANTIZED, jobs)


def _reverse(change: Change) -> Change:
    """Return the change with old and new side swapped. An identical tensor is returned unchanged."""
    if change.status is Status.IDENTICAL:
        return change
    status = {Status.ADDED: Status.REMOVED, Status.REMOVED: Status.ADDED}.get(change.status, change.status)
    return replace(change, status=status, before=change.after, after=change.before)


def _find_in_one_direction(
    changes: Sequence[Change], sections: Mapping[str, str], kind: TransformationKind, jobs: int
) -> dict[int, ComparedCodes]:
    pairs = _find_pairs(changes, sections)
    errors = iter(compute_derived([task for pair in pairs for task in pair.tasks], jobs))
    compared: dict[int, ComparedCodes] = {}
    are_codes = {pair.number for pair in pairs}
    for pair in pairs:
        pair_errors = [error for _ in pair.tasks if isinstance(error := next(errors), QuantizedError)]
        if pair_errors:
            error = min(pair_errors, key=lambda error: error.relative)
            transformation = _build_transformation(pair, error, kind)
            values = Delta(
                transformation.elements,
                error.changed,
                relative_l2=transformation.relative_l2,
                reason=_DEQUANTIZING_REASON,
            )
            compared[pair.number] = ComparedCodes(
                transformation, values if changes[pair.number].values is not None else None
            )
    for n, change in enumerate(changes):
        if n in compared or change.status is Status.IDENTICAL:
            continue
        if (blocks := _describe_blocks(change, kind)) is not None:
            compared[n] = ComparedCodes(blocks, change.values)
        elif change.values is not None and (n in are_codes or _has_unknown_codes(change)):
            compared[n] = ComparedCodes(Transformation(TransformationKind.CODES, 0), _count_not_finite(change.values))
    return compared


def find_float_codes(changes: Sequence[Change]) -> dict[int, Transformation]:
    """Return changes that look like float8 codes without a known scale, keyed by index in `changes`.

    Casts, even those with exceptions, were recognised before.
    """
    return {n: Transformation(TransformationKind.CODES, 0) for n, c in enumerate(changes) if _may_be_float_codes(c)}


def _may_be_float_codes(change: Change) -> bool:
    before, after, values = change.before, change.after, change.values
    if before is None or after is None or values is None or values.relative_l2 is None:
        return False
    is_coded = [row.dtype in FLOAT8_DTYPES for row in (before, after)]
    if is_coded[0] is is_coded[1] or not all("float" in row.dtype for row in (before, after)):
        return False
    is_far = is_coded[1] and values.relative_l2 > _MIN_RATIO_OF_CODES
    is_in_direction = values.cosine is not None and values.cosine >= MAX_COSINE
    return is_far or (is_in_direction and values.relative_l2 > _MAX_ERROR)


def drop_numbers_of_codes(change: Change) -> Change:
    """Remove the numeric difference from a change of quantized codes, because codes are not numbers."""
    transformation = change.transformation
    if transformation is None or transformation.kind is not TransformationKind.CODES or change.values is None:
        return change
    return replace(change, values=_count_not_finite(change.values))


def _count_not_finite(values: Delta) -> Delta | None:
    """Return only the counts of NaN and infinities, which float8 codes can contain, or None if all are finite."""
    if not values.left_out:
        return None
    counts = {name: getattr(values, name) for name in _COUNTS_OF_NOT_FINITE}
    return Delta(values.elements, values.changed, **counts)


def _find_pairs(changes: Sequence[Change], sections: Mapping[str, str]) -> list[_Pair]:
    before = {
        (sections.get(row.section, row.section), row.fqn): row
        for change in changes
        if change.status is not Status.IDENTICAL and (row := change.before) is not None
    }
    modules = {fqn.rpartition(".")[0] for (_, fqn), row in before.items() if _may_be_dense(row)}
    if not modules:
        return []
    after: dict[str, list[TensorInfo]] = {}
    for change in changes:
        if change.after is not None and not modules.isdisjoint(_list_modules(change.after.fqn)):
            after.setdefault(change.after.section, []).append(change.after)
    numbers = {id(change.after): n for n, change in enumerate(changes) if change.after is not None}
    candidates = [
        (numbers[id(weight.codes)], weight, dense)
        for section, rows in after.items()
        for weight in find_quantized_weights(rows)
        if (dense := before.get((section, weight.fqn))) is not None
    ]
    for n, change in enumerate(changes):
        if change.status is not Status.IDENTICAL and change.before is not None and change.after is not None:
            subclass = split_codes(change.after)
            candidates += [(n, subclass, change.before)] if subclass is not None else []
    return [pair for candidate in candidates if (pair := _build_pair(*candidate)) is not None]


def _may_be_dense(row: TensorInfo) -> bool:
    return "float" in row.dtype and row.shape is not None and len(row.shape) == 2


def _list_modules(fqn: str) -> Iterator[str]:
    """Yield the names of modules that may own the tensor `fqn` of a quantized weight, innermost first."""
    for _ in range(_MAX_PART_NAMES):
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _build_pair(number: int, weight: QuantizedWeight, before: TensorInfo) -> _Pair | None:
    dense = get_data(before)
    if weight.layout is QuantizedLayout.MXFP4_EXPERTS:
        return None
    data = {part: part_data for part, row in weight.parts.items() if (part_data := get_data(row)) is not None}
    if dense is None or len(dense.shape) != 2 or "float" not in dense.dtype or len(data) < len(weight.parts):
        return None
    shape = dense.shape[0], dense.shape[1]
    block = _find_block(weight, shape)
    if block is None:
        return None
    rule = DequantizeRule(weight.layout, shape, block if len(block) == 2 else None, weight.divisor)
    rules = (
        [replace(rule, zero_offset=offset) for offset in _ZERO_OFFSETS]
        if weight.layout is QuantizedLayout.GPTQ
        else [rule]
    )
    parts = tuple(StoredPart(part, part_data) for part, part_data in data.items())
    scales = weight.parts[QuantizedPart.SCALES].fqn.rpartition(".")[2]
    quantization = Quantization(weight.layout, before.dtype, shape, _name_codes(weight, shape), scales, block)
    return _Pair(
        number,
        weight,
        before,
        quantization,
        [QuantizedTask(weight.fqn, dense, candidate, parts) for candidate in rules],
    )


def _find_block(weight: QuantizedWeight, shape: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the shape of a block: the weight values that share a scale.

    Return None for codes and scales of other shapes.
    """
    rows, columns = shape
    scales, codes = weight.parts[QuantizedPart.SCALES], weight.codes
    count = math.prod(scales.shape or ())
    if weight.layout is QuantizedLayout.BITSANDBYTES:
        is_whole = math.prod(codes.shape or ()) == (rows * columns + 1) // 2 and count > 0
        return (1 << (-(-rows * columns // count) - 1).bit_length(),) if is_whole else None
    if weight.layout is QuantizedLayout.SCALED:
        return _find_scaled_block(weight, shape, scales.shape or ()) if codes.shape == shape else None
    groups = count // rows if rows and count % rows == 0 else 0
    return (1, columns // groups) if groups and columns % groups == 0 else None


def _find_scaled_block(
    weight: QuantizedWeight, shape: tuple[int, int], scales: tuple[int, ...]
) -> tuple[int, int] | None:
    rows, columns = shape
    if math.prod(scales) == 1:
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    size = weight.square or DEFAULT_BLOCK
    if scales == (-(-rows // size), -(-columns // size)):
        return size, size
    is_grouped = len(scales) == 2 and scales[0] == rows and scales[1] and columns % scales[1] == 0
    return (1, columns // scales[1]) if is_grouped else None


def _name_codes(weight: QuantizedWeight, shape: tuple[int, int]) -> str:
    """Return the type of the codes, such as `int4`, `nf4` or `float8_e4m3fn`."""
    codes = weight.codes.shape or ()
    if weight.layout is QuantizedLayout.SCALED:
        return weight.codes.dtype
    if weight.layout is QuantizedLayout.BITSANDBYTES:
        state = weight.parts.get(QuantizedPart.STATE)
        return "fp4" if state is not None and state.fqn.endswith("fp4") else "nf4"
    if weight.layout in (QuantizedLayout.NVFP4, QuantizedLayout.MXFP4):
        return "fp4"
    if weight.layout is QuantizedLayout.AWQ:
        return "int4"
    return f"int{math.prod(codes) * 32 // math.prod(shape)}"


def _build_transformation(pair: _Pair, error: QuantizedError, kind: TransformationKind) -> Transformation:
    has_factors = pair.quantization.layout in _LAYOUTS_WITH_FACTORS or pair.quantization.scales in _SCALES_WITH_FACTORS
    by_channel = has_factors and error.relative > _MAX_ERROR and error.by_channel * _MIN_CHANNEL_GAIN < error.relative
    relative = error.by_channel if by_channel else error.relative
    elements = math.prod(pair.dense.shape or ())
    names = () if pair.weight.in_one_row else pair.weight.parts.items()
    others = [row.fqn for part, row in names if part is not QuantizedPart.CODES]
    return Transformation(
        kind,
        elements,
        exceptions=0 if relative <= _MAX_ERROR else elements,
        sources=(pair.dense.fqn, *others),
        relative_l2=relative,
        quantization=replace(pair.quantization, has_channel_factors=by_channel),
    )


def _describe_blocks(change: Change, kind: TransformationKind) -> Transformation | None:
    """Return how a GGUF tensor was quantized in blocks, with the error that the plain diff measured."""
    before, after, values = change.before, change.after, change.values
    if before is None or after is None or values is None or values.relative_l2 is None or values.left_out:
        return None
    if after.dtype not in BLOCK_SIZES or before.dtype in BLOCK_SIZES:
        return None
    block = BLOCK_SIZES[after.dtype][0]
    quantization = Quantization(
        QuantizedLayout.GGUF, before.dtype, before.shape or (), after.dtype, "its scales", (block,)
    )
    exceptions = 0 if values.relative_l2 <= _MAX_ERROR else values.elements
    return Transformation(
        kind,
        values.elements,
        exceptions=exceptions,
        sources=(before.fqn,),
        relative_l2=values.relative_l2,
        quantization=quantization,
    )


def _has_unknown_codes(change: Change) -> bool:
    before, after = change.before, change.after
    return (
        Field.DTYPE in change.fields
        and before is not None
        and after is not None
        and "float" in before.dtype
        and after.dtype in _CODE_DTYPES
    )
