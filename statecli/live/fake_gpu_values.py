"""Fake a CUDA device with values: tensors claim to be on the device, but their data is on the CPU.

Code that reads values (`nonzero()`, `.item()`) cannot run under FakeTensorMode. A `FakeGpuTensor` runs each operator on
its CPU data, and the results claim to be on the fake device. There is no autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from statecli.live.device_rules import (
    ANY_DEVICE_OPERATORS,
    DeviceWatch,
    DeviceWatchMode,
    get_operator_name,
    list_tensors,
)
from statecli.live.fake_gpu import DEVICE, MoveRecord, patch_torch


def _get_strides(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout is not torch.strided:
        return {}
    return {"strides": tensor.stride(), "storage_offset": tensor.storage_offset()}


class FakeGpuTensor(torch.Tensor):
    """Tensor that claims to be on `DEVICE`, but runs each operator on `cpu_data`."""

    cpu_data: torch.Tensor

    @staticmethod
    def __new__(cls, cpu_data: torch.Tensor) -> FakeGpuTensor:
        """Wrap `cpu_data`. A change of the wrapper changes `cpu_data`, and vice versa."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu_data.size(),
            **_get_strides(cpu_data),
            dtype=cpu_data.dtype,
            layout=cpu_data.layout,
            device=DEVICE,
            requires_grad=False,
        )
        self.cpu_data = cpu_data
        return self

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        """Run an operator outside `use_fake_gpu_with_values`, where no watch checks devices."""
        return _run_on_cpu(func, args, kwargs or {})


class _ValuesWatchMode(DeviceWatchMode):  # type: ignore[no-untyped-call]
    def run_operator(self, func: object, args: object, kwargs: object) -> Any:
        return _run_on_cpu(func, args, kwargs)


@contextlib.contextmanager
def use_fake_gpu_with_values(watch: DeviceWatch) -> Iterator[MoveRecord]:
    """Inside the block, fake a GPU with values: tensors may claim to be on the GPU, and `watch` checks operators."""
    with _ValuesWatchMode(watch), patch_torch() as record, torch.no_grad():
        yield record


def _run_on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on the CPU data. Results that are arguments (in place, out=) stay the same objects."""
    tensors = list_tensors(*args, *kwargs.values())
    is_on_device = _is_result_on_device(func, args, kwargs, tensors)
    wrappers = {id(tensor.cpu_data): tensor for tensor in tensors if isinstance(tensor, FakeGpuTensor)}
    given_ids = set(map(id, tensors))
    args, kwargs = tree_map_only(FakeGpuTensor, lambda tensor: tensor.cpu_data, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, _replace_fake_device, (args, kwargs))
    out = _compute(func, args, kwargs)

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in wrappers:
            return _check_shape_unchanged(wrappers[id(tensor)], func)
        return FakeGpuTensor(tensor) if is_on_device and id(tensor) not in given_ids else tensor

    if get_operator_name(func) == "_pack_padded_sequence":
        return wrap(out[0]), out[1]  # the batch sizes stay on the CPU on CUDA too
    return tree_map_only(torch.Tensor, wrap, out)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operator in float64 if the CPU has no kernel of its dtype, because only devices matter here."""
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        tensors = list_tensors(*args, *kwargs.values())
        if "not implemented for '" not in str(error) or func._schema.is_mutable or not tensors:
            raise
    dtype = tensors[0].dtype
    args, kwargs = tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.dtype is dtype else tensor, (args, kwargs)
    )
    out = func(*args, **kwargs)
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float64 else tensor, out
    )


def _replace_fake_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == DEVICE.type else device


def _is_result_on_device(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
    """Return True if the operator's results belong on `DEVICE`, by its `device` argument or its input tensors."""
    requested_device = kwargs.get("device")
    if requested_device is not None:
        return torch.device(requested_device).type == DEVICE.type
    if get_operator_name(func) == "device_put":
        return torch.device(args[1]).type == DEVICE.type
    deciding_tensors = tensors[:1] if get_operator_name(func) in ANY_DEVICE_OPERATORS else tensors
    return any(isinstance(tensor, FakeGpuTensor) for tensor in deciding_tensors)


def _check_shape_unchanged(wrapper: FakeGpuTensor, func: object) -> FakeGpuTensor:
    if wrapper.size() != wrapper.cpu_data.size() or (
        wrapper.cpu_data.layout is torch.strided and wrapper.stride() != wrapper.cpu_data.stride()
    ):
        raise NotImplementedError(
            f"{get_operator_name(func)} changes the shape of a tensor in place, which a fake CUDA device cannot do"
        )
    return wrapper
