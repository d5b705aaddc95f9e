"""The keys of the browser, for its help."""

from __future__ import annotations

#: Keys and what they do. The text fits on a terminal of 80 columns and 24 lines.
KEYS = (
    ("↑ ↓ j k", "next row; Page Up, Page Down, Home, End"),
    ("← → h l", "close or open a module; enter does both"),
    ("*", "open or close all modules below the row"),
    ("[ ]", "scroll the panel; v shows or hides it"),
    ("/", "filter by name, glob, dtype, kind, shape or size:"),
    ("", "attn dtype:bf16 size>1MB shape:768x* nan>0 !bias"),
    ("esc", "stop reading; else remove filter and order"),
    ("o O", "sort by the next or the previous column (O: std)"),
    ("r", "reverse the order"),
    ("t", "tree, or list of whole names"),
    ("s S", "read the statistics: of the tensor, of all listed"),
    ("d D", "differences with a second target: the same"),
    ("space", "mark the row; a module marks its tensors"),
    ("a", "mark all listed tensors"),
    ("y", "copy the marked names, or the row, as -i globs"),
    ("e", "open the source line in $EDITOR (of a class)"),
    ("q", "quit"),
)


def format_help() -> str:
    """Return the lines of the help."""
    return "\n".join(f"{keys:<8} {text}" for keys, text in KEYS)
