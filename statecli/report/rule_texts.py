"""Texts of rules for outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from statecli.core.finding import Finding
from statecli.core.rule import PluginRule, Rule
from statecli.report import Problem, RuleText


def list_rule_texts(findings: Iterable[Finding | Problem]) -> tuple[RuleText, ...]:
    """Return the rule of each finding or problem once, with the severity of the first and without the explanation."""
    # Imported here, because `inspect` without findings starts sooner without the rules of an audit.
    from statecli.rules import DICTIONARY

    first: dict[str, Finding | Problem] = {}
    for finding in findings:
        first.setdefault(finding.rule, finding)
    return tuple(RuleText(name, finding.severity, DICTIONARY[name].summary) for name, finding in first.items())


def describe_rule(rule: Rule) -> RuleText:
    """Return all parts of a rule shown in outputs."""
    plugin = rule.plugin if isinstance(rule, PluginRule) else None
    return RuleText(rule.name, rule.severity, rule.summary, rule.explanation, rule.group, rule.commands, plugin)


def list_audit_rule_texts(
    ran: Iterable[str], findings: Iterable[Finding | Problem], plugin_rules: Sequence[PluginRule] = ()
) -> tuple[RuleText, ...]:
    """Return the rules of an audit: the rules that ran, and the rules of other findings."""
    from statecli.rules import RULES

    findings = tuple(findings)
    shown = set(ran) | {finding.rule for finding in findings}
    audit_rules = tuple(describe_rule(rule) for rule in (*RULES, *plugin_rules) if rule.name in shown)
    names = {rule.name for rule in audit_rules}
    return (*audit_rules, *list_rule_texts(finding for finding in findings if finding.rule not in names))
