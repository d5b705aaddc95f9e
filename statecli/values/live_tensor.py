"""A live torch tensor as the same strided view that a file's tensor gives.

torch is never imported here: a live tensor means that it has been.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from statecli.core.errors import UnreadableError
from statecli.values.elements import Array
from statecli.values.read import Affine, Strided

#: Bytes of a tensor on another device that are copied to memory at a time.
PIECE = 64 << 20


@contextmanager
def _asking(tensor: Any) -> Iterator[None]:
    """Turns whatever a tensor answers with into one reason; a subclass's own `__torch_function__` is not asked."""
    torch: Any = sys.modules["torch"]
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    except UnreadableError:
        raise
    except Exception as why:  # a subclass answers with code of its own, which may raise anything
        raise UnreadableError(f"a {type(tensor).__name__} gives no access to its values: {first_line(why)}") from why


def first_line(why: Exception) -> str:
    """What an exception says, without the pages that torch adds."""
    line = (str(why).strip().splitlines() or [type(why).__name__])[0]
    return line.split(". ")[0][:200]


def strided_of(tensor: Any) -> Strided:
    """A view of a strided CPU tensor's own storage, nothing copied.

    Raises `UnreadableError` where there is none: fake tensors and wrappers.
    """
    with _asking(tensor):
        return Strided(
            memory=_storage_of(tensor),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            conjugate=bool(tensor.is_conj()),
            negative=bool(tensor.is_neg()),
            affine=_affine(tensor) if tensor.is_quantized else None,
        )


def _storage_of(tensor: Any) -> Array:
    """The whole storage of a CPU tensor as bytes. It stays valid as long as the tensor is not resized."""
    torch: Any = sys.modules["torch"]
    from statecli.live.tensors import has_memory, is_freed  # imports torch

    storage = tensor.untyped_storage()
    if is_freed(tensor):
        raise UnreadableError(f"its storage was freed: it holds {storage.nbytes():,} bytes")
    if storage.device.type != "cpu" or not has_memory(storage):
        raise UnreadableError(f"a {type(tensor).__name__} holds no data of its own")
    memory: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory


def _affine(tensor: Any) -> Affine:
    if "per_channel" not in str(tensor.qscheme()):
        return Affine(np.array([tensor.q_scale()]), np.array([float(tensor.q_zero_point())]))
    scales = tensor.q_per_channel_scales().detach().cpu().double().numpy()
    zeros = tensor.q_per_channel_zero_points().detach().cpu().double().numpy()
    return Affine(scales, zeros, int(tensor.q_per_channel_axis()))


def stored_values(tensor: Any) -> Any:
    """What a sparse or mkldnn tensor stores, as a strided tensor; any other tensor itself. Detached.

    Raises `UnreadableError` where the tensor does not let itself be asked: lazy parameters, wrappers.
    """
    torch: Any = sys.modules["torch"]
    if torch.nn.parameter.is_lazy(tensor):
        raise UnreadableError("Attempted to use an uninitialized parameter: it has no values before the first forward")
    with _asking(tensor):
        layout = str(tensor.layout).removeprefix("torch.")
        if layout == "_mkldnn":
            return tensor.detach().to_dense()
        if layout == "sparse_coo":
            return tensor.detach()._values()
        return tensor.detach().values() if layout.startswith("sparse_") else tensor.detach()


def distinct_of(tensor: Any) -> tuple[Any, int]:
    """A tensor without its expanded dimensions, and how many times each of its elements counts."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return tensor, times


def pieces(tensor: Any) -> Iterator[Any]:
    """A tensor on any device as CPU tensors of at most `PIECE` bytes each, one after another."""
    if tensor.numel() * tensor.element_size() <= PIECE or not tensor.dim():
        with _asking(tensor):
            there = tensor.cpu()
        yield there
        return
    axis = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    half = tensor.shape[axis] // 2
    yield from pieces(tensor.narrow(axis, 0, half))
    yield from pieces(tensor.narrow(axis, half, tensor.shape[axis] - half))
