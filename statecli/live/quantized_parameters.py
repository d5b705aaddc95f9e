"""Read dtype, shape and inner tensors of the quantized parameters of a live model (bitsandbytes and torchao).

The attributes of the objects are read, and no method but torchao's `__tensor_flatten__` is called.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import nn

from statecli.live.object_attributes import get_own_dict
from statecli.live.walk import RegisteredName, UnregisteredTensor, walk_registered

#: Largest number of elements of a `weight_shape` tensor, which holds the sizes of a weight.
_MAX_SIZES = 8


class InnerTensor(msgspec.Struct, frozen=True):
    """A tensor inside a tensor subclass, under the name of its attribute."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class QuantizedParameter(msgspec.Struct, frozen=True):
    """A quantized parameter, read from an object of a library's class.

    Attributes:
        dtype: Type of the quantized codes; "" for the tensor's dtype.
        shape: Shape of the weight.
        inner: The tensors inside a subclass without elements of its own; () if its attributes are listed.
        holder: Name of the object with the other tensors of the weight.
    """

    dtype: str
    shape: tuple[int, ...]
    inner: tuple[InnerTensor, ...] = ()
    holder: str = ""


def read_quantized_parameters(module: nn.Module) -> dict[str, QuantizedParameter]:
    """Return the quantized parameters by name."""
    parameters = {entry.fqn: _read_parameter(entry) for entry in walk_registered(module)}
    return {name: parameter for name, parameter in parameters.items() if parameter is not None}


def read_sizes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Map the name of each small `weight_shape` tensor (registered by compressed-tensors) to the tensor's values."""
    sizes = {}
    for entry in walk_registered(module):
        tensor = entry.tensor
        is_readable = tensor is not None and tensor.device.type == "cpu" and tensor.dtype in (torch.int32, torch.int64)
        if tensor is not None and is_readable and entry.attribute == "weight_shape" and tensor.numel() <= _MAX_SIZES:
            sizes[entry.fqn] = tuple(map(int, tensor.detach().reshape(-1).tolist()))
    return sizes


def find_holding_tensor(unregistered: UnregisteredTensor) -> torch.Tensor | None:
    """Return the registered tensor that has the unregistered tensor in an attribute (`weight.quant_state.absmax`)."""
    first = unregistered.steps[0]
    is_attribute = len(unregistered.steps) > 1 and issubclass(type(first.value), torch.Tensor)
    return first.value if is_attribute else None


def has_lost_class(unregistered: UnregisteredTensor) -> bool:
    """Return True if the tensor belongs to a bitsandbytes parameter whose class was lost in pickling."""
    holder = find_holding_tensor(unregistered)
    return type(holder) is nn.Parameter and _is_of_library(type(unregistered.owner), "bitsandbytes")


def _read_parameter(entry: RegisteredName) -> QuantizedParameter | None:
    tensor = entry.tensor
    if tensor is None:
        return None
    if _is_of_library(type(tensor), "bitsandbytes") or _is_of_library(type(entry.owner), "bitsandbytes"):
        return _read_bitsandbytes(entry, tensor)
    return _read_torchao(tensor) if _is_of_library(type(tensor), "torchao") else None


def _is_of_library(kind: type, library: str) -> bool:
    return kind.__module__.partition(".")[0] == library


def _read_bitsandbytes(entry: RegisteredName, tensor: torch.Tensor) -> QuantizedParameter | None:
    """Read a parameter of bitsandbytes: after quantization, `Params4bit` has a `quant_state`, `Int8Params` has `SCB`.

    The first forward moves `SCB` to the attribute `state` of the module. A pickled `Int8Params` becomes a `Parameter`.
    """
    attributes = get_own_dict(tensor)
    state = attributes.get("quant_state")
    if state is not None:
        state_attributes = get_own_dict(state)
        shape, kind = state_attributes.get("shape"), state_attributes.get("quant_type")
        if isinstance(shape, tuple) and isinstance(kind, str):
            return QuantizedParameter(kind, tuple(map(int, shape)), holder=entry.fqn)
    if tensor.dtype is not torch.int8:
        return None
    if isinstance(attributes.get("SCB"), torch.Tensor):
        return QuantizedParameter("", tuple(tensor.shape), holder=entry.fqn)
    of_module = get_own_dict(get_own_dict(entry.owner).get("state")).get("SCB")
    holder = f"{entry.fqn.removesuffix(entry.attribute)}state"
    return QuantizedParameter("", tuple(tensor.shape), holder=holder) if isinstance(of_module, torch.Tensor) else None


def _read_torchao(tensor: torch.Tensor) -> QuantizedParameter | None:
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    try:
        inner = {name: getattr(tensor, name) for name in flatten()[0]}
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None
    parts = tuple(
        InnerTensor(
            name,
            str(inner_tensor.dtype).removeprefix("torch."),
            tuple(inner_tensor.shape),
            inner_tensor.numel() * inner_tensor.element_size(),
        )
        for name, inner_tensor in inner.items()
        if type(inner_tensor) is torch.Tensor
    )
    if len(parts) < len(inner) or not parts:
        return None
    target = get_own_dict(tensor).get("target_dtype")
    dtype = str(target).removeprefix("torch.") if isinstance(target, torch.dtype) else _name_codes(parts, tensor)
    return QuantizedParameter(dtype, tuple(tensor.shape), parts)


def _name_codes(parts: tuple[InnerTensor, ...], tensor: torch.Tensor) -> str:
    """Return the dtype of the quantized codes, or "packed" if one element holds several codes."""
    codes = next((part for part in parts if part.name == "qdata"), parts[0])
    return codes.dtype if math.prod(codes.shape) == tensor.numel() else "packed"
