"""Read small adjacent tensors in a file, hundreds of them with a single read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from statecli.core.errors import UnreadableError
from statecli.core.model_state import ByteRange, TensorData
from statecli.storage import files
from statecli.values.open_files import keep_files_open
from statecli.values.ranges import get_element_width, open_range
from statecli.values.read import find_piece

#: Maximum size in bytes of a tensor that is read together with others. For larger ones a separate read costs little.
MAX_TENSOR_BYTES = 64 << 10
#: Maximum size of a read in bytes.
MAX_READ_BYTES = 4 << 20
#: Maximum gap in bytes between two tensors of a run; a zip archive has headers in the gap.
MAX_GAP_BYTES = 4 << 10

_Item = TypeVar("_Item")


class Neighbour(NamedTuple):
    """Location of a small tensor in a file, sortable by path and offset. `number` identifies the tensor for callers."""

    path: str
    offset: int
    length: int
    number: int


def find_neighbour(number: int, data: TensorData) -> Neighbour | None:
    """Return the location of a small tensor if its elements are stored unchanged in a local file, or None otherwise."""
    length = prod(data.shape) * get_element_width(data.dtype)
    piece = find_piece(data) if 0 < length <= MAX_TENSOR_BYTES else None
    if piece is None or files.reads_are_requests(piece.path):
        return None
    return Neighbour(piece.path, piece.offset, length, number)


def read_neighbours(neighbours: Sequence[Neighbour]) -> Iterator[tuple[int, bytes]]:
    """Read adjacent small tensors together. Yield the number and the bytes of each, in file order.

    Runs with an error are left out. The caller reads their tensors one by one to name the damaged tensor.
    """
    with keep_files_open():
        for run in group_into_runs(sorted(neighbours), _is_in_run):
            start = run[0].offset
            with suppress(UnreadableError):
                data = read_run(run[0].path, start, max(item.offset + item.length for item in run))
                for item in run:
                    yield item.number, data[item.offset - start : item.offset - start + item.length]


def _is_in_run(first: Neighbour, last: Neighbour, item: Neighbour) -> bool:
    return (
        item.path == first.path
        and item.offset - last.offset - last.length <= MAX_GAP_BYTES
        and item.offset - first.offset <= MAX_READ_BYTES - MAX_TENSOR_BYTES
    )


def group_into_runs(items: Iterable[_Item], is_in_run: Callable[[_Item, _Item, _Item], bool]) -> Iterator[list[_Item]]:
    """Group sorted items into runs of two or more. `is_in_run(first, last, item)` decides if `item` joins a run."""
    run: list[_Item] = []
    for item in items:
        if run and not is_in_run(run[0], run[-1], item):
            if len(run) > 1:
                yield run
            run = []
        run.append(item)
    if len(run) > 1:
        yield run


def read_run(path: str, begin: int, end: int) -> bytes:
    """Return the bytes of a file from `begin` to `end`. Raises UnreadableError if the file is missing or too short."""
    into = np.empty(end - begin, np.uint8)
    with open_range(ByteRange(path, begin, end - begin), "tensors") as source:
        source.read(0, into)
    return into.tobytes()  # because slices of bytes compare by memcmp, slices of a memoryview item by item
