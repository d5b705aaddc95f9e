"""Exit code of a command, distinct from a SystemExit raised by model code."""

from __future__ import annotations


class Verdict(SystemExit):
    """Exit of the process with the command's own exit code; any other SystemExit is not a verdict."""

    code: int
