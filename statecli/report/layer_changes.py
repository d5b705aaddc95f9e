"""The layer of a stack that changed many times more than its siblings: the news of a diff in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from statecli.commands.diff.result import Change
from statecli.core.model_state import Kind
from statecli.core.units import format_fqn, plural
from statecli.report.change_text import combine_relative_change

#: Layers of a stack that are enough to say what is usual, and how many times more than their median is news.
MIN_LAYERS = 4
MIN_RATIO = 10.0


def describe_largest_layers(changes: Iterable[Change]) -> list[str]:
    """Return `layers.7 changed 101 times more than the median of 40 layers` for each stack with such a layer."""
    return [text for stack, layers in _group_layers(changes).items() if (text := _describe_stack(stack, layers))]


def _group_layers(changes: Iterable[Change]) -> dict[str, dict[str, list[Change]]]:
    """Return the changed parameters by the name before the first number, and by this number."""
    stacks: dict[str, dict[str, list[Change]]] = {}
    for change in changes:
        if change.kind is not Kind.PARAMETER or change.values is None:
            continue
        parts = change.fqn.split(".")
        at = next((n for n, part in enumerate(parts[:-1]) if part.isascii() and part.isdecimal()), None)
        if at is not None:
            stacks.setdefault(".".join(parts[:at]), {}).setdefault(parts[at], []).append(change)
    return stacks


def _describe_stack(stack: str, layers: Mapping[str, Sequence[Change]]) -> str:
    sizes = {number: size for number, rows in layers.items() if (size := combine_relative_change(rows)) is not None}
    ordered = sorted(sizes.values())
    median = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
    if len(sizes) < MIN_LAYERS or not median:
        return ""
    unusual = sorted((n for n in sizes if sizes[n] >= MIN_RATIO * median), key=lambda n: -sizes[n])
    if not unusual or len(unusual) > len(sizes) // MIN_LAYERS:
        return ""
    name = format_fqn(".".join(filter(None, (stack, unusual[0]))))
    ratio = f"{sizes[unusual[0]] / median:,.0f}"
    more = f", and {plural(len(unusual) - 1, 'other layer')} at least {MIN_RATIO:.0f} times" if len(unusual) > 1 else ""
    return f"{name} changed {ratio} times as much as the median of {len(sizes):,} layers{more}"
