"""Compare two sparse tensors by their values, whether or not their layouts are equal.

A value that is not stored is zero. A tensor with several values at one index is compared only with a tensor that has
equal parts. Indices in a file are not trusted: a self-contradictory tensor is reported, not compared. The layouts:

    coo         indices (sparse dims, n); values (n, *dense)
    csr, bsr    where each row begins (*batch, rows + 1); columns (*batch, n); values (*batch, n, *block, *dense)
    csc, bsc    the same with rows and columns exchanged; a block is (its rows, its columns) in either
"""

from __future__ import annotations

import math
from itertools import zip_longest

import msgspec
import numpy as np

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values import kernels
from statecli.values.compare_task import rechunk
from statecli.values.delta import CompareOptions, Delta
from statecli.values.elements import Array, Decoder
from statecli.values.read import MAX_DIMENSIONS, explain_overlap, open_view, read_all_values, read_items, read_values

#: Maximum number of indices and values of one tensor in memory: 2 ** 24 values of a matrix.
MAX_STORED_VALUES = 3 << 24

#: Names of the inner tensors of each layout.
PARTS_OF_LAYOUT: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    **{f"sparse_{name}": ("compressed_indices", "plain_indices", "values") for name in ("csr", "csc", "bsr", "bsc")},
}


def compare_sparse(before: TensorInfo, after: TensorInfo, options: CompareOptions) -> Delta:
    """Return how two sparse tensors of equal shape differ.

    With `options.bitwise`, bits are compared; an index without a stored value has the bits of 0.0.

    Raises:
        MalformedError: The inner tensors of a tensor contradict each other.
        UnreadableError: Too many stored values, several values at one index, or a type without numbers.
    """
    shape = after.shape or ()
    parts = zip(before.parts, after.parts, strict=True)
    # Tensors with equal parts are equal, without checking their size or indices.
    if all(a[0] == b[0] and is_same_data(a[1], b[1], f"{after.fqn}: {a[0]}") for a, b in parts):
        return Delta(elements=math.prod(shape))
    (old_places, old), (new_places, new) = _read_entries(before), _read_entries(after)
    union = np.union1d(old_places, new_places)
    # A tensor without stored values has no values to convert, so use the type of the other tensor.
    old_values = _scatter(old_places, old, union, (old if old.size else new).dtype)
    new_values = _scatter(new_places, new, union, (new if new.size else old).dtype)
    changed_mask = (
        kernels.compare_bits(old_values, new_values, 1) if options.bitwise and before.dtype == after.dtype else None
    )
    tally = kernels.tally_values(old_values, new_values, options, Decoder(), changed_mask)
    if not tally.changed:
        return Delta(elements=math.prod(shape))
    first = None if tally.first is None else int(union[tally.first])
    implicit_zeros = math.prod(shape) - union.size
    return tally._replace(first=first, finite=tally.finite + implicit_zeros).to_delta(shape)


def _scatter(places: Array, values: Array, union: Array, dtype: np.dtype[np.generic]) -> Array:
    scattered = np.zeros(union.size, dtype)
    scattered[np.searchsorted(union, places)] = values
    return scattered


# --- part by part ----------------------------------------------------------------------------------------------------


def is_same_data(before: TensorData, after: TensorData, name: str) -> bool:
    """Return whether two tensors have equal bits. If their types differ (int32 and int64), compare the numbers.

    Raises as `open_view` does.
    """
    if before.shape != after.shape:
        return False
    meanings = [(data.dtype, data.conjugate, data.negative, data.quantizer) for data in (before, after)]
    has_same_meaning = meanings[0] == meanings[1]
    read_blocks = read_items if has_same_meaning else read_values
    with open_view(before, name) as before_view, open_view(after, name) as after_view:
        reason = explain_overlap(before_view) or explain_overlap(after_view)
        if reason:
            raise UnreadableError(reason)
        chunk_pairs = zip_longest(rechunk(read_blocks(before_view)), rechunk(read_blocks(after_view)))
        return all(
            np.array_equal(x.view("u1"), y.view("u1")) if has_same_meaning else np.array_equal(x, y)
            for x, y in chunk_pairs
        )


def explain_invalid_indices(tensor: TensorInfo) -> str | None:
    """Return why the indices of a sparse tensor do not fit its shape, or None if the indices fit.

    torch does not check indices when loading a tensor; its operators read and write at any index.

    Raises `UnreadableError` for too many indices, and as `values.read` does.
    """
    try:
        _read_places(_open_side(tensor))
    except MalformedError as error:
        if isinstance(error.__cause__, _InvalidIndices):
            return str(error.__cause__)
        raise
    return None


# --- flat indices ----------------------------------------------------------------------------------------------------


class _InvalidIndices(Exception):
    """Error: the inner tensors of a sparse tensor contradict each other. The text says how."""


class _Side(msgspec.Struct, frozen=True):
    """One of the two compared sparse tensors, with its inner tensors by name."""

    tensor: TensorInfo
    parts: dict[str, TensorData]
    shape: tuple[int, ...]

    def require(self, is_valid: bool, problem: str) -> None:
        """Raise `MalformedError` with the reason `problem` if `is_valid` is False."""
        if not is_valid:
            path = self.parts["values"].storage.path
            message = f"{path}: {self.tensor.fqn}: {problem}; the file is damaged: copy the file again"
            raise MalformedError(message) from _InvalidIndices(problem)

    def require_inside(self, index: Array, size: int) -> None:
        """Raise `MalformedError` unless all indices are from 0 to `size` - 1."""
        is_inside = not index.size or bool(index.min() >= 0 and index.max() < size)
        self.require(is_inside, f"stores indices outside its shape {list(self.shape)}")

    def read_integers(self, name: str) -> Array:
        """Return all elements of the inner tensor `name`, flat, as int64."""
        return np.asarray(self.read_part(name), np.int64)

    def read_part(self, name: str) -> Array:
        """Return all elements of an inner tensor, flat. Raises `UnreadableError` if an element has several numbers."""
        values = read_all_values(self.parts[name], f"{self.tensor.fqn}: {name}")
        if values.size != math.prod(self.parts[name].shape):
            raise UnreadableError(f"statecli does not compare {self.tensor.dtype} values of sparse tensors")
        return np.asarray(values)


def _read_entries(tensor: TensorInfo) -> tuple[Array, Array]:
    """Return the flat indices of the stored values, sorted, and the value at each index."""
    side = _open_side(tensor)
    places, values = _read_places(side), side.read_part("values")
    order = np.argsort(places)
    places, values = places[order], values[order]
    if (places[1:] == places[:-1]).any():
        raise UnreadableError("stores several values at one index; save the tensor after coalesce()")
    return places, values


def _open_side(tensor: TensorInfo) -> _Side:
    """Return the inner tensors of a sparse tensor after checking their sizes and types."""
    side = _Side(tensor, dict(tensor.parts), tensor.shape or ())
    if tensor.layout not in PARTS_OF_LAYOUT or len(side.shape) > MAX_DIMENSIONS:
        raise UnreadableError(f"statecli does not compare {tensor.layout} tensors of {len(side.shape)} dimensions")
    # Sizes of 0 count as 1, because an inner tensor without elements can still claim any number of indices.
    if sum(math.prod(max(size, 1) for size in part.shape) for part in side.parts.values()) > MAX_STORED_VALUES:
        raise UnreadableError(
            f"statecli does not compare sparse tensors with more than {MAX_STORED_VALUES:,} indices and values"
        )
    for name in PARTS_OF_LAYOUT[tensor.layout][:-1]:
        dtype = side.parts[name].dtype
        side.require(dtype in ("int64", "int32"), f"its {name} are {dtype}, not integers")
    return side


def _read_places(side: _Side) -> Array:
    """Return the flat index of each stored value."""
    return _compute_coo_indices(side) if side.tensor.layout == "sparse_coo" else _compute_compressed_indices(side)


def _compute_coo_indices(side: _Side) -> Array:
    """Return the flat index of each value of a COO tensor. In a hybrid tensor, each index has a dense block."""
    indices_shape, values_shape, shape = side.parts["indices"].shape, side.parts["values"].shape, side.shape
    is_consistent = (
        len(indices_shape) == 2
        and indices_shape[0] <= len(shape)
        and values_shape == (indices_shape[1], *shape[indices_shape[0] :])
    )
    side.require(
        is_consistent,
        f"indices {list(indices_shape)} and values {list(values_shape)} do not form a tensor of shape {list(shape)}",
    )
    places = np.zeros(indices_shape[1], np.int64)
    for index, size in zip(side.read_integers("indices").reshape(indices_shape), shape, strict=False):
        side.require_inside(index, size)
        places = places * size + index
    return _expand_dense(places, shape[indices_shape[0] :])


def _compute_compressed_indices(side: _Side) -> Array:
    """Return the flat index of each value of a CSR, CSC, BSR or BSC tensor."""
    starts, plain_shape, values_shape = (side.parts[name].shape for name in PARTS_OF_LAYOUT[side.tensor.layout])
    compressed = 0 if side.tensor.layout in ("sparse_csr", "sparse_bsr") else 1
    batch = starts[:-1]
    matrix, dense = side.shape[len(batch) :][:2], side.shape[len(batch) + 2 :]
    block = values_shape[len(plain_shape) :][:2] if side.tensor.layout in ("sparse_bsr", "sparse_bsc") else ()
    step = block or (1, 1)
    grid = [size // of for size, of in zip(matrix, step, strict=False) if of and size % of == 0]
    is_consistent = bool(
        starts and plain_shape and side.shape[: len(batch)] == plain_shape[:-1] == batch and len(grid) == 2
    )
    is_consistent = (
        is_consistent and values_shape == (*plain_shape, *block, *dense) and starts[-1] == grid[compressed] + 1
    )
    parts = f"{list(starts)}, {list(plain_shape)} and {list(values_shape)}"
    side.require(
        is_consistent,
        f"inner tensors of shapes {parts} do not form a {side.tensor.layout} tensor of shape {list(side.shape)}",
    )
    compressed_index = _expand_compressed(side, math.prod(batch), grid[compressed], plain_shape[-1])
    plain_index = side.read_integers("plain_indices")
    side.require_inside(plain_index, grid[1 - compressed])
    row, column = (plain_index, compressed_index) if compressed else (compressed_index, plain_index)
    row = row * step[0] + np.repeat(np.arange(math.prod(batch)), plain_shape[-1]) * matrix[0]
    index_in_block = np.arange(step[0])[:, None] * matrix[1] + np.arange(step[1])
    return _expand_dense((row * matrix[1] + column * step[1])[:, None] + index_in_block.reshape(-1), dense)


def _expand_compressed(side: _Side, count: int, size: int, stored_count: int) -> Array:
    """Return the compressed index of each stored value or block: its row, or its column in CSC and BSC."""
    starts = side.read_integers("compressed_indices").reshape(count, size + 1)
    # Compare neighbours, because differences of arbitrary numbers can wrap around to valid ones.
    is_rising = bool((starts[:, 1:] >= starts[:, :-1]).all())
    is_bounded = bool((starts[:, 0] == 0).all() and (starts[:, -1] == stored_count).all())
    side.require(
        is_rising and is_bounded,
        f"its compressed_indices do not rise from 0 to {stored_count}, the number of stored values",
    )
    return np.repeat(np.tile(np.arange(size), count), np.diff(starts).reshape(-1))


def _expand_dense(places: Array, dense: tuple[int, ...]) -> Array:
    """Return the flat index of each element in dense blocks. `places` has the blocks' indices, `dense` the shape."""
    size = math.prod(dense)
    return np.asarray((places.reshape(-1, 1) * size + np.arange(size)).reshape(-1))
