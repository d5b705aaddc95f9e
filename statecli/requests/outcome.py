"""Outcome of a command, and the caller, to which the command reports its progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from statecli.core.error_causes import Failure, group_by_cause
from statecli.core.exit_code import decide_exit_code
from statecli.core.finding import Finding
from statecli.core.model_state import ModelState
from statecli.core.progress import Progress
from statecli.core.units import plural
from statecli.report import Report

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.diff.snapshot import StateDigests
    from statecli.requests.options import Options
    from statecli.targets.target_result import Accepted

_Result = TypeVar("_Result", covariant=True)

#: Largest number of lines about tensors that could not be read or compared; the result has all of them.
MAX_FAILURE_LINES = 20


class OutputFile(msgspec.Struct, frozen=True):
    """File that a command writes besides its report: the path, and the content in pieces."""

    path: str
    pieces: Iterable[bytes]


class AcceptedFindings(msgspec.Struct, frozen=True):
    """Accepted findings with their reasons. `files` has the baseline file to write, or is empty."""

    accepted: tuple[Accepted, ...] = ()
    files: tuple[OutputFile, ...] = ()


class Outcome(msgspec.Struct, Generic[_Result], frozen=True):
    """Outcome of a command.

    Attributes:
        result: The Inspection, Diff, Verification, Audit or Lock.
        report: Report of the result; None if the command writes `content` instead.
        content: The bytes of a command without a report, in pieces.
        text: Function that returns human-readable text for a width in columns; for a command without a report.
        failures: A line for each failed part of the work; with any, the exit status is 2.
        has_findings: True if a command without a report wrote a finding that sets exit status 1.
        findings_first: True if findings set exit status 1 even if there are failures.
        reported: True if the human-readable report, or a line written before, contains the failures.
        notes: Findings for standard error.
        warning: A line for standard error about the command line itself.
        saved: A line for a terminal about the content, after saving to a file; "" without a line.
        files: Files to write before the report.
        plain: True if the report is plain text, whatever `--output-format` says.
    """

    result: _Result
    report: Report | None = None
    content: Iterable[bytes] = ()
    text: Callable[[int], str] | None = None
    failures: Sequence[str] = ()
    has_findings: bool = False
    findings_first: bool = False
    reported: bool = False
    notes: Sequence[Finding] = ()
    warning: str | None = None
    saved: str = ""
    files: Sequence[OutputFile] = ()
    plain: bool = False

    @property
    def exit_code(self) -> int:
        """Exit status: 0 without findings, 1 for findings, 2 for failures."""
        return decide_exit_code(
            has_findings=self.has_findings or (self.report is not None and self.report.has_failed()),
            has_failures=bool(self.failures),
            findings_first=self.findings_first,
        )


class ExtraInputs(msgspec.Struct, frozen=True):
    """Inputs of a command besides its options.

    Attributes:
        model: A live nn.Module, from Python.
        inputs: Arguments of forward as objects, from Python.
        name: Name of both sides of a diff, from git; None for the paths.
        snapshots: The sides of a diff that are snapshots, from Python, by the text of the side.
    """

    model: nn.Module | None = None
    inputs: object = None
    name: str | None = None
    snapshots: Mapping[str, StateDigests] = {}


class Caller:
    """Caller of a command. The base class shows no progress and checks no files; the command line's class does both."""

    def progress(self, *, values: bool) -> AbstractContextManager[Progress | None]:  # noqa: ARG002 - for subclasses
        """Return a context that yields a function to report read bytes. `values` is True if tensor values are read."""
        return nullcontext()

    def steps(self, count: int) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG002 - for subclasses
        """Return a context that yields the function to call after each of `count` steps."""
        return nullcontext(lambda: None)

    def write_line(self, line: str) -> None:
        """Write a line of the output at once, because the next line may come in an hour."""

    def run_command(self, options: Options, extra: ExtraInputs) -> None:
        """Run another command and write its outcome."""

    def is_terminal(self) -> bool:
        """Return whether the output is a terminal."""
        return False

    def check_command(self, options: Options) -> None:
        """Raise UsageError if this caller does not allow `merge` to repeat the command."""

    def check_states(self, *states: ModelState) -> None:
        """Raise UsageError if an output would overwrite a file of the states."""

    def check_files(self, paths: Collection[str]) -> None:
        """Raise UsageError if an output would overwrite a file of `paths`."""


def describe_failures(failures: Sequence[Failure], verb: str) -> list[str]:
    """Return at most MAX_FAILURE_LINES lines, one for each file and cause, and a line that counts the other tensors.

    `verb`: the verb in messages ("read", "compared").
    """
    groups = group_by_cause(failures)
    lines = [group.line for group in groups[:MAX_FAILURE_LINES]]
    if further_count := sum(group.size for group in groups[MAX_FAILURE_LINES:]):
        lines.append(f"and {plural(further_count, 'more tensor')} that could not be {verb}")
    return lines
