"""Find the quantized weights of a checkpoint, and read small tensors that contain the shapes of weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from statecli import live
from statecli.core.errors import UnreadableError
from statecli.core.logical_weights import LogicalWeight, StoredShape, count_bits, describe_subclass, describe_weight
from statecli.core.model_state import ModelState, TensorData, TensorInfo
from statecli.core.quantized_layouts import QuantizedLayout, QuantizedPart
from statecli.core.quantized_weights import QuantizedWeight, find_quantized_by_section
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.store import Extent

if TYPE_CHECKING:
    from torch import nn

    from statecli.live.quantized_parameters import QuantizedParameter

#: Largest size in bytes of bitsandbytes' JSON text about a weight, and of a tensor with the sizes of a weight.
_MAX_STORED_BYTES = 4096
_INTEGER_FORMATS = {"int64": "q", "int32": "i"}


class _State(msgspec.Struct):
    """Facts about a weight in the JSON text of bitsandbytes."""

    shape: tuple[int, ...]
    blocksize: int = 64


def list_weights(state: ModelState) -> tuple[LogicalWeight, ...]:
    """Return the quantized weights of a state. Small tensors that contain the shapes of weights are read."""
    settings = state.metadata.values
    quantized = find_quantized_by_section(state.tensors)
    stored = dict(_read_shapes(quantized))
    weights = [describe_weight(weight, stored.get(n), settings) for n, weight in enumerate(quantized)]
    of_subclasses = (describe_subclass(row, settings) for row in state.tensors if row.parts)
    return (*weights, *(weight for weight in of_subclasses if weight is not None))


def list_live_weights(module: nn.Module, state: ModelState) -> tuple[LogicalWeight, ...]:
    """Return the quantized weights of a live model. `state` has the tensors of the model."""
    quantized = find_quantized_by_section(state.tensors)
    sizes = live.quantized_parameters.read_sizes(module)
    stored = [weight.parts.get(QuantizedPart.SHAPE) for weight in quantized]
    shapes = [sizes.get(row.fqn) if row is not None else None for row in stored]
    weights = [
        describe_weight(weight, StoredShape(shape) if shape and min(shape) > 0 else None)
        for weight, shape in zip(quantized, shapes, strict=True)
    ]
    parameters = live.quantized_parameters.read_quantized_parameters(module)
    rows = {row.fqn: row for row in state.tensors}
    return (*weights, *(_describe_parameter(parameters[fqn], rows[fqn], state) for fqn in parameters if fqn in rows))


def _describe_parameter(parameter: QuantizedParameter, row: TensorInfo, state: ModelState) -> LogicalWeight:
    """Return the weight for a quantized parameter of bitsandbytes or torchao, with its attributes or inner tensors."""
    dtype = parameter.dtype or row.dtype
    if parameter.inner:
        parts: tuple[TensorInfo, ...] = (replace(row, nbytes=sum(part.nbytes for part in parameter.inner)),)
        names = tuple(part.name for part in parameter.inner)
    else:
        attribute_tensors = [tensor for tensor in state.tensors if tensor.fqn.startswith(f"{parameter.holder}.")]
        parts = (row, *attribute_tensors)
        names = (
            row.fqn.rpartition(".")[2],
            *(tensor.fqn.removeprefix(f"{parameter.holder}.") for tensor in attribute_tensors),
        )
    layout = QuantizedLayout.SCALED if parameter.inner or row.dtype == "int8" else QuantizedLayout.BITSANDBYTES
    return LogicalWeight(
        fqn=row.fqn,
        layout=layout,
        codes=row,
        parts=parts,
        names=names,
        dtype=dtype,
        bits=4 if layout is QuantizedLayout.BITSANDBYTES else count_bits(dtype),
        shape=parameter.shape,
        elements=math.prod(parameter.shape),
    )


def _read_shapes(weights: Sequence[QuantizedWeight]) -> Iterator[tuple[int, StoredShape]]:
    """Yield (index of the weight, stored shape) for each weight whose shape can be read."""
    holders = {
        n: data
        for n, weight in enumerate(weights)
        if (row := weight.parts.get(QuantizedPart.STATE) or weight.parts.get(QuantizedPart.SHAPE)) is not None
        and (data := row.data) is not None
        and row.nbytes <= _MAX_STORED_BYTES
    }
    locations = {n: location for n, data in holders.items() if (location := _locate(data)) is not None}
    remote: dict[str, list[Extent]] = {}
    for path, offset, length in locations.values():
        if files.reads_are_requests(path):
            remote.setdefault(path, []).append(Extent(offset, length))
    with files.prefetch_extents(remote):
        for n, data in holders.items():
            raw = data.inline if data.inline is not None else _read_location(locations[n]) if n in locations else None
            shape = _parse_shape(raw, data.dtype) if raw is not None else None
            if shape is not None:
                yield n, shape


def _locate(data: TensorData) -> tuple[str, int, int] | None:
    """Return (path, offset, length) of the bytes if a file stores them as one plain little-endian block, else None."""
    storage = data.storage
    is_plain = (
        data.strides in (None, (1,)) and storage.packing is None and storage.boxes is None and len(data.shape) == 1
    )
    size = struct.calcsize(_INTEGER_FORMATS.get(data.dtype, "B"))
    if not is_plain or storage.big_endian or not storage.path:
        return None
    start, length = data.offset * size, math.prod(data.shape) * size
    return (storage.path, storage.offset + start, length) if start + length <= storage.length else None


def _read_location(location: tuple[str, int, int]) -> bytes | None:
    path, offset, length = location
    try:
        with ByteSource(path, offset, length) as source:
            return source.read(0, length)
    except (UnreadableError, OSError):
        return None


def _parse_shape(raw: bytes, dtype: str) -> StoredShape | None:
    """Return the shape in the JSON text of bitsandbytes, or in the integers of compressed-tensors."""
    if dtype in _INTEGER_FORMATS:
        letter = _INTEGER_FORMATS[dtype]
        shape, block = struct.unpack_from(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw), None
    else:
        try:
            state = msgspec.json.decode(raw, type=_State)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        shape, block = state.shape, state.blocksize
    return StoredShape(shape, block) if shape and min(shape) > 0 and (block is None or block > 0) else None
