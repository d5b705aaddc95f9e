"""State of a pickle machine: stack, memo and counters, and the shared operations of the opcodes.

Only short and cheap keys are hashed, nothing recurses, and each length is compared with the bytes left before memory
is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from itertools import repeat
from operator import length_hint
from typing import ClassVar

from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickles.errors import ComputedName, OverBudget, TruncatedPickle
from statecli.pickles.keys import Tokens, wrap_key
from statecli.pickles.nodes import Global, Obj, Persistent, SetOf, Value, describe

#: Budget of the values that all objects hold as arguments or state: a fixed part, and a part for each opcode. More
#: values are possible only if many objects share them, which picklers never write. Shared values are counted again for
#: each object, because they are read again for each object.
MAX_HELD_VALUES = 200_000
MAX_HELD_VALUES_PER_OPCODE = 16
#: Number of leading arguments whose own values count as held, because functions take a container among these.
_COUNTED_ARGUMENTS = 4
#: Longest chain of containers, each filled from the next, that is followed.
MAX_NESTED_COPIES = 8
#: Opcodes between two checks of the budgets.
BURST_OPCODES = 50_000
#: Longest integer that is read, in bytes: checkpoints use shorter ones, and Python prints at most 4300 digits.
MAX_INT_BYTES = 1024
MAX_NUMBER_DIGITS = 2 * MAX_INT_BYTES
#: Largest number of duplicate keys that are kept for the report.
MAX_DUPLICATE_KEYS = 100
#: Message about a text argument without an end.
NO_LINE_BREAK = "a string does not end with a line break"
#: Value of `frame_end` outside of frames, larger than every offset.
NO_FRAME = sys.maxsize
_DECIMAL = compile_on_use(rb"[+-]?[0-9]+")
_OCTAL = compile_on_use(rb"\s*[+-]?0[0-7]+")
#: Class of the call that stands for an integer of more than `MAX_INT_BYTES`.
LONG_INTEGER = Global("builtins", "int", 0)
STRING_TYPES = frozenset([str])
_CONTAINER_TYPES = frozenset([list, tuple, dict])
_GROWING_TYPES = frozenset([list, dict, Obj])
#: Types of nodes that can be called. A call can return a callable, as functools.partial does.
CALLABLE_TYPES = frozenset([Global, Obj])


def is_enum_call(function: Value, args: Value) -> bool:
    """Return True for a call of a TorchScript Enum: its argument is a value, not a tuple of arguments."""
    return (
        type(args) in (int, float, str) and type(function) is Global and f"{function.module}.".startswith("__torch__.")
    )


class MachineState:
    """State of the pickle machine while it reads a pickle.

    `stack` holds the values above the last mark, `metastack` holds the stacks below each mark. `memo` holds the entries
    0..n-1, as numbered by every pickler; `sparse_memo` holds the entries out of this order.
    """

    #: Longest name of a global, in characters, because the name is read again for each call of the global.
    longest_name: ClassVar[int] = 4096

    def __init__(self, data: bytes, label: str, *, fast: bool, module_ids: bool) -> None:
        self.data = data
        self.label = label
        self.fast = fast
        self.module_ids = module_ids
        self.stack: list[Value] = []
        self.metastack: list[list[Value]] = []
        self.memo: list[Value] = []
        self.sparse_memo: dict[int, Value] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.persistent: list[Persistent] = []
        self.duplicate_keys: list[Value] = []
        #: The byte after the open frame, or NO_FRAME outside of frames.
        self.frame_end = NO_FRAME
        #: Whether a frame that ends within the data was read.
        self.has_frames = False
        #: Whether a burst has read a MEMOIZE without calling its handler.
        self.has_memoize = False
        self.root: Value = None
        self.end = 0
        self.protocol = 0
        self.object_count = 0
        self.held_values = 0
        #: Arguments and states with a list, a dict or an object, which can still grow.
        self.growing_values: list[Value] = []
        self.tokens = Tokens()
        self.budget = 1
        self._bursts = 0
        self._remaining: Iterator[None] = repeat(None, 0)

    @property
    def opcodes(self) -> int:
        """Number of opcodes read; a tensor record counts as one opcode."""
        return self._bursts * BURST_OPCODES + (BURST_OPCODES - length_hint(self._remaining)) % BURST_OPCODES

    def build_error(self, pos: int, text: str) -> MalformedError:
        """Return the error for a damaged pickle at the opcode before byte `pos`. Every loader rejects such a pickle."""
        return self.build_unsupported_error(pos, f"the pickle is damaged: {text}")

    def build_unsupported_error(self, pos: int, text: str) -> MalformedError:
        """Return the error for an opcode that statecli cannot interpret; the opcode is the byte before `pos`."""
        return MalformedError(f"{self.label}: {text} (byte {pos - 1})")

    def build_truncated_error(
        self, text: str = "the pickle ends before its STOP instruction", needed_bytes: int = 0
    ) -> TruncatedPickle:
        """Return the error for a truncated pickle; `needed_bytes` is the length that the pickle states (else 0)."""
        message = f"{self.label} is truncated: {text} (byte {len(self.data)})"
        error = TruncatedPickle(f"{message}; copy or download the file again")
        error.needed_bytes = needed_bytes
        return error

    def build_budget_error(self, pos: int, text: str) -> OverBudget:
        """Return the error for a pickle that exceeds a budget."""
        return OverBudget(str(self.build_unsupported_error(pos, text)))

    def build_misframed_error(self, pos: int, text: str) -> MalformedError:
        """Return the error for opcodes before byte `pos` that violate the limits of their frame."""
        why = f"the pickle is damaged or edited: {text}; Python's pickle never writes this"
        return self.build_unsupported_error(pos, why)

    def end_frame(self, pos: int) -> int:
        """Leave the open frame, which must end at byte `pos`, and return NO_FRAME."""
        if pos != self.frame_end:
            raise self.build_misframed_error(
                pos, f"an instruction runs past the end of its block (frame) at byte {self.frame_end}"
            )
        self.frame_end = NO_FRAME
        return NO_FRAME

    def read_text(self, start: int, end: int) -> str:
        """Return the UTF-8 string in the bytes from `start` to `end`. Lone surrogates are accepted, as in pickle."""
        if end > len(self.data):
            raise self.build_truncated_error("a string runs past the end of the pickle", end)
        try:
            return str(self.data[start:end], "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.build_error(start + error.start + 1, "invalid UTF-8 in a string") from error

    def read_bytes(self, start: int, length: int) -> bytes:
        """Return `length` bytes from byte `start`."""
        if start + length > len(self.data):
            raise self.build_truncated_error("a string runs past the end of the pickle", start + length)
        return self.data[start : start + length]

    def read_line(self, pos: int) -> tuple[bytes, int]:
        """Return the text argument at byte `pos`, without its newline, and the position after the newline."""
        end = self.data.find(b"\n", pos)
        if end < 0:
            raise self.build_truncated_error(NO_LINE_BREAK)
        return self.data[pos:end], end + 1

    def put_memo(self, index: int, value: Value) -> None:
        """Store `value` as memo entry `index`; entries may come in any order."""
        if index < 0:
            raise MalformedError(f"{self.label}: the pickle is damaged: object number {index} is negative")
        if index < len(self.memo):
            self.memo[index] = value
        elif index == len(self.memo) and not self.sparse_memo:
            self.memo.append(value)
        else:
            self.sparse_memo[index] = value

    def get_memo(self, index: int, pos: int) -> Value:
        """Return memo entry `index`."""
        if 0 <= index < len(self.memo):
            return self.memo[index]
        if index not in self.sparse_memo:
            raise self.build_error(pos, f"the pickle uses object {index} before storing this object")
        return self.sparse_memo[index]

    def pop_mark(self) -> list[Value]:
        """Return the values above the last mark, and restore the stack below the mark."""
        items = self.stack
        self.stack = self.metastack.pop()
        return items

    def intern_name(self, module: Value, name: Value, pos: int) -> Global:
        """Return the Global of this name; each mention of a name gets the same object."""
        if type(module) is not str or type(name) is not str:
            if not {type(module), type(name)}.isdisjoint((Global, Obj, Persistent)):
                message = (
                    "the name of an imported function or class is computed during loading, so statecli cannot "
                    "check the name"
                )
                raise ComputedName(f"{self.label}: {message} (byte {pos - 1})")
            raise self.build_error(pos, "the name of an imported function or class is not a string")
        if len(module) + len(name) > self.longest_name:
            raise self.build_unsupported_error(
                pos,
                f"the name of an imported function or class has {len(module) + len(name):,} characters, more than "
                f"statecli's limit of {self.longest_name}",
            )
        interned = self.globals.get((module, name))
        if interned is None:
            interned = self.globals[module, name] = Global(module, name, pos - 1)
        return interned

    def build_call(self, function: Value, args: Value, pos: int, how: str = "reduce") -> Obj:
        """Return a node for the result of calling `function`; nothing is called."""
        if is_enum_call(function, args):
            args, how = (args,), "enum"
        if type(args) is not tuple:
            raise self.build_error(pos, f"the arguments of a call are {describe(args)}, not a tuple")
        if type(function) not in CALLABLE_TYPES:
            raise self.build_error(pos, f"expected a function or class to call, found {describe(function)}")
        self.object_count += 1
        self.count_held_values(args, pos)
        return Obj(function, args, how)

    def count_held_values(self, values: Value, pos: int) -> None:
        """Count the values that an object holds. Raises OverBudget if many objects share many values."""
        if type(values) is tuple:
            self.held_values += sum(
                [len(value) for value in values[:_COUNTED_ARGUMENTS] if type(value) in _CONTAINER_TYPES]
            )
            if not _GROWING_TYPES.isdisjoint(map(type, values[:_COUNTED_ARGUMENTS])):
                self.growing_values.append(values)
        elif type(values) in _GROWING_TYPES:
            self.growing_values.append((values,))
        if type(values) in _CONTAINER_TYPES:
            self.held_values += len(values)
        self._check_held_values(self.held_values, pos)

    def recount_held_values(self, pos: int) -> None:
        """Count the values of all objects again, because their lists and dicts may have grown."""
        count = sum([_count_values(value) for values in self.growing_values for value in values[:_COUNTED_ARGUMENTS]])
        self._check_held_values(count, pos)

    def _check_held_values(self, count: int, pos: int) -> None:
        if count > MAX_HELD_VALUES and count > MAX_HELD_VALUES + MAX_HELD_VALUES_PER_OPCODE * self.opcodes:
            raise self.build_budget_error(
                pos,
                f"the pickle refers to the same objects so often that they stand for {count:,} values in total, more "
                f"than {MAX_HELD_VALUES_PER_OPCODE} values for each instruction of the pickle; loading may fill the "
                "memory",
            )

    def set_items(self, target: Value, flat: list[Value], pos: int) -> None:
        """Set items of a dict (SETITEMS). `flat` alternates keys and values."""
        if type(target) is Obj:
            if target.items is None:
                target.items = {}
            target = target.items
        if type(target) is not dict:
            raise self.build_error(pos, f"the pickle sets an item of {describe(target)}, which is not a dict")
        if len(flat) % 2:
            raise self.build_error(pos, "a dictionary key has no value")
        keys = flat[0::2]
        if not STRING_TYPES.issuperset(map(type, keys)):
            keys = [wrap_key(key, self.tokens) for key in keys]
        before = len(target)
        if before and not target.keys().isdisjoint(keys):
            self._note_duplicate_keys(target, keys)
            before = -1
        target.update(zip(keys, flat[1::2], strict=True))
        if before >= 0 and len(target) != before + len(keys):
            self._note_duplicate_keys((), keys)

    def _note_duplicate_keys(self, existing: Container[Value], keys: Iterable[Value]) -> None:
        seen: set[Value] = set()
        for key in keys:
            if (key in existing or key in seen) and len(self.duplicate_keys) < MAX_DUPLICATE_KEYS:
                self.duplicate_keys.append(key)
            seen.add(key)

    def set_state(self, target: Obj, state: Value) -> None:
        """Set the state of an object (BUILD)."""
        target.state = state

    def add_elements(self, target: Value, elements: list[Value], pos: int, opcode: str) -> None:
        """Add elements to a list (APPEND, APPENDS) or to a set (ADDITEMS)."""
        kind = type(target)
        if kind is Obj:
            if target.elems is None:
                target.elems = []
            target.elems.extend(elements)
        elif kind is list and opcode == "APPEND":
            target.extend(elements)
        elif kind is SetOf and opcode == "ADDITEMS":
            target.elems.extend(elements)
        else:
            noun = "list" if opcode == "APPEND" else "set"
            raise self.build_error(pos, f"the pickle adds elements to {describe(target)}, which is not a {noun}")

    def read_integer(self, start: int, length: int) -> Value:
        """Return a little-endian two's complement integer; for a very long integer, a node for a call of `int`."""
        data = MachineState.read_bytes(self, start, length)  # not as a string, in which a scanner looks for pickles
        if len(data) > MAX_INT_BYTES:
            self.object_count += 1
            return Obj(LONG_INTEGER, (data,))
        return int.from_bytes(data, "little", signed=True)

    def parse_decimal(self, line: bytes, pos: int) -> int:
        """Return the integer that a line of text spells in decimal digits."""
        if len(line) > MAX_NUMBER_DIGITS:
            raise self.build_unsupported_error(
                pos, f"an integer has {len(line)} digits, more than statecli's limit of {MAX_NUMBER_DIGITS}"
            )
        if not _DECIMAL.fullmatch(line):
            raise self.build_error(pos, "an integer literal is not a decimal number")
        return int(line)

    def parse_c_integer(self, line: bytes, pos: int) -> int:
        """Return the integer that INT spells, parsed like `strtol` in the C unpickler: a leading 0 means octal."""
        return int(line, 8) if _OCTAL.fullmatch(line) else self.parse_decimal(line, pos)

    def parse_float(self, line: bytes, pos: int) -> float:
        """Return the floating-point number that a line of text spells."""
        if len(line) > MAX_NUMBER_DIGITS:
            raise self.build_unsupported_error(
                pos, f"a number has {len(line)} digits, more than statecli's limit of {MAX_NUMBER_DIGITS}"
            )
        try:
            return float(line)
        except ValueError as error:
            raise self.build_error(pos, "a float literal is not a number") from error


def _count_values(value: Value) -> int:
    """Count the values in a container. For the result of a call, also count the containers that the call copies."""
    size = 0
    for _ in range(MAX_NESTED_COPIES):
        if type(value) is not Obj:
            break
        size += len(value.items or ()) + len(value.elems or ())
        value = next(
            (arg for arg in value.args[:_COUNTED_ARGUMENTS] if type(arg) in _CONTAINER_TYPES or type(arg) is Obj), ()
        )
    return size + len(value) if type(value) in _CONTAINER_TYPES else size
