"""Compare the values of pairs of tensors by independent tasks, and add up the results.

    pair ──▶ tasks (path, ranges, dtype, a few million elements each) ──▶ tallies ──▶ Delta

If both tensors are contiguous, their bytes are read into two small buffers and compared as 64-bit words. Only differing
blocks are decoded; if any differs, the norms of the equal blocks are computed too. All other layouts (strides,
quantization, byte order) go through `read.read_values`, one task per tensor. Blocks and tasks have fixed limits, and
results are added up in order, so that every executor gives the same result, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from statecli import values
from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import ByteRange, TensorData
from statecli.storage import files
from statecli.storage.file_version import FileChanged, FileVersion, find_changed, read_versions
from statecli.values.compare_task import CompareTask, Comparison, run_batch
from statecli.values.delta import CompareOptions, Delta
from statecli.values.ggml_blocks import explain_unreadable_blocks, to_readable
from statecli.values.pair_plan import RAGGED_PARTS, NotCompared, Pair, explain_not_numeric_data, is_suspect, plan_pairs
from statecli.values.ranges import get_element_width, sort_by_place
from statecli.values.recorded_checksums import find_damage, have_different_checksums
from statecli.values.small_pairs import compare_small_pairs
from statecli.values.tally import EQUAL_TALLY, Tally
from statecli.workers import pool

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
    plans = list(plan_pairs(pairs, options))
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
        if results.has_difference(n) or is_suspect(plan) or (results.is_complete(n) and have_different_checksums(pair))
    ]
    errors_by_storage = find_damage(
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
        return total.to_delta(shape, explain_not_numeric_data(pair.after.data))
    parts = dict(pair.after.parts)
    names = [*(("its own values",) if pair.after.data is not None else ()), *parts]
    reason_for_parts = f"computed over all inner tensors together: {', '.join(names)}"
    reason = explain_not_numeric_data(parts["values"]) if pair.after.layout in RAGGED_PARTS else reason_for_parts
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


# --- equal bytes with another name -----------------------------------------------------------------------------------
