"""Run a command for the command line: write its outputs, say on stderr what they do not say, exit with its status."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from msgspec.structs import replace

from statecli.cli import console, interrupts, output_files
from statecli.cli.output_files import Written
from statecli.core.errors import StateError, UsageError
from statecli.core.exit_code import Verdict
from statecli.core.progress import Progress
from statecli.core.state import ModelState
from statecli.render import Output
from statecli.requests.options import (
    DiffOptions,
    GitDifftoolOptions,
    GitSetupOptions,
    GitTextconvOptions,
    Options,
    refuse_empty,
)
from statecli.requests.outcome import Caller, Given, Outcome
from statecli.requests.run import run


def leave(options: Options) -> NoReturn:
    """Run the command and leave with its exit status."""
    leave_with(lambda: execute(options), debug=getattr(options, "debug", False))


def leave_with(body: Callable[[], int], *, debug: bool) -> NoReturn:
    """Run a command's body and leave with the promised code: a crash is never 1."""
    try:
        code = body()
        console.finish()
    except StateError as error:
        code = 130 if interrupts.came else console.complain(str(error), debug)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        console.silence()
        code = 141
    except OSError as error:
        code = console.system_error(error, debug)
    except MemoryError:
        code = console.complain("there is not enough memory; nothing was concluded", debug)
    except SystemExit as done:
        code = console.complain(f"model code raised SystemExit({done.code!r}); nothing was concluded", debug)
    except Exception as error:  # noqa: BLE001  # a bug of ours is told in one line and ends 2
        code = console.crash(error, debug)
    console.settle_errors()
    raise Verdict(130 if interrupts.came else code)


def execute(options: Options, given: Given | None = None) -> int:
    """Run the command and write what it came to; return the exit code."""
    if isinstance(options, GitSetupOptions):
        return _set_up_git(options)
    if isinstance(options, GitTextconvOptions):
        return _convert_for_git(options)
    if isinstance(options, GitDifftoolOptions):
        return _show_in_difftool(options)
    _limit(getattr(options, "timeout", None))
    with console.warnings_once():
        refuse_empty(options)
        outputs = output_files.requested(options)
        console.keep_stdout()
        outcome = run(options, _CommandLine(options, outputs), given)
        return _publish(outcome, options, outputs)


def _publish(outcome: Outcome, options: Any, outputs: Sequence[Written]) -> int:
    """Write the outcome where it belongs; return the exit code."""
    quiet, last = getattr(options, "quiet", False), outputs[-1]
    if outcome.warning is not None:
        console.warn(outcome.warning)
    for file in outcome.files:
        console.write(file.pieces, file.path)
    if outcome.report is not None:
        outputs = (*outputs[:-1], replace(last, output=Output.PLAIN)) if outcome.plain else outputs
        console.publish(outcome.report, outputs, options.color.value, quiet)
    elif outcome.text is not None:
        console.show(outcome.text, last.path)
    notes = () if quiet else outcome.notes
    if outcome.report is None:  # before the content, as long as nothing has been written
        console.tell(notes)
        if outcome.text is None:
            console.write(outcome.content, last.path)
    for message in outcome.failures if quiet or not (outcome.reported and console.on_screen(last)) else ():
        console.complain(message, debug=False)
    if outcome.report is not None:
        console.tell(notes)
    return outcome.exit_code


def _limit(seconds: float | None) -> None:
    """Have the parent process end this one after so many seconds."""
    if seconds is None:
        return
    if not 0 < seconds < math.inf:
        raise UsageError(f"--timeout {seconds:g}: must be a number of seconds above 0")
    console.limit(seconds)


class _CommandLine(Caller):
    """Shows progress on stderr, and protects what is read from being overwritten."""

    def __init__(self, options: Any, outputs: Sequence[Written]) -> None:
        self._enabled, self._color = not getattr(options, "no_progress", True), _color(options)
        self._outputs = outputs

    def progress(self, *, values: bool) -> AbstractContextManager[Progress | None]:
        return console.progress(enabled=self._enabled, color=self._color, values=values)

    def steps(self, count: int) -> AbstractContextManager[Callable[[], None]]:
        return console.steps(count, enabled=self._enabled, color=self._color)

    def check_states(self, *states: ModelState) -> None:
        """Raise UsageError for an output that is a file of a state, which no option names."""
        there = [output for output in self._outputs if output.path is not None and os.path.isfile(output.path)]
        for state in states if there else ():
            read = {where.path for tensor in state.tensors for where in tensor.ranges}
            for output, path in itertools.product(there, read):
                if os.path.exists(path) and os.path.samefile(path, str(output.path)):
                    raise UsageError(f"{output.option}: {state.target} is read from it; write elsewhere")

    def check_files(self, paths: Sequence[str]) -> None:
        for output in self._outputs:
            output_files.refuse_read(output, paths)


def _color(options: Any) -> str:
    """Return when to use colours: "auto", "always" or "never"."""
    color: str = options.color.value if hasattr(options, "color") else "auto"
    return color


def _set_up_git(options: GitSetupOptions) -> int:
    from statecli.cli import git_driver

    console.out().text("".join(f"{line}\n" for line in git_driver.setup(everywhere=options.everywhere)))
    return 0


def _convert_for_git(options: GitTextconvOptions) -> int:
    """Write a line a tensor; always return 0, for git dies of anything else: what is wrong stands in the text."""
    from statecli.cli import git_driver

    sink = console.out()
    try:
        for line in git_driver.textconv(options.path):
            sink.text(f"{line}\n")
    except Exception as error:  # noqa: BLE001  # a bug of ours must not end somebody's git diff
        sink.text(f"{git_driver.failed(error)}\n")
    return 0


def _show_in_difftool(options: GitDifftoolOptions) -> int:
    """Write how two files that git keeps differ; always return 0, or git asks whether to go on."""
    from statecli.cli import git_driver

    def compare(before: str, after: str, name: str) -> int:
        return execute(DiffOptions(before=before, after=after), Given(name=name))

    # stdout is asked for each time: a comparison keeps it for the results.
    try:
        for line in git_driver.difftool(options.before, options.after, compare, options.name):
            console.out().text(f"{line}\n")
    except StateError as error:
        console.out().text(f"{error}\n")
    return 0
