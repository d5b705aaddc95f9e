"""What was tried, as a test runner would show it, where findings alone say what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from statecli.core.finding import Finding
from statecli.core.units import format_origin, plural
from statecli.report import Case, Outcome


def of_findings(suite: str, findings: Iterable[Finding], otherwise: str) -> tuple[Case, ...]:
    """A case that failed for each rule that has findings; where none has, one of the name `otherwise` that passed."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    cases = tuple(failed(suite, rule, several) for rule, several in by_rule.items())
    return cases or (Case(suite, otherwise, Outcome.PASSED),)


def failed(suite: str, name: str, findings: Sequence[Finding]) -> Case:
    """A case that these make fail. Its message is the only one, else how many there are and the first."""
    first = findings[0].message
    message = first if len(findings) == 1 else f"{plural(len(findings), 'finding')}, the first: {first}"
    return Case(suite, name, Outcome.FAILED, message, tuple(map(told, findings)))


def told(finding: Finding) -> str:
    """A line of it: its rule, its message, what to do, and the source line."""
    text = f"{finding.severity.value}[{finding.rule}]: {finding.message}"
    text += f" ({finding.help})" if finding.help else ""
    line = "" if finding.origin is UNSET else format_origin(finding.origin)
    return f"{text} [{line}]" if line and line not in text else text
