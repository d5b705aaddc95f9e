"""CRC-32 of an object's pieces, taken as they come, so that a checksum over them needs no other journey."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache

#: The polynomial of CRC-32, reflected: its highest power has the lowest bit.
_POLYNOMIAL = 0xEDB88320


class Sums:
    """By where each piece begins: where it ends, and its CRC-32."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}

    def add(self, start: int, data: memoryview, cuts: Iterable[int]) -> None:
        """The bytes from `start` on, as pieces that end at each of the `cuts` among them, which are sorted."""
        at, end = start, start + len(data)
        for cut in (*(cut for cut in cuts if start < cut < end), end):
            if self._pieces.get(at, (0, 0))[0] < cut:
                self._pieces[at] = cut, zlib.crc32(data[at - start : cut - start])
            at = cut

    def of(self, start: int, end: int) -> int | None:
        """CRC-32 of all bytes from `start` to `end`; None where no pieces make them up."""
        found = 0
        while start < end:
            stop, crc = self._pieces.get(start, (0, 0))
            if not start < stop <= end:
                return None
            found = joined(found, crc, stop - start)
            start = stop
        return found


def joined(one: int, two: int, length: int) -> int:
    """CRC-32 of what has that of `one` and behind it `length` bytes that have that of `two` (zlib's crc32_combine)."""
    power, n = 1 << 31, 3
    while length:
        if length & 1:
            power = _product(_power(n), power)
        length, n = length >> 1, n + 1
    return _product(power, one) ^ two


@cache
def _power(n: int) -> int:
    """x to the 2 to the n."""
    return 1 << 30 if n == 0 else _product(_power(n - 1), _power(n - 1))


def _product(one: int, two: int) -> int:
    """Of two polynomials over GF(2), modulo that of CRC-32."""
    found = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            found ^= two
        two = two >> 1 ^ (_POLYNOMIAL if two & 1 else 0)
    return found
