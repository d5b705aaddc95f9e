"""The exit code that a command concluded with, distinct from a SystemExit that model code raises."""

from __future__ import annotations


class Verdict(SystemExit):
    """Ends the process with the command's own exit code. Any other SystemExit concludes nothing."""

    code: int
