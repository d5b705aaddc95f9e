"""Run `statecli browse`: read the targets, show the screen, return the copied text.

This package writes no report: its output is a screen. `screen_state.py` and the modules below it do not know the
screen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from statecli.browse.peek import Versions
from statecli.browse.screen_state import ScreenModel
from statecli.commands.inspect.quantized_rows import list_rows_by_part
from statecli.commands.inspect.run import Inspection, Request as InspectRequest, inspect
from statecli.core import posix
from statecli.core.errors import MissingDependency, UsageError
from statecli.core.installed_package import install_extra
from statecli.core.model_state import ModelState
from statecli.core.progress import report_stage
from statecli.storage import files
from statecli.targets import load


class Request(msgspec.Struct, frozen=True):
    """Options of `browse`. `other`: a second target to compare with the first target, or None."""

    target: str
    other: str | None = None
    model: str | None = None
    init_device: str | None = None

    def list_targets(self) -> list[str]:
        """Return the given targets."""
        return [text for text in (self.target, self.other) if text is not None]


def browse(request: Request, show_stages: Callable[[], AbstractContextManager[object]]) -> str:
    """Show the screen until the user quits. Return the last copied text, because it is printed after the screen.

    `show_stages` shows the stages of slow work until the screen opens. Raises StateError, before the screen opens, if a
    target cannot be read.
    """
    try:
        import textual  # noqa: F401 - only whether it can be imported
    except ImportError as error:
        raise MissingDependency(f"statecli browse needs the package textual: {install_extra('tui')}") from error
    from statecli.browse.app import Browser  # imports textual

    with files.record_opened_files() as opened_files, show_stages():
        if request.model is not None or any(map(load.find_class_spec, request.list_targets())):
            report_stage("building the model")
        inspection = _read_target(request.target, request)
        other_state = None if request.other is None else _read_target(request.other, request).state
    # The user saw no screen for the keys that were typed while the targets were read.
    posix.discard_typed_keys(sys.stdin)
    model = ScreenModel(inspection.state, list_rows_by_part(inspection.weights))
    versions = Versions(opened_files)
    app = Browser(model, versions, partial(_read_other, versions), other_state)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.copied_text


def _read_target(target: str, request: Request) -> Inspection:
    """Read a target. Raises UsageError for --init-device or --model if none of the targets needs the option."""
    is_class = load.find_class_spec(target) is not None
    classes = [load.find_class_spec(text) is not None for text in request.list_targets()]
    model = None if is_class and not all(classes) else request.model
    init_device = request.init_device if is_class or model is not None or not any(classes) else None
    return inspect(InspectRequest(target, model=model, init_device=init_device))


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
