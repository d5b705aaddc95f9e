"""The file of one share: a line that says what it is of, a line a task, and a line that says that it is whole.

    {"schema": "statecli.part/1", "command": "diff", "options": {"before": "a.pt", …}, "shard": [3, 8], …}
    {"function": "run_batch", "key": "5f1c…", "name": "fc.weight", "bytes": 4096, "result": {…}}
    {"end": true, "tasks": 1, "sha256": "…"}

Results are JSON with nothing lost: a float has as many digits as it takes, and one that JSON has no word for is
`{"float": "nan"}`. Whoever reads a part trusts no line of it: each is decoded as the type that it has to have.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec

from statecli.core import errors
from statecli.core.errors import ChecksumMismatch, StateError, UnreadableError
from statecli.core.state import Place
from statecli.storage import files
from statecli.values.compare_task import Found
from statecli.workers.shards.partition import MAX_SHARDS
from statecli.workers.shards.tasks import RESULTS, Identity, Key

SCHEMA = "statecli.part/1"
_FAMILY = "statecli.part/"

#: Of an integer, at most: what is more is beyond float64 too.
DIGITS = 300

#: Bytes of a line, at most, and of a file that are read at once.
LONGEST, PIECE = 64 << 20, 4 << 20

#: Errors of ours by their names; those of one module alone are what they are derived from.
ERRORS = {name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, StateError)}


class Head(msgspec.Struct, frozen=True):
    """What a part is of. `options` are those that decide the result; `plan` has a digest a pass over the values.

    `tasks` are planned for all shares together, `own` of them for this one.
    """

    schema: str
    statecli: str
    kernel: str
    command: str
    options: dict[str, Any]
    shard: tuple[int, int]
    plan: tuple[str, ...]
    tasks: int
    own: int
    files: dict[str, Identity]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task: `name` of the tensor and `bytes` are for people. It has a result, or an error.

    `derived`: only the results of others said that there is such a task.
    """

    function: str
    key: str
    name: str = ""
    bytes: int = 0
    result: Any = None
    error: Error | None = None
    derived: bool = False


class Error(msgspec.Struct, frozen=True, omit_defaults=True):
    """What went wrong with a task."""

    type: str
    message: str
    place: Place | None = None


class End(msgspec.Struct, frozen=True):
    """The last line: how many tasks there are, and the digest of all before it."""

    end: bool
    tasks: int
    sha256: str


class Known(NamedTuple):
    """What came of a task, as `found` was packed, and the line of the part that says so."""

    found: Any
    line: int
    derived: bool

    @property
    def result(self) -> Any:
        """The result, or an error."""
        return msgspec.msgpack.decode(self.found, type=Found) if isinstance(self.found, bytes) else self.found


class Part(NamedTuple):
    """A part as it was read."""

    path: str
    head: Head
    results: dict[Key, Known]


# --- writing ---------------------------------------------------------------------------------------------------------


def written(head: Head, lines: Iterable[Line]) -> Iterator[bytes]:
    """The file, piece by piece."""
    made, count = hashlib.sha256(), -1
    for count, line in enumerate((head, *lines)):  # noqa: B007 - the last one is needed
        raw = _line(line)
        made.update(raw)
        yield raw
    yield _line(End(True, count, made.hexdigest()))


def line(key: Key, name: str, size: int, result: Any, *, derived: bool = False) -> Line:
    """The line of a task and what came of it."""
    if not isinstance(result, StateError):
        return Line(*key, name, size, result, derived=derived)
    known = next(one.__name__ for one in type(result).__mro__ if one.__name__ in ERRORS)
    error = Error(known, str(result), getattr(result, "place", None))
    return Line(*key, name, size, error=error, derived=derived)


def _line(what: msgspec.Struct) -> bytes:
    return json.dumps(_plain(msgspec.to_builtins(what, enc_hook=_number)), allow_nan=False).encode() + b"\n"


def _number(one: Any) -> Any:
    """A number of numpy as Python's."""
    return one.item()


def _plain(one: Any) -> Any:
    """The same in what JSON has."""
    if isinstance(one, dict):
        return {key: _plain(value) for key, value in one.items()}
    if isinstance(one, (list, tuple)):
        return [_plain(value) for value in one]
    return {"float": str(one)} if isinstance(one, float) and not math.isfinite(one) else one


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: str) -> Part:
    """A part, line by line. Raises `UnreadableError`, with the file and the line, for whatever is no whole part."""
    results: dict[Key, Known] = {}
    made, last, number = hashlib.sha256(), b"", 0
    for number, raw in enumerate(_lines(path), 1):
        # The last line is known by nothing coming after it, and is no task's.
        made.update(last)
        if number == 1:
            head = _head(path, raw)
        elif number > 2:
            _add(results, path, number - 1, last)
        last = raw
    if not number:
        raise UnreadableError(f"{path}: is empty, and no part that --shard wrote")
    if number < 2 or not last.endswith(b"\n"):
        where = number + last.endswith(b"\n")
        raise UnreadableError(f"{path}: breaks off in line {where}: have its share done again")
    _refuse_end(path, number, last, len(results), made.hexdigest())
    _refuse_count(path, head, sum(not one.derived for one in results.values()))
    return Part(path, head, results)


def _refuse_end(path: str, number: int, raw: bytes, tasks: int, digest: str) -> None:
    """Raises for a last line that is none, or is that of other lines."""
    end = _as(End, raw, path, number, "breaks off before its last line: have its share done again")
    if end.end is not True or end.tasks != tasks:
        raise UnreadableError(f"{path}: has {tasks} tasks, and its last line says {end.tasks}")
    if digest != end.sha256:
        raise UnreadableError(f"{path}: is not what was written: its last line has the digest of other lines")


def _refuse_count(path: str, head: Head, own: int) -> None:
    """Raises for results that are missing, and for some of tasks that its share has not."""
    if own < head.own:
        why = f"lacks the results of {head.own - own} of its {head.own} tasks"
        raise UnreadableError(f"{path}: {why}: have its share done again")
    if own > head.own:
        why = f"has results of {own} tasks, and its share has {head.own}"
        raise UnreadableError(f"{path}: {why}: have its share done again")


def _add(results: dict[Key, Known], path: str, number: int, raw: bytes) -> None:
    key, known = _task(path, number, raw)
    if key in results:
        _refuse(path, number, "has a task that stands above already")
    results[key] = known


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a file, each with its end; the last one may have none."""
    rest, count = b"", 0
    for piece in _pieces(path):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
        count += len(whole)
        if len(rest) > LONGEST:
            _refuse(path, count + 1, "is longer than any line that --shard writes")
    if rest:
        yield rest


def _pieces(path: str) -> Iterator[bytes]:
    """The bytes of a file, or of what a pipe gives once."""
    try:
        if not files.is_remote(path) and os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            with open(path, "rb") as pipe:
                yield from iter(lambda: pipe.read(PIECE), b"")
            return
        file = files.open_file(path)
        try:
            for at in range(0, file.size, PIECE):
                yield file.read(at, min(PIECE, file.size - at))
        finally:
            file.close()
    except UnreadableError as why:
        raise UnreadableError(f"{path}: {why}") from why
    except OSError as why:
        raise UnreadableError(f"{path}: cannot be read: {why.strerror}") from why


def _head(path: str, raw: bytes) -> Head:
    found = _json(raw, path, 1, "line 1: is no part that --shard wrote")
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_FAMILY):
        raise UnreadableError(f"{path}: line 1: is no part that --shard wrote")
    if schema != SCHEMA:
        raise UnreadableError(f"{path}: line 1: is a {schema[:40]}, and this statecli reads {SCHEMA}")
    head: Head = _converted(Head, found, path, 1)
    index, count = head.shard
    if not 1 <= index <= count <= MAX_SHARDS:
        _refuse(path, 1, f"says that it is part {index} of {count}")
    return head


def _task(path: str, number: int, raw: bytes) -> tuple[Key, Known]:
    found = _as(Line, raw, path, number)
    if found.function not in RESULTS:
        _refuse(path, number, f"is of {found.function[:40]!r}, which does no task")
    key = Key(sys.intern(found.function), found.key)
    if found.error is not None:
        return key, Known(_error(found.error, path, number), number, found.derived)
    result = _converted(RESULTS[found.function], found.result, path, number)
    return key, Known(_packed(result), number, found.derived)


def _packed(result: Any) -> Any:
    """What most results are takes a kilobyte as Python has it, and a tenth of that in bytes."""
    try:
        return msgspec.msgpack.encode(result) if isinstance(result, Found) else result
    except OverflowError:  # an integer of 65 bits
        return result


def _error(found: Error, path: str, number: int) -> StateError:
    known = ERRORS.get(found.type)
    if known is None:
        _refuse(path, number, f"has an error of a kind that there is not, {found.type[:40]!r}")
    error = known(found.message)
    if isinstance(error, ChecksumMismatch):
        error.place = found.place
    return error


def _as(kind: Any, raw: bytes, path: str, number: int, otherwise: str | None = None) -> Any:
    return _converted(kind, _json(raw, path, number, otherwise), path, number, otherwise)


def _json(raw: bytes, path: str, number: int, otherwise: str | None = None) -> Any:
    try:
        return json.loads(raw, object_hook=_number_again, parse_int=_integer, parse_constant=_no_number)
    except (ValueError, RecursionError) as why:
        if otherwise is not None:
            raise UnreadableError(f"{path}: {otherwise}") from why
        _refuse(path, number, "is no JSON")


def _converted(kind: Any, found: Any, path: str, number: int, otherwise: str | None = None) -> Any:
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as why:
        if otherwise is not None:
            raise UnreadableError(f"{path}: {otherwise}") from why
        _refuse(path, number, f"is not what --shard writes there: {str(why)[:200]}")


def _refuse(path: str, number: int, why: str) -> NoReturn:
    raise UnreadableError(f"{path}: line {number}: {why}")


def _number_again(one: dict[str, Any]) -> Any:
    word = one.get("float") if len(one) == 1 else None
    return float(word) if word in ("nan", "inf", "-inf") else one


def _integer(word: str) -> int:
    if len(word) > DIGITS:
        raise ValueError(word)
    return int(word)


def _no_number(word: str) -> NoReturn:
    raise ValueError(word)
