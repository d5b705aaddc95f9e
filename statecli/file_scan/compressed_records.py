"""Inflate compressed records, up to a limit."""

from __future__ import annotations

import zlib

from statecli.pickle_scan.one_pickle import Region
from statecli.pickle_scan.step_budget import Budget, Steps

#: Largest inflated record, in bytes. `step_budget.Budget` limits the work for a whole file.
MAX_INFLATED_BYTES = 64 * 2**20
#: Bytes at the beginning of a numpy array that contain its whole header.
ARRAY_HEADER_BYTES = 4096


def inflate_beginning(region: Region, size: int, steps: Steps, max_bytes: int = ARRAY_HEADER_BYTES) -> bytes:
    """Inflate the first `size` bytes of a compressed record, and return at most `max_bytes` bytes.

    More bytes are read if the first bytes inflate to less than half of their number, because any number of empty blocks
    may come first.
    """
    inflater, opening, at = zlib.decompressobj(-zlib.MAX_WBITS), b"", 0
    while at < region.size and not inflater.eof and (not at or len(opening) < min(max_bytes, size // 2)):
        step = min(max(size, at), region.size - at, 2**20)
        if at:  # a second step is needed only after blocks without data
            steps.take(Budget.BYTES, step)
        try:
            opening += inflater.decompress(region.read(at, step), max_bytes - len(opening))
        except zlib.error:
            break
        at += step
    return opening


def inflate(region: Region, steps: Steps) -> tuple[Region, str | None]:
    """Return the inflated content of a record, and why the rest is missing (None if the content is complete)."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    parts, size, at = [], 0, 0
    why: str | None = None
    while at < region.size and not inflater.eof and why is None:
        step = min(2**16, region.size - at)
        steps.take(Budget.BYTES, step)
        try:
            parts.append(inflater.decompress(region.read(at, step), MAX_INFLATED_BYTES - size + 1))
        except zlib.error as error:
            why = f"the compressed data is damaged: {error}"
            break
        at, size = at + step, size + len(parts[-1])
        if size > MAX_INFLATED_BYTES:
            why = f"the compressed data unpacks to more than {MAX_INFLATED_BYTES:,} bytes, the limit of statecli"
    if why is None and not inflater.eof:
        why = "the compressed data ends too early"
    return region.with_data(b"".join(parts)), why
