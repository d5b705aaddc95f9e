"""Test cases from findings, for test runners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from statecli.core.finding import Finding
from statecli.core.units import format_origin, plural
from statecli.report import Case, Outcome


def build_cases(suite: str, findings: Iterable[Finding], passed_name: str) -> tuple[Case, ...]:
    """Return a failed case for each rule with findings; without findings, a passed case named `passed_name`."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    cases = tuple(build_failed_case(suite, rule, rule_findings) for rule, rule_findings in by_rule.items())
    return cases or (Case(suite, passed_name, Outcome.PASSED),)


def build_failed_case(suite: str, name: str, findings: Sequence[Finding]) -> Case:
    """Return a failed case. Its message is the only finding's, else the number of findings and the first one."""
    first = findings[0].message
    message = first if len(findings) == 1 else f"{plural(len(findings), 'finding')}, the first: {first}"
    return Case(suite, name, Outcome.FAILED, message, tuple(map(describe_finding, findings)))


def describe_finding(finding: Finding) -> str:
    """Format a finding as a line: rule, message, help, source line."""
    text = f"{finding.severity.value}[{finding.rule}]: {finding.message}"
    text += f" ({finding.help})" if finding.help else ""
    line = "" if finding.origin is UNSET else format_origin(finding.origin)
    return f"{text} [{line}]" if line and line not in text else text
