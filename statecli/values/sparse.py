"""Two sparse tensors compared by their values, wherever each stores them.

What neither stores is zero on both sides, and what one stores twice at a place is the sum. Nothing that a file says of
its places is believed: a tensor that contradicts itself is named, not compared. The layouts:

    coo         indices (sparse dims, n); values (n, *dense)
    csr, bsr    where each row begins (*batch, rows + 1); columns (*batch, n); values (*batch, n, *block, *dense)
    csc, bsc    the same with rows and columns exchanged; a block is (its rows, its columns) in either
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import TensorData, TensorInfo
from statecli.values import kernels
from statecli.values.compare_task import rechunked
from statecli.values.delta import Delta, How
from statecli.values.elements import DIRECT, QUANTIZED, Array, Decoder
from statecli.values.read import DIMENSIONS, all_values, opened, overlap, stored, values

#: Indices and values, all together, that are held in memory of each side: 2 ** 24 values of a matrix.
LIMIT = 3 << 24
#: Values at one place that are added up, where each takes a step of its own.
ROUNDS = 1 << 16

#: The types that torch has a sum of: not float8, and not complex32.
SUMMED = (DIRECT.keys() - QUANTIZED) | {"bool", "float16", "bfloat16"}

#: What each layout is made of.
PARTS: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    **{f"sparse_{name}": ("compressed_indices", "plain_indices", "values") for name in ("csr", "csc", "bsr", "bsc")},
}


def delta(before: TensorInfo, after: TensorInfo, how: How) -> Delta:
    """How two sparse tensors of equal shape differ. With `how.bitwise` the bits of values of equal places count, which
    are those of 0.0 where nothing is stored.

    Raises `MalformedError` for a tensor whose parts contradict each other, and `UnreadableError` for one that is not
    read: too many stored values, a type without numbers, a sum that torch does not have either.
    """
    shape = after.shape or ()
    if _same_parts(before, after):
        return Delta(elements=math.prod(shape))
    (places, found), (others, those) = _stored(before), _stored(after)
    union = np.union1d(places, others)
    # A side that stores nothing has no type of its own.
    one = _spread(places, found, union, (found if found.size else those).dtype)
    two = _spread(others, those, union, (those if those.size else found).dtype)
    changed = kernels.bits_differ(one, two, 1) if how.bitwise and before.dtype == after.dtype else None
    tally = kernels.tally(one, two, how, Decoder(), changed)
    if not tally.changed:
        return Delta(elements=math.prod(shape))
    first = None if tally.first is None else int(union[tally.first])
    elsewhere = math.prod(shape) - union.size
    return tally._replace(first=first, finite=tally.finite + elsewhere).delta(shape)


def _spread(at: Array, found: Array, union: Array, dtype: np.dtype[np.generic]) -> Array:
    out = np.zeros(union.size, dtype)
    out[np.searchsorted(union, at)] = found
    return out


# --- part by part ----------------------------------------------------------------------------------------------------


def same(one: TensorData, two: TensorData, what: str) -> bool:
    """Whether two pieces hold equal bits; of two types (int32 and int64), equal numbers. Raises as `opened` does."""
    if one.shape != two.shape:
        return False
    meanings = [(data.dtype, data.conjugate, data.negative, data.quantizer) for data in (one, two)]
    alike = meanings[0] == meanings[1]
    read = stored if alike else values
    with opened(one, what) as a, opened(two, what) as b:
        reason = overlap(a) or overlap(b)
        if reason:
            raise UnreadableError(reason)
        both = zip_longest(rechunked(read(a)), rechunked(read(b)))
        return all(np.array_equal(x.view("u1"), y.view("u1")) if alike else np.array_equal(x, y) for x, y in both)


def _same_parts(before: TensorInfo, after: TensorInfo) -> bool:
    """Equal parts are equal tensors, however large they are and whatever they mean."""
    both = zip(before.parts, after.parts, strict=True)
    return all(a[0] == b[0] and same(a[1], b[1], f"{after.fqn}: {a[0]}") for a, b in both)


# --- places ----------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """One of the two tensors, its parts by name."""

    tensor: TensorInfo
    parts: dict[str, TensorData]
    shape: tuple[int, ...]

    def require(self, holds: bool, what: str) -> None:
        """Raises `MalformedError` where it does not hold."""
        if not holds:
            path = self.parts["values"].storage.path
            raise MalformedError(f"{path}: {self.tensor.fqn}: {what}; the file is damaged: copy it again")

    def require_inside(self, index: Array, size: int) -> None:
        """Raises `MalformedError` where an index is none of `size`."""
        inside = not index.size or bool(index.min() >= 0 and index.max() < size)
        self.require(inside, f"stores indices outside its shape {list(self.shape)}")

    def integers(self, name: str) -> Array:
        """All of one part, flat."""
        return np.asarray(self.read(name), np.int64)

    def read(self, name: str) -> Array:
        """All of one part, flat. Raises `UnreadableError` for elements that are not one number each."""
        found = all_values(self.parts[name], f"{self.tensor.fqn}: {name}")
        if found.size != math.prod(self.parts[name].shape):
            raise UnreadableError(f"{self.tensor.dtype} values of a sparse tensor are not compared")
        return np.asarray(found)


def _stored(tensor: TensorInfo) -> tuple[Array, Array]:
    """Flat indices in ascending order, each once, and the values there."""
    side = _Side(tensor, dict(tensor.parts), tensor.shape or ())
    if tensor.layout not in PARTS or len(side.shape) > DIMENSIONS:
        raise UnreadableError(f"{tensor.layout} tensors of {len(side.shape)} dimensions are not compared")
    # A part without elements can still claim places without end.
    if sum(math.prod(max(size, 1) for size in part.shape) for part in side.parts.values()) > LIMIT:
        raise UnreadableError(f"more than {LIMIT:,} indices and values of a sparse tensor are not compared")
    for name in PARTS[tensor.layout][:-1]:
        dtype = side.parts[name].dtype
        side.require(dtype in ("int64", "int32"), f"its {name} are {dtype}, not integers")
    at = _coordinates(side) if tensor.layout == "sparse_coo" else _compressed(side)
    return _summed(at, side.read("values"), tensor.dtype)


def _coordinates(side: _Side) -> Array:
    """Of each value of a COO tensor, its flat index; a hybrid one stores a dense block at each place."""
    indices, found, shape = side.parts["indices"].shape, side.parts["values"].shape, side.shape
    fits = len(indices) == 2 and indices[0] <= len(shape) and found == (indices[1], *shape[indices[0] :])
    side.require(fits, f"indices {list(indices)} and values {list(found)} make no tensor of shape {list(shape)}")
    at = np.zeros(indices[1], np.int64)
    for index, size in zip(side.integers("indices").reshape(indices), shape, strict=False):
        side.require_inside(index, size)
        at = at * size + index
    return _each(at, shape[indices[0] :])


def _compressed(side: _Side) -> Array:
    """Of each value of a tensor with compressed rows or columns, its flat index."""
    starts, plain, found = (side.parts[name].shape for name in PARTS[side.tensor.layout])
    compressed = 0 if side.tensor.layout in ("sparse_csr", "sparse_bsr") else 1
    batch = starts[:-1]
    matrix, dense = side.shape[len(batch) :][:2], side.shape[len(batch) + 2 :]
    block = found[len(plain) :][:2] if side.tensor.layout in ("sparse_bsr", "sparse_bsc") else ()
    step = block or (1, 1)
    grid = [size // of for size, of in zip(matrix, step, strict=False) if of and size % of == 0]
    fits = bool(starts and plain and side.shape[: len(batch)] == plain[:-1] == batch and len(grid) == 2)
    fits = fits and found == (*plain, *block, *dense) and starts[-1] == grid[compressed] + 1
    parts = f"{list(starts)}, {list(plain)} and {list(found)}"
    side.require(fits, f"parts of shapes {parts} make no {side.tensor.layout} tensor of shape {list(side.shape)}")
    along = _along(side, math.prod(batch), grid[compressed], plain[-1])
    across = side.integers("plain_indices")
    side.require_inside(across, grid[1 - compressed])
    row, column = (across, along) if compressed else (along, across)
    row = row * step[0] + np.repeat(np.arange(math.prod(batch)), plain[-1]) * matrix[0]
    within = np.arange(step[0])[:, None] * matrix[1] + np.arange(step[1])
    return _each((row * matrix[1] + column * step[1])[:, None] + within.reshape(-1), dense)


def _along(side: _Side, count: int, size: int, stored: int) -> Array:
    """Of each place its compressed index, which is that of the row or column it belongs to."""
    starts = side.integers("compressed_indices").reshape(count, size + 1)
    # Differences of wild numbers can wrap around to good ones.
    rising = bool((starts[:, 1:] >= starts[:, :-1]).all())
    bound = bool((starts[:, 0] == 0).all() and (starts[:, -1] == stored).all())
    side.require(rising and bound, f"its compressed_indices do not rise from 0 to the {stored} places stored")
    return np.repeat(np.tile(np.arange(size), count), np.diff(starts).reshape(-1))


def _each(at: Array, dense: tuple[int, ...]) -> Array:
    """The flat index of each element of the dense blocks, of which so many come before."""
    size = math.prod(dense)
    return np.asarray((at.reshape(-1, 1) * size + np.arange(size)).reshape(-1))


# --- sums ------------------------------------------------------------------------------------------------------------


def _summed(at: Array, found: Array, dtype: str) -> tuple[Array, Array]:
    """Each place once, in order; values stored at the same place are added in their own type, in their order.

    That is what `to_dense` does. `coalesce` adds them in any order, and may come to another last digit.
    """
    order = np.argsort(at, kind="stable")
    at, found = at[order], found[order]
    new = np.ones(at.size, bool)
    np.not_equal(at[1:], at[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    if starts.size == at.size:
        return at, found
    if dtype not in SUMMED:
        raise UnreadableError(f"stores several {dtype} values at one place, of which torch has no sum")
    with np.errstate(all="ignore"):
        if dtype in ("float16", "bfloat16"):
            return at[starts], _rounded_sums(found, starts, dtype)
        sums = found[starts]
        np.add.at(sums, (np.cumsum(new) - 1)[~new], found[~new])
    return at[starts], np.minimum(sums, 1) if dtype == "bool" else sums


def _rounded_sums(found: Array, starts: Array, dtype: str) -> Array:
    """Sums of runs of float32 values of a shorter type, rounded to it at each step, as its own arithmetic would."""
    counts = np.diff(starts, append=found.size)
    if counts.max() > ROUNDS:
        raise UnreadableError(f"more than {ROUNDS:,} {dtype} values at one place are not summed")
    sums, active = found[starts], np.arange(starts.size)
    for step in range(1, int(counts.max())):
        active = active[counts[active] > step]
        exact = sums[active] + found[starts[active] + step]
        sums[active] = exact.astype(np.float16) if dtype == "float16" else _bfloat16(exact)
    return sums


def _bfloat16(exact: Array) -> Array:
    """float32 values rounded to the nearest bfloat16, ties to even. NaN that came of bfloat16 have no bits to lose."""
    bits = exact.view(np.uint32)
    return np.asarray(((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32))
