"""Check element by element whether a tensor is a cast, a scaling or a copy of another tensor.

A check reads both tensors once, block by block. Their shapes are equal; their dtypes may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial

import msgspec
import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData
from statecli.values.compare_task import rechunk
from statecli.values.data_task import DataTask, derived_batch
from statecli.values.elements import COMPLEX_PARTS, SMALL_FLOATS, Array, build_small_float_table, require_element
from statecli.values.read import Strided, open_view, read_items, read_values
from statecli.values.tally import BLOCK_ELEMENTS
from statecli.workers import pool

#: Float types between which casts are checked -> number of bits. A cast never goes to more bits.
_FLOAT_BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
}
#: Maximum number of differing rows whose indexes are kept.
MAX_LISTED_ROWS = 8
#: Largest whole number whose square root is tried as a divisor: larger squares are near a whole number by chance.
_MAX_SQUARE = 1 << 32
#: Largest relative distance of an inverse factor from a square root: a few units in the last place of float64.
_MAX_ROOT_ERROR = 1e-15


class Operation(str, Enum):
    """Operation that may have turned the old tensor into the new tensor."""

    CAST = "cast"
    SCALE = "scale"
    COPY = "copy"


class CheckResult(msgspec.Struct, frozen=True, gc=False):
    """Counts of elements that are not the result of an operation.

    Attributes:
        elements: Number of checked elements.
        changed: For a cast, number of elements with another value than before.
        exceptions: Number of elements that differ from the result rounded to the nearest value of the dtype, ties to
            even.
        not_truncated: For a cast, number of elements that are not rounded towards zero.
        not_neighbours: For a cast, number of elements that are neither of the two nearest values.
        rows: For a copy, number of rows (indexes along the first dimension) with an exception.
        first_rows: Indexes of the first rows with an exception.
    """

    elements: int = 0
    exceptions: int = 0
    not_truncated: int = 0
    not_neighbours: int = 0
    rows: int = 0
    first_rows: tuple[int, ...] = ()
    changed: int = 0


class CheckTask(DataTask, frozen=True, gc=False):
    """Check whether `after` is the result of an operation on `before`.

    A copy to another float type must have the nearest values of this type.

    Attributes:
        factor: For `Operation.SCALE`, the factor applied to the old values.
        max_exceptions: For `Operation.SCALE`, the number of exceptions beyond which the check stops.
    """

    operation: Operation
    before: TensorData
    after: TensorData
    factor: float = 1.0
    max_exceptions: float = math.inf

    @property
    def size(self) -> int:
        """Size in bytes of the tensor with the wider dtype."""
        return math.prod(self.before.shape) * max(require_element(s.dtype).size for s in (self.before, self.after))

    def compute(self) -> CheckResult:
        """Return the counts of elements that are not the result of the operation."""
        with open_view(self.before, self.name) as before, open_view(self.after, self.name) as after:
            return _CHECKS[self.operation](self, before, after)


def can_copy(before: str, after: str) -> bool:
    """Return whether a tensor may be a copy of another tensor: both dtypes are equal, or both are float types."""
    return before == after or (before in _FLOAT_BITS and after in _FLOAT_BITS)


def can_cast(before: str, after: str) -> bool:
    """Return whether a cast from dtype `before` to dtype `after`, both float or both complex, may round values."""
    if (before in COMPLEX_PARTS) is not (after in COMPLEX_PARTS):
        return False
    wide, narrow = _FLOAT_BITS.get(COMPLEX_PARTS.get(before, before)), _FLOAT_BITS.get(COMPLEX_PARTS.get(after, after))
    return before != after and wide is not None and narrow is not None and wide >= narrow


@with_denormals
def check_elements(
    tasks: Sequence[CheckTask], *, jobs: int = 0, derived: bool = True
) -> list[CheckResult | StateError]:
    """Return the result of each check, in order, or the error of an unreadable tensor.

    `derived`: see `pool.run_tasks`.
    """
    if not tasks:
        return []
    return pool.run_tasks(check_elements_batch, None, tasks, jobs=jobs, absent=CheckResult(), derived=derived)


def check_elements_batch(_: None, tasks: Sequence[CheckTask]) -> list[CheckResult | StateError]:
    """Return the result or the error of each task of a batch."""
    return derived_batch(None, tasks)


def _check_cast(task: CheckTask, before: Strided, after: Strided) -> CheckResult:
    """Check whether all values were rounded to the nearest. If not, read again and check other ways of rounding."""
    elements = exceptions = changed_count = 0
    parts, dtype = (2, COMPLEX_PARTS[task.after.dtype]) if task.after.dtype in COMPLEX_PARTS else (1, task.after.dtype)
    for old, new in _pair_parts(before, after):
        nearest = round_to(old, dtype)
        elements += old.size // parts
        changed_count += _count_elements(new != old, parts)
        if not np.array_equal(new, nearest):
            exceptions += _count_elements(_is_not_nearest(old, new, nearest, dtype), parts)
    if not exceptions:
        return CheckResult(elements, changed=changed_count)
    not_truncated = not_neighbours = 0
    for old, new in _pair_parts(before, after):
        nearest = round_to(old, dtype)
        inner, outer = _find_neighbours(old, nearest, dtype)
        is_nan = np.isnan(nearest) & np.isnan(new)
        is_inner = (new == inner) | is_nan
        not_truncated += _count_elements(~is_inner, parts)
        not_neighbours += _count_elements(~(is_inner | (new == outer) | (new == nearest)), parts)
    return CheckResult(elements, exceptions, not_truncated, not_neighbours, changed=changed_count)


def _pair_parts(before: Strided, after: Strided) -> Iterator[tuple[Array, Array]]:
    """Yield the values of both tensors block by block. A complex value becomes its real and its imaginary part."""
    for old, new in _pair_blocks(read_values(before), read_values(after)):
        yield (old.view(old.real.dtype), new.view(new.real.dtype)) if old.dtype.kind == "c" else (old, new)


def _count_elements(are_parts: Array, parts: int) -> int:
    """Return the number of elements with at least one True part. A complex element has two parts."""
    return int(np.count_nonzero(are_parts.reshape(-1, parts).any(axis=1) if parts > 1 else are_parts))


def _is_not_nearest(old: Array, new: Array, nearest: Array, dtype: str) -> Array:
    """Return a mask of values not rounded to the nearest. From float64 to float16, values may be rounded twice."""
    exception_mask: Array = (new != nearest) & ~(np.isnan(nearest) & np.isnan(new))
    if dtype == "float16" and old.dtype == np.float64 and exception_mask.any():
        with np.errstate(all="ignore"):
            exception_mask &= new != old.astype(np.float16).astype(np.float64)
    return exception_mask


def _check_scale(task: CheckTask, before: Strided, after: Strided) -> CheckResult:
    """Check for values * factor and for values / (1 / factor), because rounding may differ between the two.

    Quotients are checked only if a product differs. Products of float32 values in float64 are checked last.
    """
    results: list[CheckResult] = []
    width: type[np.floating] = np.float64 if task.before.dtype == "float64" else np.float32
    scales = [partial(_scale_values, task, np.multiply, task.factor, width)]
    scales += [partial(_scale_values, task, np.divide, divisor, width) for divisor in _list_divisors(task.factor)]
    if task.before.dtype == task.after.dtype == "float32":
        scales.append(partial(_scale_values, task, np.multiply, task.factor, np.float64))
    for scale in scales:
        elements = exceptions = 0
        for size, fitting_count in _compare_scaled(before, after, scale):
            elements, exceptions = elements + size, exceptions + size - fitting_count
            if exceptions > task.max_exceptions:
                break
        results.append(CheckResult(elements, exceptions))
        if not exceptions:
            break
    return min(results, key=lambda result: result.exceptions)


def _list_divisors(factor: float) -> list[float]:
    """Return the numbers by which values may have been divided: 1 / factor, or a nearby integer or square root.

    The list is empty if 1 / factor is too large for float64.
    """
    inverse = 1 / factor
    if math.isinf(inverse):
        return []
    if abs(round(inverse) * factor - 1) < 1e-9:
        return [round(inverse)]
    square = inverse * inverse
    root = math.copysign(math.sqrt(round(square)), inverse) if square < _MAX_SQUARE else inverse
    return [inverse, root] if root != inverse and abs(root * factor - 1) < _MAX_ROOT_ERROR else [inverse]


def _scale_values(
    task: CheckTask, operation: np.ufunc, number: float, width: type[np.floating], values: Array
) -> Array:
    """Multiply or divide the values by a number in the type `width`, and round the result to the dtype of `after`."""
    with np.errstate(all="ignore"):
        scaled_values: Array = operation(values.astype(width, copy=False), np.asarray(number, width))
    return scaled_values if task.after.dtype == width.__name__ else round_to(scaled_values, task.after.dtype)


def _compare_scaled(before: Strided, after: Strided, scale: Callable[[Array], Array]) -> Iterator[tuple[int, int]]:
    """Yield for each block the number of elements, and the number of new values that equal the scaled old values."""
    for old, new in _pair_blocks(read_values(before), read_values(after)):
        result = scale(old)
        equal = int(np.count_nonzero(new == result))
        yield new.size, equal if equal == new.size else equal + int(np.count_nonzero(np.isnan(new) & np.isnan(result)))


def _check_copy(task: CheckTask, before: Strided, after: Strided) -> CheckResult:
    inner = max(1, math.prod(task.after.shape[1:]))
    is_same = task.before.dtype == task.after.dtype
    items = require_element(task.after.dtype).items if is_same else 1
    at = exceptions = rows = 0
    last, first_rows = -1, list[int]()
    for differs in _compare_bits(before, after, items) if is_same else _compare_rounded(task, before, after):
        places = np.flatnonzero(differs.reshape(-1, items).any(axis=1)) + at
        at += differs.size // items
        exceptions += places.size
        numbers = np.unique(places // inner)
        numbers = numbers[numbers > last]  # a row may continue in the next block
        if numbers.size:
            last, rows = int(numbers[-1]), rows + numbers.size
            first_rows += numbers[: MAX_LISTED_ROWS - len(first_rows)].tolist()
    return CheckResult(at, exceptions, rows=rows, first_rows=tuple(first_rows))


def _compare_bits(before: Strided, after: Strided, items: int) -> Iterator[Array]:
    for old, new in _pair_blocks(read_items(before), read_items(after), items):
        word = f"u{min(old.itemsize, 8)}"  # a complex128 has two words
        differing_words = old.view(word) != new.view(word)
        yield (
            differing_words.reshape(-1, differing_words.size // old.size).any(axis=1)
            if differing_words.size > old.size
            else differing_words
        )


def _compare_rounded(task: CheckTask, before: Strided, after: Strided) -> Iterator[Array]:
    for old, new in _pair_blocks(read_values(before), read_values(after)):
        nearest = round_to(old, task.after.dtype)
        yield _is_not_nearest(old, new, nearest, task.after.dtype)


_CHECKS = {Operation.CAST: _check_cast, Operation.SCALE: _check_scale, Operation.COPY: _check_copy}


def _pair_blocks(before: Iterable[Array], after: Iterable[Array], items: int = 1) -> Iterator[tuple[Array, Array]]:
    return zip(rechunk(before, BLOCK_ELEMENTS * items), rechunk(after, BLOCK_ELEMENTS * items), strict=True)


# --- rounding --------------------------------------------------------------------------------------------------------


def round_to(values: Array, dtype: str) -> Array:
    """Return values rounded to the nearest value of a float type, ties to even, as floats.

    float64 is first rounded to float32, as in torch. Beyond the largest finite value, the nearest is infinity; for
    float8_e4m3fn, which lacks infinity, it is the largest value.
    """
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32, copy=False)
        if dtype == "float64":
            return values
        if dtype == "float32":
            return narrow
        if dtype == "float16":
            return narrow.astype(np.float16).astype(np.float32)
        if dtype == "bfloat16":
            bits = narrow.view(np.uint32)
            rounded_bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
            finite = np.isfinite(narrow)
            return (
                rounded_bits.view(np.float32)
                if finite.all()
                else np.where(finite, rounded_bits.view(np.float32), narrow)
            )
        return _round_by_table(narrow, dtype)


def _find_neighbours(values: Array, nearest: Array, dtype: str) -> tuple[Array, Array]:
    """Return, for each value, the two numbers of a float type that enclose it: first the number nearer to zero."""
    with np.errstate(all="ignore"):
        if dtype != "float32":
            values = values.astype(np.float32, copy=False)
        step_towards_zero = _step_values(nearest, dtype, -1)
        step_from_zero = _step_values(nearest, dtype, 1)
        inner = np.where(np.abs(nearest) > np.abs(values), step_towards_zero, nearest)
        outer = np.where(np.abs(nearest) < np.abs(values), step_from_zero, nearest)
        return inner, outer


def _step_values(values: Array, dtype: str, direction: int) -> Array:
    """Return the next values of a float type after `values` of this type, away from zero (1) or towards zero (-1)."""
    if dtype in ("float16", "float32"):
        typed_values = values.astype(dtype)
        toward = np.copysign(typed_values.dtype.type(np.inf if direction > 0 else 0), typed_values)
        next_values: Array = np.nextafter(typed_values, toward).astype(values.dtype)
        return next_values
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return (bits + np.uint32(0x10000 if direction > 0 else 0xFFFF0000)).view(np.float32)
    magnitudes = _list_magnitudes(dtype)
    index = np.searchsorted(magnitudes, np.abs(values)) + direction
    return np.copysign(magnitudes[np.clip(index, 0, magnitudes.size - 1)], values)


def _list_magnitudes(dtype: str) -> Array:
    """Return the finite values from 0 up, indexed by code, then the value that torch stores for larger numbers.

    The last value is infinity, NaN for the types without a negative zero, and the largest value for float8_e4m3fn.
    """
    kind = SMALL_FLOATS[dtype]
    table: Array = build_small_float_table(dtype)[: 1 << (kind.exponent_bits + kind.mantissa_bits)]
    finite = table[np.isfinite(table)]
    beyond = {"ieee": np.inf, "negative zero": np.nan}.get(kind.special, finite[-1])
    return np.append(finite, finite.dtype.type(beyond))


def _round_by_table(values: Array, dtype: str) -> Array:
    magnitudes = _list_magnitudes(dtype)
    finite = magnitudes[:-1].astype(np.float64)
    # The step beyond the largest value has the width of the step before.
    grid = np.append(finite, 2 * finite[-1] - finite[-2])
    size = np.abs(values)
    index_below = np.clip(np.searchsorted(finite, size, side="right") - 1, 0, finite.size - 1)
    index_above = np.where(finite[index_below] < size, index_below + 1, index_below)
    low, high = size - grid[index_below], grid[index_above] - size
    is_low = (low < high) | ((low == high) & (index_below % 2 == 0))
    nearest = np.copysign(np.where(is_low, magnitudes[index_below], magnitudes[index_above]), values)
    return np.where(np.isnan(values), values, nearest)
