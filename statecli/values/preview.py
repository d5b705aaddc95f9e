"""Read some values or bytes of a tensor, and the distribution of its values, for display."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np
from msgspec.structs import replace

from statecli.core.denormals import with_denormals
from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import UnreadableError
from statecli.core.model_state import TensorData
from statecli.values.elements import Decoder
from statecli.values.ggml_blocks import to_readable
from statecli.values.ranges import get_element_width, open_range, prefetch
from statecli.values.read import explain_not_numeric, explain_overlap, open_view, read_values

#: Types of a single value.
Number = int | float | complex


class ValueHistogram(msgspec.Struct, frozen=True, gc=False):
    """Distribution of the finite values of a tensor: `counts[i]` values are in [edges[i], edges[i + 1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@with_denormals
def read_first_values(data: TensorData, name: str, count: int) -> list[Number]:
    """Return the first `count` values in C order. For most tensors only these elements are read.

    Raises `UnreadableError` for elements other than numbers.
    """
    data = _take_start(to_readable(data), count)
    _check_numeric(data)
    with prefetch(data), open_view(data, name) as view:
        for chunk in read_values(view):
            return list(chunk[:count].tolist())
    return []


@with_denormals
def find_first_unusual(data: TensorData, name: str) -> dict[str, tuple[int, ...]]:
    """Return the index of the first NaN and of the first infinity, if present.

    Raises `UnreadableError` for elements other than numbers.
    """
    data = to_readable(data)
    _check_numeric(data)
    first: dict[str, tuple[int, ...]] = {}
    position = 0
    with prefetch(data), open_view(data, name) as view:
        for chunk in read_values(view):
            for word, test in (("nan", np.isnan), ("inf", np.isinf)):
                places = np.flatnonzero(test(chunk))
                if word not in first and places.size:
                    # The index of a scalar is ().
                    index = np.unravel_index(position + int(places[0]), data.shape or (1,))
                    first[word] = tuple(int(number) for number in index[: len(data.shape)])
            position += chunk.size
            if len(first) == 2:
                break
    return first


def _take_start(data: TensorData, count: int) -> TensorData:
    """Return the beginning of a tensor, at least `count` elements; a quantized or small tensor is returned whole."""
    if data.quantizer is not None or 0 in data.shape or prod(data.shape) <= count:
        return data
    shape = list(data.shape)
    for axis in range(len(shape)):
        inner = prod(shape[axis + 1 :])
        shape[axis] = min(shape[axis], max(1, -(-count // inner)))
        if shape[axis] > 1:
            break
    return replace(data, shape=tuple(shape), strides=data.strides or contiguous_strides(data.shape))


def _check_numeric(data: TensorData) -> None:
    reason = explain_not_numeric(data.dtype, data.quantizer is not None)
    if reason:
        raise UnreadableError(reason)


def read_first_bytes(data: TensorData, name: str, count: int) -> bytes:
    """Return up to `count` stored bytes from the first element on. A compressed storage is decompressed."""
    start = data.offset * (get_element_width(data.dtype) or 0)
    if data.inline is not None:
        return data.inline[start : start + count]
    with open_range(data.storage, name) as source:
        buffer = np.empty(max(0, min(count, source.size - start)), np.uint8)
        if buffer.size:
            source.read(start, buffer)
    return buffer.tobytes()


@with_denormals
def compute_value_histogram(
    data: TensorData, name: str, low: float, high: float, *, bins: int = 12
) -> ValueHistogram | None:
    """Count the values in bins of equal width from `low` to `high`, the minimum and maximum from `read_stats`.

    Return None for complex values, or if `low` equals `high`.
    """
    data = to_readable(data)
    _check_numeric(data)
    edges = np.linspace(low / 2, high / 2, bins + 1) * 2  # in halves, because high - low may exceed float64
    if not edges[0] < edges[-1]:
        return None
    counts = np.zeros(bins, np.int64)
    with prefetch(data), open_view(data, name) as view, np.errstate(all="ignore"):
        reason = explain_overlap(view)
        if reason:
            raise UnreadableError(reason)
        for chunk in read_values(view, Decoder()):
            if chunk.dtype.kind == "c":
                return None
            finite = chunk[np.isfinite(chunk)].astype(np.float64)
            counts += np.histogram(np.clip(finite, edges[0], edges[-1]), edges)[0]
    return ValueHistogram(tuple(edges.tolist()), tuple(counts.tolist()))
