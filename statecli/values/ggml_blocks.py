"""Tensors that ggml has quantized: blocks of a few dozen values, as they are stored or as the float32 they stand for.

Their bytes are compared, locked and told apart as they are; what they are worth is asked of the package gguf, the
optional extra of that name, which has the code of each type from llama.cpp.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from statecli.core.ggml_types import BLOCK_SIZES, PACKING_PREFIX
from statecli.core.state import ByteRange, TensorData
from statecli.values.elements import Array


def quantized(where: ByteRange) -> str | None:
    """The name of the type that a storage is quantized to in its file; None for any other storage."""
    how = where.packing.how if where.packing is not None else ""
    return how.removeprefix(PACKING_PREFIX) if how.startswith(PACKING_PREFIX) else None


def as_stored(data: TensorData) -> TensorData:
    """What is quantized as its blocks, an element each; any other tensor as it is."""
    name, where = quantized(data.storage), data.storage
    if name is None or where.packing is None:
        return data
    values, _ = BLOCK_SIZES[name]
    stored = replace(where, length=where.packing.length, packing=None)
    return replace(data, storage=stored, dtype=name, shape=(*data.shape[:-1], data.shape[-1] // values))


def readable(data: TensorData) -> TensorData:
    """The tensor where its numbers can be read; its blocks where it is quantized and nothing here reads these."""
    name = quantized(data.storage)
    return data if name is None or why_no_numbers(name) is None else as_stored(data)


@cache
def why_no_numbers(name: str) -> str | None:
    """Why blocks of that type cannot be read as numbers here, with what to do; None if they can."""
    try:
        import gguf.quants  # noqa: F401
    except ImportError:
        return "its numbers need the package gguf: pip install 'statecli[gguf]'"
    try:
        numbers(np.zeros((1, BLOCK_SIZES[name][1]), np.uint8), name)
    except (KeyError, NotImplementedError):
        return f"the package gguf that is installed does not read {name} as numbers"
    return None


def numbers(blocks: Array, name: str) -> Array:
    """What whole blocks, bytes one after another, are worth: flat float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        # One row: of several, gguf takes sixteen at a time.
        worth: Any = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[name.upper()])
    return np.ascontiguousarray(worth, np.float32).reshape(-1)
