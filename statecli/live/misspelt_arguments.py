"""Error for a model spec whose arguments are not valid Python, with a corrected model spec."""

from __future__ import annotations

from statecli.core.errors import UsageError


class MisspeltArguments(UsageError):
    """Error: the arguments of a model spec are not valid Python. `line` is the corrected spec, quoted for a shell."""

    def __init__(self, problem: str, line: str) -> None:
        super().__init__(problem, advice=f"write {line}")
        self.line = line
