"""The size of a checkpoint: the bytes of its tensors, of which those that share a storage count once.

`inspect`, `diff`, `verify` and `audit` all show this number. The file is larger: by names, padding, and the part of a
storage that no tensor sees, which the rules `oversized-storage` and `too-large` count.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from statecli.core.state import Kind, TensorInfo


class Totals(msgspec.Struct, frozen=True):
    """Sums over one kind. `tensors` counts names; `elements` and `bytes` count what is tied once."""

    tensors: int
    elements: int
    bytes: int


class _Sum:
    """Tensors added up, of each storage no more than its size."""

    def __init__(self) -> None:
        self._tensors = self._elements = self._bytes = 0
        self._seen: set[tuple[object, ...]] = set()
        self._taken: dict[object, int] = {}

    def add(self, tensor: TensorInfo) -> None:
        self._tensors += 1
        size, elements = tensor.nbytes, tensor.elements
        if tensor.layout == "strided" and tensor.storage_bytes is not None and size > tensor.storage_bytes:
            size = tensor.storage_bytes  # expanded: stride 0 repeats what is stored once
        if tensor.tied_to:
            view = (tensor.storage, tensor.storage_offset, tensor.shape)
            if view in self._seen:
                return
            self._seen.add(view)
            # The parts of a sparse tensor lie in several storages; the one named is that of its values.
            whole = tensor.storage_bytes if tensor.layout == "strided" and tensor.storage_bytes is not None else size
            taken = self._taken.get(tensor.storage, 0)
            size = max(0, min(size, whole - taken))
            self._taken[tensor.storage] = taken + size
            # A view of what is counted already adds no elements, one of a part of it a part of them.
            elements = tensor.elements * size // tensor.nbytes
        self._elements += elements
        self._bytes += size

    def totals(self) -> Totals:
        return Totals(self._tensors, self._elements, self._bytes)


def checkpoint_bytes(tensors: Iterable[TensorInfo]) -> int:
    """The size of all these tensors together, in bytes."""
    total = _Sum()
    for tensor in tensors:
        total.add(tensor)
    return total.totals().bytes


def totals_by_kind(tensors: Iterable[TensorInfo]) -> dict[str, Totals]:
    """Per kind; the contract's four kinds always, `other` where there is such a tensor.

    What tensors of two kinds share counts in each of them.
    """
    sums = {kind: _Sum() for kind in Kind}
    for tensor in tensors:
        sums[tensor.kind].add(tensor)
    totals = {kind: total.totals() for kind, total in sums.items()}
    return {kind.value: total for kind, total in totals.items() if kind is not Kind.OTHER or total.tensors}
