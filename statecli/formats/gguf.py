"""GGUF, the file format of llama.cpp: a header with metadata and tensor entries, then the tensors' bytes.

Format: docs/gguf.md of ggml, gguf.cpp of llama.cpp and the package gguf 0.19 (versions 2 and 3, either byte order).
Only the header is read. Arrays of the metadata, for example the vocabulary, are skipped and shown as a count and a
digest.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.ggml_types import BLOCK_SIZES, PACKING_PREFIX, QUANTIZED_TYPES, TORCH_TYPES
from statecli.core.model_state import (
    ByteRange,
    ChatTemplate,
    ModelState,
    Oddity,
    Packing,
    Place,
    Scalar,
    Settings,
    TensorData,
    TensorInfo,
)
from statecli.core.oddity_kind import OddityKind
from statecli.storage.byte_source import ByteSource

NAME = "gguf"
TRAITS = FormatTraits(
    mixed_dtypes="each tensor of a GGUF file has its own dtype, and the loading program chooses the compute dtype",
    settings_vocabulary=NAME,
)

#: Maximum size of the metadata and the tensors' entries, in bytes: ten times the size for the largest known vocabulary.
MAX_HEADER_BYTES = 200_000_000
#: Maximum number of tensors and of keys in a file, and of dimensions of a tensor.
MAX_TENSORS = 1_000_000
MAX_KEYS = 100_000
MAX_DIMS = 31
#: Limits for listing an array element by element: its number of elements, and for texts also its encoded size in bytes.
MAX_LISTED = 64
MAX_LISTED_TEXT_BYTES = 300
#: Maximum length of a text that is reported whole, in characters, because chat templates are long.
MAX_TEXT_CHARS = 64 << 10
#: Text in the metadata keys of chat templates.
_CHAT_TEMPLATE = "chat_template"
#: Maximum depth of nested arrays.
MAX_DEPTH = 8

#: Type number in the file -> name of the type, and its format for `struct`.
SCALARS: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "B"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
_BOOL, TEXT, ARRAY = 7, 8, 9


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the file begins with the magic of GGUF, in either byte order."""
    return head.startswith(b"GGUF")


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # a file has one section
    """Read the header of one file. The format records neither devices nor requires_grad.

    Shapes are in torch's order: the file has the fastest dimension first. A quantized tensor has as many elements as
    values; `nbytes` is its size in the file. A tensor of unknown type, with incomplete blocks, or with shared or
    missing bytes is damaged, and the rest is read. Raises UnreadableError and MalformedError, without the path, for an
    unreadable header.
    """
    with ByteSource(path) as source:
        header = _Header(source)
        tensors, keys = _read_counts(header)
        oddities: list[Oddity] = []
        templates: list[ChatTemplate] = []
        settings = _read_metadata(header, keys, oddities, templates)
        metadata = settings.values
        entries = _read_lines(header, tensors)
        alignment = _read_alignment(metadata)
        start = _pad(header.at, alignment)
        sized_entries = [(line, _build_row(line, path, start, header.is_big_endian)) for line in entries]
        lines, twice = _drop_repeats(entries)
        rows: dict[str, TensorInfo] = {}
        for _, row in sized_entries:
            rows.setdefault(row.fqn, row)
        spans = sorted((line.offset, line.offset + rows[line.name].nbytes, line.name) for line in lines)
        damaged_entries = _find_damaged_entries(sized_entries, source.size - start, alignment)
        for name, why in (twice | _find_misplaced(spans, start, source.size) | damaged_entries).items():
            rows[name] = _mark_unreadable(rows[name], path, why)
        oddities += _find_misaligned(spans, alignment)
        if not any(row.damage for row in rows.values()):
            oddities += _find_gaps(spans, source, start, alignment)
    return ModelState(
        path,
        NAME,
        tuple(rows.values()),
        metadata=settings,
        oddities=(*oddities, *_note_part(metadata)),
        traits=TRAITS,
        chat_templates=tuple(templates),
    )


def _read_counts(header: _Header) -> tuple[int, int]:
    """Read the numbers of tensors and of metadata keys."""
    tensors = header.read_number("Q", "the number of tensors")
    keys = header.read_number("Q", "the number of metadata keys")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise MalformedError(
            f"the header claims {tensors} tensors and {keys} metadata keys, but statecli's limits are "
            f"{MAX_TENSORS} and {MAX_KEYS}"
        )
    return tensors, keys


# --- the header's bytes ----------------------------------------------------------------------------------------------


class _Header:
    """Reader of a header's bytes, in order. `at` is the position of the next byte."""

    def __init__(self, source: ByteSource) -> None:
        """Read the version. Raises UnreadableError for an unknown version."""
        self._source = source
        self._raw = b""
        self.at = 4
        # Bytes 4 to 7 are the version, 2 or 3: if the first two are 0, the most significant byte comes first.
        self.order = ">" if source.head[4:6] == b"\0\0" else "<"
        self._structs = {code: struct.Struct(self.order + code) for code in "BbHhIifQqd?"}
        self._pair = struct.Struct(f"{self.order}IQ")
        _check_version(self.read_number("I", "the version number"))

    @property
    def is_big_endian(self) -> bool:
        """Whether numbers begin with their most significant byte."""
        return self.order == ">"

    def read_pair(self, label: str) -> tuple[int, int]:
        """Read a uint32 and the following uint64."""
        kind, offset = self._pair.unpack_from(self.check_reach(self.at + 12, label), self.at)
        self.at += 12
        return kind, offset

    def read_number(self, code: str, label: str) -> Any:
        """Read one number with this `struct` code."""
        layout = self._structs[code]
        (value,) = layout.unpack_from(self.check_reach(self.at + layout.size, label), self.at)
        self.at += layout.size
        return value

    def read_bytes(self, length: int, label: str) -> bytes:
        raw = self.check_reach(self.at + length, label)[self.at : self.at + length]
        self.at += length
        return raw

    def read_text(self, label: str) -> bytes:
        """Read a text with its length prefix."""
        return self.read_bytes(self.read_number("Q", label), label)

    def skip_texts(self, count: int, label: str) -> None:
        """Skip `count` texts: read only their lengths."""
        unpack, raw, at = self._structs["Q"].unpack_from, self._raw, self.at
        for _ in range(count):
            if at + 8 > len(raw):
                raw = self.check_reach(at + 8, label)
            at += 8 + unpack(raw, at)[0]
        self.check_reach(at, label)
        self.at = at

    def read_numbers(self, code: str, count: int, label: str) -> tuple[Any, ...]:
        layout = self._structs[code]
        return tuple(value for (value,) in layout.iter_unpack(self.read_bytes(count * layout.size, label)))

    def check_reach(self, end: int, label: str) -> bytes:
        """Return at least the first `end` bytes of the header. Raises MalformedError if the file is shorter."""
        if end <= len(self._raw):
            return self._raw
        if end > self._source.size:
            raise MalformedError(
                f"{label} ends at byte {end}, but the file has {self._source.size} bytes: truncated or damaged; "
                "copy or download the file again"
            )
        if end > MAX_HEADER_BYTES:
            raise MalformedError(
                f"{label} ends at byte {end}, beyond statecli's limit of {MAX_HEADER_BYTES} bytes for a header"
            )
        count = len(self._raw)
        length = max(end - count, min(max(count, 1 << 20), self._source.size - count))
        self._raw += self._source.read(count, length)
        return self._raw


def _check_version(version: int) -> None:
    if version == 1:
        raise UnreadableError(
            "has GGUF version 1 (August 2023), which current tools do not read: convert the model again with llama.cpp"
        )
    if version not in (2, 3):
        newer = "a newer llama.cpp may have written the file" if 3 < version < 100 else "the header may be damaged"
        raise UnreadableError(f"has GGUF version {version}, but statecli reads only 2 and 3; {newer}")


# --- metadata --------------------------------------------------------------------------------------------------------


class _Value(msgspec.Struct, frozen=True):
    """Metadata value and the name of its type, because values of two types may look the same in JSON."""

    scalar: Scalar
    type: str


def _read_metadata(header: _Header, count: int, oddities: list[Oddity], templates: list[ChatTemplate]) -> Settings:
    """Read the metadata entries. Add the whole text of each chat template to `templates`."""
    values: dict[str, _Value] = {}
    for n in range(count):
        position = f"metadata key {n + 1} of {count}"
        key = _decode_text(header.read_text(position), position)
        label = f"metadata {quoting.quote(key)}"
        kind = header.read_number("I", label)
        if kind == TEXT:
            raw = header.read_text(label)
            text = raw.decode("utf-8", "backslashreplace")
            value = _Value(_describe_text(text), _name_text_type([raw]))
            if _CHAT_TEMPLATE in key:
                templates.append(ChatTemplate(key, text))
        else:
            value = _read_value(header, kind, label)
        if key in values:
            message = f"the metadata sets {quoting.quote(key)} twice; statecli shows the last value"
            oddities.append(Oddity("metadata-set-twice", message))
        values[key] = value
    scalars = {key: value.scalar for key, value in values.items()}
    return Settings(scalars, kinds={key: value.type for key, value in values.items()})


def _read_value(header: _Header, kind: int, label: str) -> _Value:
    if kind == ARRAY:
        return _read_array(header, label)
    value = header.read_number(_get_struct_code(kind, label), label)
    return _Value(_convert_scalar(value, kind), SCALARS[kind][0])


def _name_text_type(texts: Sequence[bytes]) -> str:
    """Name the type of texts. For invalid UTF-8, add a digest, because the escaped text does not identify the bytes."""
    try:
        for raw in texts:
            raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"text that is not UTF-8, {_hash_bytes(b''.join(struct.pack('<Q', len(raw)) + raw for raw in texts))}"
    return "text"


def _describe_text(text: str) -> str:
    """Return the text, or the beginning and a digest of a very long text."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return (
        f"{len(text)} characters, {_hash_bytes(text.encode('utf-8', 'surrogatepass'))}: "
        f"{text[: MAX_TEXT_CHARS // 2]}..."
    )


def _hash_bytes(raw: bytes) -> str:
    import hashlib  # a slow import, because loading OpenSSL takes longer than listing most checkpoints

    return f"sha256 {hashlib.sha256(raw).hexdigest()[:32]}"


def _get_struct_code(kind: int, label: str) -> str:
    scalar_type = SCALARS.get(kind)
    if scalar_type is None:
        raise MalformedError(f"{label} has unknown type {kind}: the file is damaged, or a newer llama.cpp wrote it")
    return scalar_type[1]


def _convert_scalar(value: Any, kind: int) -> Scalar:
    """Convert a value for JSON. A number that JSON cannot hold becomes text. A float32 gets its shortest digits."""
    if kind == _BOOL:
        return bool(value) if value < 2 else f"true (byte {value})"
    if type(value) is not float:
        return value if type(value) is not int or abs(value) < 2**63 else str(value)
    if not math.isfinite(value):
        return repr(value)
    return _round_float(value) if kind == 6 else value


def _round_float(value: float) -> float:
    """Return the float with the fewest digits that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    float32 = struct.Struct("f")
    shorter = (float(f"{value:.{digits}g}") for digits in (6, 7, 8))
    return next(
        (number for number in shorter if abs(number) < 3e38 and float32.unpack(float32.pack(number))[0] == value), value
    )


def _read_array(header: _Header, label: str) -> _Value:
    start = header.at
    kind, count = header.read_number("I", label), header.read_number("Q", label)
    if kind in SCALARS and count <= MAX_LISTED:
        numbers = header.read_numbers(SCALARS[kind][1], count, label)
        listing = json.dumps([_convert_scalar(number, kind) for number in numbers])
        return _Value(listing, f"array of {SCALARS[kind][0]}")
    _skip(header, kind, count, label, 1)
    raw = header.check_reach(header.at, label)[start : header.at]
    if kind == TEXT and count <= MAX_LISTED and len(raw) <= MAX_LISTED_TEXT_BYTES:
        texts = list(_decode_texts(raw, header.order))
        decoded_texts = [text.decode("utf-8", "backslashreplace") for text in texts]
        return _Value(json.dumps(decoded_texts, ensure_ascii=False), f"array of {_name_text_type(texts)}")
    if header.is_big_endian:
        raw = _convert_to_little_endian(raw, kind, count)
    element_name = "text" if kind == TEXT else "arrays" if kind == ARRAY else SCALARS[kind][0]
    return _Value(f"array of {count:,} {element_name}, {_hash_bytes(raw)}", f"array of {element_name}")


def _skip(header: _Header, kind: int, count: int, label: str, depth: int) -> None:
    if kind == TEXT:
        header.skip_texts(count, label)
    elif kind == ARRAY:
        if depth == MAX_DEPTH:
            raise MalformedError(f"{label} nests arrays more than {MAX_DEPTH} levels deep, the limit of statecli")
        for _ in range(count):
            _skip(header, header.read_number("I", label), header.read_number("Q", label), label, depth + 1)
    else:
        end = header.at + count * struct.calcsize(f"={_get_struct_code(kind, label)}")
        header.check_reach(end, label)
        header.at = end


def _decode_texts(raw: bytes, order: str) -> Iterator[bytes]:
    """Yield the texts in the encoded array `raw`, which begins with its type and count (12 bytes)."""
    at = 12
    while at < len(raw):
        (length,) = struct.unpack_from(f"{order}Q", raw, at)
        yield raw[at + 8 : at + 8 + length]
        at += 8 + length


def _convert_to_little_endian(raw: bytes, kind: int, count: int) -> bytes:
    """Swap an array's bytes to little-endian, so that the digest does not depend on the byte order."""
    head = struct.pack("<IQ", kind, count)
    if kind == TEXT:
        return head + b"".join(struct.pack("<Q", len(text)) + text for text in _decode_texts(raw, ">"))
    if kind in SCALARS:
        form = f"{count}{SCALARS[kind][1]}"
        return head + struct.pack(f"<{form}", *struct.unpack(f">{form}", raw[12:]))
    return raw


def _decode_text(raw: bytes, label: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"{label}: the name is not valid UTF-8 near byte {error.start}") from error


def _read_alignment(metadata: Mapping[str, Scalar]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise MalformedError(
            f"the metadata key general.alignment is {quoting.value(alignment)}, but must be a power of two"
        )
    return alignment


def _note_part(metadata: Mapping[str, Scalar]) -> list[Oddity]:
    count, number, total = (metadata.get(f"split.{key}") for key in ("count", "no", "tensors.count"))
    if type(count) is not int or type(number) is not int or count < 2:
        return []
    total_text = f" (the shards have {total:,} tensors in total)" if type(total) is int else ""
    message = f"this file is shard {number + 1} of {count}{total_text}; give the folder to read all shards as one model"
    return [Oddity(OddityKind.ONE_PART.value, message)]


# --- tensors ---------------------------------------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    """Header entry of a tensor. `offset` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_lines(header: _Header, count: int) -> list[_Line]:
    lines = []
    for n in range(count):
        label = f"entry {n + 1} of {count} in the list of tensors"
        lines.append(_read_line(header, _decode_text(header.read_text(label), label)))
    return lines


def _drop_repeats(entries: Sequence[_Line]) -> tuple[list[_Line], dict[str, str]]:
    """Return the first entry of each name, and an error message for each name that has several entries."""
    counts = Counter(line.name for line in entries)
    first_lines = {line.name: line for line in reversed(entries)}
    message = (
        "the header lists this tensor {} times; different programs may read different entries: convert the model again"
    )
    repeats = {name: message.format(count) for name, count in counts.items() if count > 1}
    return [first_lines[name] for name in counts], repeats


def _read_line(header: _Header, name: str) -> _Line:
    """Read the rest of a tensor's entry after its name."""
    label = f"the header entry of {quoting.name(name)}"
    dims = header.read_number("I", label)
    if dims > MAX_DIMS:
        raise MalformedError(f"{quoting.name(name)}: claims {dims} dimensions, but ggml has at most 4")
    shape = header.read_numbers("Q", dims, label)[::-1]
    if max(shape, default=0) >= 2**63 or prod(shape) >= 2**63:
        raise MalformedError(f"{quoting.name(name)}: shape {quoting.shape(shape)} is impossible: 2^63 elements or more")
    return _Line(name, shape, *header.read_pair(label))


def _build_row(line: _Line, path: str, start: int, is_big_endian: bool) -> TensorInfo:
    elements = prod(line.shape)
    data: TensorData | None = None
    if line.kind in TORCH_TYPES:
        dtype, size = TORCH_TYPES[line.kind]
        storage = ByteRange(path, start + line.offset, elements * size, big_endian=is_big_endian and size > 1)
        data = TensorData(storage, dtype, line.shape)
        return TensorInfo(line.name, dtype, line.shape, elements, elements * size, saved=True, data=data)
    name = QUANTIZED_TYPES.get(line.kind)
    if name is None:
        return _build_damaged_row(
            line, path, f"type {line.kind}", f"type {line.kind} is unknown; a newer llama.cpp may have written the file"
        )
    values, size = BLOCK_SIZES[name]
    if not line.shape or line.shape[-1] % values:
        rows = f"its last dimension must be a multiple of {values}"
        return _build_damaged_row(line, path, name, f"{name} {quoting.shape(line.shape)}: {rows}")
    nbytes = elements // values * size
    note = f"{values} values in {size} bytes"
    if is_big_endian:
        # Byte order within a block is unknown: it differs between the programs that write such files.
        note += ", big-endian: statecli does not read the values"
    else:
        storage = ByteRange(path, start + line.offset, elements * 4, packing=Packing(f"{PACKING_PREFIX}{name}", nbytes))
        data = TensorData(storage, "float32", line.shape)
    return TensorInfo(line.name, name, line.shape, elements, nbytes, saved=True, note=note, data=data)


def _build_damaged_row(line: _Line, path: str, dtype: str, why: str) -> TensorInfo:
    return _mark_unreadable(TensorInfo(line.name, dtype, line.shape, prod(line.shape), 0, saved=True), path, why)


#: Begin and end of a tensor, in bytes from the first tensor's first byte, and the tensor's name.
_Span = tuple[int, int, str]


def _find_damaged_entries(
    entries: Sequence[tuple[_Line, TensorInfo]], data_bytes: int, alignment: int
) -> dict[str, str]:
    """Return a message for each unreadable or truncated tensor whose entry contradicts a neighbouring entry.

    A tensor begins where the tensor before ends, with or without padding. If the last entry contradicts the entry
    before, the list may have lost or gained a byte. The place of the first tensor is then unknown, and no tensor can be
    read. `entries`: all entries of the list, even entries with a repeated name.
    """
    reasons: dict[str, str] = {}
    end_before: int | None = 0
    for n, (line, row) in enumerate(entries):
        end = None if row.damage else line.offset + row.nbytes
        is_outside = end is None or end > data_bytes
        if end_before is not None and not _follows(line.offset, end_before, alignment):
            reason = _describe_damaged_list(line, f"begins at byte {line.offset}", _pad(end_before, alignment))
        elif end is not None and n + 1 < len(entries) and not _follows(entries[n + 1][0].offset, end, alignment):
            reason = _describe_damaged_list(line, f"ends at byte {end}", entries[n + 1][0].offset)
        else:
            reason = None
        if n + 1 == len(entries):
            if reason is not None and (is_outside or line.offset < (end_before or 0)):
                return {other.name: reason for other, _ in entries}
        elif is_outside and reason is not None:
            reasons[line.name] = reason
            end = None
        end_before = end
    return reasons


def _pad(end: int, alignment: int) -> int:
    return -(-end // alignment) * alignment


def _follows(begin: int, end: int, alignment: int) -> bool:
    """Return whether a tensor at `begin` can follow a tensor that ends at `end`. Some writers omit the padding."""
    return begin in (end, _pad(end, alignment))


def _describe_damaged_list(line: _Line, position: str, expected: int) -> str:
    return (
        f"the list of tensors is damaged: {quoting.name(line.name)} {position} of the data, not {expected}; copy or "
        "download the file again"
    )


def _find_misplaced(spans: list[_Span], start: int, size: int) -> dict[str, str]:
    """Return messages for tensors beyond the end of the file and for overlapping tensors."""
    beyond = {
        name: (
            f"ends at byte {start + stop}, but the file has {size} bytes: truncated, {start + stop - size} "
            "bytes are missing; copy or download the file again"
        )
        for begin, stop, name in spans
        if stop > begin and start + stop > size
    }
    problems = dict(beyond)
    last: _Span = (0, 0, "")
    for span in spans:
        if span[0] == span[1] or span[2] in beyond:
            continue
        if span[0] < last[1]:
            # Report the overlap for both tensors, because the header does not show which of them is wrong.
            problems.setdefault(last[2], _describe_overlap(last, span))
            problems[span[2]] = _describe_overlap(span, last)
        last = max(last, span, key=lambda span: span[1])
    return problems


def _describe_overlap(span: _Span, other: _Span) -> str:
    return f"its bytes {span[0]} to {span[1]} overlap bytes {other[0]} to {other[1]} of {quoting.name(other[2])}"


def _mark_unreadable(row: TensorInfo, path: str, why: str) -> TensorInfo:
    damage = f"{path}: {quoting.name(row.fqn)}: {why}"
    return replace(row, nbytes=0, note=f"cannot be read: {why}", data=None, damage=damage)


def _find_misaligned(spans: list[_Span], alignment: int) -> Iterator[Oddity]:
    names = [name for begin, _, name in spans if begin % alignment]
    if names:
        message = (
            f"these tensors do not start at a multiple of {alignment} bytes, so llama.cpp refuses them: "
            f"{quoting.names(names)}"
        )
        yield Oddity("askew", message, names[0])


def _find_gaps(spans: list[_Span], source: ByteSource, start: int, alignment: int) -> Iterator[Oddity]:
    """Yield oddities for unused bytes between and after the tensors, if they are longer than padding."""
    ends = [(0, "the header"), *((stop, name) for _, stop, name in spans)]
    begins = [*(begin for begin, _, _ in spans), source.size - start]
    holes = [
        (quoting.name(name), Place(source.path, start + stop, begin - stop))
        for (stop, name), begin in zip(ends, begins, strict=True)
        if begin >= stop + alignment
    ]
    trailing_hole = holes.pop() if holes and holes[-1][1].offset + holes[-1][1].length == source.size else None
    if holes:
        (name, place), total = holes[0], sum(place.length for _, place in holes)
        position = f"in {len(holes)} places, the first after {name}," if len(holes) > 1 else f"after {name}"
        yield Oddity(OddityKind.GAP.value, f"{total} bytes {position} belong to no tensor", place=place)
    if trailing_hole:
        yield Oddity(
            OddityKind.SUFFIXED.value,
            f"{trailing_hole[1].length} bytes follow the last tensor, {trailing_hole[0]}",
            place=trailing_hole[1],
        )
