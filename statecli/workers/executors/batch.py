"""A batch of tasks as it travels to a process that is not this one's child, and its results on the way back.

A worker does only what the table says, and only for the statecli that it is itself: another version means something
else by the same fields, and sums of numpy differ from those of `_native.c` in their last bits.
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

from msgspec.structs import astuple, replace

from statecli.core.errors import ChecksumMismatch, EngineError, StateError, UnreadableError
from statecli.core.state import ByteRange, Stats
from statecli.core.version import __version__
from statecli.storage import files
from statecli.values import kernels
from statecli.values.compare_task import Piece
from statecli.values.facts_kernel import Facts
from statecli.workers.shards.tasks import identities

#: What a worker can be asked to do: a function's name -> its module.
FUNCTIONS = {
    "run_batch": "statecli.values.compare_task",
    "check_batch": "statecli.values.compare",
    "fingerprint_batch": "statecli.values.compare",
    "facts_of_batch": "statecli.values.facts",
    "digest_batch": "statecli.values.digest",
    "stats_batch": "statecli.values.stats",
}


def made_here() -> tuple[str, str]:
    """The version of statecli, and what its kernels are: "C" or "numpy"."""
    return __version__, kernels.made_of()


Parcel = io.BytesIO


#: Does a parcel, wherever it is called, and gives what `unpack` takes. It is of the standard library, as parcels are:
#: a worker of Dask that lacks what a task names dies of it and logs the task's bytes, and a BytesIO shows none.
do: Callable[[Parcel], bytes | str] = pickle.load


def pack(function: Callable[..., Any], shared: Any, batch: Sequence[Any]) -> Parcel:
    """The parcel of a batch. Paths in it that are relative are so to this process's folder."""
    name = function.__name__
    assert FUNCTIONS[name] == function.__module__, name  # noqa: S101 - a function that no worker would do
    here = os.path.join(_folder(), MARK)
    file = io.BytesIO()
    packer = _Packer(file, here)
    packer.dump((shared, batch))
    known = {path: _known(path) for path in sorted(packer.paths)}
    packed = pickle.dumps((here, known, files.export_access(), file.getvalue()))
    return io.BytesIO(pickle.dumps(_Call(made_here(), name, packed)))


def _folder() -> str:
    """This process's; none where it was removed: no relative path leads anywhere from there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


#: What stands between the folder of the command and a path of it: the same file, in letters that nobody else writes, so
#: that what a worker says of the file is told from all that is said of anything else.
MARK = os.path.join(*["."] * 9, "")


class _Packer(pickle.Pickler):
    """Makes the paths absolute that it meets, and nothing else; `paths` are the local ones, as they were."""

    def __init__(self, file: io.BytesIO, here: str) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._here = here
        self.paths: dict[str, str] = {}

    def reducer_override(self, one: Any) -> Any:
        """As `Pickler.reducer_override`: by its type alone, since a name or a dtype may read as a path does."""
        if type(one) not in (ByteRange, Piece):
            return NotImplemented
        path, *rest = astuple(one)
        if not path or files.is_remote(path):
            return NotImplemented
        if path not in self.paths:
            self.paths[path] = os.path.join(self._here, path)
        return type(one), (self.paths[path], *rest)


class _Call:
    """Is a call of `work` where it is unpickled."""

    def __init__(self, *words: Any) -> None:
        self._words = words

    def __reduce__(self) -> tuple[Any, ...]:
        return work, self._words


def work(made: tuple[str, str], function: str, packed: bytes) -> bytes | str:
    """Does a batch, in a worker. The results as bytes, or why this worker refuses it, in words.

    `made` is `made_here` of the command, `function` a name in FUNCTIONS, and `packed` the rest.
    """
    if made != made_here():
        return f"{_named(*made_here())}, this command is {_named(*made)}: install the same statecli on both"
    here, known, access, tasks = pickle.loads(packed)  # noqa: S301 - it came the way the engine's own pickles come
    found = _attempt(lambda: _done(function, here, known, access, tasks))
    return pickle.dumps(Answer(_told(found, here)))


class Answer(NamedTuple):
    """Is what a worker gives back; anything else was given by something else."""

    found: Sequence[Any] | Exception


def _told(found: Any, here: str) -> Any:
    """The same in the command's own paths. They are in what is said in words, and in places, alone."""
    if isinstance(found, (list, tuple)):
        return [_told(one, here) for one in found]
    if isinstance(found, Exception):
        found.args = tuple(str(one).replace(here, "") for one in found.args)
    if isinstance(found, ChecksumMismatch) and found.place is not None:
        found.place = replace(found.place, path=found.place.path.removeprefix(here))
    if isinstance(found, (Facts, Stats)) and found.reason:
        return replace(found, reason=found.reason.replace(here, ""))
    return found


def unpack(answer: bytes | str) -> Sequence[Any] | StateError:
    """What `work` gave: a result for each task, or one error for all of them.

    Raises `EngineError` for a worker that refuses, and for what no worker gave; and whatever a bug raised there.
    """
    if isinstance(answer, str):
        raise EngineError(f"a worker refuses: it is {answer}")
    try:
        given = pickle.loads(answer)  # noqa: S301 - as what was sent
    except Exception as why:  # bytes of whatever it is may raise anything
        raise EngineError(f"what came back is no result of statecli ({type(why).__name__})") from why
    if not isinstance(given, Answer):
        raise EngineError(f"what came back is no result of statecli (it is of type {type(given).__name__})")
    found: Any = given.found
    if isinstance(found, RuntimeError):
        raise found
    results: Sequence[Any] | StateError = found
    return results


def _named(version: str, kernel: str) -> str:
    return f"statecli {version} with its kernel in {kernel}"


def _done(name: str, here: str, known: dict[str, Known | None], access: Any, tasks: bytes) -> Sequence[Any]:
    _refuse_others(here, known)
    files.import_access(access)
    shared, batch = pickle.loads(tasks)  # noqa: S301 - as what is around it
    results: Sequence[Any] = getattr(importlib.import_module(FUNCTIONS[name]), name)(shared, batch)
    _refuse_others(here, known)  # one may have been copied over it meanwhile
    return results


# --- whether a file is the same there --------------------------------------------------------------------------------


class Known(NamedTuple):
    """What a file is known by where it has the same path: its bytes, when it was last written, and a digest of samples.

    Microseconds: there are file systems that keep no nanoseconds. A folder is what its files are, and has nothing.
    """

    bytes: int = 0
    written: int = 0
    samples: str | None = None


def _known(path: str) -> Known | None:
    """None where nothing is."""
    try:
        now = os.stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(now.st_mode):
        return Known()
    return Known(now.st_size, now.st_mtime_ns // 1000, _samples(path, (now.st_dev, now.st_ino, now.st_mtime_ns)))


@lru_cache(maxsize=4096)
def _samples(path: str, _stamp: tuple[int, ...]) -> str | None:
    """Read once in a process, as long as the file has this stamp: each parcel asks."""
    return identities([path])[path].version


def _refuse_others(here: str, known: dict[str, Known | None]) -> None:
    """Raises `UnreadableError` where the worker has no such file, or another than the command."""
    for path, then in known.items():
        why = _difference(_known(os.path.join(here, path)), then)
        if why is not None:
            raise UnreadableError(
                f"{path}: {why.format(there=f'on the worker {socket.gethostname()}')}: workers need the same file by "
                "the same path: on a shared disk, or as a copy that keeps times (cp -p, rsync -t)"
            )


def _difference(found: Known | None, then: Known | None) -> str | None:
    if found == then:
        return None
    if found is None or then is None:
        return "is not there, {there}" if found is None else "is there, {there}, and not here"
    if found.bytes != then.bytes:
        return f"is another file {{there}}: it has {found.bytes} bytes, and {then.bytes} here"
    if found.written != then.written:
        return "is another file {there}: it was written at another time"
    return "is another file {there}: its bytes differ"


def _attempt(do: Callable[[], Sequence[Any]]) -> Sequence[Any] | Exception:
    try:
        return do()
    except StateError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug is told where the command is, which may not know its class
        return RuntimeError(f"{type(error).__name__}: {error}")
