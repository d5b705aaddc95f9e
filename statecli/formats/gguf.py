"""GGUF: the files of llama.cpp: metadata, a line a tensor, the tensors' bytes.

Format: docs/gguf.md of ggml, gguf.cpp of llama.cpp and the package gguf 0.19 (versions 2 and 3, either byte order).
Nothing but the header is read. Arrays of the metadata, the vocabulary among them, are skipped and told as what they
hold and a digest.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCKS, PACKED, PLAIN, QUANTIZED
from statecli.core.state import ByteRange, ModelState, Oddity, Packing, Place, Scalar, Settings, TensorData, TensorInfo
from statecli.storage.source import Source

NAME = "gguf"

#: Bytes of the metadata and the tensors' lines: ten times what the largest vocabulary takes.
MAX_HEADER = 200_000_000
#: Tensors and keys that one file may list, and the dimensions of one.
MAX_TENSORS = 1_000_000
MAX_KEYS = 100_000
MAX_DIMS = 31
#: Arrays of as many numbers are told one by one, and text of arrays of at most so many characters in all.
MAX_LISTED = 64
MAX_LISTED_TEXT = 300
#: Characters of a text that is told whole, as chat templates are.
MAX_TEXT = 64 << 10
#: Arrays inside one another.
MAX_DEPTH = 8

#: Number in the file -> what it is called, and how `struct` reads one.
SCALARS: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
TEXT, ARRAY = 8, 9


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Whether it begins with the four letters that each version and byte order begins with."""
    return head.startswith(b"GGUF")


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # the one it has
    """The header of one file as a `ModelState`: no device, no requires_grad, since the format records neither.

    Shapes are torch's: the file has the fastest dimension first. Quantized tensors have as many elements as values, and
    the bytes that these take. Raises UnreadableError and MalformedError, without the path, for a header that cannot be
    read. A tensor of a type that is not known, whose rows are no whole blocks, whose bytes are another's too or are not
    there, is damaged, and the others are read.
    """
    with Source(path) as source:
        header = _Header(source)
        tensors, keys = header.number("Q", "the number of its tensors"), header.number("Q", "the number of its keys")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise MalformedError(
                f"its header claims {tensors} tensors and {keys} keys, more than {MAX_TENSORS} and {MAX_KEYS}"
            )
        metadata, oddities = _metadata(header, keys)
        lines, twice = _lines(header, tensors)
        alignment = _alignment(metadata)
        start = -(-header.at // alignment) * alignment
        rows = {line.name: _row(line, path, start, header.is_big_endian) for line in lines}
        spans = sorted((one.offset, one.offset + rows[one.name].nbytes, one.name) for one in lines)
        for name, why in (twice | _misplaced(spans, start, source.size)).items():
            rows[name] = _spoilt(rows[name], path, why)
        oddities += _askew(spans, alignment)
        if not any(row.damage for row in rows.values()):
            oddities += _unowned(spans, source, start, alignment)
    return ModelState(
        path, NAME, tuple(rows.values()), metadata=Settings(metadata), oddities=(*oddities, *_part(metadata))
    )


# --- the header's bytes ----------------------------------------------------------------------------------------------


class _Header:
    """The bytes of a header, taken one thing after another: `at` is the next one's."""

    def __init__(self, source: Source) -> None:
        """Raises UnreadableError for a version that is not known."""
        self._source = source
        self._raw = b""
        self.at = 4
        # A version has a byte of 1 to 3 in front, or behind where the greatest comes first.
        self.order = ">" if source.head[4:6] == b"\0\0" else "<"
        self._structs = {code: struct.Struct(self.order + code) for code in "BbHhIifQqd?"}
        self._pair = struct.Struct(f"{self.order}IQ")
        _check_version(self.number("I", "its version"))

    @property
    def is_big_endian(self) -> bool:
        """Whether the first byte of a number is its greatest."""
        return self.order == ">"

    def pair(self, what: str) -> tuple[int, int]:
        """A uint32 and the uint64 behind it."""
        kind, offset = self._pair.unpack_from(self.reach(self.at + 12, what), self.at)
        self.at += 12
        return kind, offset

    def number(self, code: str, what: str) -> Any:
        """One number, as `struct` has that code."""
        one = self._structs[code]
        (found,) = one.unpack_from(self.reach(self.at + one.size, what), self.at)
        self.at += one.size
        return found

    def take(self, length: int, what: str) -> bytes:
        """So many bytes."""
        raw = self.reach(self.at + length, what)[self.at : self.at + length]
        self.at += length
        return raw

    def text(self, what: str) -> bytes:
        """What stands behind its own length."""
        return self.take(self.number("Q", what), what)

    def skip_texts(self, count: int, what: str) -> None:
        """So many texts: their lengths alone are looked at."""
        unpack, raw, at = self._structs["Q"].unpack_from, self._raw, self.at
        for _ in range(count):
            if at + 8 > len(raw):
                raw = self.reach(at + 8, what)
            at += 8 + unpack(raw, at)[0]
        self.reach(at, what)
        self.at = at

    def numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        """So many numbers."""
        one = self._structs[code]
        return tuple(found for (found,) in one.iter_unpack(self.take(count * one.size, what)))

    def size(self, code: str) -> int:
        """Bytes of one number."""
        return self._structs[code].size

    def reach(self, end: int, what: str) -> bytes:
        """The header at least up to byte `end`. Raises MalformedError where the file ends before, or it is too long."""
        if end <= len(self._raw):
            return self._raw
        if end > self._source.size:
            raise MalformedError(
                f"{what} ends at byte {end}, the file has {self._source.size}: truncated or damaged; "
                "copy or download it again"
            )
        if end > MAX_HEADER:
            raise MalformedError(f"{what} ends at byte {end}: no header has more than {MAX_HEADER} bytes")
        held = len(self._raw)
        more = max(end - held, min(max(held, 1 << 20), self._source.size - held))
        self._raw += self._source.read(held, more)
        return self._raw


def _check_version(version: int) -> None:
    if version == 1:
        raise UnreadableError(
            "is of GGUF version 1 (August 2023), which nothing reads any more: convert the model again with llama.cpp"
        )
    if version not in (2, 3):
        newer = "written by a newer llama.cpp" if 3 < version < 100 else "its header is damaged"
        raise UnreadableError(f"is of GGUF version {version}, and statecli reads 2 and 3: {newer}?")


# --- metadata --------------------------------------------------------------------------------------------------------


def _metadata(header: _Header, count: int) -> tuple[dict[str, Scalar], list[Oddity]]:
    found: dict[str, Scalar] = {}
    oddities: list[Oddity] = []
    for n in range(count):
        key = _decoded(header.text(f"metadata key {n + 1} of {count}"), f"metadata key {n + 1} of {count}")
        what = f"metadata {quoting.quoted(key)}"
        value = _value(header, header.number("I", what), what)
        if key in found:
            oddities.append(Oddity("metadata-set-twice", f"its metadata sets {quoting.quoted(key)} twice"))
        found[key] = value
    return found, oddities


def _value(header: _Header, kind: int, what: str) -> Scalar:
    if kind == ARRAY:
        return _array(header, what)
    if kind == TEXT:
        return _told(header.text(what).decode("utf-8", "backslashreplace"))
    return _scalar(header.number(_code(kind, what), what), kind)


def _told(text: str) -> str:
    """A text as it is, or the beginning of a very long one and a digest of it."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{len(text)} characters, {_digest(text.encode('utf-8', 'surrogatepass'))}: {text[: MAX_TEXT // 2]}..."


def _digest(raw: bytes) -> str:
    import hashlib  # OpenSSL below it takes longer to load than most checkpoints to list

    return f"sha256 {hashlib.sha256(raw).hexdigest()[:32]}"


def _code(kind: int, what: str) -> str:
    known = SCALARS.get(kind)
    if known is None:
        raise MalformedError(f"{what}: its type {kind} is unknown: written by a newer llama.cpp, or damaged")
    return known[1]


def _scalar(value: Any, kind: int) -> Scalar:
    """As it is told: what JSON has no number for as a text, a float32 with the digits that it has."""
    if type(value) is not float:
        return value if type(value) is not int or abs(value) < 2**63 else str(value)
    if not math.isfinite(value):
        return repr(value)
    return _short(value) if kind == 6 else value


def _short(value: float) -> float:
    """The float of fewest digits that is the same float32: 1e-05 and not 9.999999747378752e-06."""
    one = struct.Struct("f")
    shorter = (float(f"{value:.{digits}g}") for digits in (6, 7, 8))
    return next((found for found in shorter if abs(found) < 3e38 and one.unpack(one.pack(found))[0] == value), value)


def _array(header: _Header, what: str) -> Scalar:
    start = header.at
    kind, count = header.number("I", what), header.number("Q", what)
    if kind in SCALARS and count <= MAX_LISTED:
        numbers = header.numbers(SCALARS[kind][1], count, what)
        return json.dumps([_scalar(one, kind) for one in numbers])
    _skip(header, kind, count, what, 1)
    raw = header.reach(header.at, what)[start : header.at]
    if kind == TEXT and count <= MAX_LISTED and len(raw) <= MAX_LISTED_TEXT:
        listed = [text.decode("utf-8", "backslashreplace") for text in _texts(raw, header.order)]
        return json.dumps(listed, ensure_ascii=False)
    if header.is_big_endian:
        raw = _little(raw, kind, count)
    named = "text" if kind == TEXT else "arrays" if kind == ARRAY else SCALARS[kind][0]
    return f"array of {count:,} {named}, {_digest(raw)}"


def _skip(header: _Header, kind: int, count: int, what: str, depth: int) -> None:
    """Past the elements of an array."""
    if kind == TEXT:
        header.skip_texts(count, what)
    elif kind == ARRAY:
        if depth == MAX_DEPTH:
            raise MalformedError(f"{what}: arrays in arrays, more than {MAX_DEPTH} deep")
        for _ in range(count):
            _skip(header, header.number("I", what), header.number("Q", what), what, depth + 1)
    else:
        end = header.at + count * header.size(_code(kind, what))
        header.reach(end, what)
        header.at = end


def _texts(raw: bytes, order: str) -> Iterator[bytes]:
    """The texts of an array, behind its type and count."""
    at = 12
    while at < len(raw):
        (length,) = struct.unpack_from(f"{order}Q", raw, at)
        yield raw[at + 8 : at + 8 + length]
        at += 8 + length


def _little(raw: bytes, kind: int, count: int) -> bytes:
    """The bytes that an array of numbers or texts has in a little-endian file, so that its digest is the same."""
    head = struct.pack("<IQ", kind, count)
    if kind == TEXT:
        return head + b"".join(struct.pack("<Q", len(text)) + text for text in _texts(raw, ">"))
    if kind in SCALARS:
        form = f"{count}{SCALARS[kind][1]}"
        return head + struct.pack(f"<{form}", *struct.unpack(f">{form}", raw[12:]))
    return raw


def _decoded(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what}: its name is no UTF-8 near byte {error.start}") from error


def _alignment(metadata: Mapping[str, Scalar]) -> int:
    found = metadata.get("general.alignment", 32)
    if type(found) is not int or found < 1 or found & (found - 1):
        raise MalformedError(f"its general.alignment is {quoting.value(found)}, no power of two")
    return found


def _part(metadata: Mapping[str, Scalar]) -> list[Oddity]:
    count, number, total = (metadata.get(f"split.{key}") for key in ("count", "no", "tensors.count"))
    if type(count) is not int or type(number) is not int or count < 2:
        return []
    every = f", with {total:,} tensors in all" if type(total) is int else ""
    return [Oddity("one-part", f"part {number + 1} of {count}{every}: name the folder to read all parts as one")]


# --- tensors ---------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """What the header says of a tensor; its `offset` is from the first tensor's byte."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _lines(header: _Header, count: int) -> tuple[list[_Line], dict[str, str]]:
    """The lines, the first of each name; of the names that have more, what is said of them."""
    found: dict[str, _Line] = {}
    lines = Counter[str]()
    for n in range(count):
        what = f"the line of tensor {n + 1} of {count}"
        name = _decoded(header.text(what), what)
        line = _line(header, name)
        if found.setdefault(name, line) is not line:
            lines[name] += 1
    why = "its header lists it {} times, and readers disagree which one counts: convert the model again"
    return list(found.values()), {name: why.format(more + 1) for name, more in lines.items()}


def _line(header: _Header, name: str) -> _Line:
    """What follows a tensor's name."""
    what = f"{quoting.name(name)}: its line"
    dims = header.number("I", what)
    if dims > MAX_DIMS:
        raise MalformedError(f"{quoting.name(name)}: claims {dims} dimensions: ggml has 4 at most")
    shape = header.numbers("Q", dims, what)[::-1]
    if max(shape, default=0) >= 2**63 or prod(shape) >= 2**63:
        raise MalformedError(f"{quoting.name(name)}: shape {quoting.shape(shape)} is impossible: 2^63 elements or more")
    return _Line(name, shape, *header.pair(what))


def _row(line: _Line, path: str, start: int, is_big_endian: bool) -> TensorInfo:
    if line.kind in PLAIN:
        return _plain(line, ByteRange(path, start + line.offset, 0, big_endian=is_big_endian))
    name = QUANTIZED.get(line.kind)
    if name is None:
        return _damaged(line, path, f"type {line.kind}", f"type {line.kind} is unknown: written by a newer llama.cpp?")
    values, size = BLOCKS[name]
    if not line.shape or line.shape[-1] % values:
        rows = f"its rows are no whole blocks of {values} values"
        return _damaged(line, path, name, f"{name} {quoting.shape(line.shape)}: {rows}")
    elements = prod(line.shape)
    nbytes = elements // values * size
    note = f"{values} values in {size} bytes"
    data = None
    if is_big_endian:
        # How each type's blocks are turned round differs between the writers of such files.
        note += ", in big-endian order: not read"
    else:
        where = ByteRange(path, start + line.offset, elements * 4, packing=Packing(f"{PACKED}{name}", nbytes))
        data = TensorData(where, "float32", line.shape)
    return TensorInfo(line.name, name, line.shape, elements, nbytes, saved=True, note=note, data=data)


def _plain(line: _Line, where: ByteRange) -> TensorInfo:
    dtype, size = PLAIN[line.kind]
    elements = prod(line.shape)
    where = ByteRange(where.path, where.offset, elements * size, big_endian=where.big_endian and size > 1)
    data = TensorData(where, dtype, line.shape)
    return TensorInfo(line.name, dtype, line.shape, elements, elements * size, saved=True, data=data)


def _damaged(line: _Line, path: str, dtype: str, why: str) -> TensorInfo:
    return _spoilt(TensorInfo(line.name, dtype, line.shape, prod(line.shape), 0, saved=True), path, why)


#: Where a tensor begins and ends, in bytes from the first tensor's; its name.
_Span = tuple[int, int, str]


def _misplaced(spans: list[_Span], start: int, size: int) -> dict[str, str]:
    """What reaches beyond the file, and what overlaps among the rest, with what is said of it."""
    beyond = {
        name: f"ends at byte {start + stop}, the file has {size}: truncated, {start + stop - size} bytes are missing; "
        "copy or download it again"
        for begin, stop, name in spans
        if stop > begin and start + stop > size
    }
    found = dict(beyond)
    last: _Span = (0, 0, "")
    for one in spans:
        if one[0] == one[1] or one[2] in beyond:
            continue
        if one[0] < last[1]:
            # Which of the two is wrong is not said.
            found.setdefault(last[2], _overlap(last, one))
            found[one[2]] = _overlap(one, last)
        last = max(last, one, key=lambda span: span[1])
    return found


def _overlap(one: _Span, other: _Span) -> str:
    return f"its bytes {one[0]} to {one[1]} overlap {other[0]} to {other[1]} of {quoting.name(other[2])}"


def _spoilt(row: TensorInfo, path: str, why: str) -> TensorInfo:
    """The row as one that cannot be read, unless something else is wrong with it already."""
    if row.damage:
        return row
    damage = f"{path}: {quoting.name(row.fqn)}: {why}"
    return replace(row, nbytes=0, note=f"cannot be read: {why}", data=None, damage=damage)


def _askew(spans: list[_Span], alignment: int) -> Iterator[Oddity]:
    names = [name for begin, _, name in spans if begin % alignment]
    if names:
        message = f"begin at no multiple of {alignment}, so that llama.cpp refuses them: {quoting.names(names)}"
        yield Oddity("askew", message, names[0])


def _unowned(spans: list[_Span], source: Source, start: int, alignment: int) -> Iterator[Oddity]:
    """Bytes between the tensors, and behind them, that are more than padding."""
    ends = [(0, "the header"), *((stop, name) for _, stop, name in spans)]
    begins = [*(begin for begin, _, _ in spans), source.size - start]
    holes = [
        (quoting.name(name), Place(source.path, start + stop, begin - stop))
        for (stop, name), begin in zip(ends, begins, strict=True)
        if begin >= stop + alignment
    ]
    behind = holes.pop() if holes and holes[-1][1].offset + holes[-1][1].length == source.size else None
    if holes:
        (name, place), total = holes[0], sum(place.length for _, place in holes)
        where = f"in {len(holes)} places, the first behind {name}," if len(holes) > 1 else f"behind {name}"
        yield Oddity("gap", f"{total} bytes {where} belong to no tensor", place=place)
    if behind:
        yield Oddity("suffixed", f"{behind[1].length} bytes follow the last tensor, {behind[0]}", place=behind[1])
