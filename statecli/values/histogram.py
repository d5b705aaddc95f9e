"""Compute histograms of the differences between two tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData
from statecli.values.compare_task import rechunk
from statecli.values.delta import Delta
from statecli.values.elements import Array, Decoder
from statecli.values.pair_plan import Pair
from statecli.values.read import open_view, read_values

Bins = tuple[tuple[float, ...], tuple[int, ...]]


@with_denormals
def compute_histograms(pairs: Sequence[Pair], deltas: Sequence[Delta], *, bins: int = 48) -> list[Bins | None]:
    """Return, for each pair, the bin edges (from -max |Δ| to max |Δ|) and the counts of Δ = after - before.

    Only finite differences are counted. A pair has None if all differences are zero, or if the values are complex or
    unreadable.
    """
    return [_compute_histogram(pair, delta, bins) for pair, delta in zip(pairs, deltas, strict=True)]


def _compute_histogram(pair: Pair, delta: Delta, bins: int) -> Bins | None:
    if not delta.max_abs or pair.before.data is None or pair.after.data is None:
        return None
    edges = np.linspace(-1.0, 1.0, bins + 1) * delta.max_abs  # because 2 * max may exceed float64
    counts = np.zeros(bins, np.int64)
    try:
        for gap in _iter_differences(pair.before.data, pair.after.data):
            if gap.dtype.kind == "c":
                return None
            # Clipped, because the maximum may come from float32 and be too small by one digit.
            clipped_gap = np.clip(gap[np.isfinite(gap)], edges[0], edges[-1])
            counts += np.histogram(clipped_gap, edges)[0]
    except StateError:
        return None  # the comparison already reported the error
    return tuple(edges.tolist()), tuple(counts.tolist())


def _iter_differences(before: TensorData, after: TensorData) -> Iterator[Array]:
    with open_view(before) as old, open_view(after) as new, np.errstate(all="ignore"):
        blocks = rechunk(read_values(old, Decoder())), rechunk(read_values(new, Decoder()))
        for a, b in zip(*blocks, strict=True):
            wide = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
            yield b.astype(wide) - a.astype(wide)
        del old, new
