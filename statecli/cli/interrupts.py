"""End the command with status 130 immediately at Ctrl-C, wherever the main thread is.

`KeyboardInterrupt` alone is not enough: raised in a callback of the interpreter (a weak reference, an import), the
exception is printed and lost; libraries catch the exception and raise another error; a long operator delays the
exception. So a thread waits for the signal at a pipe and ends the process. Operators of torch and numpy let the thread
run; other C code may hold the interpreter lock and delay the end.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import FrameType

from statecli.core import posix

#: Seconds to wait after an interrupt before forcing the process to exit.
FORCED_EXIT_DELAY_S = 1.0

#: Bound here, because `os._exit` is replaced while a model's code runs.
_exit = os._exit

_SHOW_CURSOR = "\x1b[?25h"

#: True after an interrupt. The interrupt is then the reason for any error, and no result counts.
was_interrupted = False


def handle_interrupts() -> None:
    """End the process on Ctrl-C from now on, unless interrupts are ignored, as after `nohup` or `&`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_interrupt)
        if os.name == "posix":
            _start_watcher()


def _handle_interrupt(_: int, __: FrameType | None) -> None:
    global was_interrupted
    was_interrupted = True
    sys.unraisablehook = _ignore_lost_interrupts
    raise KeyboardInterrupt


def _start_watcher() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # A child shares the pipe, and an interrupt of only the child must not end this process.
    posix.call_after_fork_in_child(lambda: signal.set_wakeup_fd(-1))
    try:
        _thread.start_new_thread(_exit_after_interrupt, (read_end,))
    except RuntimeError:  # the system cannot start a thread, so only KeyboardInterrupt remains
        signal.set_wakeup_fd(-1)


def _exit_after_interrupt(read_end: int) -> None:
    while (byte := os.read(read_end, 1)) != bytes([signal.SIGINT]):
        if not byte:  # code of a model has closed the other end
            return
    time.sleep(FORCED_EXIT_DELAY_S)
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR.encode())
    _exit(130)


def _ignore_lost_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
