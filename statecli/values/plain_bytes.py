"""Read small tensors whose elements stand in a local file as they are. Needs no numpy, whose import takes longer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter

from statecli.core.dtypes import ELEMENT_BITS, contiguous_strides
from statecli.core.errors import UnreadableError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.storage import files

#: Bytes of all tensors. numpy is imported in the time in which so many are read.
MAX_BYTES = 1 << 20
#: Tensors for which so many bytes more are read, because numpy's work for each tensor takes longer; and how many times.
TENSORS_OF_MAX_BYTES, MAX_TIMES = 1024, 128
#: Bytes of a small tensor, and bytes that are read at once for small neighbours.
SMALL_BYTES, READ_BYTES = 1 << 10, 1 << 18
#: Types of which an element is a whole number of bytes and no scale belongs to it.
_TYPES = frozenset(
    [
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    ]
)


def read_plain_bytes(tensors: Sequence[TensorInfo]) -> list[bytes] | None:
    """Return the bytes of the elements of each tensor.

    None if one of them needs more than a read (strides, a scale, a checksum, another store), together they are too
    large, or a read fails: the reader of all tensors then finds the tensor to name.
    """
    size = sum([tensor.nbytes for tensor in tensors])
    if size > MAX_BYTES * min(1 + len(tensors) // TENSORS_OF_MAX_BYTES, MAX_TIMES):
        return None
    places = []
    for tensor in tensors:
        place = _locate(tensor)
        if place is None:
            return None
        places.append(place)
    if any(map(files.reads_are_requests, {path for path, _, _ in places})):
        return None
    try:
        return list(_read(places))
    except (UnreadableError, EOFError):
        return None


def _read(places: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    """Yield the bytes of each place; a read goes on past a small tensor, because its neighbour often follows."""
    for path, group in groupby(places, key=itemgetter(0)):
        with closing(files.open_file(path)) as file:
            start, data = 0, b""
            for _, offset, length in group:
                at = offset - start
                if at < 0 or at + length > len(data):
                    ahead = min(READ_BYTES, file.size - offset) if length <= SMALL_BYTES else 0
                    start, at, data = offset, 0, file.read(offset, max(length, ahead))
                    if len(data) < length:
                        raise EOFError
                yield data[at : at + length]


def _locate(tensor: TensorInfo) -> tuple[str, int, int] | None:
    """Return the path, the offset and the length of the tensor's bytes; None if it needs more than a read."""
    data = tensor.data
    if data is None or tensor.parts or tensor.damage is not None or not _is_plain(data):
        return None
    size = ELEMENT_BITS[data.dtype] // 8
    start, length = data.offset * size, math.prod(data.shape) * size
    where = data.storage
    return (where.path, where.offset + start, length) if start + length <= where.length else None


def _is_plain(data: TensorData) -> bool:
    where = data.storage
    in_order = data.strides is None or data.strides == contiguous_strides(data.shape) or 0 in data.shape
    is_as_stored = not (data.conjugate or data.negative) and data.quantizer is None and data.inline is None
    is_in_one_place = where.packing is None and where.boxes is None and where.crc32 is None and not where.big_endian
    return data.dtype in _TYPES and in_order and is_as_stored and is_in_one_place and bool(where.path)
