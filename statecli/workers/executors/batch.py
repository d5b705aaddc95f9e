"""Pack a batch of tasks for a worker that this process has not forked, and unpack the results.

A worker calls only the functions in FUNCTIONS, and only if it has the same build of statecli. In another version, the
same fields may have a different meaning. Sums of numpy differ from sums of `_native.c` in their last bits.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import socket
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import astuple, replace

from statecli.core.errors import ChecksumMismatch, EngineError, StateError, UnreadableError
from statecli.core.model_state import ByteRange
from statecli.core.version import __version__
from statecli.storage import files
from statecli.workers.file_identity import identify_files
from statecli.workers.pool import run_or_error
from statecli.workers.task import Piece

#: Functions that a worker may call: name -> module. Modules are given by name, so that a worker imports them on use,
#: and because the packages with these functions import `workers`.
FUNCTIONS = {
    "run_batch": "statecli.values.compare_task",
    "check_batch": "statecli.values.recorded_checksums",
    "check_elements_batch": "statecli.values.element_checks",
    "derived_batch": "statecli.values.data_task",
    "fingerprint_batch": "statecli.values.fingerprints",
    "facts_of_batch": "statecli.values.audit_facts",
    "digest_batch": "statecli.values.digest",
    "stats_batch": "statecli.values.stats",
}
#: Module whose `kernel_name()` returns the kernel of a process.
KERNEL_MODULE = "statecli.values.kernels"


class Build(NamedTuple):
    """Version of statecli, and its kernel ("C" or "numpy"). Results are equal only if the builds are equal."""

    version: str
    kernel: str


def get_current_build() -> Build:
    """Return the build of this process."""
    return Build(__version__, importlib.import_module(KERNEL_MODULE).kernel_name())


PackedBatch = io.BytesIO


#: Function that runs a packed batch in any process and returns the argument of `unpack`. Function and type come from
#: the standard library: a Dask worker that lacks a task's module dies and logs the task's content. A BytesIO does not
#: show its content.
run_packed_batch: Callable[[PackedBatch], bytes | str] = pickle.load


def pack(function: Callable[..., Any], shared: object, batch: Sequence[Any]) -> PackedBatch:
    """Pack a batch for a worker. Relative paths are resolved from the working folder of this process."""
    name = function.__name__
    assert FUNCTIONS[name] == function.__module__, name  # noqa: S101 - no worker would call another function
    folder = os.path.join(_get_current_folder(), PATH_MARK)
    file = io.BytesIO()
    pickler = _PathPickler(file, folder)
    pickler.dump((shared, batch))
    versions = {path: _read_version(path) for path in sorted(pickler.paths)}
    packed_call = pickle.dumps((folder, versions, files.export_access(), file.getvalue()))
    return io.BytesIO(pickle.dumps(_WorkerCall(get_current_build(), name, packed_call)))


def _get_current_folder() -> str:
    """Return the working folder, or "" if the folder was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


#: Separator of the command's folder and a path in it. The path still leads to the same file, but in a form that nobody
#: else writes. So a worker's message about the file can be recognised.
PATH_MARK = os.path.join(*["."] * 9, "")


class _PathPickler(pickle.Pickler):
    """Pickler that makes the paths of local files absolute, and records the original paths in `paths`."""

    def __init__(self, file: io.BytesIO, folder: str) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._folder = folder
        self.paths: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        """Make the path of a ByteRange or Piece absolute (see `Pickler.reducer_override`). Keep all other values."""
        if type(value) not in (ByteRange, Piece):
            return NotImplemented
        path, *fields = astuple(value)
        if not path or files.is_remote(path):
            return NotImplemented
        if path not in self.paths:
            self.paths[path] = os.path.join(self._folder, path)
        return type(value), (self.paths[path], *fields)


class _WorkerCall:
    """Object that calls `run_in_worker` when it is unpickled."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return run_in_worker, self._arguments


def run_in_worker(build: Build, function: str, packed_call: bytes) -> bytes | str:
    """Run a batch in a worker. Return the pickled results, or the reason why this worker refuses the batch.

    `build` is the command's build, `function` a name in FUNCTIONS, and `packed_call` the rest.
    """
    if build != get_current_build():
        builds_text = f"{_describe_build(*get_current_build())}, but this command runs {_describe_build(*build)}"
        return f"{builds_text}; install the same build of statecli for the worker and the command"
    folder, versions, access, tasks = pickle.loads(packed_call)  # noqa: S301 - sent as the executor's own pickles are
    outcome: Sequence[Any] | Exception
    try:
        outcome = run_or_error(lambda: _run_function(function, folder, versions, access, tasks))
    except Exception as error:  # noqa: BLE001 - the command reports bugs, and may not know the class of the error
        outcome = RuntimeError(f"{type(error).__name__}: {error}")
    return pickle.dumps(WorkerAnswer(_restore_paths(outcome, folder)))


class WorkerAnswer(msgspec.Struct, frozen=True):
    """Answer of a worker. This type distinguishes the answer from objects that other code returns."""

    results: Sequence[Any] | Exception


def _restore_paths(value: object, folder: str) -> Any:
    """Restore the command's paths in results or an error. Only messages and the field `place` contain paths."""
    if isinstance(value, (list, tuple)):
        return [_restore_paths(item, folder) for item in value]
    if isinstance(value, Exception):
        value.args = tuple(str(argument).replace(folder, "") for argument in value.args)
    if isinstance(value, ChecksumMismatch) and value.place is not None:
        value.place = replace(value.place, path=value.place.path.removeprefix(folder))
    if isinstance(value, msgspec.Struct) and getattr(value, "reason", None):
        return replace(value, reason=value.reason.replace(folder, ""))  # type: ignore[attr-defined]
    return value


def unpack(answer: bytes | str) -> Sequence[Any] | StateError:
    """Return the results of `run_in_worker`: one result for each task, or a single error for the whole batch.

    Raises `EngineError` if the worker refuses the batch or another program answered; re-raises the exception of a bug
    in the worker.
    """
    if isinstance(answer, str):
        raise EngineError(f"a worker refused the task: the worker runs {answer}")
    try:
        received = pickle.loads(answer)  # noqa: S301 - as the batch that was sent
    except Exception as error:  # arbitrary bytes may raise any exception
        raise EngineError(f"the executor did not return a result of statecli ({type(error).__name__})") from error
    if not isinstance(received, WorkerAnswer):
        raise EngineError(
            f"the executor did not return a result of statecli, but an object of type {type(received).__name__}"
        )
    outcome: Any = received.results
    if isinstance(outcome, RuntimeError):
        raise outcome
    results: Sequence[Any] | StateError = outcome
    return results


def _describe_build(version: str, kernel: str) -> str:
    return f"statecli {version} with the {kernel} compute kernel"


def _run_function(
    name: str, folder: str, versions: dict[str, LocalVersion | None], access: Any, tasks: bytes
) -> Sequence[Any]:
    _require_same_files(folder, versions)
    files.import_access(access)
    shared, batch = pickle.loads(tasks)  # noqa: S301 - as the pickle around it
    results: Sequence[Any] = getattr(importlib.import_module(FUNCTIONS[name]), name)(shared, batch)
    _require_same_files(folder, versions)  # a file may have been replaced during the work
    return results


# --- comparison of a file with the worker's copy ---------------------------------------------------------------------


class LocalVersion(msgspec.Struct, frozen=True):
    """Properties that a file and its copy on a worker share: size in bytes, modification time, digest of samples.

    The time is in microseconds, because some file systems do not keep nanoseconds. A folder has the defaults, because
    its files are compared individually.
    """

    bytes: int = 0
    written: int = 0
    samples: str | None = None


def _read_version(path: str) -> LocalVersion | None:
    """Return the version of a file, or None if the file does not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(status.st_mode):
        return LocalVersion()
    samples = _compute_sample_digest(path, (status.st_dev, status.st_ino, status.st_mtime_ns))
    return LocalVersion(status.st_size, status.st_mtime_ns // 1000, samples)


@lru_cache(maxsize=4096)
def _compute_sample_digest(path: str, _version: tuple[int, ...]) -> str | None:
    """Return a digest of samples of a file. The digest is cached by version, because each batch needs it."""
    return identify_files([path])[path].version


def _require_same_files(folder: str, versions: dict[str, LocalVersion | None]) -> None:
    """Raise `UnreadableError` if a file of the command is missing or different on this worker."""
    for path, version in versions.items():
        difference = _describe_difference(_read_version(os.path.join(folder, path)), version)
        if difference is not None:
            problem = f"{path}: {difference.format(there=f'on the worker {socket.gethostname()}')}"
            copy = "a copy with the same modification time (cp -p, rsync -t)"
            need = f"workers need the same file at the same path: on a shared disk, or as {copy}"
            raise UnreadableError(f"{problem}: {need}")


def _describe_difference(worker: LocalVersion | None, command: LocalVersion | None) -> str | None:
    if worker == command:
        return None
    if worker is None or command is None:
        return "is missing {there}" if worker is None else "exists {there}, but not on this machine"
    if worker.bytes != command.bytes:
        return f"is a different file {{there}}: {worker.bytes} bytes instead of {command.bytes}"
    if worker.written != command.written:
        return "is a different file {there}: its modification time differs"
    return "is a different file {there}: its bytes differ"
