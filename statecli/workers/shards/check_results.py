"""Whether a result can be that of its task. A part is a file as any other, and what adds results up trusts them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from statecli.core.errors import ChecksumMismatch
from statecli.core.state import Stats
from statecli.values.compare_task import Found, Piece, Task
from statecli.values.elements import element
from statecli.values.facts_kernel import Facts
from statecli.values.read import OVERLAP_FREE
from statecli.values.tally import Tally, Wide
from statecli.workers.shards import tasks

#: A field's name, and whether what it has can be.
Checks = Iterator[tuple[str, bool]]

_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Of a `Wide`: far beyond any float64, and far from what `ldexp` refuses.
_EXPONENT = 1 << 20


def wrong(function: str, task: Any, result: Any) -> str | None:
    """The first field of a result that its task cannot have; None where it can have them all."""
    return next((name for name, is_possible in _checks(function, task, result) if not is_possible), None)


def _checks(function: str, task: Any, result: Any) -> Checks:
    if isinstance(result, Found):
        yield from _of_found(task, result)
    elif isinstance(result, Facts):
        yield from _of_facts(task.data.dtype, math.prod(task.data.shape), result)
    elif isinstance(result, Stats):
        yield from _of_stats(task.tensor.elements * _values(task.tensor.dtype), result)
    elif isinstance(result, ChecksumMismatch) and result.place is not None:
        place = result.place
        yield "place", place.path in set(tasks.paths(task)) and min(place.offset, place.length) >= 0
    elif isinstance(result, str):
        yield "result", _DIGEST.fullmatch(result) is not None
    elif isinstance(result, int):
        yield "result", function == "fingerprint_batch" and 0 <= result < 1 << 32


def _values(dtype: str) -> int:
    """How many come out of an element."""
    kind = element(dtype)
    return kind.values if kind else 1


def _of_found(task: Task, found: Found) -> Checks:
    at, stop = task.start, task.start + task.count
    is_run = isinstance(task.before, Piece) and not task.norm
    for start, count in found.equal:
        yield "equal", is_run and at <= start and 0 < count <= stop - start
        at = start + count
    equal = sum(count for _, count in found.equal)
    most = 0 if task.norm else task.count - equal
    yield from _of_counts(found.tally, most, (task.count - equal) * _values(task.before.dtype))
    yield "first", (found.tally.first is None) is (found.tally.changed == 0)
    yield "first", found.tally.first is None or task.start <= found.tally.first < stop
    yield from _of_sums(found.tally)
    yield "finite", found.tally.finite + found.tally.left_out in _compared(task, task.count - equal)


def _compared(task: Task, elements: int) -> tuple[int, ...]:
    """Return how many values can have been compared of so many elements whose bytes were not found equal."""
    # Of views that overlap without end, equal bytes alone are known.
    whole = () if isinstance(task.before, Piece) or elements <= OVERLAP_FREE else (0,)
    return (elements, elements * _values(task.before.dtype), *whole)


def _of_counts(tally: Tally, elements: int, values: int) -> Checks:
    """`elements` that can have changed, and all `values` that were compared."""
    yield "changed", 0 <= tally.changed <= elements
    yield "finite", 0 <= tally.finite <= values
    yield "left_out", 0 <= tally.left_out <= values - tally.finite
    yield "lost", 0 <= tally.lost <= min(tally.changed, tally.left_out)
    for side in ("before", "after"):
        nan, inf = getattr(tally, f"nan_{side}"), getattr(tally, f"inf_{side}")
        yield f"nan_{side}", 0 <= nan <= tally.left_out
        yield f"inf_{side}", 0 <= inf <= tally.left_out - nan


def _of_sums(tally: Tally) -> Checks:
    yield "max_abs", tally.max_abs >= 0
    for name in ("sum_abs", "squares", "before", "after"):
        yield name, _is_sum(getattr(tally, name))
    yield "product", abs(tally.product.exponent) < _EXPONENT and not math.isnan(tally.product.mantissa)
    yield "product", _is_product(tally.product, tally.before, tally.after)


def _is_sum(one: Wide) -> bool:
    return one.mantissa >= 0 and abs(one.exponent) < _EXPONENT


def _is_product(product: Wide, before: Wide, after: Wide) -> bool:
    """Whether it is no larger than the two norms allow, but for what is rounded."""
    if not product.mantissa or not all(math.isfinite(one.mantissa) for one in (product, before, after)):
        return True
    if not before.mantissa or not after.mantissa:
        return False
    digits = [math.frexp(one.mantissa)[1] + 2 * one.exponent for one in (product, before, after)]
    return 2 * digits[0] <= digits[1] + digits[2] + 4


def _of_facts(dtype: str, elements: int, facts: Facts) -> Checks:

    yield "elements", facts.elements in (elements, elements * _values(dtype))
    for name in ("nan", "inf", "zeros", "denormal"):
        yield name, 0 <= getattr(facts, name) <= facts.elements
    yield "minus_inf", 0 <= facts.minus_inf <= facts.inf
    yield "low", (facts.low is None) is (facts.high is None)
    if facts.low is not None and facts.high is not None:
        yield "low", _is_value(facts.low) and facts.low <= facts.high
        yield "high", _is_value(facts.high)
    kind = element(dtype)
    width = kind.size if kind else 0
    yield "typical", facts.typical is None or (_is_value(facts.typical) and facts.typical >= 0)
    yield "only", facts.only is None or len(facts.only) == width
    yield "digest", facts.digest is None or 0 <= facts.digest < 1 << 64


def _is_value(one: float | int) -> bool:
    return math.isfinite(one) if isinstance(one, float) else -(1 << 63) <= one < 1 << 64


def _of_stats(values: int, stats: Stats) -> Checks:
    for name in ("zeros", "nan", "inf"):
        yield name, 0 <= (getattr(stats, name) or 0) <= values
    for name in ("min", "max", "mean", "std"):
        yield name, math.isfinite(getattr(stats, name) or 0.0)
    yield "std", (stats.std or 0.0) >= 0
    yield "min", (stats.min is None) is (stats.max is None)
    yield "min", stats.min is None or stats.max is None or stats.min <= stats.max
