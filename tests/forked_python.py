"""Run `python -c CODE` or `python -m statecli` in a separate process with torch already imported.

Importing torch takes more than two seconds of CPU, and harmful files must not be loaded in the process of the
tests. A server (`tests/fork_server.py`) imports the libraries once; each process is a fork of the server, with its own
arguments, folder, environment, streams and exit status. Start a real process if the start or the end of Python is
tested: imported modules, options of the interpreter, limits of memory, finalizers that run last.
"""

from __future__ import annotations

import marshal
import os
import select
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Ends a run of `run_code` that takes longer.
TIMEOUT_S = 120

#: Modules of statecli that most commands import: their import takes 0.1 s in an audit.
_STATECLI = (
    *("statecli.cli.command_runner", "statecli.cli.parser", "statecli.cli.mistakes", "statecli.formats.safetensors"),
    *("statecli.formats.torch_zip", "statecli.formats.torch_export", "statecli.formats.torchscript"),
    *("statecli.requests.audit", "statecli.requests.diff", "statecli.requests.inspect", "statecli.values.stats"),
    *("statecli.report.audit", "statecli.report.diff", "statecli.report.inspect", "statecli.render.json"),
    *("statecli.render.plain", "statecli.formats.npz", "statecli.values.audit_facts", "statecli.values.digest"),
    *("statecli.requests.lock", "statecli.requests.git_external_diff"),
    *("statecli.cli.import_msgspec", "statecli.cli.supervisor"),
)
#: Modules of commands that build a class: their import takes 0.03 s in an inspection, 0.04 s in a verification.
_LIVE = (
    *("statecli.live.suggest_fix", "statecli.live.configured_model", "statecli.live.fake_gpu_values"),
    *("statecli.live.model_reader", "safetensors.torch", "torch._subclasses.schema_check_mode"),
    *("statecli.requests.verify", "statecli.report.verify", "statecli.commands.verify.copy_model"),
    *(f"statecli.commands.verify.proofs.{name}" for name in ("move", "cast", "save", "copy", "step", "forward")),
)
#: Modules imported first by a server, by the name that `run_python` and `start_python` take.
LIBRARIES = {
    "torch": ("torch", "torch.distributed.checkpoint", "torch.export", "torch._dynamo", "numpy", *_STATECLI, *_LIVE),
    "statecli": ("numpy", *_STATECLI),
    "dask": ("numpy", "distributed.cli.dask_scheduler", "distributed.cli.dask_worker"),
}
#: Variables that Python reads at its start, without those that the server applies to a process.
_START_VARIABLES = ("PYTHON", "LD_", "LC_", "LANG")
_APPLIED_VARIABLES = {"PYTHONPATH", "PYTHONIOENCODING", "PYTHONUNBUFFERED"}

_FOLDER = Path(__file__).parent
_ENVIRONMENT = dict(os.environ)
_NUMBER = struct.Struct("<q")
_servers: dict[str, ForkServer] = {}


class ForkServer:
    """A server with libraries imported, shared by the processes of a test run, which ends with the last of them."""

    def __init__(self, libraries: str) -> None:
        import fcntl  # Windows imports this module without starting a server

        run = os.environ.get("TEST_RUN") or os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"of-{os.getpid()}"
        folder = os.path.join(tempfile.gettempdir(), f"fork-server-{run}-{libraries}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.path = os.path.join(folder, "socket")
        lock = os.open(_FOLDER, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not self._join():
            self._start(LIBRARIES[libraries])
            assert self._join()
        os.close(lock)

    def _join(self) -> bool:
        """Open the connection that keeps the server running. Return False if no server answers."""
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(self.path)
            self._connection.sendall(_NUMBER.pack(0))
            return bool(self._connection.recv(_NUMBER.size))
        except OSError:  # not started yet, or about to end
            return False

    def _start(self, modules: Sequence[str]) -> None:
        process = subprocess.Popen(
            [sys.executable, str(_FOLDER / "fork_server.py"), self.path, *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_FOLDER.parent,
            env=_ENVIRONMENT,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"


class ForkedProcess(subprocess.Popen[Any]):
    """A process forked by the server, with the methods of `subprocess.Popen`."""

    def __init__(self, words: Sequence[Any], libraries: str, session: str = "same", **options: Any) -> None:
        self._libraries, self._session = libraries, session
        super().__init__([sys.executable, *map(str, words)], **options)

    def _execute_child(self, command: list[str], *options: Any) -> None:
        """Request a process from the server. `options` are the options of `subprocess.Popen._execute_child`."""
        cwd, environment, pipes = options[4], options[5], options[9:15]
        environment = dict(os.environ if environment is None else environment)
        _check_environment(environment)
        request = {
            "words": command[1:],
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": environment,
            "session": self._session,
        }
        descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(find_server(self._libraries).path)
        body = marshal.dumps(request)
        socket.send_fds(self._connection, [_NUMBER.pack(len(body))], descriptors)
        self._connection.sendall(body)
        self.pid = self._receive()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _receive(self) -> int:
        return int(_NUMBER.unpack(self._connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0])

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        status = self._receive()
        self._connection.close()
        return self.pid, status

    def _wait(self, timeout: float | None) -> int | None:
        """Wait for the answer of the server; with a timeout, `subprocess.Popen` looks for the end every 0.05 s."""
        waits = timeout is not None and self.returncode is None
        if waits and not select.select([self._connection], [], [], max(timeout or 0, 0))[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return super()._wait(None)  # type: ignore[misc, no-any-return]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def find_server(libraries: str) -> ForkServer:
    """Return the server for a set of libraries; the first call starts the server."""
    if libraries not in _servers:
        _servers[libraries] = ForkServer(libraries)
    return _servers[libraries]


def start_python(words: Sequence[Any], libraries: str = "torch", **options: Any) -> ForkedProcess:
    """Start a process like `python WORD...`: `-c CODE ARG...`, `-m MODULE ARG...` or `SCRIPT ARG...`.

    The options are the options of `subprocess.Popen`. `session` is "same", "new", or "terminal" for a new session
    whose controlling terminal is standard input.
    """
    return ForkedProcess(words, libraries, **options)


def run_python(
    words: Sequence[Any],
    libraries: str = "torch",
    *,
    given: Any = None,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Start, wait and return as `subprocess.run` does; the output is captured, as text unless `text=False`."""
    streams = {"stdin": subprocess.PIPE} if given is not None else {}
    streams |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(words, libraries, **{"text": True, **streams, **options}) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    completed = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        completed.check_returncode()
    return completed


def run_command(command: Sequence[Any], *, check: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Replace `subprocess.run` in a patch, for `[sys.executable, WORD...]` and streams of its own."""
    assert not check
    with start_python(command[1:], **options) as process:
        process.wait(TIMEOUT_S)
    return subprocess.CompletedProcess(command, process.returncode)


def run_code(code: str, *args: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Return the output of the code and its exit status, negative if a signal ended the process."""
    words = ["-W", "ignore", "-c", code, *args]
    return run_python(words, cwd=cwd, timeout=TIMEOUT_S, errors="replace", stdin=subprocess.DEVNULL, session="new")


def write_command(path: Path, *words: str, libraries: str = "statecli") -> None:
    """Write an executable file that works like `exec python WORD... "$@"` in a shell."""
    client = [sys.executable, "-I", "-S", str(_FOLDER / "fork_client.py"), find_server(libraries).path, *words]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    path.chmod(0o755)


def _check_environment(environment: dict[str, str]) -> None:
    """Refuse an environment variable that only the start of a process reads.

    Dask sets PYTHONHASHSEED for its workers in the importing process; no test needs this setting.
    """
    by_dask = {"PYTHONHASHSEED"} if "dask.multiprocessing" in sys.modules else set()
    for name in (environment.keys() | _ENVIRONMENT.keys()) - by_dask:
        if name.startswith(_START_VARIABLES) and name not in _APPLIED_VARIABLES:
            assert environment.get(name) == _ENVIRONMENT.get(name), f"{name} needs a newly started process"
