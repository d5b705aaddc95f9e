"""Read small tensors that lie next to each other in a file: one read serves hundreds of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from statecli.core.errors import UnreadableError
from statecli.core.model_state import ByteRange
from statecli.values.open_files import keep_files_open
from statecli.values.ranges import open_range

#: Largest tensor, in bytes, that is read so. A read of its own costs little more for a larger one.
MAX_TENSOR_BYTES = 64 << 10
#: Largest read, in bytes.
MAX_READ_BYTES = 4 << 20
#: Largest gap, in bytes, between two tensors of a run. A zip archive has headers there.
MAX_GAP_BYTES = 4 << 10


class Neighbour(NamedTuple):
    """The bytes of a tensor in a file; `number` is the tensor's for the caller. Sorted by place."""

    path: str
    offset: int
    length: int
    number: int


def read_neighbours(neighbours: Sequence[Neighbour]) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each tensor that one read serves with others, in the order of the files.

    Runs with an error are left out, because reading each tensor alone finds the one to name.
    """
    with keep_files_open():
        for run in _group_neighbours(neighbours):
            start = run[0].offset
            with suppress(UnreadableError):
                data = read_run(run[0].path, start, max(item.offset + item.length for item in run))
                for item in run:
                    yield item.number, data[item.offset - start : item.offset - start + item.length]


def _group_neighbours(neighbours: Sequence[Neighbour]) -> Iterator[list[Neighbour]]:
    """Yield runs of tensors that one read serves, at least two each, in the order of the files."""
    run: list[Neighbour] = []
    for item in sorted(neighbours):
        if run and not (
            item.path == run[0].path
            and item.offset - run[-1].offset - run[-1].length <= MAX_GAP_BYTES
            and item.offset - run[0].offset <= MAX_READ_BYTES - MAX_TENSOR_BYTES
        ):
            if len(run) > 1:
                yield run
            run = []
        run.append(item)
    if len(run) > 1:
        yield run


def read_run(path: str, begin: int, end: int) -> bytes:
    """Return the bytes of a file from `begin` to `end`. Raises UnreadableError if it is gone or ends before `end`."""
    into = np.empty(end - begin, np.uint8)
    with open_range(ByteRange(path, begin, end - begin), "tensors") as source:
        source.read(0, into)
    return into.tobytes()  # slices of bytes compare by memcmp, slices of a memoryview item by item
