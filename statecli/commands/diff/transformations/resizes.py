"""Recognise tensors with a resized dimension whose common rows are equal."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from statecli.commands.diff.result import Change, Field, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.ordinary_training import MAX_COSINE
from statecli.commands.diff.transformations.views import (
    get_data,
    is_cheap_to_sample,
    locate,
    name_rounding,
    narrow,
    permute,
    take_sample,
)
from statecli.core.part_rows import replace_data
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_copy, check_elements
from statecli.values.pair_plan import Pair
from statecli.values.similarity import find_most_similar


def find_resizes(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the resized tensors, keyed by index in `changes`. At most half of the common rows may differ.

    The common part must be at least half of the smaller tensor, and must not be equal by chance.

    The tasks follow from the shapes alone, so shards can plan them.
    """
    tasks = {n: task for n, change in enumerate(changes) if (task := _build_task(change)) is not None}
    resizes: dict[int, Transformation] = {}
    results = check_elements(list(tasks.values()), jobs=jobs, derived=False)
    for (n, task), result in zip(tasks.items(), results, strict=True):
        if not isinstance(result, CheckResult) or not result.elements or 2 * result.rows > task.before.shape[0]:
            continue
        if is_evident(task.after, task.name, result.elements, result.exceptions):
            resizes[n] = Transformation(
                TransformationKind.RESIZED,
                result.elements,
                result.exceptions,
                rounding=name_rounding(task.before.dtype, task.after.dtype),
                axis=find_axis(changes[n]),
                rows=result.rows,
                first_rows=result.first_rows,
            )
    return resizes


def find_similar_resizes(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return resized tensors whose common part was trained after the resize, with cosine and relative change.

    A sample of the common part must correlate: the cosine of any values near 1 is near 1.
    """
    pairs: dict[int, Pair] = {}
    for n, change in enumerate(changes):
        task = _build_task(change)
        if task is None or "float" not in task.before.dtype or change.before is None or change.after is None:
            continue
        pair = Pair(replace_data(change.before, task.before), replace_data(change.after, task.after))
        if is_cheap_to_sample(change.before) and is_cheap_to_sample(change.after) and _is_correlated(pair):
            pairs[n] = pair
    resizes: dict[int, Transformation] = {}
    outcomes = compare_pairs(list(pairs.values()), CompareOptions(), jobs=jobs, derived=True)
    for n, outcome in zip(pairs, outcomes, strict=True):
        if not isinstance(outcome, Delta) or outcome.cosine is None or outcome.cosine < MAX_COSINE:
            continue
        data = pairs[n].after.data
        if data is not None and is_evident(data, changes[n].fqn, outcome.elements):
            resizes[n] = Transformation(
                TransformationKind.RESIZED,
                outcome.elements,
                axis=find_axis(changes[n]),
                cosine=outcome.cosine,
                relative_l2=outcome.relative_l2,
            )
    return resizes


def _is_correlated(pair: Pair) -> bool:
    return find_most_similar([take_sample(pair.after)], [take_sample(pair.before)]) == [0]


def find_axis(change: Change) -> int | None:
    """Return the first dimension whose size differs, or None if the dimensions cannot be compared."""
    before, after = (side.shape if side and side.shape else () for side in (change.before, change.after))
    if len(before) != len(after):
        return None
    return next((axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old != new), None)


def _build_task(change: Change) -> CheckTask | None:
    if Field.SHAPE not in change.fields or (axis := find_axis(change)) is None:
        return None
    before, after = get_data(change.before), get_data(change.after)
    if before is None or after is None or not can_copy(before.dtype, after.dtype):
        return None
    common_elements = prod(map(min, before.shape, after.shape))
    if 2 * common_elements < min(prod(before.shape), prod(after.shape)):
        return None
    before, after = locate(before, change.fqn), locate(after, change.fqn)
    for n, size in enumerate(map(min, before.shape, after.shape)):
        before, after = narrow(before, n, 0, size), narrow(after, n, 0, size)
    # The resized dimension comes first, because rows are counted along it.
    axes = [axis, *(n for n in range(len(before.shape)) if n != axis)]
    return CheckTask(change.fqn, Operation.COPY, permute(before, axes), permute(after, axes))
