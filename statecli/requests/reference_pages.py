"""Run `statecli rules`, `config` and `schema`, the commands without a target.

`rules` and `config` build a report, so they have every output format of a list.
"""

from __future__ import annotations

from collections.abc import Sequence

from statecli.commands import audit
from statecli.commands.audit.config import LoadedConfig
from statecli.core.rule import Rule
from statecli.report import RuleText, config, rules
from statecli.report.documents.schema_texts import read_schema
from statecli.requests.options import ConfigOptions, ListOutput, RulesOptions, SchemaOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: RulesOptions | ConfigOptions | SchemaOptions, caller: Caller) -> Outcome[object]:
    """Run the command that the options belong to."""
    if isinstance(options, RulesOptions):
        return _run_rules(options)
    if isinstance(options, ConfigOptions):
        return _run_config(options, caller)
    return Outcome(options.command, content=(read_schema(options.command),))


def _run_rules(options: RulesOptions) -> Outcome[tuple[RuleText, ...]]:
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


def _run_config(options: ConfigOptions, caller: Caller) -> Outcome[LoadedConfig]:
    loaded = audit.config.load_config(options.config, no_config=options.no_config)
    caller.check_files([] if loaded.path is None else [loaded.path])
    report = config.build_config_report(audit.config.list_settings(loaded), loaded.path)
    return Outcome(loaded, report, warning=rules.describe_former_names(loaded.config.rule_names, loaded.rules, "audit"))
