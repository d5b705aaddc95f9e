"""Whether boxes fill a larger box: every element in exactly one of them.

What shards a tensor cuts it along whole planes: all of its boxes lie in slabs, these in columns, and so on. So boxes
are split where a plane cuts none of them, again and again along each dimension, until each is alone in its place. A few
that no plane splits are held against each other, and what no sharding makes is refused rather than computed at length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

Sizes = tuple[int, ...]

#: Boxes that are held against each other pair by pair.
MAX_PAIRED = 128
#: Looks at a box, for each box that there is.
MAX_LOOKS = 64


class Box(NamedTuple):
    """The elements of an array from `start` up to `stop`, which is not of it, in each dimension."""

    start: Sizes
    stop: Sizes


def fault(whole: Sizes, boxes: Sequence[Box]) -> str | None:
    """What is wrong with `boxes`, none of them empty, as pieces of an array of shape `whole`; None where nothing is.

    The sentence says where an element is twice, nowhere, or outside.
    """
    region = Box((0,) * len(whole), whole)
    for box in boxes:
        if not _lies_in(box, region):
            return f"a chunk holds {shown(box)} of {list(whole)}"
    looks = MAX_LOOKS * (len(boxes) + 16)
    stack: list[tuple[Box, Sequence[Box]]] = [(region, boxes)]
    while stack:
        place, held = stack.pop()
        if held and held[0] == place and len(held) == 1:
            continue
        looks -= len(held)
        if looks < 0:
            return f"its {len(boxes)} chunks lie in no order that sharding makes"
        slabs = _slabs(place, held) if held else None
        if slabs is not None:
            stack.extend(slabs)
        elif told := _told(place, held):
            return told
    return None


def shown(box: Box) -> str:
    """`[0:3, 4:8]`."""
    dims = [f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)]
    return f"[{', '.join(dims[:8])}{', …' if len(dims) > 8 else ''}]"


def _lies_in(box: Box, region: Box) -> bool:
    return all(a >= 0 and b <= stop for a, b, stop in zip(box.start, box.stop, region.stop, strict=True))


def _slabs(place: Box, boxes: Sequence[Box]) -> list[tuple[Box, Sequence[Box]]] | None:
    """`place` cut along the first dimension that a plane can cut, and what lies in each part; None where none can."""
    for axis, (first, last) in enumerate(zip(place.start, place.stop, strict=True)):
        parts = list(_cut(sorted(boxes, key=lambda box: box.start[axis]), axis, first, last))
        if len(parts) > 1:
            return [(_between(place, axis, low, high), held) for low, high, held in parts]
    return None


def _cut(ordered: Sequence[Box], axis: int, first: int, last: int) -> Iterator[tuple[int, int, Sequence[Box]]]:
    """Runs of boxes that no plane between `first` and `last` divides, the gaps between them as runs of none."""
    at, begin, n = first, first, 0
    for end, box in enumerate(ordered):
        start = box.start[axis]
        if start >= at and start > first:
            if end > n:
                yield begin, at, ordered[n:end]
            if start > at:
                yield at, start, ()
            begin, n = start, end
        at = max(at, box.stop[axis])
    yield begin, at, ordered[n:]
    if at < last:
        yield at, last, ()


def _between(place: Box, axis: int, low: int, high: int) -> Box:
    return Box(
        (*place.start[:axis], low, *place.start[axis + 1 :]), (*place.stop[:axis], high, *place.stop[axis + 1 :])
    )


def _told(place: Box, boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that no plane parts; None where they fill the place all the same, as a pinwheel does."""
    if not boxes:
        return f"no chunk holds {shown(place)}"
    for one, two in combinations(boxes[:MAX_PAIRED], 2):
        if all(a < d and c < b for a, b, c, d in zip(one.start, one.stop, two.start, two.stop, strict=True)):
            return f"two chunks hold the same elements, {shown(one)} and {shown(two)}"
    if len(boxes) > MAX_PAIRED:
        return f"{len(boxes)} chunks of {shown(place)} lie in no order that sharding makes"
    held, needed = sum(map(_volume, boxes)), _volume(place)
    return None if held == needed else f"its chunks hold {held} of the {needed} elements of {shown(place)}"


def _volume(box: Box) -> int:
    return prod(b - a for a, b in zip(box.start, box.stop, strict=True))
