"""The report of `statecli bisect`: which checkpoint first meets the condition, and the result of each checkpoint."""

from __future__ import annotations

from statecli.commands.bisect.result import BisectAnswer, Bisection, Probe
from statecli.commands.log.checkpoints import shorten_paths
from statecli.core import quoting
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
    rule_texts,
)
from statecli.report.documents.bisect import build_bisect_document

COLUMNS = (ReportColumn("checkpoint"), ReportColumn("step", right=True), ReportColumn("holds"))
TABLE_COLUMNS = (*COLUMNS, ReportColumn("evidence"))
_MOODS = {True: "bad", False: "", None: "warn"}
_WORDS = {True: "yes", False: "no", None: "?"}


def build_bisect_report(bisection: Bisection, view: View) -> Report:
    """Return the report of a search for the first checkpoint that meets a condition."""
    return Report(
        title=f"{bisection.target}: condition {quoting.quote(bisection.condition)}",
        document=lambda: build_bisect_document(bisection),
        table=lambda: Table(TABLE_COLUMNS, Rows(_build_cells, bisection.probes), has_findings=False),
        page=lambda: _build_page(bisection),
        findings=bisection.findings,
        notes=fold.limit_notes(bisection.notes, view.verbose),
        rules_in_rows=frozenset(finding.rule for finding in bisection.findings),
        rules=lambda: rule_texts.list_rule_texts(bisection.findings),
        cases=lambda: (_build_case(bisection),),
        troubles=tuple(Trouble(bisection.target, line) for line in describe_inconclusive(bisection)),
        show_all=view.unfold,
    )


def describe_inconclusive(bisection: Bisection) -> list[str]:
    """Return a line for each reason why the search is inconclusive, or [] if the search has an answer."""
    if bisection.answer is not BisectAnswer.INCONCLUSIVE:
        return []
    errors = [probe.error for probe in bisection.probes if probe.error is not None]
    return [f"{bisection.target}: {_format_verdict(bisection)}", *errors]


def _build_cells(probe: Probe) -> tuple[Cell, ...]:
    return (probe.path, probe.step.number if probe.step else None, _WORDS[probe.holds], probe.error or probe.evidence)


def _build_page(bisection: Bisection) -> Page:
    probes = sorted(bisection.probes, key=lambda probe: (probe.step is None, probe.step.number if probe.step else 0))
    names = shorten_paths([probe.path for probe in probes])
    lines = tuple(_build_line(probe, name) for probe, name in zip(probes, names, strict=True))
    verdict = _format_verdict(bisection)
    read_text = f"{len(probes):,} of {plural(bisection.checkpoints, 'checkpoint')} read"
    return Page(
        subtitle="",
        columns=COLUMNS,
        groups=(Group("checkpoints", read_text, lines),),
        totals=(verdict,),
        verdict=verdict,
    )


def _build_line(probe: Probe, name: str) -> Line:
    step = f"{probe.step.number:,}" if probe.step else "-"
    error = (probe.error or "").removeprefix(f"{probe.path}: ")
    return Line((name, step, _WORDS[probe.holds]), error or probe.evidence, _MOODS[probe.holds])


def _format_verdict(bisection: Bisection) -> str:
    condition, first, before = quoting.quote(bisection.condition), bisection.first, bisection.last_before
    if bisection.answer is BisectAnswer.NEVER:
        return f"{condition} is false at the last checkpoint"
    if bisection.answer is BisectAnswer.FOUND and first is not None:
        return f"first {bisection.condition}: {_describe(first)}: {first.evidence}"
    unreadable_text = f"{plural(len(bisection.between), 'checkpoint')} between them could not be read"
    if first is not None and before is not None:
        return f"{condition} is true at {_describe(first)} and false at {_describe(before)}; {unreadable_text}"
    if first is not None:
        return f"{condition} is true at {_describe(first)}; earlier checkpoints could not be read"
    if before is not None:
        return f"{condition} is false at {_describe(before)}; later checkpoints could not be read"
    return "no checkpoint could be read"


def _describe(probe: Probe) -> str:
    return f"{probe.path} (step {probe.step.number:,})" if probe.step else probe.path


def _build_case(bisection: Bisection) -> Case:
    outcomes = {
        BisectAnswer.FOUND: CaseOutcome.PASSED,
        BisectAnswer.NEVER: CaseOutcome.FAILED,
        BisectAnswer.INCONCLUSIVE: CaseOutcome.ERROR,
    }
    name, message = f"first {bisection.condition}", _format_verdict(bisection)
    text = tuple(f"{probe.path}: {_WORDS[probe.holds]}: {probe.error or probe.evidence}" for probe in bisection.probes)
    return Case(bisection.target, name, outcomes[bisection.answer], message, text)
