"""What becomes of the names in a pickle: which of them are called by way of another, or put where Python calls them.

A name may be clean, and what it gives may be data, as long as it stays in the tree. Attacks are made of clean names
whose results are called, are classes of other objects, are attributes that Python looks up and calls, or are objects
that the whole process shares and the pickle changes; or they have clean classes run their own methods on objects that
picklers never put there. Everything that a pickle runs is a call, a BUILD or an item set: `Flow` looks at each of them,
whatever is left of it in the tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import lru_cache
from typing import Any

from statecli.core import quoting
from statecli.pickle_scan import array_dtypes, compiled_modules, kept_functions, known_names, packed_weights
from statecli.pickle_scan import deferred_calls as _deferred
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles import safe_globals
from statecli.pickles.machine import Global, Key, Obj, Persistent, SetOf, Value

_DUNDER = re.compile(r"__\w+__\Z")
#: Attributes of Python's own that only say where something is from.
_SAID = frozenset(["__orig_class__", "__origin__", "__wrapped__"])
#: These keep the hooks of a module, and hooks.
_HOLDERS = frozenset(["collections.OrderedDict", *known_names.HOOKS])
_MAKERS = frozenset(["copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"])
#: These make something that is called later, if ever.
_LATER = frozenset(["functools.partial", "collections.defaultdict"])
#: What nothing that calls its arguments may be given to call.
_NEVER = frozenset([*known_names.CALLERS, *known_names.SPELLING, *known_names.SHARED, *known_names.HOOKS]) - {
    "collections.defaultdict"
}


@lru_cache(maxsize=1024)
def plain(name: Global) -> str:
    """As the tables of `_gadgets` have it."""
    return known_names.plain(name.module, name.name)


def _is_made(value: Obj) -> bool:
    """Whether it is a call of one of pickle's own, which only make an object of a class."""
    return type(value.cls) is Global and plain(value.cls) in _MAKERS and bool(value.args)


class Flow:
    """One pickle. `misuses`: why a name is not clean here, by its id; `kept`: names that are values somewhere.

    `called` are names that something else calls at once.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._array_types = array_dtypes.ArrayTypes(steps)
        self._deferred_calls = _deferred.Calls(self._named, steps)
        self._attributes_of_torch = kept_functions.Attributes(self._named, steps)
        #: Bytes of small storages of the archive, by their keys.
        self.read_storage: packed_weights.Read = lambda _: None
        self.misuses: dict[int, str] = {}
        self.kept: set[int] = set()
        self.called: set[int] = set()
        #: Calls in the order of the pickle, but for those that only rebuild tensors.
        self.calls: list[Obj] = []
        self._finished: set[int] = set()
        #: The names of the numpy types whose fields these dicts are.
        self._fields: dict[int, Value] = {}
        self._roots: dict[int, Global | None] = {}
        self._seen: set[int] = set()
        self._held: set[int] = set()
        #: Objects of C++ that pickle has made and that have no state yet, by their id.
        self._unbuilt: dict[int, Obj] = {}
        #: Names and the states that were judged as theirs.
        self._judged: set[tuple[int, int]] = set()
        #: Objects whose weights C++ packs, with their states as they are when it does.
        self._packed: list[tuple[Global, Value]] = []
        #: Containers in which no object is that a function may not be given.
        self._plain_arguments: set[int] = set()
        #: Arguments, by their ids, whose numpy types are held: many calls can share them.
        self._held_arguments: set[int] = set()
        #: Calls that are as torch.compile writes them.
        self._excused: Set[int] = frozenset()

    def made(self, made: Obj) -> None:
        """A call, in the order of the pickle."""
        self.calls.append(made)
        if id(made.args) not in self._held_arguments:
            self._held_arguments.add(id(made.args))
            self._array_types.hold(made.args)
        root = self._roots[id(made)] = self.root(made.args[0] if _is_made(made) else made.cls)
        for unbuilt in self._unbuilt.values():
            if self._named(unbuilt) in _PLACEMENTS:
                self.note(unbuilt, f"{_NO_STATE_YET} when the next call is made")
        if root is not None and plain(root) in _OF_CPP:
            self._unbuilt[id(made)] = made

    def hashes(self, keys: Iterable[Value]) -> None:
        """Values become keys or elements of a set: no object of C++ is among them, or in them, before its state.

        An object that pickle makes without a state is memory that nobody has written: its hash reads addresses there.
        """
        if self._unbuilt and any(type(key) in _NOT_PLAIN for key in keys):
            for unbuilt in self._unbuilt.values():
                self.note(unbuilt, f"{_NO_STATE_YET} when objects are hashed")

    def root(self, value: Value) -> Global | None:
        """The name that a call gives an object of, through calls of calls; itself if it is a name."""
        if type(value) is Obj:
            value = self._roots.get(id(value), value.cls)
        return value if type(value) is Global else None

    def changes(self, target: Value) -> None:
        """An item, an element or a state is given to `target`: to an object of the pickle's own, and before its state.

        Picklers write an object's elements, then its items, then its state, each once.
        """
        if type(target) is Global:
            self.note(target, "is changed by it for the whole process")
        elif id(target) in self._fields:
            self.note(self._fields[id(target)], "is given other fields after its state was set")
        elif type(target) is Persistent:
            self.note(target, "tells a storage, and it changes that")
        elif type(target) is Obj:
            root = self.root(target)
            if id(target) in self._finished:
                self.note(root, "is changed again after its state was set, which runs a method of it")
            name = plain(root) if root else ""
            own = target.how == "newobj" and name.startswith("accelerate.state.")
            if not own and (name in known_names.SHARED or name in known_names.SPELLING or _gives_any(name)):
                self.note(root, "gives an object of the whole process, and it changes that")

    def finishes(self, target: Value, state: Value) -> None:
        """A state is given to `target`. Raises OutOfSteps."""
        self.changes(target)
        self._finished.add(id(target))
        self._unbuilt.pop(id(target), None)
        root = self.root(target)
        name = plain(root) if root else ""
        if name.startswith("numpy.dtype") and not (
            type(target) is Obj and name == "numpy.dtype" and self._array_types.is_sound(target, state)
        ):
            self.note(root, "is given a state that numpy does not write, by which bytes may become addresses")
        elif name == "numpy.dtype" and type(state[4]) is dict:
            self._fields[id(state[4])] = root
        elif name.startswith(_OF_ARRAYS) and not self._array_types.is_sound_array(state):
            self.note(root, "is given no state of an array, or other objects than the array has elements")
        if root is not None and type(target) is Obj:
            # What is in the state may grow until the pickle ends, so that it is judged again then.
            self._build(target, state)
            if _is_packed(name):
                self._packed.append((root, self._copied(state)))

    def _copied(self, state: Value, depth: int = 0) -> Value:
        """Return the state with copies of the lists and dicts in it. Raises OutOfSteps."""
        if type(state) not in (list, tuple, dict) or depth == _DEPTH_OF_PACKED:
            return state
        self.steps.take(Budget.FLOW, 1 + len(state))
        if type(state) is dict:
            return {key: self._copied(value, depth + 1) for key, value in state.items()}
        return type(state)(self._copied(value, depth + 1) for value in state)

    def _named(self, value: Value) -> str | None:
        """The plain name of `root`."""
        root = self.root(value) if type(value) in (Global, Obj) else None
        return plain(root) if root else None

    def is_tame(self, names: Iterable[Global]) -> bool:
        """Whether all names are of tensors, and only names are called: so it is for most checkpoints."""
        return _TAME.issuperset(map(plain, names)) and all(
            type(one.cls) is Global and not one.kwargs and not _names_codec(plain(one.cls), one) for one in self.calls
        )

    def note(self, name: Value, why: str) -> None:
        """The first reason stands. What a storage is told by stands for it."""
        if type(name) is Persistent:
            told = name.pid if type(name.pid) is tuple else (name.pid,)
            name = next((one for one in told if type(one) is Global), None)
        root = self.root(name)
        if root is not None:
            self.misuses.setdefault(id(root), why)

    def follow(self, built: list[tuple[Value, Value]], loose: Iterable[Value], excused: Set[int] = frozenset()) -> None:
        """All calls, all BUILDs, and values that are reached from neither. Raises OutOfSteps.

        `excused`: calls, by their ids, that are as torch.compile writes them.
        """
        self._excused = excused
        self._judged.clear()
        self._deferred_calls = _deferred.Calls(self._named, self.steps)
        self._attributes_of_torch = kept_functions.Attributes(self._named, self.steps)
        for root, state in self._packed:
            if not _is_packable(plain(root), state, self.read_storage):
                self.note(root, "is given numbers that packing its weights crashes by, or reads and writes memory by")
        for one in self.calls:
            self.steps.take(Budget.FLOW, 1 + len(one.args))
            if id(one) in excused:
                continue
            self._call(one)
            self._added(one)
            self._walk(one, (one.args, one.kwargs, one.items, one.elems))
        for target, state in built:
            self.steps.take(Budget.FLOW)
            if id(target) in excused:
                continue
            if type(target) is Obj:
                self._build(target, state)
            self._walk(target, (state,))
        self._walk(None, loose)

    def stored(self, storages: Iterable[Persistent]) -> None:
        """What the container is asked for is told by names, text and numbers: attributes of an object would be read.

        Raises OutOfSteps.
        """
        for one in storages:
            self.steps.take(Budget.FLOW, len(one.pid) if type(one.pid) is tuple else 1)
            for part in one.pid if type(one.pid) is tuple else (one.pid,):
                if type(part) is Obj:
                    self.note(part, "gives what a storage is looked up by")

    def _call(self, made: Obj, depth: int = 0) -> None:
        """Judge a call, and each call that it makes at once of what it is given."""
        if depth > _MAX_INDIRECT:
            self.note(made.cls, f"is called through more than {_MAX_INDIRECT} functions that call what they are given")
            return
        if type(made.cls) is not Global:
            self.note(made.cls, "returns what it calls next")
            return
        name = plain(made.cls)
        self.steps.take(Budget.FLOW, len(name) // _STEP_OF_NAME)
        if name in known_names.SPELLING:
            self.kept.add(id(made.cls))
        if made.kwargs and _is_clean(name):
            self.note(made.cls, "is given keyword arguments, which no pickler writes for it")
        if (made.how != "newobj" and known_names.is_made_empty(name)) or name in _ARRAYS:
            self.note(made.cls, "is called with arguments, where pickle makes an empty object")
        for place in known_names.CALLERS.get(name, ()):
            if place < len(made.args):
                self._callee(made.cls, name, place, made.args[place])
        for indirect in calls_made_by(name, made.args):
            if type(indirect.cls) is Global:
                self.called.add(id(indirect.cls))
                self._call(indirect, depth + 1)
        self._rebuilt(made.cls, name, made.args)
        if name in known_names.BIT_GENERATORS and made.how == "newobj":
            self.note(made.cls, "is made without its state, which crashes the process that uses it")
        if name == _POLYNOMIAL and (made.how != "newobj" or made.args or made.kwargs):
            self.note(made.cls, "is called with arguments, where pickle makes an empty object")
        if name == array_dtypes.STRING_TYPE and not array_dtypes.is_string_type(made):
            self.note(made.cls, "is given other values than numpy writes for a type of texts")
        if name == "numpy.dtype" and not array_dtypes.is_told_by_code(made):
            self.note(made.cls, "is given a type in another way than by the code that numpy writes")
        if _names_codec(name, made):
            self.note(made.cls, "is given a codec that no pickler names; some take hours for a megabyte")
        if name in _CONVERTERS:
            self._converted(made.cls, made.args)
        elif name == "functools.partial":
            self._deferred(made.args[:1], made.args[1:], made.kwargs)
        elif name.startswith("accelerate.state.") and (made.how != "newobj" or made.args or made.kwargs):
            self.note(made.cls, "sets up the whole process when it is called")
        elif not _keeps(made.how, name):
            of = (self._named(made) or name) if _is_made(made) else name
            self._given(made.cls, of, (made.args, made.kwargs))
        if name == _EMPTY_UNTIL_BUILT and type(made.state) is not tuple:
            self.note(made.cls, "is called and gets no state, so that there is an address of 0 in it")
        if self._named(made) in _PLACEMENTS and type(made.state) is not dict:
            self.note(made, "is made without the state that torch writes, so that its memory is never written")
        if name == "numpy.dtype" and made.args and type(made.args[0]) not in (str, Global):
            self.note(made.cls, "is told by something else than its code")
        elif name in _SCALARS and not self._array_types.is_sound_scalar(made.args):
            self.note(made.cls, "is given something else than the bytes or the array of its type")
        if name == "types.SimpleNamespace":
            self._attributes(made.cls, name, made.args[0] if made.args else None)
        self._attributes(made.cls, name, made.kwargs)

    def _given(self, name: Global, called: str, args: Iterable[Value]) -> None:
        """Functions call methods of what they are given: of an object that the pickle made, any that it wants."""
        waiting: list[Value] = [part for part in args if type(part) in _MAY_HOLD]
        entered: set[int] = set()
        while waiting:
            value = _untagged(waiting.pop())
            kind = type(value)
            if kind is Obj:
                root = self._named(value)
                if not (root is None or root.startswith(_GIVEN) or root in _ENUMERATIONS):
                    if _is_clean(called):
                        self.note(name, "is given an object, whose methods it calls")
                    return
                within: Sequence[Value] = ()
                if root in _GONE_THROUGH:
                    within = [*value.args, *(value.elems or ()), *(value.items or {}).values()]
            else:
                within = _within(value)
            if within and id(value) not in entered and id(value) not in self._plain_arguments:
                entered.add(id(value))
                self.steps.take(Budget.FLOW, len(within))
                waiting += [part for part in within if type(part) in _MAY_HOLD]
        self._plain_arguments |= entered

    def _deferred(self, function: tuple[Value, ...], args: Value, kwargs: Value) -> None:
        """What a partial would call, with what it holds. Names that are not clean are told without this."""
        name = self._named(function[0]) if function else None
        if name and _is_clean(name) and not self._deferred_calls.is_of_data(name, args, kwargs):
            why = "would be called by a partial, and is no function of tensors or is not given plain values"
            self.note(function[0], why)

    def _converted(self, name: Global, args: tuple[Value, ...]) -> None:
        """What is made of an object's items is computed by its methods, and is hidden here: picklers give literals."""
        for one in args:
            root = self.root(one) if type(one) is Obj else None
            if type(one) is Obj and (root is None or not plain(root).startswith(_LITERAL)):
                self.note(name, "is given an object, whose methods compute what it holds")

    def _rebuilt(self, name: Global, called: str, args: Any) -> None:
        """A tensor is rebuilt from a storage or from another tensor; of any other object methods would be called."""
        if called == "torch._tensor._rebuild_from_type_v2" and len(args) > 2:
            if type(args[2]) is not tuple or type(args[-1]) is Obj:
                self.note(name, "is given an object where arguments or a state belong")
            for one in args[3] if len(args) > 3 and type(args[3]) is tuple else args[3:]:
                self._attributes(name, called, one)
        elif called == "torch._utils._rebuild_parameter_with_state" and len(args) > 3:
            self._attributes(name, called, args[3])
        if called == _JAGGED and args:
            parts = args[0].values() if type(args[0]) is dict else args
            self.steps.take(Budget.FLOW, len(parts))
            for one in parts:
                if type(one) is Obj:
                    self._rebuilt(name, "torch._utils._rebuild_", (one,))
        if called.startswith(_WITH_HOOKS):
            for one in args:
                if type(one) is Obj and self._named(one) == "collections.OrderedDict" and not self._is_empty(one):
                    self.note(name, "is given hooks, which torch does not write for tensors")
        if called.startswith(("torch._utils._rebuild_", "torch.nn.parameter.")) and args and type(args[0]) is Obj:
            root = self.root(args[0])
            if root is None or not _is_data(plain(root)):
                self.note(name, "is given an object where a tensor's data belongs")

    def _is_empty(self, hooks: Obj) -> bool:
        return kept_functions.pairs_of(hooks, self._named) == []

    def _added(self, made: Obj) -> None:
        root = self.root(made)
        if root is None or not (made.items or made.elems):
            return
        name = plain(root)
        if name not in _HOLD_ITEMS and _is_clean(name):
            self.note(root, "is no container, and is given items")
        elif made.items and name in _HOLD_ELEMENTS:
            self.note(root, "is a sequence, and is given items")
        elif made.items and name.endswith(".AttributeDict"):
            self._attributes(root, name, made.items)
        if name not in _HASHED and any(type(key) is Key for key in made.items or ()):
            self.note(root, "is given an attribute whose name is computed")

    def _build(self, target: Obj, state: Value) -> None:
        root = self.root(target)
        if root is None:
            return
        name = plain(root)
        if _is_clean(name) and not _is_state(name, state):
            self.note(root, "is given a state that is no dict of attributes")
        if name == "types.GenericAlias":
            self.note(root, "hands the state that it is given on to what it stands for")
        if name == "functools.partial" and type(state) is tuple and state:
            self._callee(root, "functools.partial", 0, state[0])
            self._deferred(state[:1], *(*state[1:3], None, None)[:2])
        if (
            name.startswith(_MODULES)
            and ".rnn." in name
            and type(state) is dict
            and not _is_depth(state.get("num_layers"))
        ):
            self.note(root, "is given a number of layers that no memory holds")
        if (
            kept_functions.is_module_class(name)
            and not packed_weights.is_convolution(name)
            and not kept_functions.has_modules(state, self._named)
        ):
            self.note(root, "is given a state that is no module's")
        if name == _HANDLE and not self._is_handle_state(state):
            self.note(root, "is given a state that is no hook's, by which it changes the numbers of all later hooks")
        if name == _POLYNOMIAL and not self._is_polynomial_state(state):
            self.note(root, "is given a state that is none of an array and a name")
        if name in _GENERATORS and not self._is_generator_state(state):
            self.note(root, "is given a state that torch does not write, by which bytes may become addresses")
        if name.startswith(_NUMPY_RANDOM) and not _is_within_table(state):
            self.note(root, "is given a position outside its table, at which the next draw reads memory")
        if type(state) is Obj and not name.startswith(_NUMPY_RANDOM) and _is_clean(name):
            self.note(root, "is given a state that a call computed")
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if type(parts[-1]) is dict and len(parts) == 2 and _is_clean(name) and not name.startswith(_SLOTTED):
            self.note(root, "is given a state by setting attributes, which runs what they are properties of")
        for one in parts:
            self._attributes(root, name, one)

    def _is_handle_state(self, state: Value) -> bool:
        """Return whether it is the dict of a hook, the hook's number in it and other dicts.

        The next hook of any module gets the next number. After infinity all hooks have one number, and each removes
        the one before it.
        """
        if type(state) is not tuple or len(state) not in (2, 3) or type(state[1]) is not int:
            return False
        others = state[2] if len(state) == 3 and state[2] is not None else ()
        if type(others) is not tuple or not 0 <= state[1] < _MOST_HOOKS:
            return False
        self.steps.take(Budget.FLOW, len(others))
        dicts = (one for one in (state[0], *others) if one is not None)
        return all(type(one) is Obj and self._named(one) == "collections.OrderedDict" for one in dicts)

    def _is_polynomial_state(self, state: Value) -> bool:
        """Return whether it is a dict of arrays and texts: the polynomial calls methods of its coefficients."""
        values = list(state.values()) if type(state) is dict else [state]
        self.steps.take(Budget.FLOW, len(values))
        return all(type(value) is str or self._named(value) in _RECONSTRUCTORS for value in values)

    def _is_generator_state(self, state: Value) -> bool:
        """Whether it is a seed, an offset and a tensor. torch reads the three without looking at their number."""
        if type(state) is not tuple or len(state) != 3 or type(state[0]) is not int:
            return False
        root = self.root(state[2]) if type(state[2]) is Obj else None
        rebuilt = root is not None and plain(root).startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_"))
        return type(state[1]) in (int, type(None)) and rebuilt

    def _attributes(self, root: Global, name: str, state: Value) -> None:
        """The attributes that a BUILD sets. A state that many objects share is judged once for each class."""
        if (id(root), id(state)) in self._judged:
            return
        self._judged.add((id(root), id(state)))
        self.steps.take(Budget.FLOW, len(state) if type(state) is dict else 1)
        is_of_torch = known_names.is_class(name)
        for key, value in state.items() if type(state) is dict else ():
            if type(key) is Key and _is_clean(name):
                self.note(root, "is given an attribute whose name is computed")
            elif key in _OF_THE_CLASS:
                self.note(root, f"is given another {key} than it has")
            elif key == "__overloads__" and value == {}:  # torch.jit.script sets it on each module
                continue
            elif type(value) in (dict, list, tuple) and _is_dunder(key) and _is_clean(name):
                self.note(root, f"is given {quoting.name(key)}, by which code finds out what it is")
            elif is_of_torch and type(key) is str:
                if why := self._attributes_of_torch.misuse(name, key, value):
                    self.note(root, why)
                elif name.startswith("torch.optim.") and key in _OF_OPTIMIZERS and not _OF_OPTIMIZERS[key](self, value):
                    self.note(root, f"is given an object for its {key}, whose methods it calls")
            elif self._hides(name, key, value) and _is_clean(name):
                self.note(root, f"is given what can be called in the place of {quoting.name(str(key))}")

    def _hides(self, holder: str, key: Value, value: Value) -> bool:
        """Whether a function is put where code finds it as a method of this object, or calls it with others."""
        values = value if type(value) in (list, tuple) else (value,)
        self.steps.take(Budget.FLOW, len(value) if type(value) is dict else len(values))
        found = [one for one in values if _deferred.is_callable(one, self._named)]
        if holder.startswith(_OF_VALUES) or known_names.is_configuration(holder):
            return bool(found)
        return key in _METHODS and bool(found) and not holder.startswith("__torch__.")

    def _callee(self, caller: Global, name: str, place: int, value: Value) -> None:
        """Something stands where `caller` takes what to call."""
        why = f"is called by {name}"
        if type(value) is Global:
            called = plain(value)
            expected = _EXPECTED.get((name, place))
            never = called in _NEVER or (called in _ARRAYS and "numpy" not in name)
            if never if expected is None else _is_clean(called) and not called.startswith(expected):
                self.note(value, why)
            if name not in _LATER:
                self.called.add(id(value))
            elif known_names.is_configuration(called) or _deferred.is_callback(called):
                self.note(value, why)
        elif type(value) is Obj:
            root = self.root(value)
            if name != "collections.defaultdict" or root is None or not self._is_factory(value, plain(root)):
                self.note(value, why)
                self.note(caller, "calls what another call gave")
        elif value is not None and type(value) is not str:
            self.note(caller, "calls what is no name")

    def _is_factory(self, value: Obj, name: str) -> bool:
        """Return whether a defaultdict may call this for a key that it lacks: a partial of a container.

        It does so while the file is loaded, if it stands where a class looks something up.
        """
        function = value.args[0] if value.args else None
        made = value.state[0] if type(value.state) is tuple and value.state else function
        return name == "functools.partial" and all(_deferred.is_container(one, self._named) for one in (function, made))

    def _walk(self, holder: Value, values: Iterable[Value]) -> None:
        """Every name and pair in these values, down to the next call."""
        root = self.root(holder)
        holds = root is not None and plain(root) in _HOLDERS
        seen = self._held if holds else self._seen
        waiting = list(values)
        self.steps.take(Budget.FLOW, len(waiting))
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
                contents = self._contents(value)
                self.steps.take(Budget.FLOW, len(contents))
                waiting.extend(contents)

    def _object(self, value: Obj, holds: bool) -> None:
        root = self.root(value)
        if not holds and root is not None and plain(root) in known_names.HOOKS:
            self.note(root, "is put where no module has its hooks")
        if id(value) in self._excused and not compiled_modules.is_module(value):
            self.note(root, "is put where no compiled module has it")

    def _contents(self, value: Any) -> Sequence[Value]:
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
        if type(value) not in (Global, Obj):
            return
        text = self._text_of(key.value if type(key) is Key else key)
        if text is _COMPUTED:
            self.note(value, "is put in the place of a name that is computed")
        elif text is not None and (_is_dunder(text) or text in _LOOKED_UP):
            self.note(value, f"is put in the place of {quoting.name(text)}")

    def _text_of(self, key: Value) -> str | None:
        """Return the text that a key is equal to; _COMPUTED where it may be any, None where it is no text."""
        if type(key) is str:
            return key
        name = self._named(key) if type(key) is Obj else None
        if name in _OF_TEXT:
            return key.args[0] if len(key.args) == 1 and type(key.args[0]) is str else _COMPUTED
        if name == _TAG:
            return self._text_of(key.args[0]) if key.args and type(key.args[0]) in (str, Obj) else None
        if name in _SCALARS and not array_dtypes.is_number(key.args[0] if key.args else None):
            return array_dtypes.text_of(key.args) or _COMPUTED
        return None


def _is_depth(layers: Value) -> bool:
    """Whether a recurrent module has as many layers; it makes names for each of them when it gets its state."""
    return layers is None or (type(layers) is int and layers <= _MOST_LAYERS)


def _is_within_table(state: Value, depth: int = 0) -> bool:
    """Return whether the state of a generator of numpy has no position outside the table that the position is of."""
    if type(state) is tuple and depth < _DEPTH_OF_POSITION:
        return all(_is_within_table(part, depth + 1) for part in state)
    if type(state) is not dict or depth == _DEPTH_OF_POSITION:
        return type(state) not in (dict, tuple, list)
    positions = ((state.get(key, 0), length) for key, length in _TABLES_OF_GENERATORS.items())
    is_within = all(type(position) is int and 0 <= position <= length for position, length in positions)
    return is_within and all(_is_within_table(part, depth + 1) for part in state.values() if type(part) is dict)


def _is_packed(name: str) -> bool:
    """Return whether C++ packs the state of a class of this name."""
    packed = packed_weights.is_convolution(name) or name.startswith(packed_weights.CLASSES)
    return packed or name == _EMPTY_UNTIL_BUILT


def _is_state(name: str, state: Value) -> bool:
    """Return whether this is a kind of state that objects of a class of this name have.

    `__setstate__` of torch's modules and optimizers gives the state to `dict.update`, which takes pairs as well.
    """
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if state is not None and all(part is None or type(part) is dict for part in parts):
        return True
    of_tensors = name.startswith("torch.") and name.endswith(("Tensor", "Storage"))
    return name.startswith(_STATES) or of_tensors or (_is_packed(name) and type(state) is tuple)


def _within(value: Any) -> Sequence[Value]:
    """Return what code finds that goes through a value."""
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return [*value.values(), *(key.value for key in value if type(key) is Key)]
    return value.elems if type(value) is SetOf else ()


def _is_packable(name: str, state: Value, read: packed_weights.Read) -> bool:
    """Return whether C++ can pack this state, if the class of this name has C++ pack it."""
    if packed_weights.is_convolution(name):
        return packed_weights.is_convolution_state(state)
    if name.startswith(packed_weights.CLASSES):
        return packed_weights.is_packed_state(name.removeprefix(packed_weights.CLASSES), state, read)
    if name == _EMPTY_UNTIL_BUILT:
        if type(state) is not tuple or len(state) != 2 or type(state[1]) is not str:
            return False
        of_class = state[1].removeprefix(packed_weights.CLASSES)
        return state[1].startswith(packed_weights.CLASSES) and packed_weights.is_packed_state(of_class, state[0], read)
    return True


def _is_dunder(key: Value) -> bool:
    return type(key) is str and _DUNDER.match(key) is not None and key not in _SAID


def _is_clean(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return known_names.is_clean(module, last)


def _gives_any(name: str) -> bool:
    """Whether it is a clean function that is not known to make a new object: it may give one that others have."""
    last = name.rpartition(".")[2]
    return last.lstrip("_")[:1].islower() and name not in _NEW and "._rebuild_" not in name and _is_clean(name)


def _keeps(how: str, name: str) -> bool:
    """Whether this only keeps what it is given: it is a tuple with names, an exception, or has rules of its own."""
    kept = name.startswith(_KEEPERS) or name.endswith(("Error", "Exception", "Warning"))
    return kept or (how == "newobj" and name.startswith("torch.ao.quantization.qconfig."))


def _is_data(name: str) -> bool:
    """Whether what this gives may be what a tensor is rebuilt from."""
    last = name.rpartition(".")[2]
    return name.startswith(_OF_TENSORS) or (name.startswith("torch.") and last.endswith(("Storage", "Tensor")))


#: What gives tensors, their storages, layouts and arrays.
_OF_TENSORS = (
    *("torch._utils.", "torch._tensor.", "torch.serialization.", "torch.storage.", "torch.nn.parameter."),
    *("torch.distributed.", "torch._subclasses.", "numpy."),
)
#: Objects that functions and constructors are given: of tensors, and values without attributes of the pickle's making.
_GIVEN = (
    *_OF_TENSORS,
    *("builtins.", "_codecs.encode", "collections.OrderedDict", "collections.Counter", "collections.defaultdict"),
    *("datetime.", "decimal.", "fractions.", "pathlib.", "zoneinfo.", "uuid.", "operator.", "torch.Size"),
    *("functools.reduce", "torch.device", "torch.Generator", "torchao.", "__torch__."),
)


def _untagged(value: Any) -> Any:
    """What TorchScript says the type of: such a call gives its first argument back. It writes no call in a call."""
    if type(value) is Obj and type(value.cls) is Global and plain(value.cls) == _TAG and value.args:
        return value.args[0]
    return value


_TAG = "torch.jit._pickle.restore_type_tag"
#: What keeps its arguments, or is looked at by other rules.
_KEEPERS = (
    *("functools.", "operator.", "collections.defaultdict", "types.GenericAlias", "torch.jit._pickle."),
    "torch._tensor._rebuild_from_type_v2",
)
#: What gives a value that the process has anyway; the others of them give what they are given.
_ENUMERATIONS = frozenset(
    one for one in known_names.SHARED if not one.startswith(("torch.jit.", "logging.", "accelerate.state."))
)
#: Classes that have no functions among their attributes.
_OF_VALUES = ("torch._utils.", "torch._tensor.", "collections.", "torch.distributed.", "torchao.")
#: Containers whose elements a function goes through that is given one.
_GONE_THROUGH = frozenset(
    [
        *known_names.names("builtins", "list tuple set frozenset dict"),
        *known_names.names("collections", "OrderedDict Counter defaultdict deque"),
    ]
)
#: What makes tensors of their data and their hooks.
_WITH_HOOKS = ("torch._utils._rebuild_tensor_v", "torch._utils._rebuild_qtensor", "torch._utils._rebuild_parameter")
#: Classes whose state is something else than a dict, or two dicts, of attributes.
_STATES = (
    *("numpy.", "random.Random", "functools.partial", "types.GenericAlias", "__torch__."),
    *("torch.ScriptObject", "torch.Generator", "torch._C.Generator", "torch.utils.hooks.RemovableHandle"),
    *("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.nn.parameter.", "torch._dynamo.decorators._DimRange"),
    *("torch.distributed._shard.sharded_tensor.api.ShardedTensor",),
    *("torch.distributed._shard.sharded_tensor.metadata.TensorProperties",),
    *("torch.distributed.checkpoint.metadata.TensorProperties",),
)
#: Containers in containers of a state that C++ packs.
_DEPTH_OF_PACKED = 8
#: What Python's own code calls of what it takes for a container.
_METHODS = frozenset(name for kind in (dict, list, set) for name in dir(kind) if name[0] != "_")
#: What torch's own unpickler admits, of which nothing can be made but tensors, dicts and text.
_TAME = safe_globals.allowed() - {
    *("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state"),
}
#: numpy has a function of its own that makes them empty; they themselves take a buffer for objects.
_ARRAYS = frozenset(
    ["numpy.ndarray", "numpy.recarray", "numpy.rec.recarray", "numpy.matrix", "numpy.matrixlib.defmatrix.matrix"]
)
#: What gives arrays, and their classes. numpy calls the method of an array for a state of each.
_OF_ARRAYS = ("numpy.ma.", "numpy.core.", "numpy._core.", *_ARRAYS)
_RECONSTRUCTORS = frozenset(
    f"numpy.{core}.{name}" for core in ("core", "_core") for name in ("multiarray._reconstruct", "numeric._frombuffer")
)
_NUMPY_RANDOM = "numpy.random."
#: Numbers in the table of MT19937 and in the buffer of Philox, by the keys of the positions in them.
_TABLES_OF_GENERATORS = {"pos": 624, "buffer_pos": 4}
#: Tuples and dicts that such a position is in: numpy writes two or three.
_DEPTH_OF_POSITION = 4
_HANDLE = "torch.utils.hooks.RemovableHandle"
_MOST_HOOKS = 2**31
_POLYNOMIAL = "numpy.poly1d"
_SCALARS = frozenset(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core"))
#: Where recurrent modules of torch are defined.
_MODULES = ("torch.nn.modules.", "torch.ao.nn.")
#: What makes a text of its argument, and what a computed key stands for.
_OF_TEXT = frozenset(["builtins.str", "numpy.str_", "collections.UserString", "torch.torch_version.TorchVersion"])
_COMPUTED = "__computed__"
_MOST_LAYERS = 4096
_GENERATORS = frozenset(["torch.Generator", "torch._C.Generator"])
#: torch gives it the state of an object of C++ at once.
_EMPTY_UNTIL_BUILT = "torch.ScriptObject"
#: Objects of C++: where a tensor of torch.distributed lies.
_PLACEMENTS = frozenset(
    name
    for module in ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
    for name in known_names.names(module, "Shard Replicate Partial _Partial _StridedShard")
)
_OF_CPP = _PLACEMENTS | {_EMPTY_UNTIL_BUILT}
_NO_STATE_YET = "is memory that nobody has written"
#: Keys and elements whose hash is computed of other values.
_NOT_PLAIN = frozenset([Key, Obj, SetOf, tuple])
_JAGGED = "torch.nested._internal.nested_tensor._rebuild_njt"
#: What picklers add items and elements to. To anything else they would reach a method of it, or of what it stands for.
_HASHED = frozenset(
    ["collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict", *_MAKERS]
)
_HOLD_ELEMENTS = frozenset(["collections.deque", "builtins.list", "builtins.set"])
_HOLD_ITEMS = _HASHED | {
    *_HOLD_ELEMENTS,
    "torch.nn.utils.prune.PruningContainer",
    *(one for one in known_names.DATA if one.endswith(".AttributeDict")),
}
#: What makes a container or a number of what it is given; what picklers give to it beside literals.
_CONVERTERS = frozenset(
    [
        *known_names.names("builtins", "dict list tuple set frozenset int float bool str bytes bytearray"),
        *known_names.names("collections", "OrderedDict Counter deque ChainMap UserDict UserList UserString"),
        *("torch.Size", "torch.torch_version.TorchVersion"),
    ]
)
_LITERAL = ("_codecs.encode", "builtins.", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
#: Functions, and classes that are written small, which make a new object.
_NEW = frozenset(
    [
        *known_names.names("builtins", "dict list set bytearray object"),
        *("collections.deque", "collections.defaultdict", "functools.partial", "array.array", *_MAKERS),
        *(
            "numpy.ndarray",
            "numpy.dtype",
            "numpy.poly1d",
            "numpy.recarray",
            "numpy.rec.recarray",
            "numpy.ma.core._mareconstruct",
        ),
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        *(name for name in known_names.DATA if name.startswith("numpy.random.")),
        "deepspeed.utils.tensor_fragment.fragment_address",
    ]
)
#: Clean classes with slots, whose state is of two dicts.
_SLOTTED = ("torch.distributed.", "torch._dynamo.", "numpy.", "uuid.")
#: What a state may not set: the class of an object, all its attributes at once, other names for its attributes.
_OF_THE_CLASS = frozenset(["__class__", "__dict__", "__setstate__", "attribute_map"])


def _is_dict(flow: Flow, value: Value) -> bool:
    root = flow.root(value) if type(value) is Obj else None
    return type(value) is dict or (root is not None and plain(root) in _HASHED)


def _is_groups(flow: Flow, value: Value) -> bool:
    """Return whether these are dicts of Python's own: a defaultdict calls what it holds for a key that it lacks."""
    flow.steps.take(Budget.FLOW, len(value) if type(value) is list else 1)
    return type(value) is list and all(type(group) is dict for group in value)


def _is_states(flow: Flow, value: Value) -> bool:
    """Return whether it is a dict, or a defaultdict of them, of what an optimizer keeps for each parameter."""
    if not _is_dict(flow, value):
        return False
    held: Any = value.items or {} if type(value) is Obj else value
    arguments: Any = value.args if type(value) is Obj else ()
    flow.steps.take(Budget.FLOW, len(held))
    return not any(map(_holds_mappings, arguments)) and all(type(kept) in (dict, list) for kept in held.values())


def _holds_mappings(argument: Value) -> bool:
    """Return whether an argument of a dict's constructor is anything but a class: pickle writes its items apart."""
    return type(argument) is not Global and argument is not None


#: What an optimizer looks up in what it is given.
_OF_OPTIMIZERS = {"defaults": _is_dict, "param_groups": _is_groups, "state": _is_states}
#: Methods that rebuilding a tensor, and pickle itself, look up on what they are given.
_LOOKED_UP = frozenset(["as_subclass", "detach", "requires_grad_", "extend", "append", "add", "setdefault"])

_CONTAINERS = frozenset([dict, list, tuple, SetOf, Persistent])
#: What an object may be, or be in.
_MAY_HOLD = frozenset([dict, list, tuple, SetOf, Obj])


#: Characters of a name that is called which count as a step.
_STEP_OF_NAME = 64
#: How many functions that call what they are given may stand one in another.
_MAX_INDIRECT = 8
#: What picklers put where a function takes something to call, by its plain name's beginning. Other clean names there
#: are misused; names that are not clean are reported by themselves.
_EXPECTED = {
    ("torch._tensor._rebuild_from_type_v2", 0): ("torch._utils._rebuild_", _JAGGED),
    ("copyreg._reconstructor", 1): ("builtins.",),
    ("array._array_reconstructor", 0): ("array.array",),
    **{(f"numpy.{core}.multiarray._reconstruct", 0): ("numpy.ma.", *_ARRAYS) for core in ("core", "_core")},
    ("numpy.ma.core._mareconstruct", 0): ("numpy.ma.",),
    ("numpy.ma.core._mareconstruct", 1): tuple(_ARRAYS),
    **{
        (constructor, 1): (known_names.BIT_GENERATOR_CONSTRUCTOR,) for constructor in known_names.GENERATOR_CONSTRUCTORS
    },
    (known_names.BIT_GENERATOR_CONSTRUCTOR, 0): known_names.BIT_GENERATORS,
    **{
        (f"numpy.random.{module}.__pyx_unpickle_SeedSequence", 0): (f"numpy.random.{module}.SeedSequence",)
        for module in ("bit_generator", "_bit_generator")
    },
}


#: What takes the name of a codec, and codecs that picklers and C know: others are Python code of the standard library.
_ENCODERS = frozenset(
    [
        *("_codecs.encode", *known_names.names("builtins", "str bytes bytearray")),
        *("numpy.str_", "numpy.bytes_", "torch.torch_version.TorchVersion"),
    ]
)
_CODECS = frozenset(
    [
        "latin1",
        "latin-1",
        "iso-8859-1",
        "ascii",
        "us-ascii",
        "utf8",
        "utf-8",
        "utf-16",
        "utf-32",
        "utf-16-le",
        "utf-32-le",
    ]
)


def _names_codec(name: str, made: Obj) -> bool:
    """Whether a call gives a function that encodes or decodes any but an ordinary codec."""
    if name not in _ENCODERS:
        return False
    codec: Value = made.args[1] if len(made.args) > 1 else "utf8"
    if made.kwargs and "encoding" in made.kwargs:
        codec = made.kwargs["encoding"]
    return type(codec) is not str or codec.lower().replace("_", "-") not in _CODECS


def named_arguments(kwargs: Value) -> dict[Value, Value]:
    """Return the keyword arguments of a call; what is no dict is in the place of a name that is computed."""
    return kwargs if type(kwargs) is dict else {Key(kwargs): None}


def calls_made_by(function: str, args: tuple[Value, ...]) -> Iterator[Obj]:
    """Yield the calls that a clean function makes at once of what it is given, with the arguments that it passes on."""
    match function, args:
        case "copyreg.__newobj__", (cls, *rest):
            yield Obj(cls, tuple(rest), "newobj")
        case "copyreg.__newobj_ex__", (cls, rest, kwargs):
            yield Obj(cls, rest if type(rest) is tuple else (rest,), "newobj", named_arguments(kwargs))
        case "copyreg._reconstructor", (_, base, state):
            yield Obj(base, (state,))
        case "torch._tensor._rebuild_from_type_v2", (rebuild, _, rest, *_):
            yield Obj(rebuild, rest if type(rest) is tuple else (rest,))
        case known_names.BIT_GENERATOR_CONSTRUCTOR, (bit_generator, *_):
            yield Obj(bit_generator, ())
        case constructor, (bit_generator,) if constructor in known_names.GENERATOR_CONSTRUCTORS:
            yield Obj(bit_generator, ())
        case constructor, (bit_generator, create, *_) if constructor in known_names.GENERATOR_CONSTRUCTORS:
            yield Obj(create, (bit_generator,))
