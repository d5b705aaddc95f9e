"""Statistics of tensors: of a checkpoint's entries without torch, and of live ones.

Values are taken chunk by chunk; each chunk gives a `Partial`, and partials merge (Chan, Golub and LeVeque 1979).
Mean and standard deviation are carried, not sums and squares: neither overflows where the values themselves do
not, and data far from zero loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from statecli.errors import UnreadableError
from statecli.state import ByteRange, ModelState, Stats, TensorData, TensorInfo
from statecli.values import live
from statecli.values.elements import COMPLEX, Array, Decoder
from statecli.values.read import Strided, check_crc, distinct, in_memory_order, no_numbers, opened, overlap, values

#: Called after each tensor with its name and the bytes of it that were read.
Progress = Callable[[str, int], None]

#: Integers beyond this are not all floats.
EXACT = 1 << 53
#: Squares of magnitudes outside 1/SAFE ... SAFE could leave the range of float64.
SAFE = 1e120


@dataclass(frozen=True)
class Partial:
    """What is known of some of a tensor's elements. `mean` and `deviation` (population) are of the `finite` ones."""

    finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    low: float | int | None = None
    high: float | int | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    def merge(self, other: Partial) -> Partial:
        """Both together. Order does not matter but for the last bits."""
        count = self.finite + other.finite
        mean, deviation = _joined(self, other, count) if self.finite and other.finite else _only(self, other)
        return Partial(
            count,
            mean,
            deviation,
            min((p.low for p in (self, other) if p.low is not None), default=None),
            max((p.high for p in (self, other) if p.high is not None), default=None),
            self.zeros + other.zeros,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def times(self, count: int) -> Partial:
        """The same elements `count` times over."""
        return Partial(
            self.finite * count,
            self.mean,
            self.deviation,
            self.low if count else None,
            self.high if count else None,
            self.zeros * count,
            self.nan * count,
            self.inf * count,
        )

    def stats(self, reason: str | None = None) -> Stats:
        """As the contract has it: nulls where no value is finite, std over n - 1."""
        if self.low is None or self.high is None:
            return Stats(zeros=self.zeros, nan=self.nan, inf=self.inf, reason=reason)
        std = self.deviation * math.sqrt(self.finite / (self.finite - 1)) if self.finite > 1 else None
        if any(float(value) != value for value in (self.low, self.high)):
            reason = _and(reason, f"min and max are rounded: {self.low} and {self.high} exactly")
        if std is not None and not math.isfinite(std):
            std, reason = None, _and(reason, "std is beyond float64")
        return Stats(
            min=float(self.low),
            max=float(self.high),
            mean=self.mean,
            std=std,
            zeros=self.zeros,
            nan=self.nan,
            inf=self.inf,
            reason=reason,
        )


def _and(reason: str | None, more: str) -> str:
    return f"{reason}; {more}" if reason else more


def _only(a: Partial, b: Partial) -> tuple[float, float]:
    return (a.mean, a.deviation) if a.finite else (b.mean, b.deviation)


def _joined(a: Partial, b: Partial, count: int) -> tuple[float, float]:
    """Mean and deviation of two sets together, halved on the way: a difference of two floats can overflow."""
    share_a, share_b = a.finite / count, b.finite / count
    half = b.mean / 2 - a.mean / 2
    mean = 2 * (a.mean / 2 + half * share_b)
    between = half * (2 * math.sqrt(share_a * share_b))
    return mean, math.hypot(a.deviation * math.sqrt(share_a), b.deviation * math.sqrt(share_b), between)


# --- one chunk -----------------------------------------------------------------------------------------------------


def partial_of(chunk: Array, decoder: Decoder) -> Partial:
    """The statistics of one flat chunk of real or complex values."""
    if chunk.dtype.kind == "c":
        return _complex_counts(chunk)
    is_zero = np.equal(chunk, 0, out=decoder.buffer("mask", "?", chunk.size))
    zeros = int(np.count_nonzero(is_zero))
    low, high = chunk.min(), chunk.max()
    if chunk.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
        return _partly_finite(chunk, zeros, decoder)
    return _all_finite(chunk, low.item(), high.item(), zeros, decoder)


def _complex_counts(chunk: Array) -> Partial:
    return Partial(
        zeros=int(chunk.size - np.count_nonzero(chunk)),
        nan=int(np.count_nonzero(np.isnan(chunk))),
        inf=int(np.count_nonzero(np.isinf(chunk))),
    )


def _partly_finite(chunk: Array, zeros: int, decoder: Decoder) -> Partial:
    mask = np.isfinite(chunk, out=decoder.buffer("mask", "?", chunk.size))
    count = int(np.count_nonzero(mask))
    finite = np.compress(mask, chunk, out=decoder.buffer("finite", chunk.dtype.str, count))
    nan = int(np.count_nonzero(np.isnan(chunk, out=mask)))
    odd = Partial(nan=nan, inf=chunk.size - count - nan)
    if not count:
        return odd
    return odd.merge(_all_finite(finite, finite.min().item(), finite.max().item(), zeros, decoder))


def _all_finite(chunk: Array, low: float | int, high: float | int, zeros: int, decoder: Decoder) -> Partial:
    if low == high:
        return Partial(chunk.size, float(low), 0.0, low, high, zeros)
    work = decoder.buffer("work", "f8", chunk.size)
    np.copyto(work, chunk)
    size = float(max(abs(low), abs(high)))
    # A power of two changes no digit.
    exponent = 0 if 1 / SAFE < size < SAFE else math.frexp(size)[1]
    if exponent:
        np.ldexp(work, -exponent, out=work)
    mean = float(np.add.reduce(work)) / chunk.size
    np.subtract(work, mean, out=work)
    deviation = math.sqrt(float(np.einsum("i,i->", work, work)) / chunk.size)
    scaled = min(max(mean, math.ldexp(low, -exponent)), math.ldexp(high, -exponent)) if exponent else mean
    return Partial(chunk.size, math.ldexp(scaled, exponent), math.ldexp(deviation, exponent), low, high, zeros)


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
    return _gather(values(view, decoder), decoder).times(times)


# --- a checkpoint's tensors ----------------------------------------------------------------------------------------


def stats(tensor: TensorInfo, decoder: Decoder | None = None) -> Stats:
    """The statistics of one tensor of a checkpoint, read from its file.

    What cannot be read as numbers gives `reason`. A file that is gone, or shorter than it was, raises
    `UnreadableError` or `MalformedError`: numbers from it would mean nothing. Checksums: see `stats_all`.
    """
    decoder = decoder or Decoder()
    if tensor.layout.startswith("sparse"):
        return _sparse(tensor, decoder)
    if tensor.data is None:
        return Stats(reason=_why_no_data(tensor))
    return _finish(_read(tensor.data, tensor.fqn, decoder), tensor.data.dtype)


def _why_no_data(tensor: TensorInfo) -> str:
    if tensor.parts:
        return f"made of {', '.join(name for name, _ in tensor.parts)}: has no single values"
    if tensor.device == "meta":
        return "meta holds no data"
    return "uninitialized" if tensor.shape is None else "its values are not in the file"


def _read(data: TensorData, what: str, decoder: Decoder) -> Partial | str:
    """A partial, or the reason why there is none."""
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
        return found.stats(_and(reason, "complex values have no order"))
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


def stats_all(state: ModelState, progress: Progress | None = None) -> ModelState:
    """`state` with every tensor's `stats` filled; each storage's checksum is verified once, tied tensors read once.

    Raises `MalformedError` for a storage whose bytes do not match its checksum or that is cut short, and
    `UnreadableError` for a file that is gone.
    """
    decoder, checked, known = Decoder(), set[ByteRange](), dict[Any, Stats]()
    filled = []
    for tensor in state.tensors:
        for storage in storages(tensor):
            if storage not in checked:
                check_crc(storage, tensor.fqn)
                checked.add(storage)
        key = (tensor.data, tensor.parts) if tensor.data or tensor.parts else tensor.fqn
        if key not in known:
            known[key] = stats(tensor, decoder)
        filled.append(msgspec.structs.replace(tensor, stats=known[key]))
        if progress:
            progress(tensor.fqn, tensor.nbytes)
    return msgspec.structs.replace(state, tensors=tuple(filled))


def storages(tensor: TensorInfo) -> list[ByteRange]:
    """Every byte range that holds something of a tensor, its scales and inner tensors included."""
    found = []
    for data in ([tensor.data] if tensor.data else []) + [data for _, data in tensor.parts]:
        found.append(data.storage)
        if data.quantizer:
            more = (data.quantizer.scales, data.quantizer.zero_points)
            found += [data.storage for data in more if data is not None]
    return found


# --- live tensors --------------------------------------------------------------------------------------------------


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
    stored = live.stored_values(tensor).numel()
    uncoalesced = layout == "sparse_coo" and not tensor.is_coalesced()
    return _with_implicit_zeros(found, tensor.numel(), stored, dtype, uncoalesced)


def _live_partial(tensor: Any) -> Partial | str:
    decoder, total = Decoder(), Partial()
    try:
        stored = live.stored_values(tensor)
        if stored.device.type == "cpu":
            return partial_of_view(live.strided_of(stored), decoder)
        stored, times = live.distinct_of(stored)
        for piece in live.pieces(stored):
            total = total.merge(partial_of_view(live.strided_of(piece), decoder))
    except UnreadableError as why:
        return str(why)
    return total.times(times)
