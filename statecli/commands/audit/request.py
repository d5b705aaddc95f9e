"""Arguments of an audit: targets, references, rules, and the project's configuration."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from statecli.commands.audit.baseline import Baseline
from statecli.commands.audit.config import IgnoreEntry
from statecli.commands.audit.plugins import Plugin, join_rules
from statecli.commands.lock.lock_file import Lock
from statecli.core.finding import Severity
from statecli.core.option_defaults import AUDIT_FAIL_ON
from statecli.core.run_scope import Configuration
from statecli.core.selection import Selection
from statecli.rules.audit_rule import AuditRule
from statecli.rules.policy_config import Policy
from statecli.storage import files


class Request(msgspec.Struct, frozen=True):
    """The arguments of an audit. An empty `select` selects every rule.

    Checkpoints are compared with the class `model`, also a target, and with the checkpoint `against`.
    `per_target_ignore` accepts findings of rules by globs of targets, relative to `config_folder`; `severity` replaces
    a rule's own. With `allow_empty`, an unmatched glob is skipped, not failed. With `as_found`, a named file is
    replaced by the target of a walk over its folder. `values` True reads values of any size, False reads none, None
    reads up to the limits of `values_budget`. `plugins` have further rules. `rule_names` are the names of rules and
    groups as the user typed them in options and the configuration.
    """

    targets: tuple[str, ...]
    model: str | None = None
    against: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_target_ignore: Mapping[str, IgnoreEntry] = {}
    config_folder: str = "."
    severity: Mapping[str, Severity] = {}
    fail_on: Severity = AUDIT_FAIL_ON
    policy: Policy = Policy()
    init_device: str | None = None
    selection: Selection = Selection()
    values: bool | None = None
    jobs: int = 0
    lock: Lock | None = None
    lock_file: str | None = None
    frozen_only: bool = False
    weights_only: bool = False
    baseline: Baseline | None = None
    allow_empty: bool = False
    as_found: bool = False
    configuration: Configuration = Configuration()
    plugins: tuple[Plugin, ...] = ()
    rule_names: tuple[str, ...] = ()

    @property
    def known_rules(self) -> tuple[AuditRule, ...]:
        """The rules of statecli, then the rules of the plugins."""
        return join_rules(self.plugins)

    @property
    def rules(self) -> tuple[AuditRule, ...]:
        """The selected rules."""
        selected_rules = (rule for rule in self.known_rules if not self.select or rule.name in self.select)
        return tuple(rule for rule in selected_rules if rule.name not in self.ignore)

    @property
    def lock_folder(self) -> str:
        """The folder of the lock file."""
        return files.get_folder(self.lock_file or "") or "."

    @property
    def checks_lock(self) -> bool:
        """Return whether a selected rule compares targets with a lock."""
        return any(rule.group == "lock" for rule in self.rules)
