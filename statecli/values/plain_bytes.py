"""Read small tensors whose elements are stored unchanged in a local file, without numpy (a slow import)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter

import msgspec

from statecli.core.dtypes import ELEMENT_BITS, contiguous_strides
from statecli.core.errors import UnreadableError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.storage import files

#: Maximum size of all tensors in bytes: reading this many takes as long as importing numpy.
MAX_BYTES = 1 << 20
#: Number of tensors by which the limit grows by `MAX_BYTES` (numpy takes longer per tensor), and its maximum factor.
TENSORS_OF_MAX_BYTES, MAX_SIZE_FACTOR = 1024, 128
#: Maximum size of a small tensor, and number of bytes read at once for small adjacent tensors; both in bytes.
SMALL_BYTES, READ_BYTES = 1 << 10, 1 << 18
#: Types whose elements are a whole number of bytes and need no scale.
_PLAIN_TYPES = frozenset(
    [
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    ]
)


def read_plain_bytes(tensors: Sequence[TensorInfo]) -> list[bytes] | None:
    """Return the bytes of each tensor's elements.

    Returns None if a tensor is not stored as plain bytes (strides, a scale, remote), or if the tensors together are too
    large. Also returns None if a read fails or a checksum is wrong; the general reader then reports the tensor.
    """
    max_bytes = MAX_BYTES * min(1 + len(tensors) // TENSORS_OF_MAX_BYTES, MAX_SIZE_FACTOR)
    if sum([tensor.nbytes for tensor in tensors]) > max_bytes:
        return None
    places: list[_Place] = []
    for tensor in tensors:
        place = _locate(tensor)
        if place is None:
            return None
        places.append(place)
    if sum([place.length for place in places]) > max_bytes:
        return None
    if any(map(files.reads_are_requests, {place.path for place in places})):
        return None
    try:
        return list(_read_places(places))
    except (UnreadableError, EOFError):
        return None


class _Place(msgspec.Struct, frozen=True):
    """Range of a file to read for a tensor: the whole storage if it has a checksum to verify, else only the tensor."""

    path: str
    offset: int
    length: int
    part: slice = slice(None)
    crc32: int | None = None


def _read_places(places: Sequence[_Place]) -> Iterator[bytes]:
    """Yield the bytes of each tensor. Read on after a small tensor, because the next tensor often follows it.

    Raises EOFError if a file ends early, or if a checksum does not match.
    """
    for path, group in groupby(places, key=attrgetter("path")):
        with closing(files.open_file(path)) as file:
            start, data = 0, b""
            for place in group:
                at = place.offset - start
                if at < 0 or at + place.length > len(data):
                    prefetch_bytes = min(READ_BYTES, file.size - place.offset) if place.length <= SMALL_BYTES else 0
                    start, at, data = place.offset, 0, file.read(place.offset, max(place.length, prefetch_bytes))
                    if len(data) < place.length:
                        raise EOFError
                content = data[at : at + place.length]
                if place.crc32 is not None:
                    _check_crc(content, place.crc32)
                yield content[place.part]


def _check_crc(content: bytes, checksum: int) -> None:
    """Raise EOFError if the CRC-32 of `content` is not `checksum`."""
    import zlib  # loading its library takes as long as comparing a small file

    if zlib.crc32(content) != checksum:
        raise EOFError


def _locate(tensor: TensorInfo) -> _Place | None:
    """Return the location of the tensor's bytes, or None if these bytes are not exactly the tensor's elements."""
    data = tensor.data
    if data is None or tensor.parts or tensor.damage is not None or not _is_plain(data):
        return None
    size = ELEMENT_BITS[data.dtype] // 8
    start, length = data.offset * size, math.prod(data.shape) * size
    storage = data.storage
    if start + length > storage.length:
        return None
    if storage.crc32 is None:
        return _Place(storage.path, storage.offset + start, length)
    return _Place(storage.path, storage.offset, storage.length, slice(start, start + length), storage.crc32)


def _is_plain(data: TensorData) -> bool:
    storage = data.storage
    in_order = data.strides is None or data.strides == contiguous_strides(data.shape) or 0 in data.shape
    is_as_stored = not (data.conjugate or data.negative) and data.quantizer is None and data.inline is None
    is_in_one_place = storage.packing is None and storage.boxes is None and not storage.big_endian
    return data.dtype in _PLAIN_TYPES and in_order and is_as_stored and is_in_one_place and bool(storage.path)
