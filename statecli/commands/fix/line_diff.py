"""Compare two versions of a file by lines: the blocks that differ, and a unified diff.

`difflib.unified_diff` ignores lines that are frequent in a file of over 200 lines, and then shows unchanged lines as
removed and added again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

#: Lines around a change that a unified diff shows.
CONTEXT_LINES = 3


def list_blocks(before: Sequence[str | bytes], after: Sequence[str | bytes]) -> list[tuple[str, int, int, int, int]]:
    """Return the blocks as `SequenceMatcher.get_opcodes` does: the kind, and the lines of both versions."""
    shorter = min(len(before), len(after))
    head = next((n for n in range(shorter) if before[n] != after[n]), shorter)
    rest = shorter - head
    tail = next((n for n in range(rest) if before[-1 - n] != after[-1 - n]), rest)
    # Without equal ends the comparison is fast: its time is quadratic in the number of equal lines.
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    middle = [(kind, a + head, b + head, c + head, d + head) for kind, a, b, c, d in matcher.get_opcodes()]
    ends = [
        ("equal", 0, head, 0, head),
        *middle,
        ("equal", len(before) - tail, len(before), len(after) - tail, len(after)),
    ]
    return [block for block in ends if block[1:4:2] != block[2:5:2]]


def format_unified_diff(before: Sequence[str], after: Sequence[str], old: str, new: str) -> Iterator[str]:
    """Yield the lines of a unified diff between two files of these names."""
    matcher = difflib.SequenceMatcher(None, "", "")
    matcher.opcodes = list_blocks(before, after)  # type: ignore[attr-defined]
    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT_LINES)):
        if not number:
            yield f"--- {old}\n"
            yield f"+++ {new}\n"
        first, last = group[0], group[-1]
        yield f"@@ -{_format_range(first[1], last[2])} +{_format_range(first[3], last[4])} @@\n"
        for kind, start, stop, new_start, new_stop in group:
            if kind == "equal":
                yield from (f" {line}" for line in before[start:stop])
                continue
            yield from (f"-{line}" for line in before[start:stop])
            yield from (f"+{line}" for line in after[new_start:new_stop])


def _format_range(start: int, stop: int) -> str:
    """Return first line and number of lines as in diff: one line without a number, none at the line before."""
    length = stop - start
    return str(start + 1) if length == 1 else f"{start + (length > 0)},{length}"
