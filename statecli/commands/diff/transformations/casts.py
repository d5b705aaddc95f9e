"""Recognise casts to a narrower float type: is each value rounded, and how?"""

from __future__ import annotations

from collections.abc import Sequence

from statecli.commands.diff.result import Change, Field, Rounding, Transformation, TransformationKind
from statecli.commands.diff.transformations.views import get_data
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_cast, check_elements


def find_casts(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the casts by the number of the change. The tasks follow from the types alone, so shards can plan them.

    A tensor of a cast checkpoint may be no rounding of the one before: it is a cast with exceptions, if other tensors
    with the same two types are exact.
    """
    tasks: dict[int, CheckTask] = {}
    for n, change in enumerate(changes):
        if Field.SHAPE in change.fields or Field.DTYPE not in change.fields:
            continue
        before, after = get_data(change.before), get_data(change.after)
        if before is not None and after is not None and can_cast(before.dtype, after.dtype):
            tasks[n] = CheckTask(change.fqn, Operation.CAST, before, after)
    casts: dict[int, Transformation] = {}
    for n, result in zip(tasks, check_elements(list(tasks.values()), jobs=jobs, derived=False), strict=True):
        if isinstance(result, CheckResult) and result.elements:
            casts[n] = _build_cast(result, is_rounded=changes[n].values is not None)
    exact = {_get_types(changes[n]) for n, cast in casts.items() if not cast.exceptions}
    return {n: cast for n, cast in casts.items() if _get_types(changes[n]) in exact}


def _get_types(change: Change) -> tuple[str, str]:
    return (change.before.dtype if change.before else "", change.after.dtype if change.after else "")


def _build_cast(result: CheckResult, *, is_rounded: bool) -> Transformation:
    rounding, exceptions = Rounding.NEAREST, 0
    if result.exceptions:
        rounding, exceptions = Rounding.TRUNCATED, result.not_truncated
    if exceptions:
        rounding, exceptions = Rounding.STOCHASTIC, result.not_neighbours
    return Transformation(
        TransformationKind.CAST,
        result.elements,
        exceptions,
        rounding=None if exceptions or not is_rounded else rounding,
    )
