"""Read tensors quantized by ggml. Their blocks of some dozen values are read as stored, or decoded to float32.

Digests and comparisons use the stored bytes. The optional package gguf (an extra of the same name) decodes blocks with
llama.cpp's code for each type.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from statecli.core.ggml_types import BLOCK_SIZES, PACKING_PREFIX
from statecli.core.installed_package import install_extra
from statecli.core.model_state import ByteRange, TensorData, TensorInfo
from statecli.values.elements import Array


def find_ggml_type(byte_range: ByteRange) -> str | None:
    """Return the ggml type of a storage that is quantized in its file, or None for any other storage."""
    packing = byte_range.packing.how if byte_range.packing is not None else ""
    return packing.removeprefix(PACKING_PREFIX) if packing.startswith(PACKING_PREFIX) else None


def to_stored_blocks(data: TensorData) -> TensorData:
    """Return a quantized tensor as its blocks, one element per block; return any other tensor unchanged."""
    name, storage = find_ggml_type(data.storage), data.storage
    if name is None or storage.packing is None:
        return data
    values, _ = BLOCK_SIZES[name]
    block_storage = replace(storage, length=storage.packing.length, packing=None)
    return replace(data, storage=block_storage, dtype=name, shape=(*data.shape[:-1], data.shape[-1] // values))


def to_readable(data: TensorData) -> TensorData:
    """Return a tensor unchanged, or as quantized blocks if gguf cannot decode its numbers."""
    name = find_ggml_type(data.storage)
    return data if name is None or explain_unreadable_blocks(name) is None else to_stored_blocks(data)


@cache
def explain_unreadable_blocks(name: str) -> str | None:
    """Return why blocks of a ggml type cannot be decoded to numbers, with a remedy, or None if they can."""
    try:
        import gguf.quants  # noqa: F401
    except ImportError:
        return f"reading its numbers needs the package gguf: {install_extra('gguf')}"
    try:
        dequantize_blocks(np.zeros((1, BLOCK_SIZES[name][1]), np.uint8), name)
    except (KeyError, NotImplementedError):
        return f"the installed package gguf cannot read {name} as numbers"
    return None


def dequantize_blocks(blocks: Array, name: str) -> Array:
    """Return the values of consecutive whole blocks, given as bytes, as a flat float32 array."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        # Passed as one row, because gguf processes several rows in groups of sixteen.
        values: Any = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[name.upper()])
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def list_stored_data(tensor: TensorInfo) -> list[TensorData]:
    """Return the stored tensors of a tensor: its own data, as blocks if it is quantized, and its parts."""
    return ([to_stored_blocks(tensor.data)] if tensor.data else []) + [data for _, data in tensor.parts]
