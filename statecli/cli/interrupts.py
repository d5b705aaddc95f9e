"""Ctrl-C ends the command with 130, at once, wherever its main thread is.

`KeyboardInterrupt` alone does not see to it: raised in a callback of the interpreter's own (a weak reference's, an
import's) it is printed and lost, a library that catches it makes some other error of it, and inside one long operator
it is not even raised. So a thread of ours learns of each interrupt too, by a pipe that the signal itself is written to.
Operators of torch and numpy let it run; other C code may keep the interpreter lock, and the end waits until it lets go.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
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
        if os.name == "posix":
            _watch()


def _stop(_: int, __: FrameType | None) -> None:
    global came
    came = True
    sys.unraisablehook = _without_interrupts
    raise KeyboardInterrupt


def _watch() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # A child shares the pipe, and what interrupts the child alone is not for us.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    try:
        _thread.start_new_thread(_end_after_one, (read,))
    except RuntimeError:  # the system starts none: KeyboardInterrupt alone has to do
        signal.set_wakeup_fd(-1)


def _end_after_one(read: int) -> None:
    while (byte := os.read(read, 1)) != bytes([signal.SIGINT]):
        if not byte:  # a model's own code has closed the other end
            return
    time.sleep(PATIENCE)
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR.encode())
    _exit(130)


def _without_interrupts(lost: sys.UnraisableHookArgs) -> None:
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
