"""Run a command line with model code in a child process; the parent prints the result and decides the exit code.

The child sends its output, and then its verdict (the exit code), through a pipe. The verdict is sent before Python runs
exit handlers, finalizers and the ends of threads, so that `os._exit(0)` in `__del__` or `atexit` changes nothing. The
parent prints the output and exits with the child's code only if the verdict fits the output byte for byte. A child
without a verdict, a segmentation fault and `--timeout` give a line on stderr and exit code 2.

Promise: model code that ends or crashes the process, closes or replaces streams, or runs for ever never passes. Not
covered: model code that forges a verdict. Such code runs in the process that sends the verdict. So it can replace
functions of statecli, or find the pipe and the mark of messages in memory. Run untrusted code in a container.

The child inherits standard input and standard error. If standard input is not a terminal, the child has a process group
of its own, which ends with the child. Without `os.fork` (Windows), model code runs in the process of the command, and
`--timeout` is refused.
"""

from __future__ import annotations

import _thread
import io
import os
import select
import signal
import struct
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, NoReturn

from statecli.cli import pager
from statecli.core.escaping import escape_line
from statecli.core.exit_code import CommandExit
from statecli.core.terminal_width import get_terminal_width, is_terminal

#: Seconds that a child may take to end after its verdict: exit handlers, threads and processes of the model.
END_TIMEOUT_S = 2.0
#: Seconds between interrupting a child and killing it with SIGKILL.
INTERRUPT_TIMEOUT_S = 1.5
#: Largest number of bytes of a message; a result may have many messages.
MAX_MESSAGE_BYTES = 1 << 20

_HEADER = struct.Struct("<16scQ")
_VERDICT = struct.Struct("<BIQ")
_TIMEOUT = struct.Struct("<d")
_OUTPUT, _ERROR, _MODEL, _LIMIT, _DONE = b"O", b"E", b"M", b"T", b"V"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"


#: Function that sends a message to the parent: its kind, and its payload.
Send = Callable[[bytes, bytes], None]


class Child:
    """Connection of the child process to its parent. Processes that model code forks do not send messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.pid = os.getpid()
        self._crc = self._size = 0
        self._model = ""
        self.is_terminal = is_terminal(1)
        self.columns = get_terminal_width(1)
        self._stderr_encoding = sys.stderr.encoding if sys.stderr is not None else None

    def open_output(self) -> IO[bytes]:
        """Open a stream for standard output. The parent prints the stream once it knows the exit code."""
        return _Output(self)  # type: ignore[return-value]

    def write_output(self, data: bytes) -> None:
        """Send a piece of the result."""
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        for start in range(0, len(data), MAX_MESSAGE_BYTES):
            self._send(_OUTPUT, data[start : start + MAX_MESSAGE_BYTES])

    def write_error(self, line: str) -> None:
        """Have the parent write a line to standard error, in order with the result."""
        if self._stderr_encoding is not None:
            self._send(_ERROR, f"{line}\n".encode(self._stderr_encoding, "backslashreplace"))

    def name_model(self, name: str) -> None:
        """Name the model whose code runs from now on, for the message about a crash."""
        if name != self._model:
            self._model = name
            self._send(_MODEL, escape_line(name).encode("utf-8", "backslashreplace"))

    def limit_time(self, seconds: float) -> None:
        """Make the parent end this process the given number of seconds after its start."""
        self._send(_LIMIT, _TIMEOUT.pack(seconds))

    def conclude(self, code: int) -> None:
        """Send the verdict. From then on nothing in this process changes the exit code."""
        global _child
        self._send(_DONE, _VERDICT.pack(code, self._crc, self._size))
        _child = None


class _Output(io.RawIOBase):
    """Standard output of the child, as a binary file."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._child.write_output(piece)
        return len(piece)


_child: Child | None = None


def get_connection() -> Child | None:
    """Return the connection to the parent, or None if this process is not supervised or has sent its verdict."""
    return _child if _child is not None and _child.pid == os.getpid() else None


def run(command: Callable[[], None]) -> int:
    """Run `command`, which raises SystemExit, in a child process; return the exit code.

    Call this before any thread is started. Raises OSError if the system cannot start a process.
    """
    read_end, write_end = os.pipe()
    mark, parent = os.urandom(16), os.getpid()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        _run_child(command, write_end, mark, parent)
    os.close(write_end)
    watch = _Watch(pid, read_end, mark)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return watch.wait()


# --- the child --------------------------------------------------------------------------------------------------------


def _run_child(command: Callable[[], None], pipe: int, mark: bytes, parent: int) -> NoReturn:
    global _child
    if not is_terminal(0):
        os.setpgid(0, 0)
    _end_with(parent)
    _child = child = Child(_create_sender(pipe, mark))
    code = 2
    try:
        command()
    except CommandExit as done:
        code = done.code
    except SystemExit:  # raised by the model's code
        pass
    try:
        child.conclude(code)
    except OSError:  # the model's code has closed the pipe
        os._exit(2)
    raise SystemExit(code)


def _create_sender(pipe: int, mark: bytes) -> Send:
    """Return a function that sends messages. It uses the functions that `os` has now: model code may replace them."""
    owner, getpid, write, pack = os.getpid(), os.getpid, os.write, _HEADER.pack
    lock = _thread.RLock()

    def send(kind: bytes, payload: bytes) -> None:
        if getpid() != owner:
            return
        message = memoryview(pack(mark, kind, len(payload)) + payload)
        with lock:
            while message:
                message = message[write(pipe, message) :]

    return send


def _end_with(parent: int) -> None:
    """Have Linux end this process when the parent is killed. Other systems let this process run to its end."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(2)


# --- the parent -------------------------------------------------------------------------------------------------------


class _Watch:
    """Supervision of a child, from start to end."""

    def __init__(self, pid: int, pipe: int, mark: bytes) -> None:
        self._pid, self._pipe, self._mark = pid, pipe, mark
        self._group = not is_terminal(0)
        self._start = time.monotonic()
        self._received = bytearray()
        #: Pieces to write, in order, each with its descriptor: 1 for the result, 2 for notes.
        self._output: list[tuple[int, bytes]] = []
        self._crc = self._size = 0
        self._model = ""
        self._limit: float | None = None
        self._code: int | None = None
        self._status: int | None = None
        self._is_corrupt = False
        self._signals: list[int] = []
        os.set_blocking(pipe, False)
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._signals.append(number))

    def wait(self) -> int:
        """Wait for the verdict, print the result, wait for the child; return the exit code."""
        while self._code is None and not self._is_corrupt and not self._signals and not self._has_ended():
            seconds_left = None if self._limit is None else self._start + self._limit - time.monotonic()
            if seconds_left is not None and seconds_left <= 0:
                return self._end_after_timeout()
            self._wait_for_event(seconds_left)
        if self._signals:
            return self._end_after_signal(self._signals[0])
        self._receive()
        if self._code is None or self._code == 130:  # nobody has interrupted the parent
            return self._explain()
        code = self._print(self._code)
        deadline = time.monotonic() + END_TIMEOUT_S
        while not self._has_ended() and not self._signals and (seconds_left := deadline - time.monotonic()) > 0:
            self._wait_for_event(seconds_left)
        if not self._signals and not self._has_ended():
            self._interrupt()
        if self._group:  # also end processes left by the model's code
            _send_signal(os.killpg, self._pid)
        return self._end_after_signal(self._signals[0]) if self._signals else code

    # messages of the child

    def _wait_for_event(self, seconds: float | None) -> None:
        """Wait for a message, a signal or the end of the child."""
        descriptors = [self._wake] if self._code is not None or self._is_corrupt else [self._wake, self._pipe]
        ready, _, _ = select.select(descriptors, [], [], seconds)
        if self._wake in ready:
            _read_all(self._wake)
        if self._pipe in ready:
            self._receive()

    def _receive(self) -> None:
        if self._code is not None or self._is_corrupt:
            return
        self._received += _read_all(self._pipe)
        while len(self._received) >= _HEADER.size:
            mark, kind, size = _HEADER.unpack_from(self._received)
            if mark != self._mark or size > MAX_MESSAGE_BYTES:
                self._is_corrupt = True
                return
            end = _HEADER.size + size
            if len(self._received) < end:
                return
            payload = bytes(self._received[_HEADER.size : end])
            del self._received[:end]
            self._handle_message(kind, payload)

    def _handle_message(self, kind: bytes, payload: bytes) -> None:
        if kind == _OUTPUT:
            self._crc, self._size = zlib.crc32(payload, self._crc), self._size + len(payload)
            self._output.append((1, payload))
        elif kind == _ERROR:
            self._output.append((2, payload)) if self._output else _write_error(payload)
        elif kind == _MODEL:
            self._model = payload.decode("utf-8", "replace")
        elif kind == _LIMIT and self._limit is None:
            (self._limit,) = _TIMEOUT.unpack(payload)
        elif kind == _DONE and self._code is None:
            code, crc, size = _VERDICT.unpack(payload)
            self._is_corrupt = (crc, size) != (self._crc, self._size)
            self._code = None if self._is_corrupt else code

    # the end of the child

    def _print(self, code: int) -> int:
        """Write the result to standard output and notes to standard error, in order; return the exit code."""
        try:
            result = b"".join(piece for descriptor, piece in self._output if descriptor == 1)
            if result and is_terminal(1) and pager.show(result, 1):
                self._output = [entry for entry in self._output if entry[0] != 1]
            for descriptor, piece in self._output:
                _write_all(1, piece) if descriptor == 1 else _write_error(piece)
        except BrokenPipeError:
            return 141
        except OSError as error:
            return _complain(f"cannot write to standard output: {error.strerror}")
        return code

    def _explain(self) -> int:
        """Print why the child has not sent a verdict; return exit code 2."""
        for descriptor, piece in self._output:
            _write_error(piece) if descriptor == 2 else None
        self._wait_for_end(0 if self._is_corrupt else INTERRUPT_TIMEOUT_S)
        status = self._status
        self._kill()
        culprit = f"{self._model}: the model's code" if self._model else "a library"
        if self._code == 130:
            event = "interrupted its own process (SIGINT)"
        elif self._is_corrupt:
            event = "wrote to a file descriptor of statecli and destroyed the result"
        elif status is not None and os.WIFSIGNALED(status):
            event = f"crashed ({_name_signal(os.WTERMSIG(status))})"
        else:
            code = os.waitstatus_to_exitcode(status) if status is not None else 0
            event = f"ended the process with status {code} before statecli was done"
        return _complain(f"{culprit} {event}; there is no result")

    def _end_after_timeout(self) -> int:
        self._interrupt()
        name = f"{self._model}: " if self._model else ""
        return _complain(f"{name}stopped after {self._limit:g} s (--timeout), before the end; there is no result")

    def _end_after_signal(self, number: int) -> int:
        """Return 130 for Ctrl-C. For any other signal, end this process by the same signal."""
        if number == signal.SIGINT:
            self._wait_for_end(0.2)  # the terminal has sent the signal to the child too
        self._interrupt()
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return 130

    def _interrupt(self) -> None:
        """Interrupt the child by SIGINT. Soon after, kill the child and its process group by SIGKILL."""
        if not self._has_ended():
            os.kill(self._pid, signal.SIGINT)
            self._wait_for_end(INTERRUPT_TIMEOUT_S)
        self._kill()
        if is_terminal(2):
            _write_error(_SHOW_CURSOR)

    def _kill(self) -> None:
        if self._group:
            _send_signal(os.killpg, self._pid)
        if self._status is None:
            _send_signal(os.kill, self._pid)
            self._status = os.waitpid(self._pid, 0)[1]

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._has_ended() and (seconds_left := deadline - time.monotonic()) > 0:
            self._wait_for_event(seconds_left)


def _send_signal(send: Callable[[int, int], None], pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # no process is left, or macOS has a zombie in the group
        send(pid, signal.SIGKILL)


def _read_all(descriptor: int) -> bytes:
    pieces = []
    try:
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
    except BlockingIOError:
        pass
    return b"".join(pieces)


def _write_all(descriptor: int, data: bytes) -> None:
    bytes_left = memoryview(data)
    while bytes_left:
        try:
            bytes_left = bytes_left[os.write(descriptor, bytes_left) :]
        except BlockingIOError:  # another process has made the pipe non-blocking
            select.select([], [descriptor], [])


def _write_error(data: bytes) -> None:
    with suppress(OSError):  # only the exit code can be reported now
        _write_all(2, data)


def _complain(message: str) -> int:
    _write_error(f"statecli: {message}\n".encode(errors="backslashreplace"))
    return 2


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
