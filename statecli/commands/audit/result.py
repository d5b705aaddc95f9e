"""The result of `audit`, as plain data."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from statecli.core.finding import Finding, Severity
from statecli.core.option_defaults import AUDIT_FAIL_ON
from statecli.core.result_views import ResultViews
from statecli.core.rule import Rule
from statecli.core.run_scope import Configuration, NotChecked, merge_not_checked
from statecli.targets.target_result import LockCount, Skipped, TargetResult, TargetStatus


class Audit(ResultViews, msgspec.Struct, frozen=True):
    """Result of one run over all targets. Findings of severity `fail_on` or higher set exit status 1.

    `unused_reference` says why the requested class, checkpoint or lock was compared with no target. `inconclusive` are
    reasons for exit status 2 without a failed target, `run_notes` notes without a target.
    """

    targets: tuple[TargetResult, ...]
    fail_on: Severity = AUDIT_FAIL_ON
    unused_reference: str | None = None
    configuration: Configuration = Configuration()
    #: Number of rules that the configuration, --select and --ignore disable.
    disabled_rules: int = 0
    plugin_rules: tuple[Rule, ...] = ()
    lock_file: str | None = None
    #: The class of --model that the targets are checked against; None if the class is itself one of the given targets.
    model: str | None = None
    inconclusive: tuple[str, ...] = ()
    run_notes: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all targets, without accepted findings."""
        return tuple(finding for target in self.targets for finding in target.findings)

    @property
    def failing(self) -> tuple[Finding, ...]:
        """The findings that set exit status 1."""
        return tuple(finding for finding in self.findings if finding.severity.is_at_least(self.fail_on))

    @property
    def checked_targets(self) -> tuple[TargetResult, ...]:
        """All targets except the class of `--model`. If this class is the only target, it counts."""
        return tuple(target for target in self.targets if target.target != self.model) or self.targets

    @property
    def lock_count(self) -> LockCount:
        """Number of tensors that were compared with the lock, and number of tensors that match, over all targets."""
        counts = [target.lock_count for target in self.targets if target.lock_count is not None]
        return LockCount(sum(count.compared for count in counts), sum(count.matching for count in counts))

    def count(self, status: TargetStatus) -> int:
        """Return the number of targets with this status."""
        return sum(target.status is status for target in self.targets)

    @property
    def not_checked(self) -> tuple[NotChecked, ...]:
        """The tensors and files that no rule has checked, counted over all targets."""
        return merge_not_checked(entry for target in self.targets for entry in target.not_checked)

    @property
    def ran(self) -> tuple[str, ...]:
        """The rules that ran on at least one target."""
        return tuple(dict.fromkeys(rule for target in self.targets for rule in target.ran))

    @property
    def skipped_rules(self) -> tuple[Skipped, ...]:
        """Skipped rules: the rules that ran on no target (one reason each), then the rules skipped on some targets."""
        ran, on_some = set(self.ran), []
        on_none: dict[str, Skipped] = {}
        for target in self.targets:
            for skipped in target.skipped:
                if skipped.rule in ran:
                    on_some.append(skipped)
                else:
                    on_none.setdefault(skipped.rule, Skipped(skipped.rule, skipped.reason))
        return (*on_none.values(), *on_some)

    def find_unrun_rules(self, requested: Collection[str]) -> tuple[Skipped, ...]:
        """Return the requested rules that ran on no target. If no rule ran at all, return at least one skipped rule."""
        ran = frozenset(self.ran)
        skipped = {entry.rule: entry for entry in reversed(self.skipped_rules) if entry.rule not in ran}
        matching = tuple(entry for rule, entry in skipped.items() if rule in requested)
        return matching if matching or ran else tuple(skipped.values())[-1:]
