"""Compare two versions of a file by lines: the differing blocks, and a unified diff.

`difflib.unified_diff` ignores frequent lines in a file of over 200 lines, and then shows unchanged lines as removed and
added again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Lines around a change that a unified diff shows.
CONTEXT_LINES = 3


class Block(NamedTuple):
    """A range of lines in both versions; `kind` as in `SequenceMatcher.get_opcodes`: equal, replace, delete, insert."""

    kind: str
    start: int
    stop: int
    new_start: int
    new_stop: int


def list_blocks(before: Sequence[str | bytes], after: Sequence[str | bytes]) -> list[Block]:
    """Return the blocks of equal, replaced, removed and added lines."""
    shorter = min(len(before), len(after))
    head = next((n for n in range(shorter) if before[n] != after[n]), shorter)
    remaining_count = shorter - head
    tail = next((n for n in range(remaining_count) if before[-1 - n] != after[-1 - n]), remaining_count)
    # Equal lines at both ends are left out, because the time of the comparison is quadratic in the equal lines.
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    middle = [Block(kind, *(line + head for line in lines)) for kind, *lines in matcher.get_opcodes()]
    end = Block("equal", len(before) - tail, len(before), len(after) - tail, len(after))
    blocks = (Block("equal", 0, head, 0, head), *middle, end)
    return [block for block in blocks if block.start != block.stop or block.new_start != block.new_stop]


def format_unified_diff(before: Sequence[str], after: Sequence[str], old: str, new: str) -> Iterator[str]:
    """Yield the lines of a unified diff between two files with the names `old` and `new`."""
    matcher = difflib.SequenceMatcher(None, "", "")
    matcher.opcodes = list_blocks(before, after)  # type: ignore[attr-defined]
    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT_LINES)):
        if not number:
            yield f"--- {old}\n"
            yield f"+++ {new}\n"
        blocks = [Block(*opcode) for opcode in group]
        first, last = blocks[0], blocks[-1]
        old_lines, new_lines = _format_range(first.start, last.stop), _format_range(first.new_start, last.new_stop)
        yield f"@@ -{old_lines} +{new_lines} @@\n"
        for block in blocks:
            if block.kind == "equal":
                yield from (f" {line}" for line in before[block.start : block.stop])
                continue
            yield from (f"-{line}" for line in before[block.start : block.stop])
            yield from (f"+{line}" for line in after[block.new_start : block.new_stop])


def _format_range(start: int, stop: int) -> str:
    """Return a range of lines as in diff: `3,2` for two lines, `3` for one line, `2,0` for no lines after line 2."""
    length = stop - start
    return str(start + 1) if length == 1 else f"{start + (length > 0)},{length}"
