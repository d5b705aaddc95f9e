"""Compare a batch of tensor pairs in a worker: read both tensors block by block, and add up the results.

Tasks are plain data and results are small, so any process, here or on another machine, can run a task.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import msgspec
import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError, UnreadableError
from statecli.core.model_state import ByteRange, Place, TensorData
from statecli.storage import files
from statecli.values import kernels
from statecli.values.compiled_kernel import tally_stored
from statecli.values.delta import CompareOptions
from statecli.values.elements import Arena, Array, Decoder, Element, find_element, require_element
from statecli.values.open_files import OpenFiles, keep_files_open
from statecli.values.ranges import fill_buffer, iter_paths, iter_places, prefetch_archive_ends
from statecli.values.read import (
    Strided,
    count_span,
    explain_not_numeric,
    explain_overlap,
    open_view,
    read_items,
    to_values,
)
from statecli.values.tally import BLOCK_ELEMENTS, EQUAL_TALLY, Tally
from statecli.workers.task import Piece, catch_error

#: Maximum number of elements of a task.
TASK_ELEMENTS = 128 * BLOCK_ELEMENTS


class CompareTask(msgspec.Struct, frozen=True, gc=False):
    """For two contiguous tensors, compare elements `start` to `start + count`; for other tensors, compare all elements.

    `pair` is the number of the pair. `norm`: the tensors are known to be equal, so only the norm is computed.
    """

    pair: int
    name: str = msgspec.field(name="what")  # the name in the digests of tasks in shard files
    start: int
    count: int
    before: Piece | TensorData
    after: Piece | TensorData
    norm: bool = False

    @property
    def size(self) -> int:
        """Size in bytes of the compared elements of `before`."""
        element = find_element(self.before.dtype)
        return self.count * element.size if element else self.count

    @property
    def paths(self) -> Iterable[str]:
        """Files of both tensors."""
        for side in (self.before, self.after):
            if isinstance(side, TensorData):
                yield from iter_paths(side)
            elif side.path:
                yield side.path

    @property
    def identity(self) -> object:
        """The task without its pair number, because this number depends on the other pairs of the command."""
        return msgspec.structs.replace(self, pair=0)


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """Result of a task: a tally of the differences, and (start, count) of each run of elements with equal bits."""

    tally: Tally
    equal: tuple[tuple[int, int], ...] = ()


class Worker:
    """Buffers and open files for a batch of tasks. `block` is the number of elements read at a time."""

    block = BLOCK_ELEMENTS

    def __init__(self, options: CompareOptions) -> None:
        self.options = options
        arena = _get_arena()
        self.before_decoder, self.after_decoder, self.scratch = Decoder(arena), Decoder(arena), Decoder(arena)
        self._raw = (
            self.before_decoder.buffer("raw", "u1", self.block * 16),
            self.after_decoder.buffer("raw", "u1", self.block * 16),
        )
        self._files = OpenFiles()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def compare_all(self, tasks: Sequence[CompareTask]) -> list[Comparison | StateError]:
        """Return the result or the error of each task."""
        return [catch_error(self.compare, task) for task in tasks]

    def compare(self, task: CompareTask) -> Comparison:
        """Return the result of a task. Raises `UnreadableError` or `MalformedError`, naming file and tensor."""
        if isinstance(task.before, Piece) and isinstance(task.after, Piece):
            if task.norm:
                return Comparison(self._tally_norm(task, task.before))
            return self._compare_pieces(task, task.before, task.after)
        assert isinstance(task.before, TensorData) and isinstance(task.after, TensorData)  # noqa: S101, PT018 - the plan
        return Comparison(self._compare_whole(task.name, task.before, task.after))

    # Contiguous tensors: compare bytes first, and values only in blocks that differ.

    def _compare_pieces(self, task: CompareTask, before: Piece, after: Piece) -> Comparison:
        before_element, after_element = require_element(before.dtype), require_element(after.dtype)
        is_same_type = before.dtype == after.dtype
        total = EQUAL_TALLY
        equal: list[tuple[int, int]] = []
        for start, count in self._split_into_blocks(task):
            before_bytes = self._read_block(0, before, before_element, start, count, task)
            after_bytes = self._read_block(1, after, after_element, start, count, task)
            if is_same_type and self._is_equal(before_bytes.size):
                if equal and sum(equal[-1]) == start:  # join adjacent equal blocks
                    start, count = equal[-1][0], equal.pop()[1] + count
                equal.append((start, count))
                continue
            total = total.merge(
                self._tally_block(
                    before_bytes.view(before_element.stored),
                    before.dtype,
                    after_bytes.view(after_element.stored),
                    after.dtype,
                    start,
                )
            )
        return Comparison(total, tuple(equal))

    def _tally_norm(self, task: CompareTask, before: Piece) -> Tally:
        element = require_element(before.dtype)
        if explain_not_numeric(before.dtype):
            return Tally(left_out=task.count)
        total = EQUAL_TALLY
        for start, count in self._split_into_blocks(task):
            raw = self._read_block(0, before, element, start, count, task).view(element.stored)
            tally = tally_stored(raw, raw, (before.dtype, before.dtype))
            total = total.merge(tally or kernels.tally_equal(self.before_decoder(raw, element), self.scratch))
        return total

    def _tally_block(self, before: Array, before_type: str, after: Array, after_type: str, start: int) -> Tally:
        tally = tally_stored(before, after, (before_type, after_type), self.options)
        if tally is not None:
            return tally.shift(start)
        before_element, after_element = require_element(before_type), require_element(after_type)
        if explain_not_numeric(before_type):
            return kernels.tally_opaque(kernels.compare_bits(before, after, before_element.items)).shift(start)
        changed_mask = (
            kernels.compare_bits(before, after, before_element.items)
            if before_type == after_type and self.options.bitwise
            else None
        )
        return kernels.tally_values(
            self.before_decoder(before, before_element),
            self.after_decoder(after, after_element),
            self.options,
            self.scratch,
            changed_mask,
            before_element.values,
        ).shift(start)

    def _split_into_blocks(self, task: CompareTask) -> Iterator[tuple[int, int]]:
        end = task.start + task.count
        size = max(require_element(side.dtype).size for side in (task.before, task.after))
        step = max(min(self.block, self._raw[0].size // size), 1)
        return ((start, min(step, end - start)) for start in range(task.start, end, step))

    def _is_equal(self, size: int) -> bool:
        """Return whether the first `size` bytes of both buffers are equal, by comparing 64-bit words."""
        words = -(-size // 8)
        for raw in self._raw:
            raw[size : words * 8] = 0
        a, b = (raw[: words * 8].view(np.uint64) for raw in self._raw)
        # Test the beginning first, because a trained tensor differs nearly everywhere.
        if words > 512 and (a[:64] != b[:64]).any():
            return False
        return not np.not_equal(a, b, out=self.scratch.buffer("words", "?", words)).any()

    def _read_block(self, side: int, piece: Piece, kind: Element, start: int, count: int, task: CompareTask) -> Array:
        size = kind.size
        into = self._raw[side][: count * size]
        byte_range = ByteRange(piece.path, piece.offset + task.start * size, task.count * size)
        with self._files.borrow(piece.path) as file:
            fill_buffer(into, file, piece.offset + start * size, byte_range, task.name)
        return into

    # Other tensors: strides, quantization, lazy conjugation, byte order.

    def _compare_whole(self, name: str, before: TensorData, after: TensorData) -> Tally:
        with open_view(before, name) as raw_before, open_view(after, name) as raw_after:
            before_view, after_view, times = _skip_repeats(raw_before, raw_after)
            reasons = [explain_overlap(before_view), explain_overlap(after_view)]
            if all(reasons):
                if _is_same_view(before_view, after_view):
                    return Tally()
                raise UnreadableError(f"{before.storage.path} and {after.storage.path}: {name}: {reasons[0]}")
            total, start = Tally(), 0
            for a, b in zip(_iter_items(before_view), _iter_items(after_view), strict=True):
                tally = self._tally_items(a, before_view, b, after_view, start)
                total = total.merge(tally)
                start += a.size // require_element(before_view.dtype).items
        return total if times == 1 else _repeat_tally(total, times, before_view.shape, before.shape)

    def _tally_items(self, a: Array, before_view: Strided, b: Array, after_view: Strided, start: int) -> Tally:
        """Return the `Tally` of two blocks of stored items, after lazy conjugation, lazy negation and scaling."""
        if not (_is_lazy(before_view) or _is_lazy(after_view)):
            return self._tally_block(a, before_view.dtype, b, after_view.dtype, start)
        x, y = (
            to_values(before_view, a, start, self.before_decoder),
            to_values(after_view, b, start, self.after_decoder),
        )
        changed_mask = None
        if self.options.bitwise and before_view.dtype == after_view.dtype:
            # Compare stored bits and values, because with a scale equal bits may have different values, and equal
            # values different bits.
            changed_mask = kernels.compare_bits(a, b, require_element(before_view.dtype).items) | kernels.compare_bits(
                x, y, 1
            )
        return kernels.tally_values(x, y, self.options, self.scratch, changed_mask).shift(start)


def _iter_items(view: Strided) -> Iterator[Array]:
    return rechunk(read_items(view), BLOCK_ELEMENTS * require_element(view.dtype).items)


def _is_lazy(view: Strided) -> bool:
    return view.conjugate or view.negative or view.affine is not None


def _skip_repeats(before: Strided, after: Strided) -> tuple[Strided, Strided, int]:
    """Return both views with size 1 in each dimension that both expand, and how often each element was repeated."""
    if before.affine is not None or after.affine is not None or not before.elements:
        return before, after, 1
    strides = zip(before.shape, before.strides, after.strides, strict=True)
    shape = tuple(size if a or b else 1 for size, a, b in strides)
    views = [msgspec.structs.replace(view, shape=shape) for view in (before, after)]
    return views[0], views[1], before.elements // views[0].elements


def _repeat_tally(tally: Tally, times: int, shape: tuple[int, ...], full_shape: tuple[int, ...]) -> Tally:
    """Return the tally of a tensor of shape `full_shape`, in which a tensor of shape `shape` occurs `times` times."""
    first = tally.first
    if first is not None:
        first = int(np.ravel_multi_index(np.unravel_index(first, shape), full_shape))
    sums = {name: getattr(tally, name) for name in ("sum_abs", "squares", "before", "after", "product")}
    counts = ("changed", "finite", "nan_before", "nan_after", "inf_before", "inf_after", "left_out", "lost")
    return tally._replace(
        first=first,
        **{name: getattr(tally, name) * times for name in counts},
        **{name: value._replace(mantissa=value.mantissa * times) for name, value in sums.items()},
    )


def _is_same_view(before: Strided, after: Strided) -> bool:
    """Return whether two views that overlap too much to be read have equal strides and equal bytes."""
    flat = [msgspec.structs.replace(view, shape=(count_span(view),), strides=(1,)) for view in (before, after)]
    signatures = [(view.dtype, view.shape, view.strides, view.conjugate, view.negative) for view in (before, after)]
    if signatures[0] != signatures[1] or before.affine is not None or after.affine is not None:
        return False
    return all(np.array_equal(a, b) for a, b in zip(*map(_iter_items, flat), strict=True))


def rechunk(chunks: Iterable[Array], block: int = BLOCK_ELEMENTS) -> Iterator[Array]:
    """Yield values in blocks of `block` values (the last may be shorter). A block overwrites the previous block."""
    buffer: Array | None = None
    filled = 0
    for chunk in chunks:
        taken_count = 0
        buffer = np.empty(block, chunk.dtype) if buffer is None else buffer
        while taken_count < chunk.size:
            count = min(block - filled, chunk.size - taken_count)
            buffer[filled : filled + count] = chunk[taken_count : taken_count + count]
            filled, taken_count = filled + count, taken_count + count
            if filled == block:
                yield buffer
                filled = 0
    if buffer is not None and filled:
        yield buffer[:filled]


_thread_local = threading.local()


def _get_arena() -> Arena:
    """Return the cleared memory arena of this thread. The arena is reused, because the system zeroes new memory."""
    if not hasattr(_thread_local, "arena"):
        _thread_local.arena = Arena()
    arena: Arena = _thread_local.arena
    arena.clear()
    return arena


@with_denormals
def run_batch(options: CompareOptions, tasks: Sequence[CompareTask]) -> list[Comparison | StateError]:
    """Return the result or the error of each task of a batch."""
    sides = [side for task in tasks for side in (task.before, task.after) if isinstance(side, TensorData)]
    spans = (span for task in tasks for span in _iter_remote_spans(task))
    with (
        keep_files_open(),
        prefetch_archive_ends(*sides),
        files.expect_values(spans),
        closing(Worker(options)) as worker,
    ):
        return worker.compare_all(tasks)


def _iter_remote_spans(task: CompareTask) -> Iterator[Place]:
    """Yield the location of each byte range that a task reads from remote files, in order."""
    for side in (task.before, task.after):
        if isinstance(side, TensorData):
            yield from iter_places(side) if files.reads_are_requests(side.storage.path) else ()
        elif files.reads_are_requests(side.path):
            size = require_element(side.dtype).size
            yield Place(side.path, side.offset + task.start * size, task.count * size)
