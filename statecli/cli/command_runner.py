"""Run a command for the command line: write its outputs, print notes and failures on stderr, exit with its status."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from msgspec.structs import replace

from statecli import cli
from statecli.cli import console, output_files, streams
from statecli.cli.output_files import OutputTarget
from statecli.core.errors import UsageError, option
from statecli.core.model_state import ModelState
from statecli.core.output import Color
from statecli.core.progress import Progress
from statecli.render import Output
from statecli.requests.options import Options
from statecli.requests.outcome import Caller, ExtraInputs, Outcome
from statecli.requests.parameters import check_values
from statecli.requests.run import run


def execute(options: Options, extra: ExtraInputs | None = None) -> int:
    """Run the command and write the outcome; return the exit code."""
    _limit_time(getattr(options, "timeout", None))
    with console.show_warnings_once():
        check_values(options)
        outputs = output_files.list_outputs(options)
        streams.reserve_stdout()
        outcome = run(options, _CommandLine(options, outputs), extra)
        # Under git, the output does not show the exit status, because git exits with its own.
        shows_status = extra is None or extra.name is None
        return _write_outcome(outcome, options, outputs, shows_status=shows_status)


def show_installation() -> int:
    """Write the versions of statecli, of Python and of the libraries; return 0."""
    streams.open_stdout().text("".join(f"{line}\n" for line in cli.version_details.describe_installation()))
    return 0


def _write_outcome(
    outcome: Outcome[object], options: Options, outputs: Sequence[OutputTarget], *, shows_status: bool
) -> int:
    status = outcome.exit_code if shows_status else None
    quiet, last = getattr(options, "quiet", False), outputs[-1]
    if outcome.warning is not None:
        streams.print_line(f"statecli: warning: {outcome.warning}")
    for file in outcome.files:
        console.write_pieces(file.pieces, file.path)
    if outcome.report is not None:
        outputs = (*outputs[:-1], replace(last, output=Output.PLAIN)) if outcome.plain else outputs
        console.write_report(outcome.report, outputs, _get_color(options), quiet=quiet, exit_status=status)
        if outcome.exit_code == 1 and last.path is not None and not quiet:
            console.print_summary(outcome.report, last.path)
    elif outcome.text is not None:
        console.write_text(outcome.text, last.path)
    notes = () if quiet else outcome.notes
    if outcome.report is None:  # the notes come before the content
        console.print_findings(notes)
        if outcome.text is None:
            console.write_pieces(outcome.content, last.path)
            if outcome.saved and last.path is not None and not quiet:
                console.print_on_terminal(outcome.saved)
    for message in _list_unreported_failures(outcome, last, quiet=quiet):
        streams.print_error(message, debug=False)
    if outcome.report is not None:
        console.print_findings(notes)
    return outcome.exit_code


def _get_color(options: Options) -> str:
    color: Color = getattr(options, "color", Color.AUTO)
    return color.value


def _list_unreported_failures(outcome: Outcome[object], last: OutputTarget, *, quiet: bool) -> Sequence[str]:
    """Return the failures that the last output does not show. stderr shows these failures."""
    report = outcome.report
    if not outcome.reported:
        return outcome.failures
    if report is None:
        return ()
    reported: Collection[str] = ()
    if last.output is Output.GITHUB and last.path is None:
        from statecli.render import github  # imported here, because only this output needs the module

        reported = github.list_annotated_messages(report)
    elif console.is_next_to_errors(last):
        findings = report.describe_failing_findings()
        reported = {trouble.message for trouble in report.troubles if any(map(trouble.is_reported_by, findings))}
        reported = reported if quiet else outcome.failures
    return [message for message in outcome.failures if message not in reported]


def _limit_time(seconds: float | None) -> None:
    """Make the parent process end this process after the given number of seconds. For None, do nothing."""
    if seconds is None:
        return
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option('--timeout', seconds)}: must be a number of seconds above 0")
    streams.limit_time(seconds)


class _CommandLine(Caller):
    """Caller that shows progress on stderr and protects files that the command reads."""

    def __init__(self, options: Options, outputs: Sequence[OutputTarget]) -> None:
        self._enabled = not getattr(options, "no_progress", False)
        self._color = _get_color(options)
        self._outputs = outputs

    def progress(self, *, values: bool) -> AbstractContextManager[Progress | None]:
        return console.show_progress(enabled=self._enabled, color=self._color, values=values)

    def steps(self, count: int) -> AbstractContextManager[Callable[[], None]]:
        return console.show_steps(count, enabled=self._enabled, color=self._color)

    def write_line(self, line: str) -> None:
        streams.open_stdout().text(f"{line}\n")
        streams.flush_stdout()

    def run_command(self, options: Options, extra: ExtraInputs) -> None:
        execute(options, extra)

    def is_terminal(self) -> bool:
        return sys.stdout is not None and streams.open_stdout().is_terminal

    def check_command(self, options: Options) -> None:
        """Raise UsageError if an output would overwrite an input of the command that `merge` repeats (`options`)."""
        for output in self._outputs:
            output_files.check_output(output, options)

    def check_states(self, *states: ModelState) -> None:
        """Raise UsageError if an output would overwrite a file that contains tensors of the states."""
        if any(output.path is not None and os.path.isfile(output.path) for output in self._outputs):
            self.check_files(
                {byte_range.path for state in states for tensor in state.tensors for byte_range in tensor.ranges}
            )

    def check_files(self, paths: Collection[str]) -> None:
        for output in self._outputs:
            output_files.check_not_read(output, paths)
