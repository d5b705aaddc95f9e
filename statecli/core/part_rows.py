"""Build the `TensorInfo` of a part of a tensor, as if the part were a tensor."""

from __future__ import annotations

from math import prod

from msgspec.structs import replace

from statecli.core.dtypes import ELEMENT_BITS, nbytes
from statecli.core.model_state import TensorData, TensorInfo


def replace_data(row: TensorInfo, data: TensorData) -> TensorInfo:
    """Return the `TensorInfo` with other data, for example of an inner tensor. `data` sets dtype, shape and sizes.

    A type of unknown size has 0 bytes.
    """
    elements = prod(data.shape)
    return replace(
        row,
        dtype=data.dtype,
        shape=data.shape,
        elements=elements,
        nbytes=nbytes(data.dtype, elements) if data.dtype in ELEMENT_BITS else 0,
        layout="strided",
        data=data,
        parts=(),
    )
