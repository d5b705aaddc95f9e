"""Recognise added or removed rows at the start, in the middle or in several places, by checksums of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from statecli.commands.diff.result import Change, Field, Transformation, TransformationKind
from statecli.commands.diff.transformations.alignment import Segment, align_rows, compute_digests_of_pairs
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.resizes import find_axis
from statecli.commands.diff.transformations.views import get_data, locate, name_rounding, narrow, permute
from statecli.core.model_state import TensorData
from statecli.values.element_checks import MAX_LISTED_ROWS, CheckResult, CheckTask, Operation, can_copy, check_elements

#: Largest number of places with added or removed rows: with more, the rows are in another order.
_MAX_PLACES = 64


class _Pair(NamedTuple):
    """Both sides of a tensor, with the resized dimension moved to the front."""

    name: str
    axis: int
    before: TensorData
    after: TensorData

    @property
    def extra(self) -> int:
        """Number of added rows, negative if rows were removed."""
        return self.after.shape[0] - self.before.shape[0]


def find_insertions(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return tensors with added or removed rows, keyed by index in `changes`. At most half of the common rows differ.

    The rows were added or removed in a single place before the end, or in several places.
    """
    pairs = {n: pair for n, change in enumerate(changes) if (pair := _build_pair(change)) is not None}
    digests = compute_digests_of_pairs({n: (pair.name, *pair[2:]) for n, pair in pairs.items()}, jobs=jobs)
    candidates = [(n, segments) for n, pair_digests in digests.items() for segments in _list_alignments(*pair_digests)]
    best: dict[int, Transformation] = {}
    results = _check_alignments([(pairs[n], segments) for n, segments in candidates], jobs)
    for (n, _), insertion in zip(candidates, results, strict=True):
        if insertion is not None and (n not in best or insertion.exceptions < best[n].exceptions):
            best[n] = insertion
    return best


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


def _list_alignments(before: Sequence[int], after: Sequence[int]) -> Iterator[list[Segment]]:
    """Yield possible alignments of the shorter side's rows with the longer side's rows, with one or several gaps."""
    short, long = sorted((before, after), key=len)
    extra = len(long) - len(short)
    for place in _find_places(short, long):
        segments = [Segment(0, 0, place), Segment(place, extra, len(short) - place)]
        yield [segment for segment in segments if segment.size]
    segments = align_rows(short, long)
    equal_count = sum(
        short[start + n] == long[start + offset + n] for start, offset, size in segments for n in range(size)
    )
    if 1 < len(_list_gaps(segments, extra)) <= _MAX_PLACES and 2 * equal_count >= len(short):
        yield segments


def _list_gaps(segments: Sequence[Segment], extra: int) -> list[tuple[int, int]]:
    """Return (row, count) for each gap: `count` rows are missing before this row of the shorter side."""
    gaps, offset, end = [], 0, 0
    for segment in segments:
        gaps.append((segment.start, segment.offset - offset))
        offset, end = segment.offset, segment.start + segment.size
    return [(place, count) for place, count in (*gaps, (end, extra - offset)) if count]


def _find_places(short: Sequence[int], long: Sequence[int]) -> tuple[int, ...]:
    """Return the first and the last row at which a single gap makes the most rows equal.

    A differing row next to the gap may be on either side of the gap. A gap at the end is left out: `resizes` reports
    it. The result is empty if fewer than half of the rows of the shorter side are equal.
    """
    extra = len(long) - len(short)
    equal_in_front = [0, *accumulate(old == new for old, new in zip(short, long, strict=False))]
    equal_behind = [
        0,
        *accumulate(old == new for old, new in zip(reversed(short), reversed(long[extra:]), strict=True)),
    ]
    counts = [front + rest for front, rest in zip(equal_in_front, reversed(equal_behind), strict=True)]
    best = max(counts)
    places = dict.fromkeys((counts.index(best), len(short) - counts[::-1].index(best)))
    return tuple(place for place in places if 2 * best >= len(short) and place < len(short))


def _check_alignments(
    alignments: Sequence[tuple[_Pair, Sequence[Segment]]], jobs: int
) -> Iterator[Transformation | None]:
    """Check every element of the aligned rows. Yield the resize of each alignment, or None for weak evidence."""
    tasks = [_build_task(pair, segment) for pair, segments in alignments for segment in segments]
    results = iter(check_elements(tasks, jobs=jobs))
    for pair, segments in alignments:
        segment_results = [next(results) for _ in segments]
        checked = [result for result in segment_results if isinstance(result, CheckResult)]
        gaps = _list_gaps(segments, abs(pair.extra))
        ways = (1 + min(pair.before.shape[0], pair.after.shape[0])) ** len(gaps)
        elements, exceptions = (sum(getattr(r, name) for r in checked) for name in ("elements", "exceptions"))
        if len(checked) < len(segment_results) or not is_evident(pair.after, pair.name, elements, exceptions, ways):
            yield None
            continue
        rows = [
            _find_start(pair, segment) + row
            for segment, result in zip(segments, checked, strict=True)
            for row in result.first_rows
        ]
        # Places are counted in the old tensor, which is the longer side if rows were removed.
        places = [
            place + (sum(count for _, count in gaps[:n]) if pair.extra < 0 else 0) for n, (place, _) in enumerate(gaps)
        ]
        yield Transformation(
            TransformationKind.RESIZED,
            elements,
            exceptions,
            rounding=name_rounding(pair.before.dtype, pair.after.dtype),
            axis=pair.axis,
            place=places[0],
            places=tuple(places) if len(places) > 1 else (),
            counts=tuple(count for _, count in gaps) if len(places) > 1 else (),
            rows=sum(result.rows for result in checked),
            first_rows=tuple(rows[:MAX_LISTED_ROWS]),
        )


def _find_start(pair: _Pair, segment: Segment) -> int:
    """Return the index of the segment's first row in the old tensor."""
    return segment.start + (segment.offset if pair.extra < 0 else 0)


def _build_task(pair: _Pair, segment: Segment) -> CheckTask:
    start = segment.start + (segment.offset if pair.extra > 0 else 0)
    before = narrow(pair.before, 0, _find_start(pair, segment), segment.size)
    return CheckTask(pair.name, Operation.COPY, before, narrow(pair.after, 0, start, segment.size))
