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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec

from statecli import errors, files
from statecli.errors import ChecksumMismatch, StateError, UnreadableError
from statecli.sharing.share import MOST
from statecli.sharing.tasks import RESULTS, Identity, Key
from statecli.state import Place
from statecli.values.run import Found

SCHEMA = "statecli.part/1"
_FAMILY = "statecli.part/"

#: Of an integer, at most: what is more is beyond float64 too.
DIGITS = 300

#: Errors of ours by their names; those of one module alone are what they are derived from.
ERRORS = {name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, StateError)}


class Head(msgspec.Struct, frozen=True):
    """What a part is of. `options` are those that decide the result; `plan` has a digest a pass over the values."""

    schema: str
    statecli: str
    kernel: str
    command: str
    options: dict[str, Any]
    shard: tuple[int, int]
    plan: tuple[str, ...]
    files: dict[str, Identity]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task: `name` of the tensor and `bytes` are for people. It has a result, or an error."""

    function: str
    key: str
    name: str = ""
    bytes: int = 0
    result: Any = None
    error: Error | None = None


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


class Part(NamedTuple):
    """A part as it was read."""

    path: str
    head: Head
    results: dict[Key, Any]


# --- writing ---------------------------------------------------------------------------------------------------------


def written(head: Head, lines: Iterable[Line]) -> Iterator[bytes]:
    """The file, piece by piece."""
    made, count = hashlib.sha256(), -1
    for count, line in enumerate((head, *lines)):  # noqa: B007 - the last one is needed
        raw = _line(line)
        made.update(raw)
        yield raw
    yield _line(End(True, count, made.hexdigest()))


def line(key: Key, name: str, size: int, result: Any) -> Line:
    """The line of a task and what came of it."""
    if not isinstance(result, StateError):
        return Line(*key, name, size, result)
    known = next(one.__name__ for one in type(result).__mro__ if one.__name__ in ERRORS)
    return Line(*key, name, size, error=Error(known, str(result), getattr(result, "place", None)))


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
    """A part. Raises `UnreadableError`, with the file and the line, for whatever is no whole part."""
    raw = _bytes(path)
    if not raw:
        raise UnreadableError(f"{path}: is empty, and no part that --shard wrote")
    lines = raw.split(b"\n")
    head = _head(path, lines[0])
    if len(lines) < 3 or lines[-1]:
        raise UnreadableError(f"{path}: breaks off in line {len(lines)}: have its share done again")
    end = _as(End, lines[-2], path, len(lines) - 1, "breaks off before its last line: have its share done again")
    if end.end is not True or end.tasks != len(lines) - 3:
        raise UnreadableError(f"{path}: has {len(lines) - 3} tasks, and its last line says {end.tasks}")
    if hashlib.sha256(raw[: len(raw) - len(lines[-2]) - 1]).hexdigest() != end.sha256:
        raise UnreadableError(f"{path}: is not what was written: its last line has the digest of other lines")
    results: dict[Key, Any] = {}
    for number, one in enumerate(lines[1:-2], 2):
        key, result = _task(path, number, one)
        if key in results:
            raise UnreadableError(f"{path}: line {number}: has a task that stands above already")
        results[key] = result
    return Part(path, head, results)


def _bytes(path: str) -> bytes:
    try:
        file = files.opened(path)
        try:
            return file.read(0, file.size)
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
    if not 1 <= index <= count <= MOST:
        _refuse(path, 1, f"says that it is part {index} of {count}")
    return head


def _task(path: str, number: int, raw: bytes) -> tuple[Key, Any]:
    found = _as(Line, raw, path, number)
    if found.function not in RESULTS:
        _refuse(path, number, f"is of {found.function[:40]!r}, which does no task")
    key = Key(found.function, found.key)
    if found.error is not None:
        return key, _error(found.error, path, number)
    result = _converted(RESULTS[found.function], found.result, path, number)
    if isinstance(result, Found) and not _is_sound(result):
        _refuse(path, number, "has a result that no task has")
    return key, result


def _is_sound(found: Found) -> bool:
    """Whether sums and counts are what can be added up and told."""
    tally = found.tally
    counts = (tally.changed, tally.finite, tally.nan_before, tally.nan_after, tally.inf_before, tally.inf_after)
    squares = (tally.sum_abs, tally.squares, tally.before, tally.after)
    return (
        min(*counts, tally.left_out, tally.lost, tally.first or 0) >= 0
        and not any(one.mantissa < 0 for one in squares)
        and all(abs(one.exponent) < 1 << 20 for one in (*squares, tally.product))
    )


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
