"""How the differences of one tensor are spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from statecli.core.errors import StateError
from statecli.core.float_mode import with_denormals
from statecli.core.state import TensorData
from statecli.values.compare import Pair
from statecli.values.compare_task import rechunked
from statecli.values.delta import Delta
from statecli.values.elements import Array, Decoder
from statecli.values.read import opened, values

Spread = tuple[tuple[float, ...], tuple[int, ...]]


@with_denormals
def histograms(pairs: Sequence[Pair], deltas: Sequence[Delta], *, bins: int = 48) -> list[Spread | None]:
    """Edges and counts of after - before between -max |Δ| and max |Δ|, for each pair with its own `Delta`.

    Positions that are not finite on both sides are left out. None where the values are complex, or cannot be read.
    """
    return [_spread(pair, delta, bins) for pair, delta in zip(pairs, deltas, strict=True)]


def _spread(pair: Pair, delta: Delta, bins: int) -> Spread | None:
    if not delta.max_abs or pair.before.data is None or pair.after.data is None:
        return None
    edges = np.linspace(-1.0, 1.0, bins + 1) * delta.max_abs  # from -max to max is more than float64 may hold
    counts = np.zeros(bins, np.int64)
    try:
        for gap in _gaps(pair.before.data, pair.after.data):
            if gap.dtype.kind == "c":
                return None
            # The largest was found in float32 perhaps, and may be a last digit smaller than it is.
            within = np.clip(gap[np.isfinite(gap)], edges[0], edges[-1])
            counts += np.histogram(within, edges)[0]
    except StateError:
        return None  # comparing them has said what is wrong
    return tuple(edges.tolist()), tuple(counts.tolist())


def _gaps(before: TensorData, after: TensorData) -> Iterator[Array]:
    with opened(before) as one, opened(after) as two, np.errstate(all="ignore"):
        blocks = rechunked(values(one, Decoder())), rechunked(values(two, Decoder()))
        for a, b in zip(*blocks, strict=True):
            wide = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
            yield b.astype(wide) - a.astype(wide)
        del one, two
