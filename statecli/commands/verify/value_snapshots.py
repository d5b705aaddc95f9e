"""Snapshots of tensors: whether a step or a forward changed the values of a tensor since then."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from statecli.live import tensor_bits
from statecli.live.tensors import identify_storage

#: Number of values of a parameter that are compared first to see whether a step updated it.
SAMPLED_VALUES = 4096


def is_strided(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor with strided layout that is not nested."""
    return tensor is not None and tensor.layout is torch.strided and not tensor.is_nested


class ValuesBefore:
    """Values of a tensor before the optimizer step, or only a sample if the tensor is large."""

    def __init__(self, tensor: torch.Tensor, *, sample: bool) -> None:
        self._tensor, self._stride = tensor, 1
        if sample and type(tensor) is nn.Parameter and tensor.is_contiguous() and is_strided(grad := tensor.grad):
            stride = tensor.numel() // SAMPLED_VALUES or 1
            if bool(grad.reshape(-1)[::stride].any()):
                self._stride = stride
        self._values = copy_values(self._read_values())

    def _read_values(self) -> torch.Tensor:
        return self._tensor if self._stride == 1 else self._tensor.detach().reshape(-1)[:: self._stride]

    def was_updated(self) -> bool | None:
        """Return True if the values changed. Return None if unknown, for example if only a sample is equal."""
        is_unchanged = tensor_bits.is_same(self._values, self._read_values())
        return None if is_unchanged is None or (is_unchanged and self._stride > 1) else not is_unchanged


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
