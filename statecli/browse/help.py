"""The keys and the signs of the browser, for its help."""

from __future__ import annotations

#: Keys and their actions. The text fits on a terminal of 80 columns and 24 lines.
KEYS = (
    ("↑ ↓ j k", "move to another row; also Page Up, Page Down, Home, End"),
    ("← → h l", "close or open a module (also Enter); *: all modules below the cursor"),
    ("[ ] v", "scroll the panel; v: show or hide the panel"),
    ("/", "filter by name, glob, dtype, kind, shape or size:"),
    ("", "attn  layers.{0..2}.  dtype:bf16  nan>0;  !bias or -bias excludes"),
    ("esc", "stop reading values; otherwise undo the sorting, then the filter"),
    ("o O r", "sort by the next column (o) or the previous (O); r: reverse the order"),
    ("t", "show the tree of modules, or a list of full names"),
    ("s S", "read the statistics of this tensor (s) or of all listed tensors (S)"),
    ("L", "show a table of the layers: RMS or change of the values, outliers"),
    ("d D", "compare this tensor (d) or all listed tensors (D) with a second target"),
    ("space a", "mark this tensor or module; a: mark all listed tensors; u: clear marks"),
    ("y", "copy -i options: of marked tensors, else all filtered, else this row"),
    ("e", "open the source line in $EDITOR (only for a model class)"),
    ("q", "quit"),
)
#: Signs in the columns and their meaning.
SIGNS = (
    ("kind", "parameter?  assumed kind: the file does not record the kind"),
    ("!", "a tensor of this row has NaN or Inf, or is an outlier"),
    ("change", "0.02  ‖Δ‖/‖w‖ of the tensor; the order is by ‖Δ‖/‖layer‖"),
    ("", "=  equal values   ?  not compared yet   -  cannot be compared"),
    ("", "M  dtype or shape differs   R  renamed   D  only in this target"),
)


def format_help() -> str:
    """Return the text of the help, with a line for each key and each sign."""
    keys = [f"{keys:<8}{text}" for keys, text in KEYS]
    signs = [f"{sign:<8}{text}" for sign, text in SIGNS]
    return "\n".join([*keys, "", *signs])
