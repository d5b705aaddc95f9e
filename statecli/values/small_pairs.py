"""Compare small neighbouring tensors: one read of each file serves hundreds of pairs.

Planning a task for one pair costs a tenth of a millisecond, however small it is. `compare` handles every other pair,
and all errors, damage and tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import msgspec
import numpy as np

from statecli.core.errors import UnreadableError
from statecli.core.state import ByteRange, TensorData, TensorInfo
from statecli.storage import files
from statecli.storage.files import File
from statecli.values.ranges import fill, opened_file
from statecli.values.tally import NOTHING, Tally

#: Largest tensor, in bytes, that is compared here. Reading a larger one costs more than planning it.
SMALL = 64 << 10
#: Largest read, in bytes, of either file.
RUN = 4 << 20
#: Largest gap, in bytes, between two tensors of a run. A zip archive has headers there.
GAP = 4 << 10


class _Candidate(msgspec.Struct, frozen=True, gc=False, order=True):
    """Where both tensors of a pair lie, in bytes. The order is that of the run: by file, then by offset."""

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
    """Return the tallies of the pairs that could be compared, by the number of the pair.

    `place_of` gives the file and the byte at which the elements of a tensor begin, if they are stored one after another
    as they are in memory; None for any other. `tally_of` compares elements of one dtype whose bytes differ; None if
    that takes a task.
    """
    candidates = [found for n, pair in enumerate(pairs) if (found := _candidate(n, *pair, place_of))]
    tallies: dict[int, Tally] = {}
    with _Files() as opened:
        for run in _runs(sorted(candidates)):
            if len(run) > 1:
                tallies.update(_tallies_of_run(run, opened, tally_of))
    return tallies


def _candidate(
    number: int,
    before: TensorInfo,
    after: TensorInfo,
    place_of: Callable[[TensorData], tuple[str, int] | None],
) -> _Candidate | None:
    one, two = before.data, after.data
    if one is None or two is None or not 0 < before.nbytes == after.nbytes <= SMALL:
        return None
    if one.dtype != two.dtype or one.storage.crc32 != two.storage.crc32 or before.parts or after.parts:
        return None
    first, second = place_of(one), place_of(two)
    if first is None or second is None or any(files.reads_are_requests(path) for path, _ in (first, second)):
        return None
    dtype = one.dtype if one.storage.crc32 is None and one.shape == two.shape else None
    return _Candidate(first[0], second[0], first[1], second[1], before.nbytes, number, dtype)


def _runs(candidates: Sequence[_Candidate]) -> Iterator[list[_Candidate]]:
    run: list[_Candidate] = []
    for candidate in candidates:
        if run and not _continues(run[0], run[-1], candidate):
            yield run
            run = []
        run.append(candidate)
    if run:
        yield run


def _continues(first: _Candidate, last: _Candidate, candidate: _Candidate) -> bool:
    return (
        first.before_path == candidate.before_path
        and first.after_path == candidate.after_path
        and candidate.before - last.before - last.length <= GAP
        and candidate.after - last.after - last.length <= GAP
        and 0 <= candidate.before - first.before <= RUN - SMALL
        and 0 <= candidate.after - first.after <= RUN - SMALL
    )


def _tallies_of_run(
    run: Sequence[_Candidate], opened: _Files, tally_of: Callable[[bytes, bytes, str], Tally | None]
) -> Iterator[tuple[int, Tally]]:
    first = run[0]
    try:
        before = opened.read(first.before_path, first.before, max(one.before + one.length for one in run))
        after = opened.read(first.after_path, first.after, max(one.after + one.length for one in run))
    except UnreadableError:
        return  # compare meets the same, and says of which tensor
    for pair in run:
        start, other = pair.before - first.before, pair.after - first.after
        one, two = before[start : start + pair.length], after[other : other + pair.length]
        if one == two:
            yield pair.number, NOTHING
        elif pair.dtype is not None and (tally := tally_of(one, two, pair.dtype)) is not None:
            yield pair.number, tally


class _Files:
    """The files of the runs, one of each side open at a time."""

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
            self._open[path] = self._stack.enter_context(closing(opened_file(path)))
        into = np.empty(end - begin, np.uint8)
        fill(into, self._open[path], begin, ByteRange(path, begin, end - begin), "tensors")
        return into.tobytes()  # slices of bytes compare by memcmp, slices of a memoryview item by item
