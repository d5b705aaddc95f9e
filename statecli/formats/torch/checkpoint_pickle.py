"""Read the pickle of a checkpoint. Refuse a pickle that changes finished objects: picklers do not write this.

The graph of a pickle shows each object in its final state. Python copies the arguments of a call or a BUILD at once, so
the graph would show a later change that the loaded object does not have: the list behind a shape grows, or the state of
an object gets another name. An item set in a tensor changes every tensor of its storage.
"""

from __future__ import annotations

from typing import Any

from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickles import machine
from statecli.pickles.graph import get_name, get_state_attributes
from statecli.pickles.keys import MAX_KEY_NESTING, is_computed
from statecli.pickles.machine import Machine
from statecli.pickles.machine_state import MachineState
from statecli.pickles.nodes import Global, Obj, Pickle
from statecli.pickles.opcodes import Handler

#: Names of functions that create a tensor or an array from the present state of their arguments.
_TENSOR_FUNCTION = compile_on_use(
    r"torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type(?:_v2)?|torch\.nn\.parameter\.\w+"
    r"|torch\.(?:cuda\.)?(?:sparse\.)?\w*Tensor|torch\.nested\._internal\.nested_tensor\._rebuild_njt"
    r"|numpy\.(?:_?core\.multiarray|_?core\.numeric|ma\.core)\._\w+"
)
#: Names of functions that copy a container.
_COPYING_FUNCTION = compile_on_use(
    r"(?:builtins|__builtin__)\.(?:list|tuple|dict|set|frozenset)|torch\.Size"
    r"|collections\.(?:OrderedDict|defaultdict|Counter|deque)"
)
#: Names of functions that set the attributes in their fourth argument on a tensor.
_ATTRIBUTE_SETTERS = ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state")
#: Attributes of a tensor whose assignment writes to its storage.
_STORAGE_ATTRIBUTES = frozenset(["real", "imag"])
#: Names of functions that may return their tensor argument itself, so that one tensor has two places in the graph.
_PASSING_FUNCTION = compile_on_use(r"torch\._utils\._rebuild_(?:device_tensor_\w+|xla_tensor)|torch\._tensor\.\w+")
#: Attributes that torch never saves (no tensor has them in its `__dict__`); assigning one changes the tensor.
REPLACING_ATTRIBUTES = frozenset(["data", "real", "imag", "requires_grad", "__dict__", "__class__"])
_MUTABLE_TYPES = (list, dict, Obj)
#: Consequence of a refused change, for the error message.
REFUSAL_REASON = (
    "torch.save never writes this, so a load may give other values than statecli shows: do not load the file"
)


def load(data: bytes, label: str, *, module_ids: bool = False) -> Pickle:
    """Return the object graph of a checkpoint's pickle, read as `machine.read_pickle` does.

    Raises MalformedError for a change of a finished object.
    """
    return machine.read_pickle(data, label, module_ids=module_ids, machine_class=_Machine)


class _Machine(Machine):
    """Pickle machine that refuses to change a copied container, a tensor, or an object that already has a state."""

    def __init__(self, data: bytes, label: str, *, fast: bool, module_ids: bool) -> None:
        super().__init__(data, label, fast=fast, module_ids=module_ids)
        #: Containers that a call copied, by id. The dict keeps them alive, so that no other object gets the same id.
        self.copied_containers: dict[int, Any] = {}
        #: Whether a global makes a tensor, and whether it copies its arguments, by the id of the global.
        self._makes_tensor: dict[int, bool] = {}
        self._copies: dict[int, bool] = {}

    def build_call(self, function: object, args: object, pos: int, how: str = "reduce") -> Obj:
        """Build the call as `Machine` does, and record the argument containers that the call copies."""
        call = super().build_call(function, args, pos, how)
        if type(function) is Global and args:
            if self.makes_tensor(function):
                self._note_containers(args)
                self._refuse_writing(call, pos)
            elif self._copies[id(function)]:
                self._note_containers(args)
        return call

    def makes_tensor(self, function: object) -> bool:
        """Return whether a call of this function makes a tensor or an array."""
        if id(function) not in self._makes_tensor:
            name = get_name(function)
            self._makes_tensor[id(function)] = _TENSOR_FUNCTION.fullmatch(name) is not None
            self._copies[id(function)] = _COPYING_FUNCTION.fullmatch(name) is not None
        return self._makes_tensor[id(function)]

    def _note_containers(self, values: Any) -> None:
        """Record the lists, dicts and objects in `values`. Also record pairs (lists of two) inside lists and tuples."""
        for value in values:
            if type(value) in _MUTABLE_TYPES:
                self.copied_containers[id(value)] = value
            if type(value) in (list, tuple):
                self.copied_containers.update(
                    (id(pair), pair) for pair in value if type(pair) is list and len(pair) == 2
                )

    def _refuse_writing(self, call: Obj, pos: int) -> None:
        if get_name(call.cls) in _ATTRIBUTE_SETTERS and len(call.args) > 3:
            names = (REPLACING_ATTRIBUTES if _is_same_tensor(call) else _STORAGE_ATTRIBUTES).intersection(
                get_state_attributes(call.args[3])
            )
            if names:
                raise self.build_unsupported_error(
                    pos, f"the pickle overwrites the attribute {min(names)!r} of a tensor; {REFUSAL_REASON}"
                )

    def set_state(self, target: Obj, state: object) -> None:
        """Set the state of an object as `Machine` does. Raises MalformedError for a second state."""
        if target.state is not None:
            raise MalformedError(f"{self.label} sets the contents of an object twice; {REFUSAL_REASON}")
        if id(target) in self.copied_containers and get_name(target.cls).startswith("numpy."):
            raise MalformedError(f"{self.label} sets the contents of an array after using the array; {REFUSAL_REASON}")
        if _is_same_tensor(target):
            raise MalformedError(f"{self.label} changes a tensor after creating it; {REFUSAL_REASON}")
        super().set_state(target, state)
        pair = state if type(state) is tuple and len(state) == 2 else (state, None)
        if all(type(part) is dict or part is None for part in pair):
            self.copied_containers.update((id(part), part) for part in pair if part is not None)

    def set_items(self, target: object, flat: list[Any], pos: int) -> None:
        """Set items as `Machine` does. Refuse to set items of a copied container or of a tensor."""
        self._refuse_change(target, pos)
        super().set_items(target, flat, pos)
        if self.tokens.is_partial:
            raise self.build_unsupported_error(
                pos, f"a dictionary key has more than {MAX_KEY_NESTING:,} nested tuples, the limit of statecli"
            )
        for key in flat[0::2]:
            if type(key) is Obj and is_computed(key, self.tokens):
                raise self.build_unsupported_error(
                    pos, f"a dictionary key is the result of calling {get_name(key.cls)}; {REFUSAL_REASON}"
                )

    def add_elements(self, target: object, elements: list[Any], pos: int, opcode: str) -> None:
        """Add elements as `Machine` does. Refuse to add elements to a copied container or to a tensor."""
        self._refuse_change(target, pos)
        super().add_elements(target, elements, pos, opcode)

    def _refuse_change(self, target: object, pos: int) -> None:
        if id(target) in self.copied_containers:
            raise self.build_unsupported_error(
                pos, f"the pickle changes a list or a dict after building an object from it; {REFUSAL_REASON}"
            )
        if type(target) is Obj and type(target.cls) is Global and self.makes_tensor(target.cls):
            raise self.build_unsupported_error(
                pos, f"the pickle sets an item of a tensor after creating the tensor; {REFUSAL_REASON}"
            )


def _is_same_tensor(call: Obj) -> bool:
    """Return whether a call may return a tensor that already exists, instead of a new tensor."""
    name = get_name(call.cls)
    if name.startswith("torch._tensor.") and call.args:
        name = get_name(call.args[0])
    return _PASSING_FUNCTION.fullmatch(name) is not None


def _set_item(m: MachineState, pos: int) -> int:
    """Run the opcode SETITEM with a call of `set_items`, because `Machine` sets text keys without this call."""
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], [key, value], pos)
    return pos


_handlers: list[Handler] = list(Machine.handlers)
_handlers[0x73] = _set_item
_Machine.handlers = tuple(_handlers)
