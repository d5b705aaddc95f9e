"""Run `statecli browse`: read the targets, show the screen, return the copied text.

This package writes no report: its output is a screen. `screen_state.py` and the modules below it do not know the
screen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from statecli.browse.peek import Versions
from statecli.browse.screen_state import ScreenModel
from statecli.commands.inspect.quantized_rows import list_rows_by_part
from statecli.commands.inspect.run import Inspection, Request, inspect
from statecli.core import posix
from statecli.core.errors import MissingDependency, UsageError
from statecli.core.installed_package import install_extra
from statecli.core.model_state import ModelState
from statecli.core.progress import report_stage
from statecli.requests.options import BrowseOptions
from statecli.storage import files
from statecli.targets import load


def browse(
    options: BrowseOptions,
    reserve_stdout: Callable[[], None],
    show_stages: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> str:
    """Show the screen until the user quits; return the text that was copied last, to print it after the screen.

    `reserve_stdout` sends what a model prints to stderr, and `show_stages` shows the stages of slow work until the
    screen opens. Raises StateError, before the screen opens, if a target cannot be read.
    """
    _check_terminal()
    try:
        import textual  # noqa: F401 - only whether it can be imported
    except ImportError as error:
        raise MissingDependency(f"statecli browse needs the package textual: {install_extra('tui')}") from error
    from statecli.browse.app import Browser  # imports textual

    reserve_stdout()
    with files.record_opened_files() as opened_files, show_stages():
        if options.model is not None or any(map(load.find_class_spec, _list_targets(options))):
            report_stage("building the model")
        inspection = _read_target(options.target, options)
        other_state = None if options.other is None else _read_target(options.other, options).state
    # The user saw no screen for the keys that were typed while the targets were read.
    posix.discard_typed_keys(sys.stdin)
    model = ScreenModel(inspection.state, list_rows_by_part(inspection.weights))
    versions = Versions(opened_files)
    app = Browser(model, versions, partial(_read_other, versions), other_state)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.copied_text


def _check_terminal() -> None:
    """Raise UsageError unless the standard streams are a terminal that can move the cursor."""
    if os.environ.get("TERM") == "dumb":
        raise UsageError("browse: this terminal cannot move the cursor (TERM=dumb); use statecli inspect")
    for stream, name in ((sys.stdin, "input"), (sys.stdout, "output"), (sys.stderr, "error")):
        if stream is None or not stream.isatty():
            raise UsageError(f"browse: standard {name} is not a terminal; use statecli inspect")


def _list_targets(options: BrowseOptions) -> list[str]:
    return [text for text in (options.target, options.other) if text is not None]


def _read_target(target: str, options: BrowseOptions) -> Inspection:
    """Read a target. Raises UsageError for --init-device or --model if none of the targets needs the option."""
    is_class = load.find_class_spec(target) is not None
    classes = [load.find_class_spec(text) is not None for text in _list_targets(options)]
    model = None if is_class and not all(classes) else options.model
    init_device = options.init_device if is_class or model is not None or not any(classes) else None
    return inspect(Request(target, model=model, init_device=init_device))


def _read_other(versions: Versions, target: str) -> ModelState:
    """Read a second target typed on the screen. Raises UsageError for a class, whose code may end the process."""
    if load.find_class_spec(target) is not None:
        raise UsageError(
            f"{target}: is a model class; to compare with a class, quit and run statecli browse TARGET {target}"
        )
    with files.record_opened_files() as opened_files:
        state = load.read_checkpoint(target)
    versions.add(opened_files)
    return state
