"""The report of `statecli resume-check`: a line for each kind of state, and the findings."""

from __future__ import annotations

from statecli.commands.resume_check.result import ResumeAnswer, ResumeCheck, StateRow
from statecli.core.units import plural
from statecli.report import (
    Case,
    CaseOutcome,
    Cell,
    Group,
    Line,
    Page,
    Report,
    ReportColumn,
    Rows,
    Table,
    Trouble,
    View,
    fold,
    problems,
    rule_texts,
)
from statecli.report.documents.resume_check import build_resume_check_document

COLUMNS = (ReportColumn("state"), ReportColumn("resumed"))
TABLE_COLUMNS = (*COLUMNS, ReportColumn("evidence"))
_MOODS = {True: "good", False: "bad", None: "dim"}
_WORDS = {True: "yes", False: "no", None: "-"}


def build_resume_check_report(result: ResumeCheck, view: View) -> Report:
    """Return the report of a comparison of two training runs."""
    return Report(
        title=f"{result.target}: resume-check",
        document=lambda: build_resume_check_document(result),
        table=lambda: Table(TABLE_COLUMNS, Rows(_build_cells, result.states), has_findings=False),
        page=lambda: _build_page(result),
        findings=result.findings,
        notes=fold.limit_notes(result.notes, view.verbose),
        rules=lambda: rule_texts.list_rule_texts(result.findings),
        cases=lambda: (_build_case(result),),
        troubles=tuple(Trouble(result.target, line) for line in describe_inconclusive(result)),
        show_all=view.unfold,
    )


def describe_inconclusive(result: ResumeCheck) -> list[str]:
    """Return why the training runs cannot be compared, or [] if they can be."""
    return [f"{result.target}: {result.reason}"] if result.answer is ResumeAnswer.INCONCLUSIVE else []


def _build_cells(row: StateRow) -> tuple[Cell, ...]:
    return (row.state.value, _WORDS[row.resumed], row.evidence)


def _build_page(result: ResumeCheck) -> Page:
    verdict = _format_verdict(result)
    lines = tuple(
        Line((row.state.value, _WORDS[row.resumed]), row.evidence, _MOODS[row.resumed]) for row in result.states
    )
    title = f"step {result.saved_at + 1}, after the run was resumed from step {result.saved_at}"
    return Page(
        subtitle="",
        columns=COLUMNS,
        groups=(Group("states", title, lines),) if lines else (),
        totals=(verdict,),
        problems=problems.group_findings(result.findings),
        verdict=verdict,
    )


def _format_verdict(result: ResumeCheck) -> str:
    if result.answer is ResumeAnswer.EQUAL:
        return f"a training run resumed from step {result.saved_at} of {result.steps} equals the uninterrupted run"
    if result.answer is ResumeAnswer.INCONCLUSIVE:
        return f"inconclusive: {result.reason}"
    return f"the resumed run differs from the uninterrupted run: {plural(len(result.findings), 'finding')}"


def _build_case(result: ResumeCheck) -> Case:
    outcomes = {
        ResumeAnswer.EQUAL: CaseOutcome.PASSED,
        ResumeAnswer.DIFFERENT: CaseOutcome.FAILED,
        ResumeAnswer.INCONCLUSIVE: CaseOutcome.ERROR,
    }
    details = tuple(": ".join(filter(None, map(str, _build_cells(row)))) for row in result.states)
    return Case(result.target, "resume-check", outcomes[result.answer], _format_verdict(result), details)
