"""Group tensors by storage, and compute which bytes of its storage each tensor uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import msgspec

from statecli.core.dtypes import ELEMENT_BITS, VALUES_PER_BYTE, nbytes
from statecli.core.model_state import ByteRange, ModelState, Place, TensorData, TensorInfo


class StorageView(msgspec.Struct, frozen=True):
    """The bytes that a tensor uses in its storage: `byte_count` bytes from `start` to `end`. Repeated bytes count once.

    `form` is dtype, shape and strides: tensors with equal views are the same tensor under two names. `steps` are
    (count, stride in bytes) of its dimensions and of an element; None if unknown.
    """

    start: int
    end: int
    byte_count: int
    form: tuple[object, ...]
    steps: tuple[tuple[int, int], ...] | None = None

    @property
    def is_contiguous(self) -> bool:
        """Return True if the view uses every byte from its start to its end."""
        return self.steps is not None and len(self.steps) == 1


class Storage(msgspec.Struct):
    """A storage of `size` bytes. `users`: the tensors that use the storage, each with its `TensorData`.

    `byte_range` and each `TensorData` are None for the storage of a live tensor.
    """

    size: int
    byte_range: ByteRange | None
    users: list[tuple[TensorInfo, TensorData | None]]

    @property
    def plain(self) -> bool:
        """Return True if a single tensor uses all bytes of the storage, as is usual."""
        if len(self.users) > 1:
            return False
        tensor, piece = self.users[0]
        return tensor.nbytes == self.size and (piece is None or (piece is tensor.data and piece.strides is None))

    @property
    def views(self) -> dict[StorageView, list[TensorInfo]]:
        """Map each view to the tensors that use exactly its bytes."""
        return self._group_by_view(self.users)

    @property
    def named_views(self) -> dict[StorageView, list[TensorInfo]]:
        """Map each view to its tensors. Views that only attributes of tensors use are left out."""
        return self._group_by_view(user for user in self.users if not _is_attribute(*user))

    def _group_by_view(
        self, users: Iterable[tuple[TensorInfo, TensorData | None]]
    ) -> dict[StorageView, list[TensorInfo]]:
        tensors_by_view: dict[StorageView, list[TensorInfo]] = {}
        for tensor, piece in users:
            view = _view_of_live_tensor(tensor, self.size) if piece is None else _view_of_piece(piece)
            tensors_by_view.setdefault(view, []).append(tensor)
        return tensors_by_view

    @property
    def place(self) -> Place | None:
        """Return the file and offset of the storage as a Place; None if its bytes are not in a single place."""
        return self.byte_range.place if self.byte_range else None

    @property
    def unused_bytes(self) -> int:
        """Return the number of bytes that are certainly not used by a tensor."""
        reach = covered_bytes = 0
        views = sorted(self.views, key=lambda view: view.start)
        for view in views:
            covered_bytes += max(view.end - max(view.start, reach), 0)
            reach = max(reach, view.end)
        return self.size - min(covered_bytes, sum(view.byte_count for view in views))


def group_by_storage(state: ModelState) -> list[Storage]:
    """Return the storages of the tensors, in order of first use. A tensor on meta does not have a storage."""
    live = state.traits.is_class
    by_place: dict[object, Storage] = {}
    for tensor in state.tensors:
        if live:
            size = tensor.storage_bytes or 0
            if size and tensor.storage is not None:
                by_place.setdefault(tensor.storage, Storage(size, None, [])).users.append((tensor, None))
            continue
        data = tensor.data
        is_single = data is not None and not tensor.parts and data.quantizer is None
        for piece in (data,) if data is not None and is_single else _list_pieces(tensor):
            byte_range = piece.storage
            if byte_range.length and piece.inline is None:
                storage = by_place.get(byte_range)
                if storage is None:
                    by_place[byte_range] = storage = Storage(byte_range.length, byte_range, [])
                storage.users.append((tensor, piece))
    return list(by_place.values())


def _is_attribute(tensor: TensorInfo, piece: TensorData | None) -> bool:
    """Return whether the data belong to an attribute of the tensor instead of the tensor itself."""
    if tensor.data is None or piece is None or piece is tensor.data:
        return False
    quantizer = tensor.data.quantizer
    return quantizer is None or not (piece is quantizer.scales or piece is quantizer.zero_points)


def _list_pieces(tensor: TensorInfo) -> Iterator[TensorData]:
    for piece in (tensor.data, *(piece for _, piece in tensor.parts)):
        if piece is not None:
            yield piece
            if piece.quantizer is not None:
                yield from (extra for extra in (piece.quantizer.scales, piece.quantizer.zero_points) if extra)


def _view_of_live_tensor(tensor: TensorInfo, size: int) -> StorageView:
    """Return a view of the whole storage, because the strides of a live tensor are not recorded."""
    return StorageView(0, size, tensor.nbytes, (tensor.dtype, tensor.shape, tensor.storage_offset))


def _view_of_piece(piece: TensorData) -> StorageView:
    elements, last = prod(piece.shape), prod(piece.shape) - 1
    if elements and piece.strides:
        steps = [(size, stride) for size, stride in zip(piece.shape, piece.strides, strict=True) if stride]
        elements, last = prod(size for size, _ in steps), sum((size - 1) * stride for size, stride in steps)
    start, end = nbytes(piece.dtype, piece.offset), nbytes(piece.dtype, piece.offset + last + 1)
    return StorageView(
        start,
        end,
        nbytes(piece.dtype, elements),
        (piece.dtype, piece.shape, piece.strides),
        _merge_steps(piece, elements),
    )


def _merge_steps(piece: TensorData, elements: int) -> tuple[tuple[int, int], ...] | None:
    """Return (count, stride in bytes) of the merged dimensions; None for strided values that are packed in bytes."""
    size = ELEMENT_BITS.get(piece.dtype, 0) // 8
    if not size or piece.dtype in VALUES_PER_BYTE:
        return None if piece.strides else ((nbytes(piece.dtype, elements), 1),)
    steps = [(size, 1)]
    strided = zip(piece.shape, piece.strides, strict=True) if piece.strides else [(elements, 1)]
    for count, stride in sorted(((n, by * size) for n, by in strided if n > 1 and by), key=lambda step: step[1]):
        inner, by = steps[-1]
        if inner * by == stride:
            steps[-1] = (inner * count, by)
        else:
            steps.append((count, stride))
    return tuple(steps)


def have_common_byte(view: StorageView, other: StorageView, work: list[int]) -> bool | None:
    """Return whether two views have a common byte; None if the search takes too many steps. `work[0]`: steps left.

    A byte of a view is at its start plus, for each step, the stride times a number from 0 to count - 1. So a common
    byte exists exactly if the distance of the starts is a sum of strides of `view` minus a sum of strides of `other`.
    The search counts the strides of `other` down from its last byte, so that all terms are positive.
    """
    if view.end <= other.start or other.end <= view.start or not (view.byte_count and other.byte_count):
        return False
    if view.is_contiguous and other.is_contiguous:
        return True
    work[0] -= 1
    if view.steps is None or other.steps is None or work[0] < 0:
        return None
    reach = sum((count - 1) * stride for count, stride in other.steps)
    max_counts: dict[int, int] = {}
    for count, stride in (*view.steps, *other.steps):
        max_counts[stride] = max_counts.get(stride, 0) + count - 1
    strides = sorted(max_counts.items(), reverse=True)
    return _is_sum_of_strides(other.start + reach - view.start, strides, work)


def _is_sum_of_strides(distance: int, strides: list[tuple[int, int]], work: list[int]) -> bool | None:
    """Return whether `distance` is a sum of strides, each at most `max_count` times; None if `work` is used up."""
    (stride, max_count), *smaller_strides = strides
    if not smaller_strides:
        return distance % stride == 0 and 0 <= distance // stride <= max_count
    max_reach = sum(step * count for step, count in smaller_strides)
    first, last = max(-((max_reach - distance) // stride), 0), min(distance // stride, max_count)
    for times in range(first, last + 1):
        work[0] -= 1
        is_sum = None if work[0] < 0 else _is_sum_of_strides(distance - times * stride, smaller_strides, work)
        if is_sum is not False:
            return is_sum
    return False
