"""Recognise tensors that are a multiple of the tensor before, or its transpose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from statecli.commands.diff.renames import is_constant
from statecli.commands.diff.result import Change, Field, Transformation, TransformationKind
from statecli.commands.diff.transformations.moves import was_replaced
from statecli.commands.diff.transformations.views import (
    get_data,
    is_cheap_to_sample,
    locate,
    name_rounding,
    permute,
    take_rows,
)
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values.delta import Delta
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_copy, check_elements

#: A multiple is parallel to the tensor before, up to the rounding of its elements; training changes the direction.
_MIN_COSINE = 1 - 1e-4
#: Elements of a multiple, at least: a few rounded products fit some factor by chance, unrounded ones do not.
_MIN_ELEMENTS, _MIN_EXACT_ELEMENTS = 16, 4
#: Part of the elements that may differ, for a claim with exceptions, and in a sample.
_MAX_EXCEPTIONS, _MAX_SAMPLE_EXCEPTIONS = 1 / 1000, 1 / 100
#: Smaller relative changes are steps of training.
_MIN_CHANGE = 1e-2


def find_factors(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the changes to a multiple of the values before, by number. A factor is a short decimal or fraction."""
    trials: list[tuple[int, CheckTask]] = []
    for n, change in enumerate(changes):
        before, after = _get_sampled(change.before), _get_sampled(change.after)
        if before is None or after is None or before.dtype != after.dtype or not _is_parallel(change):
            continue
        before, after = locate(before, change.fqn), locate(after, change.fqn)
        if "float" in before.dtype:
            for factor in _list_factors(change.values):
                if math.prod(after.shape) >= (_MIN_EXACT_ELEMENTS if _is_exact_factor(factor) else _MIN_ELEMENTS):
                    trials.append((n, CheckTask(change.fqn, Operation.SCALE, before, after, factor)))
    fitting = _try_samples(trials, jobs)
    results = check_elements([task for _, task in fitting], jobs=jobs)
    return {
        n: Transformation(TransformationKind.SCALED, result.elements, result.exceptions, factor=task.factor)
        for (n, task), result in zip(fitting, results, strict=True)
        if isinstance(result, CheckResult) and _fits(result, _MAX_EXCEPTIONS)
    }


def find_transposes(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the changes to the transpose of the matrix before, by number."""
    trials: list[tuple[int, CheckTask]] = []
    for n, change in enumerate(changes):
        before, after = _get_sampled(change.before), _get_sampled(change.after)
        if before is None or after is None or not can_copy(before.dtype, after.dtype) or len(before.shape) != 2:
            continue
        if before.shape != after.shape[::-1] or not (Field.SHAPE in change.fields or was_replaced(change)):
            continue
        before, after = locate(before, change.fqn), locate(after, change.fqn)
        if min(before.shape) > 1 and change.before is not None and not is_constant(change.before):
            trials.append((n, CheckTask(change.fqn, Operation.COPY, permute(before, (1, 0)), after)))
    fitting = _try_samples(trials, jobs)
    results = check_elements([task for _, task in fitting], jobs=jobs)
    return {
        n: Transformation(
            TransformationKind.TRANSPOSED,
            result.elements,
            result.exceptions,
            rounding=name_rounding(task.before.dtype, task.after.dtype),
        )
        for (n, task), result in zip(fitting, results, strict=True)
        if isinstance(result, CheckResult) and _fits(result, _MAX_EXCEPTIONS)
    }


def _get_sampled(row: TensorInfo | None) -> TensorData | None:
    return get_data(row) if row is not None and is_cheap_to_sample(row) else None


def _is_exact_factor(factor: float) -> bool:
    """Return True for a power of two: its products are not rounded."""
    return abs(math.frexp(factor)[0]) == 0.5


def _try_samples(trials: Sequence[tuple[int, CheckTask]], jobs: int) -> list[tuple[int, CheckTask]]:
    """Return the trials whose first rows fit, one for each change."""
    samples = [
        CheckTask(task.name, task.operation, take_rows(task.before), take_rows(task.after), task.factor)
        for _, task in trials
    ]
    fitting: dict[int, CheckTask] = {}
    for (n, task), result in zip(trials, check_elements(samples, jobs=jobs), strict=True):
        if isinstance(result, CheckResult) and _fits(result, _MAX_SAMPLE_EXCEPTIONS):
            fitting.setdefault(n, task)
    return list(fitting.items())


def _fits(result: CheckResult, most: float) -> bool:
    """Return True if all elements but a few are as claimed."""
    return bool(result.elements) and result.exceptions <= most * result.elements


def _is_parallel(change: Change) -> bool:
    """Return True if before and after have one direction; tensors of one value have that whatever was done."""
    values = change.values
    if values is None or values.cosine is None or values.relative_l2 is None or values.left_out:
        return False
    if values.max_abs is None or values.mean_abs is None or values.max_abs <= values.mean_abs * (1 + 1e-9):
        return False
    return abs(values.cosine) >= _MIN_COSINE and values.relative_l2 >= _MIN_CHANGE


def _list_factors(values: Delta | None) -> Iterator[float]:
    """Yield factors near the ratio of the norms, short ones first: of two parallel tensors |after - before| tells it.

    With the cosine 1 the factor is 1 plus or minus the relative change, with -1 it is negative.
    """
    if values is None or values.relative_l2 is None or values.cosine is None:
        return
    change = values.relative_l2
    ratios = (1 - change,) if values.cosine < 0 else (1 + change, 1 - change)
    seen: set[float] = set()
    for ratio in ratios:
        near = [_round_to_digits(ratio, digits) for digits in (1, 2, 3, 4)]
        near += [
            1 / _round_to_digits(1 / ratio, digits)
            for digits in (1, 2, 3)
            if ratio and _round_to_digits(1 / ratio, digits)
        ]
        near += [math.copysign(2.0 ** round(math.log2(abs(ratio))), ratio)] if ratio else []
        for factor in near:
            if factor not in seen and factor and abs(factor - ratio) <= 1e-3 * abs(ratio):
                seen.add(factor)
                yield factor


def _round_to_digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")
