"""Texts about rules, shown in outputs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import msgspec

from statecli.core.finding import Finding
from statecli.core.rule import Rule
from statecli.report import Problem, RuleText


def list_rule_texts(findings: Iterable[Finding | Problem]) -> tuple[RuleText, ...]:
    """Return each rule of the findings once, without its explanation, with the severity of its first finding."""
    first: dict[str, Finding | Problem] = {}
    for finding in findings:
        first.setdefault(finding.rule, finding)
    texts = read_rule_texts() if first else {}
    return tuple(RuleText(name, finding.severity, texts[name].summary) for name, finding in first.items())


@functools.cache
def read_rule_texts() -> dict[str, RuleText]:
    """Return every rule of statecli by its name, the rules of `audit` first.

    `make docs` writes them from the dictionary of the rules, because importing the rules takes as long as listing a
    checkpoint.
    """
    with open(os.path.join(os.path.dirname(__file__), "rule_texts.json"), "rb") as file:
        texts = msgspec.json.decode(file.read(), type=tuple[RuleText, ...])
    return {text.name: text for text in texts}


def encode_rule_texts(rules: Iterable[Rule]) -> str:
    """Return the text of `rule_texts.json`."""
    encoded = msgspec.json.encode([*map(describe_rule, rules)])
    return msgspec.json.format(encoded, indent=1).decode() + "\n"


def describe_rule(rule: Rule) -> RuleText:
    """Return the texts and properties of a rule that are shown in outputs."""
    return RuleText(
        rule.name, rule.severity, rule.summary, rule.explanation, rule.group, rule.commands, rule.plugin, rule.heading
    )
