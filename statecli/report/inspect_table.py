"""The flat table of a tensor list: a row for each tensor, and a column for each fact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from statecli.commands.inspect.run import Inspection
from statecli.core.model_state import TensorInfo
from statecli.core.units import STATS_FIELDS, format_kind_with_evidence, format_origin, format_shape, format_yes_no
from statecli.report import Cell, CellRows, ReportColumn, RowView, Table
from statecli.report.inspect_totals import has_stats
from statecli.report.row_order import arrange_tensors, format_hidden_count, limit_by_group


class _Measure(msgspec.Struct, frozen=True, gc=False):
    """Column of a table, the function that gets a tensor's value, and the function (or None) that formats it."""

    column: ReportColumn
    get: Callable[[TensorInfo], Any]
    format: Callable[[Any], Cell] | None = None


_TABLE_COLUMNS = (
    _Measure(ReportColumn("kind"), attrgetter("kind", "evidence"), format_kind_with_evidence),
    _Measure(ReportColumn("fqn"), attrgetter("fqn")),
    _Measure(ReportColumn("evidence", detail=True), attrgetter("evidence"), attrgetter("value")),
    _Measure(ReportColumn("persistent", detail=True), attrgetter("persistent"), format_yes_no),
    _Measure(ReportColumn("elements", detail=True), attrgetter("elements")),
    _Measure(ReportColumn("layout", detail=True), attrgetter("layout")),
    _Measure(ReportColumn("origin", detail=True), lambda t: format_origin(t.origin) if t.origin else None),
    _Measure(ReportColumn("dtype"), attrgetter("dtype")),
    _Measure(ReportColumn("shape"), attrgetter("shape"), format_shape),
    _Measure(ReportColumn("bytes", right=True), attrgetter("nbytes")),
    _Measure(ReportColumn("device"), attrgetter("device")),
    _Measure(ReportColumn("requires_grad"), attrgetter("requires_grad"), format_yes_no),
    _Measure(ReportColumn("saved"), attrgetter("saved"), format_yes_no),
    _Measure(ReportColumn("moves"), attrgetter("moves"), format_yes_no),
)


def build_table(inspection: Inspection, view: RowView, *, with_details: bool = True) -> Table:
    """Return the flat table. Without `with_details`, omit the columns that only programs need."""
    measures = [measure for measure in _list_table_columns(inspection) if with_details or not measure.column.detail]
    rows = CellRows([(measure.get, measure.format) for measure in measures], list_shown_tensors(inspection, view))
    return Table(tuple(measure.column for measure in measures), rows)


def _list_table_columns(inspection: Inspection) -> Iterator[_Measure]:
    tensors = inspection.state.tensors
    if len({tensor.section for tensor in tensors}) > 1:
        yield _Measure(ReportColumn("section"), lambda t: t.section or None)
    yield from _TABLE_COLUMNS
    if inspection.to is not None:
        yield _Measure(ReportColumn("after"), lambda t: t.after.device if t.after else None)
        yield _Measure(ReportColumn("followed"), lambda t: format_yes_no(t.after.followed) if t.after else None)
    for name in STATS_FIELDS if has_stats(inspection) else ():
        yield _Measure(ReportColumn(name, right=True), partial(_get_statistic, name))
    yield _Measure(ReportColumn("tied_to"), attrgetter("tied_to"), lambda names: ",".join(names) or None)
    yield _Measure(ReportColumn("note", detail=not any(tensor.note for tensor in tensors)), attrgetter("note"))


def _get_statistic(name: str, tensor: TensorInfo) -> Cell:
    number: Cell = getattr(tensor.stats, name, None)
    return number


def list_shown_tensors(inspection: Inspection, view: RowView) -> Sequence[TensorInfo]:
    """Return the tensors that the view shows, in the order of their rows."""
    return limit_by_group(arrange_tensors(inspection.state.tensors, view), view)


def describe_hidden_tensors(inspection: Inspection, view: RowView) -> tuple[str, ...]:
    """Return the line that counts the hidden tensors of the flat table, or () for a tree or if no tensor is hidden."""
    if view.tree or not view.hides_rows:
        return ()
    hidden_count = len(inspection.state.tensors) - len(list_shown_tensors(inspection, view))
    return format_hidden_count(hidden_count, view)
