"""Exit code of a command: its choice, and its way out of the process, distinct from a SystemExit of model code."""

from __future__ import annotations


class CommandExit(SystemExit):
    """Exit of the process with the command's own exit code; any other SystemExit comes from model code."""

    code: int


def decide_exit_code(*, has_findings: bool, has_failures: bool, findings_first: bool = False) -> int:
    """Return 0 without findings, 1 for findings, 2 if part of the work failed; `findings_first`: 1 for both."""
    if has_failures and not (has_findings and findings_first):
        return 2
    return int(has_findings)
