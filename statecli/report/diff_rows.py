"""Human-readable rows of a diff: groups by section and kind, in which repeated layers share a line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from statecli.commands.diff import settings
from statecli.commands.diff.result import Change, Diff, ScalarChange, Status
from statecli.core.grouping import group_by
from statecli.core.model_state import Kind
from statecli.core.output import ChangeOrder
from statecli.core.units import KIND_NOUNS, format_fqn, format_section, format_shape, plural
from statecli.report import Group, Line, ReportColumn, change_text, fold
from statecli.report.bars import draw_bar
from statecli.report.change_order import arrange_changes, order_change
from statecli.report.change_text import (
    BAR_COLUMN,
    STATUS_LETTERS,
    describe_change,
    describe_remarks,
    format_changed_count,
    format_largest_change,
    format_name,
    format_relative_change,
)
from statecli.report.diff_view import DiffView, list_broken, list_damaged, needs_sections, select_listed
from statecli.report.documents.shared import Counts
from statecli.report.tie_changes import describe_ties, is_tie_only
from statecli.report.transformation_text import make_fold_key
from statecli.report.transformations import GROUP_HEADING, select_summarized
from statecli.values.delta import ZERO_BEFORE

#: Columns of a diff without differing values.
_CHANGE_COLUMNS = (ReportColumn("name"), ReportColumn("change"))
_MEASURE_COLUMNS = (
    ReportColumn("name"),
    ReportColumn("values", right=True),
    ReportColumn("max |Δ|", right=True),
    ReportColumn("rel. change", right=True),
    BAR_COLUMN,
)
#: Largest number of characters of a value in a cell. A longer value is in the remark, to keep the column narrow.
MAX_CELL_CHARACTERS = 40
#: Largest number of characters of a metadata value in a human-readable row.
MAX_SCALAR_CHARACTERS = 60
COUNT_NOUNS = {
    Kind.PARAMETER.value: "parameters",
    Kind.BUFFER.value: "buffers",
    Kind.UNREGISTERED.value: "unregistered tensors",
    Kind.OPTIMIZER.value: "optimizer tensors",
    Kind.OTHER.value: "other tensors",
}


def choose_columns(diff: Diff) -> tuple[ReportColumn, ...]:
    """Return the columns for measures if any values differ, or else only the columns for the change."""
    return _MEASURE_COLUMNS if any(change.values is not None for change in diff.changes) else _CHANGE_COLUMNS


def build_groups(diff: Diff, view: DiffView, columns: tuple[ReportColumn, ...]) -> tuple[Group, ...]:
    """Return the groups of rows, by section and kind. `columns` comes from `choose_columns`."""
    listed_changes = select_listed(diff, view)
    rows = arrange_changes(listed_changes, view)
    if view.top is not None:
        return _build_top_group(rows, len(listed_changes), columns, view, has_sections=needs_sections(diff))
    has_sections = needs_sections(diff)
    roles = group_by(rows, lambda change: (change.section, change.kind))
    first = {section: n for n, section in reversed(list(enumerate(section for section, _ in roles)))}
    kinds = list(Kind)
    ordered_roles = sorted(roles, key=lambda role: (first[role[0]], kinds.index(role[1])))
    both_sides = Counter(
        (change.section, change.kind)
        for change in diff.changes
        if change.before is not None and change.after is not None
    )
    both_sides.update((tensor.section, tensor.kind) for tensor in list_damaged(diff))
    summarized_ids = select_summarized(diff.changes) if _is_folded(view) else frozenset()
    groups = []
    for section, kind in ordered_roles:
        heading = (f"{format_section(section)}: " if has_sections else "") + KIND_NOUNS[kind]
        summary = _summarize_group(roles[section, kind], both_sides[section, kind])
        listed_changes = [row for row in roles[section, kind] if id(row) not in summarized_ids]
        lines = _build_lines(listed_changes, columns is _MEASURE_COLUMNS, view)
        hidden_count = len(roles[section, kind]) - len(listed_changes)
        if hidden_count and listed_changes:
            empty = ("",) * (len(columns) - 1)
            lines.append(
                Line(
                    (f"{hidden_count:,} more, described in {GROUP_HEADING!r} (--all lists each)", *empty),
                    "",
                    "dim",
                    (math.inf,),
                )
            )
        elif hidden_count:
            summary += f", described in {GROUP_HEADING!r} (--all lists each)"
        groups.append(Group(heading, summary, tuple(lines)))
    return tuple(groups)


def _build_top_group(
    rows: Sequence[Change], count: int, columns: tuple[ReportColumn, ...], view: DiffView, *, has_sections: bool
) -> tuple[Group, ...]:
    """Return the most important differences as a single group, or () for an empty list of differences."""
    qualified_rows = [replace(row, fqn=format_name(row.fqn, row.section, has_sections)) for row in rows]
    lines = _build_lines(qualified_rows, columns is _MEASURE_COLUMNS, view)
    heading = "largest changes"
    if view.sort is not None and view.sort is not ChangeOrder.CHANGE:
        heading = "first changes by name" if view.sort is ChangeOrder.NAME else "largest changed tensors"
    return (Group(heading, f"{len(rows):,} of {plural(count, 'difference')}", tuple(lines)),) if rows else ()


def _summarize_group(rows: Sequence[Change], common_count: int) -> str:
    counts = Counter(change.status.value for change in rows)
    identical = common_count - counts[Status.CHANGED.value] - counts[Status.RENAMED.value]
    numbers = Counts(**{**counts, Status.IDENTICAL.value: identical})
    return format_counts(numbers, "", rows) or f"{common_count:,} unchanged"


def format_counts(counts: Counts, noun: str, rows: Iterable[Change]) -> str:
    """Format `3 of 201 parameters changed, 2 added, 1 tie lost (2 tensors)`: 201 parameters are in both checkpoints.

    `rows` are the changes; tensors that differ only in their ties are counted as ties, not as changed.
    """
    rows = tuple(rows)
    ties, equal = describe_ties(rows), sum(map(is_tie_only, rows))
    common_count = counts.changed + counts.renamed + counts.identical
    counts = replace(counts, changed=counts.changed - equal)
    texts = [
        f"{number:,} {word}" for word in ("changed", "renamed", "added", "removed") if (number := getattr(counts, word))
    ]
    if not texts:
        return ", ".join(ties)
    if common_count and (counts.changed or counts.renamed):
        count, word = texts[0].split()
        texts[0] = f"{count} of {common_count:,}{' ' * bool(noun)}{noun} {word}"
    elif noun:
        count, word = texts[0].split()
        texts[0] = f"{count} {noun.removesuffix('s') if count == '1' else noun} {word}"
    return ", ".join([*texts, *ties])


def format_statuses(statuses: Iterable[Status]) -> str:
    """Format the number of changes by status: `2 changed, 1 added`."""
    counts = Counter(statuses)
    return ", ".join(f"{counts[status]:,} {status.value}" for status in Status if counts[status])


def _build_lines(rows: Sequence[Change], is_measured: bool, view: DiffView) -> list[Line]:
    """Return the lines of the changes. Repeated layers share a line if the same properties changed, such as the dtype.

    Each change has its own line if the view orders them (`--sort`, `--top`, `-n`), unfolds them or is verbose.
    """
    # The old name of a rename is in the remark, because folding replaces numbers in a remark that are also in the name.
    # A number at the start of the old name is replaced too, because it follows a bracket. Prefixes and maps are in a
    # note.
    unfolded = [
        Line(
            (
                format_fqn(change.fqn),
                STATUS_LETTERS[change.status],
                describe_change(change) if change.status is not Status.IDENTICAL else "unchanged",
                f"{_format_shapes(change)} {make_fold_key(change)}",
            ),
            f"[{format_fqn(change.renamed_from or '') if change.status is Status.RENAMED else ''}",
            change_text.choose_mood(change),
        )
        for change in rows
    ]
    separate = [(line, [n]) for n, line in enumerate(unfolded)]
    folded_lines = _fold_without_outliers(unfolded, rows) if _is_folded(view) else separate
    lines = [
        replace(
            _build_line(line, [rows[n] for n in positions], is_measured, view),
            tensors=tuple(rows[n].key for n in positions),
        )
        for line, positions in folded_lines
    ]
    if not is_measured or view.hides_rows or view.sort is not None:
        return lines
    keys = [min(order_change(rows[n]) for n in positions) for _, positions in folded_lines]
    return [replace(line, sort_key=key) for line, key in zip(lines, keys, strict=True)]


def _is_folded(view: DiffView) -> bool:
    return not (view.unfold or view.verbose or view.hides_rows or view.sort is not None)


def _fold_without_outliers(lines: list[Line], rows: Sequence[Change]) -> list[tuple[Line, list[int]]]:
    """Join the lines of repeated layers. A layer whose change is several times larger gets its own line."""
    folded_rows = fold.fold_rows(lines)
    outliers = {
        id(row) for _, positions in folded_rows for row in change_text.find_outliers([rows[n] for n in positions])
    }
    if not outliers:
        return folded_rows
    separate = [
        replace(line, cells=(*line.cells[:-1], f"{line.cells[-1]} outlier")) if id(row) in outliers else line
        for line, row in zip(lines, rows, strict=True)
    ]
    return fold.fold_rows(separate)


def _format_shapes(change: Change) -> str:
    """Return the shapes in both checkpoints as text, so that layers of different shapes do not share a line."""
    return " ".join(format_shape(tensor.shape) for tensor in (change.before, change.after) if tensor is not None)


def _build_line(line: Line, rows: list[Change], is_measured: bool, view: DiffView) -> Line:
    fqn, letter, text, _ = line.cells
    before = line.remark.removeprefix("[")
    name = f"{letter} {before} → {fqn}" if before else f"{letter} {fqn}"
    oddities = describe_remarks(rows, view.verbose)
    if not is_measured:
        return Line((name, text), ", ".join(oddities), line.mood)
    values = change_text.list_relative_changes(rows)
    without_measure = "-"
    if ZERO_BEFORE in oddities and not values:
        without_measure = "from zero"
        oddities.remove(ZERO_BEFORE)
    outlier_text = "changed more than the other layers" if line.cells[-1].endswith(" outlier") else ""
    remark = ", ".join(filter(None, (text, *oddities, outlier_text)))
    if all(row.values is None for row in rows):
        return Line((name, "", "", "", ""), remark, line.mood)
    measures = (format_relative_change(values) or without_measure, draw_bar(max(values, default=None)))
    cells = (name, format_changed_count(rows), format_largest_change(rows), *measures)
    return Line(cells, remark, line.mood)


def build_settings_group(scalars: Sequence[ScalarChange], columns: tuple[ReportColumn, ...], view: DiffView) -> Group:
    """Return the group that lists the changed metadata."""
    lines = [_build_scalar_line(scalar, columns) for scalar in scalars]
    summary = format_statuses(scalar.status for scalar in scalars)
    return Group("metadata", summary, tuple(lines if view.unfold else fold.fold_lines(lines)))


def build_broken_group(diff: Diff, columns: tuple[ReportColumn, ...], view: DiffView) -> Group:
    """Return the group of the tensors that could not be compared, each with its reason."""
    empty = ("",) * (len(columns) - 1)
    lines = [Line((f"? {failure.name}", *empty), failure.message, "bad") for failure in list_broken(diff)]
    summary = plural(len(lines), "tensor")
    return Group("not compared", summary, tuple(lines if view.unfold else fold.fold_lines(lines)))


def _build_scalar_line(scalar: ScalarChange, columns: tuple[ReportColumn, ...]) -> Line:
    name, mood = f"{STATUS_LETTERS[scalar.status]} {scalar.key}", change_text.MOODS.get(scalar.status, "")
    text = settings.format_values(scalar, MAX_SCALAR_CHARACTERS)
    if columns is _CHANGE_COLUMNS and len(text) <= MAX_CELL_CHARACTERS:
        return Line((name, text), mood=mood)
    return Line((name, *("" for _ in columns[1:])), text, mood)
