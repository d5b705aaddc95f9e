"""The flat table of a diff: a row for each change, and a column for each fact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from statecli.commands.diff import settings
from statecli.commands.diff.result import Change, Diff, Status
from statecli.core.model_state import TensorInfo
from statecli.core.units import format_shape, format_yes_no
from statecli.report import Cell, ReportColumn, Rows, Table
from statecli.report.change_order import arrange_changes
from statecli.report.change_text import DELTA_COLUMNS, describe_change, describe_remarks
from statecli.report.diff_view import DiffView, needs_sections, select_listed
from statecli.report.row_order import format_hidden_count, limit_by_group
from statecli.report.transformation_text import describe_transformation

_SIDE_FIELDS = ("dtype", "shape", "requires_grad", "device")
#: A column, and the function that returns its cell for a change.
_Measure = tuple[ReportColumn, Callable[[Change], Cell]]
#: Measures of `DELTA_COLUMNS` in plain text, and with -v.
_MAIN_MEASURES = ("elements", "changed", "relative_l2", "max_abs")
_VERBOSE_MEASURES = (*_MAIN_MEASURES, "mean_abs", "l2", "cosine", "rank")
#: Largest number of characters of a metadata value in the table.
MAX_TABLE_SCALAR_CHARACTERS = 10_000


def build_table(diff: Diff, view: DiffView, *, with_details: bool = True) -> Table:
    """Return the flat table. Without `with_details`, omit the columns that only programs need."""
    changes, has_sections = _list_shown_changes(diff, view), needs_sections(diff)
    scalars = diff.scalars[: view.lines] if view.top is None else ()
    failures = diff.broken[: view.lines]
    has_remarks = bool(diff.scalars or diff.broken) or any(map(_describe_remark, changes))
    measures = [
        *_list_table_columns(changes, has_sections, view.verbose),
        (ReportColumn("change", detail=not has_remarks), _describe_remark),
    ]
    if not with_details:
        measures[0] = (ReportColumn("status"), _describe_table_status)
    columns = tuple(column for column, _ in measures if with_details or not column.detail)
    cells = tuple(cell for column, cell in measures if with_details or not column.detail)
    other_rows: list[dict[str, Cell]] = [
        {
            "status": scalar.status.value,
            "kind": "metadata",
            "fqn": scalar.key,
            "change": settings.format_values(scalar, MAX_TABLE_SCALAR_CHARACTERS),
        }
        for scalar in scalars
    ]
    other_rows += [
        {
            "status": "not compared",
            "section": failure.section or None,
            "fqn": failure.fqn,
            "change": failure.message,
        }
        for failure in failures
    ]

    def row(item: Change | dict[str, Cell]) -> tuple[Cell, ...]:
        if isinstance(item, dict):
            return tuple(item.get(column.name) for column in columns)
        return tuple([cell(item) for cell in cells])

    return Table(columns, Rows(row, [*changes, *other_rows]))


def _describe_table_status(change: Change) -> str:
    """Return the status as the table shows it. An identical tensor is `unchanged`, as in the option `--unchanged`."""
    return "unchanged" if change.status is Status.IDENTICAL else change.status.value


def _list_table_columns(rows: Sequence[Change], has_sections: bool, verbose: bool) -> Iterator[_Measure]:
    """Yield all columns except the last, `change`. Columns that readers rarely need are marked as details."""
    has_values = any(change.values is not None for change in rows)
    visible_columns = (_VERBOSE_MEASURES if verbose else _MAIN_MEASURES) if has_values else ()
    yield ReportColumn("status"), lambda change: change.status.value
    yield ReportColumn("kind"), lambda change: change.kind.value
    if has_sections:
        yield ReportColumn("section"), lambda change: change.section or None
    yield ReportColumn("fqn"), attrgetter("fqn")
    yield (
        ReportColumn("renamed_from", detail=all(change.renamed_from is None for change in rows)),
        attrgetter("renamed_from"),
    )
    yield (
        ReportColumn("fields", detail=True),
        lambda change: ",".join([field.value for field in change.fields]) or None,
    )
    for name in _SIDE_FIELDS:
        for side in ("before", "after"):
            yield ReportColumn(f"{name}_{side}", detail=True), partial(_get_side_field, name, side)
    for name in DELTA_COLUMNS:
        yield ReportColumn(name, right=True, detail=name not in visible_columns), partial(_get_measure, name)
    yield ReportColumn("first", detail=not (has_values and verbose)), _format_first_index
    yield ReportColumn("not_compared", detail=True), attrgetter("not_compared")


def _get_measure(name: str, change: Change) -> Cell:
    number: Cell = getattr(change.values, name, None)
    return number


def _format_first_index(change: Change) -> Cell:
    values = change.values
    return format_shape(values.first) if values is not None and values.first is not None else None


def _describe_remark(change: Change) -> str | None:
    remarks = (*describe_remarks([change]), describe_transformation(change))
    return ", ".join(filter(None, (describe_change(change), *remarks))) or None


def _get_side_field(name: str, side: str, change: Change) -> Cell:
    tensor: TensorInfo | None = getattr(change, side)
    if tensor is None:
        return None
    if name == "shape":
        return format_shape(tensor.shape)
    value: Cell = getattr(tensor, name)
    return format_yes_no(tensor.requires_grad) if name == "requires_grad" else value


def _list_shown_changes(diff: Diff, view: DiffView) -> Sequence[Change]:
    return limit_by_group(arrange_changes(select_listed(diff, view), view), view)


def describe_hidden_rows(diff: Diff, view: DiffView) -> tuple[str, ...]:
    """Return a line that counts the hidden rows of the flat table. A page has such a line in each of its groups."""
    if view.tree or not view.hides_rows:
        return ()
    hidden_count = len(select_listed(diff, view)) - len(_list_shown_changes(diff, view))
    if view.lines is not None:
        hidden_count += sum(max(0, count - view.lines) for count in (len(diff.scalars), len(diff.broken)))
    return format_hidden_count(hidden_count, view)
