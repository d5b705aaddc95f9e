"""Header of a GGUF file: the bytes in order, and the values of the metadata keys."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import ChatTemplate, Oddity, Scalar, Settings
from statecli.storage.byte_source import ByteSource

#: Maximum size of the metadata and the tensors' entries, in bytes: ten times the size for the largest known vocabulary.
MAX_HEADER_BYTES = 200_000_000
#: Limits for listing an array element by element: its number of elements, and for texts also its encoded size in bytes.
MAX_LISTED = 64
MAX_LISTED_TEXT_BYTES = 300
#: Maximum length of a text that is reported whole, in characters, because chat templates are long.
MAX_TEXT_CHARS = 64 << 10
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
_BOOL, _TEXT, ARRAY = 7, 8, 9
#: Text in the metadata keys of chat templates.
_CHAT_TEMPLATE = "chat_template"


class Header:
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


class MetadataValue(msgspec.Struct, frozen=True):
    """Metadata value and the name of its type, because values of two types may look the same in JSON."""

    scalar: Scalar
    type: str


def read_metadata(header: Header, count: int, oddities: list[Oddity], templates: list[ChatTemplate]) -> Settings:
    """Read the metadata entries. Add keys that are set twice to `oddities`, and chat templates to `templates`."""
    values: dict[str, MetadataValue] = {}
    for n in range(count):
        position = f"metadata key {n + 1} of {count}"
        key = decode_text(header.read_text(position), position)
        label = f"metadata {quoting.quote(key)}"
        kind = header.read_number("I", label)
        if kind == _TEXT:
            raw = header.read_text(label)
            text = raw.decode("utf-8", "backslashreplace")
            value = MetadataValue(_describe_text(text), _name_text_type([raw]))
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


def _read_value(header: Header, kind: int, label: str) -> MetadataValue:
    if kind == ARRAY:
        return _read_array(header, label)
    value = header.read_number(_get_struct_code(kind, label), label)
    return MetadataValue(_convert_scalar(value, kind), SCALARS[kind][0])


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


def _read_array(header: Header, label: str) -> MetadataValue:
    start = header.at
    kind, count = header.read_number("I", label), header.read_number("Q", label)
    if kind in SCALARS and count <= MAX_LISTED:
        numbers = header.read_numbers(SCALARS[kind][1], count, label)
        listing = json.dumps([_convert_scalar(number, kind) for number in numbers])
        return MetadataValue(listing, f"array of {SCALARS[kind][0]}")
    _skip(header, kind, count, label, 1)
    raw = header.check_reach(header.at, label)[start : header.at]
    if kind == _TEXT and count <= MAX_LISTED and len(raw) <= MAX_LISTED_TEXT_BYTES:
        texts = list(_decode_texts(raw, header.order))
        decoded_texts = [text.decode("utf-8", "backslashreplace") for text in texts]
        return MetadataValue(json.dumps(decoded_texts, ensure_ascii=False), f"array of {_name_text_type(texts)}")
    if header.is_big_endian:
        raw = _convert_to_little_endian(raw, kind, count)
    element_name = "text" if kind == _TEXT else "arrays" if kind == ARRAY else SCALARS[kind][0]
    return MetadataValue(f"array of {count:,} {element_name}, {_hash_bytes(raw)}", f"array of {element_name}")


def _skip(header: Header, kind: int, count: int, label: str, depth: int) -> None:
    if kind == _TEXT:
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
    if kind == _TEXT:
        return head + b"".join(struct.pack("<Q", len(text)) + text for text in _decode_texts(raw, ">"))
    if kind in SCALARS:
        form = f"{count}{SCALARS[kind][1]}"
        return head + struct.pack(f"<{form}", *struct.unpack(f">{form}", raw[12:]))
    return raw


def decode_text(raw: bytes, label: str) -> str:
    """Decode a name or key. Raises MalformedError, with `label`, for bytes that are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"{label}: the name is not valid UTF-8 near byte {error.start}") from error
