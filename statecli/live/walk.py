"""Every tensor that a module holds, under every name Python reaches it by, without running any of the user's code.

The walk reads storage, not attributes: instance dicts, slots, list and dict items, closure cells. It never calls
`getattr`, `isinstance`, `==`, `hash`, `len` or `repr` on what it meets, so proxies, properties and overridden methods
stay asleep. Each object is opened once, breadth first, so that a tensor gets its shortest name.

Not crossed: `__globals__`, `.grad`, frames, threads, loggers, weak references, autograd nodes, torch operators,
`torch.fx` graphs, classes, Python modules, enum members, properties. Nobody expects a move to reach through those.
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

import torch
from torch import nn

from statecli.core.errors import ModelError

#: Steps from the root. Beyond it names are useless to anybody; the cut is reported, not silent.
MAX_DEPTH = 1_000
#: Objects opened. A tokenizer's vocabulary costs one; ten million is a data set held by the model.
MAX_OBJECTS = 5_000_000
#: Registered names. Modules shared 40 levels deep have 2^40 of them.
MAX_NAMES = 1_000_000

_mro_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__
_Answer = TypeVar("_Answer")


def _ids(kinds: Iterable[Any]) -> frozenset[int]:
    return frozenset(id(kind) for kind in kinds)


def _by_type(answer: Callable[[type], _Answer]) -> Callable[[type], _Answer]:
    """`answer`, remembered for each type by identity. The types are kept, so that no id is used twice."""
    known: dict[int, tuple[type, _Answer]] = {}

    def remembered(kind: type) -> _Answer:
        found = known.get(id(kind))
        if found is None:
            found = known[id(kind)] = (kind, answer(kind))
        return found[1]

    return remembered


# Types are told apart by id: a metaclass may define __eq__ and __hash__, and they are the user's code.
_ATOMS = _ids(
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
_CLOSED = _ids(
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
        torch._C.ScriptMethod,  # holds the Python module that a ScriptModule was made from
        torch._ops.OperatorBase,
        torch._ops.OpOverloadPacket,
        torch._ops._OpNamespace,
        torch._ops._Ops,
    ]
)
#: Built-in objects that only hold others, without a name of their own: iterators, views, cells.
_TRANSPARENT = _ids(
    [
        *map(type, (iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed([]))),
        *map(type, (reversed({}), iter(collections.deque()), {}.keys(), {}.values(), {}.items())),
        *(types.MappingProxyType, types.CellType, zip, map, filter, enumerate, reversed, slice),
        *(type(functools.lru_cache(len)), operator.methodcaller, staticmethod, classmethod),
        *(kind for kind in vars(itertools).values() if type(kind) is type),
    ]
)
_CONTAINERS = _ids([dict, collections.OrderedDict, list, tuple, set, frozenset, collections.deque])
#: Types whose repr is Python's own and short enough for a name.
_WRITABLE = _ids([str, int, bool, float, bytes, type(None)])
#: Names in class bodies that abstract classes and namedtuples leave there.
_MACHINERY = frozenset(["_abc_impl", "_fields", "_field_defaults"])
_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"])


@dataclass(frozen=True, eq=False)
class Step:
    """One step from an object to what it holds. Names are made from chains of these, and only for tensors."""

    parent: Step | None
    label: str
    held: Any
    depth: int = 0
    #: How the holder holds it: attribute, hidden, item, key, closure, default, argument, class, part, registered.
    #: A hidden attribute has the name of something registered: Python reads it, state_dict and moves do not.
    how: str = "attribute"

    def name(self) -> str:
        """As Python would write it from the root: `anchors[0]`, `cache['cos']`, `blocks[2].weight`."""
        return "".join(step.label for step in self.chain()).lstrip(".")

    def chain(self) -> list[Step]:
        """The steps from the root to here, the root left out."""
        steps: list[Step] = []
        step: Step | None = self
        while step is not None and step.parent is not None:
            steps.append(step)
            step = step.parent
        return steps[::-1]


@dataclass(frozen=True, eq=False)
class Registered:
    """One registered name. `tensor` is None for `register_parameter(name, None)`.

    `key` is its name in `state_dict()`, and `fqn` the same but where two tensors would have it.
    """

    fqn: str
    key: str
    tensor: torch.Tensor | None
    is_parameter: bool
    persistent: bool
    owner: nn.Module
    attribute: str


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor reached without being registered under that name.

    `owner` is the nearest registered module on the way and `steps` lead from it to the tensor, the first of them
    always an attribute or a class attribute of `owner`. `rank` orders owners as `modules()` does.
    """

    fqn: str
    tensor: torch.Tensor
    owner: nn.Module
    rank: int
    steps: tuple[Step, ...]


class Holding(enum.Enum):
    """How a model holds a tensor under one name, in words."""

    PARAMETER = "a parameter"
    BUFFER = "a buffer"
    NOT_PERSISTENT = "a non-persistent buffer"
    UNREGISTERED = "an unregistered tensor"


@dataclass
class _Repeats:
    """Names given to the further tensors of one name: the last number used, and the name of each tensor by id."""

    last: int = 1
    names: dict[int, str] = field(default_factory=dict)


@dataclass
class Walk:
    """All that one walk found. `cut` names places that were too deep or too many to open.

    `packed` names objects that hold weights in C++, out of Python's sight: a quantized layer's packed parameters.
    `beyond` are the registered modules below such a cut.
    """

    registered: list[Registered] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    cut: list[tuple[str, str]] = field(default_factory=list)
    cycles: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)
    beyond: list[nn.Module] = field(default_factory=list)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _repeats: dict[str, _Repeats] = field(default_factory=dict)

    def layout(self) -> dict[str, Holding]:
        """How each name is held."""
        names = {held.fqn: Holding.UNREGISTERED for held in self.held}
        for entry in self.registered:
            if entry.tensor is not None:
                buffer = Holding.BUFFER if entry.persistent else Holding.NOT_PERSISTENT
                names[entry.fqn] = Holding.PARAMETER if entry.is_parameter else buffer
        return names

    def name_for(self, fqn: str, tensor: torch.Tensor) -> str:
        """`fqn`, or where another tensor has it already (`__dict__` and the registries take any key) one apart."""
        if self._tensors.setdefault(fqn, tensor) is tensor:
            return fqn
        repeats = self._repeats.setdefault(fqn, _Repeats())
        name = repeats.names.get(id(tensor), fqn)
        while self._tensors.setdefault(name, tensor) is not tensor:
            repeats.last += 1
            name = repeats.names[id(tensor)] = f"{fqn} ({repeats.last})"
        return name


def walk(root: nn.Module) -> Walk:
    """Every tensor of `root`. Raises ModelError where there are too many names to list."""
    found = Walk()
    with torch._C.DisableTorchFunctionSubclass():
        _registered(root, found)
        _Search(found).run()
    return found


# --- what is registered -------------------------------------------------------------------------------------


def own_dict(thing: Any) -> dict[str, Any]:
    """The instance dict, through the slot that Python itself made for it; empty where there is none."""
    getter = _dict_getter(type(thing))
    return {} if getter is None else getter.__get__(thing)


@_by_type
def _dict_getter(kind: type) -> Any:
    for base in _mro_of(kind):
        getter = _dict_of(base).get("__dict__")
        # types.SimpleNamespace declares its own as a member; no Python class can.
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return getter
    return None


def is_scripted(module: nn.Module) -> bool:
    """Whether `module` is a ScriptModule, whose state lives in C++."""
    return issubclass(type(module), torch.jit.ScriptModule)


def _registry(module: nn.Module, name: str) -> list[tuple[str, Any]]:
    registry = own_dict(module).get(name)
    if registry is None:
        # ScriptModules keep theirs in C++ and hand it out through a property of torch's own.
        registry = getattr(module, name, {}) if is_scripted(module) else {}
    if issubclass(type(registry), dict):
        return list(dict.items(registry))
    return list(registry.items())


def _registered(root: nn.Module, found: Walk) -> None:
    """The registered tree in state_dict order, every name, shared modules under each of theirs."""
    stack: list[tuple[str, nn.Module | None, int]] = [("", root, 0)]
    path: list[int] = []  # ids of the modules from the root to the current module
    above: set[int] = set()
    names = 0
    while stack:
        prefix, module, depth = stack.pop()
        if module is None:  # all children of the last module of `path` are done
            above.remove(path.pop())
            continue
        if id(module) in above:
            found.cycles.append(prefix.rstrip("."))
            continue
        found.modules.append((prefix, module))
        names += 1 + _own_tensors(prefix, module, found)
        if names > MAX_NAMES:
            raise ModelError(f"the model registers more than {MAX_NAMES:,} names; the first is {prefix.rstrip('.')}")
        children = [(n, child) for n, child in _registry(module, "_modules") if child is not None]
        if children and depth >= MAX_DEPTH:
            # A name grows with each level: the names of deeper trees are quadratic, and torch recurses over them.
            found.cut.append((prefix.rstrip("."), f"nests more than {MAX_DEPTH:,} modules"))
            found.beyond += [child for _, child in children]
            continue
        path.append(id(module))
        above.add(id(module))
        stack.append(("", None, depth))
        stack += [(f"{prefix}{n}.", child, depth + 1) for n, child in reversed(children)]


def _own_tensors(prefix: str, module: nn.Module, found: Walk) -> int:
    transient = own_dict(module).get("_non_persistent_buffers_set") or ()
    parameters = _registry(module, "_parameters")
    buffers = _registry(module, "_buffers")
    for name, tensor in parameters:
        fqn = prefix + name if tensor is None else found.name_for(prefix + name, tensor)
        found.registered.append(Registered(fqn, prefix + name, tensor, True, True, module, name))
    for name, tensor in buffers:
        fqn = prefix + name if tensor is None else found.name_for(prefix + name, tensor)
        found.registered.append(Registered(fqn, prefix + name, tensor, False, name not in transient, module, name))
    return len(parameters) + len(buffers)


# --- what is merely held ------------------------------------------------------------------------------------


class _Search:
    """Breadth first over everything else, from each registered module."""

    def __init__(self, found: Walk) -> None:
        self._found = found
        self._queue: collections.deque[Step] = collections.deque()
        self._owners: dict[int, tuple[nn.Module, int]] = {}
        # id -> object: an object that stays referenced keeps its id, so "seen" stays true.
        self._seen: dict[int, Any] = {}
        self._names: set[tuple[int, str]] = set()
        self._classes: dict[int, type] = {}

    def run(self) -> None:
        for rank, (prefix, module) in enumerate(self._found.modules):
            if id(module) in self._seen:
                continue
            self._seen[id(module)] = module
            self._owners[id(module)] = (module, rank)
            root = Step(None, prefix, module)
            self._queue.append(Step(root, prefix, module))
        for module in self._found.beyond:
            self._seen.setdefault(id(module), module)
        for entry in self._found.registered:
            # A registered tensor's own Python attributes are looked at too: `weight.tag = tensor`.
            if entry.tensor is not None and id(entry.tensor) not in self._seen:
                self._seen[id(entry.tensor)] = entry.tensor
                if _is_wrapper(type(entry.tensor)):
                    continue
                owner = Step(Step(None, "", entry.owner), entry.fqn.rpartition(".")[0], entry.owner)
                label = ("." if owner.label else "") + entry.attribute
                self._queue.append(Step(owner, label, entry.tensor, 1, "registered"))
        self._drain()
        self._found.held.sort(key=lambda held: held.rank)

    def _drain(self) -> None:
        while self._queue:
            step = self._queue.popleft()
            following = list(_open(step, self._classes))
            for one in following:
                self._meet(one)
            if _is_unknown(type(step.held)) and len(self._found.cut) < 10 and _leads_on(step.held, following):
                self._found.cut.append((step.name(), f"is a {type(step.held).__name__}, which is not opened"))
            if len(self._seen) > MAX_OBJECTS:
                self._found.cut.append((step.name(), f"more than {MAX_OBJECTS:,} objects hang on the model"))
                return

    def _meet(self, step: Step) -> None:
        thing = step.held
        is_tensor = issubclass(type(thing), torch.Tensor)
        if step.how == "key" and id(thing) in self._seen:
            return  # an optimizer's `state` is keyed by the parameters: no further name of theirs
        if is_tensor and (step.how != "registered" or id(thing) not in self._seen):
            self._record(step, thing)
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if type(thing) is torch.ScriptObject:
            self._found.packed.append(step.name())
        if step.depth > MAX_DEPTH:
            if len(self._found.cut) < 10:
                self._found.cut.append((step.name(), f"nests more than {MAX_DEPTH:,} levels"))
            return
        if is_tensor and _is_wrapper(type(thing)):
            return  # what a wrapper subclass keeps inside is the tensor itself, and moves as it does
        self._queue.append(step)

    def _record(self, step: Step, tensor: torch.Tensor) -> None:
        chain = step.chain()
        start = max(i for i, link in enumerate(chain) if id(link.held) in self._owners)
        owner, rank = self._owners[id(chain[start].held)]
        name = step.name()
        if (id(tensor), name) not in self._names:
            self._names.add((id(tensor), name))
            fqn = self._found.name_for(name, tensor)
            self._found.held.append(Held(fqn, tensor, owner, rank, tuple(chain[start + 1 :])))


#: Types whose contents `_contents` knows how to list.
_KNOWN = (
    *(nn.Module, torch.Tensor, dict, list, tuple, collections.deque, set, frozenset, functools.partial, BaseException),
    *(types.FunctionType, types.BuiltinMethodType, types.MethodType),
)


@_by_type
def _is_unknown(kind: type) -> bool:
    return id(kind) not in _TRANSPARENT and not issubclass(kind, _KNOWN)


def _leads_on(thing: Any, following: list[Step]) -> bool:
    """Whether the garbage collector sees a tensor in `thing` that was not found there."""
    known = {id(step.held) for step in following}
    return any(issubclass(type(held), torch.Tensor) and id(held) not in known for held in gc.get_referents(thing))


@_by_type
def _is_wrapper(kind: type) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


@_by_type
def _closed(kind: type) -> bool:
    """Whether the walk stays out of objects of this type."""
    if id(kind) in _ATOMS or any(id(base) in _CLOSED for base in _mro_of(kind)):
        return True
    module = _dict_of(kind).get("__module__")
    return module in ("torch.autograd.graph", "torch._C._functions", "torch._C._autograd")


def _open(step: Step, classes: dict[int, type]) -> Iterator[Step]:
    """What `step.held` holds directly, leaves that can hold no tensor left out."""
    thing, kind = step.held, type(step.held)
    # Hooks are numbered by a counter of the whole process: their place in the dict is what stays the same.
    numbered = step.label.endswith("_hooks") and step.parent is not None and _is_module(step.parent.held)
    after_dot = step.parent is not None and step.label.endswith(".")
    contents = _contents(thing, kind, numbered)
    for label, held, how in itertools.chain(contents, _class_attributes(thing, kind, classes)):
        if not _closed(type(held)) and not _is_empty(held):
            dotted = label[1:] if after_dot and label[:1] == "." else label
            yield Step(step, dotted, held, step.depth + 1, how)


def _is_empty(thing: Any) -> bool:
    """Whether it is a built-in container with nothing in it: most of what a module holds, its dicts of hooks."""
    return id(type(thing)) in _CONTAINERS and not thing and not own_dict(thing)


def _is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module)


def _contents(thing: Any, kind: type, numbered: bool) -> Iterator[tuple[str, Any, str]]:
    if issubclass(kind, nn.Module):
        yield from _of_module(thing)
    elif issubclass(kind, dict):
        yield from _of_dict(thing, numbered)
        yield from _factory(thing)
    elif issubclass(kind, (list, tuple, collections.deque)):
        yield from _of_sequence(thing, kind)
    elif issubclass(kind, (set, frozenset)):
        yield from _of_set(thing, kind)
    elif id(kind) in _TRANSPARENT:
        yield from ((f"[#{i}]", held, "item") for i, held in enumerate(gc.get_referents(thing)))
        return
    elif issubclass(kind, types.FunctionType):
        yield from _of_function(thing)
    elif issubclass(kind, functools.partial):
        yield from _of_partial(thing)
    elif kind is types.BuiltinMethodType:
        # `tensor.add` kept as a callable holds the tensor.
        yield (".__self__", thing.__self__, "attribute")
    elif kind is types.MethodType:
        yield ".__self__", thing.__self__, "attribute"
        yield ".__func__", thing.__func__, "attribute"
        return
    elif issubclass(kind, BaseException):
        yield ".args", BaseException.__dict__["args"].__get__(thing), "attribute"
    elif _is_object_array(kind):
        yield from _of_array(thing)
    if not issubclass(kind, nn.Module):
        yield from ((f".{name}", held, "attribute") for name, held in list(own_dict(thing).items()))
    yield from _of_slots(thing, kind)


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    registered = set()
    for registry in ("_parameters", "_buffers", "_modules"):
        for name, held in _registry(module, registry):
            if held is not None:
                registered.add(name)
            yield f".{name}", held, "registered"
    for name, held in list(own_dict(module).items()):
        if name in registered:
            yield f".__dict__[{name!r}]", held, "hidden"
        elif name not in _REGISTRIES and not (name == _INNER and is_scripted(module)):
            yield f".{name}", held, "attribute"
    if is_scripted(module):
        yield from ((f".{name}", held, "attribute") for name, held in _in_script(module) if name not in registered)


#: Where traced modules and old subclasses of ScriptModule keep the module whose attributes they show as their own.
_INNER = "_actual_script_module"


def _in_cpp(module: nn.Module) -> Any:
    """What a ScriptModule is in C++; None where it is not there yet."""
    own = own_dict(module)
    return own_dict(own.get(_INNER, module)).get("_c")


def _in_script(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that TorchScript keeps in C++, by name: it keeps them in no order. Reading one runs no code."""
    script = _in_cpp(module)
    if script is not None:
        known: Any = torch._C.ConcreteModuleType.from_jit_type(script._type())
        yield from ((name, script.getattr(name)) for name in sorted(known.get_attributes()))


def in_code(module: nn.Module) -> int:
    """How many tensors the compiled code of a ScriptModule holds as constants: those of a trace, or frozen into it.

    Numbers are not counted: a trace makes a 0-dim tensor of each.
    """
    script = _in_cpp(module) if is_scripted(module) else None
    graphs = [script._get_method(name).graph for name in script._method_names()] if script is not None else []
    constants = [node for graph in graphs for node in graph.findAllNodes("prim::Constant")]
    tensors = [node.t("value") for node in constants if node.hasAttribute("value") and node.kindOf("value") == "t"]
    return sum(tensor.dim() > 0 for tensor in tensors)


def _of_dict(mapping: dict[Any, Any], numbered: bool) -> Iterator[tuple[str, Any, str]]:
    for i, (key, held) in enumerate(list(dict.items(mapping))):
        literal = None if numbered else _literal(key)
        yield f"[{literal or f'#{i}'}]", held, "item"
        if literal is None:
            yield f".keys()[#{i}]", key, "key"


def _factory(mapping: Any) -> Iterator[tuple[str, Any, str]]:
    if issubclass(type(mapping), collections.defaultdict):
        member = collections.defaultdict.__dict__["default_factory"]
        yield ".default_factory", member.__get__(mapping), "attribute"


@_by_type
def _is_object_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _of_array(array: Any) -> Iterator[tuple[str, Any, str]]:
    """What an array of Python objects holds, as nested lists; arrays of numbers hold nothing."""
    kind = sys.modules["numpy"].ndarray
    if kind.__dict__["dtype"].__get__(array).hasobject:
        yield ".tolist()", kind.tolist(array), "item"


def _literal(key: Any) -> str | None:
    """`key` as Python writes it, None where writing it would run code or say nothing."""
    if issubclass(type(key), str):
        return str.__repr__(key)
    if id(type(key)) in _WRITABLE:
        return repr(key)
    if type(key) is tuple and all(id(type(part)) in _WRITABLE for part in key):
        return repr(key)
    return None


def _of_sequence(thing: Any, kind: type) -> Iterator[tuple[str, Any, str]]:
    base = next(base for base in (list, tuple, collections.deque) if issubclass(kind, base))
    fields = _fields(kind)
    for i, held in enumerate(list(base.__iter__(thing))):
        yield (f".{fields[i]}" if i < len(fields) else f"[{i}]"), held, "item"


@_by_type
def _fields(kind: type) -> tuple[str, ...]:
    """The field names of a namedtuple, () for anything else."""
    for base in _mro_of(kind) if issubclass(kind, tuple) else ():
        names = _dict_of(base).get("_fields")
        if type(names) is tuple and all(type(name) is str for name in names):
            return names
    return ()


def _of_set(thing: Any, kind: type) -> Iterator[tuple[str, Any, str]]:
    base = set if issubclass(kind, set) else frozenset
    # A set's order is that of addresses; sorted by what can be said of a member without running its code.
    members = sorted(base.__iter__(thing), key=_sort_key)
    yield from ((f"[#{i}]", held, "item") for i, held in enumerate(members))


def _sort_key(thing: Any) -> tuple[str, str]:
    if issubclass(type(thing), torch.Tensor) and not torch.nn.parameter.is_lazy(thing):
        return type(thing).__name__, f"{thing.dtype} {tuple(thing.shape)}"
    return type(thing).__name__, ""


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any, str]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        held = gc.get_referents(cell)  # an empty cell raises on .cell_contents
        if held:
            yield f".__closure__[{name!r}]", held[0], "closure"
    for i, held in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{i}]", held, "default"
    for name, held in (function.__kwdefaults__ or {}).items():
        yield f".__kwdefaults__[{name!r}]", held, "default"


def _of_partial(partial: functools.partial[Any]) -> Iterator[tuple[str, Any, str]]:
    members = functools.partial.__dict__
    yield ".func", members["func"].__get__(partial), "argument"
    for i, held in enumerate(members["args"].__get__(partial)):
        yield f".args[{i}]", held, "argument"
    for name, held in dict.items(members["keywords"].__get__(partial)):
        yield f".keywords[{name!r}]", held, "argument"


def _of_slots(thing: Any, kind: type) -> Iterator[tuple[str, Any, str]]:
    for name, member in _slots(kind):
        try:
            yield f".{name}", member.__get__(thing), "attribute"
        except AttributeError:
            continue  # an unfilled slot


@_by_type
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    """The slots that Python classes declare. C structs have members of the same type; theirs are not the user's."""
    found = []
    for base in _mro_of(kind):
        if "__slots__" in _dict_of(base):
            found += [(n, m) for n, m in _dict_of(base).items() if type(m) is types.MemberDescriptorType]
    return tuple(found)


def _class_attributes(thing: Any, kind: type, classes: dict[int, type]) -> Iterator[tuple[str, Any, str]]:
    """Tensors and containers in the class bodies of user classes, once per class."""
    for base in _users(kind):
        if id(base) in classes:
            continue
        classes[id(base)] = base
        for name, held in list(_dict_of(base).items()):
            if name.startswith("__") and not _is_code(held):
                continue
            if name not in _MACHINERY and (_is_code(held) or not _is_descriptor(type(held))):
                yield (f".__class__.{name}" if _shadowed(thing, name) else f".{name}"), held, "class"


def _is_code(held: Any) -> bool:
    """A function of the class body, which may hold tensors in its defaults, its closure or a partial below it."""
    return type(held) in (types.FunctionType, staticmethod, classmethod)


def _shadowed(thing: Any, name: str) -> bool:
    if name in own_dict(thing):
        return True
    registries = ("_parameters", "_buffers", "_modules") if _is_module(thing) else ()
    return any(name == known for registry in registries for known, _ in _registry(thing, registry))


@_by_type
def _users(kind: type) -> tuple[type, ...]:
    """The classes among its bases and itself that neither Python nor torch brings."""
    return tuple(base for base in _mro_of(kind) if _is_users(base))


def _is_users(kind: type) -> bool:
    module = _dict_of(kind).get("__module__")
    top = module.partition(".")[0] if type(module) is str else "builtins"
    return top != "torch" and top not in sys.stdlib_module_names


@_by_type
def _is_descriptor(kind: type) -> bool:
    return any("__get__" in _dict_of(base) for base in _mro_of(kind) if base is not object)
