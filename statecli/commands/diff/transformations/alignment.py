"""Align the rows of two tensors by row checksums, for tensors with missing rows in several places."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from statecli.core.model_state import TensorData
from statecli.values.row_digests import RowTask, compute_row_digests

#: A name, with the old and the new tensor.
RowPair = tuple[str, TensorData, TensorData]


def compute_digests_of_pairs(
    pairs: Mapping[int, RowPair], *, jobs: int, is_strong: bool = False
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the row checksums of both sides of each readable pair. Values are cast to the new dtype."""
    tasks = [
        RowTask(name, side, None if before.dtype == after.dtype else after.dtype, is_strong=is_strong)
        for name, before, after in pairs.values()
        for side in (before, after)
    ]
    digests = compute_row_digests(tasks, jobs=jobs)
    digest_pairs = zip(pairs, digests[::2], digests[1::2], strict=True)
    return {n: (old, new) for n, old, new in digest_pairs if isinstance(old, tuple) and isinstance(new, tuple)}


class Segment(NamedTuple):
    """Run of `size` consecutive rows that both sides have. The run begins at row `start` of the shorter side.

    The same rows of the longer side begin at `start + offset`.
    """

    start: int
    offset: int
    size: int


def align_rows(short: Sequence[int], long: Sequence[int]) -> list[Segment]:
    """Align the shorter side's rows with the longer side's. Return [] if no row is unique on both sides.

    Rows that occur once on both sides are aligned first. Other rows, such as zeros, are at the first equal place
    between them, and rows without an equal row follow the row before.
    """
    extra = len(long) - len(short)
    counts = Counter(long)
    row_of_digest = {digest: n for n, digest in enumerate(long) if counts[digest] == 1}
    short_counts = Counter(short)
    offsets = [
        (n, row_of_digest[digest] - n)
        for n, digest in enumerate(short)
        if short_counts[digest] == 1 and digest in row_of_digest and 0 <= row_of_digest[digest] - n <= extra
    ]
    anchors = _select_ascending(offsets)
    if not anchors:
        return []
    result: list[int] = []
    before = 0 if short[0] == long[0] else anchors[0][1]
    for (start, offset), (end, after) in pairwise([(-1, before), *anchors, (len(short), anchors[-1][1])]):
        result += [offset] * (start >= 0)
        for n in range(start + 1, end):
            if short[n] in counts:  # a row with another digest is a wrong row
                offset = next((o for o in range(offset, after + 1) if short[n] == long[n + o]), offset)
            result.append(offset)
    starts = [n for n in range(len(short)) if n == 0 or result[n] != result[n - 1]]
    return [Segment(start, result[start], end - start) for start, end in pairwise([*starts, len(short)])]


def _select_ascending(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of (row, offset) pairs whose offsets never decrease."""
    ends: list[int] = []
    places: list[int] = []
    previous: list[int] = []
    for n, (_, offset) in enumerate(offsets):
        position = bisect_right(ends, offset)
        previous.append(places[position - 1] if position else -1)
        ends[position : position + 1] = [offset]
        places[position : position + 1] = [n]
    ascending_offsets: list[tuple[int, int]] = []
    n = places[-1] if places else -1
    while n >= 0:
        ascending_offsets.append(offsets[n])
        n = previous[n]
    return ascending_offsets[::-1]
