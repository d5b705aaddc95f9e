"""Ctrl-C ends the process with 130, whatever the code does with the exception."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from .forked_python import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX: signals")

INTERRUPT_IN_CALLBACK = """
import os, signal, time, weakref
from statecli.cli import interrupts
class Thing: pass
interrupts.handle_interrupts()
thing = Thing()
ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
del thing
time.sleep(300)
"""
INTERRUPTS_IGNORED = """
import os, signal
from statecli.cli import interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.handle_interrupts()
os.kill(os.getpid(), signal.SIGINT)
print("still here")
"""
ERROR_AFTER_INTERRUPT = """
import os, signal
from statecli.cli import process_exit, interrupts
from statecli.core.errors import UnreadableError
interrupts.handle_interrupts()
def run():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise UnreadableError("a worker was killed") from None
process_exit.run_body_and_exit(run, debug=False)
"""


def run_program(program):
    return run_python(["-c", program], timeout=30)


def test_interrupt_swallowed_by_a_callback_ends_the_process():
    """Python prints and drops an exception in the callback of a weak reference; the process still ends soon."""
    start = time.monotonic()
    process = run_program(INTERRUPT_IN_CALLBACK)
    assert (process.returncode, process.stderr) == (130, "")
    assert time.monotonic() - start < 100


def test_error_caused_by_an_interrupt_is_not_reported():
    """A killed worker raises an error after an interrupt; only the interrupt is reported."""
    process = run_program(ERROR_AFTER_INTERRUPT)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


def test_ignored_interrupt_signal_stays_ignored():
    """Behind `nohup` or `&` a shell has turned them off."""
    assert run_program(INTERRUPTS_IGNORED).stdout == "still here\n"


def test_import_keeps_the_handler_of_the_interrupt_signal():
    """Only the command handles the signal; a program that imports statecli keeps its own handler."""
    before = signal.getsignal(signal.SIGINT)
    __import__("statecli.cli.interrupts")
    assert signal.getsignal(signal.SIGINT) is before


OPERATOR = """
import _thread, os, signal, sys
import torch
from statecli.cli import interrupts
matrix = torch.randn(3000, 3000)
interrupts.FORCED_EXIT_DELAY_S = 0.1
interrupts.handle_interrupts()
_thread.start_new_thread(lambda: os.kill(os.getpid(), signal.SIGINT), ())
while True:
    try:
        torch.linalg.svd(matrix)
    except KeyboardInterrupt:  # the interrupt came before the operator began
        pass
"""


def test_an_interrupt_inside_one_long_operator_ends_the_process():
    """The main thread is in C for twenty seconds, and runs no handler of Python's."""
    process = run_program(OPERATOR)
    assert (process.returncode, process.stderr) == (130, "")


CHILD = """
import os, signal, time
from statecli.cli import interrupts
interrupts.FORCED_EXIT_DELAY_S = 0
interrupts.handle_interrupts()
child = os.fork()
if child == 0:
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os._exit(0)
os.waitpid(child, 0)
time.sleep(0.5)
print("still here")
"""


def test_interrupt_of_a_child_does_not_end_the_parent():
    """A model may end its own child with the signal; nothing is written to the pipe of parent and child."""
    assert run_program(CHILD).stdout == "still here\n"
