"""Compute statistics of tensors in a checkpoint, without torch, and of live torch tensors.

Values are read chunk by chunk; `Facts` of chunks are merged. For big tensors of some one-byte types only the number of
each code is counted, because the statistics follow exactly from these counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from statecli.core import record_dtypes
from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import ByteRange, ModelState, NoteKind, Stats, TensorData, TensorInfo
from statecli.values import live_tensor
from statecli.values.data_task import TensorTask
from statecli.values.elements import COMPLEX, SMALL_FLOATS, Array, Decoder, code_values
from statecli.values.ggml_blocks import to_readable
from statecli.values.ranges import check_crc, prefetch, sort_by_place
from statecli.values.read import (
    Strided,
    count_codes,
    dequantize,
    explain_not_numeric,
    explain_overlap,
    open_view,
    read_values,
    skip_expanded,
    to_memory_order,
)
from statecli.values.summary import Facts, Moments, join_reasons, summarize_chunk, summarize_codes
from statecli.workers import pool
from statecli.workers.task import catch_error

if TYPE_CHECKING:
    import torch

#: One-byte types whose codes are counted, because this is faster than decoding. Not bool and plain integers, because
#: they are decoded as fast, and counting stalls on a single counter if all values are equal.
COUNTED_TYPES = frozenset(
    ["qint8", "quint8", "float4_e2m1fn_x2", "float8_e8m0fnu"] + [name for name in SMALL_FLOATS if "8" in name]
)
#: Minimum number of elements of a tensor whose codes are counted.
MIN_ELEMENTS_TO_COUNT = 1 << 12


def summarize_view(view: Strided, decoder: Decoder) -> Facts:
    """Return the `Facts` about the values of a strided view. Each stored element is read once.

    Raises `UnreadableError` for elements other than numbers, or if they overlap too much.
    """
    reason = explain_not_numeric(view.dtype, view.affine is not None)
    if reason:
        raise UnreadableError(reason)
    if 0 in view.shape:
        return Facts()
    times = 1
    if view.affine is None or view.affine.axis is None:
        view, times = skip_expanded(view)
        view = to_memory_order(view)
    reason = explain_overlap(view)
    if reason:
        raise UnreadableError(reason)
    if (
        view.dtype in COUNTED_TYPES
        and view.elements >= MIN_ELEMENTS_TO_COUNT
        and not (view.affine and view.affine.axis is not None)
    ):
        return summarize_codes(count_codes(view, decoder), _compute_code_values(view, decoder)).repeat(times)
    total = Facts()
    with np.errstate(all="ignore"):
        for chunk in read_values(view, decoder):
            total = total.merge(summarize_chunk(chunk, decoder))
    return total.repeat(times)


def _compute_code_values(view: Strided, decoder: Decoder) -> Array:
    """Return the value of each code of the view's dtype, dequantized if the tensor is quantized."""
    scaled = code_values(view.dtype)
    if view.affine is None:
        return scaled
    return dequantize(scaled, view.affine.zero_points, view.affine.scales, decoder).astype(np.float64)


# --- a checkpoint's tensors ----------------------------------------------------------------------------------------


@with_denormals
def read_stats(tensor: TensorInfo, decoder: Decoder | None = None) -> Stats:
    """Return the statistics of a checkpoint's tensor, read from its file.

    A tensor without numbers has a `reason`. Checksums: see `fill_stats`. Raises `UnreadableError` or `MalformedError`
    for a missing or truncated file, because its numbers would be meaningless.
    """
    decoder = decoder or Decoder()
    if tensor.layout.startswith("sparse"):
        return _sparse_stats(tensor, decoder)
    if tensor.data is None:
        return Stats(reason=explain_no_data(tensor))
    return _to_stats(_summarize_data(tensor.data, tensor.fqn, decoder), tensor.data.dtype)


def explain_no_data(tensor: TensorInfo) -> str:
    """Return why a tensor without `data` has no statistics, in a few words."""
    if tensor.parts:
        names = ", ".join(name for name, _ in tensor.parts)
        return f"stored as several tensors ({names}), so statistics are not available"
    if tensor.device == "meta":
        return "a meta tensor has no data"
    if tensor.damage is not None:
        return "it cannot be read"
    if tensor.dtype in BLOCK_SIZES:  # the reader of GGUF gives data for blocks in the other order
        return f"statecli does not read blocks of {tensor.dtype} in big-endian order"
    if record_dtypes.has_objects(tensor.dtype):
        return "its elements are Python objects, which statecli does not read"
    return "uninitialized" if tensor.shape is None else "its values are not in the file"


def _summarize_data(data: TensorData, name: str, decoder: Decoder) -> Facts | str:
    """Return the `Facts` about a tensor's values, or the reason why they are not available."""
    data = to_readable(data)
    reason = explain_not_numeric(data.dtype, data.quantizer is not None)
    if reason:
        return reason
    with open_view(data, name) as view:
        return _summarize_or_explain(view, decoder)


def _summarize_or_explain(view: Strided, decoder: Decoder) -> Facts | str:
    try:
        return summarize_view(view, decoder)
    except UnreadableError as error:
        # Re-raise the subclass MalformedError, because it means that the file changed while it was read.
        if type(error) is not UnreadableError:
            raise
        return str(error)


def _to_stats(summary: Facts | str, dtype: str, reason: str | None = None) -> Stats:
    if isinstance(summary, str):
        return Stats(reason=summary)
    if dtype in COMPLEX:
        return summary.to_stats(join_reasons(reason, "complex values have no order"))
    return summary.to_stats(reason)


def _sparse_stats(tensor: TensorInfo, decoder: Decoder) -> Stats:
    stored_values = dict(tensor.parts).get("values")
    if stored_values is None:
        return Stats(reason=f"{tensor.layout}: its values are missing from the file")
    summary = _summarize_data(stored_values, tensor.fqn, decoder)
    is_uncoalesced = tensor.note_kind is NoteKind.UNCOALESCED
    return _add_implicit_zeros(
        summary, tensor.elements, math.prod(stored_values.shape), stored_values.dtype, is_uncoalesced
    )


def _add_implicit_zeros(
    summary: Facts | str, elements: int, stored_count: int, dtype: str, is_uncoalesced: bool
) -> Stats:
    """Return the statistics of a sparse tensor, including the zeros that are not stored.

    Duplicates in an uncoalesced tensor are not summed.
    """
    implicit = max(elements - stored_count, 0)
    if isinstance(summary, Facts) and implicit:
        zero = 0.0 if dtype not in COMPLEX else None
        moments = Moments(implicit if zero is not None else 0)
        summary = summary.merge(Facts(implicit, zeros=implicit, low=zero, high=zero, moments=moments))
    reason = "uncoalesced: entries with the same index are counted separately" if is_uncoalesced else None
    return _to_stats(summary, dtype, reason)


class StatsTask(TensorTask, frozen=True, gc=False):
    """Compute the statistics of a tensor, and verify the checksum of each storage in `storages`."""

    storages: tuple[ByteRange, ...]

    @property
    def size(self) -> int:
        """Size of the tensor and of the storages with a checksum, in bytes."""
        return self.tensor.nbytes + sum(storage.length for storage in self.storages if storage.crc32 is not None)


@with_denormals
def fill_stats(state: ModelState, progress: pool.Progress | None = None) -> ModelState:
    """Return `state` with `stats` filled in for every tensor. Storages are verified once; tied tensors are read once.

    Raises `MalformedError` for a storage that is truncated or contradicts its checksum, and `UnreadableError` for a
    missing file.
    """
    tasks = _build_tasks(state.tensors)
    keys = [_content_key(tensor) for tensor in state.tensors]

    def report_progress(tensors: Iterable[TensorInfo]) -> None:
        for tensor in tensors:
            if progress:
                progress(tensor.fqn, tensor.nbytes)

    sorted_tasks = sort_by_place(list(tasks.items()), lambda item: item[1].tensor.ranges)
    results = pool.run_tasks(
        stats_batch,
        None,
        [task for _, task in sorted_tasks],
        absent=Stats(),
        on_batch=lambda batch: report_progress(task.tensor for task in batch),
        raise_errors=True,
    )
    stats = dict(zip((key for key, _ in sorted_tasks), results, strict=True))
    report_progress(tensor for tensor, key in zip(state.tensors, keys, strict=True) if tensor is not tasks[key].tensor)
    filled = (
        msgspec.structs.replace(tensor, stats=stats[key]) for tensor, key in zip(state.tensors, keys, strict=True)
    )
    return msgspec.structs.replace(state, tensors=tuple(filled))


def compute_stats(tensors: Sequence[TensorInfo], *, jobs: int = 0) -> list[Stats | StateError]:
    """Return the statistics or the error of each tensor, in order. Checksums are not verified."""
    tasks = [StatsTask(tensor, ()) for tensor in tensors]
    return pool.run_tasks(stats_batch, None, tasks, jobs=jobs, absent=Stats(), derived=True) if tasks else []


def _build_tasks(tensors: Iterable[TensorInfo]) -> dict[object, StatsTask]:
    """Return a task for each tensor that is not tied to an earlier tensor, keyed by the tensor's content."""
    tasks: dict[object, StatsTask] = {}
    assigned_storages: set[ByteRange] = set()
    for tensor in tensors:
        if (key := _content_key(tensor)) not in tasks:
            storages = tuple(dict.fromkeys(storage for storage in tensor.ranges if storage not in assigned_storages))
            assigned_storages.update(storages)
            tasks[key] = StatsTask(tensor, storages)
    return tasks


def _content_key(tensor: TensorInfo) -> object:
    return (tensor.data, tensor.parts) if tensor.data or tensor.parts else tensor.fqn


@with_denormals
def stats_batch(_: None, tasks: Iterable[StatsTask]) -> list[Stats | StateError]:
    """Return the statistics or the error of each task's tensor."""
    decoder = Decoder()
    with prefetch(*(source for task in tasks for source in (task.tensor.data, *task.storages) if source)):
        return [_read_checked_stats(task, decoder) for task in tasks]


def _read_checked_stats(task: StatsTask, decoder: Decoder) -> Stats | StateError:
    result = catch_error(read_stats, task.tensor, decoder)
    try:  # after the statistics: one read of a remote storage gives both
        for storage in task.storages:
            check_crc(storage, task.tensor.fqn)
    except StateError as error:
        return error
    return result


# --- live tensors --------------------------------------------------------------------------------------------------


@with_denormals
def compute_live_stats(tensor: torch.Tensor) -> Stats:
    """Return the statistics of a live torch tensor: on the CPU without a copy, on other devices in pieces."""
    if tensor.device.type == "meta":
        return Stats(reason="a meta tensor has no data")
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested or not (layout in ("strided", "_mkldnn") or layout.startswith("sparse_")):
        return Stats(
            reason=(f"statecli does not compute statistics of a {layout} tensor of type {type(tensor).__name__}")
        )
    summary = _summarize_live(tensor)
    if not layout.startswith("sparse"):
        return _to_stats(summary, dtype)
    stored_count = live_tensor.get_stored_values(tensor).numel()
    is_uncoalesced = layout == "sparse_coo" and not tensor.is_coalesced()
    return _add_implicit_zeros(summary, tensor.numel(), stored_count, dtype, is_uncoalesced)


def _summarize_live(tensor: torch.Tensor) -> Facts | str:
    decoder, total = Decoder(), Facts()
    try:
        stored_values = live_tensor.get_stored_values(tensor)
        if stored_values.device.type == "cpu":
            return summarize_view(live_tensor.build_view(stored_values), decoder)
        stored_values, times = live_tensor.skip_expanded(stored_values)
        for piece in live_tensor.iter_cpu_pieces(stored_values):
            total = total.merge(summarize_view(live_tensor.build_view(piece), decoder))
    except UnreadableError as error:
        return str(error)
    return total.repeat(times)
