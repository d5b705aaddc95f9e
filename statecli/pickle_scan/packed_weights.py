"""Check the numbers from which torch's C++ code packs weights, such as the strides and groups in a state.

Packing divides by strides and groups, and reads a sparse matrix by unchecked indices. So a state is valid if a
convolution can have each number; classes not listed here are unknown. Sources: aten/src/ATen/native/quantized of torch
2.13 (cpu/conv_serialization.h, cpu/qconv_prepack.cpp).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickles.nodes import Global, Obj, Persistent, Value

#: Prefix of the names that TorchScript gives to C++ classes.
CPP_CLASS_PREFIX = "__torch__.torch.classes."
#: C++ classes whose states are checked. OpaqueObject unpickles its state, and other classes are unknown.
CPP_CLASSES = (
    r"__torch__\.torch\.classes\.(?:quantized\.(?:LinearPackedParamsBase|EmbeddingPackedParamsBase"
    r"|Conv[123]dPackedParamsBase)|rnn\.CellParamsBase|\w+\.\w*OpContext)"
)
_CPP_CLASS = compile_on_use(CPP_CLASSES, re.ASCII)
_LINEAR_CLASSES = ("quantized.LinearPackedParamsBase", "quantized.EmbeddingPackedParamsBase", "rnn.CellParamsBase")
_CONVOLUTION_CLASS = compile_on_use(r"quantized\.Conv[123]dPackedParamsBase", re.ASCII)
#: Modules whose state C++ packs, by the module of the class. Case is ignored, because the loader ignores it.
_CONVOLUTION_MODULE = compile_on_use(
    r"(?:__torch__\.)?torch\.(?:ao\.)?nn\.(?:intrinsic\.)?quantized\.(?:dynamic\.)?modules\.conv\w*"
    r"(?:\.___torch_mangle_\d+)?\.\w+",
    re.ASCII | re.IGNORECASE,
)
#: Positions of the numbers in the state of such a module.
_STRIDE, _PADDING, _DILATION, _OUTPUT_PADDING, _GROUPS = 3, 4, 5, 7, 8
#: Attributes with a number that packing divides by -> position of the number in the state.
DIVISOR_POSITIONS = {"stride": _STRIDE, "dilation": _DILATION, "groups": _GROUPS}
_MIN_STATE_LENGTH = 12
#: Limit of each number, because no convolution that C++ can pack has a larger number.
_NUMBER_LIMIT = 2**20
#: Versions of the state that C++ writes: with numbers in a list, or in a tensor of 16-bit integers, as torch 2.13
#: writes frozen modules.
_VERSION, _VERSION_OF_TENSORS = 3, "2"
TYPE_TAG = "torch.jit._pickle.restore_type_tag"
#: Functions of TorchScript that return their first argument.
_TAG_FUNCTIONS = frozenset(
    [TYPE_TAG, *(f"torch.jit._pickle.build_{kind}list" for kind in ("tensor", "int", "double", "bool"))]
)
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
#: Function that returns the bytes of a storage by its key; None for a storage that is large or missing.
ReadStorage: TypeAlias = Callable[[str], "bytes | None"]


def strip_tags(value: Value) -> Value:
    """Remove the calls with which TorchScript records a type, and return the value inside."""
    while type(value) is Obj and type(value.cls) is Global and value.args and value.cls.qualified in _TAG_FUNCTIONS:
        value = value.args[0]
    return value


def is_cpp_class(name: str) -> bool:
    """Return True if TorchScript gives this name to a C++ class."""
    return name.startswith(CPP_CLASS_PREFIX)


def is_known_class(name: str) -> bool:
    """Return True for a C++ class whose states are checked."""
    return _CPP_CLASS.fullmatch(name) is not None


def is_convolution(name: str) -> bool:
    """Return True for the name of a quantized convolution module, whose weights are packed during the load."""
    return _CONVOLUTION_MODULE.fullmatch(name) is not None


def defines_convolution(record: str) -> bool:
    """Return True if the TorchScript record of this name has the code of quantized convolutions."""
    path = record.partition("/code/")[2].removesuffix(".py")
    return _CONVOLUTION_MODULE.fullmatch(f"{path.replace('/', '.')}.Conv") is not None


def is_convolution_state(state: Value) -> bool:
    """Return True if the state of a quantized convolution has valid strides, paddings, dilations and groups."""
    if type(state) is not tuple or len(state) < _MIN_STATE_LENGTH:
        return False
    least = {_STRIDE: 1, _PADDING: 0, _DILATION: 1, _OUTPUT_PADDING: 0, _GROUPS: 1}
    return all(_has_valid_numbers(state[place], number) for place, number in least.items())


def is_packed_state(name: str, state: Value, read_storage: ReadStorage) -> bool:
    """Return True if torch packs the state of this C++ class from valid numbers, or checks the numbers itself.

    `read_storage` gives the bytes of a small storage by its key.
    """
    name = name.removeprefix(CPP_CLASS_PREFIX)
    if name in _LINEAR_CLASSES:
        return True
    if name.endswith("OpContext"):
        return type(state) is tuple and all(map(_is_context_part, state))
    if _CONVOLUTION_CLASS.fullmatch(name) is None or type(state) is not tuple or len(state) != 3:
        return False
    numbers = _read_numbers(state[0], strip_tags(state[1]), read_storage)
    if not numbers or type(numbers[0]) is not int:
        return False
    dimensions = numbers[0]
    if not 1 <= dimensions <= 3 or len(numbers) != 4 * dimensions + 3:
        return False
    parts = [numbers[1 + n * dimensions : 1 + (n + 1) * dimensions] for n in range(4)]
    least = (1, 0, 1, 0)  # of strides, paddings, dilations, paddings of the output
    return (
        all(map(_has_valid_numbers, parts, least))
        and _has_valid_numbers(numbers[-2], 1)
        and _has_valid_numbers(numbers[-1], 0)
    )


def _read_numbers(version: Value, parts: Value, read_storage: ReadStorage) -> list[Any]:
    """Return the numbers of a convolution from a list or from a tensor's storage; [] if they cannot be read."""
    if type(parts) is not list or not parts:
        return []
    if version == _VERSION:
        return parts
    tensor = parts[0]
    if version != _VERSION_OF_TENSORS or type(tensor) is not Obj or type(tensor.cls) is not Global:
        return []
    if tensor.cls.qualified != _REBUILD_TENSOR or len(tensor.args) < 4 or type(tensor.args[0]) is not Persistent:
        return []
    storage, offset, shape, stride = tensor.args[:4]
    pid = storage.pid if type(storage.pid) is tuple and len(storage.pid) == 5 else (None,) * 5
    if type(pid[1]) is not Global or pid[1].qualified != "torch.ShortStorage" or type(pid[2]) is not str:
        return []
    if offset != 0 or stride != (1,) or type(shape) is not tuple or shape != (pid[4],) or type(pid[4]) is not int:
        return []
    data = read_storage(pid[2])
    if data is None or len(data) != 2 * pid[4]:
        return []
    return list(struct.unpack(f"<{pid[4]}h", data))


def _is_context_part(value: Value) -> bool:
    """Return True for a valid value in an xnnpack or mkldnn context: no number in it is out of range."""
    numbers = strip_tags(value)
    if type(numbers) is list:
        return all(type(number) is int and 0 <= number < _NUMBER_LIMIT for number in numbers)
    return type(numbers) is not int or 1 <= numbers < _NUMBER_LIMIT


def _has_valid_numbers(value: Value, least: int) -> bool:
    values = strip_tags(value)
    values = values if type(values) in (tuple, list) else (values,)
    return 0 < len(values) <= 3 and all(type(number) is int and least <= number < _NUMBER_LIMIT for number in values)
