"""What an audit is asked to do: targets, references, rules, and what the project's configuration says."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from statecli.commands.audit.baseline import Baseline
from statecli.commands.audit.config import Ignored
from statecli.commands.lock.lock_file import Lock
from statecli.core.finding import Severity
from statecli.core.scope import Configuration
from statecli.core.state import Kind
from statecli.rules import RULES
from statecli.rules.policy_config import Policy
from statecli.rules.rule import AuditRule


class Request(msgspec.Struct, frozen=True):
    """What the user asked of `audit`. `select` () is every rule.

    `model` is the class that the checkpoints are held to, and a target itself; `against` another checkpoint.
    `ignored` are rules whose findings are accepted, by globs of targets as they lie from the folder `ignored_from`;
    `severity` what a rule's own is replaced by. With `allow_empty` a glob that matches nothing is none that failed,
    with `as_found` files that are named are some of their folders', as a walk over those finds them. `values` True
    reads the values whatever their size, False reads none, None reads up to the limits of `values_budget`.
    """

    targets: tuple[str, ...]
    model: str | None = None
    against: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    ignored: Mapping[str, Ignored] = {}
    ignored_from: str = "."
    severity: Mapping[str, Severity] = {}
    fail_on: Severity = Severity.WARNING
    policy: Policy = Policy()
    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    values: bool | None = None
    jobs: int = 0
    lock: Lock | None = None
    lock_folder: str = "."
    frozen_only: bool = False
    weights_only: bool = False
    baseline: Baseline | None = None
    allow_empty: bool = False
    as_found: bool = False
    configuration: Configuration = Configuration()

    @property
    def rules(self) -> tuple[AuditRule, ...]:
        """Those that are to run."""
        chosen = (rule for rule in RULES if not self.select or rule.name in self.select)
        return tuple(rule for rule in chosen if rule.name not in self.ignore)

    @property
    def is_locking(self) -> bool:
        """Whether a rule holds targets to a lock."""
        return any(rule.group == "lock" for rule in self.rules)

    @property
    def whole(self) -> bool:
        """Whether no filter hides a tensor."""
        return not (self.include or self.exclude or self.kind)
