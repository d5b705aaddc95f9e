"""Metadata of a tensor in a torch.export archive (JSON): the call that rebuilds the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.formats.torch.reading import Reading
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.nodes import Global, Obj, Persistent

#: Dtypes by their number: ScalarType in torch/_export/serde/schema.py.
DTYPES: dict[int, str] = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
_STRIDED = 7
_REBUILD = Global("torch._utils", "_rebuild_tensor_v3", 0)
REBUILD_EMPTY = Global("torch._utils", "_rebuild_wrapper_subclass", 0)
_BYTES = Global("torch", "UntypedStorage", 0)


def refuse_other_type(meta: dict[str, Any], first: dict[str, Any], fqn: str, name: str) -> None:
    """Refuse a dtype or device other than that of the record's first tensor, because torch uses the first for all."""
    for key in ("dtype", "device"):
        if meta.get(key) != first.get(key):
            raise MalformedError(
                f"{fqn}: its {key} differs from the {key} of the first tensor in record {quoting.quote(name)}, but "
                f"torch.export.load uses the first {key} for both tensors"
            )


def build_node(meta: dict[str, Any], key: str, reading: Reading, fqn: str) -> Obj:
    """Build the call that rebuilds the tensor, so that the tensor gets the same checks as in a pickle."""
    dtype, layout, grad = meta.get("dtype"), meta.get("layout"), meta.get("requires_grad")
    if type(dtype) is not int or dtype not in DTYPES:
        raise MalformedError(f"{fqn}: its dtype is {quoting.value(dtype)}, which torch 2.13 never writes")
    if layout != _STRIDED:
        raise MalformedError(f"{fqn}: its layout is {quoting.value(layout)}, not {_STRIDED} (strided)")
    sizes, strides = _read_ints(meta.get("sizes"), "sizes", fqn), _read_ints(meta.get("strides"), "strides", fqn)
    offset, device = _read_int(meta.get("storage_offset"), "storage_offset", fqn), _read_device(meta.get("device"), fqn)
    storage = reading.decoder.storages.places.get(key)
    length = storage.length if storage is not None else 0
    if storage is not None and not length and 0 not in sizes:
        # A fake tensor: torch exports it without bytes, and loads zeros.
        name = Global("torch", DTYPES[dtype], 0)
        return Obj(REBUILD_EMPTY, (None, name, sizes, strides, offset, None, device, grad))
    return build_call(DTYPES[dtype], key, length, device, offset, sizes, strides, grad)


def build_call(
    dtype: str, key: str, length: int, device: str, offset: object, sizes: object, strides: object, grad: object = False
) -> Obj:
    """Build the call of torch that rebuilds a strided tensor from the storage `key` of `length` bytes."""
    storage = Persistent(("storage", _BYTES, key, device, length))
    return Obj(_REBUILD, (storage, offset, sizes, strides, grad, None, Global("torch", dtype, 0)))


def _read_ints(node: object, label: str, fqn: str) -> tuple[int, ...]:
    if type(node) is not list:
        raise MalformedError(f"{fqn}: its {label} are not a list but {quoting.value(node)}")
    return tuple(_read_int(child, label, fqn) for child in node)


def _read_int(node: object, label: str, fqn: str) -> int:
    number = node.get("as_int") if type(node) is dict else None
    if type(number) is not int:
        description = "a symbol" if type(node) is dict and "as_expr" in node else quoting.value(node)
        raise MalformedError(f"{fqn}: its {label} must contain integers, but contains {description}")
    return number


def _read_device(node: object, fqn: str) -> str:
    kind, index = (node.get("type"), node.get("index")) if type(node) is dict else (None, None)
    if type(kind) is not str:
        raise MalformedError(f"{fqn}: its device is {quoting.value(node)}, not a JSON object with the key type")
    return f"{kind}:{index}" if type(index) is int else kind


def describe_difference(tensor: Tensor, meta: Mapping[str, Any]) -> str | None:
    """Describe how a tensor differs from its metadata in the graph. Return None if no difference is known."""
    if tensor.shape is None or tensor.dtype is None:
        return None
    sizes = meta.get("sizes")
    traced_shape = (
        tuple(size.get("as_int") if type(size) is dict else None for size in sizes) if type(sizes) is list else ()
    )
    if tensor.shape != traced_shape:
        return f"its sizes are {list(tensor.shape)}, but the graph was traced for {list(traced_shape)}"
    dtype = meta.get("dtype")
    if type(dtype) is int and DTYPES.get(dtype) != tensor.dtype:
        return f"its dtype is {tensor.dtype}, but the graph was traced for {DTYPES.get(dtype, dtype)}"
    return None
