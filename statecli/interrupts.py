"""Ctrl-C ends the command with 130, at once, wherever its main thread is.

`KeyboardInterrupt` alone does not see to it: raised in a callback of the interpreter's own (a weak reference's, an
import's) it is printed and lost, and a library that catches it makes some other error of it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

#: Seconds after which an interrupt that has not ended the process by itself does.
PATIENCE = 1.0

#: Kept, because it is replaced while a model's own code runs.
_exit = os._exit

_SHOW_CURSOR = "\x1b[?25h"

#: Whether one came: whatever is raised or returned after it is its doing.
came = False


def listen() -> None:
    """From now on; where interrupts are ignored, as behind `nohup` or `&`, they stay so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def _stop(_: int, __: FrameType | None) -> None:
    global came
    came = True
    sys.unraisablehook = _without_interrupts
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    raise KeyboardInterrupt


def _end(_: int, __: FrameType | None) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
    _exit(130)


def _without_interrupts(lost: sys.UnraisableHookArgs) -> None:
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
