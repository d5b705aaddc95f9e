"""The rules of findings, as outputs show them."""

from __future__ import annotations

from collections.abc import Iterable

from statecli.core.finding import Finding
from statecli.core.rule import Rule
from statecli.report import RuleText


def of(findings: Iterable[Finding]) -> tuple[RuleText, ...]:
    """Return the rule of each finding once, with the severity of its first finding and without the explanation."""
    # Reading a checkpoint for people does without the rules of an audit, and starts the sooner.
    from statecli.rules import DICTIONARY

    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.rule, finding)
    return tuple(RuleText(name, finding.severity, DICTIONARY[name].summary) for name, finding in first.items())


def describe_rule(rule: Rule) -> RuleText:
    """Return all that outputs show of a rule."""
    return RuleText(rule.name, rule.severity, rule.summary, rule.explanation, rule.group, rule.commands)


def of_audit(ran: Iterable[str], findings: Iterable[Finding]) -> tuple[RuleText, ...]:
    """Return the rules of an audit: those that ran, and those of other findings."""
    from statecli.rules import RULES

    findings = tuple(findings)
    wanted = set(ran) | {finding.rule for finding in findings}
    of_audit = tuple(describe_rule(rule) for rule in RULES if rule.name in wanted)
    names = {rule.name for rule in of_audit}
    return (*of_audit, *of(finding for finding in findings if finding.rule not in names))
