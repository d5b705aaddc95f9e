"""Snapshots of tensors: whether a forward changed the values of a tensor since then."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from statecli.live import tensor_bits
from statecli.live.tensors import identify_storage

#: Number of values of a parameter that are compared to see whether forward changed it.
SAMPLED_VALUES = 4096


def is_strided(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor with strided layout that is not nested."""
    return tensor is not None and tensor.layout is torch.strided and not tensor.is_nested


class ParameterMark:
    """Snapshot of a trained parameter before forward: storage address, version counter, and sampled values.

    A write through `.data` does not raise the version counter, and shows only in the values.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place, self._sample = self._read_mark()

    def _read_mark(self) -> tuple[Any, torch.Tensor | None]:
        tensor = self._tensor
        place = identify_storage(tensor), None if tensor.is_inference() else tensor._version
        if type(tensor) is not nn.Parameter or not is_strided(tensor):
            return place, None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return place, tensor.detach().reshape(-1)[:: tensor.numel() // SAMPLED_VALUES or 1].clone()

    def find_changes(self) -> tuple[bool, bool]:
        """Return two bools: whether the parameter was written to since the snapshot, and whether its values differ."""
        place, sample = self._read_mark()
        has_samples = self._sample is not None and sample is not None
        has_changed = has_samples and tensor_bits.is_same(self._sample, sample) is False  # type: ignore[arg-type]
        return has_changed or place != self._place, has_changed


def copy_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor without its autograd graph."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().clone()
