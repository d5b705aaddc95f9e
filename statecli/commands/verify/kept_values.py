"""Read, copy and restore all values that a model keeps, registered or not.

A slot is a name in a registered module: an attribute, a buffer, a parameter. Attributes of the user's classes and
variables of their files are slots too, because a new process starts with the values of the file.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from statecli.commands.verify import check_builder
from statecli.live import tensor_bits
from statecli.live.installed_code import is_installed_file

#: Types whose values are compared.
_ATOM_TYPES = (bool, int, float, complex, str, bytes, type(None))
#: Attributes that torch sets in each module.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
#: Types of objects without values of a model.
_OPAQUE_TYPES = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CONTAINER_TYPES = (list, tuple, deque, dict, set)
#: Types of class attributes and file variables that are state, not code.
_SHARED_TYPES = (*_ATOM_TYPES, *_CONTAINER_TYPES, torch.Tensor, torch.Generator, random.Random)
#: Largest number of steps from an attribute to a compared value.
_MAX_DEPTH = 8
#: Largest number of values read in one attribute: more than a vocabulary has.
_MAX_VALUES = 200_000


class Slot(msgspec.Struct, frozen=True):
    """Place where a model keeps a value: an attribute, a buffer, a parameter, or a variable of the user's file.

    Attributes:
        owner_kind: "module", "class" or "file": where the name is looked up.
        path: Path of the module, or name of the class or of the file's module.
        name: Name of the value in the module, class or file.
    """

    owner_kind: str
    path: str
    name: str

    @property
    def fqn(self) -> str:
        """Full name: `block.name` in a module, `Net.name` in a class, `net.py:name` in a file."""
        if self.owner_kind == "class":
            return f"{self.path.rpartition(':')[2]}.{self.name}"
        if self.owner_kind == "file":
            return f"{os.path.basename(sys.modules[self.path].__file__ or '')}:{self.name}"
        return f"{self.path}.{self.name}".lstrip(".")


@dataclass(frozen=True, eq=False)
class _TensorValue:
    """Copy of a tensor's values. `values` is None if the tensor cannot be copied."""

    values: torch.Tensor | None
    requires_grad: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorValue):
            return False
        if self.values is None or other.values is None:
            return True
        return self.requires_grad == other.requires_grad and tensor_bits.is_same(self.values, other.values) is not False


#: Values of a slot as plain data, by their path inside the slot.
Parts = Mapping[str, object]
#: Values of an instance for comparisons, by slot.
Values = Mapping[Slot, Parts]


def list_differing_parts(first: Parts | None, second: Parts | None) -> list[str]:
    """Return the paths at which two encoded objects differ, and the paths that only one of the objects has."""
    first, second = first or {}, second or {}
    paths = dict.fromkeys((*first, *second))
    return [path for path in paths if path not in first or path not in second or first[path] != second[path]]


# --- slots ------------------------------------------------------------------------------------------------------------


def iter_slots(module: nn.Module) -> Iterator[tuple[Slot, object]]:
    """Yield each `Slot` of a model with its value. Registered parameters and buffers come last."""
    yield from iter_attributes(module)
    yield from _iter_shared_slots(module)
    for path, part in module.named_modules():
        for name, tensor in (*part._buffers.items(), *part._parameters.items()):
            if tensor is not None:
                yield Slot("module", path, name), tensor


def iter_attributes(module: nn.Module) -> Iterator[tuple[Slot, object]]:
    """Yield each attribute of the registered modules, except those that torch sets in each module."""
    for path, part in module.named_modules():
        for name, value in tuple(vars(part).items()):
            if name not in OWN_ATTRIBUTES and not isinstance(value, _OPAQUE_TYPES):
                yield Slot("module", path, name), value


def _iter_shared_slots(module: nn.Module) -> Iterator[tuple[Slot, object]]:
    """Yield the attributes of the user's classes, and the variables of the files that define these classes."""
    kinds = {kind: None for part in module.modules() for kind in type(part).__mro__}
    files = {}
    for kind in kinds:
        file = sys.modules.get(kind.__module__)
        filename = getattr(file, "__file__", None)
        if file is None or filename is None or is_installed_file(filename):
            continue
        files[kind.__module__] = file
        for name, value in tuple(vars(kind).items()):
            if isinstance(value, _SHARED_TYPES) and not name.startswith("__"):
                yield Slot("class", f"{kind.__module__}:{kind.__qualname__}", name), value
    for module_name, file in files.items():
        for name, value in tuple(vars(file).items()):
            if isinstance(value, _SHARED_TYPES) and not name.startswith("__"):
                yield Slot("file", module_name, name), value


def read_values(module: nn.Module, *, excluded_names: Iterable[str] = ()) -> dict[Slot, Parts]:
    """Read all values that a model keeps, except registered tensors named in `excluded_names`."""
    reader, left_out = _Reader(_list_registered(module)), frozenset(excluded_names)
    values: dict[Slot, Parts] = {}
    for slot, value in iter_slots(module):
        if isinstance(value, torch.Tensor) and id(value) in reader.registered:
            if slot.fqn not in left_out:
                values[slot] = {"": reader.encode_tensor(value)}
        else:
            values[slot] = reader.read(value)
    return values


def read_attributes(module: nn.Module) -> dict[Slot, Parts]:
    """Read all attributes of the registered modules, without the values of tensors."""
    reader = _Reader(_list_registered(module), copies_tensors=False)
    return {slot: reader.read(value) for slot, value in iter_attributes(module)}


def read_object(value: object) -> Parts:
    """Read any object, such as the state_dict of an optimizer, as a dict from paths to plain values."""
    return _Reader({}).read(value)


def _list_registered(module: nn.Module) -> dict[int, str]:
    """Map the `id` of each registered module and tensor to its name."""
    named = (
        *module.named_modules(remove_duplicate=False),
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {id(item): name for name, item in reversed(named)}


@dataclass
class _Reader:
    """Encoder of objects. Modules and tensors in `registered` (`id` to name) are encoded only by their names."""

    registered: Mapping[int, str]
    copies_tensors: bool = True
    tensors: list[torch.Tensor] = field(default_factory=list)
    _parts: dict[str, object] = field(default_factory=dict)
    _visited_ids: set[int] = field(default_factory=set)

    def read(self, value: object) -> dict[str, object]:
        self._parts, self._visited_ids = {}, set()
        self._add("", value, _MAX_DEPTH)
        return self._parts

    def encode_tensor(self, tensor: torch.Tensor) -> _TensorValue:
        self.tensors.append(tensor)
        # The copy of a non-leaf tensor is a leaf without a graph, so only the setting of a leaf belongs to the value.
        return _TensorValue(check_builder.copy_values(tensor), tensor.is_leaf and tensor.requires_grad)

    def _add(self, path: str, value: object, depth: int) -> None:
        if len(self._parts) > _MAX_VALUES:
            return
        if id(value) in self.registered:
            self._parts[path] = f"<{self.registered[id(value)]}>"
        elif isinstance(value, torch.Tensor):
            self._parts[path] = self.encode_tensor(value) if self.copies_tensors else "<tensor>"
        elif (encoded := _encode_leaf(value)) is not None:
            self._parts[path] = encoded
        elif isinstance(value, _OPAQUE_TYPES) or depth == 0 or id(value) in self._visited_ids:
            self._parts[path] = f"<{type(value).__name__}>"
        else:
            self._visited_ids.add(id(value))
            self._add_children(path, value, depth - 1)

    def _add_children(self, path: str, value: Any, depth: int) -> None:
        if is_generator(value):  # of numpy, because _encode_leaf handles the others
            value = value.bit_generator.state if hasattr(value, "bit_generator") else {0: value.get_state()}
        if isinstance(value, dict):
            children = [(f"[{key!r}]", value[key]) for key in tuple(value)]
        elif isinstance(value, (list, tuple, deque)):
            children = [(f"[{index}]", entry) for index, entry in enumerate(value)]  # len() may raise
        elif isinstance(value, (set, frozenset)):
            self._parts[path] = f"{{{', '.join(sorted(map(repr, value)))}}}"
            return
        elif isinstance(value, nn.Module):
            names = {key: entry for key, entry in vars(value).items() if key not in OWN_ATTRIBUTES}
            children = [
                (f".{key}", entry)
                for key, entry in {**names, **value._buffers, **value._parameters, **value._modules}.items()
            ]
        else:
            state = getattr(value, "__dict__", None)
            children = [(f".{key}", entry) for key, entry in state.items()] if type(state) is dict else []
        if not children:
            self._parts[path] = f"<{type(value).__name__}>"
        for step, child in children:
            self._add(f"{path}{step}", child, depth)


def _encode_leaf(value: Any) -> object:
    """Encode a value without parts, such as a number. Return None for a container or an unknown object."""
    if type(value) in _ATOM_TYPES:
        return repr(value)  # NaN equals itself
    if isinstance(value, torch.Generator):
        return _TensorValue(value.get_state(), requires_grad=False)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if kind == "numpy.ndarray":
        return (str(value.dtype), value.shape, value.tobytes())
    return repr(value) if kind == "itertools.count" or type(value).__module__ == "numpy" else None


def is_generator(value: object) -> bool:
    """Return True for a random number generator of torch, Python or numpy."""
    return isinstance(value, torch.Generator | random.Random) or type(value).__module__.startswith("numpy.random")


# --- copies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopiedValues:
    """Copies of a model's values. Inside the copies, registered modules and tensors are the objects of `source`.

    `refused` contains the slots whose value cannot be copied.
    """

    source: nn.Module
    values: Mapping[Slot, object]
    refused: frozenset[Slot]

    def put_into(self, module: nn.Module, slots: Iterable[Slot]) -> None:
        """Set `slots` of another instance to the copied values. Remove slots that the copied model does not have."""
        memo = _map_registered(self.source, module)
        for slot in slots:
            if slot in self.values:
                _set(module, slot, copy.deepcopy(self.values[slot], memo))
            elif slot not in self.refused:
                _remove(module, slot)


def copy_slots(module: nn.Module) -> CopiedValues:
    """Copy the values that a model keeps. Values that `copy.deepcopy` cannot copy are listed in `refused`."""
    registered = _list_registered(module)
    reader = _Reader(registered)
    memo: dict[int, Any] = dict(_map_registered(module, module))
    copies: dict[Slot, object] = {}
    refused_slots: set[Slot] = set()
    for slot, value in iter_slots(module):
        if isinstance(value, torch.Tensor) and id(value) in registered:
            copies[slot] = value.detach().clone().requires_grad_(value.requires_grad)
            continue
        reader.tensors.clear()
        reader.read(value)
        # Non-leaf tensors are cloned first, because copy.deepcopy refuses them.
        memo |= {id(tensor): tensor.detach().clone() for tensor in reader.tensors if not tensor.is_leaf}
        try:
            copies[slot] = copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001 - an object of the user may raise anything
            refused_slots.add(slot)
    return CopiedValues(module, copies, frozenset(refused_slots))


def _map_registered(source: nn.Module, target: nn.Module) -> dict[int, Any]:
    """Map the `id` of each registered module and tensor of `source` to the object with this name in `target`."""
    names = {name: key for key, name in _list_registered(source).items()}
    targets = (*target.named_modules(), *target.named_parameters(), *target.named_buffers())
    return {names[name]: item for name, item in targets if name in names}


def _find_holder(module: nn.Module, slot: Slot) -> dict[str, Any] | type | None:
    """Return the dict or class that holds the slot's value. Return None if the class or submodule does not exist."""
    if slot.owner_kind == "file":
        return vars(sys.modules[slot.path])
    if slot.owner_kind == "class":
        kinds = (kind for part in module.modules() for kind in type(part).__mro__)
        return next((kind for kind in kinds if f"{kind.__module__}:{kind.__qualname__}" == slot.path), None)
    try:
        part = module.get_submodule(slot.path)
    except AttributeError:
        return None
    holders = (part._parameters, part._buffers, vars(part))
    return next((holder for holder in holders if slot.name in holder), vars(part))


def _set(module: nn.Module, slot: Slot, value: object) -> None:
    holder = _find_holder(module, slot)
    if isinstance(holder, type):
        setattr(holder, slot.name, value)
    elif holder is not None:
        present = holder.get(slot.name)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and _write(present, value):
            return
        holder[slot.name] = value


def _write(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Write values in place, because other objects may refer to the tensor. Return False if that is impossible."""
    if not tensor.is_leaf or tensor.shape != values.shape or tensor.dtype != values.dtype:
        return False
    try:
        with torch.no_grad():
            tensor.copy_(values)
        tensor.requires_grad_(values.requires_grad)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _remove(module: nn.Module, slot: Slot) -> None:
    holder = _find_holder(module, slot)
    if isinstance(holder, type):
        if slot.name in vars(holder):
            delattr(holder, slot.name)
    elif holder is not None:
        holder.pop(slot.name, None)


@contextmanager
def keep_shared_values(module: nn.Module) -> Iterator[None]:
    """After the `with` block, restore attributes of the user's classes and variables of the user's files."""
    before = {}
    for slot, value in _iter_shared_slots(module):
        with suppress(Exception):
            before[slot] = (value, copy.deepcopy(value), read_object(value))
    try:
        with check_builder.keep_class_attributes(module):
            yield
    finally:
        present = dict(_iter_shared_slots(module))
        for slot in present.keys() - before.keys():
            _remove(module, slot)
        for slot, (value, copied_value, parts) in before.items():
            has_changed = slot not in present or list_differing_parts(parts, read_object(present[slot]))
            if has_changed and not (present.get(slot) is value and _refill(value, copied_value)):
                _set(module, slot, copied_value)


def _refill(value: Any, copied_value: Any) -> bool:
    """Refill a list, dict or set in place, because other files may refer to it. Return False for other types."""
    if type(value) not in (dict, list, set):
        return False
    value.clear()
    value.extend(copied_value) if type(value) is list else value.update(copied_value)
    return True
