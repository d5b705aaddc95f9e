"""Texts and numbers about changes of tensors, and sums of changes by module (`--tree`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from statecli.commands.diff.changed_fields import describe_fields
from statecli.commands.diff.result import Change, Diff, Field, Status
from statecli.core.grouping import group_by
from statecli.core.model_state import Kind
from statecli.core.units import (
    format_count,
    format_fqn,
    format_number,
    format_section,
    format_shape,
    format_size,
    join_names,
    plural,
)
from statecli.report import Group, Line, ReportColumn, tree
from statecli.report.bars import BAR_SCALE, draw_bar
from statecli.report.tie_changes import describe_ties, is_tie_only
from statecli.values.delta import MAX_RANK, Delta

#: Letter that git uses for each status.
STATUS_LETTERS = {
    Status.ADDED: "A",
    Status.REMOVED: "D",
    Status.CHANGED: "M",
    Status.RENAMED: "R",
    Status.IDENTICAL: " ",
}

MOODS = {Status.ADDED: "good", Status.REMOVED: "bad", Status.RENAMED: "info"}

#: Fields of `Delta` with a column each in the flat table.
DELTA_COLUMNS = (
    "elements",
    "changed",
    "relative_l2",
    "max_abs",
    "mean_abs",
    "l2",
    "cosine",
    "rank",
    "nan_before",
    "nan_after",
    "inf_before",
    "inf_after",
    "left_out",
)

#: Number of significant digits of a statistic in human-readable outputs.
SIGNIFICANT_DIGITS = 3


def format_name(fqn: str, section: str, has_sections: bool) -> str:
    """Return a tensor's name. If `has_sections` is set, the name begins with the tensor's section."""
    return f"{section}.{format_fqn(fqn)}" if has_sections and section else format_fqn(fqn)


def describe_change(change: Change) -> str:
    """Describe a change without the numbers of its values. Layers with the same change get the same text."""
    if change.before is None or change.after is None:
        tensor = change.before or change.after
        return f"{tensor.dtype} {format_shape(tensor.shape)}, {format_size(tensor.nbytes)}" if tensor else ""
    return describe_fields(change)


def format_changed_count(rows: Sequence[Change]) -> str:
    """Format how many elements differ: `12/4,096`, `all 4,096`, or `all 2.35 M but 61` if 61 elements are equal."""
    deltas = _list_deltas(rows)
    if not deltas:
        return ""
    changed_count, elements = sum(delta.changed for delta in deltas), sum(delta.elements for delta in deltas)
    changed_text, all_text = _format_count(changed_count), _format_count(elements)
    if changed_text != all_text:
        return f"{changed_text}/{all_text}"
    return f"all {all_text}" + (f" but {_format_count(elements - changed_count)}" if changed_count < elements else "")


def _format_count(elements: int) -> str:
    return f"{elements:,}" if elements < 1_000_000 else format_count(elements)


def format_largest_change(rows: Sequence[Change]) -> str:
    """Format the largest |Δ| of the tensors."""
    sizes = (delta.max_abs for delta in _list_measured(rows) if delta.max_abs is not None)
    return format_number(max(sizes, default=None), SIGNIFICANT_DIGITS)


def list_relative_changes(rows: Sequence[Change]) -> list[float]:
    """Return the known relative L2 changes of the tensors."""
    return [delta.relative_l2 for delta in _list_measured(rows) if delta.relative_l2 is not None]


def combine_relative_change(rows: Sequence[Change]) -> float | None:
    """Return the relative L2 change of all tensors together. Tensors with an unknown or zero change are left out."""
    norms_and_ratios = [
        (delta.l2, delta.relative_l2) for delta in _list_measured(rows) if delta.l2 and delta.relative_l2
    ]
    if not norms_and_ratios:
        return max(list_relative_changes(rows), default=None)
    largest = max(norm for norm, _ in norms_and_ratios)  # a divisor that keeps the old norms within float64
    difference = math.hypot(*(norm / largest for norm, _ in norms_and_ratios))
    return difference / math.hypot(*(norm / largest / ratio for norm, ratio in norms_and_ratios))


def _list_measured(rows: Sequence[Change]) -> list[Delta]:
    """Return the deltas. Omit a delta whose largest change is 0 if positions with NaN or infinity were left out."""
    return [delta for delta in _list_deltas(rows) if delta.max_abs or not delta.left_out]


def _list_deltas(rows: Sequence[Change]) -> list[Delta]:
    return [row.values for row in rows if row.values is not None]


def format_relative_change(values: Sequence[float]) -> str:
    """Format relative changes: `0.0012`, or the range `0.0012..0.03` of several changes."""
    texts = [format_number(value, digits=2) for value in (min(values), max(values))] if values else []
    return "..".join(dict.fromkeys(texts))


#: Smallest number of rows with an outlier, and smallest ratio between the relative change of an outlier and the median.
_MIN_ROWS_OF_OUTLIER, _MIN_OUTLIER_RATIO = 4, 5
#: Smallest ratio of an outlier if the largest ratio of all other layers is at most the second number. In 96 fine-tunes
#: of small Llamas with AdamW and SGD, none of the 864 groups of layers had such an outlier.
_MIN_RATIO_AMONG_EQUALS, _MAX_RATIO_OF_EQUALS = 3, 1.3
#: Largest number of outliers, because many layers are not an exception.
_MAX_OUTLIERS = 3


def find_outliers(rows: Sequence[Change]) -> list[Change]:
    """Return at most three layers that changed several times more than the median of many similar layers.

    The limit is five times the median, or three times if all other layers changed about the same.
    """
    sizes = {id(row): delta.relative_l2 for row in rows for delta in _list_measured([row])}
    values = sorted(size for size in sizes.values() if size is not None)
    if len(values) < _MIN_ROWS_OF_OUTLIER:
        return []
    median = values[len(values) // 2]
    usual_sizes = [size for size in values if size <= _MIN_RATIO_AMONG_EQUALS * median]
    are_equal = bool(usual_sizes) and usual_sizes[-1] <= _MAX_RATIO_OF_EQUALS * median
    limit = median * (_MIN_RATIO_AMONG_EQUALS if are_equal else _MIN_OUTLIER_RATIO)
    outliers = [row for row in rows if (sizes.get(id(row)) or 0.0) > limit > 0]
    return outliers if len(outliers) <= min(_MAX_OUTLIERS, len(values) // 4) else []


_NONFINITE_COUNTS = (("NaN", ("nan_before", "nan_after")), ("Inf", ("inf_before", "inf_after")))


def _has_nonfinite(delta: Delta) -> bool:
    return bool(delta.nan_before or delta.nan_after or delta.inf_before or delta.inf_after)


def describe_remarks(rows: Sequence[Change], verbose: bool = False) -> list[str]:
    """Describe NaN and infinities, values not compared, changed tied weights, and the rank of the difference."""
    deltas = _list_deltas(rows)
    parts = describe_not_finite(deltas)
    parts.extend(dict.fromkeys(delta.reason for delta in deltas if delta.reason))
    reasons = (row.not_compared for row in rows if row.not_compared and Field.SHAPE not in row.fields)
    parts.extend(dict.fromkeys(f"values not compared: {reason}" for reason in reasons))
    ties = {tuple(_describe_tying(row)) for row in rows}
    parts.extend(ties.pop() if len(ties) == 1 else ())
    parts.extend(_describe_ranks(deltas))
    if len(rows) == 1 and verbose:
        parts.extend(_describe_details(rows[0]))
    return parts


def describe_not_finite(deltas: Sequence[Delta]) -> list[str]:
    """Return texts such as `NaN 0 → 1` and `Inf 0 → 2`."""
    parts: list[str] = []
    for word, counts in _NONFINITE_COUNTS if any(map(_has_nonfinite, deltas)) else ():
        before, after = (sum(getattr(delta, count) for delta in deltas) for count in counts)
        if before or after:
            parts.append(f"{word} {before:,} → {after:,}")
    return parts


def _describe_ranks(deltas: Sequence[Delta]) -> list[str]:
    ranks = sorted(delta.rank for delta in deltas if delta.rank is not None)
    if not ranks:
        return []
    ends = "..".join(dict.fromkeys(str(rank) for rank in (ranks[0], ranks[-1])))
    return [f"rank of Δ {ends}{' or more' if ranks[-1] == MAX_RANK else ''}"]


def _describe_tying(change: Change) -> list[str]:
    if Field.TYING not in change.fields or change.before is None or change.after is None:
        return []
    return [
        f"{word} {join_names(tensor.tied_to)}"
        for word, tensor in (("was tied to", change.before), ("=", change.after))
        if tensor.tied_to
    ]


def _describe_details(change: Change) -> list[str]:
    is_also_renamed = change.renamed_from is not None and change.status is not Status.RENAMED
    return [f"was {change.renamed_from}"] * is_also_renamed + (
        _describe_statistics(change.values) if change.values else []
    )


def _describe_statistics(delta: Delta) -> list[str]:
    parts = [f"first {format_shape(delta.first)}"] if delta.first is not None else []
    figures = (("mean |Δ|", delta.mean_abs), ("L2", delta.l2), ("cosine", delta.cosine))
    parts.extend(f"{word} {format_number(value, 6)}" for word, value in figures if value is not None)
    return parts + ([f"{plural(delta.left_out, 'position')} left out"] if delta.left_out else [])


#: Column of `draw_bar`; its heading is the scale.
BAR_COLUMN = ReportColumn(BAR_SCALE, optional=True)

# Sums by module.

COLUMNS = (
    ReportColumn("module"),
    ReportColumn("changed"),
    ReportColumn("combined rel. change", right=True),
    BAR_COLUMN,
)


def build_module_groups(diff: Diff, unfold: bool) -> tuple[Group, ...]:
    """Return a group for each section with changes. Its lines are the tree of the changed modules."""
    return tuple(
        Group(
            format_section(section),
            _summarize_kinds(changes),
            tuple(_build_lines([tree.build_tree(changes)], 0, unfold)),
        )
        for section, changes in group_by(diff.changes, lambda change: change.section).items()
        if any(map(_is_different, changes))
    )


def _is_different(change: Change) -> bool:
    return change.status is not Status.IDENTICAL


def _make_fold_key(change: Change) -> object:
    return (change.kind, change.status, describe_change(change), change.values is None, choose_mood(change))


def _build_lines(nodes: Sequence[tree.TreeNode[Change]], depth: int, unfold: bool) -> list[Line]:
    """Return the lines for the children of equal modules. A line covers the children of one name in all `nodes`."""
    lines: list[Line] = []
    indent = "  " * depth
    for name, names in tree.group_siblings(nodes[0], _make_fold_key, unfold):
        children = [node.children[child_name] for node in nodes for child_name in names]
        own_changes = [
            child.own_item for child in children if child.own_item is not None and _is_different(child.own_item)
        ]
        changes_below = [change for child in children for change in child.list_descendants()]
        if own_changes:
            lines.append(_build_leaf_line(indent, name, own_changes))
        if any(map(_is_different, changes_below)):
            lines.append(_build_line(indent + name, _summarize_kinds(changes_below), changes_below, "", "strong"))
            lines.extend(_build_lines(children, depth + 1, unfold))
    return lines


def _build_leaf_line(indent: str, name: str, own_changes: Sequence[Change]) -> Line:
    before = tuple(format_fqn(change.renamed_from or "") for change in own_changes if change.status is Status.RENAMED)
    remarks = (
        describe_change(own_changes[0]),
        *describe_remarks(own_changes),
        f"was {join_names(before)}" if before else "",
    )
    heading = f"{indent}{STATUS_LETTERS[own_changes[0].status]} {name}"
    count = format_changed_count(own_changes)
    remark = ", ".join(filter(None, remarks))
    return _build_line(heading, f"values {count}" if count else "", own_changes, remark, choose_mood(own_changes[0]))


def _build_line(heading: str, summary: str, changes: Sequence[Change], remark: str, mood: str) -> Line:
    combined = combine_relative_change(changes)
    relative = "" if combined is None else format_number(combined, digits=2)
    return Line((heading, summary, relative, draw_bar(combined)), remark, mood)


def has_new_not_finite(change: Change) -> bool:
    """Return True if the new values have more NaN or more infinities than the old values."""
    delta = change.values
    return delta is not None and (delta.nan_after > delta.nan_before or delta.inf_after > delta.inf_before)


def choose_mood(change: Change) -> str:
    """Return the word that sets the colour of a change, as in git, or "bad" for new NaN or infinities."""
    return "bad" if has_new_not_finite(change) else MOODS.get(change.status, "")


def _summarize_kinds(changes: Sequence[Change]) -> str:
    """Format how many tensors of each kind differ, and changes of ties: `3/12 parameters, 1 tie lost (2 tensors)`."""
    parts = []
    for kind in Kind:
        same_kind = [change for change in changes if change.kind is kind]
        if same_kind:
            differing_count = sum(_is_different(change) and not is_tie_only(change) for change in same_kind)
            parts.append(f"{differing_count:,}/{tree.format_kind_count(len(same_kind), kind.value)}")
    return ", ".join([*parts, *describe_ties(changes)])
