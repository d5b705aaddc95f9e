"""The report of `statecli audit`: what was found, target by target, and the line that says how many were audited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from statecli import report
from statecli.auditing.result import Audit, Status, Target
from statecli.finding import Finding, Severity
from statecli.report import (
    Case,
    Group,
    Line,
    Outcome,
    Page,
    Report,
    Table,
    Trouble,
    View,
    cases,
    documents,
    fold,
    rules,
)
from statecli.report.text import plural, size_text

_MOODS = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "dim"}
#: Worst first.
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def of_audit(found: Audit, view: View) -> Report:
    """Everything `audit` has to say."""
    notes = [note for target in found.targets for note in target.notes] if view.verbose else []
    return Report(
        title=found.targets[0].target if len(found.targets) == 1 else plural(len(found.targets), "target"),
        document=lambda: documents.of_audit(found),
        table=lambda: _flat(found),
        page=lambda: _page(found, view),
        findings=found.findings,
        notes=tuple(notes),
        in_rows=frozenset(finding.rule for finding in found.findings),
        failing=found.failing,
        whole=view.unfold,
        rules=lambda: rules.of_audit(found.ran, _everything(found)),
        cases=lambda: tuple(_cases(found)),
        accepted=tuple((one.finding, one.reason) for target in found.targets for one in target.accepted),
        troubles=_troubles(found),
    )


def _everything(found: Audit) -> list[Finding]:
    """Accepted findings too."""
    return [*found.findings, *(one.finding for target in found.targets for one in target.accepted)]


def _troubles(found: Audit) -> tuple[Trouble, ...]:
    """A target that failed is an error, one that was skipped a note."""
    bad = {Status.FAILED: Severity.ERROR, Status.SKIPPED: Severity.NOTE}
    return tuple(
        Trouble(one.target, one.reason or one.status.value, bad[one.status])
        for one in found.targets
        if one.status in bad
    )


def _cases(found: Audit) -> Iterator[Case]:
    """A case a target and rule, in the order in which they ran; one for a target that was not audited."""
    for target in found.targets:
        if target.status is not Status.AUDITED:
            outcome = Outcome.ERROR if target.status is Status.FAILED else Outcome.SKIPPED
            yield Case(target.target, "audit", outcome, target.reason or "")
        by_rule: dict[str, list[Finding]] = {rule: [] for rule in target.ran}
        for finding in target.findings:
            by_rule.setdefault(finding.rule, []).append(finding)
        accepted: dict[str, list[str]] = {}
        for one in target.accepted:
            accepted.setdefault(one.finding.rule, []).append(f"accepted: {cases.told(one.finding)}: {one.reason}")
        for rule, several in by_rule.items():
            yield _case(target.target, rule, several, accepted.get(rule, []), found.fail_on)
        yield from (Case(target.target, one.rule, Outcome.SKIPPED, one.reason) for one in target.skipped)


def _case(target: str, rule: str, found: Sequence[Finding], accepted: Sequence[str], fail_on: Severity) -> Case:
    """One that findings milder than `fail_on` do not fail tells of them all the same."""
    failing = [one for one in found if one.severity.rank >= fail_on.rank]
    mild = [cases.told(one) for one in found if one.severity.rank < fail_on.rank]
    case = cases.failed(target, rule, failing) if failing else Case(target, rule, Outcome.PASSED)
    return replace(case, text=(*case.text, *mild, *accepted))


def _flat(found: Audit) -> Table:
    names = ("target", "severity", "rule", "fqn", "message", "help")
    columns = tuple(report.Column(name, detail=name in ("fqn", "help")) for name in names)
    rows = tuple(
        (one.target, one.severity.value, one.rule, one.fqn, one.message, one.help)
        for target in found.targets
        for one in _sorted(target.findings)
    )
    return Table(columns, rows)


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: -one.severity.rank)


def _page(found: Audit, view: View) -> Page:
    verdict = _verdict(found)
    return Page(
        subtitle=_subtitle(found),
        columns=(report.Column("finding"), report.Column("rule"), report.Column("severity")),
        groups=tuple(_group(target, view) for target in found.targets if target.findings),
        totals=(*_untold(found), verdict),
        verdict=verdict,
    )


def _subtitle(found: Audit) -> str:
    audited = [target for target in found.targets if target.status is Status.AUDITED]
    tensors, size = sum(target.tensors for target in audited), sum(target.bytes for target in audited)
    formats = ", ".join(dict.fromkeys(target.format or "" for target in audited))
    return f"{formats or 'nothing audited'}, {plural(tensors, 'tensor')}, {size_text(size)}"


def _group(target: Target, view: View) -> Group:
    findings = _sorted(target.findings)
    told = findings if view.unfold else fold.findings(findings)
    lines = tuple(
        Line((one.message, one.rule, one.severity.value), one.help or "", _MOODS[one.severity]) for one in told
    )
    return Group(target.target, counted(target.findings), lines)


def counted(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings`; `clean` where there is none."""
    counts = Counter(one.severity for one in findings)
    return ", ".join(plural(counts[one], one.value) for one in _ORDER if counts[one]) or "clean"


def _untold(found: Audit) -> list[str]:
    return [f"{one.status.value}: {one.target}: {one.reason}" for one in found.targets if one.status is Status.SKIPPED]


def _verdict(found: Audit) -> str:
    """`3 audited: 1 error in 1 of them; 1 failed; 2 skipped; 31 rules ran, 12 skipped`."""
    bad = sum(bool(target.findings) for target in found.targets)
    parts = [f"{found.count(Status.AUDITED):,} audited: {counted(found.findings)}"]
    if bad and len(found.targets) > 1:
        parts[0] += f" in {bad:,} of them"
    parts += [f"{count:,} {status.value}" for status in list(Status)[1:] if (count := found.count(status))]
    accepted = sum(len(target.accepted) for target in found.targets)
    parts += [f"{accepted:,} accepted"] if accepted else []
    unheard = len({one.rule for one in found.skipped} - set(found.ran))
    parts.append(f"{plural(len(found.ran), 'rule')} ran" + (f", {unheard:,} skipped" if unheard else ""))
    return "; ".join(parts)
