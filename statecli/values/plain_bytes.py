"""Read small tensors whose elements stand in a local file as they are. Needs no numpy, whose import takes longer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby

from statecli.core.dtypes import ELEMENT_BITS, contiguous_strides
from statecli.core.errors import UnreadableError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.storage import files

#: Bytes of all tensors. numpy is imported in the time in which so many are read.
MAX_BYTES = 1 << 20
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
    if sum(tensor.nbytes for tensor in tensors) > MAX_BYTES:
        return None
    places = [place for tensor in tensors if (place := _locate(tensor)) is not None]
    if len(places) < len(tensors):
        return None
    try:
        return list(_read(places))
    except (UnreadableError, EOFError):
        return None


def _read(places: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    for path, group in groupby(places, key=lambda place: place[0]):
        with closing(files.open_file(path)) as file:
            for _, offset, length in group:
                data = file.read(offset, length)
                if len(data) < length:
                    raise EOFError
                yield data


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
    is_local = bool(where.path) and not files.reads_are_requests(where.path)
    return data.dtype in _TYPES and in_order and is_as_stored and is_in_one_place and is_local
