"""What a part has to know of a task: a key that is its alone, its name and bytes, its files, its type of result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from statecli.core.errors import StateError, UnreadableError
from statecli.core.state import ByteRange, Stats, TensorData, TensorInfo
from statecli.storage import files
from statecli.values.compare_task import Found, Piece, Task
from statecli.values.facts_kernel import Facts
from statecli.values.pool import Work

#: What does tasks, by its name -> the type of a result that is no error.
RESULTS: dict[str, Any] = {
    "run_batch": Found,
    "check_batch": None,
    "fingerprint_batch": int | None,
    "facts_of_batch": Facts,
    "digest_batch": str,
    "stats_batch": Stats,
}
#: Of what several tensors have in common, the first has the task: in another order of targets, or where some were found
#: under another name, it is another's.
UNPLANNED = frozenset(["check_batch", "digest_batch"])

#: Bytes of a file by which it is known again: so many pieces of it, evenly from its first byte to its last.
SAMPLES, SAMPLE = 8, 4096


class Identity(msgspec.Struct, frozen=True):
    """Of a file, or what lies behind a URL: bytes, and what tells two versions of it apart (a digest of samples, or its
    ETag); of a file also when it was last `written`, in nanoseconds. Empty where it could not be opened.
    """

    bytes: int = -1
    version: str | None = None
    written: int | None = None

    def is_another(self, other: Identity) -> bool:
        """Whether the two are not of one file, nor of a copy of it."""
        return (self.bytes, self.version) != (other.bytes, other.version)


class Key(NamedTuple):
    """A task: what does it, and a digest of all that it is told."""

    function: str
    digest: str


def keys(work: Work) -> list[Key]:
    """Of each task. The number of a pair is no part of it: it is another where more is known to be a pair."""
    name = work.function.__name__
    before = hashlib.sha256(_encoded((name, work.shared)))
    found = []
    for task in work.tasks:
        made = before.copy()
        made.update(_encoded(msgspec.structs.replace(task, pair=0) if isinstance(task, Task) else task))
        found.append(Key(name, made.hexdigest()[:32]))
    return found


def _encoded(what: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(what)
    except (OverflowError, UnicodeEncodeError):  # an integer of 65 bits, a lone surrogate
        return repr(what).encode("ascii", "backslashreplace")


def plan(of: Sequence[Key]) -> str:
    """A digest of the tasks of one pass."""
    return hashlib.sha256("\n".join(f"{one.function} {one.digest}" for one in of).encode()).hexdigest()[:32]


def name_of(task: Any) -> str:
    """The tensor's name, for people."""
    if isinstance(task, TensorInfo):
        return task.fqn
    if isinstance(task, tuple):
        return task[1] if isinstance(task[1], str) else ""
    named: str = task.tensor.fqn if hasattr(task, "tensor") else task.what
    return named


def paths(task: Any) -> Iterator[str]:
    """The files that it reads."""
    for where in _ranges(task):
        if where.path:
            yield where.path


def _ranges(one: Any) -> Iterator[ByteRange | Piece]:
    if isinstance(one, (ByteRange, Piece)):
        yield one
    elif isinstance(one, TensorInfo):
        yield from one.ranges
    elif isinstance(one, TensorData):
        yield from TensorInfo("", "", (), 0, 0, data=one).ranges
    elif isinstance(one, tuple):
        for inner in one:
            yield from _ranges(inner)
    else:
        for field in ("before", "after", "data", "tensor"):
            yield from _ranges(getattr(one, field, ()))


def identities(of: Iterable[str]) -> dict[str, Identity]:
    """Of each of these files, as it is now."""
    paths = sorted(of)
    remote = _remote([path for path in paths if files.is_remote(path)])
    return {path: remote[path] if path in remote else _local(path) for path in paths}


def _local(path: str) -> Identity:
    try:
        file = files.open_file(path)
    except UnreadableError:
        return Identity()
    try:
        written = os.stat(path).st_mtime_ns
        made, last = hashlib.sha256(), max(file.size - SAMPLE, 0)
        for n in range(SAMPLES):
            made.update(file.read(last * n // (SAMPLES - 1), SAMPLE))
        return Identity(file.size, made.hexdigest()[:16], written)
    except OSError:
        return Identity()
    finally:
        file.close()


def _remote(paths: Sequence[str]) -> dict[str, Identity]:
    found = dict.fromkeys(paths, Identity())
    files.prefetch(paths)
    for path in paths:
        with suppress(UnreadableError):
            files.open_file(path).close()
    access = files.export_access() if paths else None
    known = {} if access is None else access.versions
    return {**found, **{path: Identity(*known[path]) for path in paths if path in known}}


def is_failed(result: object) -> bool:
    """Whether a task could not be done."""
    return isinstance(result, StateError) or (isinstance(result, Facts) and result.damaged)
