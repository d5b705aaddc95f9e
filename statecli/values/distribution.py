"""Compute the distribution of the values of a checkpoint's tensors.

Quantiles come from counts of values with equal sign, exponent and first 7 bits of the fraction (as in bfloat16). Counts
of blocks merge in any order, and a quantile has an error of at most 0.4 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import UnreadableError
from statecli.core.model_state import TensorData, TensorInfo, TensorKey
from statecli.core.value_distribution import QUANTILE_LEVELS, Distribution
from statecli.values.elements import COMPLEX, Array, Decoder
from statecli.values.ggml_blocks import to_readable
from statecli.values.preview import find_first_unusual, read_first_values
from statecli.values.read import explain_not_numeric, explain_overlap, open_view, read_values, to_memory_order
from statecli.values.stats import explain_no_data

BINS = 40
FIRST_VALUES = 16


class _Coding(msgspec.Struct, frozen=True):
    """Coding of floats. A code is the first `bits` bits of a float as an integer, ordered like the float values."""

    float_type: type[np.floating[Any]]
    uint_type: type[np.unsignedinteger[Any]]
    bits: int

    @property
    def dropped_bits(self) -> int:
        return np.dtype(self.uint_type).itemsize * 8 - self.bits

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    def encode(self, values: Array) -> Array:
        bits = (values.astype(self.float_type).view(self.uint_type) >> self.dropped_bits).astype(np.int64)
        return np.where(bits & self.sign, 2 * self.sign - 1 - bits, bits + self.sign)

    def decode(self, codes: Array) -> Array:
        """Decode each code to the middle of the float values that it stands for. The code of 0 becomes 0."""
        bits = np.where(codes >= self.sign, codes - self.sign, 2 * self.sign - 1 - codes)
        middle = (bits << self.dropped_bits | 1 << (self.dropped_bits - 1)).astype(self.uint_type)
        return np.where(bits % self.sign == 0, 0.0, middle.view(self.float_type).astype(np.float64))


#: Sign, exponent and 7 bits of the fraction.
_SINGLE, _DOUBLE = _Coding(np.float32, np.uint32, 16), _Coding(np.float64, np.uint64, 19)


@with_denormals
def compute_distributions(
    tensors: Iterable[TensorInfo], progress: Callable[[str, int], None] | None = None
) -> dict[TensorKey, Distribution]:
    """Return the distribution of each tensor, by (section, name), from its values and `stats`."""
    distributions: dict[TensorKey, Distribution] = {}
    computed: dict[TensorData, Distribution] = {}
    for tensor in tensors:
        if tensor.data is None:
            distribution = Distribution(reason=explain_no_data(tensor))
        elif tensor.data in computed:
            distribution = computed[tensor.data]
        else:
            distribution = computed[tensor.data] = _compute(tensor, tensor.data)
        distributions[tensor.key] = distribution
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
        values = np.array(read_first_values(data, tensor.fqn, FIRST_VALUES), np.float64)
        first = tuple(value if np.isfinite(value) else None for value in values.tolist())
        unusual = find_first_unusual(data, tensor.fqn) if stats.nan or stats.inf else {}
        first_nan, first_inf = unusual.get("nan"), unusual.get("inf")
        if stats.min is None or stats.max is None:
            return Distribution(first, first_nan=first_nan, first_inf=first_inf)
        quantiles, counts = _count(data, tensor, stats.min, stats.max)
    except UnreadableError as error:
        if type(error) is not UnreadableError:  # MalformedError: the file changed while it was read
            raise
        return Distribution(reason=str(error))
    return Distribution(first, stats.min, stats.max, counts, quantiles, None, first_nan, first_inf)


def _count(data: TensorData, tensor: TensorInfo, low: float, high: float) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the quantiles of the values, and the number of values in each bin."""
    coding = _DOUBLE if data.dtype == "float64" or data.quantizer is not None else _SINGLE
    code_count = 1 << coding.bits
    is_small = tensor.elements < code_count  # for few values, sorting is faster than counting
    blocks: list[Array] = []
    totals = np.zeros(0 if is_small else code_count, np.int64)
    bins = np.zeros(BINS, np.int64)
    with np.errstate(all="ignore"):
        for values in _read_finite(data, tensor.fqn):
            codes = coding.encode(values)
            if is_small:
                blocks.append(codes)
            else:
                totals += np.bincount(codes, minlength=code_count)
            if low < high:
                wide = values.astype(np.float64)
                places = (wide / 2 - low / 2) / (high / 2 - low / 2) * BINS  # in halves, as a range may exceed float64
                bins += np.bincount(np.clip(places.astype(np.int64), 0, BINS - 1), minlength=BINS)
    if is_small:
        sorted_codes = np.sort(np.concatenate(blocks))
        quantiles = sorted_codes[_compute_ranks(sorted_codes.size)]
    else:
        sums = np.cumsum(totals)
        quantiles = np.searchsorted(sums, _compute_ranks(int(sums[-1])), side="right")
    middles = np.clip(coding.decode(quantiles), low, high)
    return tuple(middles.tolist()), tuple(bins.tolist()) if low < high else ()


def _compute_ranks(count: int) -> Array:
    ranks: Array = np.floor(np.asarray(QUANTILE_LEVELS) * (count - 1)).astype(np.int64)
    return ranks


def _read_finite(data: TensorData, name: str) -> Iterator[Array]:
    with open_view(data, name) as view:
        if reason := explain_overlap(view):
            raise UnreadableError(reason)
        affine = view.affine
        ordered_view = view if affine is not None and affine.axis is not None else to_memory_order(view)
        for block in read_values(ordered_view, Decoder()):
            flat = block.reshape(-1)
            finite = np.isfinite(flat) if flat.dtype.kind == "f" else None
            yield flat if finite is None or finite.all() else flat[finite]
        del view, ordered_view
