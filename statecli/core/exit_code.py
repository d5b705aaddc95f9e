"""Choose the exit code of a command. `CommandExit` differs from a SystemExit that model code raises."""

from __future__ import annotations


class CommandExit(SystemExit):
    """SystemExit with the command's own exit code; any other SystemExit comes from model code."""

    code: int


def decide_exit_code(*, has_findings: bool, has_failures: bool, findings_first: bool = False) -> int:
    """Return 2 after failures, 1 for findings, else 0. After both, return 1 if `findings_first` is set, else 2."""
    if has_failures and not (has_findings and findings_first):
        return 2
    return int(has_findings)
