"""Compare names of numbered layers."""

from __future__ import annotations


def split_moved_layer(before: str, after: str) -> tuple[str, str] | None:
    """Return the two layers if only a number differs: `a.1` and `a.2` for `a.1.w` and `a.2.w`. Else return None."""
    old, new = before.split("."), after.split(".")
    differing_positions = [n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    if len(old) != len(new) or len(differing_positions) != 1:
        return None
    end = differing_positions[0] + 1
    are_numbers = all(name.isascii() and name.isdecimal() for name in (old[end - 1], new[end - 1]))
    return (".".join(old[:end]), ".".join(new[:end])) if are_numbers else None
