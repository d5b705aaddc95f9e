"""What one worker does: read both sides of its tasks block by block, compare, add up.

Tasks are plain data and results are small, so that any process, here or elsewhere, can do them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing

import msgspec
import numpy as np

from statecli.core.errors import StateError, UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.state import ByteRange, TensorData
from statecli.storage import files
from statecli.storage.files import File
from statecli.values import kernels
from statecli.values.delta import How
from statecli.values.elements import Arena, Array, Decoder, Element, element
from statecli.values.ranges import fill, looking_up, opened_file, places
from statecli.values.read import Strided, no_numbers, opened, overlap, span, stored, valued
from statecli.values.tally import NOTHING, Tally

#: Elements compared at a time; with both sides decoded they fit a core's second-level cache.
BLOCK = 64 * 1024
#: Elements in a task.
TASK = 128 * BLOCK


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Where the elements of a tensor that lies in one piece begin: byte `offset` of `path`."""

    path: str
    offset: int
    dtype: str


class Task(msgspec.Struct, frozen=True, gc=False):
    """Elements `start` to `start + count` of a pair of pieces, or where they lie in no piece, all of both tensors.

    `norm`: both sides are known to be equal, and only what they are worth is asked.
    """

    pair: int
    what: str
    start: int
    count: int
    before: Piece | TensorData
    after: Piece | TensorData
    norm: bool = False


class Found(msgspec.Struct, frozen=True, gc=False):
    """What a task found: its tally, and the runs (start, count) of its elements that are equal bit for bit."""

    tally: Tally
    equal: tuple[tuple[int, int], ...] = ()


class Worker:
    """Buffers and open files of one batch of tasks."""

    #: Elements read at a time.
    block = BLOCK

    def __init__(self, how: How) -> None:
        self.how = how
        arena = _arena()
        self.one, self.two, self.sums = Decoder(arena), Decoder(arena), Decoder(arena)
        self._raw = self.one.buffer("raw", "u1", self.block * 16), self.two.buffer("raw", "u1", self.block * 16)
        self._files: dict[str, File] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def results(self, tasks: Sequence[Task]) -> list[Found | StateError]:
        """Each task's result, or what went wrong with it."""
        results: list[Found | StateError] = []
        for task in tasks:
            try:
                results.append(self.found(task))
            except StateError as error:
                results.append(error)
        return results

    def found(self, task: Task) -> Found:
        """Do one task. Raises `UnreadableError` or `MalformedError`, naming file and tensor."""
        if isinstance(task.before, Piece) and isinstance(task.after, Piece):
            return Found(self._norm(task, task.before)) if task.norm else self._pieces(task, task.before, task.after)
        assert isinstance(task.before, TensorData) and isinstance(task.after, TensorData)  # noqa: S101, PT018 - the plan
        return Found(self._whole(task.what, task.before, task.after))

    # Both sides in one piece: bytes first, values only where they differ.

    def _pieces(self, task: Task, before: Piece, after: Piece) -> Found:
        one, two = _element(before.dtype), _element(after.dtype)
        same = before.dtype == after.dtype
        total, equal = NOTHING, _Runs()
        for start, count in self._cut(task):
            a = self._read(0, before, one, start, count, task)
            b = self._read(1, after, two, start, count, task)
            if same and self._equal(a.size):
                equal.add(start, count)
                continue
            total = total.plus(self._tally(a.view(one.stored), before.dtype, b.view(two.stored), after.dtype, start))
        return Found(total, equal.found())

    def _norm(self, task: Task, before: Piece) -> Tally:
        kind = _element(before.dtype)
        if no_numbers(before.dtype):
            return Tally(left_out=task.count)
        total = Tally()
        for start, count in self._cut(task):
            raw = self._read(0, before, kind, start, count, task).view(kind.stored)
            found = kernels.stored(raw, raw, (before.dtype, before.dtype))
            total = total.plus(found or kernels.norm(self.one(raw, kind), self.sums))
        return total

    def _tally(self, a: Array, one: str, b: Array, two: str, start: int) -> Tally:
        if not (self.how.atol or self.how.rtol):
            found = kernels.stored(a, b, (one, two), self.how.bitwise and one == two)
            if found is not None:
                return found.moved(start)
        kind, other = _element(one), _element(two)
        if no_numbers(one):
            return kernels.opaque(kernels.bits_differ(a, b, kind.items)).moved(start)
        changed = kernels.bits_differ(a, b, kind.items) if one == two and self.how.bitwise else None
        return kernels.tally(self.one(a, kind), self.two(b, other), self.how, self.sums, changed, kind.values).moved(
            start
        )

    def _cut(self, task: Task) -> Iterator[tuple[int, int]]:
        end = task.start + task.count
        step = max(min(self.block, self._raw[0].size // max(map(_width, (task.before, task.after)))), 1)
        return ((start, min(step, end - start)) for start in range(task.start, end, step))

    def _equal(self, size: int) -> bool:
        """Whether the first `size` bytes of both buffers are equal, as 64-bit words."""
        words = -(-size // 8)
        for raw in self._raw:
            raw[size : words * 8] = 0
        a, b = (raw[: words * 8].view(np.uint64) for raw in self._raw)
        # Where anything differs, the beginning mostly does.
        if words > 512 and (a[:64] != b[:64]).any():
            return False
        return not np.not_equal(a, b, out=self.sums.buffer("words", "?", words)).any()

    def _read(self, side: int, piece: Piece, kind: Element, start: int, count: int, task: Task) -> Array:
        size = kind.size
        into = self._raw[side][: count * size]
        where = ByteRange(piece.path, piece.offset + task.start * size, task.count * size)
        fill(into, self._file(piece.path), piece.offset + start * size, where, task.what)
        return into

    def _file(self, path: str) -> File:
        if path not in self._files:
            if len(self._files) >= 64:
                self._stack.close()
                self._files.clear()
            self._files[path] = self._stack.enter_context(closing(opened_file(path)))
        return self._files[path]

    # Strides, quantization, lazy conjugation, byte order.

    def _whole(self, what: str, before: TensorData, after: TensorData) -> Tally:
        with opened(before, what) as first, opened(after, what) as second:
            one, two, times = _once(first, second)
            reasons = [overlap(one), overlap(two)]
            if all(reasons):
                if _same_stored(one, two):
                    return Tally()
                raise UnreadableError(f"{before.storage.path} and {after.storage.path}: {what}: {reasons[0]}")
            total, start = Tally(), 0
            for a, b in zip(_items(one), _items(two), strict=True):
                found = self._worth(a, one, b, two, start)
                total = total.plus(found)
                start += a.size // _element(one.dtype).items
        return total if times == 1 else _repeated(total, times, one.shape, before.shape)

    def _worth(self, a: Array, one: Strided, b: Array, two: Strided, start: int) -> Tally:
        """Of stored items, and of what torch does to them lazily."""
        if not (_is_lazy(one) or _is_lazy(two)):
            return self._tally(a, one.dtype, b, two.dtype, start)
        x, y = valued(one, a, start, self.one), valued(two, b, start, self.two)
        changed = None
        if self.how.bitwise and one.dtype == two.dtype:
            # Equal bits may mean something else, and what is worth the same may be stored in another way.
            changed = kernels.bits_differ(a, b, _element(one.dtype).items) | kernels.bits_differ(x, y, 1)
        return kernels.tally(x, y, self.how, self.sums, changed).moved(start)


def _items(view: Strided) -> Iterator[Array]:
    return rechunked(stored(view), BLOCK * _element(view.dtype).items)


def _is_lazy(view: Strided) -> bool:
    return view.conjugate or view.negative or view.affine is not None


def _once(one: Strided, two: Strided) -> tuple[Strided, Strided, int]:
    """Both without repeating themselves along the dimensions where both do, and how often each element then counts."""
    if one.affine is not None or two.affine is not None or not one.elements:
        return one, two, 1
    strides = zip(one.shape, one.strides, two.strides, strict=True)
    shape = tuple(size if a or b else 1 for size, a, b in strides)
    once = [msgspec.structs.replace(view, shape=shape) for view in (one, two)]
    return once[0], once[1], one.elements // once[0].elements


def _repeated(tally: Tally, times: int, shape: tuple[int, ...], whole: tuple[int, ...]) -> Tally:
    """The tally of a tensor of shape `whole` that repeats one of `shape` so many times."""
    first = tally.first
    if first is not None:
        first = int(np.ravel_multi_index(np.unravel_index(first, shape), whole))
    sums = {name: getattr(tally, name) for name in ("sum_abs", "squares", "before", "after", "product")}
    counts = ("changed", "finite", "nan_before", "nan_after", "inf_before", "inf_after", "left_out", "lost")
    return tally._replace(
        first=first,
        **{name: getattr(tally, name) * times for name in counts},
        **{name: one._replace(mantissa=one.mantissa * times) for name, one in sums.items()},
    )


def _same_stored(one: Strided, two: Strided) -> bool:
    """Whether two views that overlap without end are the same view of equal bytes."""
    flat = [msgspec.structs.replace(view, shape=(span(view),), strides=(1,)) for view in (one, two)]
    same = [(view.dtype, view.shape, view.strides, view.conjugate, view.negative) for view in (one, two)]
    if same[0] != same[1] or one.affine is not None or two.affine is not None:
        return False
    return all(np.array_equal(a, b) for a, b in zip(*map(_items, flat), strict=True))


def rechunked(chunks: Iterable[Array], block: int = BLOCK) -> Iterator[Array]:
    """The same values in blocks of `block`, the last one shorter, each valid until the next is asked for."""
    held: Array | None = None
    filled = 0
    for chunk in chunks:
        done = 0
        held = np.empty(block, chunk.dtype) if held is None else held
        while done < chunk.size:
            taken = min(block - filled, chunk.size - done)
            held[filled : filled + taken] = chunk[done : done + taken]
            filled, done = filled + taken, done + taken
            if filled == block:
                yield held
                filled = 0
    if held is not None and filled:
        yield held[:filled]


_of_thread = threading.local()


def _arena() -> Arena:
    """One a thread, used again by each batch: the system hands out new memory only after filling it with zeros."""
    if not hasattr(_of_thread, "arena"):
        _of_thread.arena = Arena()
    arena: Arena = _of_thread.arena
    arena.clear()
    return arena


class _Runs:
    """Neighbouring blocks as one run."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def add(self, start: int, count: int) -> None:
        if self._runs and sum(self._runs[-1]) == start:
            self._runs[-1][1] += count
        else:
            self._runs.append([start, count])

    def found(self) -> tuple[tuple[int, int], ...]:
        return tuple((start, count) for start, count in self._runs)


def _element(dtype: str) -> Element:
    kind = element(dtype)
    if kind is None:
        raise UnreadableError(f"{dtype} elements are not numbers that statecli reads")
    return kind


def _width(side: Piece | TensorData) -> int:
    """Bytes of an element."""
    return _element(side.dtype).size


@with_denormals
def run_batch(how: How, tasks: Sequence[Task]) -> list[Found | StateError]:
    """The results of a batch of tasks, each its own result or its own error."""
    sides = [side for task in tasks for side in (task.before, task.after) if isinstance(side, TensorData)]
    spans = (span for task in tasks for span in _spans(task))
    with looking_up(*sides), files.expect_values(spans), Worker(how) as worker:
        return worker.results(tasks)


def _spans(task: Task) -> Iterator[tuple[str, int, int]]:
    """Where what it reads of remote files lies."""
    for side in (task.before, task.after):
        if isinstance(side, TensorData):
            yield from places(side) if files.reads_are_requests(side.storage.path) else ()
        elif files.reads_are_requests(side.path):
            yield side.path, side.offset + task.start * _width(side), task.count * _width(side)
