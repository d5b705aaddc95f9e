"""The report of `statecli inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli import report
from statecli.commands.inspect.quantized_rows import fold_tensors, select_weights
from statecli.commands.inspect.run import Inspection
from statecli.core import quoting
from statecli.core.escaping import escape
from statecli.core.finding import UNSAFE_GLOBAL, Finding, Severity, select_unreported
from statecli.core.load_rules import LOAD_HELP
from statecli.core.model_state import Kind, ModelState, Oddity, TensorInfo, TensorKey
from statecli.core.oddity_kind import OddityKind
from statecli.core.parameter_or_buffer import match_optimizer_entries
from statecli.core.units import format_fqn, plural
from statecli.report import (
    Case,
    CaseOutcome,
    Group,
    Page,
    Problem,
    Report,
    ReportColumn,
    RowView,
    Trouble,
    documents,
    fold,
    folder_settings,
    junit_cases,
    rule_texts,
)
from statecli.report.inspect_totals import (
    count_hidden_parts,
    count_parameters,
    format_parameters_of,
    format_subtitle,
    format_totals,
    has_stats,
    list_weights_by_row,
)
from statecli.report.layer_roles import build_curves, list_roles
from statecli.report.row_order import arrange_naturally, arrange_tensors, limit_lines
from statecli.report.tensor_remarks import describe_list_remark, list_problem_words
from statecli.report.unusual_values import list_unusual_values
from statecli.targets.location import add_places

if TYPE_CHECKING:
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
        table=lambda: report.inspect_table.build_table(inspection, replace(view, top=None, lines=None, sort=None)),
        short_table=lambda: report.inspect_table.build_table(
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
        cases=lambda: _build_cases(inspection, group_problems(), fail_on),
        troubles=tuple(Trouble(state.target, failure.message) for failure in inspection.broken),
        charts=lambda: build_curves(state.tensors),
        settings=lambda: folder_settings.group_settings(state.metadata),
        tensor_list=None if view.hides_rows or not state.tensors else lambda: _build_tensor_list(inspection, view),
    )


def _describe_accepted(
    inspection: Inspection, group_problems: Callable[[], tuple[Problem, ...]]
) -> tuple[Sequence[Oddity], int]:
    """Return the notes about accepted findings, and the number of accepted problems."""
    accepted = inspection.accepted
    if not accepted:
        return (), 0
    problems = report.problems.group_accepted(accepted, inspection.state.tensors, group_problems())
    return tuple(report.problems.build_accepted_notes(accepted, problems)), sum(map(len, problems.values()))


def _build_tensor_list(inspection: Inspection, view: RowView) -> TensorList:
    """Return the list of tensors for a page. The page links tied tensors, so remarks do not name them."""
    state = _fold_weights(inspection).state
    outliers = {key: text for role in list_roles(state.tensors) for key, text in role.describe_outliers().items()}
    reported = {finding.fqn for finding in inspection.findings}
    live = state.traits.is_class
    owners = match_optimizer_entries(state)

    def describe_row(tensor: TensorInfo) -> str:
        key = tensor.key
        remark = describe_list_remark(
            tensor, outliers.get(key, ""), view, is_live=live, is_reported=tensor.fqn in reported
        )
        owner = f"of {format_fqn(owners[key])} (matched by order and shape)" if key in owners else ""
        return ", ".join(filter(None, (owner, remark)))

    def list_row_problems(tensor: TensorInfo) -> tuple[str, ...]:
        return list_problem_words(tensor, is_outlier=tensor.key in outliers)

    rows = arrange_naturally(state.tensors) if view.sort is None else arrange_tensors(state.tensors, view)
    tensor_list = report.tensor_list.build_tensor_list(
        rows,
        describe_row,
        list_row_problems,
        report.inspect_rows.format_device,
        inspection.distributions,
        _list_other_names(inspection),
        inspection.spectra,
    )
    # The values of a class are initial values.
    return tensor_list if live or tensor_list.stats else replace(tensor_list, values_command=_format_command(state))


def _format_command(state: ModelState) -> str:
    """Return the command that writes a page with the statistics of a checkpoint's values."""
    return f"statecli report {escape(quoting.quote_for_shell(state.target))} --stats -o report.html"


def _list_other_names(inspection: Inspection) -> dict[TensorKey, list[str]]:
    """Return other names by which `-i` selects a row: a weight's row by its tensors, a tensor's row by its weight."""
    names = {key: [part.fqn for part in weight.parts] for key, weight in list_weights_by_row(inspection).items()}
    if not names:
        names = {part.key: [weight.fqn] for weight in inspection.weights for part in weight.parts}
    return names


def _build_cases(inspection: Inspection, problems: Sequence[Problem], fail_on: Severity) -> tuple[Case, ...]:
    """Return a test case for each rule with findings, and for each unreadable tensor."""
    target = inspection.state.target
    unreadable_cases = tuple(
        Case(target, failure.name, CaseOutcome.ERROR, failure.message) for failure in inspection.broken
    )
    return (*unreadable_cases, *junit_cases.build_cases(target, problems, "inspect", fail_on))


def _build_page(inspection: Inspection, problems: tuple[Problem, ...], view: RowView, *, has_rows: bool = True) -> Page:
    """Return the page. Without `has_rows`, the page has no rows and no subtitle."""
    verdict = _format_page_verdict(problems, inspection)
    subtitle = format_subtitle(inspection) if has_rows else ""
    unusual = list_unusual_values(inspection.state)
    inspection = _fold_weights(inspection)
    state = inspection.state
    columns: tuple[ReportColumn, ...] = ()
    groups: tuple[Group, ...] = ()
    if has_rows:
        columns = report.tree.COLUMNS if view.tree else report.inspect_rows.list_columns(inspection, view)
        noun = "row" if count_hidden_parts(inspection) else "tensor"
        groups = (
            report.tree.build_tree_groups(state, view.unfold, noun)
            if view.tree
            else report.inspect_rows.build_groups(inspection, columns, view)
        )
        groups = tuple(limit_lines(group, view) for group in groups)
    return Page(
        subtitle=subtitle + (f", after a forward with {inspection.inputs}" if has_rows and inspection.inputs else ""),
        columns=columns,
        groups=groups,
        totals=(
            *format_totals(state, count_hidden_parts(inspection)),
            *(() if has_rows else report.inspect_table.describe_hidden_tensors(inspection, view)),
            *(sentence.text for sentence in unusual),
            *((verdict,) if problems else ()),
        ),
        problems=problems,
        verdict=verdict,
        unusual=unusual,
    )


def _format_page_verdict(problems: Sequence[Problem], inspection: Inspection) -> str:
    """Format `2 errors: 61 of 63 tensors are not registered`. Return "" for a checkpoint without problems."""
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
    return list(dict.fromkeys(finding.about for finding in findings if finding.rule == UNSAFE_GLOBAL and finding.about))


def _format_verdict(inspection: Inspection, problems: Sequence[Problem]) -> str:
    """Return the page's verdict or `1,024 tensors`. Add unusual values and the number of unreadable tensors."""
    verdict = _format_page_verdict(problems, inspection) or _count_tensors(inspection)
    unusual = [sentence.text for sentence in list_unusual_values(inspection.state)]
    failure_texts = [f"{plural(len(inspection.broken), 'tensor')} could not be read"] if inspection.broken else []
    return "; ".join((verdict, *unusual, *failure_texts))


def _count_tensors(inspection: Inspection) -> str:
    """Return `1,024 tensors`. For quantized weights, add their number and the number of all parameters."""
    count = plural(len(inspection.state.tensors), "tensor")
    weights = select_weights(inspection.state.tensors, inspection.weights)
    if not weights:
        return count
    part_count = sum(len(weight.parts) for weight in weights)
    parameters = format_parameters_of(inspection, count_parameters(inspection))
    return f"{count}: {plural(len(weights), 'quantized weight')} in {plural(part_count, 'tensor')}; {parameters} in all"


def _fold_weights(inspection: Inspection, *, with_parts: bool = False) -> Inspection:
    """Replace the tensors of each quantized weight by a row. With `with_parts`, its tensors follow the row.

    If the tensors were moved or measured individually, each tensor keeps its row.
    """
    if not inspection.weights or inspection.to is not None or has_stats(inspection):
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
