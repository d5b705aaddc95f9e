"""A server with the libraries of the tests imported; each process is a fork of it. See `tests/forked_python.py`.

Usage: python fork_server.py SOCKET MODULE...

A request is a dict in the format of `marshal` with the fields `words`, `cwd`, `environment` and `session`, and
descriptors 0, 1 and 2 of the process. The words are those after `python`: `-c CODE ARG...`, `-m MODULE ARG...` or
`SCRIPT ARG...`, after `-W ignore`, `-E` or `-I`. The answer is the process id, and later the status as `os.waitpid`
returns it. The server kills a process whose client has closed the connection. An empty request joins the server, which
ends when the last connection that joined is closed. The server has one thread, because a fork copies only the thread
that calls it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import termios
import warnings
import weakref
from typing import Any, NoReturn

NUMBER = struct.Struct("<q")
DESCRIPTORS = 3
MADV_COLLAPSE = 25
HUGE_PAGE_BYTES = 2 << 20


class Server:
    """The loop of the server; `serve` returns a request in each fork."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # of a server that was killed
            os.unlink(path)
        self._folder = os.path.dirname(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(16)
        self._connections: dict[socket.socket, int] = {}
        self._joined: set[socket.socket] = set()
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_end, False)
        signal.set_wakeup_fd(self._wake_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict[str, Any]:
        """Start processes until all that joined have left. Return the request in a new process."""
        while True:
            ready, _, _ = select.select([self._wake, self._listener, *self._joined, *self._connections], [], [])
            if left := self._joined & set(ready):
                self._joined -= left
                if not self._joined:
                    self._end()
            if self._wake in ready:
                os.read(self._wake, 1 << 16)
            self._report_ended()
            for connection in self._connections.keys() & set(ready):
                os.kill(self._connections[connection], signal.SIGKILL)
            if self._listener in ready:
                request = self._start_process()
                if request is not None:
                    return request

    def _start_process(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        size, descriptors, _, _ = socket.recv_fds(connection, NUMBER.size, DESCRIPTORS)
        if not any(size):
            self._joined.add(connection)
            connection.sendall(NUMBER.pack(os.getpid()))
            return None
        with connection.makefile("rb") as stream:
            request: dict[str, Any] = marshal.loads(stream.read(*NUMBER.unpack(size)))  # noqa: S302  # the tests' own
        pid = os.fork()
        if pid == 0:
            self._leave(connection)
            _use_descriptors(descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(NUMBER.pack(pid))
        self._connections[connection] = pid
        return None

    def _report_ended(self) -> None:
        for connection, pid in list(self._connections.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._connections[connection]
                with contextlib.suppress(OSError):  # the client has gone
                    connection.sendall(NUMBER.pack(status))
                connection.close()

    def _leave(self, connection: socket.socket) -> None:
        """Close the files of the server, and handle signals as a new process of Python does."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listener, connection, *self._joined, *self._connections):
            other.close()
        self._connections.clear()
        os.close(self._wake)
        os.close(self._wake_end)

    def _end(self) -> NoReturn:
        for pid in self._connections.values():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def _use_descriptors(descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _open_streams() -> None:
    """Open the standard streams as Python does at its start."""
    encoding, errors = sys.__stdout__.encoding, sys.__stdout__.errors
    setting = os.environ.get("PYTHONIOENCODING", "")
    if setting:
        name, _, handler = setting.partition(":")
        encoding, errors = name or encoding, handler or "strict"
    sys.stdin = sys.__stdin__ = _open_stream(0, "rb", encoding, errors)
    sys.stdout = sys.__stdout__ = _open_stream(1, "wb", encoding, errors)
    sys.stderr = sys.__stderr__ = _open_stream(2, "wb", encoding, "backslashreplace")


def _open_stream(descriptor: int, mode: str, encoding: str, errors: str) -> io.TextIOWrapper:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) and mode == "wb"
    stream: Any = open(descriptor, mode, 0 if unbuffered else -1, closefd=False)  # noqa: SIM115  # for the process
    by_line = not unbuffered and (stream.isatty() or descriptor == 2)
    return io.TextIOWrapper(stream, encoding, errors, "\n", by_line, write_through=unbuffered)


def _replace_path_entries(before: str, after: str) -> None:
    """Replace the entries of the server's PYTHONPATH in `sys.path` by the entries of the new PYTHONPATH."""
    if after != before:
        old, new = ([os.path.abspath(entry) for entry in value.split(os.pathsep) if value] for value in (before, after))
        sys.path[:] = [*new, *(entry for entry in sys.path if entry not in old)]


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages: a fork copies an entry for each page, 55,000 of them for torch.

    This takes 11 of the 20 ms of a process. A system without MADV_COLLAPSE (Linux 6.1) keeps its pages.
    """
    try:
        with open("/proc/self/maps") as lines:
            mappings = [line.split() for line in lines]
    except FileNotFoundError:
        return
    advise = ctypes.CDLL(None).madvise
    for addresses, access, *_, name in ([*mapping, ""][:6] for mapping in mappings):
        if access == "rw-p" and name in ("", "[heap]"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-first // HUGE_PAGE_BYTES), last // HUGE_PAGE_BYTES):
                advise(ctypes.c_void_p(page * HUGE_PAGE_BYTES), ctypes.c_size_t(HUGE_PAGE_BYTES), MADV_COLLAPSE)


def run(request: dict[str, Any]) -> None:
    """Run the code of a request as Python would."""
    if request["session"] != "same":
        os.setsid()
    if request["session"] == "terminal":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    path_before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    words = request["words"]
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del words[:2]
    if words[0] in ("-E", "-I"):
        del words[0]
    else:
        _replace_path_entries(path_before, os.environ.get("PYTHONPATH", ""))
    _open_streams()
    if not words[0].startswith("-"):
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")
        return
    option, name, *arguments = words
    sys.argv = ["-c" if option == "-c" else name, *arguments]
    if option == "-c":
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(name, "<string>", "exec"), main.__dict__)  # noqa: S102  # the tests' own code
    else:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def end(error: BaseException | None) -> NoReturn:
    """End as Python does: threads, exit handlers, streams. Modules are not taken apart, because this takes 0.3 s."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    elif isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as failure:
            if stream is sys.stdout:
                code = 120
                sys.stderr.write(f"Exception ignored in: {stream!r}\nOSError: {failure}\n")
        except (ValueError, AttributeError):  # model code has closed or removed it
            pass
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    del sys.path[0]
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for finalizer in weakref.finalize._registry:  # torch unregisters its operators, which takes 0.06 s
        finalizer.atexit = False
    server = Server(sys.argv[1])
    gc.collect()
    gc.freeze()
    use_huge_pages()
    os.write(1, b"ready\n")
    request = server.serve()
    del server
    try:
        run(request)
    except BaseException as error:  # noqa: BLE001  # also SystemExit: what Python does with it
        end(error)
    end(None)
