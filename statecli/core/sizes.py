"""Size of a checkpoint: the bytes of its tensors, with shared storage counted once.

`inspect`, `diff`, `verify` and `audit` all show this number. The file is larger by names, padding, and the unused parts
of storages, which the rules `oversized-storage` and `too-large` count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from statecli.core.model_state import Kind, TensorInfo
from statecli.core.units import format_size, plural


class Totals(msgspec.Struct, frozen=True):
    """Totals of several tensors. `tensors` counts names; `elements` and `bytes` count shared storage once."""

    tensors: int
    elements: int
    bytes: int


def _sum_tensors(tensors: Sequence[TensorInfo]) -> Totals:
    """Return the totals of the tensors. Shared storage counts at most with its own size."""
    rare = [tensor for tensor in tensors if tensor.tied_to or tensor.storage_bytes is not None]
    unshared = (
        [tensor for tensor in tensors if not tensor.tied_to and tensor.storage_bytes is None] if rare else tensors
    )
    total_elements, total_bytes = (
        sum([tensor.elements for tensor in unshared]),
        sum([tensor.nbytes for tensor in unshared]),
    )
    counted_views: set[tuple[object, ...]] = set()
    counted_bytes: dict[object, int] = {}
    for tensor in rare:
        size, elements = tensor.nbytes, tensor.elements
        storage_size = tensor.storage_bytes if tensor.layout == "strided" and tensor.storage_bytes is not None else size
        size = min(size, storage_size)  # expanded: stride 0 repeats what is stored once
        if tensor.tied_to:
            view = (tensor.storage, tensor.storage_offset, tensor.shape)
            if view in counted_views:
                continue
            counted_views.add(view)
            # A sparse tensor has several storages; `storage` is the one with its values.
            size = max(0, min(size, storage_size - counted_bytes.get(tensor.storage, 0)))
            counted_bytes[tensor.storage] = counted_bytes.get(tensor.storage, 0) + size
            # Elements of the storage are counted once.
            elements = tensor.elements * size // tensor.nbytes
        total_elements += elements
        total_bytes += size
    return Totals(len(tensors), total_elements, total_bytes)


def sum_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Return the size of all tensors together, in bytes."""
    return _sum_tensors(list(tensors)).bytes


def describe_size(tensors: Collection[TensorInfo]) -> str:
    """Return the number of the tensors and their size: `78 tensors, 8.79 kB`."""
    return f"{plural(len(tensors), 'tensor')}, {format_size(sum_bytes(tensors))}"


def sum_by_kind(tensors: Iterable[TensorInfo]) -> dict[str, Totals]:
    """Return the totals for each kind of tensor. The kind `other` is left out if no tensor has this kind.

    Storage shared by tensors of two kinds counts for each kind.
    """
    by_kind: dict[Kind, list[TensorInfo]] = {kind: [] for kind in Kind}
    for kind, run in groupby(tensors, key=attrgetter("kind")):
        by_kind[kind].extend(run)
    return {
        kind.value: _sum_tensors(tensors_of_kind)
        for kind, tensors_of_kind in by_kind.items()
        if tensors_of_kind or kind is not Kind.OTHER
    }
