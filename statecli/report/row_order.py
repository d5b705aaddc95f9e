"""Order and number of the rows in human-readable outputs: `--sort`, `--top` and `-n`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.natural_order import make_natural_key
from statecli.core.output import TensorOrder
from statecli.report import Group, Line, RowView

if TYPE_CHECKING:
    from statecli.commands.diff.result import Change

#: Parts of a name: `state`, an index (`[3]`, `['exp_avg']`), or a separator.
_PART = compile_on_use(r"[^.\[]+|\[[^\]]*\]|[.\[]")
#: Numbers with at least this many digits are not numbers of layers.
MAX_DIGITS = 10

_Row = TypeVar("_Row", TensorInfo, "Change")


def arrange_tensors(tensors: Sequence[TensorInfo], view: RowView) -> Sequence[TensorInfo]:
    """Return the rows to show, in order. If rows are hidden, the largest come first by default."""
    order = view.sort or (TensorOrder.SIZE if view.hides_rows else None)
    if order is not None:
        tensors = sorted(tensors, key=order_by_name if order == TensorOrder.NAME else lambda tensor: -tensor.nbytes)
    return tensors[: view.top]


def arrange_naturally(tensors: Sequence[TensorInfo]) -> Sequence[TensorInfo]:
    """Sort the tensors so that modules are together and repeated layers are in the order of their numbers.

    A file may have `h.10` before `h.2`; other names keep the order of their first tensor.
    """
    ranks: dict[tuple[str, ...], int] = {}

    def make_key(tensor: TensorInfo) -> list[tuple[int, int]]:
        path: tuple[str, ...] = (tensor.section,)
        key = [(ranks.setdefault(path, len(ranks)), 0)]
        for part in _PART.findall(tensor.fqn):
            number = part.strip("[]")
            is_number = number.isdecimal() and number.isascii() and len(number) < MAX_DIGITS
            path = (*path, "#" if is_number else part)
            key.append((ranks.setdefault(path, len(ranks)), int(number) if is_number else 0))
        return key

    return sorted(tensors, key=make_key)  # sorted calls make_key in the order of the tensors


def limit_by_group(rows: Sequence[_Row], view: RowView) -> Sequence[_Row]:
    """Return at most `view.lines` rows of each section and kind, in order."""
    if view.lines is None or view.top is not None:
        return rows
    counts: Counter[tuple[str, Kind]] = Counter()
    selected_rows = []
    for row in rows:
        group = (row.section, row.kind)
        counts[group] += 1
        if counts[group] <= view.lines:
            selected_rows.append(row)
    return selected_rows


def hoist_remark(group: Group) -> Group:
    """Move a remark that all rows share to the group's summary, if all rows have another cell besides the name."""
    remarks = {line.remark for line in group.lines}
    if len(group.lines) < 2 or len(remarks) > 1 or not all(any(line.cells[1:]) for line in group.lines):
        return group
    summary = "; ".join(filter(None, (group.summary, *remarks)))
    return replace(group, summary=summary, lines=tuple(replace(line, remark="") for line in group.lines))


def limit_lines(group: Group, view: RowView) -> Group:
    """Apply `hoist_remark`. Limit the group to `view.lines` lines, and add a line that counts the rest."""
    group = hoist_remark(group)
    if view.lines is None or len(group.lines) <= view.lines:
        return group
    hidden_count = len(group.lines) - view.lines
    count_line = Line((f"… and {hidden_count:,} more", *("" for _ in group.lines[0].cells[1:])), mood="dim")
    return replace(group, lines=(*group.lines[: view.lines], count_line))


def format_hidden_count(hidden_count: int, view: RowView) -> tuple[str, ...]:
    """Return the line that counts the hidden rows of a flat table, or () if no row is hidden."""
    flag = f"--top {view.top}" if view.top is not None else f"-n {view.lines}"
    return (f"… and {hidden_count:,} more ({flag})",) if hidden_count else ()


def order_by_name(row: TensorInfo | Change) -> tuple[str, str]:
    """Return a sort key by which `layers.2` comes before `layers.10`."""
    return row.section, make_natural_key(row.fqn)
