"""The answer of `audit`, as plain data."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from statecli.core.finding import Finding, Severity
from statecli.core.scope import Configuration, NotChecked, merge_not_checked
from statecli.targets.outcome import Skipped, Status, Target


class Audit(msgspec.Struct, frozen=True):
    """One run over all targets. What is of `fail_on` or worse makes it end 1.

    `unheld` says why the class or checkpoint that targets are to be held to was asked for in vain.
    """

    targets: tuple[Target, ...]
    fail_on: Severity = Severity.WARNING
    unheld: str | None = None
    configuration: Configuration = Configuration()
    #: How many rules the configuration, --select and --ignore switch off.
    left_out: int = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all targets, accepted ones left out."""
        return tuple(finding for target in self.targets for finding in target.findings)

    @property
    def failing(self) -> tuple[Finding, ...]:
        """The findings that make it end 1."""
        return tuple(finding for finding in self.findings if finding.severity.rank >= self.fail_on.rank)

    def count(self, status: Status) -> int:
        """How many targets became that."""
        return sum(target.status is status for target in self.targets)

    @property
    def not_checked(self) -> tuple[NotChecked, ...]:
        """What no rule has looked at, added up over all targets."""
        return merge_not_checked(entry for target in self.targets for entry in target.not_checked)

    @property
    def ran(self) -> tuple[str, ...]:
        """The rules that ran on a target at least."""
        return tuple(dict.fromkeys(rule for target in self.targets for rule in target.ran))

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The rules that ran nowhere, each with its first reason; and those that ran on some targets only."""
        ran, somewhere = set(self.ran), []
        nowhere: dict[str, Skipped] = {}
        for target in self.targets:
            for one in target.skipped:
                if one.rule in ran:
                    somewhere.append(one)
                else:
                    nowhere.setdefault(one.rule, Skipped(one.rule, one.reason))
        return (*nowhere.values(), *somewhere)

    def unheard(self, asked: Collection[str]) -> tuple[Skipped, ...]:
        """Of the rules asked for by name, those that ran nowhere; the first of all where no rule ran at all."""
        skipped = {one.rule: one for one in reversed(self.skipped) if one.rule not in self.ran}
        named = tuple(one for rule, one in skipped.items() if rule in asked)
        return named if named or self.ran else tuple(skipped.values())[-1:]
