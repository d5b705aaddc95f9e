"""What becomes of the names in a pickle: which of them are called by way of another, or put where Python calls them.

A name may be clean, and what it gives may be data, as long as it stays in the tree. Attacks are made of clean names
whose results are called, are classes of other objects, are attributes that Python looks up and calls, or are objects
that the whole process shares and the pickle changes. Everything that a pickle runs is a call, a BUILD or an item set:
`Flow` looks at each of them after the pickle was read, whatever is left of it in the tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from statecli.formats import _gadgets
from statecli.formats._pickle import Global, Key, Obj, Persistent, SetOf, Value

_DUNDER = re.compile(r"__\w+__\Z")
#: Attributes of Python's own that only say where something is from.
_SAID = frozenset(["__orig_class__", "__origin__", "__wrapped__"])
#: These keep the hooks of a module, and hooks.
_HOLDERS = frozenset(["collections.OrderedDict", *_gadgets.HOOKS])
_MAKERS = frozenset(["copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"])
#: These make something that is called later, if ever.
_LATER = frozenset(["functools.partial", "collections.defaultdict"])
#: What nothing that calls its arguments may be given to call.
_NEVER = frozenset([*_gadgets.CALLERS, *_gadgets.SPELLING, *_gadgets.SHARED, *_gadgets.HOOKS]) - {
    "collections.defaultdict"
}


def plain(name: Global) -> str:
    """As the tables of `_gadgets` have it."""
    return _gadgets.plain(name.module, name.name)


def _is_made(value: Obj) -> bool:
    """Whether it is a call of one of pickle's own, which only make an object of a class."""
    return type(value.cls) is Global and plain(value.cls) in _MAKERS and bool(value.args)


class Flow:
    """One pickle. `misuses`: why a name is not clean here, by its id; `kept`: names that are values somewhere.

    `called` are names that something else calls at once.
    """

    def __init__(self) -> None:
        self.misuses: dict[int, str] = {}
        self.kept: set[int] = set()
        self.called: set[int] = set()
        self._made: list[Obj] = []
        self._roots: dict[int, Global | None] = {}
        self._seen: set[int] = set()
        self._held: set[int] = set()

    def made(self, made: Obj) -> None:
        """A call, in the order of the pickle."""
        self._made.append(made)
        self._roots[id(made)] = self.root(made.args[0] if _is_made(made) else made.cls)

    def root(self, value: Value) -> Global | None:
        """The name that a call gives an object of, through calls of calls; itself if it is a name."""
        if type(value) is Obj:
            value = self._roots.get(id(value), value.cls)
        return value if type(value) is Global else None

    def is_tame(self, names: Iterable[Global]) -> bool:
        """Whether no name is of a kind whose use matters, and only names are called: so it is for most checkpoints."""
        known = [plain(one) for one in names]
        odd = (one in _NEVER or one.startswith(_NO_CONTAINERS) or _gadgets.is_made_empty(one) for one in known)
        return not any(odd) and all(type(one.cls) is Global for one in self._made)

    def note(self, name: Value, why: str) -> None:
        """The first reason stands."""
        root = self.root(name)
        if root is not None:
            self.misuses.setdefault(id(root), why)

    def follow(self, built: list[tuple[Value, Value]], loose: Iterable[Value]) -> None:
        """All calls, all BUILDs, and values that are reached from neither."""
        for one in self._made:
            self._call(one)
            self._added(one)
            self._walk(one, (one.args, one.kwargs, one.items, one.elems))
        for target, state in built:
            if type(target) is Obj:
                self._build(target, state)
            self._walk(target, (state,))
        self._walk(None, loose)

    def _call(self, made: Obj) -> None:
        if type(made.cls) is not Global:
            self.note(made.cls, "returns what it calls next")
            return
        name = plain(made.cls)
        if name in _gadgets.SPELLING:
            self.kept.add(id(made.cls))
        if made.how != "newobj" and _gadgets.is_made_empty(name):
            self.note(made.cls, "is called with arguments, where pickle makes an empty object")
        for place in _gadgets.CALLERS.get(name, ()):
            if place < len(made.args):
                self._callee(made.cls, name, place, made.args[place])
        self._rebuilt(made.cls, name, made.args)

    def _rebuilt(self, name: Global, called: str, args: Any) -> None:
        """A tensor is rebuilt from a storage or from another tensor; of any other object methods would be called."""
        if called == "torch._tensor._rebuild_from_type_v2" and len(args) > 2 and type(args[2]) is tuple:
            self._rebuilt(name, "torch._utils._rebuild_", args[2])
        elif called.startswith(("torch._utils._rebuild_", "torch.nn.parameter.")) and args and type(args[0]) is Obj:
            root = self.root(args[0])
            if root is None or not _is_data(plain(root)):
                self.note(name, "is given an object where a tensor's data belongs")

    def _added(self, made: Obj) -> None:
        root = self.root(made)
        if root is not None and (made.items or made.elems) and plain(root).startswith(_NO_CONTAINERS):
            self.note(root, "is no container, and is given items")

    def _build(self, target: Obj, state: Value) -> None:
        root = self.root(target)
        if root is not None and plain(root) == "types.GenericAlias":
            self.note(root, "hands the state that it is given on to what it stands for")
        if root is not None and plain(root) == "functools.partial" and type(state) is tuple and state:
            self._callee(root, "functools.partial", 0, state[0])

    def _callee(self, caller: Global, name: str, place: int, value: Value) -> None:
        """Something stands where `caller` takes what to call."""
        why = f"is called by {name}"
        if type(value) is Global:
            called = plain(value)
            if called in _NEVER or not _fits(name, place, called):
                self.note(value, why)
            if name not in _LATER:
                self.called.add(id(value))
        elif type(value) is Obj:
            root = self.root(value)
            if name != "collections.defaultdict" or root is None or plain(root) != "functools.partial":
                self.note(value, why)
                self.note(caller, "calls what another call gave")
        elif value is not None and type(value) is not str:
            self.note(caller, "calls what is no name")

    def _walk(self, holder: Value, values: Iterable[Value]) -> None:
        """Every name and pair in these values, down to the next call."""
        root = self.root(holder)
        holds = root is not None and plain(root) in _HOLDERS
        seen = self._held if holds else self._seen
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind is Global:
                self.kept.add(id(value))
            elif kind is Obj:
                self._object(value, holds)
            elif kind is Key:
                waiting.append(value.value)
            elif kind in _CONTAINERS and id(value) not in seen:
                seen.add(id(value))
                waiting.extend(self._contents(value))

    def _object(self, value: Obj, holds: bool) -> None:
        root = self.root(value)
        if not holds and root is not None and plain(root) in _gadgets.HOOKS:
            self.note(root, "is put where no module has its hooks")

    def _contents(self, value: Any) -> Iterable[Value]:
        """What is in a container; pairs whose key is an attribute that Python calls are noted."""
        if type(value) is dict:
            for key, one in value.items():
                self._pair(key, one)
            return [*value.values(), *(key for key in value if type(key) is Key)]
        if type(value) is SetOf:
            return value.elems
        if type(value) is Persistent:
            return (value.pid,)
        if len(value) == 2:
            self._pair(*value)
        return value  # type: ignore[no-any-return]

    def _pair(self, key: Value, value: Value) -> None:
        if type(key) is not str or key in _SAID or type(value) not in (Global, Obj):
            return
        if _DUNDER.match(key) or key in _LOOKED_UP:
            self.note(value, f"is put in the place of {key}")


def _is_data(name: str) -> bool:
    """Whether what this gives may be what a tensor is rebuilt from."""
    last = name.rpartition(".")[2]
    return name.startswith(_OF_TENSORS) or (name.startswith("torch.") and last.endswith(("Storage", "Tensor")))


#: What gives tensors, their storages, layouts and arrays.
_OF_TENSORS = (
    *("torch._utils.", "torch._tensor.", "torch.serialization.", "torch.storage.", "torch.nn.parameter."),
    *("torch.distributed.", "torch._subclasses.", "numpy."),
)
#: Their objects are no containers: what pickle adds to one reaches a method of it, or of what it stands for.
_NO_CONTAINERS = ("types.", "logging.", "functools.", "torch.nn.modules.", "torch.jit.", "torch.optim.")
#: Methods that rebuilding a tensor, and pickle itself, look up on what they are given.
_LOOKED_UP = frozenset(["as_subclass", "detach", "requires_grad_", "extend", "append", "setdefault"])

_CONTAINERS = frozenset([dict, list, tuple, SetOf, Persistent])


def _fits(caller: str, place: int, called: str) -> bool:
    """Whether this is what the caller is given there by those who write it."""
    if caller == "torch._tensor._rebuild_from_type_v2" and place == 0:
        return called.startswith("torch._utils._rebuild_")
    if caller == "copyreg._reconstructor" and place == 1:
        return called.startswith("builtins.")
    return True
