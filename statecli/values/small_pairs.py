"""Compare small neighbouring tensors: one read of each file serves hundreds of pairs.

Planning a task for a pair of any size costs a tenth of a millisecond. `compare` handles every other pair, and all
errors, damage and tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import msgspec
import numpy as np

from statecli.core.errors import UnreadableError
from statecli.core.model_state import ByteRange, TensorData, TensorInfo
from statecli.storage import files
from statecli.storage.files import File
from statecli.values.ranges import fill_buffer, open_file
from statecli.values.tally import EQUAL, Tally

#: Largest tensor, in bytes, that is compared here. Reading a larger one costs more than planning it.
MAX_TENSOR_BYTES = 64 << 10
#: Largest read, in bytes, of either file.
MAX_READ_BYTES = 4 << 20
#: Largest gap, in bytes, between two tensors of a run. A zip archive has headers there.
MAX_GAP_BYTES = 4 << 10


class _Candidate(msgspec.Struct, frozen=True, gc=False, order=True):
    """Places of both tensors of a pair, in bytes. Sorted in the order of a run: by file, then by offset."""

    before_path: str
    after_path: str
    before: int
    after: int
    length: int
    number: int
    #: None if nothing but equal bytes is compared here: a recorded checksum may then say that a file is damaged.
    dtype: str | None


def compare_small_pairs(
    pairs: Sequence[tuple[TensorInfo, TensorInfo]],
    place_of: Callable[[TensorData], tuple[str, int] | None],
    tally_of: Callable[[bytes, bytes, str], Tally | None],
) -> dict[int, Tally]:
    """Return the tallies of the compared pairs, by the number of the pair.

    `place_of` returns the file and the first byte of a tensor's elements, if contiguous and stored as in memory; None
    for other tensors. `tally_of` compares elements of one dtype with different bytes; None if a task must.
    """
    candidates = [item for n, pair in enumerate(pairs) if (item := _build_candidate(n, *pair, place_of))]
    tallies: dict[int, Tally] = {}
    with _Files() as opened:
        for run in _group_into_runs(sorted(candidates)):
            if len(run) > 1:
                tallies.update(_compare_run(run, opened, tally_of))
    return tallies


def _build_candidate(
    number: int,
    before: TensorInfo,
    after: TensorInfo,
    place_of: Callable[[TensorData], tuple[str, int] | None],
) -> _Candidate | None:
    old, new = before.data, after.data
    if old is None or new is None or not 0 < before.nbytes == after.nbytes <= MAX_TENSOR_BYTES:
        return None
    if old.dtype != new.dtype or old.storage.crc32 != new.storage.crc32 or before.parts or after.parts:
        return None
    old_place, new_place = place_of(old), place_of(new)
    if old_place is None or new_place is None:
        return None
    if files.reads_are_requests(old_place[0]) or files.reads_are_requests(new_place[0]):
        return None
    dtype = old.dtype if old.storage.crc32 is None and old.shape == new.shape else None
    return _Candidate(old_place[0], new_place[0], old_place[1], new_place[1], before.nbytes, number, dtype)


def _group_into_runs(candidates: Sequence[_Candidate]) -> Iterator[list[_Candidate]]:
    run: list[_Candidate] = []
    for candidate in candidates:
        if run and not _is_in_run(run[0], run[-1], candidate):
            yield run
            run = []
        run.append(candidate)
    if run:
        yield run


def _is_in_run(first: _Candidate, last: _Candidate, candidate: _Candidate) -> bool:
    return (
        first.before_path == candidate.before_path
        and first.after_path == candidate.after_path
        and candidate.before - last.before - last.length <= MAX_GAP_BYTES
        and candidate.after - last.after - last.length <= MAX_GAP_BYTES
        and 0 <= candidate.before - first.before <= MAX_READ_BYTES - MAX_TENSOR_BYTES
        and 0 <= candidate.after - first.after <= MAX_READ_BYTES - MAX_TENSOR_BYTES
    )


def _compare_run(
    run: Sequence[_Candidate], opened: _Files, tally_of: Callable[[bytes, bytes, str], Tally | None]
) -> Iterator[tuple[int, Tally]]:
    first = run[0]
    try:
        before = opened.read(
            first.before_path, first.before, max(candidate.before + candidate.length for candidate in run)
        )
        after = opened.read(first.after_path, first.after, max(candidate.after + candidate.length for candidate in run))
    except UnreadableError:
        return  # `compare` meets the same error, and names the tensor
    for pair in run:
        old_start, new_start = pair.before - first.before, pair.after - first.after
        old, new = before[old_start : old_start + pair.length], after[new_start : new_start + pair.length]
        if old == new:
            yield pair.number, EQUAL
        elif pair.dtype is not None and (tally := tally_of(old, new, pair.dtype)) is not None:
            yield pair.number, tally


class _Files:
    """Open files of the runs: a single file of each side at a time."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[str, File] = {}

    def __enter__(self) -> _Files:
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
