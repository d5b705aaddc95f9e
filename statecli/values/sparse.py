"""Two sparse tensors compared by their values, wherever each stores them.

What neither stores is zero on both sides. A COO tensor that is not coalesced holds the sum of its duplicates.
"""

from __future__ import annotations

import math

import numpy as np

from statecli.diff.result import Delta, How
from statecli.errors import UnreadableError
from statecli.state import TensorInfo
from statecli.values import kernels
from statecli.values.elements import Array, Decoder
from statecli.values.read import all_values

#: Stored values that are held in memory, of each side.
LIMIT = 1 << 24


def delta(before: TensorInfo, after: TensorInfo, how: How) -> Delta:
    """How two sparse tensors of equal shape differ. With `how.bitwise` the bits of values of equal places count, which
    are those of 0.0 where nothing is stored.

    Raises `UnreadableError` for a layout that is not read, or too many stored values.
    """
    places, found = [], []
    for tensor in (before, after):
        at, values = _stored(tensor)
        places.append(at)
        found.append(values)
    union = np.union1d(*places)
    one, two = (_spread(at, values, union) for at, values in zip(places, found, strict=True))
    changed = kernels.bits_differ(one, two, 1) if how.bitwise and before.dtype == after.dtype else None
    tally = kernels.tally(one, two, how, Decoder(), changed)
    shape = after.shape or ()
    if not tally.changed:
        return Delta(elements=math.prod(shape))
    first = None if tally.first is None else int(union[tally.first])
    elsewhere = math.prod(shape) - union.size
    return tally._replace(first=first, finite=tally.finite + elsewhere).delta(shape)


def _spread(at: Array, values: Array, union: Array) -> Array:
    out = np.zeros(union.size, values.dtype)
    out[np.searchsorted(union, at)] = values
    return out


def _stored(tensor: TensorInfo) -> tuple[Array, Array]:
    """Flat indices in ascending order, each once, and the values there."""
    parts = dict(tensor.parts)
    if math.prod(parts["values"].shape) > LIMIT:
        raise UnreadableError(f"more than {LIMIT:,} stored values of a sparse tensor are not compared")
    values = all_values(parts["values"])
    if tensor.layout == "sparse_coo":
        indices = all_values(parts["indices"]).astype(np.int64).reshape(parts["indices"].shape)
        at = _flat(indices, tensor.shape or ())
    elif tensor.layout == "sparse_csr" and len(tensor.shape or ()) == 2:
        rows = np.diff(all_values(parts["compressed_indices"]).astype(np.int64))
        columns = all_values(parts["plain_indices"]).astype(np.int64)
        at = np.repeat(np.arange(rows.size), rows) * (tensor.shape or (0, 0))[1] + columns
    else:
        raise UnreadableError(f"{tensor.layout} tensors that store other places are not compared")
    at, values = _summed(at, values)
    return at, np.minimum(values, 1) if tensor.dtype == "bool" else values


def _flat(indices: Array, shape: tuple[int, ...]) -> Array:
    """Of each stored element; a hybrid tensor stores a dense block at each place."""
    sparse = len(indices)
    if sparse and indices.size and (indices.min() < 0 or (indices.max(axis=1) >= np.array(shape[:sparse])).any()):
        raise UnreadableError("stores indices outside its shape")
    dense = math.prod(shape[sparse:])
    start = np.ravel_multi_index(tuple(indices), shape[:sparse]) if sparse else np.zeros(1, np.int64)
    return np.asarray((start[:, None] * dense + np.arange(dense)).reshape(-1))


def _summed(at: Array, values: Array) -> tuple[Array, Array]:
    """Each place once; values stored at the same place are added in their own type, as torch does: integers wrap."""
    places, inverse = np.unique(at, return_inverse=True)
    if places.size == at.size:
        ordered = np.empty_like(values)
        ordered[inverse] = values
        return places, ordered
    summed = np.zeros(places.size, values.dtype)
    with np.errstate(all="ignore"):
        np.add.at(summed, inverse, values)
    return places, summed
