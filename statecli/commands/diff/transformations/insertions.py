"""Recognise added or removed rows at the start, in the middle or in several places, by checksums of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    alignments = {n: segments for n, pair_digests in digests.items() if (segments := _align(*pair_digests))}
    insertions = _check_alignments([(pairs[n], segments) for n, segments in alignments.items()], jobs)
    return {n: insertion for n, insertion in zip(alignments, insertions, strict=True) if insertion is not None}


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


def _align(before: Sequence[int], after: Sequence[int]) -> list[Segment]:
    """Return the shorter side's rows in the order of the longer side's rows, or [] if most of the rows differ.

    A gap only at the end is left out: `resizes` reports it. A differing row next to a gap may be on either side of it.
    """
    short, long = sorted((before, after), key=len)
    segments = align_rows(short, long)
    gaps = _list_gaps(segments, len(long) - len(short))
    equal_count = sum(
        short[start + n] == long[start + offset + n] for start, offset, size in segments for n in range(size)
    )
    has_gap = len(gaps) <= _MAX_PLACES and any(place < len(short) for place, _ in gaps)
    return segments if has_gap and 2 * equal_count >= len(short) else []


def _list_gaps(segments: Sequence[Segment], extra: int) -> list[tuple[int, int]]:
    """Return (row, count) for each gap: `count` rows are missing before this row of the shorter side."""
    gaps, offset, end = [], 0, 0
    for segment in segments:
        gaps.append((segment.start, segment.offset - offset))
        offset, end = segment.offset, segment.start + segment.size
    return [(place, count) for place, count in (*gaps, (end, extra - offset)) if count]


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
