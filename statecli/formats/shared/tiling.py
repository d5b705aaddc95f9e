"""Check that the chunks of a tensor fill it: every element is in exactly one chunk."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import add
from typing import NamedTuple

Sizes = tuple[int, ...]

#: Maximum number of dimensions: the limit of torch's indexing (64, in c10's TensorIterator).
MAX_DIMENSIONS = 64
#: Maximum number of chunks with which a chunk is compared, on average: enough for a grid of 128 by 128 chunks.
MAX_COMPARISONS_PER_CHUNK = 64


class Chunk(NamedTuple):
    """Chunk of a tensor: the index of its first element (`start`), and its shape."""

    start: Sizes
    shape: Sizes

    @property
    def stop(self) -> Sizes:
        """Index after the last element, in each dimension."""
        return tuple(map(add, self.start, self.shape))


def find_fault(shape: Sizes, chunks: Sequence[Chunk]) -> str | None:
    """Return why `chunks` (each not empty) do not fill a tensor of this shape exactly, or None if they do."""
    if len(shape) > MAX_DIMENSIONS:
        return f"the shape has {len(shape):,} dimensions, but torch can index at most {MAX_DIMENSIONS}"
    for chunk in chunks:
        if any(stop > size for stop, size in zip(chunk.stop, shape, strict=True)):
            return f"a chunk covers {_format_chunk(chunk)}, outside the shape {list(shape)}"
    if shape and (fault := _find_overlap(shape, chunks)):
        return fault
    covered, total = sum(prod(chunk.shape) for chunk in chunks), prod(shape)
    return None if covered == total else f"its {len(chunks)} chunks cover {covered} of its {total} elements"


def _find_overlap(shape: Sizes, chunks: Sequence[Chunk]) -> str | None:
    """Return a message about two chunks with a common element, or about chunks that are too scattered to compare.

    The chunks are visited along the dimension with the most cuts, and compared with the chunks not yet passed.
    """
    axis = max(range(len(shape)), key=lambda axis: len({chunk.start[axis] for chunk in chunks}))
    pending: list[tuple[Chunk, Sizes]] = []
    comparisons_left = MAX_COMPARISONS_PER_CHUNK * (len(chunks) + 16)
    for chunk in sorted(chunks, key=lambda chunk: chunk.start[axis]):
        start, stop = chunk.start, chunk.stop
        pending = [entry for entry in pending if entry[1][axis] > start[axis]]
        comparisons_left -= len(pending)
        if comparisons_left < 0:
            return f"its {len(chunks)} chunks do not form a regular shard grid"
        for other, other_stop in pending:
            if all(a < d and c < b for a, b, c, d in zip(start, stop, other.start, other_stop, strict=True)):
                return f"two chunks overlap: {_format_chunk(other)} and {_format_chunk(chunk)}"
        pending.append((chunk, stop))
    return None


def _format_chunk(chunk: Chunk) -> str:
    """Format a chunk as ranges: `[0:3, 4:8]`."""
    ranges = [f"{start}:{stop}" for start, stop in zip(chunk.start, chunk.stop, strict=True)]
    return f"[{', '.join(ranges[:8])}{', …' if len(ranges) > 8 else ''}]"
