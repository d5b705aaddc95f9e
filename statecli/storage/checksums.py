"""CRC-32 of an object's pieces, taken as they come, so that a checksum over them needs no other journey."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from functools import cache

#: The polynomial of CRC-32, reflected: its highest power has the lowest bit.
_POLYNOMIAL = 0xEDB88320


class Sums:
    """By where each piece begins: where it ends, and its CRC-32."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview, cuts: Iterable[int]) -> None:
        """The bytes from `start` on, as pieces that end at each of the `cuts` among them, which are sorted."""
        at, end = start, start + len(data)
        for cut in (*(cut for cut in cuts if start < cut < end), end):
            if self._pieces.get(at, (0, 0))[0] < cut:
                self._put(at, cut, zlib.crc32(data[at - start : cut - start]))
            at = cut

    def _put(self, start: int, end: int, crc: int) -> None:
        with self._lock:
            if start not in self._pieces:
                insort(self._starts, start)
            self._pieces[start] = end, crc

    def of(self, start: int, end: int, here: Callable[[int, int], bytes | None]) -> int | None:
        """CRC-32 of all bytes from `start` to `end`; None where no pieces make them up.

        `here` has bytes between pieces, as of a header that was read before the values behind it.
        """
        found = 0
        while start < end:
            stop, crc = self._pieces.get(start, (0, 0))
            if not start < stop <= end:
                following = bisect_right(self._starts, start)
                stop = min([end, *self._starts[following : following + 1]])
                data = here(start, stop - start)
                if data is None:
                    return None
                crc = zlib.crc32(data)
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
