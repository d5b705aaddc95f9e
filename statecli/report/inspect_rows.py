"""Human-readable rows of a tensor list: groups by section and kind, in which repeated layers share a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.commands.inspect.quantized_rows import describe_defect
from statecli.commands.inspect.run import Inspection
from statecli.core import sizes
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import REGISTERED_KINDS, Evidence, Kind, Settings, TensorInfo
from statecli.core.output import TensorOrder
from statecli.core.units import (
    KIND_NOUNS,
    MOMENT_FIELDS,
    format_fqn,
    format_kind,
    format_number,
    format_section,
    format_shape,
    format_size,
    plural,
)
from statecli.report import Group, Line, ReportColumn, RowView, fold, folder_settings
from statecli.report.inspect_totals import count_hidden_parts, describe_count, has_stats, list_weights_by_row
from statecli.report.row_order import arrange_tensors
from statecli.report.tensor_remarks import choose_mood, describe_remark, describe_status

if TYPE_CHECKING:
    from statecli.core.logical_weights import LogicalWeight

#: Fields that decide the line of a tensor, besides its name: cells, remark, mood.
_LINE_FIELDS = attrgetter(
    *("dtype", "shape", "elements", "nbytes", "kind", "evidence", "persistent", "device", "requires_grad", "tied_to"),
    *("saved", "moves", "origin", "layout", "note", "fix", "after"),
)
#: Cells of a tensor without statistics.
_NO_MOMENTS = dict.fromkeys(MOMENT_FIELDS, "-")


def list_columns(inspection: Inspection, view: RowView) -> tuple[ReportColumn, ...]:
    """Return the columns of human-readable outputs, without columns that are empty in every row."""
    tensors, is_moved = inspection.state.tensors, inspection.to is not None
    with_stats = has_stats(inspection)
    columns = [ReportColumn("name"), ReportColumn("dtype", shared_format="all {}"), ReportColumn("shape")]
    if (inspection.weights or any(row.dtype in BLOCK_SIZES for row in tensors)) and not is_moved and not with_stats:
        columns.append(ReportColumn("bits", right=True))
    if view.top is not None:
        columns.append(ReportColumn("kind", shared_format="all {}"))
    if not with_stats:
        columns.append(ReportColumn("size", right=True))
    if is_moved or any(tensor.device is not None for tensor in tensors):
        columns.append(ReportColumn("device", shared_format=None if is_moved else "all on {}"))
    if any(tensor.requires_grad is not None for tensor in tensors) and not with_stats:
        columns.append(ReportColumn("grad", shared_format="requires_grad: {}"))
    if with_stats:
        columns.extend(ReportColumn(name, right=True) for name in MOMENT_FIELDS)
    return tuple(columns)


def build_groups(inspection: Inspection, columns: tuple[ReportColumn, ...], view: RowView) -> tuple[Group, ...]:
    """Return the groups of rows, by section and kind. `columns` comes from `list_columns`."""
    state = inspection.state
    tensors = arrange_tensors(state.tensors, view)
    if view.top is not None:
        return (_build_top_group(tensors, inspection, columns, view),)
    weights = list_weights_by_row(inspection)
    sections: dict[str, dict[Kind | None, list[TensorInfo]]] = {}
    get_group: Callable[[TensorInfo], tuple[str, Kind | None]] = attrgetter("section", "kind")
    if weights:
        get_group = lambda t: (t.section, None if t.key in weights else t.kind)  # noqa: E731
    for (section, kind), run in groupby(tensors, key=get_group):
        sections.setdefault(section, {}).setdefault(kind, []).extend(run)
    return tuple(
        _build_group(section, kind, kinds[kind], inspection, columns, view)
        if kind is not None
        else _build_quantized_group(section, kinds[kind], inspection, columns, view)
        for section, kinds in sections.items()
        for kind in (None, *Kind)
        if kind in kinds
    )


def _build_quantized_group(
    section: str, rows: list[TensorInfo], inspection: Inspection, columns: tuple[ReportColumn, ...], view: RowView
) -> Group:
    """Return the group of quantized weights. With `view.parts`, the tensors of a weight are below its line."""
    weights = list_weights_by_row(inspection)
    count = sum(len(weights[row.key].parts) for row in rows)
    elements = sizes.sum_by_kind(rows)[Kind.PARAMETER.value].elements
    size = sizes.sum_bytes(part for row in rows for part in weights[row.key].parts)
    heading = "quantized weights"
    if len(inspection.state.sections) > 1:
        heading = f"{format_section(section)}: {heading}"
    in_tensors = f" in {plural(count, 'tensor')}" if count > len(rows) else ""
    summary = f"{plural(len(rows), 'weight')}{in_tensors}, {describe_count(elements, 'element')}, {format_size(size)}"
    lines = [line for row in rows for line in _build_weight_lines(row, weights[row.key], columns, view)]
    return Group(heading, summary, tuple(lines if view.unfold else _count_sizes(fold.fold_rows(lines), columns)))


def _count_sizes(folded_lines: Iterable[tuple[Line, list[int]]], columns: Sequence[ReportColumn]) -> Iterator[Line]:
    """Yield the folded lines. A line for several tensors has their number before the size: `3 × 4.1 kB`."""
    size_index = next((i for i, column in enumerate(columns) if column.name == "size"), None)
    for line, positions in folded_lines:
        if size_index is None or len(positions) == 1:
            yield line
            continue
        size = f"{len(positions):,} × {line.cells[size_index]}"
        yield replace(line, cells=(*line.cells[:size_index], size, *line.cells[size_index + 1 :]))


def _build_weight_lines(
    row: TensorInfo, weight: LogicalWeight, columns: tuple[ReportColumn, ...], view: RowView
) -> Iterator[Line]:
    """Yield the line of a quantized weight. With `view.parts`, also yield the lines of its tensors, without remarks."""
    if view.parts:
        row = replace(row, note=describe_defect(weight) or None)
    line = _build_line(row, columns, "", view, shows_doubt=False, is_reported=False)
    yield replace(line, mood="bad") if weight.defect else line
    for part in weight.parts if view.parts and len(weight.parts) > 1 else ():
        line = _build_line(part, columns, "", view, shows_doubt=False, is_reported=False)
        yield replace(line, cells=(f"  {line.cells[0]}", *line.cells[1:]), mood="dim")


def _build_group(
    section: str,
    kind: Kind,
    rows: list[TensorInfo],
    inspection: Inspection,
    columns: tuple[ReportColumn, ...],
    view: RowView,
) -> Group:
    state = inspection.state
    reported = {finding.fqn for finding in inspection.findings}
    total = sizes.sum_by_kind(rows)[kind.value]
    numbers, examples = _number_alike(rows, view, reported)
    is_assumed = kind is Kind.PARAMETER and all(row.evidence is Evidence.ASSUMED for row in examples)
    heading = KIND_NOUNS[kind] + ("?" if is_assumed else "")
    if len(state.sections) > 1:
        heading = f"{format_section(section)}: {heading}"
    elements = describe_count(total.elements, "element")
    summary = f"{plural(total.tensors, 'tensor')}, {elements}, {format_size(total.bytes)}"
    summary += _describe_evidence(examples, inspection.state.metadata)
    live = state.traits.is_class
    statuses = {describe_status(row, live) for row in examples}
    shared_status = statuses.pop() if len(statuses) == 1 else None
    if shared_status:
        summary += f": {shared_status}"
    lines = [
        _build_line(
            row,
            columns,
            "" if shared_status is not None else describe_status(row, live),
            view,
            shows_doubt=not is_assumed,
            is_reported=row.fqn in reported,
        )
        for row in examples
    ]
    names = [row.fqn or format_fqn("") for row in rows]
    if not view.unfold:
        return Group(heading, summary, tuple(_count_sizes(fold.fold_named_rows(names, numbers, lines), columns)))
    tails = [(line.cells[1:], line.remark, line.mood) for line in lines]
    unfolded = (
        Line((name, *cells), remark, mood)
        for name, (cells, remark, mood) in zip(names, map(tails.__getitem__, numbers), strict=True)
    )
    return Group(heading, summary, tuple(unfolded))


def _number_alike(
    tensors: Sequence[TensorInfo], view: RowView, reported: Set[str | None]
) -> tuple[Sequence[int], Sequence[TensorInfo]]:
    """Give the same number to tensors whose lines differ only in the name. Also return one tensor for each number.

    A large model has few different lines.
    """
    if view.verbose or any(t.stats is not None or t.belongs_to is not None or t.fqn in reported for t in tensors):
        return range(len(tensors)), tensors
    number_of: dict[object, int] = {}
    numbers = [number_of.setdefault(fields, len(number_of)) for fields in map(_LINE_FIELDS, tensors)]
    examples = dict(zip(reversed(numbers), reversed(tensors), strict=True))
    return numbers, [examples[number] for number in number_of.values()]


def _build_top_group(
    tensors: Sequence[TensorInfo], inspection: Inspection, columns: tuple[ReportColumn, ...], view: RowView
) -> Group:
    """Return the most important rows as a single group. Each name begins with its section."""
    state = inspection.state
    reported = {finding.fqn for finding in inspection.findings}
    has_sections = len(state.sections) > 1
    weights = list_weights_by_row(inspection)
    lines: list[Line] = []
    for row in tensors:
        qualified_row = replace(row, fqn=f"{row.section}.{row.fqn}") if has_sections and row.section else row
        if (weight := weights.get(row.key)) is not None:
            lines.extend(_build_weight_lines(qualified_row, weight, columns, view))
            continue
        status = describe_status(row, state.traits.is_class)
        lines.append(
            _build_line(qualified_row, columns, status, view, shows_doubt=False, is_reported=row.fqn in reported)
        )
    heading = "first tensors by name" if view.sort is TensorOrder.NAME else "largest tensors"
    size, size_of_all = sizes.sum_bytes(tensors), sizes.sum_bytes(state.tensors)
    share = f", {format_size(size)} of {format_size(size_of_all)}" if size_of_all else ""
    noun = "row" if count_hidden_parts(inspection) else "tensor"
    summary = f"{len(tensors):,} of {plural(len(state.tensors), noun)}{share}"
    return Group(heading, summary, tuple(lines))


def _describe_evidence(rows: Sequence[TensorInfo], settings: Settings) -> str:
    model = "auto" if folder_settings.names_class(settings) else "CLASS"
    words = {
        Evidence.ASSUMED: f"kinds guessed; --model {model} shows the exact kinds",
        Evidence.CONVENTION: "by convention",
        Evidence.OPTIMIZER: "trained by the optimizer",
        Evidence.TYPE: "pickled as nn.Parameter",
    }
    evidence = {row.evidence for row in rows}
    if len(evidence) == 1 and rows[0].kind in REGISTERED_KINDS:
        text = words.get(rows[0].evidence)
        return f" ({text})" if text else ""
    return ""


def _build_line(
    tensor: TensorInfo,
    columns: tuple[ReportColumn, ...],
    status: str,
    view: RowView,
    *,
    shows_doubt: bool,
    is_reported: bool,
) -> Line:
    """Return the line of a tensor. With `shows_doubt`, the remark says if the kind `parameter` is only a guess."""
    is_assumed = tensor.evidence is Evidence.ASSUMED and tensor.kind is Kind.PARAMETER
    cells = {
        "name": format_fqn(tensor.fqn),
        "dtype": tensor.dtype,
        "shape": format_shape(tensor.shape),
        "kind": format_kind(tensor),
        "bits": format_number(tensor.nbytes * 8 / tensor.elements, digits=2) if tensor.elements else "-",
        "size": format_size(tensor.nbytes),
        "device": format_device(tensor),
        "grad": {None: "-", True: "yes", False: "no"}[tensor.requires_grad],
        **_NO_MOMENTS,
    }
    if tensor.stats is not None:
        cells.update((name, format_number(getattr(tensor.stats, name), digits=4)) for name in MOMENT_FIELDS)
    if shows_doubt and is_assumed:
        status = f"{status}, kind guessed" if status else "kind guessed"
    return Line(
        tuple([cells[column.name] for column in columns]),
        describe_remark(tensor, status, view, is_reported=is_reported),
        choose_mood(tensor),
    )


def format_device(tensor: TensorInfo) -> str:
    """Format the device of a tensor and, with `--to`, the device after the move."""
    if tensor.after is None:
        return tensor.device or "-"
    sign = {True: "✓", False: "✗", None: "?"}[tensor.after.followed]
    return f"{tensor.device or '-'} → {tensor.after.device or '-'} {sign}"
