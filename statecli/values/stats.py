"""Statistics of tensors: of a checkpoint's entries without torch, and of live ones.

Values are taken chunk by chunk; each chunk gives a `Partial`, and partials merge. Of big tensors of some
one-byte types only the occurrences of each code are counted: all the rest follows from those, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from statecli.core.errors import StateError, UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.state import ByteRange, ModelState, Stats, TensorData, TensorInfo
from statecli.values import live_tensor, pool
from statecli.values.elements import COMPLEX, SMALL_FLOATS, Array, Decoder, worth_of_codes
from statecli.values.ggml_blocks import readable
from statecli.values.partial import Partial, joined_reasons, partial_of, partial_of_codes
from statecli.values.ranges import check_crc, in_file_order, reading
from statecli.values.read import (
    Strided,
    code_counts,
    dequantized,
    distinct,
    in_memory_order,
    no_numbers,
    opened,
    overlap,
    values,
)

#: Called after each tensor with its name and the bytes of it that were read.
Progress = Callable[[str, int], None]

#: One-byte types of which it is faster to count how often each code occurs than to decode them. Not bool and the
#: plain integers: they are decoded as fast, and where all values are equal counting stalls on its one counter.
COUNTED = frozenset(
    ["qint8", "quint8", "float4_e2m1fn_x2", "float8_e8m0fnu"] + [name for name in SMALL_FLOATS if "8" in name]
)
#: Elements from which on that pays.
WORTH_COUNTING = 1 << 12


def _gather(chunks: Iterable[Array], decoder: Decoder) -> Partial:
    total = Partial()
    with np.errstate(all="ignore"):
        for chunk in chunks:
            total = total.merge(partial_of(chunk, decoder))
    return total


def partial_of_view(view: Strided, decoder: Decoder) -> Partial:
    """The statistics of one strided view, each stored element read once.

    Raises `UnreadableError` where its elements are no numbers or overlap without end.
    """
    reason = no_numbers(view.dtype, view.affine is not None)
    if reason:
        raise UnreadableError(reason)
    if 0 in view.shape:
        return Partial()
    times = 1
    if view.affine is None or view.affine.axis is None:
        view, times = distinct(view)
        view = in_memory_order(view)
    reason = overlap(view)
    if reason:
        raise UnreadableError(reason)
    if view.dtype in COUNTED and view.elements >= WORTH_COUNTING and not (view.affine and view.affine.axis is not None):
        return partial_of_codes(code_counts(view, decoder), _worth(view, decoder)).times(times)
    return _gather(values(view, decoder), decoder).times(times)


def _worth(view: Strided, decoder: Decoder) -> Array:
    """What each code of the view's type is worth, scaled if it is quantized."""
    worth = worth_of_codes(view.dtype)
    if view.affine is None:
        return worth
    return dequantized(worth, view.affine.zero_points, view.affine.scales, decoder).astype(np.float64)


# --- a checkpoint's tensors ----------------------------------------------------------------------------------------


@with_denormals
def stats(tensor: TensorInfo, decoder: Decoder | None = None) -> Stats:
    """The statistics of one tensor of a checkpoint, read from its file.

    What cannot be read as numbers gives `reason`. A file that is gone, or shorter than it was, raises
    `UnreadableError` or `MalformedError`: numbers from it would mean nothing. Checksums: see `stats_all`.
    """
    decoder = decoder or Decoder()
    if tensor.layout.startswith("sparse"):
        return _sparse(tensor, decoder)
    if tensor.data is None:
        return Stats(reason=why_no_data(tensor))
    return _finish(_read(tensor.data, tensor.fqn, decoder), tensor.data.dtype)


def why_no_data(tensor: TensorInfo) -> str:
    """Why a tensor without `data` has no values to read, in a few words."""
    if tensor.parts:
        return f"made of {', '.join(name for name, _ in tensor.parts)}: has no single values"
    if tensor.device == "meta":
        return "meta holds no data"
    return "uninitialized" if tensor.shape is None else "its values are not in the file"


def _read(data: TensorData, what: str, decoder: Decoder) -> Partial | str:
    """A partial, or the reason why there is none."""
    data = readable(data)
    reason = no_numbers(data.dtype, data.quantizer is not None)
    if reason:
        return reason
    with opened(data, what) as view:
        return _partial_or_reason(view, decoder)


def _partial_or_reason(view: Strided, decoder: Decoder) -> Partial | str:
    try:
        return partial_of_view(view, decoder)
    except UnreadableError as why:
        # Malformed is a kind of unreadable, and means that the file changed under us.
        if type(why) is not UnreadableError:
            raise
        return str(why)


def _finish(found: Partial | str, dtype: str, reason: str | None = None) -> Stats:
    if isinstance(found, str):
        return Stats(reason=found)
    if dtype in COMPLEX:
        return found.stats(joined_reasons(reason, "complex values have no order"))
    return found.stats(reason)


def _sparse(tensor: TensorInfo, decoder: Decoder) -> Stats:
    stored = dict(tensor.parts).get("values")
    if stored is None:
        return Stats(reason=f"{tensor.layout}: its stored values are not in the file")
    found = _read(stored, tensor.fqn, decoder)
    uncoalesced = "uncoalesced" in (tensor.note or "")
    return _with_implicit_zeros(found, tensor.elements, math.prod(stored.shape), stored.dtype, uncoalesced)


def _with_implicit_zeros(found: Partial | str, elements: int, stored: int, dtype: str, uncoalesced: bool) -> Stats:
    """A sparse tensor's statistics: what it does not store is zero. Duplicates in an uncoalesced one are not summed."""
    implicit = max(elements - stored, 0)
    if isinstance(found, Partial) and implicit:
        real = dtype not in COMPLEX
        found = found.merge(Partial(implicit, 0.0, 0.0, 0.0, 0.0, implicit) if real else Partial(zeros=implicit))
    said = "uncoalesced: entries with the same index are counted one by one" if uncoalesced else None
    return _finish(found, dtype, said)


class Task(msgspec.Struct, frozen=True, gc=False):
    """A tensor, and those of its storages whose checksums are verified first."""

    tensor: TensorInfo
    storages: tuple[ByteRange, ...]


@with_denormals
def stats_all(state: ModelState, progress: Progress | None = None) -> ModelState:
    """`state` with every tensor's `stats` filled; each storage's checksum is verified once, tied tensors read once.

    Raises `MalformedError` for a storage whose bytes do not match its checksum or that is cut short, and
    `UnreadableError` for a file that is gone.
    """
    tasks = _tasks(state.tensors)
    keys = [_content(tensor) for tensor in state.tensors]

    def done(batch: Iterable[Task | TensorInfo]) -> None:
        for one in batch:
            tensor = one.tensor if isinstance(one, Task) else one
            if progress:
                progress(tensor.fqn, tensor.nbytes)

    ordered = in_file_order(list(tasks.items()), lambda one: one[1].tensor.ranges)
    found = pool.run(
        stats_batch, None, [task for _, task in ordered], size_of=_bytes, absent=Stats(), done=done, whole=True
    )
    known = dict(zip((key for key, _ in ordered), found, strict=True))
    done(tensor for tensor, key in zip(state.tensors, keys, strict=True) if tensor is not tasks[key].tensor)
    filled = (
        msgspec.structs.replace(tensor, stats=known[key]) for tensor, key in zip(state.tensors, keys, strict=True)
    )
    return msgspec.structs.replace(state, tensors=tuple(filled))


def _tasks(tensors: Iterable[TensorInfo]) -> dict[Any, Task]:
    """A task for each tensor that is not tied to one before it, by its content."""
    found: dict[Any, Task] = {}
    checked: set[ByteRange] = set()
    for tensor in tensors:
        if (key := _content(tensor)) not in found:
            storages = tuple(dict.fromkeys(one for one in tensor.ranges if one not in checked))
            checked.update(storages)
            found[key] = Task(tensor, storages)
    return found


def _content(tensor: TensorInfo) -> Any:
    return (tensor.data, tensor.parts) if tensor.data or tensor.parts else tensor.fqn


def _bytes(task: Task) -> int:
    return task.tensor.nbytes + sum(storage.length for storage in task.storages if storage.crc32 is not None)


@with_denormals
def stats_batch(_: None, tasks: Iterable[Task]) -> list[Stats | StateError]:
    """The statistics of each task's tensor, or what is wrong with it."""
    decoder = Decoder()
    with reading(*(one for task in tasks for one in (task.tensor.data, *task.storages) if one)):
        return [_checked_stats(task, decoder) for task in tasks]


def _checked_stats(task: Task, decoder: Decoder) -> Stats | StateError:
    found: Stats | StateError
    try:
        found = stats(task.tensor, decoder)
    except StateError as error:
        found = error
    try:  # behind it: of what is remote, reading it once gives both
        for storage in task.storages:
            check_crc(storage, task.tensor.fqn)
    except StateError as error:
        return error
    return found


# --- live tensors --------------------------------------------------------------------------------------------------


@with_denormals
def stats_of_tensor(tensor: Any) -> Stats:
    """The same for a live torch tensor on any device; nothing is copied on the CPU, bounded pieces elsewhere."""
    if tensor.device.type == "meta":
        return Stats(reason="meta holds no data")
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested or not (layout in ("strided", "_mkldnn") or layout.startswith("sparse_")):
        return Stats(reason=f"a {layout} tensor of {type(tensor).__name__} has no single values")
    found = _live_partial(tensor)
    if not layout.startswith("sparse"):
        return _finish(found, dtype)
    stored = live_tensor.stored_values(tensor).numel()
    uncoalesced = layout == "sparse_coo" and not tensor.is_coalesced()
    return _with_implicit_zeros(found, tensor.numel(), stored, dtype, uncoalesced)


def _live_partial(tensor: Any) -> Partial | str:
    decoder, total = Decoder(), Partial()
    try:
        stored = live_tensor.stored_values(tensor)
        if stored.device.type == "cpu":
            return partial_of_view(live_tensor.strided_of(stored), decoder)
        stored, times = live_tensor.distinct_of(stored)
        for piece in live_tensor.pieces(stored):
            total = total.merge(partial_of_view(live_tensor.strided_of(piece), decoder))
    except UnreadableError as why:
        return str(why)
    return total.times(times)
