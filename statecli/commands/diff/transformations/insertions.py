"""Recognise rows that were added or removed in front or in the middle, by the checksums of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from statecli.commands.diff.result import Change, Field, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.resizes import find_axis
from statecli.commands.diff.transformations.views import get_data, locate, name_rounding, narrow, permute
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData
from statecli.values.element_checks import (
    MAX_LISTED_ROWS,
    CheckResult,
    CheckTask,
    Operation,
    can_copy,
    check_elements,
)
from statecli.values.row_digests import RowTask, compute_row_digests


class _Pair(NamedTuple):
    """Both sides of a tensor with one dimension of another size, which is the first one here."""

    name: str
    axis: int
    before: TensorData
    after: TensorData

    @property
    def extra(self) -> int:
        """Number of added rows, negative if rows were removed."""
        return self.after.shape[0] - self.before.shape[0]


def find_insertions(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the resizes by the number of the change; at most half of the common rows differ.

    The rows were added or removed in one place, which is not the end.
    """
    pairs = {n: pair for n, change in enumerate(changes) if (pair := _build_pair(change)) is not None}
    tasks = [RowTask(pair.name, side, _get_common_dtype(pair)) for pair in pairs.values() for side in pair[2:]]
    digests = compute_row_digests(tasks, jobs=jobs)
    candidates = [
        (n, place)
        for n, before, after in zip(pairs, digests[::2], digests[1::2], strict=True)
        if not isinstance(before, StateError) and not isinstance(after, StateError)
        for place in _find_places(before, after)
    ]
    found: dict[int, Transformation] = {}
    for (n, _), done in zip(
        candidates, _check_places([(pairs[n], place) for n, place in candidates], jobs), strict=True
    ):
        if done is not None and (n not in found or done.exceptions < found[n].exceptions):
            found[n] = done
    return found


def _build_pair(change: Change) -> _Pair | None:
    if Field.SHAPE not in change.fields or (axis := find_axis(change)) is None:
        return None
    before, after = get_data(change.before), get_data(change.after)
    if before is None or after is None or not can_copy(before.dtype, after.dtype):
        return None
    shapes = [list(side.shape) for side in (before, after)]
    for shape in shapes:
        del shape[axis]
    if shapes[0] != shapes[1]:
        return None
    axes = [axis, *(n for n in range(len(before.shape)) if n != axis)]
    return _Pair(change.fqn, axis, *(permute(locate(side, change.fqn), axes) for side in (before, after)))


def _get_common_dtype(pair: _Pair) -> str | None:
    return None if pair.before.dtype == pair.after.dtype else pair.after.dtype


def _find_places(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return how many rows in front are common: the first and the last place where the most rows are equal.

    A differing row next to the place may be in front of it or behind it. The end is left out: `resizes` has it. Empty
    if fewer than half of the rows of the shorter side are equal.
    """
    short, long = sorted((before, after), key=len)
    extra = len(long) - len(short)
    in_front = [0, *accumulate(old == new for old, new in zip(short, long, strict=False))]
    behind = [0, *accumulate(old == new for old, new in zip(reversed(short), reversed(long[extra:]), strict=True))]
    counts = [front + rest for front, rest in zip(in_front, reversed(behind), strict=True)]
    best = max(counts)
    places = dict.fromkeys((counts.index(best), len(short) - counts[::-1].index(best)))
    return tuple(place for place in places if 2 * best >= len(short) and place < len(short))


def _check_places(places: Sequence[tuple[_Pair, int]], jobs: int) -> Iterator[Transformation | None]:
    """Check each element of the rows in front of each place and behind it; yield None where that shows nothing."""
    tasks = [task for pair, place in places for task in _build_tasks(pair, place)]
    results = check_elements(tasks, jobs=jobs)
    for (pair, place), front, rest in zip(places, results[::2], results[1::2], strict=True):
        if not isinstance(front, CheckResult) or not isinstance(rest, CheckResult):
            yield None
            continue
        elements, exceptions = front.elements + rest.elements, front.exceptions + rest.exceptions
        ways = 1 + min(pair.before.shape[0], pair.after.shape[0])
        if not is_evident(pair.after, pair.name, elements, exceptions, ways):
            yield None
            continue
        first = place + max(-pair.extra, 0)
        rows = (*front.first_rows, *(first + row for row in rest.first_rows))
        yield Transformation(
            TransformationKind.RESIZED,
            elements,
            exceptions,
            rounding=name_rounding(pair.before.dtype, pair.after.dtype),
            axis=pair.axis,
            place=place,
            rows=front.rows + rest.rows,
            first_rows=rows[:MAX_LISTED_ROWS],
        )


def _build_tasks(pair: _Pair, place: int) -> tuple[CheckTask, CheckTask]:
    added, removed = max(pair.extra, 0), max(-pair.extra, 0)
    count = min(pair.before.shape[0], pair.after.shape[0]) - place
    return (
        CheckTask(pair.name, Operation.COPY, narrow(pair.before, 0, 0, place), narrow(pair.after, 0, 0, place)),
        CheckTask(
            pair.name,
            Operation.COPY,
            narrow(pair.before, 0, place + removed, count),
            narrow(pair.after, 0, place + added, count),
        ),
    )
