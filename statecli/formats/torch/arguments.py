"""Checked arguments of torch's rebuild calls: dtypes, devices, shapes and flags."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import MalformedError
from statecli.pickles.graph import as_mapping, get_name
from statecli.pickles.nodes import Obj

#: Maximum number of dimensions, because a pickle can claim any number; torch's limit is 64 for most operations.
MAX_DIMENSIONS = 1024
MAX_ELEMENTS = 2**63 - 1
#: Maximum length of a device's name (`privateuseone:127`) in characters, because every row repeats it.
MAX_DEVICE = 64


class StridedCall(msgspec.Struct, frozen=True):
    """Arguments of `_rebuild_tensor` and `_rebuild_tensor_v2`. torch writes at least the first four."""

    storage: Any
    offset: Any
    size: Any
    stride: Any
    requires_grad: Any = False
    hooks: Any = None
    flags: Any = None


class ParameterCall(msgspec.Struct, frozen=True):
    """Arguments of `_rebuild_parameter` and `_rebuild_parameter_with_state`. torch writes at least the first two."""

    data: Any
    requires_grad: Any = None
    hooks: Any = None
    state: Any = None


def require_arguments(args: tuple[Any, ...], count: int, fqn: str) -> tuple[Any, ...]:
    """Return the first `count` arguments of a rebuild call. Raises MalformedError for fewer."""
    if len(args) < count:
        raise MalformedError(
            f"{fqn}: the call that rebuilds this tensor has {len(args)} arguments, but torch writes at least {count}"
        )
    return args[:count]


def decode_dtype(node: object, fqn: str) -> str:
    """Return the name of a dtype without `torch.`. Raises MalformedError for any other value."""
    name = get_name(node)
    dtype = name.removeprefix("torch.")
    if not name.startswith("torch.") or dtype not in ELEMENT_BITS:
        raise MalformedError(f"{fqn}: unknown dtype {truncate_value(name or node)}")
    return dtype


def decode_device(node: object, fqn: str) -> str | None:
    """Return the device name that a pickle stores as text or as torch.device("cuda", 0), or None for other values."""
    if type(node) is str:
        return check_device(node, fqn)
    if type(node) is Obj and get_name(node.cls) == "torch.device" and node.args and type(node.args[0]) is str:
        index = node.args[1] if len(node.args) > 1 else None
        return check_device(f"{node.args[0]}:{index}" if type(index) is int else node.args[0], fqn)
    return None


def check_device(device: str, fqn: str) -> str:
    """Return the name of a device. Raises MalformedError for more than MAX_DEVICE characters."""
    if len(device) > MAX_DEVICE:
        raise MalformedError(
            f"{fqn}: its device name has {len(device):,} characters, more than statecli's limit of {MAX_DEVICE}"
        )
    return device


def decode_ints(node: object, label: str, fqn: str) -> tuple[int, ...]:
    """Return a shape or strides. Raises MalformedError for values that are not from 0 to MAX_ELEMENTS."""
    if type(node) is Obj and get_name(node.cls) == "torch.Size":
        node = node.args[0] if node.args else ()
    if type(node) is list:
        node = tuple(node)
    if type(node) is not tuple:
        raise MalformedError(f"{fqn}: its {label} is {truncate_value(node)}, not a tuple of sizes")
    if len(node) > MAX_DIMENSIONS:
        raise MalformedError(
            f"{fqn}: its {label} has {len(node)} dimensions, more than statecli's limit of {MAX_DIMENSIONS}"
        )
    for n in node:
        if type(n) is not int or not 0 <= n <= MAX_ELEMENTS:
            raise MalformedError(
                f"{fqn}: its {label} contains {truncate_value(n)}; expected integers from 0 to 2^63 - 1"
            )
    return node


def count_elements(shape: tuple[int, ...], fqn: str) -> int:
    """Return the number of elements of a shape. Raises MalformedError for more than MAX_ELEMENTS."""
    elements = prod(shape)
    if elements > MAX_ELEMENTS:
        raise MalformedError(f"{fqn}: shape {truncate_value(list(shape))} is impossible: 2^63 elements or more")
    return elements


def compute_last(shape: tuple[int, ...], strides: tuple[int, ...], fqn: str) -> int:
    """Return the distance from the first to the last element, in elements."""
    if len(shape) != len(strides):
        raise MalformedError(f"{fqn}: its shape has {len(shape)} sizes, but there are {len(strides)} strides")
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class LazyFlags(msgspec.Struct, frozen=True):
    """Whether the stored values must be conjugated, and whether they must be negated."""

    conjugate: bool
    negative: bool


def decode_lazy_flags(node: object, fqn: str) -> LazyFlags:
    """Return the conjugate and negative flags in a tensor's metadata. TorchScript wraps them in `restore_type_tag`.

    torch sets a flag if its key exists, whatever the value is, even for a key of bytes. It only writes True.
    """
    if type(node) is Obj and get_name(node.cls) == "torch.jit._pickle.restore_type_tag" and node.args:
        node = node.args[0]
    flags = as_mapping(node)
    if node is not None and flags is None:
        raise MalformedError(f"{fqn}: the metadata of this tensor is not a dict")
    for key, value in (flags or {}).items():
        if type(key) is not str or (key in ("conj", "neg") and value is not True):
            raise MalformedError(f"{fqn}: the metadata of this tensor has an entry that torch does not write")
    return LazyFlags("conj" in (flags or ()), "neg" in (flags or ()))


def truncate_value(value: object) -> str:
    """Format a scalar or a short list. Describe other values by type, because their repr can be exponentially long."""
    if type(value) is list and len(value) <= 8 and all(type(v) is int for v in value):
        return "[" + ", ".join(truncate_value(v) for v in value) + "]"
    if type(value) is int and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    if type(value) in (int, float, bool) or value is None:
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return f"a {type(value).__name__}"
