"""Recognise fused tensors with alternating parts: rows of q, k and v for each head or group of heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import msgspec

#: Largest number of blocks in a pattern: q, k and v, or gate and up.
_MAX_BLOCKS = 4


class Interleaving(msgspec.Struct, frozen=True):
    """How parts alternate in a fused tensor: a repeated list of blocks (index of the part, number of rows).

    `wrong_rows` maps the index of a part to its rows that are not at their place.
    """

    blocks: tuple[tuple[int, int], ...]
    wrong_rows: dict[int, list[int]]


def find_interleaving(whole: Sequence[int], parts: Sequence[Sequence[int]]) -> Interleaving | None:
    """Return how the rows of the parts alternate in the fused tensor, by checksums of all rows.

    At most half of the rows of each part may differ, and at least one part has all rows at their places. Return None
    if the parts follow each other, or if no pattern fits.
    """
    owners = {digest: n for n, part in enumerate(parts) for digest in part}
    counts = Counter(digest for part in parts for digest in part)
    # Equal rows, for example of zeros, have no known owner.
    sequence = [owners.get(digest) if counts[digest] == 1 else None for digest in whole]
    runs = [(owner, len(list(run))) for owner, run in groupby(sequence)]
    owned_runs = [run for run in runs if run[0] is not None]
    for size in range(2, _MAX_BLOCKS + 1):
        for start in range(max(0, len(owned_runs) - size + 1)):
            blocks = tuple((owner, rows) for owner, rows in owned_runs[start : start + size] if owner is not None)
            interleaving = _check_pattern(blocks, whole, parts)
            if interleaving is not None:
                return interleaving
            if start >= _MAX_BLOCKS:  # a wrong row may be in the first blocks, but not in all
                break
    return None


def _check_pattern(
    blocks: tuple[tuple[int, int], ...], whole: Sequence[int], parts: Sequence[Sequence[int]]
) -> Interleaving | None:
    period = sum(rows for _, rows in blocks)
    if {owner for owner, _ in blocks} != set(range(len(parts))) or len(blocks) != len(parts) or len(whole) % period:
        return None
    repeats = len(whole) // period
    if repeats < 2 or any(len(parts[owner]) != repeats * rows for owner, rows in blocks):
        return None
    best: Interleaving | None = None
    for turn in range(len(blocks)):  # the pattern may have been found from its middle on
        order = blocks[turn:] + blocks[:turn]
        wrong_rows: dict[int, list[int]] = {owner: [] for owner, _ in order}
        offset = 0
        for repeat in range(repeats):
            for owner, rows in order:
                expected = parts[owner][repeat * rows : (repeat + 1) * rows]
                wrong_rows[owner] += [repeat * rows + n for n in range(rows) if whole[offset + n] != expected[n]]
                offset += rows
        if best is None or _count(wrong_rows) < _count(best.wrong_rows):
            best = Interleaving(order, wrong_rows)
    if best is None or all(best.wrong_rows.values()):
        return None
    return best if all(2 * len(rows) <= len(parts[owner]) for owner, rows in best.wrong_rows.items()) else None


def _count(wrong_rows: dict[int, list[int]]) -> int:
    return sum(map(len, wrong_rows.values()))
