"""Check that a result in a shard file is possible for its task, because `merge` computes sums of such results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from statecli.core.errors import ChecksumMismatch
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Stats
from statecli.values.compare_task import CompareTask, Comparison
from statecli.values.element_checks import MAX_LISTED_ROWS, CheckResult
from statecli.values.elements import find_element
from statecli.values.read import FREE_OVERLAP_ELEMENTS
from statecli.values.summary import Facts
from statecli.values.tally import Tally, Wide
from statecli.workers.task import Piece

#: Pairs of a field's name and whether its value is possible.
Checks = Iterator[tuple[str, bool]]

_DIGEST = compile_on_use(r"[0-9a-f]{64}")
#: Maximum exponent of a `Wide`: far beyond any float64, and far below the limit of `ldexp`.
_MAX_EXPONENT = 1 << 20


def find_invalid_field(task: object, result: object) -> str | None:
    """Return the first field of a result that is impossible for its task, or None if all fields are possible."""
    return next((name for name, is_possible in _check_result(task, result) if not is_possible), None)


def _check_result(task: Any, result: Any) -> Checks:
    if isinstance(result, Comparison):
        yield from _check_comparison(task, result)
    elif isinstance(result, CheckResult):
        yield from _check_exceptions(math.prod(task.after.shape), task.after.shape, result)
    elif isinstance(result, Facts):
        yield from _check_facts(task.data.dtype, math.prod(task.data.shape), result)
    elif isinstance(result, Stats):
        yield from _check_stats(task.tensor.elements * _get_values_per_element(task.tensor.dtype), result)
    elif isinstance(result, ChecksumMismatch) and result.place is not None:
        place = result.place
        yield "place", place.path in set(task.paths) and min(place.offset, place.length) >= 0
    elif isinstance(result, str):
        yield "result", _DIGEST.fullmatch(result) is not None
    elif isinstance(result, int):
        yield "result", 0 <= result < 1 << 32


def _check_exceptions(elements: int, shape: tuple[int, ...], result: CheckResult) -> Checks:
    yield "elements", result.elements == elements
    for name in ("exceptions", "not_truncated", "not_neighbours", "changed"):
        yield name, 0 <= getattr(result, name) <= elements
    yield "rows", 0 <= result.rows <= min(result.exceptions, shape[0] if shape else 1)
    yield "first_rows", len(result.first_rows) == min(result.rows, MAX_LISTED_ROWS)
    yield "first_rows", all(0 <= row < (shape[0] if shape else 1) for row in result.first_rows)


def _get_values_per_element(dtype: str) -> int:
    element = find_element(dtype)
    return element.values if element else 1


def _check_comparison(task: CompareTask, comparison: Comparison) -> Checks:
    position, stop = task.start, task.start + task.count
    is_run = isinstance(task.before, Piece) and not task.norm
    for start, count in comparison.equal:
        yield "equal", is_run and position <= start and 0 < count <= stop - start
        position = start + count
    equal_count = sum(count for _, count in comparison.equal)
    changeable = 0 if task.norm else task.count - equal_count
    tally = comparison.tally
    yield from _check_counts(tally, changeable, (task.count - equal_count) * _get_values_per_element(task.before.dtype))
    yield "first", (tally.first is None) is (tally.changed == 0)
    yield "first", tally.first is None or task.start <= tally.first < stop
    yield from _check_sums(tally)
    yield "finite", tally.finite + tally.left_out in _list_value_counts(task, task.count - equal_count)


def _list_value_counts(task: CompareTask, elements: int) -> tuple[int, ...]:
    """Return the numbers of compared values that a result may have if the bytes of `elements` elements may differ."""
    # 0 for views that overlap too much to be read: they can only have equal bytes, not compared values.
    no_values = () if isinstance(task.before, Piece) or elements <= FREE_OVERLAP_ELEMENTS else (0,)
    return (elements, elements * _get_values_per_element(task.before.dtype), *no_values)


def _check_counts(tally: Tally, elements: int, values: int) -> Checks:
    """Yield whether each count is possible. `elements`: elements that may have changed; `values`: compared values."""
    yield "changed", 0 <= tally.changed <= elements
    yield "finite", 0 <= tally.finite <= values
    yield "left_out", 0 <= tally.left_out <= values - tally.finite
    yield "lost", 0 <= tally.lost <= min(tally.changed, tally.left_out)
    for side in ("before", "after"):
        nan, inf = getattr(tally, f"nan_{side}"), getattr(tally, f"inf_{side}")
        yield f"nan_{side}", 0 <= nan <= tally.left_out
        yield f"inf_{side}", 0 <= inf <= tally.left_out - nan


def _check_sums(tally: Tally) -> Checks:
    yield "max_abs", tally.max_abs >= 0
    for name in ("sum_abs", "squares", "before", "after"):
        yield name, _is_sum(getattr(tally, name))
    yield "product", abs(tally.product.exponent) < _MAX_EXPONENT and not math.isnan(tally.product.mantissa)
    yield "product", _is_product(tally.product, tally.before, tally.after)


def _is_sum(total: Wide) -> bool:
    return total.mantissa >= 0 and abs(total.exponent) < _MAX_EXPONENT


def _is_product(product: Wide, before: Wide, after: Wide) -> bool:
    """Return whether a dot product is possible for two vector norms (Cauchy-Schwarz inequality), up to rounding."""
    if not product.mantissa or not all(math.isfinite(side.mantissa) for side in (product, before, after)):
        return True
    if not before.mantissa or not after.mantissa:
        return False
    digits = [math.frexp(side.mantissa)[1] + 2 * side.exponent for side in (product, before, after)]
    return 2 * digits[0] <= digits[1] + digits[2] + 4


def _check_facts(dtype: str, elements: int, facts: Facts) -> Checks:
    yield "elements", facts.elements in (elements, elements * _get_values_per_element(dtype))
    for name in ("nan", "inf", "zeros", "denormal"):
        yield name, 0 <= getattr(facts, name) <= facts.elements
    yield "minus_inf", 0 <= facts.minus_inf <= facts.inf
    yield "low", (facts.low is None) is (facts.high is None)
    if facts.low is not None and facts.high is not None:
        yield "low", _is_value(facts.low) and facts.low <= facts.high
        yield "high", _is_value(facts.high)
    element = find_element(dtype)
    width = element.size if element else 0
    yield "typical", facts.typical is None or (_is_value(facts.typical) and facts.typical >= 0)
    yield "only", facts.only is None or len(facts.only) == width
    yield "digest", facts.digest is None or 0 <= facts.digest < 1 << 64


def _is_value(value: float | int) -> bool:
    return math.isfinite(value) if isinstance(value, float) else -(1 << 63) <= value < 1 << 64


def _check_stats(values: int, stats: Stats) -> Checks:
    for name in ("zeros", "nan", "inf"):
        yield name, 0 <= (getattr(stats, name) or 0) <= values
    for name in ("min", "max", "mean", "std"):
        yield name, math.isfinite(getattr(stats, name) or 0.0)
    yield "std", (stats.std or 0.0) >= 0
    yield "min", (stats.min is None) is (stats.max is None)
    yield "min", stats.min is None or stats.max is None or stats.min <= stats.max
