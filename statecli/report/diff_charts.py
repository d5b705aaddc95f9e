"""Charts of a diff: the change of each parameter or layer, and histograms of differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from statecli.commands.diff.result import Change, Diff, Field
from statecli.core.grouping import group_by
from statecli.core.model_state import Kind, TensorInfo, TensorKey
from statecli.report import Bars, Spread, change_text
from statecli.report.change_text import format_name
from statecli.report.diff_view import list_damaged, needs_sections
from statecli.report.layer_changes import list_module_changes, split_module

#: A tensor with its measure, and the text to show if there is no measure.
_Measured = tuple[Change | TensorInfo, tuple[float, str]]


def build_charts(diff: Diff) -> tuple[Bars | Spread, ...]:
    """Return the charts: the changes over depth if values were compared, and the histograms."""
    has_sections = needs_sections(diff)
    spreads = [
        Spread(
            format_name(histogram.fqn, histogram.section, has_sections),
            histogram.edges,
            histogram.counts,
            "after - before",
        )
        for histogram in diff.histograms
    ]
    if not any(change.values is not None for change in diff.changes if change.kind is Kind.PARAMETER):
        return tuple(spreads)
    measures = _measure_parameters(diff)
    modules = {(item.section, *split_module(item.fqn)) for item, _ in measures}
    layers = Counter((section, stack) for section, stack, _ in modules if stack)
    return (_draw_modules(diff, measures) if max(layers.values(), default=0) > 1 else _draw(diff, measures), *spreads)


def _draw(diff: Diff, measures: Sequence[_Measured]) -> Bars:
    """Return a bar for each parameter."""
    has_sections = needs_sections(diff)
    names = tuple(format_name(item.fqn, item.section, has_sections) for item, _ in measures)
    values, words = zip(*(measure for _, measure in measures), strict=True)
    title = "change over depth: one bar per parameter, zero for equal values"
    tensors = tuple(item.key for item, _ in measures)
    return Bars(title, names, values, "relative L2 change", words, tensors)


def _draw_modules(diff: Diff, measures: Sequence[_Measured]) -> Bars:
    """Return a bar for each layer, and for each module outside of the layers. A bar covers all parameters of a module.

    A bar leads to the parameter with the largest difference.
    """
    has_sections = needs_sections(diff)
    changes = {(module.section, module.name): module for module in list_module_changes(diff.changes)}
    groups = group_by(measures, lambda pair: (pair[0].section, split_module(pair[0].fqn)[1]))
    bars: list[tuple[str, float, str, TensorKey, bool]] = []
    for (section, name), rows in groups.items():
        change = changes.get((section, name))
        value, word = _combine_measures([measure for _, measure in rows], change.relative_l2 if change else None)
        largest = max((item for item, _ in rows), key=_measure_difference)
        is_unusual = change is not None and change.times_median is not None
        label = format_name(name, section, has_sections)
        bars.append((label, value, word, largest.key, is_unusual))
    labels, values, words, tensors, unusual = zip(*bars, strict=True)
    title = "change over depth: one bar per layer for all its parameters together; zero for equal values"
    return Bars(title, labels, values, "relative L2 change", words, tensors, unusual)


def _combine_measures(measures: Sequence[tuple[float, str]], combined: float | None) -> tuple[float, str]:
    """Return a module's combined change (NaN if a parameter has NaN), and a text that counts unmeasured parameters."""
    if any(math.isnan(value) for value, _ in measures):
        return math.nan, ""
    missing_counts = Counter(word for _, word in measures if word)
    if len(measures) == missing_counts.total():
        return math.inf, measures[0][1]
    return combined or 0.0, ", ".join(f"{count:,} {word}" for word, count in missing_counts.items())


def _measure_difference(item: Change | TensorInfo) -> float:
    delta = item.values if isinstance(item, Change) else None
    return (delta.l2 or 0.0) if delta is not None else 0.0


def _measure_parameters(diff: Diff) -> list[_Measured]:
    """Return the parameters that both checkpoints have, in order, each with its relative change."""
    measures: list[_Measured] = [
        (change, _measure_change(change))
        for change in diff.changes
        if change.before is not None and change.after is not None
    ]
    if damaged_tensors := list_damaged(diff):
        measures += [(tensor, (math.inf, "not compared")) for tensor in damaged_tensors]
        positions = {tensor.key: n for n, tensor in enumerate(diff.after.tensors)}
        measures.sort(key=lambda pair: positions.get(pair[0].key, len(positions)))
    return [pair for pair in measures if pair[0].kind is Kind.PARAMETER]


def _measure_change(change: Change) -> tuple[float, str]:
    """Return a relative change, or infinity and the reason why it is unknown. New NaN or infinities give NaN."""
    delta = change.values
    if Field.SHAPE in change.fields:
        return math.inf, "of another shape"
    if delta is None:
        return (0.0, "") if change.not_compared is None else (math.inf, "not compared")
    if delta.max_abs is None or change_text.has_new_not_finite(change):
        return math.nan, ""
    if delta.relative_l2 is None:
        return math.inf, "no relative change, because all old values are zero"
    return delta.relative_l2, ""
