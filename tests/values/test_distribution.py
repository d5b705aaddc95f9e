"""Histogram, quantiles and first values of a checkpoint's tensors, compared with torch and numpy."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from statecli.core.value_distribution import QUANTILE_LEVELS
from statecli.targets.load import read_checkpoint
from statecli.values.distribution import BINS, compute_distributions
from statecli.values.stats import fill_stats


@pytest.fixture(scope="module")
def compute(tmp_path_factory):
    path = tmp_path_factory.mktemp("values") / "a.pt"

    def compute_distribution(tensor):
        torch.save({"w": tensor}, path)
        (distribution,) = compute_distributions(fill_stats(read_checkpoint(str(path))).tensors).values()
        return distribution

    return compute_distribution


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bins_equal_numpy(compute, dtype):
    """Bins of equal width from the smallest to the largest value."""
    tensor = (torch.randn(300, 50, generator=torch.Generator().manual_seed(1)) * 20).to(dtype)
    values = tensor.double().numpy()
    actual = compute(tensor)
    assert (actual.low, actual.high) == (values.min(), values.max())
    expected = np.histogram(values, BINS)[0]
    assert sum(actual.counts) == values.size
    # A value on the edge of two bins may be in either: numpy computes the edges with another rounding.
    assert np.abs(np.cumsum(actual.counts) - np.cumsum(expected)).max() <= (
        3 if dtype in (torch.float64, torch.float32) else values.size // 20
    )


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_quantiles_equal_numpy_within_their_precision(compute, numbers):
    """Each quantile is a value of the tensor (numpy's "lower" method), within 0.4 % or the smallest normal float."""
    values = np.array(numbers, np.float32)
    actual = compute(torch.from_numpy(values))
    expected = np.quantile(values.astype(np.float64), QUANTILE_LEVELS, method="lower")
    assert np.allclose(actual.quantiles, expected, rtol=0.004, atol=1e-37)


@pytest.mark.parametrize("count", [500, 600_000], ids=["few", "many"])
def test_quantiles_of_float64_may_exceed_float32(compute, count):
    """Values beyond the range of float32 have quantiles with the same precision."""
    values = np.geomspace(1e-300, 1e300, count) * np.resize([-1.0, 1.0, 1.0], count)
    expected = np.quantile(values, QUANTILE_LEVELS, method="lower")
    assert np.allclose(compute(torch.from_numpy(values)).quantiles, expected, rtol=0.004, atol=0)


def test_first_values_are_in_element_order(compute):
    """Values are in the order of the elements, also for a transposed view; NaN and infinities are null."""
    tensor = torch.arange(24.0).reshape(4, 6)
    assert compute(tensor.t()).first == tuple(tensor.t().reshape(-1)[:16].tolist())
    assert compute(torch.tensor([1.0, float("nan"), float("-inf")])).first == (1.0, None, None)


def test_values_that_are_not_finite_are_in_no_bin(compute):
    """Neither histogram nor quantiles count NaN and infinities; a tensor of nothing else has neither."""
    actual = compute(torch.tensor([0.0, float("nan"), 2.0, float("inf")]))
    assert (actual.low, actual.high, sum(actual.counts)) == (0.0, 2.0, 2)
    nothing = compute(torch.full((3,), float("nan")))
    assert (nothing.counts, nothing.quantiles, nothing.low) == ((), (), None)


def test_the_whole_range_of_float64_has_bins(compute):
    """The difference of the largest and the smallest value overflows, the bins do not."""
    actual = compute(torch.tensor([-1.7e308, 0.0, 1.7e308], dtype=torch.float64))
    assert (actual.counts[0], actual.counts[BINS // 2], actual.counts[-1]) == (1, 1, 1)


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, dtype=torch.complex64), torch.eye(3).to_sparse()], ids=["complex", "sparse"]
)
def test_values_without_an_order_have_a_reason(compute, tensor):
    """Complex and sparse tensors say why they have no histogram."""
    actual = compute(tensor)
    assert actual.reason
    assert actual.counts == ()


def test_an_empty_tensor_and_equal_values_have_no_bins(compute):
    """No values: nothing at all. Equal values: the value, and its quantiles."""
    assert compute(torch.zeros(0)).first == ()
    equal = compute(torch.full((5,), 0.25))
    assert (equal.low, equal.high, equal.counts) == (0.25, 0.25, ())
    assert set(equal.quantiles) == {0.25}


def test_large_tensors_have_the_quantiles_of_numpy(compute):
    """Codes are counted instead of sorted."""
    values = torch.randn(300, 301, generator=torch.Generator().manual_seed(2))
    expected = np.quantile(values.double().numpy(), QUANTILE_LEVELS, method="lower")
    assert np.allclose(compute(values).quantiles, expected, rtol=0.004)


def test_the_first_nan_and_infinity_have_an_index(compute):
    """In the order of the elements of a transposed view, beyond the first block, and of a scalar; none without."""
    tensor = torch.zeros(7, 400_000)
    tensor[3, 399_999] = tensor[4, 7] = float("nan")
    tensor[6, 5] = -float("inf")
    actual = compute(tensor)
    assert (actual.first_nan, actual.first_inf) == ((3, 399_999), (6, 5))
    assert compute(tensor[:, :10].t()).first_nan == (7, 4)
    assert compute(torch.tensor(float("inf"))).first_inf == ()
    assert (compute(torch.ones(3)).first_nan, compute(torch.ones(3)).first_inf) == (None, None)
