"""Run `statecli rules`: list the rules, or explain a rule."""

from __future__ import annotations

from collections.abc import Sequence

from statecli.commands import audit
from statecli.core.rule import Rule
from statecli.report import RuleText, rules
from statecli.requests.options import ListOutput, RulesOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: RulesOptions, caller: Caller) -> Outcome[tuple[RuleText, ...]]:  # noqa: ARG001 - as of all commands
    """List the rules, list those of a group, or explain a rule. Raises UsageError if the name is unknown."""
    all_rules = rules.list_rules(_list_plugin_rules(options.plugin))
    listed_rules = (
        all_rules if options.name is None else tuple(rule for rule in all_rules if rule.about == options.name)
    )
    if options.name is None or listed_rules:
        return Outcome(listed_rules, rules.build_rules_report(listed_rules))
    texts = (rules.explain_rule(options.name, all_rules),)
    former = rules.describe_former_name(options.name)
    if options.output_format in (None, ListOutput.TABLE, ListOutput.PLAIN):
        return Outcome(texts, text=lambda width: rules.format_explanation(texts[0], width), warning=former)
    return Outcome(texts, rules.build_rules_report(texts), warning=former)


def _list_plugin_rules(names: Sequence[str]) -> tuple[Rule, ...]:
    if not names:
        return ()
    return audit.plugins.list_entries(audit.import_plugin.import_plugins(audit.plugins.PluginRequest(tuple(names))))
