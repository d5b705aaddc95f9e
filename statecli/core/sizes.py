"""Size of a checkpoint: the bytes of its tensors, with shared storage counted once.

`inspect`, `diff`, `verify` and `audit` all show this number. The file is larger by names, padding, and the unused parts
of storages, which the rules `oversized-storage` and `too-large` count.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

import msgspec

from statecli.core.model_state import Kind, TensorInfo


class Totals(msgspec.Struct, frozen=True):
    """Sums over a kind of tensors. `tensors` counts names; `elements` and `bytes` count shared storage once."""

    tensors: int
    elements: int
    bytes: int


class _StorageSum:
    """Sum of tensors, with at most the size of each storage."""

    def __init__(self) -> None:
        self._tensors = self._elements = self._bytes = 0
        self._seen: set[tuple[object, ...]] = set()
        self._taken: dict[object, int] = {}

    def add_all(self, tensors: Iterable[TensorInfo]) -> None:
        """Add tensors; nearly all of them are the only tensor of their storage."""
        plain = list(tensors)
        rare = [tensor for tensor in plain if tensor.tied_to or tensor.storage_bytes is not None]
        if rare:
            plain = [tensor for tensor in plain if not tensor.tied_to and tensor.storage_bytes is None]
            for tensor in rare:
                self._add(tensor)
        self._tensors += len(plain)
        self._elements += sum([tensor.elements for tensor in plain])
        self._bytes += sum([tensor.nbytes for tensor in plain])

    def _add(self, tensor: TensorInfo) -> None:
        self._tensors += 1
        size, elements = tensor.nbytes, tensor.elements
        if tensor.layout == "strided" and tensor.storage_bytes is not None and size > tensor.storage_bytes:
            size = tensor.storage_bytes  # expanded: stride 0 repeats what is stored once
        if tensor.tied_to:
            view = (tensor.storage, tensor.storage_offset, tensor.shape)
            if view in self._seen:
                return
            self._seen.add(view)
            # A sparse tensor has several storages; `storage` identifies the one that holds its values.
            whole = tensor.storage_bytes if tensor.layout == "strided" and tensor.storage_bytes is not None else size
            taken = self._taken.get(tensor.storage, 0)
            size = max(0, min(size, whole - taken))
            self._taken[tensor.storage] = taken + size
            # Elements of the storage that were already counted are not counted again.
            elements = tensor.elements * size // tensor.nbytes
        self._elements += elements
        self._bytes += size

    def totals(self) -> Totals:
        return Totals(self._tensors, self._elements, self._bytes)


def sum_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Return the size of all tensors together, in bytes."""
    storage_sum = _StorageSum()
    storage_sum.add_all(tensors)
    return storage_sum.totals().bytes


def sum_by_kind(tensors: Iterable[TensorInfo]) -> dict[str, Totals]:
    """Return totals for each of the four kinds of the JSON contract, and for `other` if any tensor has this kind.

    Storage shared by tensors of two kinds counts for each kind.
    """
    sums = {kind: _StorageSum() for kind in Kind}
    for kind, run in groupby(tensors, key=attrgetter("kind")):
        sums[kind].add_all(run)
    totals_by_kind = {kind: kind_totals.totals() for kind, kind_totals in sums.items()}
    return {
        kind.value: kind_totals
        for kind, kind_totals in totals_by_kind.items()
        if kind is not Kind.OTHER or kind_totals.tensors
    }
