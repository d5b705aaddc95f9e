"""Element types: every code of every small float, against torch and against the formats' definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from statecli.core.dtypes import ELEMENT_BITS
from statecli.values.elements import build_small_float_table, find_element


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_all_256_codes_of_float8_types_decode_like_torch(name):
    """Value, sign of zero and NaN of each code agree with torch's own conversion."""
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    table = find_element(name).table
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(table, expected)
    np.testing.assert_array_equal(np.signbit(table[numbers]), np.signbit(expected[numbers]))


def test_all_65536_codes_of_float16_decode_like_torch():
    """Subnormals, infinities and NaN included."""
    codes = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16))
    np.testing.assert_array_equal(find_element("float16").table, codes.view(torch.float16).float().numpy())


def test_float4_has_the_sixteen_values_of_its_definition():
    """E2M1 has no NaN and no infinity: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert build_small_float_table("float4_e2m1fn").tolist() == positive + [-value for value in positive]


@pytest.mark.parametrize(("name", "values"), [("float4_e2m1fn_x2", [1.5, -0.5]), ("quint4x2", [3, 9])])
def test_the_low_half_of_a_byte_comes_first(name, values):
    """0x93 holds code 3, then code 9."""
    assert find_element(name).table[0x93].tolist() == values


def test_quint2x4_holds_four_values_lowest_bits_first():
    """0b11_10_01_00 holds 0, 1, 2, 3."""
    assert find_element("quint2x4").table[0b11100100].tolist() == [0, 1, 2, 3]


def test_a_stored_element_is_as_long_as_the_format_table_says():
    """Both tables of types agree on bytes, or the type has no numbers at all."""
    for name, bits in ELEMENT_BITS.items():
        kind = find_element(name)
        if kind is None:
            assert name.startswith(("bits", "int", "uint"))
        else:
            assert np.dtype(kind.stored).itemsize * kind.items * 8 == bits, name
