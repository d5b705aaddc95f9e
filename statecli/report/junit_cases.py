"""Build test cases from problems, for test runners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from statecli.core.finding import Finding, Severity
from statecli.core.grouping import group_by
from statecli.core.units import format_fix_in_line, format_origin, plural
from statecli.report import Case, CaseOutcome, Line, Problem, fold, label_help


def build_cases(
    suite: str, problems: Iterable[Problem], passed_name: str, fail_on: Severity = Severity.NOTE
) -> tuple[Case, ...]:
    """Return a case for each rule with problems. Without problems, return a passed case named `passed_name`."""
    by_rule = group_by(problems, lambda problem: problem.rule)
    cases = tuple(build_rule_case(suite, rule, rule_problems, fail_on) for rule, rule_problems in by_rule.items())
    return cases or (Case(suite, passed_name, CaseOutcome.PASSED),)


def build_rule_case(suite: str, rule: str, problems: Sequence[Problem], fail_on: Severity) -> Case:
    """Return the case of a rule. Problems below `fail_on` are in its text, but do not make the case fail."""
    failing = [problem for problem in problems if problem.severity.is_at_least(fail_on)]
    milder_lines = (describe_problem(problem) for problem in problems if not problem.severity.is_at_least(fail_on))
    case = build_failed_case(suite, rule, failing) if failing else Case(suite, rule, CaseOutcome.PASSED)
    return replace(case, text=(*case.text, *milder_lines))


def build_failed_case(suite: str, name: str, problems: Sequence[Problem]) -> Case:
    """Return a failed case. The message is the first problem. If there are several problems, their number comes first.

    The text lists all problems. If a problem has several findings, they follow the problem in folded lines.
    """
    first = problems[0].message
    message = first if len(problems) == 1 else f"{plural(len(problems), 'problem')}, the first: {first}"
    return Case(suite, name, CaseOutcome.FAILED, message, tuple(_list_lines(problems)))


def _list_lines(problems: Iterable[Problem]) -> Iterator[str]:
    for problem in problems:
        yield describe_problem(problem)
        if len(problem.findings) > 1:
            messages = [Line((finding.message, finding.rule)) for finding in problem.findings]
            yield from (f"  {line.cells[1]}: {line.cells[0]}" for line, _ in fold.fold_messages(messages))


def describe_problem(problem: Problem) -> str:
    """Format a problem as a line, as `describe_finding` formats a finding."""
    return describe_finding(problem.merge_findings())


def describe_finding(finding: Finding) -> str:
    """Format a finding as a line: severity, rule, message, help and source line."""
    text = f"{finding.severity.value}[{finding.rule}]: {finding.message}"
    text += f" ({label_help(format_fix_in_line(finding.help))})" if finding.help else ""
    line = "" if finding.origin is UNSET else format_origin(finding.origin)
    return f"{text} [{line}]" if line and line not in text else text
