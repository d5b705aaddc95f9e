"""The report of `statecli verify`: a row for each tensor with the results of the checks, then a line for each check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

from statecli import report
from statecli.commands.verify.result import WORST_FIRST, Cell, Check, Column, Name, Verdict, Verification
from statecli.core.finding import Finding, Severity, select_unreported
from statecli.core.grouping import group_by
from statecli.core.model_state import Kind, ModelState, NoteKind, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.run_scope import NotChecked
from statecli.core.sizes import describe_size
from statecli.core.units import KIND_NOUNS, format_kind, format_origin, format_shape, format_yes_no, join_names, plural
from statecli.report import (
    Case,
    CaseOutcome,
    Group,
    Line,
    Page,
    Problem,
    Report,
    Table,
    Trouble,
    View,
    fold,
    junit_cases,
    rule_texts,
)
from statecli.report.documents.verify import build_verify_document, count_verdicts, find_worst_verdicts
from statecli.report.problems import MAX_NAMES, build_accepted_notes, format_severities, group_accepted, group_findings
from statecli.targets.location import add_places

#: Sign of each verdict; a tensor without a cell gets the sign of SKIPPED.
SIGNS = {Verdict.PASSED: "✓", Verdict.FAILED: "✗", Verdict.SKIPPED: "–", Verdict.INCONCLUSIVE: "?"}


class ProofColumn(msgspec.Struct, frozen=True):
    """Column of a check, and its name in the table.

    `reported_fqns` are the tensors in the check's findings, `proof_reason` is the reason of the whole check.
    """

    name: str
    cells: dict[str, Cell]
    reported_fqns: frozenset[str | None]
    proof_reason: str | None

    def get_verdict(self, fqn: str) -> Verdict:
        """Return the verdict of a tensor, or SKIPPED if the column has no cell for the tensor."""
        return self.cells[fqn].verdict if fqn in self.cells else Verdict.SKIPPED

    def get_reason(self, fqn: str) -> str | None:
        """Return why a tensor has its verdict, or None if a finding or the check's line already gives the reason."""
        cell = self.cells.get(fqn)
        if cell is None or (cell.verdict is Verdict.FAILED and fqn in self.reported_fqns):
            return None
        return cell.reason if cell.reason != self.proof_reason else None


def build_verify_report(verification: Verification, view: View, fail_on: Severity = Severity.ERROR) -> Report:
    """Return the report of `verify`. Findings of `fail_on` or a higher severity set exit status 1."""
    requested, accepted = verification.requested, verification.accepted
    findings = add_places(verification.findings, verification.state.tensors)
    group_problems = cache(lambda: group_findings(findings, verification.state.tensors))
    accepted_problems = group_accepted(accepted, verification.state.tensors, group_problems()) if accepted else {}
    accepted_notes = build_accepted_notes(accepted, accepted_problems)
    all_findings = (*verification.findings, *(entry.finding for entry in accepted))
    notes = select_unreported(verification.notes, all_findings)
    return Report(
        title=verification.state.target,
        document=lambda: build_verify_document(
            verification,
            group_problems(),
            _format_verdict(verification, group_problems()),
            _list_not_checked(verification),
        ),
        table=lambda: _build_table(verification, view.verbose),
        page=lambda: _build_page(verification, group_problems(), view),
        findings=findings,
        fail_on=fail_on,
        notes=(*accepted_notes, *fold.limit_notes(notes, view.verbose)),
        accepted=tuple((entry.finding, entry.reason) for entry in accepted),
        accepted_problems=sum(map(len, accepted_problems.values())),
        show_all=view.unfold,
        problems=group_problems,
        rules=lambda: rule_texts.list_rule_texts(group_problems()),
        cases=lambda: _build_cases(verification, findings, requested, fail_on),
        troubles=tuple(
            Trouble(verification.state.target, message) for message in list_inconclusive(verification, requested)
        ),
    )


_OUTCOMES = {
    Verdict.PASSED: CaseOutcome.PASSED,
    Verdict.FAILED: CaseOutcome.FAILED,
    Verdict.INCONCLUSIVE: CaseOutcome.ERROR,
    Verdict.SKIPPED: CaseOutcome.SKIPPED,
}


def _build_cases(
    verification: Verification, findings: Sequence[Finding], requested: Sequence[Name], fail_on: Severity
) -> tuple[Case, ...]:
    """Return a failed case for each rule with problems, then a case for each check without problems.

    A problem found by several checks is a single failure. `findings` are the verification's findings, with places.
    Problems milder than `fail_on` do not fail a case; the text of their check's case describes them.
    """
    state = verification.state
    failing = [problem for problem in group_findings(findings, state.tensors) if problem.severity.is_at_least(fail_on)]
    covered_findings = {id(finding) for problem in failing for finding in problem.findings}
    placed = dict(zip(map(id, verification.findings), findings, strict=True))
    by_proof = ((check, [placed[id(finding)] for finding in check.findings]) for check in verification.checks)
    cases = [
        _build_case(check, findings, state, requested)
        for check, findings in by_proof
        if check.verdict is not Verdict.FAILED or not covered_findings.intersection(map(id, findings))
    ]
    reasons = list_inconclusive(verification, requested)
    if reasons and all(case.outcome is not CaseOutcome.ERROR for case in cases):  # every check was skipped
        cases.append(Case(state.target, "verify", CaseOutcome.ERROR, reasons[0]))
    return (*(junit_cases.build_cases(state.target, failing, "verify") if failing else ()), *cases)


def _build_case(check: Check, findings: Sequence[Finding], state: ModelState, requested: Sequence[Name]) -> Case:
    """Return the test case of a check. A requested check that was skipped is an error, as it sets exit status 2."""
    target, name, outcome = state.target, check.check.value, _OUTCOMES[check.verdict]
    if outcome is CaseOutcome.FAILED and findings:
        problems = group_findings(findings, state.tensors)
        return Case(target, name, CaseOutcome.PASSED, text=tuple(map(junit_cases.describe_problem, problems)))
    if outcome is CaseOutcome.PASSED:
        return Case(target, name, outcome, text=(check.how,) if check.how else ())
    is_missing = outcome is CaseOutcome.SKIPPED and check.check in requested
    return Case(target, name, CaseOutcome.ERROR if is_missing else outcome, _describe_reason(check))


def list_inconclusive(verification: Verification, requested: Sequence[Name]) -> tuple[str, ...]:
    """Return a line for each check that is inconclusive, or requested but skipped. These set exit status 2.

    If all checks were skipped, a line says so, even if no check was requested.
    """
    target = verification.state.target
    if not verification.state.tensors:
        packed_names = [note.fqn for note in verification.notes if note.kind is OddityKind.PACKED_PARAMS and note.fqn]
        packed_text = (
            f" that statecli can see ({packed_names[0].partition('._packed')[0]} packs its weights in C++)"
            if packed_names
            else ""
        )
        return (f"{target}: the model has no tensors{packed_text}, so there is nothing to check",)
    unproved_checks = [
        check
        for check in verification.checks
        if check.verdict is Verdict.INCONCLUSIVE or (check.verdict is Verdict.SKIPPED and check.check in requested)
    ]
    by_cause = group_by(unproved_checks, lambda check: _describe_reason(check).replace(" in train mode", ""))
    lines = [
        f"{target}: {_join_names(checks)}: {cause if len(checks) > 1 else _describe_reason(checks[0])}"
        for cause, checks in by_cause.items()
    ]
    if not lines and all(check.verdict is Verdict.SKIPPED for check in verification.checks):
        lines = [f"{target}: no check ran: {_join_names(verification.checks)} skipped"]
    return tuple(lines)


def _list_not_checked(verification: Verification) -> tuple[NotChecked, ...]:
    """Return the skipped and inconclusive checks."""
    unproved_checks = (
        check for check in verification.checks if check.verdict in (Verdict.SKIPPED, Verdict.INCONCLUSIVE)
    )
    return tuple(NotChecked("check", 1, f"{check.check.value}: {_describe_reason(check)}") for check in unproved_checks)


def _describe_reason(check: Check) -> str:
    """Return the reason of a check, or else of its first inconclusive tensor, and count the other tensors."""
    if check.reason:
        return check.reason
    cells = [(fqn, cell) for column in check.columns for fqn, cell in column.cells.items()]
    inconclusive = [(fqn, cell) for fqn, cell in cells if cell.verdict is Verdict.INCONCLUSIVE]
    if not inconclusive:
        return "does not apply to this model" if check.verdict is Verdict.SKIPPED else "inconclusive"
    fqn, cell = inconclusive[0]
    count = len({fqn for fqn, _ in inconclusive})
    further_text = f"; {plural(count - 1, 'more tensor')} inconclusive" if count > 1 else ""
    return f"{fqn}: {cell.reason or 'inconclusive'}{further_text}"


def _list_columns(verification: Verification) -> tuple[ProofColumn, ...]:
    """Return the columns of the checks in order. A repeated column name is followed by the check's name."""
    proof_columns: list[ProofColumn] = []
    for check in verification.checks:
        reported = frozenset(finding.fqn for finding in check.findings)
        for column in check.columns:
            is_taken = any(earlier_column.name == column.name for earlier_column in proof_columns)
            name = f"{column.name} ({check.check.value})" if is_taken else column.name
            proof_columns.append(ProofColumn(name, column.cells, reported, check.reason))
    return tuple(proof_columns)


# The flat table: every fact in a column of its own.


def _build_table(verification: Verification, verbose: bool) -> Table:
    """Return the flat table. With `verbose`, human-readable outputs have columns for measures and source lines."""
    proof_columns = _list_columns(verification)
    measured_columns = [(column, side) for column in proof_columns for side in ("before", "after")]
    shows_measure = [
        verbose and any(getattr(cell, side) for cell in column.cells.values()) for column, side in measured_columns
    ]
    columns = (
        report.ReportColumn("kind"),
        report.ReportColumn("fqn"),
        report.ReportColumn("dtype", detail=True),
        report.ReportColumn("shape", detail=True),
        report.ReportColumn("requires_grad", detail=True),
        report.ReportColumn("origin", detail=not (verbose and any(row.origin for row in verification.state.tensors))),
        *(report.ReportColumn(column.name) for column in proof_columns),
        *(
            report.ReportColumn(f"{column.name}_{side}", detail=not is_shown)
            for (column, side), is_shown in zip(measured_columns, shows_measure, strict=True)
        ),
        report.ReportColumn("reason"),
    )
    rows = tuple(
        (
            format_kind(row),
            row.fqn,
            row.dtype,
            format_shape(row.shape),
            format_yes_no(row.requires_grad),
            format_origin(row.origin) if row.origin else None,
            *(column.cells[row.fqn].verdict.value if row.fqn in column.cells else None for column in proof_columns),
            *(getattr(column.cells.get(row.fqn), side, None) for column, side in measured_columns),
            "; ".join(_format_reasons(_list_cell_reasons(row.fqn, proof_columns))) or None,
        )
        for row in verification.state.tensors
    )
    return Table(columns, rows)


def _list_cell_reasons(fqn: str, proof_columns: Sequence[ProofColumn]) -> list[ColumnReason]:
    cells = [(column.name, column.cells.get(fqn)) for column in proof_columns]
    return [(name, cell.reason) for name, cell in cells if cell is not None and cell.reason]


# The human-readable page: the tensors by kind, then the checks.


def _build_page(verification: Verification, problems: tuple[Problem, ...], view: View) -> Page:
    proof_columns = _list_columns(verification)
    fqns = frozenset(row.fqn for row in verification.state.tensors)
    columns = (
        report.ReportColumn("name"),
        *(report.ReportColumn(column.name, shared_format=_get_shared_format(column, fqns)) for column in proof_columns),
    )
    proofs = tuple(_build_proof_line(check, fqns) for check in verification.checks)
    verdict = _format_verdict(verification, problems)
    return Page(
        subtitle=f"{verification.state.format}, {describe_size(verification.state.tensors)}",
        columns=columns,
        groups=_build_groups(verification, proof_columns, view),
        totals=(*(f"{line.cells[0]}: {line.remark}" for line in proofs), verdict),
        problems=problems,
        verdict=verdict,
        outcomes=Group("checks", _format_verdict_counts(verification.checks), proofs),
    )


def _get_shared_format(column: ProofColumn, fqns: frozenset[str]) -> str:
    """Return the text that replaces a column of equal signs. Name failed aliases, because they have no row."""
    names = [fqn for fqn, cell in column.cells.items() if fqn not in fqns and cell.verdict is Verdict.FAILED]
    exception = f" except {join_names(names, MAX_NAMES)}" if names else ""
    return f"{column.name}: all {{}}" + exception.replace("{", "{{").replace("}", "}}")


def _build_groups(verification: Verification, proof_columns: Sequence[ProofColumn], view: View) -> tuple[Group, ...]:
    worst = find_worst_verdicts(verification)
    groups = []
    for kind in Kind:
        rows = [row for row in verification.state.tensors if row.kind is kind]
        if not rows:
            continue
        shared_reasons = _find_shared_reasons(rows, proof_columns)
        lines = [_build_line(row, proof_columns, shared_reasons, worst[row.fqn], view) for row in rows]
        summary = _summarize_group(rows, worst) + "".join(f"; {reason}" for reason in _format_reasons(shared_reasons))
        lines = lines if view.unfold else fold.fold_lines(_join_causes(rows, lines))
        groups.append(Group(KIND_NOUNS[kind], summary, tuple(lines)))
    return tuple(groups)


#: Largest number of lines for the tensors of a problem with equal verdicts; more share a line.
MAX_LINES_OF_CAUSE = 3


def _join_causes(rows: Sequence[TensorInfo], lines: Sequence[Line]) -> list[Line]:
    """Join the lines of unregistered tensors that come from the same source line and have equal verdicts."""
    groups: dict[object, list[Line]] = {}
    for position, (row, line) in enumerate(zip(rows, lines, strict=True)):
        is_cause = row.kind is Kind.UNREGISTERED and row.origin is not None
        key = (row.origin, line.cells[1:], line.remark, line.mood) if is_cause else position
        groups.setdefault(key, []).append(line)
    joined_lines: list[Line] = []
    for alike in groups.values():
        folded_lines = fold.fold_lines(alike)
        start = _find_common_module([line.cells[0] for line in folded_lines])
        height = len(folded_lines) * (2 if alike[0].remark else 1)
        if height <= MAX_LINES_OF_CAUSE or len(folded_lines) == 1 or not start:
            joined_lines += alike
            continue
        name = f"{start}.* ({plural(len(alike), 'tensor')})"
        joined_lines.append(Line((name, *alike[0].cells[1:]), alike[0].remark, alike[0].mood))
    return joined_lines


def _find_common_module(names: Sequence[str]) -> str:
    """Return the module path at the beginning of all names, such as `encoder.layers`, or "" if there is none."""
    first, last = min(names).split("."), max(names).split(".")
    count = next((n for n, (part, last_part) in enumerate(zip(first, last, strict=False)) if part != last_part), 0)
    return ".".join(first[:count])


def _summarize_group(rows: Sequence[TensorInfo], worst: dict[str, Verdict]) -> str:
    counts = Counter(worst[row.fqn] for row in rows)
    parts = [
        f"{counts[verdict]:,} {verdict.value}" for verdict in (Verdict.FAILED, Verdict.INCONCLUSIVE) if counts[verdict]
    ]
    return ", ".join([plural(len(rows), "tensor"), *parts])


#: A column's name, and the reason of a cell's verdict.
ColumnReason = tuple[str, str]


def _find_shared_reasons(rows: Sequence[TensorInfo], proof_columns: Sequence[ProofColumn]) -> tuple[ColumnReason, ...]:
    """Return the reasons to show in a group's heading, because all rows share them. Return () for a single row."""
    reasons = []
    for column in proof_columns if len(rows) > 1 else ():
        alike = {(column.get_verdict(row.fqn), column.get_reason(row.fqn)) for row in rows}
        _, reason = alike.pop()
        if not alike and reason:
            reasons.append((column.name, reason))
    return tuple(reasons)


def _format_own_reasons(
    fqn: str, proof_columns: Sequence[ProofColumn], shared_reasons: Sequence[ColumnReason]
) -> list[str]:
    own_reasons = [(column.name, column.get_reason(fqn)) for column in proof_columns]
    return _format_reasons(
        [(name, reason) for name, reason in own_reasons if reason and (name, reason) not in shared_reasons]
    )


def _format_reasons(reasons: Iterable[ColumnReason]) -> list[str]:
    by_reason = group_by(reasons, lambda pair: pair[1])
    return [f"{', '.join(name for name, _ in pairs)}: {reason}" for reason, pairs in by_reason.items()]


_MOODS = {Verdict.FAILED: "bad", Verdict.INCONCLUSIVE: "warn"}


def _build_line(
    row: TensorInfo,
    proof_columns: Sequence[ProofColumn],
    shared_reasons: Sequence[ColumnReason],
    worst: Verdict,
    view: View,
) -> Line:
    """Return the line of a tensor. Its remark has the reasons that the signs do not show."""
    parts = _format_own_reasons(row.fqn, proof_columns, shared_reasons)
    if row.note and (view.verbose or row.note_kind is not NoteKind.IN_UNREGISTERED_MODULE):
        parts.append(row.note)
    if view.verbose:
        parts.extend(_format_measures(row.fqn, proof_columns))
    if row.origin and view.verbose:  # a problem shows the line of a tensor that failed
        parts.append(format_origin(row.origin))
    signs = (SIGNS[column.get_verdict(row.fqn)] for column in proof_columns)
    return Line((row.fqn, *signs), "; ".join(parts), _MOODS.get(worst, ""))


def _format_measures(fqn: str, proof_columns: Sequence[ProofColumn]) -> list[str]:
    """Describe the values that each column measured, as in `moves: cpu → cuda:0`."""
    cells = [(column.name, column.cells[fqn]) for column in proof_columns if fqn in column.cells]
    return [
        f"{name}: {cell.before or '-'} → {cell.after or '-'}"
        for name, cell in cells
        if cell.before is not None or cell.after is not None
    ]


def _build_proof_line(check: Check, fqns: frozenset[str]) -> Line:
    """Return the line of a check: `✗ move`, with the method and the result."""
    parts = [check.how]
    if check.verdict is Verdict.FAILED:
        parts = [check.how, check.reason] if check.reason else [_format_failed_count(check, fqns), check.how]
    elif check.verdict is not Verdict.PASSED:
        parts.append(_describe_reason(check))
    elif check.reason:
        parts.append(check.reason)
    remark = ": ".join(filter(None, parts)) or check.verdict.value
    mood = _MOODS.get(check.verdict, "dim" if check.verdict is Verdict.SKIPPED else "")
    return Line((f"{SIGNS[check.verdict]} {check.check.value}",), remark, mood)


def _format_failed_count(check: Check, fqns: frozenset[str]) -> str:
    """Describe how many tensors failed, and name the failed aliases, which have no row."""
    failed_names = _list_failed(check)
    tested_names = set(_select_fqns(check.columns, (Verdict.FAILED, Verdict.PASSED, Verdict.INCONCLUSIVE)))
    count, names = len(failed_names & fqns), sorted(failed_names - fqns)
    parts = [f"{count:,} of {max(len(tested_names & fqns), count):,}"] if count else []
    parts += [join_names(names, MAX_NAMES)] if names else []
    return f"{' and '.join(parts)} failed" if parts else "failed"


def _list_failed(check: Check) -> set[str]:
    """Return the names of the tensors that failed the check. Notes do not count as failures."""
    reported = {finding.fqn for finding in check.findings if finding.fqn and finding.severity is not Severity.NOTE}
    return reported | set(_select_fqns(check.columns, (Verdict.FAILED,)))


def _select_fqns(columns: Iterable[Column], verdicts: Sequence[Verdict]) -> Iterable[str]:
    return (fqn for column in columns for fqn, cell in column.cells.items() if cell.verdict in verdicts)


def _join_names(checks: Iterable[Check]) -> str:
    return ", ".join(check.check.value for check in checks)


def _format_verdict_counts(checks: Sequence[Check]) -> str:
    counts = Counter(check.verdict for check in checks)
    return ", ".join(f"{counts[verdict]:,} {verdict.value}" for verdict in WORST_FIRST if counts[verdict])


def _format_verdict(verification: Verification, problems: Sequence[Problem]) -> str:
    """Summarize the run in a line: the problems, and which checks failed, are inconclusive, or passed."""
    tensors = len(verification.state.tensors)
    failed_count = count_verdicts(verification).tensors[Verdict.FAILED.value]
    fqns = {tensor.fqn for tensor in verification.state.tensors}
    counts_by_proof = {
        len(_list_failed(check) & fqns) for check in verification.checks if check.verdict is Verdict.FAILED
    }
    parts = []
    for verdict in WORST_FIRST:
        checks = [check for check in verification.checks if check.verdict is verdict]
        names = _join_names(checks)
        if checks and verdict is Verdict.FAILED and failed_count:
            names = names if counts_by_proof == {failed_count} else f"one or more of {names}"
            parts.append(f"{failed_count:,} of {plural(tensors, 'tensor')} failed {names}")
        elif checks:
            parts.append(f"{names} {verdict.value}")
    counts_text = f"{format_severities(problems)}: " if problems else ""
    return counts_text + "; ".join(parts)
