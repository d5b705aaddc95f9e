"""How many elements the tensors and shapes have that a pickle's calls make, and how many of them its storages hold.

A tensor of stride 0 has 2**40 elements over 4 bytes of storage. That costs nothing until a call writes the elements
out or goes through them one by one. Nothing here is computed from a storage's bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from statecli.core.dtypes import BITS, STORAGE_DTYPES
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.machine import Global, Obj, Persistent, Value

#: No size is counted beyond this.
MAX_SIZE = 2**62
#: Calls in calls that are followed for a number or a shape, and values in a container for tensors.
_MAX_WRAPPERS, _MAX_NESTING = 8, 4
#: Numbers of a shape that count as a step.
_DIMENSIONS_OF_STEP = 16
#: Digits of a number in text that are read.
_MAX_DIGITS = 30
#: Functions that make a tensor over a storage: (storage, offset, size, stride, …).
_OVER_STORAGE = re.compile(r"torch\._utils\._rebuild_(?:tensor(?:_v\d+)?|qtensor)")
#: What gives its first argument back, or a tensor of as many elements.
_SAME_ELEMENTS = re.compile(
    r"torch\._utils\._rebuild_(?:parameter|parameter_with_state|device_tensor_\w+|xla_tensor)"
    r"|torch\.nn\.parameter\.(?:Parameter|Buffer)|torch\.jit\._pickle\.restore_type_tag"
)
#: What makes a tensor of all that is among its arguments.
_OF_PARTS = re.compile(
    r"torch\._utils\._rebuild_(?:sparse|nested)_tensor|torch\.nested\.[\w.]+\._rebuild_njt"
    r"|torch\.(?:cuda\.)?sparse\.\w+Tensor"
)
_CLASS = re.compile(r"torch(?:\.cuda|\.storage)?\.\w*(?:Storage|Tensor)")
_SIZES = frozenset(["torch.Size", "builtins.tuple", "builtins.list"])
_MAKERS = frozenset(["copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor"])
_NUMPY_NUMBER = re.compile(r"numpy\.(?:u?int|u?long|u?short|u?byte|bool)\w*")
_INTEGER_CODE = re.compile(r"([<>|=]?)([iub?])(\d*)\Z")

#: The plain name of a global.
Name: TypeAlias = Callable[[Global], str]


class TensorSize(NamedTuple):
    """Elements of a tensor, how many of them its storages hold, and the key of the first storage."""

    elements: int
    held: int
    key: Value


NO_TENSOR = TensorSize(0, 0, None)


class TensorSizes:
    """The tensors of one pickle. `note` each call in the order of the pickle, so that its arguments are known.

    All methods that read a container raise OutOfSteps.
    """

    def __init__(self, plain: Name, steps: Steps) -> None:
        self._plain = plain
        self._steps = steps
        self._sizes: dict[int, TensorSize] = {}

    def name_of(self, value: Value) -> str:
        """The plain name of what makes this object; "" for other values."""
        return self._plain(value.cls) if type(value) is Obj and type(value.cls) is Global else ""

    def note(self, call: Obj) -> None:
        """Remember the size of the tensor that a call makes of others."""
        size = self.measure(call)
        if size.elements:
            self._sizes[id(call)] = size

    def of(self, value: Value) -> TensorSize:
        """The size of a tensor; NO_TENSOR for other values."""
        if type(value) is not Obj:
            return NO_TENSOR
        return self._sizes.get(id(value)) or self._over_storage(value, self.name_of(value))

    def measure(self, call: Obj) -> TensorSize:
        """As `of`, of a call whose arguments are known."""
        name, args = self.name_of(call), call.args
        if name in _MAKERS and args:
            return self.measure(made_by(self._plain, call))
        if name.startswith("torch._tensor._rebuild_from_type") and len(args) > 2 and type(args[2]) is tuple:
            return self.measure(Obj(args[0], args[2])) if args[0] is not call.cls else NO_TENSOR
        if _SAME_ELEMENTS.fullmatch(name):
            return self.of(args[0]) if args else NO_TENSOR
        if _OF_PARTS.fullmatch(name):
            parts = [self.of(tensor) for tensor in self.within(args)]
            key = parts[0].key if parts else None
            elements = min(sum(part.elements for part in parts), MAX_SIZE)
            return TensorSize(elements, sum(part.held for part in parts), key)
        return self._over_storage(call, name)

    def within(self, value: Value, depth: int = 0) -> Iterator[Value]:
        """Each tensor among these values and in the containers among them."""
        if type(value) is Obj:
            if self.of(value).elements:
                yield value
        elif type(value) in (list, tuple, dict) and depth < _MAX_NESTING:
            self._steps.take(Budget.FLOW, len(value))
            for inner in value.values() if type(value) is dict else value:
                yield from self.within(inner, depth + 1)

    def _over_storage(self, value: Obj, name: str) -> TensorSize:
        if _OVER_STORAGE.fullmatch(name) and len(value.args) > 2:
            return self._geometry(value.args[0], value.args[2])
        if _CLASS.fullmatch(name):
            if type(value.state) is tuple and len(value.state) in (4, 5):
                return self._geometry(value.state[0], value.state[2])
            first = value.args[0] if value.args else None
            if type(first) is Obj and name.endswith("Tensor") and self._sizes.get(id(first)):
                return self._sizes[id(first)]
            size = self.elements(first) if self.is_shape(first) else self.elements(value.args)
            return TensorSize(size, 0, None) if value.args else NO_TENSOR
        return NO_TENSOR

    def _geometry(self, storage: Value, shape: Value) -> TensorSize:
        pid = storage.pid if type(storage) is Persistent and type(storage.pid) is tuple else ()
        held = pid[4] if len(pid) > 4 and type(pid[4]) is int else 0
        return TensorSize(self.elements(shape), held, pid[2] if len(pid) > 2 else None)

    # Shapes and numbers.

    def is_shape(self, value: Value) -> bool:
        """Whether this is a torch.Size, by a call."""
        value = self._made(value)
        return self.name_of(value) == "torch.Size"

    def elements(self, shape: Value) -> int:
        """Number of elements of this shape; MAX_SIZE where a number in it is computed, 0 where it is no shape."""
        shape = self.dimensions(shape)
        lengths = [self.number(length) for length in shape if type(length) is not str]
        if len(lengths) < len(shape) or any(length is None or length < 0 for length in lengths):
            return 0
        return min(math.prod(lengths), MAX_SIZE)  # type: ignore[arg-type]  # None was looked for

    def reach(self, offset: Value, shape: Value, strides: Value) -> int:
        """Number of elements that a storage needs for a tensor of this geometry."""
        if not self.elements(shape):
            return 0
        sizes = [self.number(size) or 0 for size in self.dimensions(shape)]
        steps = [self.number(step) or 0 for step in self.dimensions(strides)]
        if len(steps) != len(sizes):
            return min((self.number(offset) or 0) + math.prod(sizes), MAX_SIZE)
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        return max(0, min((self.number(offset) or 0) + last + 1, MAX_SIZE))

    def dimensions(self, shape: Value) -> tuple[Value, ...]:
        """The numbers of a shape: a number, a tuple, a list or a torch.Size of them."""
        for _ in range(_MAX_WRAPPERS):
            if type(shape) in (list, tuple):
                self._steps.take(Budget.FLOW, len(shape) // _DIMENSIONS_OF_STEP)
                return tuple(shape)
            made = self._made(shape)
            if self.name_of(made) not in _SIZES:
                break
            shape = made.args[-1] if made.args else ()
        return (shape,)

    def number(self, value: Value) -> int | None:
        """An integer; MAX_SIZE for one that is computed of others, None for what is no integer."""
        for _ in range(_MAX_WRAPPERS):
            if type(value) in (int, bool):
                return int(value)
            if type(value) is Persistent and type(value.pid) is tuple and value.pid:
                value = value.pid[0]  # what torch gives for one of a tar archive
                continue
            if type(value) is not Obj:
                return None
            value = self._made(value)
            name = self.name_of(value)
            if name.endswith(".multiarray.scalar") and name.startswith("numpy."):
                return _scalar(value)
            if name != "builtins.int" and not _NUMPY_NUMBER.fullmatch(name):
                size = self.of(value)
                return MAX_SIZE if size.elements == 1 else None  # the element of a tensor
            value = value.args[0] if value.args else 0
            if type(value) is float:
                return int(min(value, MAX_SIZE)) if value == value else 0
            if type(value) in (str, bytes):
                return _parsed(value)
        return MAX_SIZE

    def _made(self, value: Value) -> Value:
        """The call that a function of pickle's own makes."""
        return made_by(self._plain, value) if self.name_of(value) in _MAKERS and value.args else value


def made_by(plain: Name, call: Obj) -> Obj:
    """The call that a function of copyreg makes of its arguments."""
    cls, rest = call.args[0], call.args[1:]
    if plain(call.cls).endswith("_ex__"):
        rest = rest[0] if rest and type(rest[0]) is tuple else ()
    elif plain(call.cls).endswith("_reconstructor"):
        rest = rest[1:2]
    return Obj(cls, rest) if cls is not call.cls else Obj(None, ())


def item_bytes(name: str) -> int:
    """Bytes of an element of a class of storages or tensors."""
    kind = STORAGE_DTYPES.get(name.replace("Tensor", "Storage"), "uint8" if name == "UntypedStorage" else "float32")
    return BITS.get(kind, 32) // 8


def _parsed(text: str | bytes) -> int:
    """The integer in a text, as `int` reads it."""
    if len(text) > _MAX_DIGITS:
        return MAX_SIZE
    try:
        return int(text)
    except ValueError:
        return 0


def _scalar(call: Obj) -> int | None:
    """The integer that a scalar of numpy is."""
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
