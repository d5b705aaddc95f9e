"""Find misused names in a pickle: names that are called indirectly, or stored where Python calls them.

A name is clean if it is on the list of names that only build data, and the loaded object only stores its result.
Attacks use clean names in other ways. They call the result, use it as the class of another object, or store it where
Python looks up and calls an attribute. They change an object that the whole process shares. Or they pass an unusual
object to a clean class, which then runs the object's methods. Everything that a pickle runs is a call, a state or an
item. `Flow` checks each of these, even if the loaded object does not keep the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from statecli.core import quoting
from statecli.pickle_scan import (
    compiled_modules,
    computed_bytes,
    dates,
    deferred_calls,
    exceptions,
    expected_calls,
    kept_functions,
    known_names,
    numpy_dtype_states,
    optimizer_attributes,
    packed_weights,
    restored_states,
)
from statecli.pickle_scan.expected_calls import get_plain_name, is_clean
from statecli.pickle_scan.nested_data import may_be_nested_data
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickle_scan.text_values import COMPUTED_TEXT, read_text
from statecli.pickles.nodes import Build, Global, Key, Obj, Persistent, SetOf, Value

_COMPUTED_ATTRIBUTE = (
    "gets an attribute whose name the pickle computes during loading, so statecli cannot check the name"
)


class _Roots(dict[int, "Global | None"]):
    """Map from the id of an object to the name of the class or function whose call built the object.

    The methods are not in `Flow`, because a reference cycle would keep the graph of the pickle in memory until
    Python searches for cycles.
    """

    def get_root(self, value: Value) -> Global | None:
        """Return the name that an object was built from, or the value itself if it is a name; else None."""
        if type(value) is Obj:
            value = self.get(id(value), value.cls)
        return value if type(value) is Global else None

    def get_name(self, value: Value) -> str | None:
        """Return the root of a value (see `get_root`) as `module.name`; None if the value has no root."""
        root = self.get_root(value) if type(value) in (Global, Obj) else None
        return get_plain_name(root) if root else None


class Flow:
    """Checker of the calls that a pickle makes, and of the items and states that it sets.

    `misuses`: reason why a name is not clean in this pickle, by the id of the name. `kept_names`: names used as values.
    `called_names`: names that another call calls immediately.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._roots = _Roots()
        self.get_root, self._get_root_name = self._roots.get_root, self._roots.get_name
        self._array_types = numpy_dtype_states.ArrayTypes(steps)
        self._deferred_calls = deferred_calls.DeferredCalls(self._get_root_name, steps)
        self._attributes_of_torch = kept_functions.Attributes(self._get_root_name, steps)
        #: Function that returns the bytes of a small storage of the archive by its key.
        self.read_storage: packed_weights.ReadStorage = lambda _: None
        self.misuses: dict[int, str] = {}
        #: Bytes that calls compute and that may be a pickle.
        self.computed_data: list[bytes] = []
        self.kept_names: set[int] = set()
        self.called_names: set[int] = set()
        #: Calls in the order of the pickle, without the calls of records that only rebuild tensors.
        self.calls: list[Obj] = []
        self._finished: set[int] = set()
        #: Names of the numpy types, by the id of the dict of their fields.
        self._dtype_by_fields: dict[int, Value] = {}
        self._seen_values: set[int] = set()
        self._seen_in_hook_holders: set[int] = set()
        #: C++ objects that the pickle has created without a state so far, by id.
        self._uninitialized: dict[int, Obj] = {}
        #: Ids of the names and states that were checked together.
        self._checked_attributes: set[tuple[int, int]] = set()
        #: Classes of the objects whose weights C++ packs, with copies of their states at the time of packing.
        self._packed_states: list[tuple[Global, Value]] = []
        #: Ids of containers that may be arguments of any function, because they hold no forbidden object.
        self._plain_arguments: set[int] = set()
        #: Ids of arguments whose numpy types are recorded, because many calls can share the arguments.
        self._referencing_arguments: set[int] = set()
        #: Ids of the calls in the form that torch.compile writes.
        self._excused_calls: Set[int] = frozenset()

    def add_call(self, call: Obj) -> None:
        """Record the next call of the pickle."""
        self.calls.append(call)
        if id(call.args) not in self._referencing_arguments:
            self._referencing_arguments.add(id(call.args))
            self._array_types.add_referenced_types(call.args)
        root = self._roots[id(call)] = self.get_root(call.args[0] if expected_calls.is_copyreg_call(call) else call.cls)
        for unbuilt in self._uninitialized.values():
            if self._get_root_name(unbuilt) in expected_calls.PLACEMENT_CLASSES:
                self.note_misuse(unbuilt, expected_calls.UNSET)
        if root is not None and get_plain_name(root) in expected_calls.CPP_CLASSES:
            self._uninitialized[id(call)] = call

    def add_keys(self, keys: Iterable[Value]) -> None:
        """Report C++ objects without a state if the pickle hashes keys or elements that may contain these objects.

        A C++ object without its state is uninitialized memory: its hash reads addresses there.
        """
        if self._uninitialized and any(type(key) in expected_calls.COMPOSITE_KEY_TYPES for key in keys):
            for unbuilt in self._uninitialized.values():
                self.note_misuse(unbuilt, expected_calls.UNSET)

    def note_change(self, target: Value) -> None:
        """Check that `target`, which gets an item, an element or a state, is a new object without a state.

        Picklers write the elements of an object, then its items, then its state, each once.
        """
        if type(target) is Global:
            self.note_misuse(target, "is modified by the pickle; the change affects the whole Python process")
        elif id(target) in self._dtype_by_fields:
            self.note_misuse(self._dtype_by_fields[id(target)], expected_calls.UNEXPECTED_CHANGE)
        elif type(target) is Persistent:
            self.note_misuse(target, expected_calls.UNEXPECTED_CHANGE)
        elif type(target) is Obj:
            root = self.get_root(target)
            if id(target) in self._finished:
                self.note_misuse(root, expected_calls.UNEXPECTED_CHANGE)
            name = get_plain_name(root) if root else ""
            is_accelerate_state = target.how == "newobj" and name.startswith("accelerate.state.")
            is_shared = name in known_names.SHARED_OBJECTS or name in known_names.SPELLING_FUNCTIONS
            if not is_accelerate_state and (is_shared or expected_calls.may_return_shared_object(name)):
                self.note_misuse(root, expected_calls.UNEXPECTED_CHANGE)

    def add_state(self, target: Value, state: Value) -> None:
        """Check the state that the pickle sets on `target`. Raises OutOfSteps."""
        self.note_change(target)
        self._finished.add(id(target))
        self._uninitialized.pop(id(target), None)
        root = self.get_root(target)
        name = get_plain_name(root) if root else ""
        if name.startswith("numpy.dtype") and not (
            type(target) is Obj and name == "numpy.dtype" and self._array_types.is_sound(target, state)
        ):
            self.note_misuse(root, expected_calls.UNEXPECTED_STATE)
        elif name == "numpy.dtype" and type(state[4]) is dict:
            self._dtype_by_fields[id(state[4])] = root
        elif name.startswith(expected_calls.ARRAY_PREFIXES) and not self._array_types.is_sound_array(state):
            self.note_misuse(root, expected_calls.UNEXPECTED_STATE)
        elif name.startswith(expected_calls.ARRAY_PREFIXES):
            if computed_bytes.has_computed_data(state):
                self.note_misuse(
                    root, "has data that the pickle computes during loading, so statecli cannot check the data"
                )
            self._keep_computed(computed_bytes.compute_numpy_array(state))
        if root is not None and type(target) is Obj:
            # The state may still grow until the pickle ends, so `follow` checks the state again.
            self._check_build(target, state)
            if expected_calls.is_packed(name):
                self._packed_states.append((root, self._copy_state(state)))

    def _copy_state(self, state: Value, depth: int = 0) -> Value:
        """Return the state with copies of its lists and dicts. Raises OutOfSteps."""
        if type(state) not in (list, tuple, dict) or depth == expected_calls.MAX_PACKED_STATE_DEPTH:
            return state
        self.steps.take(Budget.FLOW, 1 + len(state))
        if type(state) is dict:
            return {key: self._copy_state(value, depth + 1) for key, value in state.items()}
        return type(state)(self._copy_state(value, depth + 1) for value in state)

    def is_plain_data(self, names: Iterable[Global], builds: Iterable[Build]) -> bool:
        """Return True if all calls build plain data and all states set only `_metadata`.

        Most checkpoints are like this: the only state is the `_metadata` of a state_dict.
        """
        return (
            expected_calls.PLAIN_DATA_NAMES.issuperset(map(get_plain_name, names))
            and all(
                type(call.cls) is Global
                and not call.kwargs
                and not computed_bytes.computes_bytes(name := get_plain_name(call.cls), call)
                and not expected_calls.converts_object(name, call.args)
                and (name in expected_calls.ITEM_CONTAINERS or not (call.elems or call.items))
                for call in self.calls
            )
            and all(type(state) is dict and state.keys() <= {"_metadata"} for _, state in builds)
        )

    def note_misuse(self, name: Value, why: str) -> None:
        """Record why a name is misused, unless it already has a reason. For a storage, record its class as misused."""
        if type(name) is Persistent:
            pid_parts = name.pid if type(name.pid) is tuple else (name.pid,)
            name = next((part for part in pid_parts if type(part) is Global), None)
        root = self.get_root(name)
        if root is not None:
            self.misuses.setdefault(id(root), why)

    def follow(
        self,
        builds: list[Build],
        unreachable_values: Iterable[Value],
        excused_calls: Set[int] = frozenset(),
    ) -> None:
        """Check all calls, states and other values of the pickle. Raises OutOfSteps.

        `excused_calls`: ids of the calls in the form that torch.compile writes.
        """
        self._excused_calls = excused_calls
        self._checked_attributes.clear()
        self._deferred_calls = deferred_calls.DeferredCalls(self._get_root_name, self.steps)
        self._attributes_of_torch = kept_functions.Attributes(self._get_root_name, self.steps)
        for root, state in self._packed_states:
            if not expected_calls.is_packable(get_plain_name(root), state, self.read_storage):
                self.note_misuse(root, expected_calls.UNEXPECTED_STATE)
        for call in self.calls:
            self.steps.take(Budget.FLOW, 1 + len(call.args))
            if id(call) in excused_calls:
                continue
            self._check_call(call)
            self._check_items(call)
            self._walk_values(call, (call.args, call.kwargs, call.items, call.elems))
        for target, state in builds:
            self.steps.take(Budget.FLOW)
            if id(target) in excused_calls:
                continue
            if type(target) is Obj:
                self._check_build(target, state)
            self._walk_values(target, (state,))
        self._walk_values(None, unreachable_values)

    def _keep_computed(self, data: bytes | None) -> None:
        if data is not None:
            self.steps.take(Budget.BYTES, len(data))
            self.steps.take(Budget.FLOW, len(data) // expected_calls.COMPUTED_BYTES_PER_STEP)
            if may_be_nested_data(data):
                self.computed_data.append(data)

    def _has_unexpected_arguments(self, call: Obj, name: str) -> bool:
        """Return True for a call of a clean name with arguments that no pickler writes for the name."""
        is_made_empty = call.how == "newobj" and not (call.args or call.kwargs)
        return (
            (bool(call.kwargs) and is_clean(name))
            or (call.how != "newobj" and known_names.is_created_empty(name))
            or name in expected_calls.ARRAY_CLASSES
            or (name == expected_calls.POLYNOMIAL_CLASS and not is_made_empty)
            or (name.startswith("accelerate.state.") and not is_made_empty)
            or (name in exceptions.UNICODE_ERRORS and bool(call.args))
            or not dates.has_valid_value(name, call)
            or (name == numpy_dtype_states.STRING_DTYPE and not numpy_dtype_states.is_string_dtype(call))
            or (name == "numpy.dtype" and not numpy_dtype_states.get_code(call))
            or (name in expected_calls.SCALAR_FUNCTIONS and not self._array_types.is_sound_scalar(call.args))
            or expected_calls.computes_number(name, call.args)
            or expected_calls.has_shape(name, call.args)
            or expected_calls.has_unexpected_value(name, call.args)
            or expected_calls.fills_mapping(name, call)
        )

    def _check_call(self, call: Obj, depth: int = 0) -> None:
        """Check a call, and the calls that it makes of functions among its arguments."""
        if depth > expected_calls.MAX_INDIRECT_CALLS:
            self.note_misuse(call.cls, expected_calls.UNEXPECTED_ARGUMENTS)
            return
        if type(call.cls) is not Global:
            self.note_misuse(call.cls, expected_calls.UNKNOWN_CALLEE)
            return
        name = get_plain_name(call.cls)
        self.steps.take(Budget.FLOW, len(name) // expected_calls.NAME_CHARACTERS_PER_STEP)
        if name in known_names.SPELLING_FUNCTIONS:
            self.kept_names.add(id(call.cls))
        for place in known_names.CALLEE_POSITIONS.get(name, ()):
            if place < len(call.args):
                self._check_callee(call.cls, name, place, call.args[place])
        for indirect in expected_calls.iter_indirect_calls(name, call.args):
            if type(indirect.cls) is Global:
                self.called_names.add(id(indirect.cls))
                self._check_call(indirect, depth + 1)
        self._check_rebuild(call.cls, name, call.args)
        if call.args and expected_calls.SPARSE_CLASS.fullmatch(name):
            self.note_misuse(call.cls, expected_calls.UNCHECKED_INDICES)
        if self._has_unexpected_arguments(call, name):
            self.note_misuse(call.cls, expected_calls.UNEXPECTED_ARGUMENTS)
        self._check_computed_values(call, name)
        if name in expected_calls.CONVERTING_CLASSES:
            if expected_calls.converts_object(name, call.args):
                self._note_object(call.cls)
        elif name == "functools.partial":
            self._check_deferred_call(call.args[:1], call.args[1:], call.kwargs)
        elif not expected_calls.keeps_arguments(call.how, name):
            of = (self._get_root_name(call) or name) if expected_calls.is_copyreg_call(call) else name
            self._check_arguments(call.cls, of, (call.args, call.kwargs))
        self._check_missing_contents(call, name)
        if name == "types.SimpleNamespace":
            self._check_attributes(call.cls, name, call.args[0] if call.args else None)
        self._check_attributes(call.cls, name, call.kwargs)

    def _check_computed_values(self, call: Obj, name: str) -> None:
        """Check the data that a call computes: report bytes, or keep an array's bytes for a later scan."""
        self.steps.take(Budget.FLOW, computed_bytes.count_numbers(name, call) // expected_calls.COMPUTED_BYTES_PER_STEP)
        if computed_bytes.computes_bytes(name, call):
            self.note_misuse(call.cls, computed_bytes.REASON)
        self._keep_computed(computed_bytes.compute_array(name, call))

    def _check_missing_contents(self, call: Obj, name: str) -> None:
        """Report an object of C or C++ without a state, because its memory is uninitialized."""
        if (
            (name in known_names.BIT_GENERATORS and call.how == "newobj")
            or (name == expected_calls.SCRIPT_OBJECT and type(call.state) is not tuple)
            or (self._get_root_name(call) in expected_calls.PLACEMENT_CLASSES and type(call.state) is not dict)
        ):
            self.note_misuse(call, expected_calls.UNSET)

    def _check_arguments(self, name: Global, plain_name: str, args: Iterable[Value]) -> None:
        """Check that no argument is an object whose methods the called function would run."""
        waiting: list[Value] = [part for part in args if type(part) in expected_calls.OBJECT_AND_CONTAINER_TYPES]
        entered: set[int] = set()
        while waiting:
            value = packed_weights.strip_tags(waiting.pop())
            kind = type(value)
            if kind is Obj:
                root = self._get_root_name(value)
                if not (
                    root is None
                    or root.startswith(expected_calls.ARGUMENT_PREFIXES)
                    or root in expected_calls.SHARED_VALUES
                ):
                    if is_clean(plain_name):
                        self._note_object(name)
                    return
                parts: Sequence[Value] = ()
                if root in expected_calls.ITERATED_CONTAINERS:
                    parts = [*value.args, *(value.elems or ()), *(value.items or {}).values()]
            else:
                parts = expected_calls.list_parts(value)
            if parts and id(value) not in entered and id(value) not in self._plain_arguments:
                entered.add(id(value))
                self.steps.take(Budget.FLOW, len(parts))
                waiting += [part for part in parts if type(part) in expected_calls.OBJECT_AND_CONTAINER_TYPES]
        self._plain_arguments |= entered

    def _check_deferred_call(self, function: tuple[Value, ...], args: Value, kwargs: Value) -> None:
        """Check the arguments of a functools.partial with a clean function. Other functions are always reported."""
        name = self._get_root_name(function[0]) if function else None
        if name and is_clean(name) and not self._deferred_calls.builds_data(name, args, kwargs):
            self.note_misuse(function[0], expected_calls.UNEXPECTED_ARGUMENTS)

    def _check_contents(self, name: Global, plain_name: str, states: Sequence[Value]) -> None:
        """Check the states of a tensor: each must be a dict of attributes, or a pair of dicts (attributes, slots)."""
        for state in states:
            if type(state) is tuple and len(state) != 2 and is_clean(plain_name):
                self.note_misuse(name, expected_calls.UNEXPECTED_STATE)
            for part in state if type(state) is tuple else (state,):
                if type(part) is Obj:
                    self._note_object(name)
                self._check_attributes(name, plain_name, part)

    def _note_object(self, name: Global, expected: str = "plain data") -> None:
        self.note_misuse(
            name, f"gets an object from the pickle instead of {expected}, and calls methods of this object"
        )

    def _check_rebuild(self, name: Global, plain_name: str, args: Any) -> None:
        """Check that a tensor is rebuilt from a storage or a tensor: torch would call methods of any other object."""
        if plain_name == "torch._tensor._rebuild_from_type_v2" and len(args) > 2:
            if type(args[2]) is not tuple:
                self._note_object(name)
            self._check_contents(name, plain_name, args[3:])
        elif plain_name == "torch._utils._rebuild_parameter_with_state":
            self._check_contents(name, plain_name, args[3:])
        if plain_name == expected_calls.REBUILD_JAGGED and args:
            parts = args[0].values() if type(args[0]) is dict else args
            self.steps.take(Budget.FLOW, len(parts))
            for part in parts:
                if type(part) is Obj:
                    self._check_rebuild(name, "torch._utils._rebuild_", (part,))
        if plain_name == expected_calls.REBUILD_SPARSE:
            self._check_sparse_parts(name, args)
        if plain_name.startswith(expected_calls.HOOKED_REBUILD_PREFIXES):
            for part in args:
                is_dict = type(part) is Obj and self._get_root_name(part) == "collections.OrderedDict"
                if is_dict and kept_functions.list_pairs(part, self._get_root_name) != []:
                    self.note_misuse(name, "gets hooks from the pickle, which torch calls later")
        is_rebuild = plain_name.startswith(("torch._utils._rebuild_", "torch.nn.parameter.")) and args
        if (
            is_rebuild
            and type(args[0]) is Obj
            and not expected_calls.is_tensor_data(self._get_root_name(args[0]) or "")
        ):
            self._note_object(name, "tensor data")

    def _check_sparse_parts(self, name: Global, args: Any) -> None:
        """Report a sparse tensor whose indices or values are not storages of the file, because no rule checks them.

        Operators on sparse tensors use the indices unchecked, and so may write anywhere.
        """
        parts = args[1] if len(args) > 1 and type(args[1]) is tuple else ()
        if args and type(args[0]) is int:  # TorchScript: (layout, sizes, requires_grad, parts, hooks)
            parts = args[3:-1]
        objects = [part for part in parts[: expected_calls.MAX_SPARSE_PARTS] if type(part) is Obj]
        tensors = [part for part in objects if self._get_root_name(part) != "torch.Size"]
        if not tensors or not all(part.args and type(part.args[0]) is Persistent for part in tensors):
            self.note_misuse(name, expected_calls.UNCHECKED_INDICES)

    def _check_items(self, call: Obj) -> None:
        root = self.get_root(call)
        if root is None or not (call.items or call.elems):
            return
        name = get_plain_name(root)
        is_sequence = bool(call.items) and name in expected_calls.ELEMENT_CONTAINERS
        if is_sequence or (name not in expected_calls.ITEM_CONTAINERS and is_clean(name)):
            self.note_misuse(root, expected_calls.UNEXPECTED_CHANGE)
        elif call.items and name.endswith(".AttributeDict"):
            self._check_attributes(root, name, call.items)
        if name not in expected_calls.DICT_CLASSES and any(type(key) is Key for key in call.items or ()):
            self.note_misuse(root, _COMPUTED_ATTRIBUTE)

    def _check_build(self, target: Obj, state: Value) -> None:
        root = self.get_root(target)
        if root is None:
            return
        name = get_plain_name(root)
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if name == "functools.partial" and type(state) is tuple and state:
            self._check_callee(root, "functools.partial", 0, state[0])
            self._check_deferred_call(state[:1], *(*state[1:3], None, None)[:2])
        if self._is_unexpected_state(name, state, parts):
            self.note_misuse(root, expected_calls.UNEXPECTED_STATE)
        for part in parts:
            self._check_attributes(root, name, part)

    def _is_unexpected_state(self, name: str, state: Value, parts: Sequence[Value]) -> bool:
        """Return True for a state that no pickler writes for this name. `parts`: its dicts of attributes."""
        is_computed = type(state) is Obj and not name.startswith(expected_calls.NUMPY_RANDOM_PREFIX)
        sets_slots = len(parts) == 2 and type(parts[-1]) is dict
        replaces_methods = name == expected_calls.ORDERED_DICT and any(
            type(part) is dict and part.keys() & expected_calls.DICT_METHODS for part in parts
        )
        is_unusual = (
            not expected_calls.is_state(name, state)
            or is_computed
            or (sets_slots and not name.startswith(expected_calls.SLOTTED_PREFIXES))
        )
        return (
            (is_unusual and is_clean(name))
            or name == "types.GenericAlias"
            or replaces_methods
            or (exceptions.is_exception(name) and not exceptions.is_state(name, state))
            or not restored_states.is_expected(name, state, self._get_root_name, self.steps)
        )

    def _check_attributes(self, root: Global, name: str, state: Value) -> None:
        """Check the attributes that a state sets. A state shared by many objects is checked once for each class."""
        if (id(root), id(state)) in self._checked_attributes:
            return
        self._checked_attributes.add((id(root), id(state)))
        self.steps.take(Budget.FLOW, len(state) if type(state) is dict else 1)
        for key, value in state.items() if type(state) is dict else ():
            if type(key) is Key and is_clean(name):
                self.note_misuse(root, _COMPUTED_ATTRIBUTE)
            elif self._is_unexpected_attribute(name, key, value):
                shown = quoting.name(key) if type(key) is str else "an attribute"
                self.note_misuse(
                    root, f"gets {shown} from the pickle, and other code may call this value or its methods"
                )

    def _is_unexpected_attribute(self, name: str, key: Value, value: Value) -> bool:
        """Return True for an attribute that picklers never write for this class."""
        if key in expected_calls.CLASS_ATTRIBUTES:
            return True
        if key == "__overloads__" and value == {}:  # torch.jit.script sets it on each module
            return False
        if type(value) in (dict, list, tuple) and expected_calls.is_dunder(key) and is_clean(name):
            return True
        if known_names.is_class(name) and type(key) is str:
            is_plain = not name.startswith("torch.optim.") or optimizer_attributes.is_plain(
                key, value, self._get_root_name, self.steps
            )
            return not (is_plain and self._attributes_of_torch.is_expected(name, key, value))
        return self._hides_function(name, key, value) and is_clean(name)

    def _hides_function(self, holder: str, key: Value, value: Value) -> bool:
        """Return True if a function is stored under a method's name, or in an object that never holds functions."""
        values = value if type(value) in (list, tuple) else (value,)
        self.steps.take(Budget.FLOW, len(value) if type(value) is dict else len(values))
        functions = [function for function in values if deferred_calls.is_callable(function, self._get_root_name)]
        if holder.startswith(expected_calls.VALUE_PREFIXES) or known_names.is_configuration(holder):
            return bool(functions)
        return key in expected_calls.CONTAINER_METHODS and bool(functions) and not holder.startswith("__torch__.")

    def _check_callee(self, caller: Global, name: str, place: int, value: Value) -> None:
        """Check a value at the position where `caller` takes a function to call."""
        why = f"is called by {name}; Python's pickle never writes such a call"
        if type(value) is Global:
            callee_name = get_plain_name(value)
            expected = expected_calls.EXPECTED_CALLEES.get((name, place))
            is_forbidden = callee_name in expected_calls.FORBIDDEN_CALLEES or (
                callee_name in expected_calls.ARRAY_CLASSES and "numpy" not in name
            )
            if is_forbidden if expected is None else is_clean(callee_name) and not callee_name.startswith(expected):
                self.note_misuse(value, why)
            if name not in expected_calls.DEFERRING_CALLERS:
                self.called_names.add(id(value))
            elif known_names.is_configuration(callee_name) or deferred_calls.is_callback(callee_name):
                self.note_misuse(value, why)
        elif type(value) is Obj:
            if name != "collections.defaultdict" or not self._is_factory(value):
                self.note_misuse(value, why)
                self.note_misuse(caller, expected_calls.UNKNOWN_CALLEE)
        elif value is not None and type(value) is not str:
            self.note_misuse(caller, expected_calls.UNKNOWN_CALLEE)

    def _is_factory(self, value: Obj) -> bool:
        """Return True for a functools.partial of a container class: a defaultdict may call it for missing keys.

        The load calls the partial if a class looks up a missing key in the defaultdict.
        """
        function = value.args[0] if value.args else None
        callee = value.state[0] if type(value.state) is tuple and value.state else function
        return self._get_root_name(value) == "functools.partial" and all(
            type(part) is Global and get_plain_name(part) in deferred_calls.DATA_CLASSES for part in (function, callee)
        )

    def _walk_values(self, holder: Value, values: Iterable[Value]) -> None:
        """Record every name and check every (key, value) pair in the values, but do not look inside calls."""
        holds_hooks = self._get_root_name(holder) in expected_calls.HOOK_HOLDERS
        visited = self._seen_in_hook_holders if holds_hooks else self._seen_values
        waiting = list(values)
        self.steps.take(Budget.FLOW, len(waiting))
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind is Global:
                self.kept_names.add(id(value))
            elif kind is Obj:
                self._check_hook_place(value, holds_hooks)
            elif kind is Key:
                waiting.append(value.value)
            elif kind in expected_calls.CONTAINER_TYPES and id(value) not in visited:
                visited.add(id(value))
                contents = self._list_contents(value)
                self.steps.take(Budget.FLOW, len(contents))
                waiting.extend(contents)

    def _check_hook_place(self, value: Obj, holds: bool) -> None:
        is_misplaced = not holds and self._get_root_name(value) in known_names.HOOK_CLASSES
        if is_misplaced or (id(value) in self._excused_calls and not compiled_modules.is_module(value)):
            self.note_misuse(value, expected_calls.UNEXPECTED_PLACE)

    def _list_contents(self, value: Any) -> Sequence[Value]:
        """Return the contents of a container. Report a function or object whose key is the name of a method."""
        if type(value) is dict:
            for key, item in value.items():
                self._check_pair(key, item)
            return [*value.values(), *(key for key in value if type(key) is Key)]
        if type(value) is SetOf:
            return value.elems
        if type(value) is Persistent:
            return (value.pid,)
        if len(value) == 2:
            self._check_pair(*value)
        return value  # type: ignore[no-any-return]

    def _check_pair(self, key: Value, value: Value) -> None:
        if type(value) not in (Global, Obj) or expected_calls.is_set(value):
            return
        text = read_text(packed_weights.strip_tags(key.value if type(key) is Key else key))
        if text is COMPUTED_TEXT:
            self.note_misuse(
                value,
                "is stored by the pickle under a name that is computed during loading, so statecli cannot check the "
                "name",
            )
        elif type(text) is str and (expected_calls.is_dunder(text) or text in expected_calls.LOOKED_UP_METHODS):
            self.note_misuse(
                value, f"is stored by the pickle under the name {quoting.name(text)}, so Python may call it as a method"
            )
