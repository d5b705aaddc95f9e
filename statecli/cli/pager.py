"""Show a result longer than the terminal in a pager, as git does: $STATECLI_PAGER, $PAGER or `less`.

An empty value or `cat` switches the pager off. Nothing is paged in pipes, in CI, and without a keyboard.
"""

from __future__ import annotations

import os
import signal

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.terminal_width import get_terminal_width, is_terminal

#: Options of less: quit if the text fits on the screen, show colours, leave the text on the screen.
_LESS_OPTIONS = "FRX"
_ESCAPE_SEQUENCE = compile_on_use(rb"\x1b\[[0-9;]*m")


def find_pager(descriptor: int) -> str | None:
    """Return the pager's command for results on this descriptor, or None if the results do not need a pager."""
    is_interactive = is_terminal(descriptor) and is_terminal(0)
    if not is_interactive or os.name != "posix" or os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI"):
        return None
    for name in ("STATECLI_PAGER", "PAGER"):
        command = os.environ.get(name)
        if command is not None:
            return command if command.strip() not in ("", "cat") else None
    from shutil import which

    return "less" if which("less") else None


def show(data: bytes, descriptor: int) -> bool:
    """Show the text in a pager if it is longer than the terminal. Return False if the caller must write the text."""
    command = find_pager(descriptor)
    if command is None or not _is_longer_than_screen(data, descriptor):
        return False
    from subprocess import PIPE, Popen

    environment = {"LESS": _LESS_OPTIONS, "LV": "-c", **os.environ}
    # Only the pager handles Ctrl-C. SIG_IGN does not work here, because the pager would inherit an ignored signal.
    wakeup, before = signal.set_wakeup_fd(-1), signal.signal(signal.SIGINT, lambda *_: None)
    try:
        shell = ["/bin/sh", "-c", command]
        with Popen(shell, stdin=PIPE, stdout=descriptor, env=environment) as pager:  # noqa: S603 - the user's own command
            pager.communicate(data)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    return pager.returncode != _NOT_FOUND_STATUS


#: Exit status of a shell that does not find the command.
_NOT_FOUND_STATUS = 127


def _is_longer_than_screen(data: bytes, descriptor: int) -> bool:
    """Return whether the text takes more lines than the terminal, minus a line for the prompt."""
    try:
        rows = os.get_terminal_size(descriptor).lines
    except OSError:
        return False
    columns = get_terminal_width(descriptor)
    lines = _ESCAPE_SEQUENCE.sub(b"", data).decode("utf-8", "replace").splitlines()
    return rows > 0 and sum(max(1, -(-len(line) // columns)) for line in lines) > rows - 1
