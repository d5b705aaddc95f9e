"""Read small tensors that lie next to each other in a file: one read serves hundreds of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np

from statecli.core.model_state import ByteRange
from statecli.storage.files import File
from statecli.values.ranges import fill_buffer, open_file

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


def group_neighbours(neighbours: Sequence[Neighbour]) -> Iterator[list[Neighbour]]:
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


class NeighbourFiles:
    """Open files of the runs: at most two at a time."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[str, File] = {}

    def __enter__(self) -> NeighbourFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, path: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`. Raises UnreadableError if the file is gone or ends before `end`."""
        if path not in self._open:
            if len(self._open) >= 2:
                self._stack.close()
                self._open.clear()
            self._open[path] = self._stack.enter_context(closing(open_file(path)))
        into = np.empty(end - begin, np.uint8)
        fill_buffer(into, self._open[path], begin, ByteRange(path, begin, end - begin), "tensors")
        return into.tobytes()  # slices of bytes compare by memcmp, slices of a memoryview item by item
