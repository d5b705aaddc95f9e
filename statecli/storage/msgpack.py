"""Parser of msgpack: reads maps, lists, texts and numbers, and skips bytes and extensions.

Format: github.com/msgpack/msgpack, spec.md. Each length is compared with the remaining bytes before use.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.storage.byte_source import ByteSource, Window

#: Maximum depth of nested containers.
MAX_DEPTH = 100
#: Maximum number of entries of all containers together: ten times the number in the largest models.
MAX_ENTRIES = 2_000_000
#: Maximum size of all texts together, in bytes.
MAX_TEXT_BYTES = 64 << 20
#: Number of bytes read at a time: the text between two tensors' bytes is shorter.
_READ_BYTES = 4096

#: First byte -> `struct` format of the following number.
_NUMBERS = {0xCA: ">f", 0xCB: ">d"} | {0xCC + n: f">{code}" for n, code in enumerate("BHIQbhiq")}
#: First byte -> size in bytes of the following length, for each type.
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS = {0xD4 + n: 1 << n for n in range(5)}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


#: Key for the unreadable rest of a truncated map.
REST_KEY = "(the rest)"


class Truncated(MalformedError):
    """Error: the file ends before the stated length."""


class Truncation(msgspec.Struct, frozen=True):
    """A value that the end of the file cuts off, and the reason."""

    why: str


class Blob(msgspec.Struct, frozen=True):
    """Skipped bytes, by their position in the file. `code`: type of an extension, None for plain bytes."""

    offset: int
    length: int
    code: int | None = None


class Parser:
    """Parser of consecutive values from byte `at` to byte `end` of a file.

    With `mends`, a truncated container keeps its complete entries, has a `Truncation` as its last entry, and sets
    `truncation`.
    """

    def __init__(self, source: ByteSource, at: int = 0, end: int | None = None, *, mends: bool = False) -> None:
        self.at = at
        self.mends = mends
        self.truncation: Truncation | None = None
        self.end = source.size if end is None else end
        self._window = Window(source, _READ_BYTES)
        self._entries = self._text = 0

    def value(self, depth: int = 0) -> Any:
        """Return the next value: a dict, list, str, int, float, bool, None or `Blob`.

        Raises MalformedError for a truncated value, for other bytes than msgpack, and beyond a limit.
        """
        if depth > MAX_DEPTH:
            raise MalformedError(f"nests more than {MAX_DEPTH} levels deep, the limit of statecli")
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if first < 0x90:
            return self._parse_map(first & 0x0F, depth)
        if first < 0xA0:
            return self._parse_list(first & 0x0F, depth)
        if first < 0xC0:
            return self._parse_text(first & 0x1F)
        return first - 256 if first >= 0xE0 else self._parse_tagged(first, depth)

    def _parse_tagged(self, first: int, depth: int) -> Any:
        if first in _NUMBERS:
            return struct.unpack(_NUMBERS[first], self._take(struct.calcsize(_NUMBERS[first])))[0]
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _TEXTS:
            return self._parse_text(self._parse_length(_TEXTS[first]))
        if first in _MAPS:
            return self._parse_map(self._parse_length(_MAPS[first]), depth)
        if first in _LISTS:
            return self._parse_list(self._parse_length(_LISTS[first]), depth)
        if first in _BYTES:
            return self._skip_blob(self._parse_length(_BYTES[first]))
        if first in _EXTENSIONS:
            length = self._parse_length(_EXTENSIONS[first])
        elif first in _FIXED_EXTENSIONS:
            length = _FIXED_EXTENSIONS[first]
        else:
            raise MalformedError(f"is not msgpack: a value cannot begin with 0x{first:02x} (byte {self.at - 1})")
        return self._skip_blob(length, struct.unpack("b", self._take(1))[0])

    def _parse_map(self, count: int, depth: int) -> dict[str | int, Any]:
        self._check_count(count)
        entries: dict[str | int, Any] = {}
        for _ in range(count):
            if self.truncation:
                break
            key: Any = REST_KEY
            try:
                key = self._parse_key(entries, depth)
                entries[key] = self.value(depth + 1)
            except Truncated as error:
                entries[key] = self._mend(error)
        return entries

    def _parse_key(self, entries: dict[str | int, Any], depth: int) -> str | int:
        key = self.value(depth + 1)
        if type(key) is not str and type(key) is not int:
            key_text = "bytes" if isinstance(key, Blob) else quoting.value(key)
            raise MalformedError(f"a map has a key that is not a string or an integer, but {key_text}")
        if key in entries:
            raise MalformedError(f"a map has the key {quoting.value(key)} twice; programs may read either value")
        return key

    def _parse_list(self, count: int, depth: int) -> list[Any]:
        self._check_count(count)
        items: list[Any] = []
        for _ in range(count):
            if self.truncation:
                break
            try:
                items.append(self.value(depth + 1))
            except Truncated as error:
                items.append(self._mend(error))
        return items

    def _mend(self, error: Truncated) -> Truncation:
        """Record that an entry is truncated and return a `Truncation` for it. Raises `error` if `mends` is False."""
        if not self.mends:
            raise error
        self.truncation = Truncation(str(error))
        return self.truncation

    def _check_count(self, count: int) -> None:
        self._entries += count
        if count > self.end - self.at:
            raise Truncated(
                f"is truncated: {count} entries should follow byte {self.at}, but the file ends at byte {self.end}; "
                "copy or download the file again"
            )
        if self._entries > MAX_ENTRIES:
            raise MalformedError(f"has more than {MAX_ENTRIES} entries, the limit of statecli")

    def _parse_text(self, length: int) -> str:
        self._text += length
        if self._text > MAX_TEXT_BYTES:
            raise MalformedError(f"has more than {MAX_TEXT_BYTES} bytes of text, the limit of statecli")
        at = self.at
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedError(
                f"contains a string that is not valid UTF-8 near byte {at + error.start}: the file is damaged, or "
                "it was not written by the msgpack library"
            ) from error

    def _skip_blob(self, length: int, code: int | None = None) -> Blob:
        self._check_end(length)
        blob = Blob(self.at, length, code)
        self.at += length
        return blob

    def _parse_length(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _take(self, length: int) -> bytes:
        self._check_end(length)
        data = self._window.read(self.at, length)
        self.at += length
        return data

    def _check_end(self, length: int) -> None:
        if self.at + length > self.end:
            raise Truncated(
                f"is truncated: bytes {self.at} to {self.at + length} are needed, but the file has {self.end}; "
                "copy or download the file again"
            )
