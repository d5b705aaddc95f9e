"""Harm of an unregistered tensor, as measured by the checks of `verify`."""

from __future__ import annotations

import msgspec

from statecli.core.finding import Finding, Severity
from statecli.core.severity import find_worst_severity


class Harm(msgspec.Struct, frozen=True):
    """Harm of an unregistered tensor, as measured by the checks of `verify`.

    `left_behind`: the severity of the tensor's move, None if forward replaces the tensor. `findings`: findings of
    other checks. `remark`: the use of the tensor by forward, or why the use is unknown; "" if `findings` show it.
    `is_unknown`: whether the use is unknown.
    """

    left_behind: Severity | None
    findings: tuple[Finding, ...] = ()
    remark: str = ""
    is_unknown: bool = False

    @property
    def severity(self) -> Severity | None:
        """The highest severity, or None if the tensor does no harm."""
        severities = [finding.severity for finding in self.findings]
        severities += [self.left_behind] if self.left_behind else []
        return find_worst_severity(severities) if severities else None
