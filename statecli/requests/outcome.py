"""What a run of a command came to, and what a run may ask of whoever started it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from statecli.core.error_causes import group_by_cause
from statecli.core.finding import Finding
from statecli.core.progress import Progress
from statecli.core.state import ModelState
from statecli.core.units import plural
from statecli.report import Report

#: Lines about tensors that could not be read or compared; the result has each.
MAX_FAILURE_LINES = 20


class OutputFile(msgspec.Struct, frozen=True):
    """A file that the command writes next to its report: its path, and its content in pieces."""

    path: str
    pieces: Iterable[bytes]


class Outcome(msgspec.Struct, frozen=True):
    """What a run of a command came to.

    Attributes:
        result: The Inspection, Diff, Verification, Audit or Lock.
        report: What there is to say of it; None if the command writes `content` instead.
        content: The bytes of a command without a report, in pieces.
        text: The text of a command without a report for people, laid out for a number of columns.
        failures: What could not be done, each in a line: with any, the exit status is 2.
        findings_first: True if the exit status is 1 for findings even if something could not be done.
        reported: True if the report for people says the failures too.
        notes: What is told on standard error next to the report.
        warning: A line for standard error about the command line itself.
        files: What is written before the report.
        plain: True if the report is plain text, whatever `--output-format` says.
    """

    result: Any
    report: Report | None = None
    content: Iterable[bytes] = ()
    text: Callable[[int], str] | None = None
    failures: Sequence[str] = ()
    findings_first: bool = False
    reported: bool = False
    notes: Sequence[Finding] = ()
    warning: str | None = None
    files: Sequence[OutputFile] = ()
    plain: bool = False

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 for findings, 2 if something could not be done."""
        found = int(self.report is not None and self.report.has_failed())
        if not self.failures or (found and self.findings_first):
            return found
        return 2


class Given(msgspec.Struct, frozen=True):
    """What the options of the command line cannot say.

    Attributes:
        model: A live nn.Module, from Python.
        inputs: What its forward is called with, as objects, from Python.
        name: What both sides of a diff are called, from git; None: the paths.
    """

    model: Any = None
    inputs: Any = None
    name: str | None = None


class Caller:
    """Who runs a command: nobody who watches, by default; the command line shows progress and protects its outputs."""

    def progress(self, *, values: bool) -> AbstractContextManager[Progress | None]:  # noqa: ARG002 - for subclasses
        """Return what is told of the bytes that are read. `values`: whether the values of tensors are read."""
        return nullcontext()

    def steps(self, count: int) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG002 - for subclasses
        """Return what is called after each of `count` steps."""
        return nullcontext(lambda: None)

    def check_command(self, options: Any) -> None:
        """Raise UsageError for the options of a command whose parts this caller does not merge."""

    def check_states(self, *states: ModelState) -> None:
        """Raise UsageError if an output would be written to a file that these states were read from."""

    def check_files(self, paths: Sequence[str]) -> None:
        """Raise UsageError if an output would be written to one of these files, which are read."""


def describe_failures(broken: Sequence[tuple[str, str]], done: str) -> list[str]:
    """Return a line for each file and cause, MAX_FAILURE_LINES at most, and one that counts the other tensors.

    `broken`: the name of each tensor and its error. `done`: what could not be done with them ("read", "compared").
    """
    causes = group_by_cause(broken)
    lines = [message for message, _ in causes[:MAX_FAILURE_LINES]]
    if rest := sum(count for _, count in causes[MAX_FAILURE_LINES:]):
        lines.append(f"and {plural(rest, 'more tensor')} that could not be {done}")
    return lines
