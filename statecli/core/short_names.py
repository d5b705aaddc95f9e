"""Shorten names to a width: cut the ends that all names of a list share first, and keep the numbers of layers.

`render/names.js` has the same rule for the page; `tests/test_short_names.py` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from statecli.core.lazy_pattern import compile_on_use

#: Part of a name before another part.
_PART = compile_on_use(r"[^.]*\.")
#: End of most names.
_WEIGHT = ".weight"
_TEXT = compile_on_use(r"[^0-9]+")
_NUMBER = compile_on_use(r"[0-9]")


class CommonEnds(msgspec.Struct, frozen=True):
    """Length of the prefix and of the suffix (whole parts of names) that all names of a list share."""

    start: int = 0
    end: int = 0


def find_common_ends(names: Sequence[str]) -> CommonEnds:
    """Return the lengths of the shared prefix and suffix, such as `model.` and `.weight`, or 0 for a single name."""
    if len(names) < 2:
        return CommonEnds()
    backward = [name[::-1] for name in names]
    start, end = _count_common(min(names), max(names)), _count_common(min(backward), max(backward))
    room = min(map(len, names)) - start
    return CommonEnds(start, end if end < room else 0)


def _count_common(first: str, second: str) -> int:
    """Return the total length of the leading parts that both names share."""
    equal = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first.rfind(".", 0, equal) + 1


def shorten_name(name: str, ends: CommonEnds, width: int) -> str:
    """Shorten a name to the width with `…`. Its numbers are kept as long as possible."""
    if len(name) <= width:
        return name
    keeps = bytearray(b"\1" * len(name))
    for start, end in _list_cuts(name, ends):
        if _measure(keeps) <= width:
            break
        keeps[start:end] = bytes(end - start)
    while (excess := _measure(keeps) - width) > 0 and (text := _find_longest_text(name, keeps)) is not None:
        start, end = text
        end = min(end - 1, start + excess + 1)
        keeps[start:end] = bytes(end - start)
    if (excess := _measure(keeps) - width) > 0:
        keeps[:] = bytes(len(name) - max(1, width - 1)) + b"\1" * max(1, width - 1)
    runs = (run.span() for run in re.finditer(b"\0+|\1+", keeps))
    return "".join(name[start:end] if keeps[start] else "…" for start, end in runs)


def _list_cuts(name: str, ends: CommonEnds) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a name to cut, the least important first."""
    stop = len(name) - ends.end
    if ends.start:
        yield 0, ends.start
    if ends.end:
        yield stop, len(name)
    parts = [part.span() for part in _PART.finditer(name, ends.start, stop)]
    words = [span for span in parts if not _NUMBER.search(name, *span)]
    first_number = next((span[0] for span in parts if span not in words), stop)
    yield from (span for span in words if span[0] < first_number < stop)
    if not ends.end and name.endswith(_WEIGHT):
        yield len(name) - len(_WEIGHT), len(name)
    yield from words


def _find_longest_text(name: str, keeps: bytearray) -> tuple[int, int] | None:
    """Return the longest range of kept characters without digits, or None if every such range is too short to cut."""
    masked_name = "".join(character if keep else "0" for character, keep in zip(name, keeps, strict=True))
    texts = [match.span() for match in _TEXT.finditer(masked_name)]
    start, end = max(texts, key=lambda span: span[1] - span[0], default=(0, 0))
    return (start, end) if end - start > 2 else None


def _measure(keeps: bytearray) -> int:
    """Return the length of the shortened name: the kept characters, and `…` for each cut range."""
    return sum(keeps) + len(re.findall(b"\0+", keeps))
