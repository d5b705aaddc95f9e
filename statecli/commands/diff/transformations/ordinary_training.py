"""Recognise ordinary training from the differences alone, without another read of a tensor and without numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence

from statecli.commands.diff.result import Change, Field
from statecli.core.dtypes import SPACING
from statecli.core.model_state import TensorInfo
from statecli.values.delta import CompareOptions, Delta
from statecli.values.plain_pairs import compare_plain_pairs

#: Smallest cosine of a tensor that kept its values, because training changes values less than this.
MAX_COSINE = 0.9
#: Largest fraction of elements that may be exceptions of a transformation.
MAX_EXCEPTIONS = 1 / 1000
#: Smallest relative change that may be more than a step of training.
MIN_CHANGE = 1e-2
#: Largest change of the projection on the old values in a step of training; a larger change may be a factor.
_MAX_PROJECTION = 3e-3
#: Largest number of roundings, in spacings, of an element of a multiple, with a margin; and relative error of the sums
#: of a tally.
_MAX_ROUNDINGS, _ERROR_OF_SUMS = 8, 1e-5
#: Largest number of elements, and smallest |cosine|, of a vector that may be related to its old values.
_MAX_RELATED_ELEMENTS, _MIN_COSINE = 255, 0.2
#: Dtypes to which no weight is quantized.
_UNQUANTIZED_DTYPES = frozenset(["float64", "float32", "bfloat16", "float16", "int64", "bool"])


def is_training(changes: Sequence[Change]) -> bool:
    """Return True if the changes look like ordinary training, so that no search for transformations is needed."""
    shapes = Counter(change.before.shape for change in changes if change.before is not None)
    if not all(_is_step(change) or _is_step_of_vector(change, shapes) for change in changes):
        return False
    sources = find_namesakes(changes, changes, ())
    before, after = list(sources.values()), [row for n in sources if (row := changes[n].after) is not None]
    copies = compare_plain_pairs(before, after, CompareOptions(bitwise=True))
    return copies is not None and not any(
        are_few(changes[n], copy.changed) for n, copy in zip(sources, copies, strict=True)
    )


def _is_step(change: Change) -> bool:
    return _is_same_kind(change) and not was_replaced(change) and not may_be_scaled(change)


def _is_step_of_vector(change: Change, shapes: Mapping[tuple[int, ...] | None, int]) -> bool:
    """Return True for a replaced vector with a unique shape: its values cannot come from a different tensor."""
    row, values = change.before, change.values
    if row is None or row.shape is None or len(row.shape) != 1 or shapes[row.shape] > 1:
        return False
    if values is None or values.cosine is None or values.changed < values.elements:
        return False
    is_related = values.elements <= _MAX_RELATED_ELEMENTS or abs(values.cosine) >= _MIN_COSINE
    return is_related and _is_same_kind(change) and not may_be_scaled(change)


def _is_same_kind(change: Change) -> bool:
    """Return True if both sides have the same shape and dtype, are not quantized, and their values were compared."""
    before, after = change.before, change.after
    return (
        before is not None
        and after is not None
        and not (before.parts or after.parts)
        and {before.dtype, after.dtype} <= _UNQUANTIZED_DTYPES
        and not {Field.DTYPE, Field.SHAPE} & set(change.fields)
        and change.not_compared is None
        and change.transformation is None
    )


def was_replaced(change: Change) -> bool:
    """Return True if the cosine of the new and the old values is low."""
    cosine = change.values.cosine if change.values is not None else None
    return cosine is not None and cosine < MAX_COSINE


def are_few(change: Change, exceptions: int) -> bool:
    """Return True if `exceptions` is small, and smaller than the number of the tensor's changed elements."""
    after, values = change.after, change.values
    if after is None or (values is not None and values.changed <= exceptions):
        return False
    return exceptions <= max(1, MAX_EXCEPTIONS * after.elements)


def find_namesakes(
    changes: Sequence[Change],
    all_changes: Sequence[Change],
    explained_numbers: Container[int],
) -> dict[int, TensorInfo]:
    """For each unexplained tensor, find an old tensor of this name in a different section or under a different prefix.

    An averaged copy (`ema`) differs little from the model, so a cosine cannot show that the copy replaced the model.
    """
    sources: dict[tuple[str, object, str], list[TensorInfo]] = {}
    for row in (change.before for change in all_changes if change.before is not None):
        for name in _list_names(row):
            sources.setdefault((name, row.shape, row.dtype), []).append(row)
    candidates: dict[int, TensorInfo] = {}
    for n, change in enumerate(changes):
        after, before = change.after, change.before
        if (
            n in explained_numbers
            or after is None
            or before is None
            or change.values is None
            or not change.values.changed
        ):
            continue
        rows = (row for name in _list_names(after) for row in sources.get((name, after.shape, after.dtype), ()))
        source = next((row for row in rows if row is not before), None)
        if source is not None:
            candidates[n] = source
    return candidates


def _list_names(row: TensorInfo) -> tuple[str, ...]:
    _, dot, tail = row.fqn.partition(".")
    return (row.fqn, f"*.{tail}") if dot else (row.fqn,)


def may_be_scaled(change: Change) -> bool:
    """Return True if the values changed by more than training steps explain, so that a factor is worth a check."""
    values = change.values
    if values is None or values.relative_l2 is None or values.left_out > MAX_EXCEPTIONS * values.elements:
        return False
    if values.max_abs is None or values.mean_abs is None or values.max_abs <= values.mean_abs * (1 + 1e-9):
        return False
    if values.relative_l2 < MIN_CHANGE or _keeps_projection(values.relative_l2, values.cosine):
        return False
    dtype = change.after.dtype if change.after is not None else ""
    return values.cosine is None or values.l2 is None or _may_be_multiple(values, values.cosine, values.l2, dtype)


def _may_be_multiple(values: Delta, cosine: float, l2: float, dtype: str) -> bool:
    """Return True if the new values may be a multiple of the old values, given rounding and a few wrong elements.

    Without this test, each pair of different values would be sampled.
    """
    relative = values.relative_l2 or 0.0
    ratio = min((ratio for ratio in _list_norm_ratios(relative, cosine) if ratio > 0), default=0.0)
    after = ratio / relative * l2 if relative else 0.0
    if not after:
        return True
    # All errors are fractions of the new norm, because the square of a float64 norm may be beyond float64.
    spacing, smallest = SPACING.get(dtype, (1.0, 0.0))
    shares = [
        _MAX_ROUNDINGS * spacing,
        math.sqrt(_ERROR_OF_SUMS),
        math.sqrt(values.elements) * _MAX_ROUNDINGS * (smallest / after),
        math.sqrt(int(MAX_EXCEPTIONS * values.elements)) * 2 * ((values.max_abs or 0.0) / after),
    ]
    return 1 - cosine**2 <= sum(share * share for share in shares)


def _keeps_projection(relative: float, cosine: float | None) -> bool:
    """Return True if the projection of the new values on the old values equals the old, as after an orthogonal step."""
    if cosine is None:
        return False
    return any(abs(ratio * cosine - 1) < _MAX_PROJECTION for ratio in _list_norm_ratios(relative, cosine))


def _list_norm_ratios(relative: float, cosine: float) -> tuple[float, float]:
    """Return the two possible values of |after| / |before|: the roots x of x² - 2 x cosine + 1 = relative²."""
    sine = math.sqrt(1 - cosine**2)
    root = math.sqrt(max(0.0, relative - sine)) * math.sqrt(relative + sine)
    return cosine - root, cosine + root
