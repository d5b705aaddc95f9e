"""Describe parts of tensors as tensors of their own, without copying: slices, permuted axes, items of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec.structs import replace

from statecli.commands.diff.result import Rounding
from statecli.core.dtypes import contiguous_strides
from statecli.core.model_state import TensorData, TensorInfo
from statecli.core.part_rows import replace_data
from statecli.storage import files
from statecli.values.elements import find_element
from statecli.values.ranges import resolve_data
from statecli.values.read import is_packed

#: Number of elements to try a hypothesis on before reading all elements.
SAMPLE_ELEMENTS = 1024
#: Number of places of a tensor from which a sample is taken.
_SAMPLE_PLACES = 4
#: Largest fraction of a remote tensor that a sample may read, because bytes that are read twice are fetched twice.
_MAX_REMOTE_SHARE = 1 / 64


def get_data(row: TensorInfo | None) -> TensorData | None:
    """Return the data if the tensor is a non-empty strided view of plain numbers, else None."""
    if row is None or row.data is None or row.parts or row.damage is not None or row.shape is None:
        return None
    element = find_element(row.data.dtype)
    if element is None or not element.numbers or is_packed(row.data.dtype) or row.data.quantizer is not None:
        return None
    return None if 0 in row.data.shape or row.data.conjugate or row.data.negative else row.data


def get_sampled(row: TensorInfo | None) -> TensorData | None:
    """Return the data of a tensor if some of its elements can be read without all of its bytes."""
    return get_data(row) if row is not None and is_cheap_to_sample(row) else None


def is_cheap_to_sample(row: TensorInfo) -> bool:
    """Return True if a few elements can be read cheaply: from disk, or by a remote read of far fewer bytes."""
    data = row.data
    if data is None or not files.reads_are_requests(data.storage.path):
        return data is not None
    return data.storage.packing is None and row.elements * _MAX_REMOTE_SHARE >= SAMPLE_ELEMENTS


def locate(data: TensorData, name: str) -> TensorData:
    """Return the data with its location in the file and its strides. Raises as `resolve_data` does."""
    data = resolve_data(data, name)
    return replace(data, strides=tuple(data.strides or contiguous_strides(data.shape)))


def narrow(data: TensorData, axis: int, start: int, size: int) -> TensorData:
    """Return the slice `start : start + size` of the tensor along `axis`. `data` must have strides."""
    assert data.strides is not None  # noqa: S101 - narrows the type
    shape = (*data.shape[:axis], size, *data.shape[axis + 1 :])
    return replace(data, shape=shape, offset=data.offset + start * data.strides[axis])


def permute(data: TensorData, axes: Sequence[int]) -> TensorData:
    """Return the tensor with its axes in the order `axes`. `data` must have strides."""
    assert data.strides is not None  # noqa: S101 - narrows the type
    return replace(
        data, shape=tuple(data.shape[axis] for axis in axes), strides=tuple(data.strides[axis] for axis in axes)
    )


def split_rows(data: TensorData, rows: int) -> TensorData:
    """Return the tensor with its first axis split into groups of `rows` rows. `data` must have strides."""
    assert data.strides is not None  # noqa: S101 - narrows the type
    shape = (data.shape[0] // rows, rows, *data.shape[1:])
    return replace(data, shape=shape, strides=(data.strides[0] * rows, *data.strides))


def select(data: TensorData, index: int) -> TensorData:
    """Return item `index` along the first axis. `data` must have strides."""
    first = narrow(data, 0, index, 1)
    assert first.strides is not None  # noqa: S101 - narrows the type
    return replace(first, shape=first.shape[1:], strides=first.strides[1:])


def flatten(data: TensorData) -> TensorData | None:
    """Return the tensor as a matrix with the same first dimension, or None if its strides do not allow that.

    `data` has strides.
    """
    if len(data.shape) == 2:
        return data
    if len(data.shape) < 2 or data.strides != contiguous_strides(data.shape):
        return None
    shape = data.shape[0], prod(data.shape[1:])
    return replace(data, shape=shape, strides=contiguous_strides(shape))


def take_rows(data: TensorData, count: int = SAMPLE_ELEMENTS) -> TensorData:
    """Return about `count` elements from the start of the tensor, as whole rows where possible."""
    for axis, size in enumerate(data.shape):
        inner = prod(data.shape[axis + 1 :])
        data = narrow(data, axis, 0, min(size, max(1, count // max(1, inner))))
    return data


def take_places(data: TensorData) -> list[TensorData]:
    """Return about a thousand elements from several places, to find wrong rows that are in one place only.

    The places are along the longest dimension. `data` has strides.
    """
    if prod(data.shape) <= SAMPLE_ELEMENTS:
        return [data]
    axis = data.shape.index(max(data.shape))
    size = data.shape[axis] // _SAMPLE_PLACES
    parts = [narrow(data, axis, place * size, size) for place in range(_SAMPLE_PLACES)] if size else [data]
    return [take_rows(part, SAMPLE_ELEMENTS // len(parts)) for part in parts]


def take_sample(row: TensorInfo) -> TensorInfo:
    """Return the first elements of `row` as a tensor. `row` must be a single strided view."""
    assert row.data is not None  # noqa: S101 - `get_data` says so
    return replace_data(row, take_rows(locate(row.data, row.fqn)))


def take_second_sample(row: TensorInfo) -> TensorInfo:
    """Return elements from the second half of `row` as a tensor. `row` must be a single strided view."""
    assert row.data is not None  # noqa: S101 - `get_data` says so
    data = locate(row.data, row.fqn)
    axis = data.shape.index(max(data.shape)) if data.shape else 0
    start = data.shape[axis] // 2 if data.shape else 0
    return replace_data(row, take_rows(narrow(data, axis, start, data.shape[axis] - start) if start else data))


def name_rounding(before: str, after: str) -> Rounding | None:
    """Return Rounding.NEAREST for a verified copy with another dtype, or None if the dtype is the same."""
    return None if before == after else Rounding.NEAREST
