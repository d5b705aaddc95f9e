"""Sums of squares beyond float64, and rows of float32 that lose nothing."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecli.diff.result import How
from statecli.values import kernels
from statecli.values.elements import Decoder, element
from statecli.values.tally import ROW, Tally, Wide

wides = st.builds(Wide, st.floats(1e-100, 1e100), st.integers(-400, 400))


def exact(wide):
    return Fraction(wide.mantissa) * Fraction(4) ** wide.exponent


@given(wides, wides)
def test_wide_sums_are_those_of_fractions(one, other):
    """Added at the larger exponent, to the precision of float64."""
    assert float(exact(one.plus(other)) / (exact(one) + exact(other))) == pytest.approx(1, rel=1e-12)


@given(wides)
def test_a_root_is_a_root(wide):
    """Within float64's range the square of the root is the sum; beyond it is infinite."""
    root = wide.root()
    if 1e-300 < root < math.inf:
        assert float(Fraction(root) ** 2 / exact(wide)) == pytest.approx(1, rel=1e-12)
    assert root != math.inf or exact(wide) > Fraction(1e154) ** 2


def test_nothing_added_changes_nothing():
    """The empty tally is neutral on both sides."""
    one = kernels.tally(np.ones(5, np.float32), np.arange(5, dtype=np.float32), How(), Decoder())
    assert Tally().plus(one) == one == one.plus(Tally())


def test_one_large_and_many_small():
    """The worst for float32: in each row one 1 and 255 that vanish beside it one by one, not together."""
    gap = np.full(4 * ROW, 2.0**-12.5, np.float32)
    gap[::ROW] = 1
    zeros = np.zeros_like(gap)
    found = kernels.tally(zeros, gap, How(), Decoder())
    assert found.squares.value() == pytest.approx(float(np.square(gap.astype(np.float64)).sum()), rel=1e-6)
    assert found.sum_abs.value() == pytest.approx(float(gap.astype(np.float64).sum()), rel=1e-6)


@pytest.mark.parametrize("n", [1, ROW - 1, ROW, ROW + 1, 3 * ROW + 17])
def test_rows_that_are_not_full(n):
    """What fills up the last row counts for nothing, and leaves nothing behind for the next block."""
    decoder = Decoder()
    numbers = np.random.default_rng(n)
    for _ in range(2):
        a, b = (numbers.standard_normal(n).astype(np.float32) for _ in range(2))
        found = kernels.tally(a, b, How(), decoder)
        assert (found.changed, found.finite) == (n, n)
        expected = float(np.dot(a.astype(np.float64), b.astype(np.float64)))
        assert found.product.value() == pytest.approx(expected, rel=1e-6)


def test_half_precision_by_its_bits():
    """Each of the 65,536 codes of float16 is what numpy says, subnormals, infinities and NaN too."""
    codes = np.arange(65536, dtype=np.uint16)
    kind, decoder = element("float16"), Decoder()
    finite = codes[np.isfinite(codes.view(np.float16))]
    assert (decoder(finite, kind).view(np.uint32) == finite.view(np.float16).astype(np.float32).view(np.uint32)).all()
    assert np.array_equal(decoder(codes, kind), codes.view(np.float16).astype(np.float32), equal_nan=True)
