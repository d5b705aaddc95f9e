"""JSON document of `rules`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statecli.core.finding import Severity
from statecli.core.version import __version__
from statecli.report import RuleText


class RuleRow(msgspec.Struct, frozen=True):
    """A rule. `explanation` has four paragraphs: summary, why, example and fix."""

    name: str
    severity: Severity
    about: str
    summary: str
    explanation: str
    #: Commands that report the rule.
    commands: tuple[str, ...]


class RulesDocument(msgspec.Struct, frozen=True):
    """`statecli rules -f json`. Consumers ignore keys they do not know."""

    schema: str
    statecli: str
    rules: tuple[RuleRow, ...]


def build_rules_document(texts: Sequence[RuleText]) -> RulesDocument:
    """Return the document of the rules."""
    rows = (
        RuleRow(rule.name, rule.severity, rule.about, rule.summary, rule.explanation, rule.commands) for rule in texts
    )
    return RulesDocument("statecli.rules/1", __version__, tuple(rows))
