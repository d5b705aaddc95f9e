"""The report of `statecli diff`: a view like `git diff --stat`, a flat table, names only, charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter

from msgspec.structs import replace

from statecli.commands.diff import rules, settings
from statecli.commands.diff.result import Change, Diff, Field, ScalarChange, Status
from statecli.core.finding import Finding
from statecli.core.grouping import group_by
from statecli.core.load_rules import LOAD_HELP, MISSING_ENTRY, SHAPE_MISMATCH, UNEXPECTED_ENTRY, WRAPPER_PREFIX
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.output import ChangeOrder
from statecli.core.run_scope import NotChecked, merge_not_checked
from statecli.core.sizes import describe_size
from statecli.core.units import KIND_NOUNS, format_fqn, format_shape, format_yes_no, plural
from statecli.report import (
    Bars,
    Case,
    CaseOutcome,
    Cell,
    Group,
    Line,
    Page,
    Problem,
    Report,
    ReportColumn,
    Rows,
    RowView,
    Spread,
    Table,
    Trouble,
    build_problem,
    change_text,
    change_totals,
    fold,
    junit_cases,
    limit_findings,
    rule_texts,
)
from statecli.report.bars import draw_bar
from statecli.report.change_order import arrange_changes, order_change
from statecli.report.change_text import (
    BAR_COLUMN,
    DELTA_COLUMNS,
    STATUS_LETTERS,
    describe_change,
    describe_remarks,
    format_changed_count,
    format_largest_change,
    format_name,
    format_relative_change,
)
from statecli.report.documents.diff import build_diff_document, count_changes
from statecli.report.documents.shared import Counts
from statecli.report.explain import list_problems_of_diff
from statecli.report.layer_changes import describe_largest_layers, list_module_changes, split_module
from statecli.report.problems import group_findings
from statecli.report.row_order import format_hidden_count, limit_by_group, limit_lines
from statecli.report.tie_changes import describe_ties, is_tie_only
from statecli.report.transformation_text import describe_transformation, make_fold_key
from statecli.report.transformations import GROUP_HEADING, build_transformation_group, select_summarized
from statecli.targets.location import add_places
from statecli.values.delta import ZERO_BEFORE

#: Rules of findings with a row each.
ROW_RULES = frozenset(rule.name for rule in (*rules.BY_STATUS.values(), rules.METADATA))
#: Largest number of characters of a metadata value in a row for people, and in the flat table.
MAX_SCALAR_CHARACTERS = 60
MAX_TABLE_SCALAR_CHARACTERS = 10_000
#: Largest number of characters of a value in a cell. Longer values are in the remark, because the column would become
#: as wide.
MAX_CELL_CHARACTERS = 40


class NameList(str, Enum):
    """The forms of a list of names, as in git."""

    ONLY = "only"
    STATUS = "status"


class DiffView(RowView, frozen=True):
    """The options of a diff. `unchanged` lists identical tensors too."""

    names: NameList | None = None
    unchanged: bool = False


def build_diff_report(diff: Diff, view: DiffView) -> Report:
    """Return the report of `diff`."""
    # A diff with a class has findings about the load, which are not the findings of its rows.
    has_problems = bool(diff.expected) or _is_load(diff)
    in_rows = frozenset[str]() if has_problems else ROW_RULES
    report = Report(
        title=f"{diff.before.target} → {diff.after.target}",
        document=lambda: build_diff_document(
            diff, summarize_diff(diff), _list_not_checked(diff), unchanged=view.unchanged
        ),
        table=lambda: _build_table(diff, view),
        short_table=lambda: _build_table(diff, view, with_details=False),
        page=lambda: _build_page(diff, view, report),
        page_without_rows=lambda: _build_page_without_rows(diff, view, report),
        findings=diff.findings,
        describe=lambda findings: _describe_findings(findings, diff),
        notes=fold.limit_notes(diff.notes, view.verbose),
        charts=lambda: _build_charts(diff),
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
        troubles=tuple(Trouble(diff.after.target, message) for _, message in list_broken(diff)),
    )
    return report


def _iter_tensors(diff: Diff) -> Iterable[TensorInfo]:
    """Yield the tensors of findings: the tensor after, or before if removed."""
    for change in select_different(diff):
        if row := change.after or change.before:
            yield replace(row, fqn=change.fqn, section=change.section)


def _build_cases(diff: Diff, report: Report) -> tuple[Case, ...]:
    """Return a case for each changed or incomparable tensor, and for each other rule with findings."""
    has_sections = _has_sections(diff)
    cases = [Case(report.title, name, CaseOutcome.ERROR, message) for name, message in list_broken(diff)]
    findings_by_name = group_by(report.describe_findings(), lambda finding: (finding.section, finding.fqn))
    for change in select_different(diff):
        name = format_name(change.fqn, change.section, has_sections)
        findings = findings_by_name.pop((change.section, change.fqn), []) + findings_by_name.pop((None, change.fqn), [])
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
    """Return the case of a difference; an expected difference passes."""
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


def _has_sections(diff: Diff) -> bool:
    """Return whether names need their section in front."""
    sections = {change.section for change in diff.changes}
    return len(sections | {failure.section for failure in diff.broken if failure.section}) > 1


#: Rules of findings about values.
_VALUE_RULES = frozenset(rule.name for rule in (rules.CHANGED, rules.RENAMED, rules.OUTSIDE_ONLY, rules.FROZEN_CHANGED))


def _describe_findings(findings: Iterable[Finding], diff: Diff) -> tuple[Finding, ...]:
    """Return the findings with their place, in words for people."""
    findings = tuple(
        replace(finding, help=finding.help or LOAD_HELP.get(finding.rule)) if _is_load(diff) else finding
        for finding in findings
    )
    if not findings:
        return ()
    has_sections = _has_sections(diff)
    return add_places(
        (_add_section(finding, has_sections) for finding in _add_largest_changes(findings, diff)), _iter_tensors(diff)
    )


def _add_largest_changes(findings: Iterable[Finding], diff: Diff) -> Iterable[Finding]:
    """Yield the findings, each with the size of its change; programs read this size from the changes."""
    changes_by_name = {
        (change.section, change.fqn): change
        for change in diff.changes
        if change.values is not None and change.values.max_abs
    }
    for finding in findings:
        change = (
            changes_by_name.get((finding.section or "", finding.fqn or "")) if finding.rule in _VALUE_RULES else None
        )
        largest = f", by at most {format_largest_change([change])}" if change else ""
        yield replace(finding, message=finding.message + largest) if largest else finding


def _add_section(finding: Finding, has_sections: bool) -> Finding:
    """Return the finding; a name at the start of its message gets its section."""
    start = f"{finding.fqn}: "
    if finding.fqn is None or not finding.message.startswith(start):
        return finding
    name = format_name(finding.fqn, finding.section or "", has_sections)
    return replace(finding, message=f"{name}: {finding.message.removeprefix(start)}")


def list_broken(diff: Diff) -> list[tuple[str, str]]:
    """Return name and reason of each tensor that could not be compared."""
    has_sections = _has_sections(diff)
    names = [(format_name(failure.fqn, failure.section, has_sections), failure) for failure in diff.broken]
    return [(name, failure.message.replace(f": {failure.fqn}: ", f": {name}: ", 1)) for name, failure in names]


def _is_load(diff: Diff) -> bool:
    return diff.before.traits.is_class is not diff.after.traits.is_class


#: Rules of findings that are replaced by the cause of a failing load.
_RULES_WITH_CAUSE = frozenset((MISSING_ENTRY.name, UNEXPECTED_ENTRY.name, SHAPE_MISMATCH.name, WRAPPER_PREFIX.name))
#: Largest number of rows that are shown if the cause of a failing load is known.
_MAX_ROWS_WITH_CAUSE = 8


def _build_page(diff: Diff, view: DiffView, report: Report) -> Page:
    columns = change_text.COLUMNS if view.tree else _choose_columns(diff)
    groups = change_text.build_module_groups(diff, view.unfold) if view.tree else _build_groups(diff, view, columns)
    if _covers_names(diff) and not view.unfold and sum(len(group.lines) for group in groups) > _MAX_ROWS_WITH_CAUSE:
        text = "… not listed: all names differ for the same cause, described below (--all lists each name)"
        omission_line = Line((text, *("" for _ in columns[1:])), mood="dim")
        groups = tuple(replace(group, lines=(omission_line,)) for group in groups)
    if diff.scalars and view.top is None:
        groups = (*groups, _build_settings_group(diff.scalars, columns, view))
    if diff.broken:
        groups = (*groups, _build_broken_group(diff, columns, view))
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
    """Return the meanings of the signs in the rows."""
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
    transformations = build_transformation_group(diff.changes, view.unfold, has_sections=_has_sections(diff))
    lines = transformations.lines if transformations is not None else ()
    done_lines = (": ".join(filter(None, (line.cells[0].strip(), line.remark))) for line in lines)
    met_lines = (f"as expected: {expectation.option}: {expectation.evidence}" for expectation in diff.met)
    totals = (*done_lines, *met_lines, verdict, *_format_hidden_count(diff, view))
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
    """Return the group of transformations with a line for each met expectation; None for an empty group."""
    if not diff.met:
        return transformations
    group = transformations or Group("expectations", f"{len(diff.met):,} met", ())
    lines = (Line((f"✓ {expectation.option}",), expectation.evidence) for expectation in diff.met)
    return replace(group, lines=(*group.lines, *lines))


def _group_problems(findings: Sequence[Finding], diff: Diff, view: DiffView) -> tuple[Problem, ...]:
    """Return the cause of all findings about loading first; with `--all`, or for an unknown cause, the findings too."""
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
    """Return the problem with its first consequences, and a count of the rest."""
    hidden_count = 0 if limit is None else len(problem.effects) - max(1, limit)
    if hidden_count <= 0:
        return problem
    shown_count = len(problem.effects) - hidden_count
    further_count = problem.count_effects_after(shown_count)
    counts = tuple(problem.count_effects_after(n) - problem.count_effects_after(n + 1) for n in range(shown_count))
    effects = (*problem.effects[:shown_count], f"… and {further_count:,} more (-n {limit})")
    return replace(problem, effects=effects, effect_counts=(*counts, further_count))


def select_different(diff: Diff) -> list[Change]:
    """Return the changes without identical tensors."""
    return [change for change in diff.changes if change.status is not Status.IDENTICAL]


def _select_listed(diff: Diff, view: DiffView) -> Sequence[Change]:
    """Return the changes with a row: the differences or, with `--unchanged`, all changes."""
    return diff.changes if view.unchanged else select_different(diff)


# Sums.


def summarize_diff(diff: Diff) -> str:
    """Summarize the diff in a line: differences by kind, or none, and the values not compared."""
    summary = count_changes(diff)
    not_compared = [c for c in diff.changes if c.not_compared is not None and c.status is Status.IDENTICAL]
    damaged_counts = Counter(tensor.kind.value for tensor in _list_damaged(diff))
    by_kind = group_by(diff.changes, lambda change: change.kind.value)
    parts = [
        _format_counts(
            replace(counts, identical=counts.identical + damaged_counts[kind]), _COUNT_NOUNS[kind], by_kind[kind]
        )
        for kind, counts in summary.by_kind.items()
        if counts.added or counts.removed or counts.changed or counts.renamed
    ]
    if diff.scalars:
        parts.append(f"metadata: {_format_statuses(scalar.status for scalar in diff.scalars)}")
    text = "; ".join(parts) if parts else _format_no_difference(diff, is_complete=not (not_compared or diff.broken))
    if parts and diff.expected and not (diff.findings or diff.broken):
        text += ": all changes are allowed"
    if not_compared:
        text += f"; values of {plural(len(not_compared), 'tensor')} not compared"
    if diff.broken:
        text += f"; {plural(len(diff.broken), 'tensor')} could not be compared"
    return "; ".join([text, *describe_largest_layers(summary.modules), *change_totals.format_totals(summary.values)])


def _list_not_checked(diff: Diff) -> tuple[NotChecked, ...]:
    """Return the pairs whose values were not compared, by reason."""
    reasons = (change.not_compared for change in diff.changes if change.not_compared is not None)
    return merge_not_checked(NotChecked("tensor", 1, f"values not compared: {reason}") for reason in reasons)


def _list_damaged(diff: Diff) -> list[TensorInfo]:
    """Return the tensors of after without a change, because a file failed: whether they differ is unknown."""
    if not diff.broken:
        return []
    compared_names = {(change.section, change.fqn) for change in diff.changes}
    missing = {(failure.section, failure.fqn) for failure in diff.broken} - compared_names
    return [tensor for tensor in diff.after.tensors if (tensor.section, tensor.fqn) in missing]


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
    """Return ` with --atol 0.5 --ignore dtype`, the tolerances and ignored fields of the diff; "" without them."""
    compare_options = diff.how
    tolerances = [
        f"--{name} {getattr(compare_options, name):g}"
        for name in ("atol", "rtol")
        if compare_options and getattr(compare_options, name)
    ]
    ignored_options = [f"--ignore {field.value}" for field in dict.fromkeys(diff.ignored)]
    return f" with {' '.join(tolerances + ignored_options)}" if tolerances or ignored_options else ""


def _format_counts(counts: Counts, noun: str, rows: Iterable[Change]) -> str:
    """Format `3 of 201 parameters changed, 2 added, 1 tie lost (2 tensors)`: tensors on both sides first.

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


_COUNT_NOUNS = {
    Kind.PARAMETER.value: "parameters",
    Kind.BUFFER.value: "buffers",
    Kind.UNREGISTERED.value: "unregistered tensors",
    Kind.OPTIMIZER.value: "optimizer tensors",
    Kind.OTHER.value: "other tensors",
}


def _format_statuses(statuses: Iterable[Status]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{counts[status]:,} {status.value}" for status in Status if counts[status])


# For people: grouped by section and kind.


#: Columns of a diff without differing values.
_CHANGE_COLUMNS = (ReportColumn("name"), ReportColumn("change"))
_MEASURE_COLUMNS = (
    ReportColumn("name"),
    ReportColumn("values", right=True),
    ReportColumn("max |Δ|", right=True),
    ReportColumn("rel. change", right=True),
    BAR_COLUMN,
)


def _choose_columns(diff: Diff) -> tuple[ReportColumn, ...]:
    """Return columns with measures if any values differ, else columns with the change only."""
    return _MEASURE_COLUMNS if any(change.values is not None for change in diff.changes) else _CHANGE_COLUMNS


def _build_groups(diff: Diff, view: DiffView, columns: tuple[ReportColumn, ...]) -> tuple[Group, ...]:
    listed_changes = _select_listed(diff, view)
    rows = arrange_changes(listed_changes, view)
    if view.top is not None:
        return _build_top_group(rows, len(listed_changes), columns, view, has_sections=_has_sections(diff))
    has_sections = _has_sections(diff)
    roles = group_by(rows, lambda change: (change.section, change.kind))
    first = {section: n for n, section in reversed(list(enumerate(section for section, _ in roles)))}
    kinds = list(Kind)
    ordered_roles = sorted(roles, key=lambda role: (first[role[0]], kinds.index(role[1])))
    both_sides = Counter(
        (change.section, change.kind)
        for change in diff.changes
        if change.before is not None and change.after is not None
    )
    both_sides.update((tensor.section, tensor.kind) for tensor in _list_damaged(diff))
    summarized_ids = select_summarized(diff.changes) if _is_folded(view) else frozenset()
    groups = []
    for section, kind in ordered_roles:
        heading = (f"{section or '(top level)'}: " if has_sections else "") + KIND_NOUNS[kind]
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
    """Return the most important differences as a single group; () without differences."""
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
    return _format_counts(numbers, "", rows) or f"{common_count:,} unchanged"


def _build_lines(rows: Sequence[Change], is_measured: bool, view: DiffView) -> list[Line]:
    """Return the lines. Changes of the same fields of repeated layers share a line, with the range of their measures.

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
            tensors=tuple((rows[n].section, rows[n].fqn) for n in positions),
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
    """Fold repeated layers; a layer with a change several times larger has its own line."""
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
    """Return the shapes on both sides, by which layers of different shapes stay separate."""
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
    return Line(cells, remark, line.mood, measure=max(values, default=0.0))


def _build_settings_group(scalars: Sequence[ScalarChange], columns: tuple[ReportColumn, ...], view: DiffView) -> Group:
    lines = [_build_scalar_line(scalar, columns) for scalar in scalars]
    summary = _format_statuses(scalar.status for scalar in scalars)
    return Group("metadata", summary, tuple(lines if view.unfold else fold.fold_lines(lines)))


def _build_broken_group(diff: Diff, columns: tuple[ReportColumn, ...], view: DiffView) -> Group:
    empty = ("",) * (len(columns) - 1)
    lines = [Line((f"? {name}", *empty), message, "bad") for name, message in list_broken(diff)]
    summary = plural(len(lines), "tensor")
    return Group("not compared", summary, tuple(lines if view.unfold else fold.fold_lines(lines)))


def _build_scalar_line(scalar: ScalarChange, columns: tuple[ReportColumn, ...]) -> Line:
    name, mood = f"{STATUS_LETTERS[scalar.status]} {scalar.key}", change_text.MOODS.get(scalar.status, "")
    text = settings.format_values(scalar, MAX_SCALAR_CHARACTERS)
    if columns is _CHANGE_COLUMNS and len(text) <= MAX_CELL_CHARACTERS:
        return Line((name, text), mood=mood)
    return Line((name, *("" for _ in columns[1:])), text, mood)


# The flat table: a row for each change, every fact in a column of its own.

_SIDE_FIELDS = ("dtype", "shape", "requires_grad", "device")
#: A column, and its cell for a change.
_Measure = tuple[ReportColumn, Callable[[Change], Cell]]


def _build_table(diff: Diff, view: DiffView, *, with_details: bool = True) -> Table:
    """Return the flat table; with `with_details` False, without the columns for programs."""
    changes, has_sections = _list_shown_changes(diff, view), _has_sections(diff)
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
    """Return the status for people: `unchanged`, the word of the option, for an identical tensor."""
    return "unchanged" if change.status is Status.IDENTICAL else change.status.value


#: Measures of `DELTA_COLUMNS` in plain text, and with -v.
_MAIN_MEASURES = ("elements", "changed", "relative_l2", "max_abs")
_VERBOSE_MEASURES = (*_MAIN_MEASURES, "mean_abs", "l2", "cosine", "rank")


def _list_table_columns(rows: Sequence[Change], has_sections: bool, verbose: bool) -> Iterator[_Measure]:
    """Yield the columns except the last; columns rarely needed by people are details."""
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
    return limit_by_group(arrange_changes(_select_listed(diff, view), view), view)


def _format_hidden_count(diff: Diff, view: DiffView) -> tuple[str, ...]:
    """Return the line that counts the hidden rows, for plain text; groups of a page have their own."""
    if view.tree or not view.hides_rows:
        return ()
    hidden_count = len(_select_listed(diff, view)) - len(_list_shown_changes(diff, view))
    if view.lines is not None:
        hidden_count += sum(max(0, count - view.lines) for count in (len(diff.scalars), len(diff.broken)))
    return format_hidden_count(hidden_count, view)


# Names only.


def _list_names(diff: Diff, view: DiffView) -> Iterable[tuple[str, ...]]:
    """Yield the line of each change; with several sections, names are whole paths in the file.

    With `--unchanged`, yield the names of the unchanged tensors instead.
    """
    names, has_sections = view.names, _has_sections(diff)
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


# Charts.


def _build_charts(diff: Diff) -> tuple[Bars | Spread, ...]:
    has_sections = _has_sections(diff)
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


#: A tensor with its measure, and the text to show if there is no measure.
_Measured = tuple[Change | TensorInfo, tuple[float, str]]


def _draw(diff: Diff, measures: Sequence[_Measured]) -> Bars:
    """Return a bar for each parameter."""
    has_sections = _has_sections(diff)
    names = tuple(format_name(item.fqn, item.section, has_sections) for item, _ in measures)
    values, words = zip(*(measure for _, measure in measures), strict=True)
    title = "change over depth: one bar per parameter, zero for equal values"
    tensors = tuple((item.section, item.fqn) for item, _ in measures)
    return Bars(title, names, values, "relative L2 change", words, tensors)


def _draw_modules(diff: Diff, measures: Sequence[_Measured]) -> Bars:
    """Return a bar for each layer and for each module outside of the layers, with all parameters together.

    A bar leads to the parameter with the largest difference.
    """
    has_sections = _has_sections(diff)
    changes = {(module.section, module.name): module for module in list_module_changes(diff.changes)}
    groups = group_by(measures, lambda pair: (pair[0].section, split_module(pair[0].fqn)[1]))
    bars: list[tuple[str, float, str, tuple[str, str], bool]] = []
    for (section, name), rows in groups.items():
        change = changes.get((section, name))
        value, word = _combine_measures([measure for _, measure in rows], change.relative_l2 if change else None)
        largest = max((item for item, _ in rows), key=_measure_difference)
        is_unusual = change is not None and change.times_median is not None
        label = format_name(name, section, has_sections)
        bars.append((label, value, word, (largest.section, largest.fqn), is_unusual))
    labels, values, words, tensors, unusual = zip(*bars, strict=True)
    title = "change over depth: one bar per layer for all its parameters together; zero for equal values"
    return Bars(title, labels, values, "relative L2 change", words, tensors, unusual)


def _combine_measures(measures: Sequence[tuple[float, str]], combined: float | None) -> tuple[float, str]:
    """Return the measure of a module: NaN if a parameter has NaN, and the parameters without a measure in words."""
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
    """Return each parameter on both sides with its measure, in order."""
    measures: list[_Measured] = [
        (change, _measure_change(change))
        for change in diff.changes
        if change.before is not None and change.after is not None
    ]
    if damaged_tensors := _list_damaged(diff):
        measures += [(tensor, (math.inf, "not compared")) for tensor in damaged_tensors]
        positions = {(tensor.section, tensor.fqn): n for n, tensor in enumerate(diff.after.tensors)}
        measures.sort(key=lambda pair: positions.get((pair[0].section, pair[0].fqn), len(positions)))
    return [pair for pair in measures if pair[0].kind is Kind.PARAMETER]


def _measure_change(change: Change) -> tuple[float, str]:
    """Return the relative change of the values: NaN for new NaN or infinities, else infinity and a text instead."""
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
