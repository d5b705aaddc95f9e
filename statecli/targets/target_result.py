"""Result for a target: audited, failed or skipped, with its findings."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from statecli.core.finding import Finding
from statecli.core.model_state import Oddity, TensorInfo
from statecli.core.run_scope import NotChecked


class TargetStatus(str, Enum):
    """Status of a target: audited by rules, failed because it is unreadable, or skipped (not a checkpoint)."""

    AUDITED = "audited"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(msgspec.Struct, frozen=True):
    """Rule that did not run on a target (or on all targets), with the reason."""

    rule: str
    reason: str
    target: str | None = None


class Accepted(msgspec.Struct, frozen=True):
    """Finding that the configuration or a baseline accepts, with the given reason."""

    finding: Finding
    reason: str


class LockCount(msgspec.Struct, frozen=True):
    """Number of tensors that were compared with a lock, and the number that match it."""

    compared: int
    matching: int


class TargetResult(msgspec.Struct, frozen=True):
    """Result for one target. `reason`: why a target failed or was skipped; other fields are for audited targets.

    `not_checked` lists skipped files and unread values. `bytes` is the size of the tensors as in `inspect`: tensors
    with a shared storage count once. `unregistered` are the rows of a class's unregistered tensors. `lock_count` is
    None if the tensors were not compared with a lock. `same_as` is the name under which the same file is audited.
    """

    target: str
    status: TargetStatus
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
    unregistered: tuple[TensorInfo, ...] = ()
    lock_count: LockCount | None = None
    same_as: str | None = None

    @property
    def own_reason(self) -> str | None:
        """Reason why the target failed or was skipped, without the target's name in front."""
        return self.reason and self.reason.removeprefix(f"{self.target}: ")


def drop_accepted(findings: Iterable[Finding], accepted: Iterable[Accepted]) -> tuple[Finding, ...]:
    """Return the findings that are not accepted."""
    dropped_ids = {id(entry.finding) for entry in accepted}
    return tuple(finding for finding in findings if id(finding) not in dropped_ids)
