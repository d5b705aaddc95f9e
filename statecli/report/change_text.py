"""One change in words and numbers, and the sums of many by module (`--tree`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from statecli.commands.diff.result import Change, Diff, Field, Status
from statecli.core.state import Kind, TensorInfo
from statecli.core.units import (
    draw_bar,
    format_count,
    format_flag,
    format_fqn,
    format_number,
    format_shape,
    format_size,
    join_names,
    plural,
)
from statecli.report import Column, Group, Line, tree
from statecli.values.delta import Delta

#: As git writes them.
LETTERS = {Status.ADDED: "A", Status.REMOVED: "D", Status.CHANGED: "M", Status.RENAMED: "R", Status.IDENTICAL: " "}

MOODS = {Status.ADDED: "good", Status.REMOVED: "bad", Status.RENAMED: "info"}

#: The fields of `Delta` that have a column in the flat table.
NUMBERS = (
    "elements",
    "changed",
    "relative_l2",
    "max_abs",
    "mean_abs",
    "l2",
    "cosine",
    "nan_before",
    "nan_after",
    "inf_before",
    "inf_after",
    "left_out",
)

#: Significant digits of a statistic for people.
DIGITS = 3


def side(fqn: str, section: str, sectioned: bool) -> str:
    """A name, with its section before it where there is more than one."""
    return f"{section}.{format_fqn(fqn)}" if sectioned and section else format_fqn(fqn)


def what(change: Change) -> str:
    """What changed, but for the numbers of its values: equal for layers that changed alike."""
    before, after = change.before, change.after
    if before is None or after is None:
        one = before or after
        return tensor_text(one) if one is not None else ""
    return ", ".join(_field(field, before, after) for field in change.fields if field is not Field.VALUES)


def tensor_text(tensor: TensorInfo) -> str:
    """`float32 [2,3], 24 B`"""
    return f"{tensor.dtype} {format_shape(tensor.shape)}, {format_size(tensor.nbytes)}"


def _field(field: Field, before: TensorInfo, after: TensorInfo) -> str:
    if field is Field.TYING:
        return "now tied" if not before.tied_to else "no longer tied" if not after.tied_to else "tied otherwise"
    sides = [_FACTS[field](tensor) for tensor in (before, after)]
    if sides[0] == sides[1]:
        return f"{field.value} of its inner tensors"
    return f"{field.value} {sides[0]} → {sides[1]}"


def _shape(tensor: TensorInfo) -> str:
    """A nested tensor has none, but its parts have."""
    parts = "" if tensor.shape else ", ".join(f"{name} {format_shape(part.shape)}" for name, part in tensor.parts)
    return parts or format_shape(tensor.shape)


_FACTS: dict[Field, Callable[[TensorInfo], str]] = {
    Field.DTYPE: lambda t: t.dtype,
    Field.SHAPE: _shape,
    Field.KIND: lambda t: t.kind.value,
    Field.REQUIRES_GRAD: lambda t: format_flag(t.requires_grad),
    Field.DEVICE: lambda t: t.device or "-",
}


def values_text(rows: Sequence[Change]) -> str:
    """`12/4,096`, `all 4,096` or `all 2.35 M but 61`: elements that differ, of all, in these tensors together."""
    deltas = _deltas(rows)
    if not deltas:
        return ""
    differ, of = sum(one.changed for one in deltas), sum(one.elements for one in deltas)
    if _count(differ) != _count(of):
        return f"{_count(differ)}/{_count(of)}"
    return f"all {_count(of)}" + (f" but {_count(of - differ)}" if differ < of else "")


def _count(elements: int) -> str:
    return f"{elements:,}" if elements < 1_000_000 else format_count(elements)


def largest_text(rows: Sequence[Change]) -> str:
    """The largest |Δ| in these tensors."""
    return format_number(max((one.max_abs for one in _measured(rows) if one.max_abs is not None), default=None), DIGITS)


def relative(rows: Sequence[Change]) -> list[float]:
    """The relative change of each of them that has one."""
    return [one.relative_l2 for one in _measured(rows) if one.relative_l2 is not None]


def together(rows: Sequence[Change]) -> float | None:
    """The relative L2 change of these tensors taken as one; of those of which both norms are known."""
    known = [(one.l2, one.relative_l2) for one in _measured(rows) if one.l2 and one.relative_l2]
    if not known:
        return max(relative(rows), default=None)
    most = max(norm for norm, _ in known)  # in parts of it the norms of before stay within float64
    difference = math.hypot(*(norm / most for norm, _ in known))
    return difference / math.hypot(*(norm / most / ratio for norm, ratio in known))


def _measured(rows: Sequence[Change]) -> list[Delta]:
    """Those whose numbers say how much changed: a 0 beside a NaN that came up is none of them."""
    return [one for one in _deltas(rows) if one.max_abs or not one.left_out]


def _deltas(rows: Sequence[Change]) -> list[Delta]:
    return [row.values for row in rows if row.values is not None]


def relative_text(values: Sequence[float]) -> str:
    """`0.0012`, or `0.0012..0.03` for several."""
    texts = [format_number(value, digits=2) for value in (min(values), max(values))] if values else []
    return "..".join(dict.fromkeys(texts))


_NOT_NUMBERS = (("NaN", ("nan_before", "nan_after")), ("Inf", ("inf_before", "inf_after")))


def _has_not_numbers(delta: Delta) -> bool:
    return bool(delta.nan_before or delta.nan_after or delta.inf_before or delta.inf_after)


def odd(rows: Sequence[Change], verbose: bool = False) -> list[str]:
    """NaN and infinities, what could not be told, and what it is tied to."""
    deltas = _deltas(rows)
    parts: list[str] = []
    for word, counts in _NOT_NUMBERS if any(map(_has_not_numbers, deltas)) else ():
        before, after = (sum(getattr(delta, count) for delta in deltas) for count in counts)
        if before or after:
            parts.append(f"{word} {before:,} → {after:,}")
    parts.extend(dict.fromkeys(delta.reason for delta in deltas if delta.reason))
    untold = (row.not_compared for row in rows if row.not_compared and Field.SHAPE not in row.fields)
    parts.extend(dict.fromkeys(f"values not compared: {reason}" for reason in untold))
    if len(rows) == 1:
        parts.extend(_tying(rows[0]))
        parts.extend(_more(rows[0]) if verbose else ())
    return parts


def _tying(change: Change) -> list[str]:
    if Field.TYING not in change.fields or change.before is None or change.after is None:
        return []
    return [
        f"{word} {join_names(tensor.tied_to)}"
        for word, tensor in (("was", change.before), ("=", change.after))
        if tensor.tied_to
    ]


def _more(change: Change) -> list[str]:
    renamed = change.renamed_from is not None and change.status is not Status.RENAMED
    return [f"was {change.renamed_from}"] * renamed + (_statistics(change.values) if change.values else [])


def _statistics(delta: Delta) -> list[str]:
    parts = [f"first {format_shape(delta.first)}"] if delta.first is not None else []
    told = (("mean |Δ|", delta.mean_abs), ("L2", delta.l2), ("cosine", delta.cosine))
    parts.extend(f"{word} {format_number(value, 6)}" for word, value in told if value is not None)
    return parts + ([f"{plural(delta.left_out, 'position')} left out"] if delta.left_out else [])


# Sums by module.

COLUMNS = (Column("module"), Column("changed"), Column("combined rel. change", right=True), Column(""))


def groups(diff: Diff, unfold: bool) -> tuple[Group, ...]:
    """One tree a section, of the modules in which something differs."""
    sections: dict[str, list[Change]] = {}
    for change in diff.changes:
        sections.setdefault(change.section, []).append(change)
    return tuple(
        Group(section or "(top level)", _held(changes), tuple(_lines([tree.grown(changes)], 0, unfold)))
        for section, changes in sections.items()
        if any(map(_differs, changes))
    )


def _differs(change: Change) -> bool:
    return change.status is not Status.IDENTICAL


def _alike(change: Change) -> object:
    return (change.kind, change.status, what(change), change.values is None, mood(change))


def _lines(nodes: Sequence[tree.Node[Change]], depth: int, unfold: bool) -> list[Line]:
    """The children of modules that are alike: each line is of all of them."""
    lines: list[Line] = []
    for name, together in tree.siblings(nodes[0], _alike, unfold):
        same = [node.children[one] for node in nodes for one in together]
        own = [one.own for one in same if one.own is not None and _differs(one.own)]
        below = [change for one in same for change in one.below()]
        if own:
            lines.append(_leaf("  " * depth, name, own))
        if any(map(_differs, below)):
            lines.append(Line(("  " * depth + name, _held(below), *_how_much(below)), mood="strong"))
            lines.extend(_lines(same, depth + 1, unfold))
    return lines


def _leaf(indent: str, name: str, own: Sequence[Change]) -> Line:
    before = tuple(format_fqn(one.renamed_from or "") for one in own if one.status is Status.RENAMED)
    remark = ", ".join(filter(None, (what(own[0]), *odd(own), f"was {join_names(before)}" if before else "")))
    return Line((f"{indent}{LETTERS[own[0].status]} {name}", _valued(own), *_how_much(own)), remark, mood(own[0]))


def _how_much(changes: Sequence[Change]) -> tuple[str, str]:
    combined = together(changes)
    return ("" if combined is None else format_number(combined, digits=2), draw_bar(combined))


def mood(change: Change) -> str:
    """How it is meant: as git colours it, and bad where NaN or infinities came up."""
    values = change.values
    if values is not None and (values.nan_after > values.nan_before or values.inf_after > values.inf_before):
        return "bad"
    return MOODS.get(change.status, "")


def _valued(changes: Sequence[Change]) -> str:
    text = values_text(changes)
    return f"values {text}" if text else ""


def _held(changes: Sequence[Change]) -> str:
    """`3/12 parameters, 2/4 buffers`: what differs, of all that there is on either side."""
    parts = []
    for kind in Kind:
        together = [change for change in changes if change.kind is kind]
        if together:
            noun = kind.value if kind in (Kind.PARAMETER, Kind.BUFFER) else ""
            counted = plural(len(together), noun) if noun else f"{len(together):,} {kind.value}"
            parts.append(f"{sum(map(_differs, together)):,}/{counted}")
    return ", ".join(parts)
