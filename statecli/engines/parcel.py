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

from statecli import __version__, files
from statecli.errors import EngineError, StateError, UnreadableError
from statecli.sharing.tasks import identities
from statecli.state import ByteRange
from statecli.values import kernels
from statecli.values.run import Piece

#: What a worker can be asked to do: a function's name -> its module.
FUNCTIONS = {
    "run_batch": "statecli.values.run",
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
    paths: set[str] = set()

    def local(one: object) -> str | None:
        # A path is met in what it is the path of before it is met itself.
        if type(one) is str:
            return one if one in paths and not os.path.isabs(one) else None
        if isinstance(one, (ByteRange, Piece)) and one.path and not files.is_remote(one.path):
            paths.add(one.path)
        return None

    tasks = _packed((shared, batch), local)
    known = {path: _known(path) for path in sorted(paths)}
    return io.BytesIO(pickle.dumps(_Call(made_here(), name, _packed((os.getcwd(), known, files.access(), tasks)))))


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
    folder, known, access, tasks = _unpacked(packed, str)
    absolute = {path: os.path.join(folder, path) for path in known}
    found = _attempt(lambda: _done(function, absolute, known, access, tasks))

    def relative(one: object) -> str | None:
        if type(one) is not str or folder not in one:
            return None
        for path, there in absolute.items():
            one = one.replace(there, path)
        return one

    return _packed(found, relative)


def unpack(answer: bytes | str) -> Sequence[Any] | StateError:
    """What `work` gave: a result for each task, or one error for all of them.

    Raises `EngineError` for a worker that refuses, and whatever a bug raised there.
    """
    if isinstance(answer, str):
        raise EngineError(f"a worker refuses: it is {answer}")
    found = _unpacked(answer, str)
    if isinstance(found, RuntimeError):
        raise found
    results: Sequence[Any] | StateError = found
    return results


def _named(version: str, kernel: str) -> str:
    return f"statecli {version} with its kernel in {kernel}"


def _done(
    name: str, absolute: dict[str, str], known: dict[str, Known | None], access: Any, packed: bytes
) -> Sequence[Any]:
    _refuse_others(absolute, known)
    files.accept(access)
    shared, batch = _unpacked(packed, lambda path: absolute[path])
    results: Sequence[Any] = getattr(importlib.import_module(FUNCTIONS[name]), name)(shared, batch)
    _refuse_others(absolute, known)  # one may have been copied over it meanwhile
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


def _refuse_others(absolute: dict[str, str], known: dict[str, Known | None]) -> None:
    """Raises `UnreadableError` where the worker has no such file, or another than the command."""
    for path, then in known.items():
        why = _difference(_known(absolute[path]), then)
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


# --- names that mean something else there ----------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, named: Callable[[object], str | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._named = named

    def persistent_id(self, obj: object) -> str | None:
        return self._named(obj)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Callable[[str], str]) -> None:
        super().__init__(file)  # its bytes were made by `_packed`, and came the way the engine's own pickles come
        self._known = known

    def persistent_load(self, name: str) -> str:
        return self._known(name)


def _packed(what: Any, named: Callable[[object], str | None] = lambda _: None) -> bytes:
    """As bytes; texts of which `named` knows another are this other one where they are unpacked."""
    file = io.BytesIO()
    _Packer(file, named).dump(what)
    return file.getvalue()


def _unpacked(packed: bytes, known: Callable[[str], str]) -> Any:
    return _Unpacker(io.BytesIO(packed), known).load()
