"""Recognise tensors that became a multiple of their old values, or their transpose."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from statecli.commands.diff.result import Change, Field, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.ordinary_training import (
    MAX_COSINE,
    MAX_EXCEPTIONS,
    MIN_CHANGE,
    may_be_scaled,
    was_replaced,
)
from statecli.commands.diff.transformations.views import (
    get_sampled,
    locate,
    name_rounding,
    permute,
    take_places,
    take_sample,
)
from statecli.core.model_state import TensorData
from statecli.core.part_rows import replace_data
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_copy, check_elements
from statecli.values.pair_plan import Pair
from statecli.values.ratios import estimate_factor
from statecli.values.similarity import find_most_similar

#: Smallest number of elements of a multiple whose products are rounded, and whose products are exact. A few rounded
#: products fit some factor by chance.
_MIN_ELEMENTS, _MIN_EXACT_ELEMENTS = 16, 4
#: Largest fraction of differing elements in a sample, because wrong elements may be neighbours.
_MAX_SAMPLE_EXCEPTIONS = 1 / 3
#: Number of factors with four digits, of any magnitude: the evidence must exceed the choice of a factor.
_FACTOR_COUNT = 1 << 16
#: Number of factors with the digits of float32.
_LONG_FACTOR_COUNT = 1 << 32
#: Largest whole number whose square root is tried as a factor: 1 / sqrt(128) scales the logits of attention.
_MAX_ROOT = 1 << 16
#: Largest factor with the digits of float32.
_MAX_LONG_FACTOR = 1e38
#: Largest distance to the transpose, as a fraction of the distance to the matrix before, for a matrix that was
#: transposed and then changed.
_MAX_DISTANCE_SHARE = 0.5


def find_factors(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the tensors that became a multiple of their old values, keyed by index in `changes`.

    A factor is a short decimal or fraction, the square root of a whole number, or has the digits of float32.
    """
    trials: list[tuple[int, CheckTask]] = []
    for n, change in enumerate(changes):
        before, after = get_sampled(change.before), get_sampled(change.after)
        if before is None or after is None or before.dtype != after.dtype or not may_be_scaled(change):
            continue
        before, after = locate(before, change.fqn), locate(after, change.fqn)
        trials += ((n, task) for task in _list_scaled(change.fqn, before, after))
    return {
        n: Transformation(TransformationKind.SCALED, result.elements, result.exceptions, factor=task.factor)
        for n, task, result in _iter_evident(trials, jobs)
    }


def find_transposes(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the matrices that became their transpose or a multiple of it, keyed by index in `changes`."""
    trials: list[tuple[int, CheckTask]] = []
    for n, change in enumerate(changes):
        before, after = get_sampled(change.before), get_sampled(change.after)
        if before is None or after is None or not can_copy(before.dtype, after.dtype) or len(before.shape) != 2:
            continue
        if before.shape != after.shape[::-1] or not (Field.SHAPE in change.fields or was_replaced(change)):
            continue
        before, after = permute(locate(before, change.fqn), (1, 0)), locate(after, change.fqn)
        if min(before.shape) > 1:
            trials.append((n, CheckTask(change.fqn, Operation.COPY, before, after)))
            trials += ((n, task) for task in _list_scaled(change.fqn, before, after))
    return {
        n: Transformation(
            TransformationKind.TRANSPOSED,
            result.elements,
            result.exceptions,
            factor=task.factor if task.operation is Operation.SCALE else None,
            rounding=name_rounding(task.before.dtype, task.after.dtype),
        )
        for n, task, result in _iter_evident(trials, jobs)
    }


def _iter_evident(trials: Sequence[tuple[int, CheckTask]], jobs: int) -> Iterator[tuple[int, CheckTask, CheckResult]]:
    """Yield (index in `changes`, check, result) for each check with few exceptions and enough evidence."""
    fitting = _try_samples(trials, jobs)
    limits = [MAX_EXCEPTIONS * math.prod(task.after.shape) for _, task in fitting]
    tasks = [replace(task, max_exceptions=limit) for (_, task), limit in zip(fitting, limits, strict=True)]
    results = check_elements(tasks, jobs=jobs)
    for (n, task), result in zip(fitting, results, strict=True):
        if (
            isinstance(result, CheckResult)
            and _fits(result, MAX_EXCEPTIONS)
            and is_evident(task.after, task.name, result.elements, result.exceptions, _count_ways(task))
        ):
            yield n, task, result


def find_changed_transposes(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the matrices that became similar to their transpose, with the cosine, keyed by index in `changes`.

    Samples must correlate, and the transpose must be much nearer than the old matrix itself.
    """
    pairs = {n: pair for n, change in enumerate(changes) if (pair := pair_with_transpose(change)) is not None}
    outcomes = compare_pairs(list(pairs.values()), CompareOptions(), jobs=jobs, derived=True)
    transposed: dict[int, Transformation] = {}
    for (n, pair), outcome in zip(pairs.items(), outcomes, strict=True):
        if not isinstance(outcome, Delta) or outcome.cosine is None or outcome.relative_l2 is None:
            continue
        direct_delta, data = changes[n].values, pair.after.data
        if (
            direct_delta is not None
            and direct_delta.relative_l2 is not None
            and outcome.relative_l2 > _MAX_DISTANCE_SHARE * direct_delta.relative_l2
        ):
            continue
        if data is not None and outcome.cosine >= MAX_COSINE and is_evident(data, pair.after.fqn, outcome.elements):
            kind, relative = TransformationKind.TRANSPOSED, outcome.relative_l2
            transposed[n] = Transformation(kind, outcome.elements, relative_l2=relative, cosine=outcome.cosine)
    return transposed


def pair_with_transpose(change: Change) -> Pair | None:
    """Return the transposed old matrix and the new matrix, or None if samples of the matrices do not correlate."""
    before, after = get_sampled(change.before), get_sampled(change.after)
    if before is None or after is None or change.before is None or change.after is None:
        return None
    if len(before.shape) != 2 or min(before.shape) < 2 or before.shape != after.shape[::-1]:
        return None
    if "float" not in before.dtype or "float" not in after.dtype:
        return None
    if not (Field.SHAPE in change.fields or was_replaced(change)):
        return None
    old = replace_data(change.before, permute(locate(before, change.fqn), (1, 0)))
    new = replace_data(change.after, locate(after, change.fqn))
    is_similar = find_most_similar([take_sample(new)], [take_sample(old)]) == [0]
    return Pair(old, new) if is_similar else None


def _count_ways(task: CheckTask) -> int:
    if task.operation is not Operation.SCALE:
        return 1
    return _FACTOR_COUNT if task.factor in _list_short_factors(task.factor) else _LONG_FACTOR_COUNT


def _list_scaled(name: str, before: TensorData, after: TensorData) -> Iterator[CheckTask]:
    """Yield a check for each factor that samples of both tensors suggest: new values = factor × old values."""
    if before.dtype != after.dtype or "float" not in before.dtype:
        return
    for factor in _list_factors(estimate_factor(take_places(before), take_places(after), name)):
        if math.prod(after.shape) >= (_MIN_EXACT_ELEMENTS if _is_exact_factor(factor) else _MIN_ELEMENTS):
            yield CheckTask(name, Operation.SCALE, before, after, factor)


def _is_exact_factor(factor: float) -> bool:
    """Return True for a power of two, because multiplying by it does not round."""
    return abs(math.frexp(factor)[0]) == 0.5


def _try_samples(trials: Sequence[tuple[int, CheckTask]], jobs: int) -> list[tuple[int, CheckTask]]:
    """Return the check whose samples fit best for each change. Skip changes without a fitting check."""
    samples = [
        (number, CheckTask(task.name, task.operation, *sides, task.factor))
        for number, (_, task) in enumerate(trials)
        for sides in zip(take_places(task.before), take_places(task.after), strict=True)
    ]
    counts = [CheckResult()] * len(trials)
    for (number, _), result in zip(samples, check_elements([task for _, task in samples], jobs=jobs), strict=True):
        if isinstance(result, CheckResult):
            count = counts[number]
            counts[number] = CheckResult(count.elements + result.elements, count.exceptions + result.exceptions)
    best: dict[int, tuple[int, CheckTask]] = {}
    for (n, task), count in zip(trials, counts, strict=True):
        if _fits(count, _MAX_SAMPLE_EXCEPTIONS) and (n not in best or count.exceptions < best[n][0]):
            best[n] = count.exceptions, task
    return [(n, task) for n, (_, task) in best.items()]


def _fits(result: CheckResult, max_share: float) -> bool:
    return bool(result.elements) and result.exceptions <= max_share * result.elements


def _list_factors(ratio: float | None) -> Iterator[float]:
    """Yield likely factors near `ratio`, short decimals first. A ratio near 1, as after training, yields nothing."""
    if not ratio or abs(ratio - 1) < MIN_CHANGE:
        return
    candidates = [*_list_short_factors(ratio), *_list_roots(ratio)]
    candidates += [struct.unpack("f", struct.pack("f", ratio))[0]] if abs(ratio) < _MAX_LONG_FACTOR else []
    for factor in dict.fromkeys(candidates):
        if factor and abs(factor - ratio) <= 1e-3 * abs(ratio):
            yield factor


def _list_short_factors(ratio: float) -> list[float]:
    candidates = [_round_to_digits(ratio, digits) for digits in (1, 2, 3, 4)]
    candidates += [1 / _round_to_digits(1 / ratio, digits) for digits in (1, 2, 3)]
    power = round(math.log2(abs(ratio)))
    return [*candidates, math.copysign(2.0**power, ratio)] if power < sys.float_info.max_exp else candidates


def _list_roots(ratio: float) -> list[float]:
    """Return √n or 1/√n, where n is the whole number nearest to the squared ratio or to its inverse.

    An inverse is computed in two ways, because n ** -0.5 and 1 / sqrt(n) may differ in the last bit of float64.
    """
    square = ratio * ratio
    number, divisor = (
        round(value) if value < _MAX_ROOT else 0 for value in (square, 1 / square if square else math.inf)
    )
    roots = [math.sqrt(number)] if number > 1 else []
    roots += [divisor**-0.5, 1 / math.sqrt(divisor)] if divisor > 1 else []
    return [math.copysign(root, ratio) for root in roots]


def _round_to_digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")
