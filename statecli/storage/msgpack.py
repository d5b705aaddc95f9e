"""msgpack, read where it lies: maps, lists, texts and numbers are taken, bytes and extensions are passed over.

Format: github.com/msgpack/msgpack, spec.md. Every length is held against the bytes that are there before it is used.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.storage.source import Source, Window

#: Containers inside one another.
MAX_DEPTH = 100
#: Entries of all containers together: ten times what the largest models have.
MAX_ENTRIES = 2_000_000
#: Bytes of all texts together.
MAX_TEXT = 64 << 20
#: Bytes read ahead: what stands between two tensors' bytes.
_SPAN = 4096

#: First byte -> how `struct` reads the number behind it.
_NUMBERS = {0xCA: ">f", 0xCB: ">d"} | {0xCC + n: f">{code}" for n, code in enumerate("BHIQbhiq")}
#: First byte -> bytes of the length behind it.
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS = {0xD4 + n: 1 << n for n in range(5)}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


#: Stands for the keys of a map that break off before they can be read.
REST = "(the rest)"


class Truncated(MalformedError):
    """More is said to follow than there is."""


class Cut(NamedTuple):
    """What breaks off, and why."""

    why: str


class Blob(NamedTuple):
    """Bytes that were passed over: where they are in the file. `code` is an extension's, None for plain bytes."""

    offset: int
    length: int
    code: int | None = None


class Parser:
    """The values that stand one after another from byte `at` to byte `end` of a file.

    `mends`: a container that breaks off has what is there of it, and a `Cut` for the entry that does; `cut` is set.
    """

    def __init__(self, source: Source, at: int = 0, end: int | None = None, *, mends: bool = False) -> None:
        self.at = at
        self.mends = mends
        self.cut: Cut | None = None
        self.end = source.size if end is None else end
        self._window = Window(source, _SPAN)
        self._entries = self._text = 0

    def value(self, depth: int = 0) -> Any:
        """The next one: a dict, list, str, int, float, bool, None or `Blob`.

        Raises MalformedError for what breaks off, is no msgpack, or has more than is read.
        """
        if depth > MAX_DEPTH:
            raise MalformedError(f"nests more than {MAX_DEPTH} levels deep")
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if first < 0x90:
            return self._map(first & 0x0F, depth)
        if first < 0xA0:
            return self._list(first & 0x0F, depth)
        if first < 0xC0:
            return self._str(first & 0x1F)
        return first - 256 if first >= 0xE0 else self._tagged(first, depth)

    def _tagged(self, first: int, depth: int) -> Any:
        if first in _NUMBERS:
            return struct.unpack(_NUMBERS[first], self._take(struct.calcsize(_NUMBERS[first])))[0]
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _TEXTS:
            return self._str(self._length(_TEXTS[first]))
        if first in _MAPS:
            return self._map(self._length(_MAPS[first]), depth)
        if first in _LISTS:
            return self._list(self._length(_LISTS[first]), depth)
        if first in _BYTES:
            return self._blob(self._length(_BYTES[first]))
        if first in _EXTENSIONS:
            length = self._length(_EXTENSIONS[first])
        elif first in _FIXED_EXTENSIONS:
            length = _FIXED_EXTENSIONS[first]
        else:
            raise MalformedError(f"is no msgpack: a value cannot begin with 0x{first:02x} (byte {self.at - 1})")
        return self._blob(length, struct.unpack("b", self._take(1))[0])

    def _map(self, count: int, depth: int) -> dict[str | int, Any]:
        self._count(count)
        found: dict[str | int, Any] = {}
        for _ in range(count):
            if self.cut:
                break
            key: Any = REST
            try:
                key = self._key(found, depth)
                found[key] = self.value(depth + 1)
            except Truncated as error:
                found[key] = self._mended(error)
        return found

    def _key(self, found: dict[str | int, Any], depth: int) -> str | int:
        key = self.value(depth + 1)
        if type(key) is not str and type(key) is not int:
            what = "bytes" if isinstance(key, Blob) else quoting.value(key)
            raise MalformedError(f"a map's key is neither text nor a number but {what}")
        if key in found:
            raise MalformedError(f"a map has the key {quoting.value(key)} twice: readers disagree which one counts")
        return key

    def _list(self, count: int, depth: int) -> list[Any]:
        self._count(count)
        found: list[Any] = []
        for _ in range(count):
            if self.cut:
                break
            try:
                found.append(self.value(depth + 1))
            except Truncated as error:
                found.append(self._mended(error))
        return found

    def _mended(self, error: Truncated) -> Cut:
        """What stands for an entry that breaks off. Raises the error where nothing is to be mended."""
        if not self.mends:
            raise error
        self.cut = Cut(str(error))
        return self.cut

    def _count(self, count: int) -> None:
        self._entries += count
        if count > self.end - self.at:
            raise Truncated(
                f"is truncated: {count} entries are said to follow byte {self.at}, it holds {self.end} bytes"
            )
        if self._entries > MAX_ENTRIES:
            raise MalformedError(f"has more than {MAX_ENTRIES} entries")

    def _str(self, length: int) -> str:
        self._text += length
        if self._text > MAX_TEXT:
            raise MalformedError(f"has more than {MAX_TEXT} bytes of text")
        at = self.at
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedError(f"holds a text that is no UTF-8 near byte {at + error.start}") from error

    def _blob(self, length: int, code: int | None = None) -> Blob:
        self._within(length)
        found = Blob(self.at, length, code)
        self.at += length
        return found

    def _length(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _take(self, length: int) -> bytes:
        self._within(length)
        found = self._window.read(self.at, length)
        self.at += length
        return found

    def _within(self, length: int) -> None:
        if self.at + length > self.end:
            raise Truncated(
                f"is truncated: bytes {self.at} to {self.at + length} are needed, it holds {self.end}; "
                "copy or download it again"
            )
