"""Compare small tensors whose elements are stored unchanged in local files, without numpy (a slow import)."""

from __future__ import annotations

from collections.abc import Sequence

from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.model_state import TensorInfo
from statecli.values.compiled_kernel import tally_stored
from statecli.values.delta import CompareOptions, Delta
from statecli.values.plain_bytes import read_plain_bytes
from statecli.values.tally import BLOCK_ELEMENTS, EQUAL_TALLY, Tally


def compare_plain_pairs(
    before: Sequence[TensorInfo], after: Sequence[TensorInfo], options: CompareOptions
) -> list[Delta] | None:
    """Return the differences of the values of each pair, as `compare.compare_pairs` does.

    Returns None if only `compare_pairs` can compare them: a pair needs a conversion, has two dtypes, or has sums beyond
    the compiled kernel (NaN, infinities).
    """
    if options.device != "cpu" or not all(map(_is_alike, before, after)):
        return None
    old = read_plain_bytes(before)
    new = read_plain_bytes(after) if old is not None else None
    if old is None or new is None:
        return None
    deltas = []
    for tensor, old_bytes, new_bytes in zip(after, old, new, strict=True):
        tally = _tally(old_bytes, new_bytes, tensor.dtype, options)
        if tally is None:
            return None
        shape = tensor.shape or ()
        deltas.append(tally.to_delta(shape) if tally.changed else Delta(elements=tensor.elements))
    return deltas


def _is_alike(before: TensorInfo, after: TensorInfo) -> bool:
    old, new = before.data, after.data
    return (
        old is not None
        and new is not None
        and before.dtype == after.dtype == old.dtype == new.dtype
        and after.shape == old.shape == new.shape
    )


def _tally(before: bytes, after: bytes, dtype: str, options: CompareOptions) -> Tally | None:
    """Return the tally of two tensors, or None if only some blocks are equal: a task must add the norm of these."""
    if before == after:
        return EQUAL_TALLY
    size = BLOCK_ELEMENTS * ELEMENT_BITS[dtype] // 8
    total = EQUAL_TALLY
    for start in range(0, len(before), size):
        before_block, after_block = before[start : start + size], after[start : start + size]
        tally = (
            None if before_block == after_block else tally_stored(before_block, after_block, (dtype, dtype), options)
        )
        if tally is None:
            return None
        total = total.merge(tally.shift(start // size * BLOCK_ELEMENTS))
    return total
