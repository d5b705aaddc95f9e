"""The report of `statecli diff`: a view like `git diff --stat`, a flat table, a list of names, and charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from statecli import report as report_package
from statecli.commands.diff import rules, settings
from statecli.commands.diff.result import Change, Diff, Status
from statecli.core.finding import Finding
from statecli.core.grouping import group_by
from statecli.core.load_rules import LOAD_HELP, MISSING_ENTRY, SHAPE_MISMATCH, UNEXPECTED_ENTRY, WRAPPER_PREFIX
from statecli.core.model_state import TensorInfo, TensorKey
from statecli.core.oddity_kind import OddityKind
from statecli.core.run_scope import NotChecked, merge_not_checked
from statecli.core.sizes import describe_size
from statecli.core.units import plural
from statecli.report import (
    Case,
    CaseOutcome,
    Group,
    Line,
    Page,
    Problem,
    Report,
    ReportColumn,
    Trouble,
    build_problem,
    change_text,
    change_totals,
    fold,
    junit_cases,
    limit_findings,
    rule_texts,
)
from statecli.report.change_text import (
    BAR_COLUMN,
    STATUS_LETTERS,
    describe_change,
    describe_remarks,
    format_changed_count,
    format_largest_change,
    format_name,
)
from statecli.report.diff_rows import (
    COUNT_NOUNS,
    MAX_SCALAR_CHARACTERS,
    build_broken_group,
    build_groups,
    build_settings_group,
    choose_columns,
    format_counts,
    format_statuses,
)
from statecli.report.diff_table import build_table, describe_hidden_rows
from statecli.report.diff_view import DiffView, NameList, list_broken, list_damaged, needs_sections, select_different
from statecli.report.documents.diff import build_diff_document, count_changes
from statecli.report.explain import list_problems_of_diff
from statecli.report.layer_changes import describe_largest_layers
from statecli.report.problems import group_findings
from statecli.report.row_order import limit_lines
from statecli.report.transformation_text import describe_transformation
from statecli.report.transformations import build_transformation_group
from statecli.targets.location import add_places

#: Rules of findings with a row each.
ROW_RULES = frozenset(rule.name for rule in (*rules.BY_STATUS.values(), rules.METADATA))


def build_diff_report(diff: Diff, view: DiffView) -> Report:
    """Return the report of `diff`."""
    # A diff with a class has findings about the load, which are not the findings of its rows.
    has_problems = bool(diff.expected) or _is_load(diff)
    in_rows = frozenset[str]() if has_problems else ROW_RULES
    complete_view = replace(view, top=None, lines=None, sort=None)
    report = Report(
        title=f"{diff.before.target} → {diff.after.target}",
        document=lambda: build_diff_document(
            diff, summarize_diff(diff), _list_not_checked(diff), unchanged=view.unchanged
        ),
        table=lambda: build_table(diff, complete_view),
        short_table=lambda: build_table(diff, view, with_details=False),
        page=lambda: _build_page(diff, view, report),
        page_without_rows=lambda: _build_page_without_rows(diff, view, report),
        findings=diff.findings,
        describe=lambda findings: _describe_findings(findings, diff),
        notes=fold.limit_notes(diff.notes, view.verbose),
        charts=lambda: report_package.diff_charts.build_charts(diff),
        outline=view.tree,
        rules_in_rows=in_rows,
        problems=(lambda: _group_problems(_describe_findings(diff.findings, diff), diff, view))
        if has_problems
        else None,
        max_findings=view.lines,
        show_all=view.unfold,
        listing=(lambda: _list_names(diff, view)) if view.names else None,
        rules=lambda: rule_texts.list_rule_texts((*diff.findings, *list_problems_of_diff(diff.loading, ()))),
        cases=lambda: _build_cases(diff, report),
        troubles=tuple(Trouble(diff.after.target, failure.message) for failure in list_broken(diff)),
    )
    return report


def _iter_tensors(diff: Diff) -> Iterable[TensorInfo]:
    """Yield the tensor of each difference, for findings: the new tensor or, if it was removed, the old tensor."""
    for change in select_different(diff):
        if row := change.after or change.before:
            yield replace(row, fqn=change.fqn, section=change.section)


def _build_cases(diff: Diff, report: Report) -> tuple[Case, ...]:
    """Return a test case for each difference, incomparable tensor, and rule with findings about anything else."""
    has_sections = needs_sections(diff)
    cases = [Case(report.title, failure.name, CaseOutcome.ERROR, failure.message) for failure in list_broken(diff)]
    findings_by_name = group_by(report.describe_findings(), lambda finding: (finding.section, finding.fqn))
    for change in select_different(diff):
        name = format_name(change.fqn, change.section, has_sections)
        findings = findings_by_name.pop(change.key, []) + findings_by_name.pop((None, change.fqn), [])
        cases.append(_build_case(report.title, name, _summarize_change(change), findings))
    for scalar in diff.scalars:
        values_text = settings.format_values(scalar, MAX_SCALAR_CHARACTERS)
        cases.append(_build_case(report.title, scalar.key, values_text, findings_by_name.pop((None, scalar.key), [])))
    remaining_findings = [finding for findings in findings_by_name.values() for finding in findings]
    other_cases = (
        junit_cases.build_cases(report.title, map(build_problem, remaining_findings), "identical")
        if remaining_findings or not cases
        else ()
    )
    return (*cases, *other_cases)


def _build_case(suite: str, name: str, description: str, findings: Sequence[Finding]) -> Case:
    """Return the test case of a difference. The case passes if no finding reports the difference."""
    case = (
        junit_cases.build_failed_case(suite, name, list(map(build_problem, findings)))
        if findings
        else Case(suite, name, CaseOutcome.PASSED)
    )
    return replace(case, text=(description, *case.text))


def _summarize_change(change: Change) -> str:
    source = f" from {change.renamed_from}" if change.renamed_from is not None else ""
    values = f"values {format_changed_count([change])}" if change.values is not None else ""
    largest = (
        f"max |Δ| {format_largest_change([change])}" if change.values is not None and change.values.max_abs else ""
    )
    remarks = (*describe_remarks([change]), describe_transformation(change))
    text = ", ".join(filter(None, (describe_change(change), values, largest, *remarks)))
    return ": ".join(filter(None, (f"{change.status.value}{source}", text)))


#: Rules of findings about values.
_VALUE_RULES = frozenset(rule.name for rule in (rules.CHANGED, rules.RENAMED, rules.OUTSIDE_ONLY, rules.FROZEN_CHANGED))


def _describe_findings(findings: Iterable[Finding], diff: Diff) -> tuple[Finding, ...]:
    """Return the findings with their places and with human-readable messages."""
    findings = tuple(
        replace(finding, help=finding.help or LOAD_HELP.get(finding.rule)) if _is_load(diff) else finding
        for finding in findings
    )
    if not findings:
        return ()
    has_sections = needs_sections(diff)
    return add_places(
        (_add_section(finding, has_sections) for finding in _add_largest_changes(findings, diff)), _iter_tensors(diff)
    )


def _add_largest_changes(findings: Iterable[Finding], diff: Diff) -> Iterable[Finding]:
    """Append the largest change to messages about values. Programs find it as `max_abs` in the JSON document."""
    changes_by_name = {
        change.key: change for change in diff.changes if change.values is not None and change.values.max_abs
    }
    for finding in findings:
        change = (
            changes_by_name.get(TensorKey(finding.section or "", finding.fqn or ""))
            if finding.rule in _VALUE_RULES
            else None
        )
        largest = f", by at most {format_largest_change([change])}" if change else ""
        yield finding.reword(finding.wording.append(largest)) if largest else finding


def _add_section(finding: Finding, has_sections: bool) -> Finding:
    """Return the finding. If its message begins with the tensor's name, put the section before the name."""
    wording = finding.wording
    if wording.name is None or wording.name != finding.fqn:
        return finding
    name = format_name(wording.name, finding.section or "", has_sections)
    return finding.reword(replace(wording, name=name))


def _is_load(diff: Diff) -> bool:
    return diff.before.traits.is_class is not diff.after.traits.is_class


#: Rules of findings that are replaced by the cause of a failing load.
_RULES_WITH_CAUSE = frozenset((MISSING_ENTRY.name, UNEXPECTED_ENTRY.name, SHAPE_MISMATCH.name, WRAPPER_PREFIX.name))
#: Largest number of rows that are shown if the cause of a failing load is known.
_MAX_ROWS_WITH_CAUSE = 8


def _build_page(diff: Diff, view: DiffView, report: Report) -> Page:
    columns = change_text.COLUMNS if view.tree else choose_columns(diff)
    groups = change_text.build_module_groups(diff, view.unfold) if view.tree else build_groups(diff, view, columns)
    if _covers_names(diff) and not view.unfold and sum(len(group.lines) for group in groups) > _MAX_ROWS_WITH_CAUSE:
        text = "… not listed: all names differ for the same reason, described below (--all lists each name)"
        omission_line = Line((text, *("" for _ in columns[1:])), mood="dim")
        groups = tuple(replace(group, lines=(omission_line,)) for group in groups)
    if diff.scalars and view.top is None:
        groups = (*groups, build_settings_group(diff.scalars, columns, view))
    if diff.broken:
        groups = (*groups, build_broken_group(diff, columns, view))
    return replace(
        _build_page_without_rows(diff, view, report),
        columns=columns,
        groups=tuple(limit_lines(group, view) for group in groups),
        legend=_build_legend(diff, groups, columns),
        sorted_by="rel. change" if any(line.sort_key for group in groups for line in group.lines) else "",
    )


#: Status by the letter before a name.
_STATUS_BY_LETTER = {letter: status.value for status, letter in STATUS_LETTERS.items() if letter.strip()}


def _build_legend(diff: Diff, groups: Sequence[Group], columns: tuple[ReportColumn, ...]) -> tuple[str, ...]:
    lines = [line for group in groups for line in group.lines]
    letters = {line.cells[0].strip()[:2].strip() for line in lines}
    texts = [", ".join(f"{letter} {word}" for letter, word in _STATUS_BY_LETTER.items() if letter in letters)]
    if BAR_COLUMN in columns:
        texts.append("rel. change: ‖Δ‖/‖w‖, the L2 norm of the difference Δ = after − before over the norm before")
    if any(change.values is not None and change.values.rank is not None for change in diff.changes):
        texts.append("rank of Δ: the number of independent directions in the change of a matrix")
    return tuple(filter(None, texts))


def _build_page_without_rows(diff: Diff, view: DiffView, report: Report) -> Page:
    def limit(findings: Sequence[Finding]) -> tuple[Problem, ...]:
        if report.problems is not None:
            return tuple(_limit_effects(problem, view.lines) for problem in _group_problems(findings, diff, view))
        folded_findings = findings if view.unfold else fold.fold_findings(findings)
        return tuple(map(build_problem, limit_findings(folded_findings, view.lines)))

    verdict = summarize_diff(diff)
    transformations = build_transformation_group(diff.changes, view.unfold, has_sections=needs_sections(diff))
    lines = transformations.lines if transformations is not None else ()
    done_lines = (": ".join(filter(None, (line.cells[0].strip(), line.remark))) for line in lines)
    met_lines = (f"as expected: {expectation.option}: {expectation.evidence}" for expectation in diff.met)
    totals = (*done_lines, *met_lines, verdict, *describe_hidden_rows(diff, view))
    return Page(
        subtitle=" → ".join(f"{side.format}, {describe_size(side.tensors)}" for side in (diff.before, diff.after)),
        columns=(),
        groups=(),
        totals=totals,
        verdict=verdict,
        problems=limit(report.describe_findings_without_row()),
        failing_problems=lambda: limit(report.describe_findings()),
        outcomes=_add_met_expectations(transformations, diff),
    )


def _add_met_expectations(transformations: Group | None, diff: Diff) -> Group | None:
    """Add a line for each met expectation to the group `transformations`. If the group is None, create a group."""
    if not diff.met:
        return transformations
    group = transformations or Group("expectations", f"{len(diff.met):,} met", ())
    lines = (Line((f"✓ {expectation.option}",), expectation.evidence) for expectation in diff.met)
    return replace(group, lines=(*group.lines, *lines))


def _group_problems(findings: Sequence[Finding], diff: Diff, view: DiffView) -> tuple[Problem, ...]:
    """Return the problems, first the cause of a failing load. Without `--all`, explained findings may be omitted."""
    findings_with_cause = tuple(finding for finding in findings if finding.rule in _RULES_WITH_CAUSE)
    causes = list_problems_of_diff(diff.loading, findings_with_cause)
    is_folded = bool(causes) and _covers_names(diff) and not view.unfold
    listed_findings = (
        [finding for finding in findings if finding.rule not in _RULES_WITH_CAUSE] if is_folded else findings
    )
    return (*causes, *group_findings(listed_findings))


def _covers_names(diff: Diff) -> bool:
    return diff.loading is not None and diff.loading.covers_names


def _limit_effects(problem: Problem, limit: int | None) -> Problem:
    """Return the problem with at most `limit` consequences, but at least one, and a line that counts the rest."""
    hidden_count = 0 if limit is None else len(problem.effects) - max(1, limit)
    if hidden_count <= 0:
        return problem
    shown_count = len(problem.effects) - hidden_count
    further_count = problem.count_effects_after(shown_count)
    counts = tuple(problem.count_effects_after(n) - problem.count_effects_after(n + 1) for n in range(shown_count))
    effects = (*problem.effects[:shown_count], f"… and {further_count:,} more (-n {limit})")
    return replace(problem, effects=effects, effect_counts=(*counts, further_count))


def summarize_diff(diff: Diff) -> str:
    """Summarize the diff in a line: the differences by kind, and the number of values not compared."""
    summary = count_changes(diff)
    not_compared = [c for c in diff.changes if c.not_compared is not None and c.status is Status.IDENTICAL]
    damaged_counts = Counter(tensor.kind.value for tensor in list_damaged(diff))
    by_kind = group_by(diff.changes, lambda change: change.kind.value)
    parts = [
        format_counts(
            replace(counts, identical=counts.identical + damaged_counts[kind]), COUNT_NOUNS[kind], by_kind[kind]
        )
        for kind, counts in summary.by_kind.items()
        if counts.added or counts.removed or counts.changed or counts.renamed
    ]
    if diff.scalars:
        parts.append(f"metadata: {format_statuses(scalar.status for scalar in diff.scalars)}")
    text = "; ".join(parts) if parts else _format_no_difference(diff, is_complete=not (not_compared or diff.broken))
    if parts and diff.expected and not (diff.findings or diff.broken):
        text += ": all changes are allowed"
    if not_compared:
        text += f"; values of {plural(len(not_compared), 'tensor')} not compared"
    if diff.broken:
        text += f"; {plural(len(diff.broken), 'tensor')} could not be compared"
    return "; ".join([text, *describe_largest_layers(summary.modules), *change_totals.format_totals(summary.values)])


def _list_not_checked(diff: Diff) -> tuple[NotChecked, ...]:
    """Return the number of tensors whose values were not compared, for each reason."""
    reasons = (change.not_compared for change in diff.changes if change.not_compared is not None)
    return merge_not_checked(NotChecked("tensor", 1, f"values not compared: {reason}") for reason in reasons)


def _format_no_difference(diff: Diff, *, is_complete: bool) -> str:
    if not is_complete:
        return f"no difference found in {plural(len(diff.changes), 'tensor')}"
    size_text = describe_size([change.after for change in diff.changes if change.after is not None])
    if diff.findings and not diff.expected:
        return (
            f"no tensor differs, but load_state_dict would fail ({plural(len(diff.findings), 'finding')}): {size_text}"
        )
    if any(note.kind is OddityKind.VALUES_NOT_COMPARED for note in diff.notes):
        return f"nothing differs{_describe_tolerance(diff)}: {size_text}; values not compared"
    return f"identical{_describe_tolerance(diff)}: {size_text}"


def _describe_tolerance(diff: Diff) -> str:
    """Format the tolerances and ignored fields: ` with --atol 0.5 --ignore dtype`. Return "" if none is set."""
    compare_options = diff.how
    tolerances = [
        f"--{name} {getattr(compare_options, name):g}"
        for name in ("atol", "rtol")
        if compare_options and getattr(compare_options, name)
    ]
    ignored_options = [f"--ignore {field.value}" for field in dict.fromkeys(diff.ignored)]
    return f" with {' '.join(tolerances + ignored_options)}" if tolerances or ignored_options else ""


def _list_names(diff: Diff, view: DiffView) -> Iterable[tuple[str, ...]]:
    """Yield a line with the name of each changed tensor or setting. With several sections, the section comes first.

    With `--unchanged`, yield the names of the unchanged tensors instead.
    """
    names, has_sections = view.names, needs_sections(diff)
    if view.unchanged:
        unchanged_pairs = (change for change in diff.changes if change.status is Status.IDENTICAL)
        yield from ((format_name(change.fqn, change.section, has_sections),) for change in unchanged_pairs)
        return
    for change in select_different(diff):
        name = format_name(change.fqn, change.section, has_sections)
        if names is NameList.ONLY:
            yield (name,)
        elif change.status is Status.RENAMED and change.renamed_from is not None:
            section = change.before.section if change.before is not None else change.section
            yield "R", format_name(change.renamed_from, section, has_sections), name
        else:
            yield STATUS_LETTERS[change.status], name
    for scalar in diff.scalars:
        yield (scalar.key,) if names is NameList.ONLY else (STATUS_LETTERS[scalar.status], scalar.key)
