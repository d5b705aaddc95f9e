"""Sums of squares beyond float64, and rows of float32 that are summed without loss."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from statecli.values import compiled_kernel, kernels
from statecli.values.delta import CompareOptions
from statecli.values.elements import Decoder, find_element
from statecli.values.tally import TERMS_PER_SUM, Tally, Wide

torch = pytest.importorskip("torch")

needs_kernel = pytest.mark.skipif(compiled_kernel.native is None, reason="no compiled kernel")


@pytest.fixture(params=["compiled", "numpy"])
def kernel(request, monkeypatch):
    """Run the test with both kernels: the compiled C kernel, and numpy as used without the C kernel."""
    if request.param == "numpy":
        monkeypatch.setattr(compiled_kernel, "native", None)
    elif compiled_kernel.native is None:
        pytest.skip("no compiled kernel")
    return request.param


wides = st.builds(Wide, st.floats(1e-100, 1e100), st.integers(-400, 400))


def to_fraction(wide):
    return Fraction(wide.mantissa) * Fraction(4) ** wide.exponent


@given(wides, wides)
def test_wide_sums_equal_sums_of_fractions(first, second):
    """Sums are scaled to the larger exponent and have the precision of float64."""
    assert float(to_fraction(first.add(second)) / (to_fraction(first) + to_fraction(second))) == pytest.approx(
        1, rel=1e-12
    )


@given(wides)
@example(Wide(1.0, 1023))
@example(Wide(1.0, 1024))
def test_square_of_the_root_equals_the_sum(wide):
    """The square of the root equals the sum within float64's range; beyond the range, the root is infinite."""
    root = wide.square_root()
    assert math.isinf(root) == (to_fraction(wide) > Fraction(sys.float_info.max) ** 2)
    if not math.isinf(root):
        assert float(Fraction(root) ** 2 / to_fraction(wide)) == pytest.approx(1, rel=1e-12)


def test_merge_with_an_empty_tally_changes_nothing(kernel):
    """The empty tally is neutral on both sides."""
    values = kernels.tally_values(np.ones(5, np.float32), np.arange(5, dtype=np.float32), CompareOptions(), Decoder())
    assert Tally().merge(values) == values == values.merge(Tally())


def test_sum_of_one_large_and_many_small_terms_is_precise(kernel):
    """The worst case for float32: each sum starts with a 1, next to which each small term alone vanishes."""
    gap = np.full(64 * TERMS_PER_SUM, 2.0**-12.5, np.float32)
    gap[:64] = 1  # of numpy, whose terms lie as far apart as they can
    gap.reshape(-1, 128)[:, :16] = 1  # of C, whose terms lie in 16 lanes of 128
    zeros = np.zeros_like(gap)
    values = kernels.tally_values(zeros, gap, CompareOptions(), Decoder())
    assert values.squares.to_float() == pytest.approx(float(np.square(gap.astype(np.float64)).sum()), rel=1e-6)
    assert values.sum_abs.to_float() == pytest.approx(float(gap.astype(np.float64).sum()), rel=1e-6)


@pytest.mark.parametrize("n", [1, TERMS_PER_SUM - 1, TERMS_PER_SUM, TERMS_PER_SUM + 1, 3 * TERMS_PER_SUM + 17])
def test_padding_of_the_last_row_is_not_counted(n, kernel):
    """The padding of the last row is not counted, and does not affect the next block."""
    decoder = Decoder()
    numbers = np.random.default_rng(n)
    for _ in range(2):
        a, b = (numbers.standard_normal(n).astype(np.float32) for _ in range(2))
        values = kernels.tally_values(a, b, CompareOptions(), decoder)
        assert (values.changed, values.finite) == (n, n)
        expected = float(np.dot(a.astype(np.float64), b.astype(np.float64)))
        assert values.product.to_float() == pytest.approx(expected, rel=1e-6)


def test_all_codes_of_float16_decode_like_numpy():
    """Each of the 65,536 codes of float16 decodes as in numpy, also subnormals, infinities and NaN."""
    codes = np.arange(65536, dtype=np.uint16)
    kind, decoder = find_element("float16"), Decoder()
    finite = codes[np.isfinite(codes.view(np.float16))]
    assert (decoder(finite, kind).view(np.uint32) == finite.view(np.float16).astype(np.float32).view(np.uint32)).all()
    assert np.array_equal(decoder(codes, kind), codes.view(np.float16).astype(np.float32), equal_nan=True)


STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored_integers(tensor):
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy()


def sum_in_float64(before, after):
    a, b = before.to(torch.float64).numpy(), after.to(torch.float64).numpy()
    gap = np.abs(b - a)
    return [gap.sum(), np.square(gap).sum(), np.square(a).sum(), np.square(b).sum()], float(a @ b), float(gap.max())


@needs_kernel
@pytest.mark.parametrize("first", STORED)
@pytest.mark.parametrize("second", STORED)
@pytest.mark.parametrize("n", [129, 5000])
def test_stored_blocks_are_summed_as_float64_would(first, second, n):
    """For two types, the counts are exact and the sums within 1e-6, also a product that cancels."""
    numbers = torch.Generator().manual_seed(n)
    before = torch.randn(n, generator=numbers).to(STORED[first])
    after = torch.where(torch.rand(n, generator=numbers) < 0.3, before, torch.randn(n, generator=numbers))
    after = after.to(STORED[second])
    change = compiled_kernel.tally_stored(stored_integers(before), stored_integers(after), (first, second))
    sums, product, largest = sum_in_float64(before, after)
    differ = (before.to(torch.float64) != after.to(torch.float64)).numpy()
    assert (change.changed, change.finite) == (int(differ.sum()), n)
    assert change.first == (int(differ.argmax()) if differ.any() else None)
    assert change.max_abs == pytest.approx(largest, rel=1e-7)
    got = [change.sum_abs, change.squares, change.before, change.after]
    assert [total.to_float() for total in got] == pytest.approx(sums, rel=1e-6)
    assert change.product.to_float() == pytest.approx(product, abs=1e-13 * math.sqrt(sums[2] * sums[3]))


@needs_kernel
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_kernel_is_right_for_every_value_of_16_bit_types(name):
    """The size of each of the 65,536 values against zero is torch's; blocks that are not finite are left to float64."""
    all_values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(STORED[name])
    for part in all_values.split(128):
        zeros = torch.zeros_like(part)
        actual_stored = compiled_kernel.tally_stored(stored_integers(zeros), stored_integers(part), (name, name))
        wide = part.to(torch.float64)
        if not torch.isfinite(wide).all():
            assert actual_stored is None
        else:
            assert actual_stored.max_abs == float(wide.abs().max())
            assert actual_stored.changed == int((wide != 0).sum())


@needs_kernel
def test_blocks_of_unequal_length_are_refused():
    """The kernel reads no byte beyond either block."""
    block = np.zeros(64, np.uint8)
    for first, second in ((block, block[:60]), (block[:63], block), (block, block[:0])):
        with pytest.raises(ValueError, match="equally many"):
            compiled_kernel.native.tally(first, second, "float32", "float32", False, 0.0, 0.0)
    with pytest.raises(ValueError, match="not a type"):
        compiled_kernel.native.tally(block, block, "float4", "float4", False, 0.0, 0.0)


def tally_values(before, after):
    """Return the delta of two lists of float64 values."""
    tensor, two = (np.array(values, np.float64) for values in (before, after))
    return kernels.tally_values(tensor, two, CompareOptions(), Decoder()).to_delta(tensor.shape)


def test_tensor_that_changed_only_to_nan_has_no_statistics():
    """Other elements are equal; their cosine of 1 would hide a change that cannot be measured."""
    delta = tally_values([1.0, 2.0, 3.0], [math.nan, 2.0, 3.0])
    assert (delta.max_abs, delta.mean_abs, delta.l2, delta.relative_l2, delta.cosine) == (None,) * 5
    assert (delta.reason, delta.left_out) == ("changed elements are NaN or Inf", 1)


@pytest.mark.parametrize(
    ("before", "after", "missing", "reason"),
    [
        ([1e-320, 0.0], [1e300, 0.0], "relative_l2", "the relative change is too large for float64"),
        ([0.0, 0.0], [1.0, 0.0], "relative_l2", "all old values are zero"),
        ([1.0, 0.0], [0.0, 0.0], "cosine", "all new values are zero"),
        ([-1.7e308, 0.0], [1.7e308, 0.0], "max_abs", "some differences are too large for float64"),
        (
            [1e300, 0.0],
            [1e300, 1e-200],
            "relative_l2",
            (
                "some differences are so close to 0 that float64 rounds a statistic of them to 0, so this statistic is "
                "not available"
            ),
        ),
        (
            [1.0, 0.0],
            [1.0, 5e-324],
            "mean_abs",
            (
                "some differences are so close to 0 that float64 rounds a statistic of them to 0, so this statistic is "
                "not available"
            ),
        ),
    ],
)
def test_missing_statistic_has_a_reason(before, after, missing, reason):
    """The reason is given for each statistic that float64 cannot represent."""
    delta = tally_values(before, after)
    assert (getattr(delta, missing), delta.reason) == (None, reason)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [([1e149, 0.0], [1e149, 1e-140], 1e-289), ([1e-140], [1e149], 1e289), ([1e-300, 0.0], [1e-300, 1e-20], 1e280)],
)
def test_relative_change_of_extreme_sizes_is_right(before, after, expected):
    """The squares are too far apart for float64, but the roots are not."""
    delta = tally_values(before, after)
    assert (delta.relative_l2, delta.reason) == (pytest.approx(expected, rel=1e-12, abs=0), None)


def test_complete_statistics_have_no_reason():
    delta = tally_values([1.0, 2.0], [1.0, 2.5])
    assert delta.reason is None
    assert None not in (delta.max_abs, delta.mean_abs, delta.l2, delta.relative_l2, delta.cosine)


@pytest.mark.parametrize("angle", [-0.5, -0.0102, 0.0101, 0.011, 0.05, 0.3, 0.49, 0.6])
@pytest.mark.parametrize("n", [5, 128, 1000, 65536])
def test_cosine_near_a_right_angle_is_precise(n, angle, kernel):
    """Near a right angle the products cancel, but the cosine is still within 1e-6."""
    numbers = np.random.default_rng(n)
    for _ in range(8):
        a, b = numbers.standard_normal((2, n))
        a /= np.linalg.norm(a)
        b -= a * (a @ b)
        b = angle * a + math.sqrt(1 - angle**2) * b / np.linalg.norm(b)
        before, after = a.astype(np.float32), (b * 3).astype(np.float32)
        first, second = before.astype(np.float64), after.astype(np.float64)
        expected = (first @ second) / (np.linalg.norm(first) * np.linalg.norm(second))
        actual = kernels.tally_values(before, after, CompareOptions(), Decoder()).to_delta((n,))
        assert actual.cosine == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "atol", "rtol", "beyond"),
    [
        (1e308, -1e308, 0, 1.9, True),
        (1e308, -1e308, 0, 2.1, False),
        (1.7e308, -1.7e308, 1.7e308, 0.1, True),
        (1.7e308, -1.7e308, 1.7e308, 1.0, False),
        (0.5, -1.7e308, 0, 1.7e308, True),
        (2.0, -1.7e308, 0, 1.7e308, False),
        (1e308 + 1e308j, -1e308 - 1e308j, 0, 1.9, True),
        (1.5e308 + 1.5e308j, 1.5e308 - 1.5e308j, 0, 1.5, False),
    ],
)
def test_tolerance_that_overflows_float64_is_applied(before, after, atol, rtol, beyond):
    """Values are compared correctly even if their difference or the tolerance overflows."""
    values = kernels.tally_values(
        np.array([before]), np.array([after]), CompareOptions(atol=atol, rtol=rtol), Decoder()
    )
    assert values.changed == beyond
