"""Run the user's code, then restore the process: search path, current directory, sys.argv, streams, `os._exit`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import NoReturn

from statecli.live import search_path
from statecli.live.downloads import refuse_downloads
from statecli.live.library_output import hide_library_lines
from statecli.live.spec import ModelSpec
from statecli.storage import files


@contextmanager
def _use_search_path(spec: ModelSpec) -> Iterator[None]:
    if spec.config is not None or spec.is_library:
        # The user typed no code, and a folder with a config.json may contain a transformers.py as well.
        with search_path.use_installed_only(*([] if spec.config is None else [files.get_folder(spec.config)])):
            yield
        return
    with search_path.use_folder(os.path.dirname(os.path.abspath(spec.module)) if spec.is_file else os.getcwd()):
        yield


@contextmanager
def protect_process(spec: ModelSpec) -> Iterator[None]:
    """Run user code in the block, and restore the process afterwards. The code may import the files next to it.

    The code downloads nothing, as `refuse_downloads` says.
    """
    supervisor = sys.modules.get("statecli.cli.supervisor")
    parent = supervisor.get_connection() if supervisor else None
    if parent is not None:
        parent.name_model(spec.text)
    with refuse_downloads(), _use_search_path(spec), protect_streams():
        yield


@contextmanager
def protect_streams() -> Iterator[None]:
    """Restore the process after user code like `protect_process`, except for the search path."""
    with _restore_process(), hide_library_lines(), _redirect_prints(), _forbid_exit():
        yield


@contextmanager
def _forbid_exit() -> Iterator[None]:
    """Make `os._exit` raise SystemExit, because status 0 would look like success. Forked children may still exit.

    A forked child exits at the end of the block, because the child would run the rest of statecli a second time.
    """
    our_pid, original_exit = os.getpid(), os._exit

    def exit(status: int) -> NoReturn:
        if os.getpid() == our_pid:
            raise SystemExit(status)
        original_exit(status)

    os._exit = exit
    try:
        yield
    finally:
        os._exit = original_exit
        if os.getpid() != our_pid:
            original_exit(_choose_exit_status(sys.exc_info()[1]))


def _choose_exit_status(error: BaseException | None) -> int:
    """Return the exit status that Python would use after the user's code."""
    cause = SystemExit(0) if error is None else error.__cause__ or error
    code = (cause.code or 0) if isinstance(cause, SystemExit) else 1
    return code & 0xFF if isinstance(code, int) else 1


@contextmanager
def _restore_process() -> Iterator[None]:
    """Restore the current directory, sys.argv and the standard streams after the block."""
    streams, arguments = (sys.stdin, sys.stdout, sys.stderr), list(sys.argv)
    try:
        folder: str | None = os.getcwd()
    except OSError:  # the directory has been deleted
        folder = None
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.argv[:] = arguments
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)


@contextmanager
def _redirect_prints() -> Iterator[None]:
    """Send print(), os.write(1, …) and output of C libraries to stderr, because stdout holds only the result."""
    stderr = sys.stderr
    with redirect_stdout(stderr):
        try:
            sys.__stdout__.flush() if sys.__stdout__ else None
            stdout_copy = os.dup(1)
            os.dup2(2, 1)
        except (OSError, ValueError, io.UnsupportedOperation):  # stdout or stderr is closed: nothing to protect
            yield
            return
        try:
            yield
        finally:
            with suppress(OSError, ValueError):
                stderr.flush() if stderr else None
            os.dup2(stdout_copy, 1)
            os.close(stdout_copy)
