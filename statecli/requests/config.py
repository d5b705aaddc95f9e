"""Run `statecli config`: list the settings of audit, and where each is set."""

from __future__ import annotations

from statecli.commands import audit
from statecli.commands.audit.config import LoadedConfig
from statecli.report import config, rules
from statecli.requests.options import ConfigOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: ConfigOptions, caller: Caller) -> Outcome[LoadedConfig]:
    """Load the configuration and list its settings. Raises UsageError if it is invalid."""
    loaded = audit.config.load_config(options.config, no_config=options.no_config)
    caller.check_files([] if loaded.path is None else [loaded.path])
    report = config.build_config_report(audit.config.list_settings(loaded), loaded.path)
    return Outcome(loaded, report, warning=rules.describe_former_names(loaded.config.rule_names, loaded.rules, "audit"))
