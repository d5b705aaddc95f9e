"""Compare the values of pairs of tensors by independent tasks, and add up the results.

    pair ──▶ tasks (path, ranges, dtype, a few million elements each) ──▶ tallies ──▶ Delta

If both tensors are contiguous, their bytes are read into two small buffers and compared as 64-bit words. Only differing
blocks are decoded; if any differs, the norms of the equal blocks are computed too. All other layouts (strides,
quantization, byte order) go through `read.read_values`, one task per tensor. Blocks and tasks have fixed limits, and
results are added up in order, so that every executor gives the same result, bit for bit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from statecli import values
from statecli.core.denormals import with_denormals
from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import StateError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import ByteRange, TensorData, TensorInfo
from statecli.storage import files
from statecli.storage.file_version import FileChanged, FileVersion, find_changed, read_versions
from statecli.values import sparse
from statecli.values.compare_task import TASK_ELEMENTS, CompareTask, Comparison, run_batch
from statecli.values.delta import CompareOptions, Delta
from statecli.values.elements import find_element
from statecli.values.ggml_blocks import explain_unreadable_blocks, find_ggml_type, to_readable, to_stored_blocks
from statecli.values.neighbours import MAX_TENSOR_BYTES, Neighbour, find_neighbour, read_neighbours
from statecli.values.ranges import (
    check_crc,
    get_element_width,
    is_run,
    iter_paths,
    locate_storage,
    prefetch,
    prefetch_archive_ends,
    resolve_data,
    sort_by_place,
)
from statecli.values.read import explain_not_numeric, explain_overlap, find_piece, is_plain, open_view, read_items
from statecli.values.small_pairs import compare_small_pairs
from statecli.values.tally import EQUAL_TALLY, Tally
from statecli.workers import pool
from statecli.workers.task import Piece, WholeTask, catch_error

#: Number of pairs that are planned together, so that the ends of all their remote archives are fetched at once.
PAIRS_PLANNED_TOGETHER = 512


class Pair(msgspec.Struct, frozen=True, gc=False):
    """Two tensors of equal shape whose values are compared."""

    before: TensorInfo
    after: TensorInfo


class NotCompared(msgspec.Struct, frozen=True, gc=False):
    """Reason why the values of a pair could not be compared.

    `reshaped`: the shapes differ.
    """

    reason: str
    reshaped: bool = False


PairOutcome = Delta | NotCompared | StateError


# --- all pairs ---------------------------------------------------------------------------------------------------


@with_denormals
def compare_pairs(
    pairs: Sequence[Pair],
    options: CompareOptions,
    *,
    jobs: int = 0,
    progress: pool.Progress | None = None,
    header_versions: Mapping[str, FileVersion | None] | None = None,
    derived: bool = False,
) -> list[PairOutcome]:
    """Return the outcome of each pair, in order. An unreadable file affects only pairs with tensors in this file.

    Recorded checksums are verified for tensors that differ, so that damage is not reported as a change by training.

    Args:
        header_versions: Versions of files when their headers were read. If a version differs at the end, the file's
            pairs fail.
        progress: Called with the name of a tensor and the number of bytes of `before` that were compared.
        jobs: Number of workers; 0 for a worker per core.
        derived: True if the pairs depend on results of earlier tasks (see `pool.run_tasks`).
    """
    paths = {storage.path for pair in pairs for tensor in (pair.before, pair.after) for storage in tensor.ranges}
    before = {**read_versions(path for path in paths if path not in (header_versions or {})), **(header_versions or {})}
    tallies = _compare_small(pairs, options, progress)
    large_pairs = [pair for n, pair in enumerate(pairs) if n not in tallies]
    large_outcomes = iter(_compare_by_tasks(large_pairs, options, jobs, progress, derived=derived))
    outcomes = [
        _convert_to_delta(tallies[n], pair) if n in tallies else next(large_outcomes) for n, pair in enumerate(pairs)
    ]
    stale: dict[str | ByteRange, StateError] = {
        path: FileChanged(path) for path in find_changed({path: before[path] for path in paths})
    }
    if not stale:
        return outcomes
    return [_prefer_error(pair, outcome, stale) for pair, outcome in zip(pairs, outcomes, strict=True)]


def _compare_small(pairs: Sequence[Pair], options: CompareOptions, progress: pool.Progress | None) -> dict[int, Tally]:
    """Compare small adjacent pairs without tasks. Return the `Tally` of each compared pair by its index."""
    if options.device != "cpu" or pool.is_distributed():
        return {}
    tallies = compare_small_pairs([(pair.before, pair.after) for pair in pairs], options)
    if tallies and progress:
        progress(pairs[max(tallies)].after.fqn, sum(pairs[n].before.nbytes for n in tallies))
    return tallies


def _convert_to_delta(total: Tally, pair: Pair) -> Delta:
    shape = pair.after.shape or ()
    return Delta(elements=math.prod(shape)) if not total.changed else _build_delta(total, pair, shape)


def _compare_by_tasks(
    pairs: Sequence[Pair], options: CompareOptions, jobs: int, progress: pool.Progress | None, *, derived: bool
) -> Iterator[PairOutcome]:
    """Compare pairs by tasks, and yield the outcome of each pair in order."""
    plans = list(_plan_pairs(pairs, options))
    results = _Results(len(pairs), options)
    results.add(
        _run_tasks(
            [task for plan in plans if isinstance(plan, list) for task in plan],
            options,
            jobs,
            progress,
            derived=derived,
        )
    )
    number_tasks = [task for n, pair in enumerate(pairs) for task in results.iter_number_tasks(n, pair)]
    results.replace_blocks(_run_tasks(number_tasks, options, jobs, derived=True))
    results.add(_run_tasks(list(results.iter_equal_norm_tasks()), options, jobs, derived=True))
    suspects = [
        pair
        for n, (pair, plan) in enumerate(zip(pairs, plans, strict=True))
        if results.has_difference(n)
        or _is_suspect(plan)
        or (results.is_complete(n) and _have_different_checksums(pair))
    ]
    errors_by_storage = _find_damage(
        [tensor for pair in suspects for tensor in (pair.before, pair.after)], jobs, derived=True
    )
    for n, (pair, plan) in enumerate(zip(pairs, plans, strict=True)):
        yield _prefer_error(pair, results.build_outcome(n, pair) if isinstance(plan, list) else plan, errors_by_storage)


def _prefer_error(pair: Pair, outcome: PairOutcome, errors: Mapping[str | ByteRange, StateError]) -> PairOutcome:
    return outcome if isinstance(outcome, NotCompared) else _find_error(pair, errors) or outcome


#: Placeholder for the result of a task that another shard of the command runs.
NOT_COMPUTED = Comparison(Tally())
TaskResults = list[tuple[CompareTask, Comparison | StateError]]


class _Results:
    """Results of all tasks, grouped by pair of tensors."""

    def __init__(self, pairs: int, options: CompareOptions) -> None:
        self._results_of_pair: list[TaskResults] = [[] for _ in range(pairs)]
        self._options = options
        self._other_shards: set[int] = set()

    def add(self, results: TaskResults) -> None:
        for task, result in results:
            if result is NOT_COMPUTED:
                self._other_shards.add(task.pair)
            self._results_of_pair[task.pair].append((task, result))

    def has_difference(self, pair: int) -> bool:
        return any(isinstance(result, Comparison) and result.tally.changed for _, result in self._results_of_pair[pair])

    def is_complete(self, pair: int) -> bool:
        """Return whether all tasks of the pair run in this shard of the command."""
        return pair not in self._other_shards

    def iter_number_tasks(self, number: int, pair: Pair) -> Iterator[CompareTask]:
        """Yield a task to compare dequantized values, if the pair's quantized blocks differ and can be decoded."""
        before, after = pair.before.data, pair.after.data
        if (
            before
            and after
            and self.has_difference(number)
            and self._get_block_type(number)
            and to_readable(after) is after
        ):
            yield CompareTask(number, pair.after.fqn, 0, math.prod(after.shape), before, after)

    def replace_blocks(self, results: TaskResults) -> None:
        """Replace block results by value results. With `bitwise`, keep block results whose decoded values are equal."""
        for task, result in results:
            if not (self._options.bitwise and isinstance(result, Comparison) and not result.tally.changed):
                self._results_of_pair[task.pair] = [(task, result)]

    def _get_block_type(self, number: int) -> str | None:
        """Return the ggml type if the pair was compared as quantized blocks, else None."""
        dtype = self._results_of_pair[number][0][0].before.dtype if self._results_of_pair[number] else ""
        return dtype if dtype in BLOCK_SIZES else None

    def iter_equal_norm_tasks(self) -> Iterator[CompareTask]:
        """Yield tasks for the norms of equal blocks in differing pairs. So far only the bytes were compared."""
        for pair, results in enumerate(self._results_of_pair):
            for task, result in results if self.has_difference(pair) else ():
                for start, count in result.equal if isinstance(result, Comparison) else ():
                    yield msgspec.structs.replace(task, start=start, count=count, norm=True)

    def build_outcome(self, number: int, pair: Pair) -> PairOutcome:
        total = EQUAL_TALLY
        # Add in the order of the elements, independent of the order of the tasks.
        for _, result in sorted(self._results_of_pair[number], key=lambda entry: (entry[0].name, entry[0].start)):
            if isinstance(result, StateError):
                return result
            total = total.merge(result.tally)
        shape, block_type = pair.after.shape or (), self._get_block_type(number)
        if block_type and total.changed:
            return _build_block_delta(total, block_type, shape, self._options)
        return _convert_to_delta(total, pair)


def _build_block_delta(
    total: Tally, dtype: str, shape: tuple[int, ...], options: CompareOptions
) -> Delta | NotCompared:
    """Return the result for quantized blocks with different bytes, if their values are equal or cannot be decoded."""
    unreadable = explain_unreadable_blocks(dtype)
    if options.atol or options.rtol:
        return NotCompared(
            f"its quantized blocks have different bytes, {f'and {unreadable}' if unreadable else 'but equal values'}"
        )
    values, elements = BLOCK_SIZES[dtype][0], math.prod(shape)
    reason_to_count = f"because {unreadable}" if unreadable else "although the values are equal"
    reason = f"statecli counts each block with different bytes as {values} changed values, {reason_to_count}"
    return Delta(elements, total.changed * values, left_out=elements, reason=reason)


def _build_delta(total: Tally, pair: Pair, shape: tuple[int, ...]) -> Delta:
    if pair.after.data is not None and not pair.after.parts:
        return total.to_delta(shape, _explain_not_numeric(pair.after.data))
    parts = dict(pair.after.parts)
    names = [*(("its own values",) if pair.after.data is not None else ()), *parts]
    reason_for_parts = f"computed over all inner tensors together: {', '.join(names)}"
    reason = _explain_not_numeric(parts["values"]) if pair.after.layout in RAGGED_PARTS else reason_for_parts
    delta = total.to_delta((total.finite + total.left_out,), reason)
    return msgspec.structs.replace(delta, elements=pair.after.elements, first=None)


def _run_tasks(
    tasks: list[CompareTask],
    options: CompareOptions,
    jobs: int,
    progress: pool.Progress | None = None,
    *,
    derived: bool = False,
) -> TaskResults:
    pairs = [task.pair for task in tasks]
    tasks = sort_by_place(tasks, _remote_ranges)
    if options.device != "cpu":
        results = _run_on_device(options, tasks, pool.report_batches(progress))
    else:
        results = pool.run_tasks(
            run_batch,
            options,
            tasks,
            jobs=jobs,
            on_batch=pool.report_batches(progress),
            absent=NOT_COMPUTED,
            derived=derived,
            group_keys=pairs,
        )
    return list(zip(tasks, results, strict=True))


def _remote_ranges(task: CompareTask) -> Iterator[ByteRange | TensorData]:
    for side in (task.after, task.before):
        if isinstance(side, TensorData):
            if files.reads_are_requests(side.storage.path):
                yield side
        elif files.reads_are_requests(side.path):
            yield ByteRange(side.path, side.offset + task.start * get_element_width(side.dtype), 0)


def _run_on_device(
    options: CompareOptions, tasks: list[CompareTask], on_batch: Callable[[Sequence[CompareTask]], None]
) -> list[Comparison | StateError]:
    gpu_kernel = values.gpu_kernel
    device = gpu_kernel.resolve_device(options.device)
    results = []
    for batch in pool.split_into_batches(tasks):
        results += gpu_kernel.run_batch_on_device(options, batch, device)
        on_batch(batch)
    return results


# --- checksums of the files -----------------------------------------------------------------------------------------


def _have_different_checksums(pair: Pair) -> bool:
    """Return whether the files record different checksums. If they do and the bytes are equal, a file is damaged."""
    before_ranges, after_ranges = pair.before.ranges, pair.after.ranges
    return len(before_ranges) == len(after_ranges) and any(
        before.length == after.length
        and None not in (sums := (_get_recorded_checksum(before), _get_recorded_checksum(after)))
        and sums[0] != sums[1]
        for before, after in zip(before_ranges, after_ranges, strict=True)
    )


def _get_recorded_checksum(byte_range: ByteRange) -> int | None:
    try:
        return locate_storage(byte_range, "storage").crc32
    except StateError:
        return None


def _list_data(tensor: TensorInfo) -> list[TensorData]:
    return ([to_stored_blocks(tensor.data)] if tensor.data else []) + [data for _, data in tensor.parts]


def check_checksums(tensors: Sequence[TensorInfo], *, jobs: int = 0) -> list[tuple[StateError, ...]]:
    """Return for each tensor the errors of its storages whose bytes do not match the recorded checksum."""
    errors = _find_damage(tensors, jobs)
    return [
        tuple(dict.fromkeys(errors[storage] for storage in tensor.ranges if storage in errors)) if errors else ()
        for tensor in tensors
    ]


def _find_damage(
    tensors: Sequence[TensorInfo], jobs: int, *, derived: bool = False
) -> dict[str | ByteRange, StateError]:
    """Verify all storages that have a checksum, are deflated or are in an archive. Return the errors by storage."""
    ranges: dict[ByteRange, str] = {}
    for tensor in tensors:
        for storage in tensor.ranges:
            if storage.crc32 is not None or storage.packing is not None:
                ranges.setdefault(storage, tensor.fqn)
    checks = sort_by_place([ChecksumTask(*item) for item in ranges.items()], lambda task: (task.storage,))
    errors = pool.run_tasks(check_batch, None, checks, jobs=jobs, absent=None, derived=derived)
    return {task.storage: error for task, error in zip(checks, errors, strict=True) if error is not None}


class ChecksumTask(WholeTask, frozen=True, array_like=True, gc=False):
    """Read a storage of tensor `name`, and compare its bytes with the checksum that the archive records."""

    storage: ByteRange
    name: str

    @property
    def size(self) -> int:
        """Size of the unpacked storage in bytes."""
        return self.storage.length

    @property
    def paths(self) -> Iterable[str]:
        """File of the storage, or the folder if the storage is in several files."""
        return (storage.path for storage in (self.storage,) if storage.path)


@with_denormals
def check_batch(_: None, tasks: Sequence[ChecksumTask]) -> list[StateError | None]:
    """Return the error of each storage, or None if the storage's bytes match the checksum."""
    intact = _find_intact_neighbours(tasks)
    remaining_tasks = [task for n, task in enumerate(tasks) if n not in intact]
    with prefetch(*(task.storage for task in remaining_tasks)):
        errors = iter([catch_error(check_crc, task.storage, task.name) for task in remaining_tasks])
    return [None if n in intact else next(errors) for n in range(len(tasks))]


def _find_intact_neighbours(tasks: Sequence[ChecksumTask]) -> set[int]:
    """Return the indexes of tasks with a correct checksum. Only small adjacent storages in local files are checked."""
    neighbours = [
        Neighbour(storage.path, storage.offset, storage.length, n)
        for n, storage in enumerate(task.storage for task in tasks)
        if storage.boxes is None
        and storage.packing is None
        and 0 < storage.length <= MAX_TENSOR_BYTES
        and not files.reads_are_requests(storage.path)
    ]
    return {n for n, data in read_neighbours(neighbours) if zlib.crc32(data) == tasks[n].storage.crc32}


def _find_error(pair: Pair, errors: Mapping[str | ByteRange, StateError]) -> StateError | None:
    if not errors:
        return None
    ranges = [*pair.before.ranges, *pair.after.ranges]
    for storage in ranges:
        if storage.path in errors:
            error, prefix = errors[storage.path], f"{storage.path}: {pair.after.fqn}: "
            is_changed = isinstance(error, FileChanged)
            return FileChanged(storage.path, prefix) if is_changed else UnreadableError(f"{prefix}{error}")
        if storage in errors:
            return errors[storage]
    return None


Plan = list[CompareTask] | Delta | NotCompared | StateError


def _is_suspect(plan: Plan) -> bool:
    """Return whether a result found without comparing values may come from a damaged file."""
    return isinstance(plan, StateError) or (isinstance(plan, Delta) and plan.changed > 0)


def _plan_pairs(pairs: Sequence[Pair], options: CompareOptions) -> Iterator[Plan]:
    for start in range(0, len(pairs), PAIRS_PLANNED_TOGETHER):
        chunk = pairs[start : start + PAIRS_PLANNED_TOGETHER]
        datas = [data for pair in chunk for tensor in (pair.before, pair.after) for data in _list_data(tensor)]
        with prefetch_archive_ends(*datas):
            yield from (_plan_or_error(start + n, pair, options) for n, pair in enumerate(chunk))


def _plan_or_error(number: int, pair: Pair, options: CompareOptions) -> Plan:
    try:
        return _plan_pair(number, pair, options)
    except StateError as error:
        # Keep a MalformedError, a subclass of UnreadableError: it means that a file is damaged.
        return NotCompared(str(error)) if type(error) is UnreadableError else error


def _plan_pair(number: int, pair: Pair, options: CompareOptions) -> Plan:
    if pair.before.layout.startswith("sparse") and pair.before.layout == pair.after.layout:
        return _compare_sparse(pair, options)
    parts = _match_parts(pair)
    if isinstance(parts, NotCompared):
        return parts
    tasks: list[CompareTask] = []
    for name, before, after in parts:
        reason = _explain_incomparable(before, after)
        if reason:
            return NotCompared(reason)
        tasks += _build_tasks(number, name, before, after)
    return tasks


def _compare_sparse(pair: Pair, options: CompareOptions) -> Delta | NotCompared:
    needed_parts = sparse.PARTS_OF_LAYOUT.get(pair.after.layout, ("values",))
    if not all({name for name, _ in tensor.parts}.issuperset(needed_parts) for tensor in (pair.before, pair.after)):
        return NotCompared("its values or indices are missing from the file")
    return sparse.compare_sparse(pair.before, pair.after, options)


#: Layouts of nested tensors -> two groups of part names: parts with the inner shapes, and parts with the positions of
#: the inner tensors in the values.
RAGGED_PARTS = {"nested": (("sizes",), ("strides", "offsets")), "jagged": (("offsets", "lengths"), ())}


def _match_ragged(pair: Pair) -> list[tuple[str, TensorData, TensorData]] | NotCompared:
    """Return the values of two nested tensors. If inner tensors differ in shape or order, return this difference."""
    before, after = dict(pair.before.parts), dict(pair.after.parts)
    if "values" not in after:
        return NotCompared("its values are not in the file")
    for names, outcome in zip(RAGGED_PARTS[pair.after.layout], (_RESHAPED, _REORDERED), strict=True):
        for name in after.keys() & set(names):
            if not sparse.is_same_data(before[name], after[name], f"{pair.after.fqn}: {name}"):
                return outcome
    return [(pair.after.fqn, before["values"], after["values"])]


_RESHAPED = NotCompared("the shapes of its inner tensors differ", reshaped=True)
_REORDERED = NotCompared("its inner tensors have another order than before")


def _match_parts(pair: Pair) -> list[tuple[str, TensorData, TensorData]] | NotCompared:
    """Return the named strided tensors to compare: the tensor itself, or the parts of a sparse tensor or subclass."""
    before, after = pair.before, pair.after
    if before.dtype != after.dtype and "numpy" in (before.dtype + after.dtype):
        return NotCompared(f"statecli does not compare {before.dtype} with {after.dtype}")
    if before.data is not None and after.data is not None:
        # Here the parts are attributes that are tensors. A name on one side only is compared as a setting.
        attributes = dict(before.parts)
        pairs = [(f"{after.fqn}: {name}", attributes[name], new) for name, new in after.parts if name in attributes]
        if mismatched_name := next((name for name, old, new in pairs if old.shape != new.shape), None):
            return NotCompared(f"the shape of its attribute {mismatched_name.removeprefix(f'{after.fqn}: ')} differs")
        return [(after.fqn, *_convert_alike(before.data, after.data)), *pairs]
    names = [name for name, _ in before.parts]
    if before.parts and after.parts and before.layout == after.layout and names == [name for name, _ in after.parts]:
        if before.layout in RAGGED_PARTS:
            return _match_ragged(pair)
        part_pairs = zip(names, before.parts, after.parts, strict=True)
        return [(f"{after.fqn}: {name}", old, new) for name, (_, old), (_, new) in part_pairs]
    if before.layout != after.layout:
        return NotCompared(f"the layout changed from {before.layout} to {after.layout}")
    return NotCompared(
        next(filter(None, map(_explain_no_values, (before, after))), "the two tensors have different inner tensors")
    )


def _convert_alike(before: TensorData, after: TensorData) -> tuple[TensorData, TensorData]:
    """Return both tensors as quantized blocks if their ggml types are equal. Otherwise decode each if gguf can."""
    convert = to_stored_blocks if find_ggml_type(before.storage) == find_ggml_type(after.storage) else to_readable
    return convert(before), convert(after)


def _explain_no_values(tensor: TensorInfo) -> str | None:
    return None if tensor.data is not None or tensor.parts else values.stats.explain_no_data(tensor)


def _explain_incomparable(before: TensorData, after: TensorData) -> str | None:
    """Return why two tensors cannot be compared element by element, or None if they can be compared.

    Elements other than numbers can be compared bit for bit.
    """
    if before.dtype != after.dtype and BLOCK_SIZES.keys() & {before.dtype, after.dtype}:
        return _explain_not_numeric(before) or _explain_not_numeric(after)
    if before.shape != after.shape:
        return (
            f"its inner tensors have the shape {list(before.shape)} in the first checkpoint, but {list(after.shape)} "
            "in the second"
        )
    elements = find_element(before.dtype), find_element(after.dtype)
    reason = _explain_not_numeric(before) or _explain_not_numeric(after)
    if before.dtype == after.dtype and None not in elements and (before.quantizer is None) is (after.quantizer is None):
        return None
    if reason is None and elements[0] and elements[1] and elements[0].values != elements[1].values:
        return f"an element of {before.dtype} and an element of {after.dtype} contain different numbers of values"
    return reason


def _explain_not_numeric(data: TensorData) -> str | None:
    return explain_not_numeric(data.dtype, data.quantizer is not None)


def _build_tasks(number: int, name: str, before: TensorData, after: TensorData) -> Iterator[CompareTask]:
    elements = math.prod(after.shape)
    before_pieces, after_pieces = _find_pieces(before, name), _find_pieces(after, name)
    if not before_pieces or not after_pieces:
        yield CompareTask(number, name, 0, elements, before, after)
        return
    starts = sorted({*before_pieces, *after_pieces, *range(0, elements, TASK_ELEMENTS)})
    before_piece, after_piece = before_pieces[0], after_pieces[0]
    for start, stop in zip(starts, [*starts[1:], elements], strict=True):
        before_piece, after_piece = before_pieces.get(start, before_piece), after_pieces.get(start, after_piece)
        yield CompareTask(number, name, start, stop - start, before_piece, after_piece)


def _find_pieces(data: TensorData, name: str) -> dict[int, Piece]:
    """Return the contiguous pieces of a tensor. The key of a piece is the index of its first element.

    The offset of each piece is the offset that element 0 would have in this piece's file. Return an empty dict if the
    elements are in another order, or if the stored bytes are not the elements themselves.
    """
    data = resolve_data(data, name)
    boxes = data.storage.boxes
    if boxes is None:
        single_piece = find_piece(data)
        return {0: single_piece} if single_piece and math.prod(data.shape) else {}
    if not is_plain(data) or data.offset or math.prod(data.shape) != math.prod(boxes.shape):
        return {}
    pieces: dict[int, Piece] = {}
    strides = contiguous_strides(boxes.shape)
    for box in sorted(boxes.boxes, key=lambda box: box.start):
        start, count = sum(at * step for at, step in zip(box.start, strides, strict=True)), math.prod(box.data.shape)
        piece = find_piece(resolve_data(box.data, name)) if is_run(box.data.shape, boxes.shape) else None
        if count and piece is None:
            return {}
        if count and piece:
            pieces[start] = Piece(piece.path, piece.offset - start * get_element_width(data.dtype), data.dtype)
    return pieces


# --- equal bytes with another name -----------------------------------------------------------------------------------


def compute_fingerprints(
    tensors: Sequence[TensorInfo],
    *,
    jobs: int = 0,
    group_keys: Sequence[object] | None = None,
    derived: bool = False,
) -> list[int | StateError | None]:
    """Return the CRC-32 of each tensor's elements (C order, little-endian), or None if a tensor has none to read.

    The parts of a composed tensor are concatenated. Equal fingerprints are only a hint, to be confirmed by
    `compare_pairs`. A zip archive's checksum of a whole storage is used instead of computing it. If a tensor cannot be
    read or its worker fails, the error is its result. `group_keys` and `derived`: see `pool.run_tasks`.
    """
    tasks = [FingerprintTask(tensor.nbytes, tensor.fqn, tuple(_list_data(tensor))) for tensor in tensors]
    return pool.run_tasks(
        fingerprint_batch, None, tasks, jobs=jobs, absent=None, group_keys=group_keys, derived=derived
    )


class FingerprintTask(WholeTask, frozen=True, array_like=True, gc=False):
    """Compute the CRC-32 of the elements of tensor `name`, which has `size` bytes in `parts`."""

    size: int
    name: str
    parts: tuple[TensorData, ...]

    @property
    def paths(self) -> Iterable[str]:
        """Files that contain the tensor's parts."""
        return iter_paths(*self.parts)


@with_denormals
def fingerprint_batch(_: None, tasks: Sequence[FingerprintTask]) -> list[int | StateError | None]:
    """Return the fingerprint or the error of each tensor, or None for a tensor without readable elements."""
    fingerprints = _find_fingerprints_of_neighbours(tasks)
    remaining_tasks = [task for n, task in enumerate(tasks) if n not in fingerprints]
    with prefetch(*(data for task in remaining_tasks for data in task.parts)):
        computed = iter([catch_error(_compute_fingerprint, task) for task in remaining_tasks])
    return [fingerprints[n] if n in fingerprints else next(computed) for n in range(len(tasks))]


def _find_fingerprints_of_neighbours(tasks: Sequence[FingerprintTask]) -> dict[int, int]:
    """Return the fingerprints of small adjacent tensors, by task index. A single read serves many tensors."""
    neighbours = [
        neighbour
        for n, task in enumerate(tasks)
        if len(task.parts) == 1
        and task.parts[0].storage.crc32 is None
        and (neighbour := find_neighbour(n, task.parts[0])) is not None
    ]
    return {n: zlib.crc32(data) for n, data in read_neighbours(neighbours)}


def _compute_fingerprint(task: FingerprintTask) -> int | None:
    checksums = [_compute_crc(data, task.name) for data in task.parts]
    if not checksums or None in checksums:
        return None
    return checksums[0] if len(checksums) == 1 else zlib.crc32(repr(checksums).encode())


def _compute_crc(data: TensorData, name: str) -> int | None:
    if data.quantizer is not None or find_element(data.dtype) is None:
        return None
    storage = data.storage
    if (
        find_piece(data)
        and storage.crc32 is not None
        and math.prod(data.shape) * get_element_width(data.dtype) == storage.length
    ):
        return storage.crc32
    try:
        with open_view(data, name) as view:
            if explain_overlap(view):
                return None
            checksum = 0
            for block in read_items(view):
                checksum = zlib.crc32(block.data, checksum)
    except UnreadableError as error:
        # An error without a cause means that the bytes cannot be read as elements. An error of a file or store has a
        # cause.
        if type(error) is UnreadableError and error.__cause__ is None:
            return None
        raise
    return checksum
