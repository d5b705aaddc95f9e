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
import gc
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from statecli.core.errors import ModelError
from statecli.live.object_attributes import get_own_dict, is_module, read_registry
from statecli.live.object_contents import find_listers, is_empty, list_class_attributes
from statecli.live.searched_types import ATOM_TYPES, is_closed, is_unknown, is_wrapper

#: Largest number of steps from the root, because longer names are useless. Deeper objects are reported as not searched.
MAX_DEPTH = 1_000
#: Largest number of opened objects: more of them are a data set that the model holds. A tokenizer's vocabulary counts
#: as one object.
MAX_OBJECTS = 5_000_000
#: Largest number of registered names. Modules shared at 40 levels have 2^40 names.
MAX_NAMES = 1_000_000


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
        children = [(n, child) for n, child in read_registry(module, "_modules", attributes) if child is not None]
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
    entries = [(name, tensor, True) for name, tensor in read_registry(module, "_parameters", attributes)]
    entries += [(name, tensor, False) for name, tensor in read_registry(module, "_buffers", attributes)]
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
                if is_wrapper(type(entry.tensor)):
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
            if is_unknown(kind) and len(unopened) < 10 and _hides_tensor(step.value, steps_on):
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
        if is_tensor and is_wrapper(type(obj)):
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


def _hides_tensor(obj: object, steps_on: list[WalkStep]) -> bool:
    """Return True if the garbage collector finds a tensor in `obj` that is not the value of a step in `steps_on`."""
    step_ids = {id(step.value) for step in steps_on}
    return any(issubclass(type(value), torch.Tensor) and id(value) not in step_ids for value in gc.get_referents(obj))


def _open_object(step: WalkStep, classes: dict[int, type]) -> list[WalkStep]:
    """Return a step to each object that `step.value` holds directly, except objects that cannot hold a tensor."""
    obj, kind = step.value, type(step.value)
    # The keys of hooks come from a process-wide counter; only their order in the dict is the same in each process.
    is_numbered = step.label.endswith("_hooks") and step.parent is not None and is_module(step.parent.value)
    after_dot = step.parent is not None and step.label.endswith(".")
    depth = step.depth + 1
    listers = [list_contents(obj, is_numbered) for list_contents in find_listers(kind)]
    if id(kind) not in classes:
        listers.append(list_class_attributes(obj, kind, classes))
    return [
        WalkStep(step, label[1:] if after_dot and label[:1] == "." else label, value, depth, how)
        for contents in listers
        for label, value, how in contents
        if not (id(type(value)) in ATOM_TYPES or is_closed(type(value)) or is_empty(value))
    ]
