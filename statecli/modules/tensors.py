"""What a tensor says of itself, read without running the code of a tensor subclass where torch allows it."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch

from statecli.state import Kind

_Lazy: type = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # torch lists it in no stub
_opaque_numbers = itertools.count()
_opaque: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


@dataclass(frozen=True)
class Facts:
    """dtype and layout in torch's words without `torch.`; `shape` None for a lazy tensor; sizes in elements, bytes.

    `storage` is the identity of the storage among living tensors, `storage_bytes` its size in bytes;
    `storage_offset` is where the tensor begins in it, in elements.
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


def facts(tensor: torch.Tensor) -> Facts:
    """All that the table shows of `tensor`; its values are not touched."""
    lazy = is_lazy(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        shape = None if lazy else tuple(int(size) for size in tensor.shape)
        elements = 0 if lazy else tensor.numel()
        key, size = storage(tensor)
        return Facts(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=shape,
            elements=elements,
            nbytes=elements * tensor.element_size(),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            layout=str(tensor.layout).removeprefix("torch."),
            storage=key,
            storage_bytes=0 if lazy else size,
            storage_offset=tensor.storage_offset() if tensor.layout is torch.strided and not lazy else 0,
        )


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is an uninitialized parameter or buffer of a lazy module."""
    return issubclass(type(tensor), _Lazy)


def storage(tensor: torch.Tensor) -> tuple[int | str, int | None]:
    """Identity and size in bytes of the memory behind `tensor`.

    A sparse tensor is known by the storage of its values and sized with its indices; what has no storage at all
    (mkldnn, some subclasses) by a number of its own.
    """
    with torch._C.DisableTorchFunctionSubclass():
        try:
            parts = _parts(tensor)
            stores = [part.untyped_storage() for part in parts]
            return stores[0]._cdata, sum(store.nbytes() for store in stores)
        except (RuntimeError, NotImplementedError):
            return _number(tensor), None


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [tensor]


def _number(tensor: torch.Tensor) -> str:
    found = _opaque.get(id(tensor))
    if found is None or found[0]() is not tensor:
        found = _opaque[id(tensor)] = (weakref.ref(tensor), f"opaque-{next(_opaque_numbers)}")
    return found[1]


def derived_by(tensor: torch.Tensor) -> str | None:
    """The operation that computed a non-leaf tensor (`MulBackward0`), None for a leaf."""
    if is_lazy(tensor) or tensor.is_leaf or tensor.grad_fn is None:
        return None
    return type(tensor.grad_fn).__name__


def kind_of(is_parameter: bool) -> Kind:
    """The kind of a registered tensor."""
    return Kind.PARAMETER if is_parameter else Kind.BUFFER
