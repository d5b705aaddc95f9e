"""A small writer of msgpack, byte by byte: data that Flax writes, and data that Flax never writes."""

from __future__ import annotations

import struct
from typing import NamedTuple


class Extension(NamedTuple):
    """A value of an application's own msgpack type."""

    code: int
    data: bytes


class Raw(NamedTuple):
    """Bytes that are written unchanged."""

    data: bytes


def text(value: str) -> bytes:
    """Return a text of at most 31 bytes, or with a length of four bytes."""
    data = value.encode("utf-8", "surrogatepass")
    return (bytes([0xA0 + len(data)]) if len(data) < 32 else b"\xdb" + struct.pack(">I", len(data))) + data


def pack(value: object) -> bytes:
    """Return the value in msgpack; containers and bytes always have lengths of four bytes."""
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, Extension):
        return b"\xc9" + struct.pack(">Ib", len(value.data), value.code) + value.data
    if isinstance(value, dict):
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    return b"\xcb" + struct.pack(">d", value) if isinstance(value, float) else b"\xd3" + struct.pack(">q", value)


def array(shape: object, dtype: object = "float32", data: object = None) -> Extension:
    """Return Flax's extension for an array; the default is zeros of float32."""
    count = 1
    for size in shape if isinstance(shape, (list, tuple)) else ():
        count *= size if isinstance(size, int) else 1
    return Extension(1, pack([shape, dtype, bytes(4 * count) if data is None else data]))


def chunk_array(shape: tuple[int, ...], *pieces: object) -> dict[str, object]:
    """Return Flax's map for an array in chunks."""
    numbered = {str(n): size for n, size in enumerate(shape)}
    return {
        "__msgpack_chunked_array__": True,
        "shape": numbered,
        "chunks": {str(n): piece for n, piece in enumerate(pieces)},
    }
