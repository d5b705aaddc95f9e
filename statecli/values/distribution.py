"""Compute how the values of a checkpoint's tensors are spread.

Quantiles come from the numbers of values with the same sign, exponent and first 7 bits of the fraction (those of
bfloat16): the numbers merge over any order of blocks, and a quantile is known within 0.4 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from statecli.core.errors import UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.model_state import TensorData, TensorInfo
from statecli.core.value_distribution import QUANTILE_LEVELS, Distribution
from statecli.values.elements import COMPLEX, Array, Decoder
from statecli.values.ggml_blocks import to_readable
from statecli.values.read import explain_not_numeric, explain_overlap, open_view, read_values, to_memory_order
from statecli.values.stats import explain_no_data

BINS = 40
FIRST_VALUES = 16


@with_denormals
def compute_distributions(
    tensors: Iterable[TensorInfo], progress: Callable[[str, int], None] | None = None
) -> dict[tuple[str, str], Distribution]:
    """Return the distribution of each tensor with `stats`, by section and name. Tied tensors are read once."""
    distributions: dict[tuple[str, str], Distribution] = {}
    computed: dict[TensorData, Distribution] = {}
    for tensor in tensors:
        if tensor.data is None:
            distribution = Distribution(reason=explain_no_data(tensor))
        elif tensor.data in computed:
            distribution = computed[tensor.data]
        else:
            distribution = computed[tensor.data] = _compute(tensor, tensor.data)
        distributions[tensor.section, tensor.fqn] = distribution
        if progress:
            progress(tensor.fqn, tensor.nbytes)
    return distributions


def _compute(tensor: TensorInfo, data: TensorData) -> Distribution:
    stats = tensor.stats
    if data.dtype in COMPLEX:
        return Distribution(reason="complex values have no order")
    if stats is None or stats.reason:
        return Distribution(reason=stats.reason if stats else "its values were not read")
    data = to_readable(data)
    if reason := explain_not_numeric(data.dtype, data.quantizer is not None):
        return Distribution(reason=reason)
    try:
        first = _read_first(data, tensor.fqn)
        if stats.min is None or stats.max is None:
            return Distribution(first)
        codes, counts = _count(data, tensor.fqn, stats.min, stats.max)
    except UnreadableError as error:
        if type(error) is not UnreadableError:  # MalformedError: the file changed while it was read
            raise
        return Distribution(reason=str(error))
    return Distribution(first, stats.min, stats.max, counts, _find_quantiles(codes, stats.min, stats.max))


def _read_first(data: TensorData, name: str) -> tuple[float | None, ...]:
    with open_view(data, name) as view:
        first = np.zeros(0)
        for block in read_values(view, Decoder()):
            first = np.append(first, block.reshape(-1)[: FIRST_VALUES - first.size].astype(np.float64))
            if first.size == FIRST_VALUES:
                break
        values = tuple(value if np.isfinite(value) else None for value in first.tolist())
        del view
    return values


def _count(data: TensorData, name: str, low: float, high: float) -> tuple[Array, tuple[int, ...]]:
    """Return the number of values of each bfloat16 code, in the order of the values, and of each bin."""
    codes = np.zeros(1 << 16, np.int64)
    bins = np.zeros(BINS, np.int64)
    with np.errstate(all="ignore"):
        for values in _read_finite(data, name):
            codes += np.bincount(_to_ordered_codes(values), minlength=1 << 16)
            if low < high:
                wide = values.astype(np.float64)
                places = (wide / 2 - low / 2) / (high / 2 - low / 2) * BINS  # halves: the range of float64 is exceeded
                bins += np.bincount(np.clip(places.astype(np.int64), 0, BINS - 1), minlength=BINS)
    return codes, tuple(bins.tolist()) if low < high else ()


def _read_finite(data: TensorData, name: str) -> Iterator[Array]:
    with open_view(data, name) as view:
        if reason := explain_overlap(view):
            raise UnreadableError(reason)
        affine = view.affine
        ordered = view if affine is not None and affine.axis is not None else to_memory_order(view)
        for block in read_values(ordered, Decoder()):
            flat = block.reshape(-1)
            finite = np.isfinite(flat) if flat.dtype.kind == "f" else None
            yield flat if finite is None or finite.all() else flat[finite]
        del view, ordered


def _to_ordered_codes(values: Array) -> Array:
    """Return the upper 16 bits of each value as float32, as integers in the order of the values."""
    bits = values.astype(np.float32).view(np.uint32) >> 16
    return np.where(bits & 0x8000, 0xFFFF - bits, bits + 0x8000).astype(np.int64)


def _find_quantiles(codes: Array, low: float, high: float) -> tuple[float, ...]:
    sums = np.cumsum(codes)
    ranks = np.asarray(QUANTILE_LEVELS) * (int(sums[-1]) - 1)
    found = np.searchsorted(sums, np.floor(ranks), side="right").astype(np.uint32)
    bits = np.where(found >= 0x8000, found - 0x8000, 0xFFFF - found).astype(np.uint32) << 16
    middles = (bits | 0x8000).view(np.float32).astype(np.float64)  # the middle of the values with this code
    zeros = bits & 0x7FFF0000 == 0
    return tuple(np.clip(np.where(zeros, 0.0, middles), low, high).tolist())
