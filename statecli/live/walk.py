"""Find every tensor that Python code can reach from a module, under each of its names, without running user code.

The walk reads the places where Python keeps objects: instance dicts, slots, list and dict items, closure cells. It
never calls `getattr`, `isinstance`, `==`, `hash`, `len` or `repr` on the objects of the model, so no proxy, property or
overridden method runs. Each object is opened once, breadth first, so each tensor gets its shortest name.

Not crossed: `__globals__`, `.grad`, frames, threads, loggers, weak references, autograd nodes, torch operators,
`torch.fx` graphs, the state of `fully_shard`, classes, Python modules, enum members, properties: no user expects a move
to reach through them.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import itertools
import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from statecli.core.errors import ModelError

#: Largest number of steps from the root, because longer names are useless. Deeper objects are reported as not searched.
MAX_DEPTH = 1_000
#: Largest number of opened objects: more of them are a data set that the model holds. A tokenizer's vocabulary counts
#: as one object.
MAX_OBJECTS = 5_000_000
#: Largest number of registered names. Modules shared at 40 levels have 2^40 names.
MAX_NAMES = 1_000_000

_mro_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__
_Result = TypeVar("_Result")


def type_ids(kinds: Iterable[Any]) -> frozenset[int]:
    """Return the ids of the types. A comparison of ids runs no code of the types."""
    return frozenset(id(kind) for kind in kinds)


def cache_by_type(compute: Callable[[type], _Result]) -> Callable[[type], _Result]:
    """Return a function that caches the result of `compute` for each type, as long as the type exists.

    A result that refers to the type, such as a slot descriptor, keeps the type alive.
    """
    results: dict[int, tuple[weakref.ref[type], _Result]] = {}

    def look_up(kind: type) -> _Result:
        key = id(kind)
        entry = results.get(key)
        if entry is None:
            reference = weakref.ref(kind, lambda _: results.pop(key, None))
            entry = results[key] = (reference, compute(kind))
        return entry[1]

    return look_up


# Types are distinguished by id: a metaclass may define __eq__ and __hash__, and they are the user's code.
_ATOM_TYPES = type_ids(
    [
        type(None),
        type(...),
        type(NotImplemented),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        range,
        memoryview,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        torch.Generator,
        torch.UntypedStorage,
        torch.TypedStorage,
        types.ModuleType,
        types.FrameType,
        types.TracebackType,
        types.CodeType,
        types.GeneratorType,
        types.CoroutineType,
        types.AsyncGeneratorType,
        weakref.ref,
        weakref.ProxyType,
        weakref.CallableProxyType,
    ]
)
_CLOSED_TYPES = type_ids(
    [
        type,
        types.ModuleType,
        property,
        functools.cached_property,
        enum.Enum,
        weakref.ref,
        weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary,
        weakref.WeakSet,
        threading.Thread,
        threading.local,
        logging.Logger,
        logging.Handler,
        logging.LoggerAdapter,
        torch.autograd.function.FunctionCtx,
        torch.fx.Graph,
        torch.fx.Node,
        torch._C.ScriptMethod,  # holds the Python module from which a ScriptModule was made
        torch._ops.OperatorBase,
        torch._ops.OpOverloadPacket,
        torch._ops._OpNamespace,
        torch._ops._Ops,
    ]
)
#: Modules of torch whose objects hold the shards of parameters, and buffers for their exchange.
_SHARDING_MODULES = (
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed._composable",
    "torch.distributed.device_mesh",
)
#: Built-in types that only hold other objects, without a name of their own: iterators, views, cells.
_TRANSPARENT_TYPES = type_ids(
    [
        *map(type, (iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed([]))),
        *map(type, (reversed({}), iter(collections.deque()), {}.keys(), {}.values(), {}.items())),
        *(types.MappingProxyType, types.CellType, zip, map, filter, enumerate, reversed, slice),
        *(type(functools.lru_cache(len)), operator.methodcaller, staticmethod, classmethod),
        *(kind for kind in vars(itertools).values() if type(kind) is type),
    ]
)
_CONTAINER_TYPES = type_ids([dict, collections.OrderedDict, list, tuple, set, frozenset, collections.deque])
#: Types whose repr is Python's own and short enough for a name.
_LITERAL_TYPES = type_ids([str, int, bool, float, bytes, type(None)])
#: Attributes that abstract classes and namedtuples add to class bodies.
_GENERATED_ATTRIBUTES = frozenset(["_abc_impl", "_fields", "_field_defaults"])
_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"])


class WalkStep(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Step of the walk from an object to an object that it holds. Tensor names are built from chains of steps.

    `gc=False`, here and below: nothing in a model refers to a step, so no cycle passes through one.
    """

    parent: WalkStep | None
    label: str
    value: Any
    depth: int = 0
    #: How the holder refers to the value: attribute, hidden, item, key, closure, default, argument, class, registered.
    #: A hidden attribute has the name of a registered object: Python reads the attribute, but state_dict and moves
    #: ignore it.
    how: str = "attribute"

    def name(self) -> str:
        """Return the path from the root in Python's notation: `anchors[0]`, `cache['cos']`, `blocks[2].weight`."""
        return "".join(step.label for step in self.list_steps()).lstrip(".")

    def list_steps(self) -> list[WalkStep]:
        """Return the steps from the root to this step, without the root."""
        steps: list[WalkStep] = []
        step: WalkStep | None = self
        while step is not None and step.parent is not None:
            steps.append(step)
            step = step.parent
        return steps[::-1]


class RegisteredName(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Name of a registered parameter or buffer. `tensor` is None after `register_parameter(name, None)`.

    `key` is the name in `state_dict()`; `fqn` equals `key` unless two tensors have the same key.
    """

    fqn: str
    key: str
    tensor: torch.Tensor | None
    is_parameter: bool
    persistent: bool
    owner: nn.Module
    attribute: str


class UnregisteredTensor(msgspec.Struct, frozen=True, eq=False):
    """Tensor found under a name that no module has registered.

    `owner` is the nearest registered module and `steps` lead from `owner` to the tensor; the first step is always an
    attribute or a class attribute of `owner`. Sorting by `rank` gives owners in the order of `modules()`.
    """

    fqn: str
    tensor: torch.Tensor
    owner: nn.Module
    rank: int
    steps: tuple[WalkStep, ...]


class Holding(enum.Enum):
    """Way in which a model holds a tensor. Each value is a phrase for messages."""

    PARAMETER = "a parameter"
    BUFFER = "a buffer"
    NOT_PERSISTENT = "a non-persistent buffer"
    UNREGISTERED = "an unregistered tensor"


@dataclass
class _Repeats:
    """Numbers for tensors of the same name: the last number used, and the numbered name of each tensor by its id."""

    last: int = 1
    names: dict[int, str] = field(default_factory=dict)


@dataclass
class WalkResult:
    """Tensors and modules that a walk found.

    Attributes:
        registered: Registered names in state_dict order.
        unregistered: Tensors under names that are not registered, in the order of their owners.
        modules: (prefix, module) of each registered module.
        unopened: (name, reason) of objects that were not searched, or only in part.
        cycles: Names of modules that contain themselves.
        packed: Names of objects with weights in C++, for example packed parameters of a quantized layer.
        modules_beyond_limit: Registered modules nested too deep.
    """

    registered: list[RegisteredName] = field(default_factory=list)
    unregistered: list[UnregisteredTensor] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    unopened: list[tuple[str, str]] = field(default_factory=list)
    cycles: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)
    modules_beyond_limit: list[nn.Module] = field(default_factory=list)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _repeats: dict[str, _Repeats] = field(default_factory=dict)

    def map_holdings(self) -> dict[str, Holding]:
        """Map the name of each tensor to its `Holding`, the way in which the model holds it."""
        names = {entry.fqn: Holding.UNREGISTERED for entry in self.unregistered}
        for entry in self.registered:
            if entry.tensor is not None:
                buffer = Holding.BUFFER if entry.persistent else Holding.NOT_PERSISTENT
                names[entry.fqn] = Holding.PARAMETER if entry.is_parameter else buffer
        return names

    def make_unique_name(self, fqn: str, tensor: torch.Tensor) -> str:
        """Return `fqn`, or `fqn (2)` if another tensor has this name, because a key of `__dict__` may be any text."""
        if self._tensors.setdefault(fqn, tensor) is tensor:
            return fqn
        repeats = self._repeats.setdefault(fqn, _Repeats())
        name = repeats.names.get(id(tensor), fqn)
        while self._tensors.setdefault(name, tensor) is not tensor:
            repeats.last += 1
            name = repeats.names[id(tensor)] = f"{fqn} ({repeats.last})"
        return name


def walk(root: nn.Module) -> WalkResult:
    """Find every tensor of `root`. Raises ModelError if there are too many names to list."""
    result = WalkResult()
    with torch._C.DisableTorchFunctionSubclass():
        _collect_registered(root, result)
        _Search(result).run()
    return result


def walk_registered(root: nn.Module) -> list[RegisteredName]:
    """Return the registered names of `root` in state_dict order. Do not search for unregistered tensors."""
    result = WalkResult()
    with torch._C.DisableTorchFunctionSubclass():
        _collect_registered(root, result)
    return result.registered


# --- registered names ---------------------------------------------------------------------------------------


def get_own_dict(obj: object) -> dict[str, Any]:
    """Return the instance dict of an object without running its code, or an empty dict if the object has none.

    The dict may be an instance of a user's class: use `dict.get(attributes, name)`, not `attributes.get(name)`.
    """
    getter = _find_dict_getter(type(obj))
    return {} if getter is None else getter.__get__(obj)


@cache_by_type
def _find_dict_getter(kind: type) -> Any:
    for base in _mro_of(kind):
        getter = _dict_of(base).get("__dict__")
        # types.SimpleNamespace declares its dict as a member, which no Python class can do.
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return getter
    return None


def is_scripted(module: nn.Module) -> bool:
    """Return True if `module` is a ScriptModule, whose state lives in C++."""
    return issubclass(type(module), torch.jit.ScriptModule)


def _read_registry(module: nn.Module, name: str, attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the entries of the registry `name`, such as `_parameters`. `attributes` is the module's own dict."""
    entries = dict.get(attributes, name)
    if type(entries) is dict:
        return list(entries.items())
    if entries is None:
        # ScriptModules keep their registries in C++, and a property of torch returns them.
        entries = getattr(module, name, {}) if is_scripted(module) else {}
    if issubclass(type(entries), dict):
        return list(dict.items(entries))
    return list(entries.items())


def _collect_registered(root: nn.Module, result: WalkResult) -> None:
    """Collect the registered names in state_dict order. A shared module is listed under each of its names."""
    stack: list[tuple[str, nn.Module | None, int]] = [("", root, 0)]
    module_ids_above: list[int] = []  # ids of the modules from the root to the current module
    ids_above: set[int] = set()
    names = 0
    while stack:
        prefix, module, depth = stack.pop()
        if module is None:  # all children of the last module in `module_ids_above` are done
            ids_above.remove(module_ids_above.pop())
            continue
        if id(module) in ids_above:
            result.cycles.append(prefix.rstrip("."))
            continue
        result.modules.append((prefix, module))
        attributes = get_own_dict(module)
        names += 1 + _collect_own_tensors(prefix, module, attributes, result)
        if names > MAX_NAMES:
            raise ModelError(
                f"the model registers more than {MAX_NAMES:,} tensor names, the limit of statecli, at "
                f"{prefix.rstrip('.') or 'the model'}"
            )
        children = [(n, child) for n, child in _read_registry(module, "_modules", attributes) if child is not None]
        if children and depth >= MAX_DEPTH:
            # Each level makes the names longer: names in deeper trees take quadratic memory, and torch recurses over
            # the levels.
            result.unopened.append((prefix.rstrip("."), f"nests more than {MAX_DEPTH:,} modules"))
            result.modules_beyond_limit += [child for _, child in children]
            continue
        module_ids_above.append(id(module))
        ids_above.add(id(module))
        stack.append(("", None, depth))
        stack += [(f"{prefix}{n}.", child, depth + 1) for n, child in reversed(children)]


def _collect_own_tensors(prefix: str, module: nn.Module, attributes: dict[str, Any], result: WalkResult) -> int:
    non_persistent = dict.get(attributes, "_non_persistent_buffers_set") or ()
    entries = [(name, tensor, True) for name, tensor in _read_registry(module, "_parameters", attributes)]
    entries += [(name, tensor, False) for name, tensor in _read_registry(module, "_buffers", attributes)]
    for name, tensor, is_parameter in entries:
        key, persistent = prefix + name, is_parameter or name not in non_persistent
        fqn = key if tensor is None else result.make_unique_name(key, tensor)
        result.registered.append(RegisteredName(fqn, key, tensor, is_parameter, persistent, module, name))
    return len(entries)


# --- unregistered tensors -----------------------------------------------------------------------------------


class _Search:
    """Breadth-first search for unregistered tensors, from each registered module."""

    def __init__(self, result: WalkResult) -> None:
        self._result = result
        self._queue: collections.deque[WalkStep] = collections.deque()
        self._owners: dict[int, tuple[nn.Module, int]] = {}
        # id -> object: a referenced object keeps its id, so no other object can be taken for a seen one.
        self._seen: dict[int, Any] = {}
        self._names: set[tuple[int, str]] = set()
        self._classes: dict[int, type] = {}

    def run(self) -> None:
        for rank, (prefix, module) in enumerate(self._result.modules):
            if id(module) in self._seen:
                continue
            self._seen[id(module)] = module
            self._owners[id(module)] = (module, rank)
            root = WalkStep(None, prefix, module)
            self._queue.append(WalkStep(root, prefix, module))
        for module in self._result.modules_beyond_limit:
            self._seen.setdefault(id(module), module)
        for entry in self._result.registered:
            # The Python attributes of a registered tensor are searched too: `weight.tag = tensor`.
            if entry.tensor is not None and id(entry.tensor) not in self._seen:
                self._seen[id(entry.tensor)] = entry.tensor
                if _is_wrapper(type(entry.tensor)):
                    continue
                owner = WalkStep(WalkStep(None, "", entry.owner), entry.fqn.rpartition(".")[0], entry.owner)
                label = ("." if owner.label else "") + entry.attribute
                self._queue.append(WalkStep(owner, label, entry.tensor, 1, "registered"))
        self._drain()
        self._result.unregistered.sort(key=lambda entry: entry.rank)

    def _drain(self) -> None:
        while self._queue:
            step = self._queue.popleft()
            steps_on = _open_object(step, self._classes)
            for next_step in steps_on:
                self._meet(next_step)
            kind, unopened = type(step.value), self._result.unopened
            if _is_unknown(kind) and len(unopened) < 10 and _hides_tensor(step.value, steps_on):
                unopened.append((step.name(), f"is a {kind.__name__}, in which statecli does not search"))
            if len(self._seen) > MAX_OBJECTS:
                reason = f"is not searched, because the model has more than {MAX_OBJECTS:,} objects"
                unopened.append((step.name(), reason))
                return

    def _meet(self, step: WalkStep) -> None:
        obj = step.value
        is_tensor = issubclass(type(obj), torch.Tensor)
        if step.how == "key" and id(obj) in self._seen:
            return  # an optimizer's `state` has parameters as keys: no further names of the parameters
        if is_tensor and (step.how != "registered" or id(obj) not in self._seen):
            self._record(step, obj)
        if id(obj) in self._seen:
            return
        self._seen[id(obj)] = obj
        if type(obj) is torch.ScriptObject:
            self._result.packed.append(step.name())
        if step.depth > MAX_DEPTH:
            if len(self._result.unopened) < 10:
                self._result.unopened.append((step.name(), f"nests more than {MAX_DEPTH:,} levels"))
            return
        if is_tensor and _is_wrapper(type(obj)):
            return  # the inner tensors of a wrapper subclass are the tensor itself, and move with the tensor
        self._queue.append(step)

    def _record(self, step: WalkStep, tensor: torch.Tensor) -> None:
        chain = step.list_steps()
        start = max(i for i, link in enumerate(chain) if id(link.value) in self._owners)
        owner, rank = self._owners[id(chain[start].value)]
        name = step.name()
        if (id(tensor), name) not in self._names:
            self._names.add((id(tensor), name))
            fqn = self._result.make_unique_name(name, tensor)
            self._result.unregistered.append(UnregisteredTensor(fqn, tensor, owner, rank, tuple(chain[start + 1 :])))


#: Types whose contents `_find_listers` knows how to list.
_OPENED_TYPES = (
    *(nn.Module, torch.Tensor, dict, list, tuple, collections.deque, set, frozenset, functools.partial, BaseException),
    *(types.FunctionType, types.BuiltinMethodType, types.MethodType),
)


@cache_by_type
def _is_unknown(kind: type) -> bool:
    return id(kind) not in _TRANSPARENT_TYPES and not issubclass(kind, _OPENED_TYPES)


def _hides_tensor(obj: object, steps_on: list[WalkStep]) -> bool:
    """Return True if the garbage collector finds a tensor in `obj` that is not the value of a step in `steps_on`."""
    step_ids = {id(step.value) for step in steps_on}
    return any(issubclass(type(value), torch.Tensor) and id(value) not in step_ids for value in gc.get_referents(obj))


@cache_by_type
def _is_wrapper(kind: type) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


@cache_by_type
def _is_closed(kind: type) -> bool:
    """Return True if the walk does not search objects of this type."""
    if id(kind) in _ATOM_TYPES or any(id(base) in _CLOSED_TYPES for base in _mro_of(kind)):
        return True
    module = _dict_of(kind).get("__module__")
    if type(module) is str and module.startswith(_SHARDING_MODULES):
        return not issubclass(kind, nn.Module)  # `fully_shard` derives a new class from the class of each module
    return module in ("torch.autograd.graph", "torch._C._functions", "torch._C._autograd")


def _open_object(step: WalkStep, classes: dict[int, type]) -> list[WalkStep]:
    """Return a step to each object that `step.value` holds directly, except objects that cannot hold a tensor."""
    obj, kind = step.value, type(step.value)
    # The keys of hooks come from a process-wide counter; only their order in the dict is the same in each process.
    is_numbered = step.label.endswith("_hooks") and step.parent is not None and _is_module(step.parent.value)
    after_dot = step.parent is not None and step.label.endswith(".")
    depth = step.depth + 1
    listers = [list_contents(obj, is_numbered) for list_contents in _find_listers(kind)]
    if id(kind) not in classes:
        listers.append(_list_class_attributes(obj, kind, classes))
    return [
        WalkStep(step, label[1:] if after_dot and label[:1] == "." else label, value, depth, how)
        for contents in listers
        for label, value, how in contents
        if not (id(type(value)) in _ATOM_TYPES or _is_closed(type(value)) or _is_empty(value))
    ]


def _is_empty(obj: Any) -> bool:
    """Return True for an empty container, such as a module's hook dicts, and for a function that holds no objects."""
    kind = type(obj)
    if kind is types.FunctionType:  # methods of transformers' classes would be most of the opened objects
        return _is_empty_function(obj)
    # Of the container types, only OrderedDict takes attributes.
    takes_attributes = kind is collections.OrderedDict
    return id(kind) in _CONTAINER_TYPES and not obj and not (takes_attributes and dict.__len__(obj.__dict__))


def _is_empty_function(function: types.FunctionType) -> bool:
    if function.__closure__ or dict.__len__(function.__dict__):
        return False
    positional, by_name = _get_defaults(function)
    return all(_is_closed(type(value)) for value in positional) and all(_is_closed(type(value)) for _, value in by_name)


def _get_defaults(function: types.FunctionType) -> tuple[Iterable[Any], Iterable[tuple[str, Any]]]:
    """Return a function's defaults: values of positional parameters, and (name, value) of keyword-only parameters.

    The tuple and the dict that hold them may be instances of user classes.
    """
    positional, by_name = function.__defaults__, function.__kwdefaults__
    return (
        () if positional is None else tuple.__iter__(positional),
        () if by_name is None else dict.items(by_name),
    )


def _is_module(obj: object) -> bool:
    return issubclass(type(obj), nn.Module)


#: Contents of an object: (label, value, how).
_Contents = Iterable[tuple[str, Any, str]]
#: Function that lists the contents of an object. Its second argument is True if the keys of a dict are counters.
_Lister = Callable[[Any, bool], _Contents]


@cache_by_type
def _find_listers(kind: type) -> tuple[_Lister, ...]:
    """Return the functions that list the contents of an object of this type. Together they list all contents."""
    if id(kind) in _TRANSPARENT_TYPES:
        return (_list_referents,)
    if kind is types.MethodType:
        return (_list_method,)
    listers: list[_Lister] = [list_contents for base, list_contents in _LISTERS if issubclass(kind, base)][:1]
    if not listers and kind is types.BuiltinMethodType:
        listers = [_list_builtin_method]
    elif not listers and _is_object_array(kind):
        listers = [_list_array]
    if listers == [_list_dict] and issubclass(kind, collections.defaultdict):
        listers.append(_list_default_factory)
    if not issubclass(kind, nn.Module) and _find_dict_getter(kind) is not None:
        listers.append(_list_attributes)
    if _find_declared_slots(kind):
        listers.append(_list_slots)
    return tuple(listers)


def _list_referents(obj: object, _: bool) -> _Contents:
    # Since Python 3.12, the referents may include the type itself.
    referents = [value for value in gc.get_referents(obj) if value is not type(obj)]
    return [(f"[#{i}]", value, "item") for i, value in enumerate(referents)]


def _list_method(method: types.MethodType, _: bool) -> _Contents:
    return [(".__self__", method.__self__, "attribute"), (".__func__", method.__func__, "attribute")]


def _list_builtin_method(method: types.BuiltinMethodType, _: bool) -> _Contents:
    # A method such as `tensor.add`, kept as a callable, holds the tensor.
    return [(".__self__", method.__self__, "attribute")]


def _list_exception(error: BaseException, _: bool) -> _Contents:
    return [(".args", BaseException.__dict__["args"].__get__(error), "attribute")]


def _list_attributes(obj: object, _: bool) -> _Contents:
    return [(f".{name}", value, "attribute") for name, value in list(dict.items(get_own_dict(obj)))]


def _list_module(module: nn.Module, _: bool) -> Iterator[tuple[str, Any, str]]:
    attributes = get_own_dict(module)
    registered = set()
    held_by_tensors: set[int] = set()
    for registry in ("_parameters", "_buffers", "_modules"):
        for name, value in _read_registry(module, registry, attributes):
            if value is not None:
                registered.add(name)
                if issubclass(type(value), torch.Tensor):
                    held_by_tensors |= _list_ids_moved_by(value)
            yield f".{name}", value, "registered"
    for name, value in list(dict.items(attributes)):
        if id(type(value)) in _ATOM_TYPES or _is_empty(value):
            continue  # most attributes of a module are flags and empty dicts of hooks
        if id(value) in held_by_tensors:
            continue  # listed below the tensor, because its `.to` may move the object (`quant_state`)
        if name in registered:
            yield f".__dict__[{name!r}]", value, "hidden"
        elif name not in _REGISTRIES and not (name == _SCRIPT_ATTRIBUTE and is_scripted(module)):
            yield f".{name}", value, "attribute"
    if is_scripted(module):
        for name, value in _list_script_attributes(module):
            if name not in registered:
                yield f".{name}", value, "attribute"


def _list_ids_moved_by(tensor: torch.Tensor) -> set[int]:
    """Return the ids of a tensor's attribute values that may move together with the tensor, such as `quant_state`.

    These are all objects if the tensor's class has its own `.to`. Otherwise they are the objects of bitsandbytes,
    because the tensor may have lost its class.
    """
    attributes = get_own_dict(tensor)
    is_moving = has_own_to(type(tensor))
    return {
        id(value)
        for value in dict.values(attributes)
        if (is_moving or _is_of_bitsandbytes(type(value))) and not (_is_closed(type(value)) or _is_module(value))
    }


@cache_by_type
def _is_of_bitsandbytes(kind: type) -> bool:
    module = _dict_of(kind).get("__module__")
    return type(module) is str and module.partition(".")[0] == "bitsandbytes"


@cache_by_type
def has_own_to(kind: type) -> bool:
    """Return True for a tensor class with its own `.to`, which may move more than the tensor (bitsandbytes)."""
    if not issubclass(kind, torch.Tensor):
        return False
    bases = itertools.takewhile(lambda base: base is not torch.Tensor, _mro_of(kind))
    return any("to" in _dict_of(base) for base in bases)


#: Attribute in which traced modules and old subclasses of ScriptModule keep the module whose attributes they show.
_SCRIPT_ATTRIBUTE = "_actual_script_module"


def _get_script_object(module: nn.Module) -> Any:
    """Return the C++ object of a ScriptModule, or None if it is not created yet."""
    attributes = get_own_dict(module)
    return dict.get(get_own_dict(dict.get(attributes, _SCRIPT_ATTRIBUTE, module)), "_c")


def _list_script_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes kept in C++ by TorchScript, sorted by name. Reading them runs no code."""
    script = _get_script_object(module)
    if script is not None:
        script_type: Any = torch._C.ConcreteModuleType.from_jit_type(script._type())
        yield from ((name, script.getattr(name)) for name in sorted(script_type.get_attributes()))


def count_constants_in_code(module: nn.Module) -> int:
    """Count the constant tensors in the code of a traced or frozen ScriptModule. Return 0 for any other module.

    0-dim tensors are not counted, because a trace turns each number into a tensor.
    """
    script = _get_script_object(module) if is_scripted(module) else None
    graphs = [script._get_method(name).graph for name in script._method_names()] if script is not None else []
    constants = [node for graph in graphs for node in graph.findAllNodes("prim::Constant")]
    tensors = [node.t("value") for node in constants if node.hasAttribute("value") and node.kindOf("value") == "t"]
    return sum(tensor.dim() > 0 for tensor in tensors)


def _list_dict(mapping: dict[Any, Any], is_numbered: bool) -> Iterator[tuple[str, Any, str]]:
    for i, (key, value) in enumerate(list(dict.items(mapping))):
        literal = None if is_numbered else _format_literal(key)
        yield f"[{literal or f'#{i}'}]", value, "item"
        if literal is None:
            yield f".keys()[#{i}]", key, "key"


def _list_default_factory(mapping: object, _: bool) -> _Contents:
    member = collections.defaultdict.__dict__["default_factory"]
    return [(".default_factory", member.__get__(mapping), "attribute")]


@cache_by_type
def _is_object_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _list_array(array: object, _: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield the contents of an array of Python objects as nested lists. An array of numbers holds no tensor."""
    kind = sys.modules["numpy"].ndarray
    if kind.__dict__["dtype"].__get__(array).hasobject:
        yield ".tolist()", kind.tolist(array), "item"


def _format_literal(key: object) -> str | None:
    """Return `key` in Python's notation, or None if `repr` would run user code or would give no useful name."""
    if issubclass(type(key), str):
        return str.__repr__(key)
    if id(type(key)) in _LITERAL_TYPES:
        return repr(key)
    if type(key) is tuple and all(id(type(part)) in _LITERAL_TYPES for part in key):
        return repr(key)
    return None


def _list_sequence(obj: Any, _: bool) -> Iterator[tuple[str, Any, str]]:
    kind = type(obj)
    base = next(base for base in (list, tuple, collections.deque) if issubclass(kind, base))
    fields = _find_namedtuple_fields(kind)
    for i, value in enumerate(list(base.__iter__(obj))):
        yield (f".{fields[i]}" if i < len(fields) else f"[{i}]"), value, "item"


@cache_by_type
def _find_namedtuple_fields(kind: type) -> tuple[str, ...]:
    """Return the field names of a namedtuple type, or () for other types."""
    for base in _mro_of(kind) if issubclass(kind, tuple) else ():
        names = _dict_of(base).get("_fields")
        if type(names) is tuple and all(type(name) is str for name in names):
            return names
    return ()


def _list_set(obj: Any, _: bool) -> Iterator[tuple[str, Any, str]]:
    base = set if issubclass(type(obj), set) else frozenset
    # Sets have the order of addresses, so members are sorted by facts that can be read without running their code.
    members = sorted(base.__iter__(obj), key=_get_sort_key)
    yield from ((f"[#{i}]", value, "item") for i, value in enumerate(members))


def _get_sort_key(obj: Any) -> tuple[str, str]:
    if issubclass(type(obj), torch.Tensor) and not torch.nn.parameter.is_lazy(obj):
        return type(obj).__name__, f"{obj.dtype} {tuple(obj.shape)}"
    return type(obj).__name__, ""


def _list_function(function: types.FunctionType, _: bool) -> Iterator[tuple[str, Any, str]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        value = gc.get_referents(cell)  # an empty cell raises on .cell_contents
        if value:
            yield f".__closure__[{name!r}]", value[0], "closure"
    positional, by_name = _get_defaults(function)
    for i, value in enumerate(positional):
        yield f".__defaults__[{i}]", value, "default"
    for name, value in by_name:
        yield f".__kwdefaults__[{_format_literal(name)}]", value, "default"


def _list_partial(partial: functools.partial[Any], _: bool) -> Iterator[tuple[str, Any, str]]:
    members = functools.partial.__dict__
    yield ".func", members["func"].__get__(partial), "argument"
    for i, value in enumerate(members["args"].__get__(partial)):
        yield f".args[{i}]", value, "argument"
    for name, value in dict.items(members["keywords"].__get__(partial)):
        yield f".keywords[{name!r}]", value, "argument"


def _list_slots(obj: object, _: bool) -> Iterator[tuple[str, Any, str]]:
    for name, member in _find_declared_slots(type(obj)):
        try:
            yield f".{name}", member.__get__(obj), "attribute"
        except AttributeError:
            continue  # an unfilled slot


@cache_by_type
def _find_declared_slots(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return (name, member) of each slot that a Python class declares. Members of C structs are left out."""
    members = []
    for base in _mro_of(kind):
        if "__slots__" in _dict_of(base):
            members += [(n, m) for n, m in _dict_of(base).items() if type(m) is types.MemberDescriptorType]
    return tuple(members)


#: Base types with their listers. The first base type from which a type is derived decides.
_LISTERS: tuple[tuple[Any, _Lister], ...] = (
    (nn.Module, _list_module),
    (dict, _list_dict),
    ((list, tuple, collections.deque), _list_sequence),
    ((set, frozenset), _list_set),
    (types.FunctionType, _list_function),
    (functools.partial, _list_partial),
    (BaseException, _list_exception),
)


def _list_class_attributes(obj: object, kind: type, classes: dict[int, type]) -> Iterator[tuple[str, Any, str]]:
    """Yield tensors and containers in the class bodies of user classes, once per class."""
    for base in _mro_of(kind):
        if id(base) in classes:
            continue
        classes[id(base)] = base
        if not _is_user_class(base):
            continue
        for name, value in list(_dict_of(base).items()):
            if (name.startswith("__") and not _is_code(value)) or _is_closed(type(value)) or _is_empty(value):
                continue
            if name not in _GENERATED_ATTRIBUTES and (_is_code(value) or not _is_descriptor(type(value))):
                yield (f".__class__.{name}" if _is_shadowed(obj, name) else f".{name}"), value, "class"


def _is_code(value: object) -> bool:
    """Return True for a function or method in a class body, whose defaults or closure may hold tensors."""
    return type(value) in (types.FunctionType, staticmethod, classmethod)


def _is_shadowed(obj: Any, name: str) -> bool:
    attributes = get_own_dict(obj)
    if dict.__contains__(attributes, name):
        return True
    registries = ("_parameters", "_buffers", "_modules") if _is_module(obj) else ()
    return any(
        name == registered_name
        for registry in registries
        for registered_name, _ in _read_registry(obj, registry, attributes)
    )


@cache_by_type
def _is_user_class(kind: type) -> bool:
    module = _dict_of(kind).get("__module__")
    top = module.partition(".")[0] if type(module) is str else "builtins"
    return top != "torch" and top not in sys.stdlib_module_names


@cache_by_type
def _is_descriptor(kind: type) -> bool:
    return any("__get__" in _dict_of(base) for base in _mro_of(kind) if base is not object)
