"""File of one shard: a line about the command, a line per task, and a last line that shows that the file is complete.

    {"schema": "statecli.part/1", "command": "diff", "options": {"before": "a.pt", …}, "shard": [3, 8], …}
    {"function": "run_batch", "key": "5f1c…", "name": "fc.weight", "bytes": 4096, "result": {…}}
    {"end": true, "tasks": 1, "sha256": "…"}

Results are JSON without loss: a float has as many digits as needed, and NaN is `{"float": "nan"}`. A reader does not
trust any line: each is decoded as the expected type.
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
from statecli.core.model_state import Place
from statecli.shards.partition import MAX_SHARDS, ShardNumber
from statecli.shards.tasks import RESULT_TYPES, TaskKey
from statecli.storage import files
from statecli.values.compare_task import Comparison
from statecli.workers.file_identity import FileIdentity

SCHEMA = "statecli.part/1"
_SCHEMA_PREFIX = "statecli.part/"

#: Maximum number of digits of an integer; a longer integer is beyond float64.
MAX_DIGITS = 300

#: Maximum size of a line in bytes, and the number of bytes read at once.
MAX_LINE_BYTES, PIECE_BYTES = 64 << 20, 4 << 20

#: Error types of `core.errors` by name. An error type of another module is stored as its base class from this dict.
ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, StateError)}


class Head(msgspec.Struct, frozen=True):
    """First line of a shard file: the command and the number of the shard.

    Attributes:
        options: Options that affect the result.
        plan: Digest of each pass over the values.
        tasks: Number of tasks planned for all shards together.
        own: Number of tasks planned for this shard.
        files: Identity of each file that was read.
    """

    schema: str
    statecli: str
    kernel: str
    command: str
    options: dict[str, Any]
    shard: ShardNumber
    plan: tuple[str, ...]
    tasks: int
    own: int
    files: dict[str, FileIdentity]


class TaskLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Line of a task with its result or error. `name` (of the tensor) and `bytes` are only for human readers.

    `derived`: the task follows from results of other tasks.
    """

    function: str
    key: str
    name: str = ""
    bytes: int = 0
    result: Any = None
    error: Error | None = None
    derived: bool = False


class Error(msgspec.Struct, frozen=True, omit_defaults=True):
    """Error of a task."""

    type: str
    message: str
    place: Place | None = None
    difference: str = ""


class End(msgspec.Struct, frozen=True):
    """Last line of a shard file: the number of tasks, and a digest of all previous lines."""

    end: bool
    tasks: int
    sha256: str


class StoredResult(NamedTuple):
    """Result or error of a task, packed by `_pack_result`, and its line number in the shard file."""

    packed: Any
    line: int
    derived: bool

    @property
    def result(self) -> Any:
        """Result or error, unpacked."""
        return msgspec.msgpack.decode(self.packed, type=Comparison) if isinstance(self.packed, bytes) else self.packed


class ShardFile(NamedTuple):
    """Content of a shard file."""

    path: str
    head: Head
    results: dict[TaskKey, StoredResult]


# --- writing ---------------------------------------------------------------------------------------------------------


def encode_file(head: Head, lines: Iterable[TaskLine]) -> Iterator[bytes]:
    """Yield the bytes of a shard file, line by line."""
    digest, count = hashlib.sha256(), -1
    for count, line in enumerate((head, *lines)):  # noqa: B007 - the last one is needed
        raw = _encode_line(line)
        digest.update(raw)
        yield raw
    yield _encode_line(End(True, count, digest.hexdigest()))


def build_line(key: TaskKey, name: str, size: int, result: object, *, derived: bool = False) -> TaskLine:
    """Return the line of a task and its result or error."""
    if not isinstance(result, StateError):
        return TaskLine(*key, name, size, result, derived=derived)
    name_of_error = next(kind.__name__ for kind in type(result).__mro__ if kind.__name__ in ERRORS)
    details = (result.place, result.difference) if isinstance(result, ChecksumMismatch) else ()
    error = Error(name_of_error, str(result), *details)
    return TaskLine(*key, name, size, error=error, derived=derived)


def _encode_line(line: msgspec.Struct) -> bytes:
    builtins = msgspec.to_builtins(line, enc_hook=lambda number: number.item())  # for numpy numbers
    return json.dumps(_to_json(builtins), allow_nan=False).encode() + b"\n"


def _to_json(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


# --- reading ---------------------------------------------------------------------------------------------------------


def read_file(path: str) -> ShardFile:
    """Read a shard file line by line. Raises `UnreadableError` with file and line if the file is incomplete."""
    results: dict[TaskKey, StoredResult] = {}
    digest, last, number = hashlib.sha256(), b"", 0
    for number, raw in enumerate(_read_lines(path), 1):
        # Added one line late, because only the end of the file shows which line is the last, and it is not a task.
        digest.update(last)
        if number == 1:
            head = _decode_head(path, raw)
        elif number > 2:
            key, stored = _decode_task(path, number - 1, last)
            if key in results:
                _refuse(path, number - 1, "contains the same result as an earlier line; run its shard again")
            results[key] = stored
        last = raw
    if not number:
        raise UnreadableError(f"{path}: is empty, so it is not a file written by --shard")
    if number < 2 or not last.endswith(b"\n"):
        line_number = number + last.endswith(b"\n")
        raise UnreadableError(f"{path}: ends in the middle of line {line_number}; run its shard again")
    _check_end(path, number, last, len(results), digest.hexdigest())
    _check_count(path, head, sum(not stored.derived for stored in results.values()))
    return ShardFile(path, head, results)


def _check_end(path: str, number: int, raw: bytes, tasks: int, digest: str) -> None:
    """Raise UnreadableError unless the last line is complete and matches the lines before."""
    end = _decode(End, raw, path, number, "is incomplete: its closing line is missing; run its shard again")
    if end.end is not True or end.tasks != tasks:
        raise UnreadableError(
            f"{path}: has {tasks} results, but its last line records {end.tasks}; run its shard again"
        )
    if digest != end.sha256:
        change = "was changed after statecli wrote it: the digest in its last line does not match"
        raise UnreadableError(f"{path}: {change}; run its shard again")


def _check_count(path: str, head: Head, own_count: int) -> None:
    """Raise UnreadableError if the file has too few or too many results for the tasks of its shard."""
    problem = f"has {own_count} results, but its shard has {head.own} tasks"
    if own_count < head.own:
        problem = f"lacks {head.own - own_count} of its {head.own} results"
    if own_count != head.own:
        raise UnreadableError(f"{path}: {problem}; run its shard again")


def _read_lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends. The last line may have no line end."""
    remainder, count = b"", 0
    for piece in _read_pieces(path):
        *complete_lines, remainder = (remainder + piece).split(b"\n")
        yield from (line + b"\n" for line in complete_lines)
        count += len(complete_lines)
        if len(remainder) > MAX_LINE_BYTES:
            _refuse(path, count + 1, "is longer than any line that --shard writes")
    if remainder:
        yield remainder


def _read_pieces(path: str) -> Iterator[bytes]:
    """Yield the bytes of a file or a pipe in one pass."""
    try:
        if not files.is_remote(path) and os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            with open(path, "rb") as pipe:
                yield from iter(lambda: pipe.read(PIECE_BYTES), b"")
            return
        file = files.open_file(path)
        try:
            for offset in range(0, file.size, PIECE_BYTES):
                yield file.read(offset, min(PIECE_BYTES, file.size - offset))
        finally:
            file.close()
    except UnreadableError as error:
        raise UnreadableError(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from error


def _decode_head(path: str, raw: bytes) -> Head:
    document = _parse_json(raw, path, 1, "is not a file written by --shard")
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_SCHEMA_PREFIX):
        raise UnreadableError(f"{path}: is not a file written by --shard")
    if schema != SCHEMA:
        problem = f"has the format version {schema[:40]}, but this version of statecli reads only {SCHEMA}"
        raise UnreadableError(f"{path}: {problem}; use the statecli version that wrote the file")
    head: Head = _convert(Head, document, path, 1)
    index, count = head.shard
    if not 1 <= index <= count <= MAX_SHARDS:
        _refuse(path, 1, f"claims to be shard {index} of {count}, which is impossible")
    return head


def _decode_task(path: str, number: int, raw: bytes) -> tuple[TaskKey, StoredResult]:
    line = _decode(TaskLine, raw, path, number)
    if line.function not in RESULT_TYPES:
        problem = f"contains a result of {line.function[:40]!r}, which this version of statecli does not know"
        _refuse(path, number, f"{problem}; use the version that wrote the file")
    key = TaskKey(sys.intern(line.function), line.key)
    if line.error is not None:
        return key, StoredResult(_decode_error(line.error, path, number), number, line.derived)
    result = _convert(RESULT_TYPES[line.function], line.result, path, number)
    return key, StoredResult(_pack_result(result), number, line.derived)


def _pack_result(result: object) -> Any:
    """Encode a comparison result as bytes, which take a tenth of the memory. Return any other result unchanged."""
    try:
        return msgspec.msgpack.encode(result) if isinstance(result, Comparison) else result
    except OverflowError:  # the integer has 65 bits
        return result


def _decode_error(line: Error, path: str, number: int) -> StateError:
    kind = ERRORS.get(line.type)
    if kind is None:
        _refuse(path, number, f"has an error of unknown type {line.type[:40]!r}")
    if kind is ChecksumMismatch:
        return ChecksumMismatch(line.message, difference=line.difference, place=line.place)
    return kind(line.message)


def _decode(kind: object, raw: bytes, path: str, number: int, otherwise: str | None = None) -> Any:
    return _convert(kind, _parse_json(raw, path, number, otherwise), path, number, otherwise)


def _parse_json(raw: bytes, path: str, number: int, otherwise: str | None = None) -> Any:
    try:
        return json.loads(raw, object_hook=_restore_number, parse_int=_parse_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if otherwise is not None:
            raise UnreadableError(f"{path}: {otherwise}") from error
        _refuse(path, number, "is not valid JSON")


def _convert(kind: object, document: object, path: str, number: int, otherwise: str | None = None) -> Any:
    try:
        return msgspec.convert(document, kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        if otherwise is not None:
            raise UnreadableError(f"{path}: {otherwise}") from error
        _refuse(path, number, f"does not have the format that --shard writes: {str(error)[:200]}")


def _refuse(path: str, number: int, problem: str) -> NoReturn:
    raise UnreadableError(f"{path}: line {number} {problem}")


def _restore_number(entry: dict[str, Any]) -> Any:
    word = entry.get("float") if len(entry) == 1 else None
    return float(word) if word in ("nan", "inf", "-inf") else entry


def _parse_integer(word: str) -> int:
    if len(word) > MAX_DIGITS:
        raise ValueError(word)
    return int(word)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(word)
