"""The answer of `audit`, as plain data."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec

from statecli.finding import Finding, Severity
from statecli.scope import Configuration, NotChecked, merge_not_checked
from statecli.state import Oddity


class Status(str, Enum):
    """What became of a target: its rules ran, it could not be read, or it is no checkpoint."""

    AUDITED = "audited"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(msgspec.Struct, frozen=True):
    """A rule that did not run, on all targets or on one, and why."""

    rule: str
    reason: str
    target: str | None = None


class Accepted(msgspec.Struct, frozen=True):
    """A finding that the configuration or a baseline accepts, with the reason that was given for it."""

    finding: Finding
    reason: str


class Target(msgspec.Struct, frozen=True):
    """One target. `reason` says why it failed or was skipped; the rest is of one that was audited.

    `not_checked` lists what no rule has looked at: a skipped file, or values that were not read. `bytes` is the size of
    its tensors as `inspect` shows it: those that share a storage count once.
    """

    target: str
    status: Status
    reason: str | None = None
    format: str | None = None
    tensors: int = 0
    bytes: int = 0
    findings: tuple[Finding, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    ran: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[Oddity, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    @property
    def own_reason(self) -> str | None:
        """The reason without the target, where it begins with that."""
        return self.reason and self.reason.removeprefix(f"{self.target}: ")


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
