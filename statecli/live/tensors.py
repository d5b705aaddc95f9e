"""Read facts about a tensor, if possible without running the code of a tensor subclass."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_Lazy: type = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # torch lists it in no stub
#: Values of `__torch_dispatch__` in classes that do not override torch's dispatch.
_DEFAULT_DISPATCHES = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
_opaque_numbers = itertools.count()
#: Largest number of nodes of an autograd graph searched for the leaves of a tensor.
_MAX_NODES = 10_000
_opaque: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


@dataclass(frozen=True)
class TensorFacts:
    """Facts about a tensor: dtype and layout without the prefix `torch.`, sizes in elements and in bytes.

    `shape` is None for a lazy or nested tensor. `storage` is the identity of the storage among living tensors,
    `storage_bytes` its size in bytes; `storage_offset` is the tensor's first element in the storage.
    """

    dtype: str
    shape: tuple[int, ...] | None
    elements: int
    nbytes: int
    device: str
    requires_grad: bool
    layout: str
    storage: int | str
    storage_bytes: int | None
    storage_offset: int


def read_facts(tensor: torch.Tensor) -> TensorFacts:
    """Return all facts about `tensor` except values."""
    lazy = is_lazy(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        shape, elements = (None, 0) if lazy else _measure_extent(tensor)
        storages = _list_storages(tensor)
        strided = tensor.layout is torch.strided and shape is not None
        return TensorFacts(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=shape,
            elements=elements,
            nbytes=elements * tensor.element_size() if lazy or strided else _count_stored_bytes(tensor, elements),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            layout="nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch."),
            storage=_identify(tensor, storages),
            storage_bytes=0 if lazy else sum(storage.nbytes() for storage in storages) if storages else None,
            storage_offset=int(tensor.storage_offset()) if strided else 0,
        )


def _count_stored_bytes(tensor: torch.Tensor, elements: int) -> int:
    """Return the number of bytes that a sparse tensor takes in a file, including its indices."""
    try:
        return sum(part.numel() * part.element_size() for part in split_parts(tensor))
    except (RuntimeError, NotImplementedError):
        return elements * tensor.element_size()


def _measure_extent(tensor: torch.Tensor) -> tuple[tuple[int, ...] | None, int]:
    if not tensor.is_nested:
        return tuple(int(size) for size in tensor.shape), tensor.numel()
    return None, tensor.values().numel()


def describe_sharding(tensor: torch.Tensor) -> str | None:
    """Return `DTensor: local shape [8, 64], Shard(0)`, as for a pickled DTensor, or None for any other tensor."""
    kind = type(tensor)
    if kind.__name__ != "DTensor" or not kind.__module__.startswith("torch.distributed."):
        return None
    sharded_tensor: Any = tensor
    placements = (
        f"{type(placement).__name__}({placement.dim})" if hasattr(placement, "dim") else type(placement).__name__
        for placement in sharded_tensor.placements
    )
    return f"DTensor: local shape {list(sharded_tensor._local_tensor.shape)}, {', '.join(placements)}"


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is an uninitialized parameter or buffer of a lazy module."""
    return issubclass(type(tensor), _Lazy)


def identify_storage(tensor: torch.Tensor) -> int | str:
    """Return an identity of the memory of `tensor`. Tensors that share a storage have equal identities.

    The identity of a sparse tensor is the storage of its values; tensors without storage (mkldnn, some subclasses) get
    a number of their own.
    """
    return _identify(tensor, _list_storages(tensor))


def _identify(tensor: torch.Tensor, storages: Sequence[torch.UntypedStorage]) -> int | str:
    return _get_address(storages[0]) if storages else _number_opaque(tensor)


def _list_storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of the tensor's values and of a sparse tensor's indices, or [] if it has no storage."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return [part.untyped_storage() for part in split_parts(tensor)]
        except (RuntimeError, NotImplementedError):
            return []


def _get_address(store: torch.UntypedStorage) -> int:
    """Return the address of the memory, because torch.from_numpy creates another storage for the same memory.

    Without an address (empty, on meta, in a wrapper subclass), return the storage.
    """
    try:
        address = store.data_ptr() if store.nbytes() else 0
    except RuntimeError:
        address = 0
    return address or int(store._cdata)


def has_memory(store: torch.UntypedStorage) -> bool:
    """Return True if a storage has memory, is empty or is on meta. Storages of wrapper subclasses have only a size."""
    try:
        return store.nbytes() == 0 or store.device.type == "meta" or store.data_ptr() != 0
    except RuntimeError:  # torch's fake tensors refuse to give an address
        return False


def is_freed(tensor: torch.Tensor) -> bool:
    """Return True if torch would read beyond the storage of `tensor`, as after `untyped_storage().resize_(0)`.

    False for meta and lazy tensors, and for subclasses with a `__torch_dispatch__` that compute their values.
    """
    if is_lazy(tensor) or tensor.is_meta or type(tensor).__torch_dispatch__ not in _DEFAULT_DISPATCHES:
        return False
    try:
        return any(
            part.numel() > 0 and part.untyped_storage().nbytes() < _count_extent_bytes(part)
            for part in split_parts(tensor)
        )
    except (RuntimeError, NotImplementedError):
        return False


def may_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return False only if two tensors of a storage cannot share an element (neighbours, interleaved columns)."""
    if first.layout != torch.strided or second.layout != torch.strided or first.dtype != second.dtype:
        return True
    if first.is_quantized or not first.numel() or not second.numel():
        return True
    begins = first.storage_offset(), second.storage_offset()
    ends = [begin + _count_span(tensor) for begin, tensor in zip(begins, (first, second), strict=True)]
    if ends[0] <= begins[1] or ends[1] <= begins[0]:
        return False
    strides = [s for t in (first, second) for size, s in zip(t.shape, t.stride(), strict=True) if size > 1]
    step = math.gcd(*strides)
    return step == 0 or (begins[0] - begins[1]) % step == 0


def split_disjoint(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Split the tensors of one storage into groups that share no byte, such as the chunks of a fused weight."""
    extents = {name: _find_extent(tensor) for name, tensor in tensors.items()}
    groups: list[list[str]] = []
    group_end = 0.0
    for name in sorted(extents, key=extents.__getitem__):
        begin, end = extents[name]
        if not groups or begin >= group_end:
            groups.append([])
        groups[-1].append(name)
        group_end = max(group_end, end)
    positions = {name: position for position, name in enumerate(tensors)}
    return [sorted(group, key=positions.__getitem__) for group in groups]


def _find_extent(tensor: torch.Tensor) -> tuple[int, float]:
    """Return begin and end of a tensor in its storage, in bytes. The range is (0, infinity) if it is unknown."""
    with torch._C.DisableTorchFunctionSubclass():
        if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return 0, math.inf
        begin, size = int(tensor.storage_offset()), tensor.element_size()
        return begin * size, (begin + _count_span(tensor)) * size


def _count_span(tensor: torch.Tensor) -> int:
    """Return the number of elements of the storage from the first to the last element of the tensor."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _count_extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the storage's start to the tensor's last element, or 1 for a quantized tensor."""
    if tensor.is_quantized:
        return 1
    return int(tensor.storage_offset() + _count_span(tensor)) * tensor.element_size()


def split_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided parts of `tensor`, values before indices. A strided tensor is its only part."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [tensor]


def _number_opaque(tensor: torch.Tensor) -> str:
    entry = _opaque.get(id(tensor))
    if entry is None or entry[0]() is not tensor:
        entry = _opaque[id(tensor)] = (weakref.ref(tensor), f"opaque-{next(_opaque_numbers)}")
    return entry[1]


def get_grad_fn_name(tensor: torch.Tensor) -> str | None:
    """Return the operation that computed a non-leaf tensor (`MulBackward0`), or None for a leaf."""
    if is_lazy(tensor) or tensor.is_leaf or tensor.grad_fn is None:
        return None
    return type(tensor.grad_fn).__name__


def find_leaves(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the leaves that require grad in the autograd graph of a tensor, or None if the graph is too large."""
    nodes: list[Any] = [tensor.grad_fn]
    visited_nodes: dict[int, Any] = {}
    leaves: list[torch.Tensor] = []
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in visited_nodes:
            continue
        visited_nodes[id(node)] = node
        if len(visited_nodes) > _MAX_NODES:
            return None
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves
