"""Find the Python names that a pickle would import, also after errors that stop `machine.Machine`.

The machine stops at the first operation that honest pickles never make. Examples are a call of the result of a call, a
BUILD on a class and an item set on a module. A hostile pickle could hide a harmful call after this operation. Here each
such operation has an inert result, and reading continues to STOP or to bytes that no unpickler can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Bomb, Hazard, Mention
from statecli.pickle_scan import debug_texts, known_names, pickled_storages, plain_data, script_nesting, script_types
from statecli.pickle_scan.allocations import Allocations
from statecli.pickle_scan.call_flow import Flow
from statecli.pickle_scan.compiled_modules import collect_name_ids, find_module_calls
from statecli.pickle_scan.expected_calls import MAX_INDIRECT_CALLS, REBUILD_SPARSE, get_plain_name, iter_indirect_calls
from statecli.pickle_scan.nested_data import may_be_nested_data, may_be_nested_text
from statecli.pickle_scan.packed_weights import CPP_CLASS_PREFIX, is_cpp_class
from statecli.pickle_scan.scanner_opcodes import MEMOIZE, SCANNER_HANDLERS, WATCHING_HANDLERS
from statecli.pickle_scan.script_types import ScriptTypes
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.keys import wrap_key
from statecli.pickles.machine import Machine
from statecli.pickles.machine_state import is_enum_call
from statecli.pickles.nodes import Build, Global, Key, Obj, SetOf, Value
from statecli.pickles.python2_names import rename_python2

_IDENTIFIER = compile_on_use(r"[A-Za-z_]\w*")
_RECORD_FUNCTIONS = frozenset(["torch._utils._rebuild_tensor_v2", "collections.OrderedDict"])
#: Classes that pickle writes as `type(Ellipsis)`, because they have no name to import. None itself is not a global.
_NAMELESS_CLASSES = {"builtins.Ellipsis": "EllipsisType", "builtins.NotImplemented": "NotImplementedType"}
#: Longest name that calls spell, in characters, because each call of a chain makes the name longer.
_MAX_NAME_CHARACTERS = 1000
#: Largest number of hazards that are kept for one pickle; a rule shows fewer.
_MAX_HAZARDS = 1000
#: Last protocol in which pickle reads names as names of Python 2.
_LAST_PYTHON_2_PROTOCOL = 2
#: Method of Python's unpickler that is reported for items that no pickler sets.
_SETITEMS_METHOD = "Unpickler.load_setitems"
#: Method that is reported for calls and states of values that no pickler calls or changes.
_REDUCE_METHOD = "Unpickler.load_reduce"
#: Method that is reported for items and elements set on bytes.
_APPENDS_METHOD = "Unpickler.load_appends"
#: Reason of a misuse; the unpickler in C refuses such a call.
_OTHER_ARGUMENTS_REASON = (
    "is called by the pickle with an object instead of a tuple of arguments; Python's pickle never writes this, and "
    "statecli cannot check the arguments"
)
#: Prefixes of tensors and of C++ objects, which only torch's own unpickler creates.
_TENSOR_PREFIXES = ("torch._utils._rebuild_", "torch._tensor._rebuild_", CPP_CLASS_PREFIX)
#: Classes, and a function, that create the arguments of tensors.
_PLAIN_CLASSES = frozenset(["collections.OrderedDict", "torch.Size", "torch.device", "torch.serialization._get_layout"])
#: Functions whose fourth argument has the attributes of a tensor, and prefixes of the objects that torch writes there.
_FUNCTIONS_WITH_ATTRIBUTES = ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state")
_TORCH_PREFIXES = ("torch.", "torchao.", "collections.")
#: Function after which torch.jit skips an import and uses the next import in its place.
_REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
#: Names that torch's reader in C++ reads as numbers: a call of such a number calls another name. Python can call the
#: classes of storages.
_QUANTIZATION_SCHEME = compile_on_use(r"torch\.per_(?:tensor|channel)_\w+")
_NUMBERED_NAME = compile_on_use(rf"{_QUANTIZATION_SCHEME.pattern}|torch\.\w*Storage")
_METADATA_CLASSES = frozenset(
    f"torch.distributed.{module}.metadata.Metadata" for module in ("checkpoint", "_shard.checkpoint")
)


class Scanner(Machine):
    """Pickle machine that continues after errors.

    `nested_data`: strings that begin like a pickle; `module_classes`: classes of whole modules; `unfollowed`: why the
    names could not be followed to their end.
    """

    longest_name = 2**31
    handlers = SCANNER_HANDLERS

    def __init__(self, data: bytes, label: str, steps: Steps | None = None, size: int | None = None) -> None:
        super().__init__(data, label, fast=True, module_ids=True)
        #: Number of bytes up to the end of the file; `data` may end before it.
        self.size = len(data) if size is None else size
        self.unfollowed: OutOfSteps | None = None
        self.nested_data: list[tuple[int, bytes]] = []
        #: Bytes among the nested data that the pickle loads as the storage of a tensor.
        self.storage_data: set[bytes] = set()
        self.module_classes: list[str] = []
        self.call_count = 0
        #: Number of states, items and elements set on imported or called objects, which runs methods of these objects.
        self.change_count = 0
        self.flow = Flow(steps or Steps())
        self.allocations = Allocations(steps or Steps())
        #: Highest index of a memo entry written out of order.
        self._highest_memo = 0
        #: First opcode that `torch.load` refuses by default; `handlers` search until they find one.
        self.first_unknown_opcode: int | None = None
        self.handlers = WATCHING_HANDLERS
        self._called_names: set[int] = set()
        #: Ids of the usual functions of tensor records, because their names are compared only once.
        self._record_names: set[int] = set()
        #: Ids of names that were called to spell other names.
        self._spelling_names: set[int] = set()
        #: BUILDs, and values that no call reaches; `flow` follows the names in both.
        self._builds: list[Build] = []
        self._unreachable_values: list[Value] = []
        #: Mentions of unpickler methods, for operations that no pickler writes and that have no name in the pickle.
        self._unusual_mentions: dict[str, Mention] = {}

    @property
    def refused_opcode(self) -> int | None:
        """Opcode in the pickle that `torch.load(path)` does not know; None if it knows all opcodes."""
        return MEMOIZE if self.first_unknown_opcode is None and self.has_memoize else self.first_unknown_opcode

    def iter_mentions(self) -> Iterator[Mention]:
        """Yield each imported name once, except names of torch.compile and functions that only form other names."""
        flow = self.flow
        names = self.globals.values()
        compiled = {} if self.duplicate_keys else find_module_calls(flow.calls, self._builds)
        is_tame = not self._spelling_names and flow.is_plain_data(names, self._builds)
        if not is_tame:
            with self._note_out_of_steps():
                flow.follow(self._builds, [self.root, *self.persistent, *self._unreachable_values], compiled.keys())
        spelling_names = self._spelling_names - flow.kept_names - self._called_names - flow.misuses.keys()
        called_names = self._called_names | flow.called_names
        excused_names = collect_name_ids(compiled, names) - flow.kept_names - flow.called_names - flow.misuses.keys()
        for name in names:
            if id(name) not in spelling_names and id(name) not in excused_names:
                is_called = id(name) in called_names
                yield Mention(
                    name.module,
                    name.name,
                    name.position,
                    is_called,
                    flow.misuses.get(id(name)),
                    loads_storages=is_called
                    and get_plain_name(name) == pickled_storages.LOAD_FUNCTION
                    and id(name) not in flow.kept_names | flow.called_names,
                )
        for mention in self._unusual_mentions.values():
            if not is_tame or mention.name != _SETITEMS_METHOD:
                yield mention

    @contextmanager
    def _note_out_of_steps(self) -> Iterator[None]:
        """Record the first error of a block that takes too many steps, and go on after the block."""
        try:
            yield
        except OutOfSteps as error:
            self.unfollowed = self.unfollowed or error

    def note_unusual_opcode(self, name: str, pos: int) -> None:
        """Record the first opcode with the effect `name`, which picklers never cause. Byte `pos` follows the opcode."""
        if name not in self._unusual_mentions:
            why = known_names.describe_harm("pickle", name)
            self._unusual_mentions[name] = Mention("pickle", name, pos - 1, called=True, misuse=why)

    def makes_object(self) -> bool:
        """Return True if the pickle makes a Python object that is neither a tensor nor plain data."""
        names = (get_plain_name(call.cls) if type(call.cls) is Global else "" for call in self.flow.calls)
        return any(not name.startswith(_TENSOR_PREFIXES) and name not in _PLAIN_CLASSES for name in names)

    def makes_tensor(self) -> bool:
        """Return True if the pickle is a single tensor, not an object that holds tensors."""
        root = self.flow.get_root(self.root)
        return root is not None and get_plain_name(root).startswith("torch._utils._rebuild_")

    def count_sparse_tensors(self) -> int:
        """Return the number of sparse tensors that the pickle makes."""
        calls_by_id = {id(call): call for call in self.flow.calls if type(call.cls) is Global}
        return sum(REBUILD_SPARSE in _list_called_names(call) for call in calls_by_id.values())

    def rebuilds_from_type(self) -> bool:
        """Return True if the pickle imports `_rebuild_from_type_v2`, after which torch's C++ reader confuses names."""
        return any(name.qualified == _REBUILD_FROM_TYPE for name in self.globals.values())

    def find_script_mismatch(self, types: ScriptTypes) -> str | None:
        """Return a description of the first object that TorchScript code treats as an object of another type."""
        with self._note_out_of_steps():
            return script_types.find_mismatch(self.flow.calls, self._builds, types, self.flow.steps)
        return None

    def has_wrong_location(self) -> bool:
        """Return True if a source location of TorchScript code refers to a text that the pickle does not have."""
        with self._note_out_of_steps():
            return debug_texts.has_wrong_number(self.root, self.flow.steps)
        return False

    def gives_tensor_objects(self) -> bool:
        """Return True if an attribute of a tensor is an object of another library, such as an array of numpy."""
        for call in self.flow.calls:
            name = get_plain_name(call.cls) if type(call.cls) is Global else ""
            args = call.args if name in _FUNCTIONS_WITH_ATTRIBUTES and type(call.args) is tuple else ()
            for state in args[3:]:
                parts = state if type(state) is tuple else (state,)
                values = [value for part in parts if type(part) is dict for value in part.values()]
                self.flow.steps.take(Budget.FLOW, len(values))
                if any(type(value) is Obj and not self._is_torch_object(value) for value in values):
                    return True
        return False

    def _is_torch_object(self, value: Value) -> bool:
        root = self.flow.get_root(value)
        return root is not None and get_plain_name(root).startswith(_TORCH_PREFIXES)

    def find_bombs(self, file_bytes: int) -> tuple[Bomb, ...]:
        """Return the allocations too large for a file of this size, and the keys that take too long to hash."""
        bombs: list[Bomb] = []
        with self._note_out_of_steps():
            bombs += self.allocations.find_storage_bombs(self.persistent, file_bytes)
            bombs += self.allocations.find_bombs(self.flow.calls, self._builds, len(self.data), self._highest_memo)
            bombs += script_nesting.find_deep_types(self.flow.calls)
        return tuple(bombs)

    def find_hazards(self, *, keys_are_source: bool = False) -> tuple[Hazard, ...]:
        """Return the plain data that makes loaders do harm; () for a distributed checkpoint's `.metadata`.

        `keys_are_source`: see `plain_data.find_hazards`.
        """
        hazards: list[Hazard] = []
        with self._note_out_of_steps():
            if not self._is_metadata():
                in_data = plain_data.find_hazards(self.root, self.flow.steps, keys_are_source=keys_are_source)
                hazards.extend(islice(in_data, _MAX_HAZARDS))
        return tuple(hazards)

    def _is_metadata(self) -> bool:
        """Return True if this is the `.metadata` of a distributed checkpoint, not another file of this name."""
        root = self.root.cls if type(self.root) is Obj else None
        return self.budget > 1 and type(root) is Global and root.qualified in _METADATA_CLASSES

    def put_memo(self, index: int, value: Value) -> None:
        """Store a memo entry like the base class, and record the highest index."""
        self._highest_memo = max(self._highest_memo, index)
        super().put_memo(index, value)

    # Operations that the machine refuses.

    def build_call(self, function: Value, args: Value, pos: int, how: str = "reduce") -> Any:
        """Return a node for a call. If the call only forms another name, such as a nested class, return that name."""
        self.call_count += 1
        if type(function) is Global:
            if how != "newobj" and get_plain_name(function) in known_names.SPELLING_FUNCTIONS:
                spelled_name = self._spell_name(function, args, pos)
                if spelled_name is not None:
                    return spelled_name
            self._called_names.add(id(function))
            if (_NUMBERED_NAME if how == "newobj" else _QUANTIZATION_SCHEME).fullmatch(get_plain_name(function)):
                self.note_unusual_opcode(_REDUCE_METHOD, pos)
        elif type(function) is not Obj:
            self.note_unusual_opcode(_REDUCE_METHOD, pos)
        self.object_count += 1
        if self.budget == 1:  # a `.metadata` has a larger budget
            self.flow.steps.take(Budget.CALLS)
        if is_enum_call(function, args):
            args, how = (args,), "enum"
        if type(args) is not tuple:
            self.flow.note_misuse(function, _OTHER_ARGUMENTS_REASON)
        call = Obj(function, args if type(args) is tuple else (args,), how)
        if type(function) is Global and get_plain_name(function) == pickled_storages.LOAD_FUNCTION:
            self._note_storage(call)
        self.flow.add_call(call)
        if type(function) is Global and how == "reduce" and is_cpp_class(get_plain_name(function)):
            self.add_build(call, args)  # torch's own unpickler uses the arguments as the state
        return call

    def _note_storage(self, call: Obj) -> None:
        """Keep the bytes that a call loads as a storage; report other bytes, which may be any pickle."""
        data = read_raw_bytes(call.args[0]) if call.how == "reduce" and len(call.args) == 1 else None
        if data is not None and pickled_storages.holds_storage(data):
            self.storage_data.add(data)
        else:
            self.flow.note_misuse(call.cls, pickled_storages.MISUSE)

    def take_record(self, match: re.Match[bytes]) -> bool:
        """Read a tensor record like the base class, and record the two functions that it calls."""
        is_taken = super().take_record(match)
        if is_taken:
            tensor = self.stack[-1]
            for call in (tensor, tensor.args[-1]):
                if id(call.cls) not in self._record_names:
                    self._note_record(call)
        return is_taken

    def may_repeat(self, function: Value, hooks: Value) -> bool:
        """Return True if both functions of a tensor record are already recorded as called."""
        return id(function) in self._record_names and id(hooks) in self._record_names

    def _note_record(self, call: Obj) -> None:
        """Note that the pickle of a tensor calls this function. Add the call to the flow if the function is unusual."""
        if type(call.cls) is Global:
            self._called_names.add(id(call.cls))
            if get_plain_name(call.cls) in _RECORD_FUNCTIONS:
                self._record_names.add(id(call.cls))
                return
        self.flow.add_call(call)

    def _spell_name(self, function: Global, args: Value, pos: int) -> Any:
        """Return the name or annotation that a call forms, such as a nested class or `Optional[int]`; else None."""
        pair: tuple[Any, Any] = args if type(args) is tuple and len(args) == 2 else (None, None)
        first, second = pair
        name = get_plain_name(function)
        meaning: Any = None
        is_attribute = type(first) is Global and type(second) is str and _IDENTIFIER.fullmatch(second)
        if name == "builtins.getattr" and is_attribute:
            if len(first.name) + len(second) <= _MAX_NAME_CHARACTERS:
                meaning = self.intern_name(first.module, f"{first.name}.{second}", pos)
        elif name == "builtins.getattr" and type(first) is Obj and first.state is None:
            module = self.flow.get_root(first)
            if module and type(second) is str and known_names.is_hook_of_lazy_module(get_plain_name(module), second):
                meaning = self.intern_name(module.module, f"{module.name}.{second}", pos)
        elif name == "builtins.type" and type(args) is tuple and len(args) == 1:
            meaning = self._get_nameless_class(args[0], pos)
        elif type(first) is not Global or not _is_annotation(second):
            pass
        elif name == "operator.getitem" and first.module == "typing":
            meaning = Obj(function, args)
        elif name == "functools.reduce" and type(second) in (tuple, list) and get_plain_name(first) == "operator.or_":
            self._spelling_names.add(id(first))
            meaning = Obj(function, args)
        if meaning is not None:
            self._spelling_names.add(id(function))
            self._unreachable_values.append(second)
        return meaning

    def _get_nameless_class(self, value: Value, pos: int) -> Global | None:
        if value is None:
            return self.intern_name("types", "NoneType", pos)
        name = _NAMELESS_CLASSES.get(get_plain_name(value)) if type(value) is Global else None
        return self.intern_name("types", name, pos) if name else None

    def intern_name(self, module: Value, name: Value, pos: int) -> Global:
        """Return the Global of a name like the base class does. The name may be bytes, as Python 2 writes it."""
        module, name = (str(text, "latin-1") if type(text) is bytes else text for text in (module, name))
        imported = super().intern_name(module, name, pos)
        if self.protocol > _LAST_PYTHON_2_PROTOCOL and rename_python2(module, name) != (module, name):
            why = "is a Python 2 name in a Python 3 pickle, so Python imports any module file of this name"
            self.flow.note_misuse(imported, why)
        return imported

    def set_items(self, target: Value, flat: list[Value], pos: int) -> None:
        """Set items of a target of any type. Keep the replaced values, so that they are checked too."""
        self._count_change(target)
        if type(target) in (dict, Obj) and not len(flat) % 2:
            items = (target.items or {}) if type(target) is Obj else target
            keys = list(map(wrap_key, flat[::2]))
            self._take_calls((type(target) is Obj) + 2 * sum(type(key) is Key for key in keys))
            self.allocations.add_keys(target, [key for key in keys if type(key) is Key])
            self.flow.add_keys(keys)
            if items:
                replaced_items = [(key, items[key]) for key in keys if key in items]
                self._unreachable_values.extend(replaced_items)
                if replaced_items:
                    self.note_unusual_opcode(_SETITEMS_METHOD, pos)
            old_length = len(items)
            super().set_items(target, flat, pos)
            now = target.items if type(target) is Obj else target
            if now is not None and len(now) != old_length + len(keys):
                self._unreachable_values.extend(zip(keys, flat[1::2], strict=True))
                self.note_unusual_opcode(_SETITEMS_METHOD, pos)
        elif type(target) is list:
            self._unreachable_values.extend(flat)
            self.note_unusual_opcode(_SETITEMS_METHOD, pos)
        elif type(target) is bytes:  # a bytearray for Python
            self.note_unusual_opcode(_APPENDS_METHOD, pos)
        self.flow.note_change(target)

    def add_elements(self, target: Value, elements: list[Value], pos: int, opcode: str) -> None:
        """Append elements to a target of any type (opcodes APPEND, APPENDS, ADDITEMS)."""
        self._count_change(target)
        if type(target) in (list, Obj):
            super().add_elements(target, elements, pos, "APPEND")
        if type(target) is SetOf:
            target.elems.extend(elements)
        if type(target) is bytes:  # a bytearray for Python
            self.note_unusual_opcode(_APPENDS_METHOD, pos)
        if opcode == "ADDITEMS":
            self.allocations.add_keys(target, elements)
            self.flow.add_keys(elements)
        self.flow.note_change(target)

    def add_build(self, target: Value, state: Value) -> None:
        """Record the state of an object (BUILD), and check the state."""
        self._count_change(target)
        self._take_calls(1)
        if type(target) is not Obj and not (
            type(target) is Global and not _NUMBERED_NAME.fullmatch(get_plain_name(target))
        ):
            self.note_unusual_opcode(_REDUCE_METHOD, 1)
        self.flow.add_state(target, state)
        self._builds.append(Build(target, state))

    def _take_calls(self, count: int) -> None:
        """Count operations as slow as a call: hashing key objects, and setting items or states of objects."""
        if count and self.budget == 1:  # a `.metadata` has a key of this kind for each part of a tensor
            self.flow.steps.take(Budget.CALLS, count)

    def _count_change(self, target: Value) -> None:
        self.change_count += type(target) in (Global, Obj)

    def parse_decimal(self, line: bytes, pos: int) -> int:
        """Parse an integer in all forms that Python or C accept: spaces, underscores, hexadecimal, octal, any length.

        The C unpickler reads a line to its first NUL. Leading zeros are dropped. The value of a number that is still
        too long does not matter.
        """
        line = line.partition(b"\0")[0]
        try:
            return super().parse_decimal(line, pos)
        except MalformedError:
            if len(line) > _MAX_DIGITS and _NUMBER.fullmatch(line):
                digits = line.strip().lstrip(b"+-0_")
                return int(digits) if len(digits) <= _MAX_DIGITS and digits.isdigit() else _TOO_LARGE
            return _parse_integer(line, self.build_error(pos, "an integer of the pickle is not written as a number"))

    def parse_c_integer(self, line: bytes, pos: int) -> int:
        """Parse an integer like the base class. A line without digits is 0, as for `strtol`."""
        line = line.partition(b"\0")[0]
        return super().parse_c_integer(line, pos) if line else 0

    def parse_float(self, line: bytes, pos: int) -> float:
        """Return the number that a line spells up to its first NUL, as in the C unpickler; 0.0 for a very long line."""
        line = line.partition(b"\0")[0]
        if len(line) > _MAX_DIGITS and _NUMBER.fullmatch(line):
            return 0.0
        try:
            return float(line)
        except ValueError as error:
            raise self.build_error(pos, "a float literal is not a number") from error

    # Data that may be a pickle itself.

    def read_bytes(self, start: int, length: int) -> bytes:
        """Read bytes like the base class, and keep them if they may be a pickle."""
        data = super().read_bytes(start, length)
        if may_be_nested_data(data):
            self.nested_data.append((start, data))
        return data

    def read_text(self, start: int, end: int) -> str:
        """Read text like the base class, and keep the text if it may be a pickle."""
        text = super().read_text(start, end)
        if may_be_nested_text(self.data, start, end):
            self.keep_nested_data(start, text)
        return text

    def keep_nested_data(self, start: int, text: object) -> None:
        """Keep text or bytes that may be a nested pickle."""
        data = text if type(text) is bytes else text.encode("latin-1", "replace") if type(text) is str else b""
        if may_be_nested_data(data):
            self.nested_data.append((start, data))


def _is_annotation(value: Value) -> bool:
    """Return True if a value may be part of an annotation: a name, a plain value, or a tuple or call of such values.

    Other objects are refused, because Python would call their methods for `|` and for the text of an error.
    """
    waiting, part_count = [value], 0
    while waiting and part_count < _MAX_DIGITS:
        part, part_count = waiting.pop(), part_count + 1
        if type(part) in (tuple, list):
            waiting.extend(part[:_MAX_DIGITS])
        elif type(part) is Obj:
            if type(part.cls) is not Global or get_plain_name(part.cls) not in _ANNOTATION_FUNCTIONS:
                return False
            waiting.extend(part.args[:_MAX_DIGITS])
        elif type(part) not in _ANNOTATION_TYPES:
            return False
    return not waiting


#: Functions and a class that build annotations from others; `flow` checks the class inside a GenericAlias.
_ANNOTATION_FUNCTIONS = frozenset(["operator.getitem", "functools.reduce", "types.GenericAlias"])
_ANNOTATION_TYPES = frozenset([type(None), Global, str, bytes, int, float, bool])
#: Longest number whose value is read, in digits; only the form of a longer number is checked.
_MAX_DIGITS = 256
_TOO_LARGE = 10**_MAX_DIGITS
_NUMBER = compile_on_use(rb"[-+\s.0-9a-fA-FxXoO_]+")


def _parse_integer(line: bytes, error: MalformedError) -> int:
    for base in (10, 0):
        try:
            return int(line, base)
        except ValueError:
            continue
    raise error


def _list_called_names(call: Obj) -> set[str]:
    """Return the names that a call runs: the called function, and each argument that this function calls."""
    names: set[str] = set()
    pending = [call]
    while pending and len(names) < MAX_INDIRECT_CALLS:
        inner = pending.pop()
        if type(inner.cls) is Global:
            name = get_plain_name(inner.cls)
            names.add(name)
            pending.extend(iter_indirect_calls(name, inner.args if type(inner.args) is tuple else ()))
    return names
