"""CRC-32 of the pieces of a file, computed on arrival, so that the checksum of a range needs no second read."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from functools import cache

#: Polynomial of CRC-32 in reflected form: the highest power is the lowest bit.
_POLYNOMIAL = 0xEDB88320


class Checksums:
    """CRC-32 of each piece read so far. `_pieces` has the end and the CRC-32 of a piece by its start."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview, boundaries: Iterable[int]) -> None:
        """Add the CRC-32 of the bytes from `start` on, in pieces that end at the sorted `boundaries`."""
        at, end = start, start + len(data)
        for boundary in (*(boundary for boundary in boundaries if start < boundary < end), end):
            if self._pieces.get(at, (0, 0))[0] < boundary:
                self._put(at, boundary, zlib.crc32(data[at - start : boundary - start]))
            at = boundary

    def _put(self, start: int, end: int, crc: int) -> None:
        with self._lock:
            if start not in self._pieces:
                insort(self._starts, start)
            self._pieces[start] = end, crc

    def combine(self, start: int, end: int, read_cached: Callable[[int, int], bytes | None]) -> int | None:
        """Return the CRC-32 of the bytes from `start` to `end`; None if some bytes were neither added nor cached.

        `read_cached` returns bytes between pieces, for example of a header that was read before the values.
        """
        total = 0
        while start < end:
            stop, crc = self._pieces.get(start, (0, 0))
            if not start < stop <= end:
                following = bisect_right(self._starts, start)
                stop = min([end, *self._starts[following : following + 1]])
                data = read_cached(start, stop - start)
                if data is None:
                    return None
                crc = zlib.crc32(data)
            total = combine_crc32(total, crc, stop - start)
            start = stop
        return total


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two joined byte strings from the CRC-32 of each. The second string has `length` bytes."""
    power, n = 1 << 31, 3
    while length:
        if length & 1:
            power = _multiply(_raise_x(n), power)
        length, n = length >> 1, n + 1
    return _multiply(power, first) ^ second


@cache
def _raise_x(n: int) -> int:
    """Return the polynomial x**(2**n), modulo the polynomial of CRC-32."""
    return 1 << 30 if n == 0 else _multiply(_raise_x(n - 1), _raise_x(n - 1))


def _multiply(left: int, right: int) -> int:
    """Multiply two polynomials over GF(2) modulo the polynomial of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
