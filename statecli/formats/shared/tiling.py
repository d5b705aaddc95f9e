"""Check that boxes fill a larger box: every element is in exactly one box.

Sharding cuts a tensor along whole planes: all boxes lie in slabs, the slabs consist of columns, and so on. Boxes are
therefore split along planes that cut no box, recursively in each dimension, until each box is alone. A few boxes
without such a plane are compared pairwise; larger sets are refused, because no sharding produces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod

import msgspec

Sizes = tuple[int, ...]

#: Maximum number of dimensions: the limit of torch's indexing (64, in c10's TensorIterator). Each dimension takes a
#: pass over all boxes.
MAX_DIMENSIONS = 64
#: Maximum number of boxes that are compared pairwise.
MAX_PAIRED_BOXES = 128
#: Maximum number of times that a box is examined, on average.
MAX_VISITS_PER_BOX = 64


class IndexBox(msgspec.Struct, frozen=True):
    """Box in an array: the elements from index `start` up to `stop` (exclusive) in each dimension."""

    start: Sizes
    stop: Sizes


def find_fault(shape: Sizes, boxes: Sequence[IndexBox]) -> str | None:
    """Return why `boxes` (each not empty) do not fill an array of this shape exactly, or None if they do.

    The sentence describes an element that is in two boxes, in no box, or outside the array.
    """
    if len(shape) > MAX_DIMENSIONS:
        return f"the shape has {len(shape):,} dimensions, but torch can index at most {MAX_DIMENSIONS}"
    region = IndexBox((0,) * len(shape), shape)
    for box in boxes:
        if not all(a >= 0 and b <= stop for a, b, stop in zip(box.start, box.stop, region.stop, strict=True)):
            return f"a chunk covers {format_box(box)}, outside the shape {list(shape)}"
    looks = MAX_VISITS_PER_BOX * (len(boxes) + 16)
    stack: list[tuple[IndexBox, Sequence[IndexBox]]] = [(region, boxes)]
    while stack:
        place, boxes_inside = stack.pop()
        if boxes_inside and boxes_inside[0] == place and len(boxes_inside) == 1:
            continue
        looks -= len(boxes_inside)
        if looks < 0:
            return f"its {len(boxes)} chunks do not form a regular shard grid"
        slabs = _split_into_slabs(place, boxes_inside) if boxes_inside else None
        if slabs is not None:
            stack.extend(slabs)
        elif problem := _find_problem(place, boxes_inside):
            return problem
    return None


def format_box(box: IndexBox) -> str:
    """Format a box as ranges: `[0:3, 4:8]`."""
    dims = [f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)]
    return f"[{', '.join(dims[:8])}{', …' if len(dims) > 8 else ''}]"


def _split_into_slabs(place: IndexBox, boxes: Sequence[IndexBox]) -> list[tuple[IndexBox, Sequence[IndexBox]]] | None:
    """Split the box `place` with planes that cut no inner box, along the first possible axis, or return None."""
    for axis, (first, last) in enumerate(zip(place.start, place.stop, strict=True)):
        parts = list(_split_along(sorted(boxes, key=lambda box: box.start[axis]), axis, first, last))
        if len(parts) > 1:
            return [(_build_slab(place, axis, low, high), slab_boxes) for low, high, slab_boxes in parts]
    return None


def _split_along(
    sorted_boxes: Sequence[IndexBox], axis: int, first: int, last: int
) -> Iterator[tuple[int, int, Sequence[IndexBox]]]:
    """Yield start, end and boxes of each group between planes across `axis` that cut no box. A gap has no boxes."""
    at, begin, n = first, first, 0
    for end, box in enumerate(sorted_boxes):
        start = box.start[axis]
        if start >= at and start > first:
            if end > n:
                yield begin, at, sorted_boxes[n:end]
            if start > at:
                yield at, start, ()
            begin, n = start, end
        at = max(at, box.stop[axis])
    yield begin, at, sorted_boxes[n:]
    if at < last:
        yield at, last, ()


def _build_slab(place: IndexBox, axis: int, low: int, high: int) -> IndexBox:
    return IndexBox(
        (*place.start[:axis], low, *place.start[axis + 1 :]), (*place.stop[:axis], high, *place.stop[axis + 1 :])
    )


def _find_problem(place: IndexBox, boxes: Sequence[IndexBox]) -> str | None:
    """Return why boxes that no plane separates do not fill the box `place`, or None if they do (like a pinwheel)."""
    if not boxes:
        return f"no chunk covers {format_box(place)}"
    for first, second in combinations(boxes[:MAX_PAIRED_BOXES], 2):
        if all(a < d and c < b for a, b, c, d in zip(first.start, first.stop, second.start, second.stop, strict=True)):
            return f"two chunks overlap: {format_box(first)} and {format_box(second)}"
    if len(boxes) > MAX_PAIRED_BOXES:
        return f"{len(boxes)} chunks of {format_box(place)} do not form a regular shard grid"
    covered, total = sum(map(_count_elements, boxes)), _count_elements(place)
    return None if covered == total else f"its chunks cover {covered} of the {total} elements of {format_box(place)}"


def _count_elements(box: IndexBox) -> int:
    return prod(b - a for a, b in zip(box.start, box.stop, strict=True))
