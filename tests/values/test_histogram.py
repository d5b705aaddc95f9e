"""Histograms of differences, also at the ends of float64."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from statecli.values.compare import compare_pairs  # noqa: E402
from statecli.values.delta import CompareOptions  # noqa: E402
from statecli.values.histogram import compute_histograms  # noqa: E402
from statecli.values.pair_plan import Pair  # noqa: E402


@pytest.mark.parametrize("largest", [1.5e308, 1.0, 5e-324])
def test_histogram_counts_differences_of_any_size(store, largest):
    """Bins cover -max |Δ| to max |Δ|, a range that float64 may not represent; numpy does not warn."""
    before = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    after = torch.tensor([largest, -largest, 1.0], dtype=torch.float64)
    pairs = [Pair(store(before), store(after))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deltas = compare_pairs(pairs, CompareOptions(), jobs=1)
        ((edges, counts),) = compute_histograms(pairs, deltas)
    assert (edges[0], edges[-1], sum(counts)) == (-largest, largest, 3)
    assert list(edges) == sorted(edges)
