"""The error of a spec whose arguments are not written as Python writes them, with the line to type."""

from __future__ import annotations

from statecli.core.errors import UsageError


class MisspeltArguments(UsageError):
    """The arguments of a spec are not written as Python writes them. `line`: the spec to type, quoted for a shell."""

    def __init__(self, problem: str, line: str) -> None:
        super().__init__(problem, advice=f"write {line}")
        self.line = line
