"""The keys and the signs of the browser, for its help."""

from __future__ import annotations

#: Keys and what they do. The text fits on a terminal of 80 columns and 24 lines.
KEYS = (
    ("↑ ↓ j k", "next row; also Page Up, Page Down, Home, End"),
    ("← → h l", "close or open a module (enter: both); * all modules below it"),
    ("[ ] v", "scroll the panel; v shows or hides it"),
    ("/", "filter by name, glob, dtype, kind, shape or size:"),
    ("", "attn  layers.{0..2}.  dtype:bf16  size>1MB  768x*  nan>0  !bias"),
    ("esc", "stop reading; else back from the order; else remove the filter"),
    ("o O r", "order by the next column, by the previous one; r reverses"),
    ("t", "tree, or list of whole names"),
    ("s S", "read the statistics: of this tensor, of all listed tensors"),
    ("L", "table of the layers: size of the values, outliers, NaN"),
    ("d D", "compare with a second target: this tensor, all listed tensors"),
    ("space a", "mark the row (a module marks its tensors), or all listed; u: clear all"),
    ("y", "copy the marked names as options -i; without marks, the row"),
    ("e", "open the source line in $EDITOR (of a class)"),
    ("q", "quit"),
)
#: Signs in the columns and what they mean.
SIGNS = (
    ("kind", "parameter?  the kind is assumed: a file does not record it"),
    ("!", "the tensor, or a tensor of the module, has NaN, Inf or is an outlier"),
    ("change", "0.02  size of the change ÷ size of the values, ‖Δ‖/‖w‖"),
    ("", "=  equal values   ?  not compared yet   -  cannot be compared"),
    ("", "M  dtype or shape differs   R  renamed   D  only in this target"),
)


def format_help() -> str:
    """Return the lines of the help."""
    keys = [f"{keys:<8}{text}" for keys, text in KEYS]
    signs = [f"{sign:<8}{text}" for sign, text in SIGNS]
    return "\n".join([*keys, "", *signs])
