"""The report of `statecli inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from statecli import report
from statecli.commands.inspect.quantized_rows import describe_defect, fold_tensors, select_weights
from statecli.commands.inspect.run import Inspection
from statecli.core import quoting, sizes
from statecli.core.escaping import escape
from statecli.core.finding import UNSAFE_GLOBAL, Finding, Severity, select_unreported
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.load_rules import LOAD_HELP
from statecli.core.model_state import REGISTERED_KINDS, Evidence, Kind, ModelState, Oddity, Settings, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.output import TensorOrder
from statecli.core.parameter_or_buffer import match_optimizer_entries
from statecli.core.units import (
    KIND_NOUNS,
    MOMENT_FIELDS,
    STATS_FIELDS,
    format_count,
    format_fqn,
    format_kind,
    format_kind_with_evidence,
    format_number,
    format_origin,
    format_shape,
    format_size,
    format_yes_no,
    plural,
)
from statecli.report import (
    Case,
    CaseOutcome,
    Cell,
    CellRows,
    Fix,
    Group,
    Line,
    Page,
    Problem,
    Report,
    ReportColumn,
    RowView,
    Table,
    Trouble,
    documents,
    fold,
    folder_settings,
    junit_cases,
    rule_texts,
)
from statecli.report.layer_roles import build_curves, list_roles
from statecli.report.row_order import (
    arrange_naturally,
    arrange_tensors,
    format_hidden_count,
    limit_by_group,
    limit_lines,
)
from statecli.report.tensor_remarks import (
    choose_mood,
    describe_list_remark,
    describe_remark,
    describe_status,
    list_problem_words,
)
from statecli.report.unusual_values import list_unusual_values
from statecli.targets.location import add_places

if TYPE_CHECKING:
    from statecli.core.logical_weights import LogicalWeight
    from statecli.report.tensor_list import TensorList


def build_inspect_report(inspection: Inspection, view: RowView, fail_on: Severity = Severity.ERROR) -> Report:
    """Return the report of `inspect`. Findings of `fail_on` or a higher severity set exit status 1."""
    state = inspection.state
    findings = tuple(
        replace(finding, help=finding.help or LOAD_HELP.get(finding.rule))
        for finding in add_places(inspection.findings, state.tensors)
    )
    oddities = [*_describe_target(state), *_list_unreported_oddities(inspection)]
    # The module of the problems is imported only if there are any.
    group_problems = cache(lambda: report.problems.group_findings(findings, state.tensors) if findings else ())
    accepted_notes, accepted_problems = _describe_accepted(inspection, group_problems)
    return Report(
        title=state.target,
        document=lambda: documents.inspect.build_inspect_document(
            inspection, group_problems(), _format_verdict(inspection, group_problems())
        ),
        table=lambda: _build_table(inspection, view),
        short_table=lambda: _build_table(
            _fold_weights(inspection, with_parts=view.parts), view, with_details=view.verbose
        ),
        page=lambda: _build_page(inspection, group_problems(), view),
        page_without_rows=lambda: _build_page(inspection, group_problems(), view, has_rows=False),
        findings=findings,
        outline=view.tree,
        problems=group_problems,
        fail_on=fail_on,
        show_all=view.unfold,
        notes=(*accepted_notes, *fold.limit_notes(oddities, view.verbose)),
        accepted=tuple((entry.finding, entry.reason) for entry in inspection.accepted),
        accepted_problems=accepted_problems,
        rules=lambda: rule_texts.list_rule_texts(group_problems()),
        cases=lambda: _build_cases(inspection, group_problems()),
        troubles=tuple(Trouble(state.target, message) for _, message in inspection.broken),
        charts=lambda: build_curves(state.tensors),
        settings=lambda: folder_settings.group_settings(state.metadata),
        tensor_list=None if view.hides_rows or not state.tensors else lambda: _build_tensor_list(inspection, view),
    )


def _describe_accepted(
    inspection: Inspection, group_problems: Callable[[], tuple[Problem, ...]]
) -> tuple[Sequence[Oddity], int]:
    """Return the notes about accepted findings, and the number of their problems."""
    accepted = inspection.accepted
    if not accepted:
        return (), 0
    problems = report.problems.group_accepted(accepted, inspection.state.tensors, group_problems())
    return tuple(report.problems.build_accepted_notes(accepted, problems)), sum(map(len, problems.values()))


def _build_tensor_list(inspection: Inspection, view: RowView) -> TensorList:
    """Return the list of tensors for a page; names of tied tensors are links there, not remarks."""
    state = _fold_weights(inspection).state
    outliers = {key: text for role in list_roles(state.tensors) for key, text in role.describe_outliers().items()}
    reported = {finding.fqn for finding in inspection.findings}
    live = state.traits.is_class
    owners = match_optimizer_entries(state)

    def describe_row(tensor: TensorInfo) -> str:
        key = (tensor.section, tensor.fqn)
        remark = describe_list_remark(
            tensor, outliers.get(key, ""), view, is_live=live, is_reported=tensor.fqn in reported
        )
        owner = f"of {format_fqn(owners[key])}, by order and shape" if key in owners else ""
        return ", ".join(filter(None, (owner, remark)))

    def list_row_problems(tensor: TensorInfo) -> tuple[str, ...]:
        return list_problem_words(tensor, is_outlier=(tensor.section, tensor.fqn) in outliers)

    rows = arrange_naturally(state.tensors) if view.sort is None else arrange_tensors(state.tensors, view)
    tensor_list = report.tensor_list.build_tensor_list(
        rows,
        describe_row,
        list_row_problems,
        _format_device,
        inspection.distributions,
        _list_other_names(inspection),
        inspection.spectra,
    )
    # The values of a class are initial values.
    return tensor_list if live or tensor_list.stats else replace(tensor_list, values_command=_format_command(state))


def _format_command(state: ModelState) -> str:
    """Return the command that reads the values of a checkpoint."""
    return f"statecli report {escape(quoting.quote_for_shell(state.target))} --stats -o report.html"


def _list_other_names(inspection: Inspection) -> dict[tuple[str, str], list[str]]:
    """Return the names by which `-i` also selects a row: of a quantized weight its tensors, of a tensor its weight."""
    names = {key: [part.fqn for part in weight.parts] for key, weight in _list_weights_by_row(inspection).items()}
    if not names:
        names = {(part.section, part.fqn): [weight.fqn] for weight in inspection.weights for part in weight.parts}
    return names


def _build_cases(inspection: Inspection, problems: Sequence[Problem]) -> tuple[Case, ...]:
    """Return a case for each rule with findings, and for each unreadable tensor."""
    target = inspection.state.target
    unreadable_cases = tuple(Case(target, name, CaseOutcome.ERROR, message) for name, message in inspection.broken)
    return (*unreadable_cases, *junit_cases.build_cases(target, problems, "inspect"))


def _build_page(inspection: Inspection, problems: tuple[Problem, ...], view: RowView, *, has_rows: bool = True) -> Page:
    """Return the page; tensors with accepted findings need no fix. Without `has_rows` the page has no subtitle."""
    fixes = _list_fixes(_select_tensors_to_fix(inspection, view))
    verdict = _format_page_verdict(problems, inspection)
    subtitle = _format_subtitle(inspection) if has_rows else ""
    unusual = list_unusual_values(inspection.state)
    inspection = _fold_weights(inspection)
    state = inspection.state
    columns: tuple[ReportColumn, ...] = ()
    groups: tuple[Group, ...] = ()
    if has_rows:
        columns = report.tree.COLUMNS if view.tree else _list_columns(inspection, view)
        noun = "row" if _count_hidden_parts(inspection) else "tensor"
        groups = (
            report.tree.build_tree_groups(state, view.unfold, noun)
            if view.tree
            else _build_groups(inspection, columns, view)
        )
        groups = tuple(limit_lines(group, view) for group in groups)
    return Page(
        subtitle=subtitle + (f", after a forward with {inspection.inputs}" if has_rows and inspection.inputs else ""),
        columns=columns,
        groups=groups,
        totals=(
            *_format_totals(state, _count_hidden_parts(inspection)),
            *(() if has_rows else _format_hidden(inspection, view)),
            *(sentence.text for sentence in unusual),
            *((verdict,) if problems else ()),
        ),
        fixes=report.problems.select_fixes(fixes, problems),
        problems=problems,
        verdict=verdict,
        unusual=unusual,
    )


def _format_page_verdict(problems: Sequence[Problem], inspection: Inspection) -> str:
    """Return `2 errors: 61 of 63 tensors are not registered`; "" for a checkpoint without problems."""
    state = inspection.state
    owned = {part.fqn for weight in inspection.weights for part in weight.parts}
    count, names = len(state.tensors), [row.fqn for row in state.tensors if row.kind is Kind.UNREGISTERED]
    unregistered = sum(name not in owned for name in names)
    if inspection.accepted and not problems:
        return "all problems are accepted"
    if not problems:
        are_registered = state.traits.is_class and count and not unregistered
        but = f", except {len(names):,} of quantized weights" if names else ""
        return f"no problems: {plural(count, 'tensor')}, all registered{but}" if are_registered else ""
    if calls := _list_unsafe_calls(inspection.findings):
        further_text = f" and {plural(len(calls) - 1, 'more function')}" if len(calls) > 1 else ""
        command = f"statecli audit {escape(quoting.quote_for_shell(state.target))}"
        calls_text = f"loading the file imports or calls {quoting.name(calls[0])}{further_text}"
        return f"{report.problems.format_severities(problems)}: {calls_text}; {command} lists all calls"
    are = "is" if unregistered == 1 else "are"
    registration_text = f": {unregistered:,} of {plural(count, 'tensor')} {are} not registered" if unregistered else ""
    return f"{report.problems.format_severities(problems)}{registration_text}"


def _list_unsafe_calls(findings: Iterable[Finding]) -> list[str]:
    """Return the harmful functions that loading the file imports or calls."""
    return list(dict.fromkeys(finding.about for finding in findings if finding.rule == UNSAFE_GLOBAL and finding.about))


def _format_verdict(inspection: Inspection, problems: Sequence[Problem]) -> str:
    """Return the verdict of the page, or `1,024 tensors`; then `; 1 tensor holds NaN: w`, and the unread values."""
    verdict = _format_page_verdict(problems, inspection) or _count_tensors(inspection)
    unusual = [sentence.text for sentence in list_unusual_values(inspection.state)]
    failure_texts = [f"{plural(len(inspection.broken), 'tensor')} could not be read"] if inspection.broken else []
    return "; ".join((verdict, *unusual, *failure_texts))


def _count_tensors(inspection: Inspection) -> str:
    """Return `1,024 tensors`; of quantized weights also `14 quantized weights in 63 tensors, 90.4 K parameters`."""
    count = plural(len(inspection.state.tensors), "tensor")
    weights = select_weights(inspection.state.tensors, inspection.weights)
    if not weights:
        return count
    part_count = sum(len(weight.parts) for weight in weights)
    parameters = _format_parameters_of(inspection, _count_parameters(inspection))
    return f"{count}: {plural(len(weights), 'quantized weight')} in {plural(part_count, 'tensor')}; {parameters} in all"


def _fold_weights(inspection: Inspection, *, with_parts: bool = False) -> Inspection:
    """Return the inspection with a row for each quantized weight, and with `with_parts` its tensors after the row.

    If the tensors were measured individually, they have the rows.
    """
    if not inspection.weights or inspection.to is not None or _has_stats(inspection):
        return inspection
    tensors = tuple(fold_tensors(inspection.state.tensors, inspection.weights, parts=with_parts))
    return replace(inspection, state=replace(inspection.state, tensors=tensors))


def _describe_target(state: ModelState) -> Iterator[Oddity]:
    yield from (Oddity(name, message) for name, message in folder_settings.describe_settings(state.metadata))
    if not state.tensors and not any(oddity.kind is OddityKind.NO_TENSORS for oddity in state.oddities):
        values = state.metadata.values
        keys = [f"{key}={value}" for key, value in values.items() if len(str(value)) <= 40]
        keys_text = f", only metadata: {', '.join(keys[:6])}" if keys else ""
        further_text = (
            f" and {plural(further_count, 'more key')}"
            if keys and (further_count := len(values) - len(keys[:6]))
            else ""
        )
        yield Oddity("no-tensor", f"contains no tensors{keys_text}{further_text}")


def _list_unreported_oddities(inspection: Inspection) -> list[Oddity]:
    findings = (*inspection.findings, *(entry.finding for entry in inspection.accepted))
    hidden_kinds = {OddityKind.FOREIGN_GLOBALS} if any(finding.rule == UNSAFE_GLOBAL for finding in findings) else ()
    unreported = select_unreported(inspection.state.oddities, findings)
    return [oddity for oddity in unreported if oddity.kind not in hidden_kinds]


# The flat table: each fact in a column of its own, None if the source does not record the fact.


class _Measure(msgspec.Struct, frozen=True, gc=False):
    """A column, the value of a tensor, and the cell of the value; None: the value is the cell."""

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


def _build_table(inspection: Inspection, view: RowView, *, with_details: bool = True) -> Table:
    """Return the flat table; with `with_details` False, without the columns for programs."""
    measures = [measure for measure in _list_table_columns(inspection) if with_details or not measure.column.detail]
    rows = CellRows([(measure.get, measure.format) for measure in measures], _list_shown_tensors(inspection, view))
    return Table(tuple(measure.column for measure in measures), rows)


def _list_shown_tensors(inspection: Inspection, view: RowView) -> Sequence[TensorInfo]:
    return limit_by_group(arrange_tensors(inspection.state.tensors, view), view)


def _format_hidden(inspection: Inspection, view: RowView) -> tuple[str, ...]:
    """Return the line that counts the hidden tensors of the flat table; () if none is hidden, and for a tree."""
    if view.tree or not view.hides_rows:
        return ()
    hidden_count = len(inspection.state.tensors) - len(_list_shown_tensors(inspection, view))
    return tuple(line + _format_equal_size(inspection, view) for line in format_hidden_count(hidden_count, view))


def _list_table_columns(inspection: Inspection) -> Iterator[_Measure]:
    tensors = inspection.state.tensors
    if len({tensor.section for tensor in tensors}) > 1:
        yield _Measure(ReportColumn("section"), lambda t: t.section or None)
    yield from _TABLE_COLUMNS
    if inspection.to is not None:
        yield _Measure(ReportColumn("after"), lambda t: t.after.device if t.after else None)
        yield _Measure(ReportColumn("followed"), lambda t: format_yes_no(t.after.followed) if t.after else None)
    for name in STATS_FIELDS if _has_stats(inspection) else ():
        yield _Measure(ReportColumn(name, right=True), partial(_get_statistic, name))
    yield _Measure(ReportColumn("tied_to"), attrgetter("tied_to"), lambda names: ",".join(names) or None)
    yield _Measure(ReportColumn("note", detail=not any(tensor.note for tensor in tensors)), attrgetter("note"))


def _get_statistic(name: str, tensor: TensorInfo) -> Cell:
    number: Cell = getattr(tensor.stats, name, None)
    return number


#: Largest number of dtypes in the subtitle.
MAX_SHOWN_DTYPES = 3


def _format_subtitle(inspection: Inspection) -> str:
    """Return `torch-zip, 78 tensors, 8.79 kB, float32: 1.08 K parameters, all trainable; sections model, optimizer`."""
    state = inspection.state
    tensors, size = len(state.tensors), _sum_stored_bytes(inspection)
    parameters = _count_parameters(inspection)
    text = _format_parameters_of(inspection, parameters)
    if inspection.weights:
        state = replace(state, tensors=tuple(fold_tensors(state.tensors, inspection.weights)))
    counts = f": {text}{_describe_trainable(state, parameters)}" if parameters else ""
    sections = f"; sections {', '.join(s or '(top level)' for s in state.sections)}" if len(state.sections) > 1 else ""
    dtypes = f", {_list_dtypes(state.tensors)}" if state.tensors else ""
    size_text = f"{plural(tensors, 'tensor')}, {format_size(size)}"
    return f"{state.format}, {size_text}{dtypes}{counts}{sections}{_format_scalars(state)}"


def _sum_stored_bytes(inspection: Inspection) -> int:
    """Return the size of the tensors; the tensors of a weight that a subclass holds count instead of the subclass."""
    of_subclasses = [weight for weight in inspection.weights if len(weight.parts) == 1]
    return sizes.sum_bytes(fold_tensors(inspection.state.tensors, of_subclasses))


def _count_parameters(inspection: Inspection) -> int:
    """Return the elements of all parameters, with each quantized weight at its own size."""
    tensors = fold_tensors(inspection.state.tensors, inspection.weights)
    return sizes.sum_by_kind(tensors)[Kind.PARAMETER.value].elements


def _format_parameters_of(inspection: Inspection, count: int) -> str:
    """Return `90.4 K parameters`: the number, as far as the sizes of quantized weights are known."""
    weights = select_weights(inspection.state.tensors, inspection.weights)
    has_upper_bound = sum(weight.shape is None and weight.elements is not None for weight in weights)
    unknown = sum(weight.elements is None for weight in weights)
    text = f"{_format_count(count, 'parameter')}{' at most' if has_upper_bound else ''}"
    return f"{text} and {plural(unknown, 'weight')} of unknown size" if unknown else text


def _describe_trainable(state: ModelState, parameters: int) -> str:
    """Return how many elements of the parameters require grad; "" if not recorded by the source."""
    rows = [tensor for tensor in state.tensors if tensor.kind is Kind.PARAMETER]
    if any(row.requires_grad is None for row in rows):
        return ""
    trainable = sizes.sum_by_kind([row for row in rows if row.requires_grad])[Kind.PARAMETER.value].elements
    count = {parameters: "all", 0: "none"}.get(trainable, format_count(trainable))
    return f", {count} trainable"


def _list_dtypes(tensors: Sequence[TensorInfo]) -> str:
    """Return the dtypes with most bytes, and the number of further dtypes."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.nbytes
    dtypes = [dtype for dtype, _ in counts.most_common()]
    further_text = f" and {len(dtypes) - MAX_SHOWN_DTYPES} more dtypes" if len(dtypes) > MAX_SHOWN_DTYPES else ""
    return f"{' + '.join(dtypes[:MAX_SHOWN_DTYPES])}{further_text}"


def _format_scalars(state: ModelState) -> str:
    """Format the first scalars at the top of a checkpoint (epoch, step)."""
    # Remove the group before a key, because every key of a GGUF file has a group.
    values_by_key = {key.removeprefix("general."): value for key, value in state.metadata.values.items()}
    scalars = {
        **folder_settings.select_headline(state.metadata),
        **{key: value for key, value in values_by_key.items() if "." not in key},
    }
    texts = [f"{key}={value}" for key, value in scalars.items() if len(str(value)) <= 40]
    return f"; {', '.join(texts[:6])}" if texts else ""


def _count_hidden_parts(inspection: Inspection) -> int:
    """Return the number of tensors without a row of their own, because they share a row."""
    weights = _list_weights_by_row(inspection)
    if not weights:
        return 0
    rows = {(row.section, row.fqn) for row in inspection.state.tensors}
    return sum(len(weight.parts) - 1 for key, weight in weights.items() if key in rows)


def _format_totals(state: ModelState, part_count: int) -> tuple[str, ...]:
    """Return a line for each kind. `part_count` tensors are parts of the parameters."""
    summary = sizes.sum_by_kind(state.tensors)
    assumed_count = len([t for t in state.tensors if t.evidence is Evidence.ASSUMED and t.kind is Kind.PARAMETER])
    lines = []
    for kind, total in summary.items():
        if total.tensors:
            of_some = f" of {assumed_count:,}" if assumed_count < total.tensors else ""
            assumed_text = f" (kind{of_some} assumed)" if kind == Kind.PARAMETER.value and assumed_count else ""
            tensors = plural(total.tensors, "tensor")
            if part_count and kind == Kind.PARAMETER.value:
                tensors = f"{plural(total.tensors, 'weight')} in {plural(total.tensors + part_count, 'tensor')}"
            counts = f"{tensors}{assumed_text}, {plural(total.elements, 'element')}"
            lines.append(f"{kind:<12} {counts}, {total.bytes:,} bytes")
    return tuple(lines)


# For people: grouped by section and kind.


def _has_stats(inspection: Inspection) -> bool:
    return any(tensor.stats is not None for tensor in inspection.state.tensors)


def _list_columns(inspection: Inspection, view: RowView) -> tuple[ReportColumn, ...]:
    """Return the columns for people, without columns empty in every row."""
    tensors, is_moved = inspection.state.tensors, inspection.to is not None
    with_stats = _has_stats(inspection)
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


def _build_groups(inspection: Inspection, columns: tuple[ReportColumn, ...], view: RowView) -> tuple[Group, ...]:
    state = inspection.state
    tensors = arrange_tensors(state.tensors, view)
    if view.top is not None:
        return (_build_top_group(tensors, inspection, columns, view),)
    weights = _list_weights_by_row(inspection)
    sections: dict[str, dict[Kind | None, list[TensorInfo]]] = {}
    get_group: Callable[[TensorInfo], tuple[str, Kind | None]] = attrgetter("section", "kind")
    if weights:
        get_group = lambda t: (t.section, None if (t.section, t.fqn) in weights else t.kind)  # noqa: E731
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


def _list_weights_by_row(inspection: Inspection) -> dict[tuple[str, str], LogicalWeight]:
    """Return the quantized weights by section and name of their rows; none if their tensors have rows."""
    if inspection.to is not None or _has_stats(inspection):
        return {}
    return {(weight.codes.section, weight.fqn): weight for weight in inspection.weights}


def _build_quantized_group(
    section: str, rows: list[TensorInfo], inspection: Inspection, columns: tuple[ReportColumn, ...], view: RowView
) -> Group:
    """Return the quantized weights as a group, with `view.parts` each with its tensors below."""
    weights = _list_weights_by_row(inspection)
    count = sum(len(weights[row.section, row.fqn].parts) for row in rows)
    elements = sizes.sum_by_kind(rows)[Kind.PARAMETER.value].elements
    size = sizes.sum_bytes(part for row in rows for part in weights[row.section, row.fqn].parts)
    heading = "quantized weights"
    if len(inspection.state.sections) > 1:
        heading = f"{section or '(top level)'}: {heading}"
    in_tensors = f" in {plural(count, 'tensor')}" if count > len(rows) else ""
    summary = f"{plural(len(rows), 'weight')}{in_tensors}, {_format_count(elements, 'element')}, {format_size(size)}"
    lines = [line for row in rows for line in _build_weight_lines(row, weights[row.section, row.fqn], columns, view)]
    return Group(heading, summary, tuple(lines if view.unfold else _count_sizes(fold.fold_rows(lines), columns)))


def _count_sizes(folded_lines: Iterable[tuple[Line, list[int]]], columns: Sequence[ReportColumn]) -> Iterator[Line]:
    """Yield the folded lines; the size of a line for several tensors has their number: `3 × 4.1 kB`."""
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
    """Yield the line of a quantized weight and, with `view.parts`, the lines of its tensors without remarks."""
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
        heading = f"{section or '(top level)'}: {heading}"
    elements = _format_count(total.elements, "element")
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


#: Fields that decide the line of a tensor, besides its name: cells, remark, mood.
_LINE_FIELDS = attrgetter(
    *("dtype", "shape", "elements", "nbytes", "kind", "evidence", "persistent", "device", "requires_grad", "tied_to"),
    *("saved", "moves", "origin", "layout", "note", "fix", "after"),
)


def _number_alike(
    tensors: Sequence[TensorInfo], view: RowView, reported: Set[str | None]
) -> tuple[Sequence[int], Sequence[TensorInfo]]:
    """Return a number for each tensor, and the first tensor of each number.

    Lines of tensors with equal numbers differ only in their names. A large model has few different lines.
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
    """Return the most important rows as a single group, each with its section in the name."""
    state = inspection.state
    reported = {finding.fqn for finding in inspection.findings}
    has_sections = len(state.sections) > 1
    weights = _list_weights_by_row(inspection)
    lines: list[Line] = []
    for row in tensors:
        qualified_row = replace(row, fqn=f"{row.section}.{row.fqn}") if has_sections and row.section else row
        if (weight := weights.get((row.section, row.fqn))) is not None:
            lines.extend(_build_weight_lines(qualified_row, weight, columns, view))
            continue
        status = describe_status(row, state.traits.is_class)
        lines.append(
            _build_line(qualified_row, columns, status, view, shows_doubt=False, is_reported=row.fqn in reported)
        )
    heading = "first tensors by name" if view.sort is TensorOrder.NAME else "largest tensors"
    size, size_of_all = sizes.sum_bytes(tensors), sizes.sum_bytes(state.tensors)
    share = f", {format_size(size)} of {format_size(size_of_all)}" if size_of_all else ""
    noun = "row" if _count_hidden_parts(inspection) else "tensor"
    summary = f"{len(tensors):,} of {plural(len(state.tensors), noun)}{share}{_format_equal_size(inspection, view)}"
    return Group(heading, summary, tuple(lines))


def _format_equal_size(inspection: Inspection, view: RowView) -> str:
    """Return `; 5 more have the size of the last` if `--top` cuts the list between equal sizes; else ""."""
    top_tensors = _list_shown_tensors(inspection, view)
    if view.top is None or view.sort is TensorOrder.NAME or not top_tensors:
        return ""
    last = top_tensors[-1].nbytes
    equal = [sum(tensor.nbytes == last for tensor in tensors) for tensors in (inspection.state.tensors, top_tensors)]
    further_count = equal[0] - equal[1]
    return (
        f"; {further_count:,} more {'has' if further_count == 1 else 'have'} the size of the last"
        if further_count
        else ""
    )


def _format_count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{format_count(count)} {noun}s"


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


#: Cells of a tensor without statistics.
_NO_MOMENTS = dict.fromkeys(MOMENT_FIELDS, "-")


def _build_line(
    tensor: TensorInfo,
    columns: tuple[ReportColumn, ...],
    status: str,
    view: RowView,
    *,
    shows_doubt: bool,
    is_reported: bool,
) -> Line:
    """Return the line of a tensor. With `shows_doubt`, the remark of an assumed parameter says so."""
    is_assumed = tensor.evidence is Evidence.ASSUMED and tensor.kind is Kind.PARAMETER
    cells = {
        "name": format_fqn(tensor.fqn),
        "dtype": tensor.dtype,
        "shape": format_shape(tensor.shape),
        "kind": format_kind(tensor),
        "bits": format_number(tensor.nbytes * 8 / tensor.elements, digits=2) if tensor.elements else "-",
        "size": format_size(tensor.nbytes),
        "device": _format_device(tensor),
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


def _format_device(tensor: TensorInfo) -> str:
    if tensor.after is None:
        return tensor.device or "-"
    sign = {True: "✓", False: "✗", None: "?"}[tensor.after.followed]
    return f"{tensor.device or '-'} → {tensor.after.device or '-'} {sign}"


def _select_tensors_to_fix(inspection: Inspection, view: RowView) -> list[TensorInfo]:
    """Return the tensors with a finding; with `-v` all not accepted: tensors without a finding do no harm."""
    reported = {finding.fqn for finding in inspection.findings}
    accepted_names = {entry.finding.fqn for entry in inspection.accepted}
    if not (reported or view.verbose):
        return []
    return [
        tensor
        for tensor in inspection.state.tensors
        if tensor.fqn not in accepted_names and (view.verbose or tensor.fqn in reported)
    ]


def _list_fixes(tensors: Sequence[TensorInfo]) -> tuple[Fix, ...]:
    """Return each fix once, because layers of a stack have the same line of source. A line may have several fixes."""
    fixes: dict[Fix, str] = {}
    for t in tensors:
        if t.fix:
            fixes.setdefault(Fix(format_origin(t.origin) if t.origin else t.fqn, t.fix), t.fqn)
    fixes_by_place = Counter(fix.place for fix in fixes)
    return tuple(
        replace(fix, place=f"{fix.place}: {fqn}") if fixes_by_place[fix.place] > 1 else fix
        for fix, fqn in fixes.items()
    )
