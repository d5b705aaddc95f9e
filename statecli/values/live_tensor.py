"""Read live torch tensors as strided views, like tensors in files.

This module never imports torch: if there is a live tensor, torch is already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from statecli import live
from statecli.core.errors import UnreadableError
from statecli.values.elements import Array
from statecli.values.read import Affine, Strided

if TYPE_CHECKING:
    import torch

#: Maximum size in bytes of a piece that is copied from another device to memory.
PIECE_BYTES = 64 << 20


@contextmanager
def _translate_errors(tensor: torch.Tensor) -> Iterator[None]:
    """Convert any error in the block to `UnreadableError`. Disable `__torch_function__` of subclasses in the block."""
    torch: Any = sys.modules["torch"]
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    except UnreadableError:
        raise
    except Exception as error:  # a subclass runs its own code, which may raise any exception
        raise UnreadableError(
            f"the values of a {type(tensor).__name__} cannot be read: {format_first_line(error)}"
        ) from error


def format_first_line(error: Exception) -> str:
    """Return the first sentence of an exception's message, at most 200 characters: torch's messages may fill pages."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". ")[0][:200]


def build_view(tensor: torch.Tensor) -> Strided:
    """Return a view of a strided CPU tensor's own storage, without a copy.

    Raises `UnreadableError` for a tensor without memory of its own (fake tensor, wrapper).
    """
    with _translate_errors(tensor):
        return Strided(
            memory=_get_storage_bytes(tensor),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            conjugate=bool(tensor.is_conj()),
            negative=bool(tensor.is_neg()),
            affine=_build_affine(tensor) if tensor.is_quantized else None,
        )


def _get_storage_bytes(tensor: torch.Tensor) -> Array:
    """Return the whole storage of a CPU tensor as bytes, valid until the tensor is resized."""
    torch: Any = sys.modules["torch"]
    storage = tensor.untyped_storage()
    if live.tensors.is_freed(tensor):
        raise UnreadableError(f"its storage was freed and has only {storage.nbytes():,} bytes")
    if storage.device.type != "cpu" or not live.tensors.has_memory(storage):
        raise UnreadableError(f"a {type(tensor).__name__} has no data in memory")
    memory: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory


def _build_affine(tensor: torch.Tensor) -> Affine:
    if "per_channel" not in str(tensor.qscheme()):
        return Affine(np.array([tensor.q_scale()], np.float32), np.array([float(tensor.q_zero_point())]))
    scales = tensor.q_per_channel_scales().detach().cpu().numpy()
    zeros = tensor.q_per_channel_zero_points().detach().cpu().double().numpy()
    return Affine(scales, zeros, int(tensor.q_per_channel_axis()))


def get_stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, or a strided tensor of the stored values of a sparse or mkldnn tensor.

    Raises `UnreadableError` for unreadable tensors: lazy parameters, wrappers.
    """
    torch: Any = sys.modules["torch"]
    if torch.nn.parameter.is_lazy(tensor):
        raise UnreadableError("Attempted to use an uninitialized parameter: it has no values before the first forward")
    with _translate_errors(tensor):
        layout = str(tensor.layout).removeprefix("torch.")
        if layout == "_mkldnn":
            return tensor.detach().to_dense()
        if layout == "sparse_coo":
            return tensor.detach()._values()
        return tensor.detach().values() if layout.startswith("sparse_") else tensor.detach()


class UnexpandedTensor(NamedTuple):
    """Tensor without expanded dimensions, and how many times each element counts."""

    tensor: torch.Tensor
    times: int


def skip_expanded(tensor: torch.Tensor) -> UnexpandedTensor:
    """Return the tensor with size 1 in its expanded dimensions."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return UnexpandedTensor(tensor, times)


def iter_cpu_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor on any device as CPU tensors of at most `PIECE_BYTES`, in order."""
    if tensor.numel() * tensor.element_size() <= PIECE_BYTES or not tensor.dim():
        with _translate_errors(tensor):
            copy = tensor.cpu()
        yield copy
        return
    axis = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    half = tensor.shape[axis] // 2
    yield from iter_cpu_pieces(tensor.narrow(axis, 0, half))
    yield from iter_cpu_pieces(tensor.narrow(axis, half, tensor.shape[axis] - half))
