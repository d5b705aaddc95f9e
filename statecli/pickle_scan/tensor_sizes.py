"""Count the elements of tensors and shapes made by a pickle's calls, and the elements of its storages.

A tensor of stride 0 has 2**40 elements over 4 bytes of storage. This costs nothing until a call writes the elements out
or iterates over them. Nothing here is computed from the bytes of a storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Global, Obj, Persistent, Value

#: No size is counted beyond this.
MAX_SIZE = 2**62
#: Calls in calls that are followed for a number or a shape, and values in a container for tensors.
_MAX_WRAPPERS, _MAX_NESTING = 8, 4
#: Numbers of a shape that count as a step.
_DIMENSIONS_PER_STEP = 16
#: Digits of a number in text that are read.
_MAX_DIGITS = 30
#: Functions that make a tensor over a storage: (storage, offset, size, stride, …).
_STORAGE_FUNCTIONS = compile_on_use(r"torch\._utils\._rebuild_(?:tensor(?:_v\d+)?|qtensor)")
#: What gives its first argument back, or a tensor of as many elements.
_SAME_SIZE_FUNCTIONS = compile_on_use(
    r"torch\._utils\._rebuild_(?:parameter|parameter_with_state|device_tensor_\w+|xla_tensor)"
    r"|torch\.nn\.parameter\.(?:Parameter|Buffer)|torch\.jit\._pickle\.restore_type_tag"
)
#: What makes a tensor of all that is among its arguments.
_PART_FUNCTIONS = compile_on_use(
    r"torch\._utils\._rebuild_(?:sparse|nested)_tensor|torch\.nested\.[\w.]+\._rebuild_njt"
    r"|torch\.(?:cuda\.)?sparse\.\w+Tensor"
)
_TENSOR_CLASS = compile_on_use(r"torch(?:\.cuda|\.storage)?\.\w*(?:Storage|Tensor)")
_SHAPE_CLASSES = frozenset(["torch.Size", "builtins.tuple", "builtins.list"])
_COPYREG_FUNCTIONS = frozenset(["copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor"])
_NUMPY_NUMBER = compile_on_use(r"numpy\.(?:u?int|u?long|u?short|u?byte|bool)\w*")
_INTEGER_CODE = compile_on_use(r"([<>|=]?)([iub?])(\d*)\Z")

#: The plain name of a global.
PlainName: TypeAlias = Callable[[Global], str]


class TensorSize(NamedTuple):
    """Elements of a tensor, how many of them its storages hold, and the key of the first storage."""

    elements: int
    held: int
    key: Value


NO_TENSOR = TensorSize(0, 0, None)


class TensorSizes:
    """Tensors of one pickle. Call `add_call` for each call in the order of the pickle, so that arguments are known.

    All methods that read a container raise OutOfSteps.
    """

    def __init__(self, plain: PlainName, steps: Steps) -> None:
        self._plain = plain
        self._steps = steps
        self._sizes: dict[int, TensorSize] = {}

    def get_name(self, value: Value) -> str:
        """Return the plain name of the callee of this object; "" for values not made by a call."""
        return self._plain(value.cls) if type(value) is Obj and type(value.cls) is Global else ""

    def add_call(self, call: Obj) -> None:
        """Remember the size of the tensor made by a call."""
        size = self.measure_call(call)
        if size.elements:
            self._sizes[id(call)] = size

    def get_size(self, value: Value) -> TensorSize:
        """Return the size of a tensor; NO_TENSOR for other values."""
        if type(value) is not Obj:
            return NO_TENSOR
        return self._sizes.get(id(value)) or self._measure_over_storage(value, self.get_name(value))

    def measure_call(self, call: Obj) -> TensorSize:
        """Return the size of the tensor made by a call, if the sizes of its arguments are known."""
        name, args = self.get_name(call), call.args
        if name in _COPYREG_FUNCTIONS and args:
            return self.measure_call(resolve_copyreg_call(self._plain, call))
        if name.startswith("torch._tensor._rebuild_from_type") and len(args) > 2 and type(args[2]) is tuple:
            return self.measure_call(Obj(args[0], args[2])) if args[0] is not call.cls else NO_TENSOR
        if _SAME_SIZE_FUNCTIONS.fullmatch(name):
            return self.get_size(args[0]) if args else NO_TENSOR
        if _PART_FUNCTIONS.fullmatch(name):
            parts = [self.get_size(tensor) for tensor in self.iter_tensors(args)]
            key = parts[0].key if parts else None
            elements = min(sum(part.elements for part in parts), MAX_SIZE)
            return TensorSize(elements, sum(part.held for part in parts), key)
        return self._measure_over_storage(call, name)

    def iter_tensors(self, value: Value, depth: int = 0) -> Iterator[Value]:
        """Yield each tensor among these values and in their containers."""
        if type(value) is Obj:
            if self.get_size(value).elements:
                yield value
        elif type(value) in (list, tuple, dict) and depth < _MAX_NESTING:
            self._steps.take(Budget.FLOW, len(value))
            for inner in value.values() if type(value) is dict else value:
                yield from self.iter_tensors(inner, depth + 1)

    def _measure_over_storage(self, value: Obj, name: str) -> TensorSize:
        if _STORAGE_FUNCTIONS.fullmatch(name) and len(value.args) > 2:
            return self._measure_geometry(value.args[0], value.args[2])
        if _TENSOR_CLASS.fullmatch(name):
            if type(value.state) is tuple and len(value.state) in (4, 5):
                return self._measure_geometry(value.state[0], value.state[2])
            first = value.args[0] if value.args else None
            if type(first) is Obj and name.endswith("Tensor") and self._sizes.get(id(first)):
                return self._sizes[id(first)]
            size = self.count_elements(first) if self.is_shape(first) else self.count_elements(value.args)
            return TensorSize(size, 0, None) if value.args else NO_TENSOR
        return NO_TENSOR

    def _measure_geometry(self, storage: Value, shape: Value) -> TensorSize:
        pid = storage.pid if type(storage) is Persistent and type(storage.pid) is tuple else ()
        stored = pid[4] if len(pid) > 4 and type(pid[4]) is int else 0
        return TensorSize(self.count_elements(shape), stored, pid[2] if len(pid) > 2 else None)

    # Shapes and numbers.

    def is_shape(self, value: Value) -> bool:
        """Return True for a torch.Size made by a call."""
        value = self._resolve_call(value)
        return self.get_name(value) == "torch.Size"

    def count_elements(self, shape: Value) -> int:
        """Return the elements of a shape; MAX_SIZE if a number in the shape is computed, 0 for other values."""
        shape = self.get_dimensions(shape)
        lengths = [self.get_number(length) for length in shape if type(length) is not str]
        if len(lengths) < len(shape) or any(length is None or length < 0 for length in lengths):
            return 0
        return min(math.prod(lengths), MAX_SIZE)  # type: ignore[arg-type]  # None was looked for

    def count_reached_elements(self, offset: Value, shape: Value, strides: Value) -> int:
        """Return the elements needed in a storage for a tensor of this geometry."""
        if not self.count_elements(shape):
            return 0
        sizes = [self.get_number(size) or 0 for size in self.get_dimensions(shape)]
        steps = [self.get_number(step) or 0 for step in self.get_dimensions(strides)]
        if len(steps) != len(sizes):
            return min((self.get_number(offset) or 0) + math.prod(sizes), MAX_SIZE)
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        return max(0, min((self.get_number(offset) or 0) + last + 1, MAX_SIZE))

    def get_dimensions(self, shape: Value) -> tuple[Value, ...]:
        """Return the numbers of a shape: a number, a tuple, a list or a torch.Size."""
        for _ in range(_MAX_WRAPPERS):
            if type(shape) in (list, tuple):
                self._steps.take(Budget.FLOW, len(shape) // _DIMENSIONS_PER_STEP)
                return tuple(shape)
            call = self._resolve_call(shape)
            if self.get_name(call) not in _SHAPE_CLASSES:
                break
            shape = call.args[-1] if call.args else ()
        return (shape,)

    def get_number(self, value: Value) -> int | None:
        """Return an integer; MAX_SIZE for a computed integer, None for other values."""
        for _ in range(_MAX_WRAPPERS):
            if type(value) in (int, bool):
                return int(value)
            if type(value) is Persistent and type(value.pid) is tuple and value.pid:
                value = value.pid[0]  # what torch gives for one of a tar archive
                continue
            if type(value) is not Obj:
                return None
            value = self._resolve_call(value)
            name = self.get_name(value)
            if name.endswith(".multiarray.scalar") and name.startswith("numpy."):
                return _decode_scalar(value)
            if name != "builtins.int" and not _NUMPY_NUMBER.fullmatch(name):
                size = self.get_size(value)
                return MAX_SIZE if size.elements == 1 else None  # the element of a tensor
            value = value.args[0] if value.args else 0
            if type(value) is float:
                return int(min(value, MAX_SIZE)) if value == value else 0
            if type(value) in (str, bytes):
                return _parse_integer(value)
        return MAX_SIZE

    def _resolve_call(self, value: Value) -> Value:
        """Return the call made by a function of copyreg, or the value."""
        return (
            resolve_copyreg_call(self._plain, value)
            if self.get_name(value) in _COPYREG_FUNCTIONS and value.args
            else value
        )


def resolve_copyreg_call(plain: PlainName, call: Obj) -> Obj:
    """Return the call made by a function of copyreg of its arguments."""
    cls, rest = call.args[0], call.args[1:]
    if plain(call.cls).endswith("_ex__"):
        rest = rest[0] if rest and type(rest[0]) is tuple else ()
    elif plain(call.cls).endswith("_reconstructor"):
        rest = rest[1:2]
    return Obj(cls, rest) if cls is not call.cls else Obj(None, ())


def element_bytes(name: str) -> int:
    """Return the bytes of an element of a storage or tensor class."""
    kind = STORAGE_DTYPES.get(name.replace("Tensor", "Storage"), "uint8" if name == "UntypedStorage" else "float32")
    return ELEMENT_BITS.get(kind, 32) // 8


def _parse_integer(text: str | bytes) -> int:
    """Return the integer in a text, as `int` reads the text."""
    if len(text) > _MAX_DIGITS:
        return MAX_SIZE
    try:
        return int(text)
    except ValueError:
        return 0


def _decode_scalar(call: Obj) -> int | None:
    """Return the integer in a numpy scalar."""
    dtype, data = call.args if len(call.args) == 2 else (None, None)
    code = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    match = _INTEGER_CODE.fullmatch(code) if type(code) is str else None
    if match is None:
        return None
    if type(data) is Obj and data.args and type(data.args[0]) is str:
        data = data.args[0].encode("latin-1", "replace")
    if type(data) is not bytes:
        return MAX_SIZE
    state = dtype.state if type(dtype) is Obj else None
    order = state[1] if type(state) is tuple and len(state) > 1 else match[1]
    return int.from_bytes(data, "big" if order == ">" else "little", signed=match[2] == "i")
