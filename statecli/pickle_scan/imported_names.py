"""The Python names that one pickle would import, read on past what `_pickle.Machine` refuses and Python would do.

The machine stops at the first thing that no honest pickle does. A hostile one does it to be left unread: a call of what
a call returned, a BUILD on a class, an item set on a module. Here each of these has some inert result and reading goes
on, to the STOP or to what no unpickler can read either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from statecli.core.errors import MalformedError
from statecli.core.state import Bomb, Mention
from statecli.pickle_scan import known_names
from statecli.pickle_scan.allocations import Allocations
from statecli.pickle_scan.call_flow import Flow, calls_made_by, named_arguments, plain
from statecli.pickle_scan.compiled_modules import calls_of_modules, names_of
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.graph import is_module
from statecli.pickles.machine import Global, Handler, Key, Machine, Obj, Persistent, SetOf, Value, as_key, native

_PLAIN = re.compile(r"[A-Za-z_]\w*")
_RECORDED = frozenset(["torch._utils._rebuild_tensor_v2", "collections.OrderedDict"])
#: The classes of the three values that have no name, which pickle spells `type(None)`.
_NAMELESS = {"builtins.Ellipsis": "EllipsisType", "builtins.NotImplemented": "NotImplementedType"}
#: Strings that may hold a pickle, an archive or an array: bytes by their beginning, text as UTF-8 if it is Latin-1.
_INNER = re.compile(rb"\x80[\x00-\x05]|PK\x03\x04|\x93NUMPY")
_INNER_TEXT = re.compile(rb"\xc2\x80[\x00-\x05]|PK\x03\x04|\xc2\x93NUMPY")
#: Older pickles begin with any opcode, and name what they call by STACK_GLOBAL, or in two lines: a word that holds an
#: opcode and a module, and a word that is the name. A match starts at the start of a word only, or a long word would be
#: read again from each of its letters.
_STACK_GLOBAL = b"\x93"
_TWO_WORDS = re.compile(rb"(?<![\w.])([\w.]+)\r?\n(?=[A-Za-z_][\w.]*\r?\n)", re.ASCII)
_MODULE = re.compile(rb"[ci][A-Za-z_]")
#: Characters of a name that calls spell; each call of a chain of them makes a longer one.
_LONGEST_NAME = 1000
#: No pickle that calls anything is shorter.
_SHORTEST = 6
#: The last protocol in which pickle takes names for those of Python 2.
_LAST_OF_PYTHON_2 = 2
#: How Python's unpickler sets items, for what it is mentioned.
_SETITEM = "Unpickler.load_setitems"
#: Parts of the persistent ids of a storage, the last of which a zip archive lacks, and of a class.
_PARTS_WITH_VIEW, _PARTS_OF_CLASS = 6, 3
_PLAIN_TYPES = frozenset([str, bytes, int, type(None)])


class Scanner(Machine):
    """A machine that reads on. `inner` are strings that begin like a pickle, `modules` the classes of whole modules.

    `unfollowed` says why the names could not be followed to their end.
    """

    longest_name = 2**31

    def __init__(self, data: bytes, what: str, steps: Steps | None = None) -> None:
        super().__init__(data, what, fast=True, module_ids=True)
        self.unfollowed: OutOfSteps | None = None
        self.inner: list[tuple[int, bytes]] = []
        self.modules: list[str] = []
        self.calls = 0
        self.flow = Flow(steps or Steps())
        self.allocations = Allocations(plain, calls_made_by, steps or Steps())
        #: The highest memo entry that was written out of order.
        self._highest_memo = 0
        #: The first opcode that `torch.load` refuses by default; `handlers` look for it until there is one.
        self._refused_opcode: int | None = None
        self.handlers = _LOOKING
        self._called: set[int] = set()
        #: Names of the functions that records call, told apart once.
        self._usual: set[int] = set()
        #: Names that were called only to spell others out.
        self._spelled: set[int] = set()
        #: BUILDs, and values that are reached from no call, for the flow of names through them.
        self._built: list[tuple[Value, Value]] = []
        self._loose: list[Value] = []
        #: What no pickler does and has no name in the pickle: mentions of what Python's unpickler does then.
        self._odd: dict[str, Mention] = {}

    @property
    def refused_opcode(self) -> int | None:
        """An opcode of the pickle that the unpickler of `torch.load(path)` does not know; None where it knows all."""
        return _MEMOIZE if self._refused_opcode is None and self.memoizes else self._refused_opcode

    def mentions(self) -> Iterator[Mention]:
        """Each name once, in the order of first mention. `getattr` is left out where all it did was to spell others."""
        flow = self.flow
        names = self.globals.values()
        compiled = {} if self.duplicates else calls_of_modules(flow.calls, self._built)
        is_tame = not self._spelled and flow.is_tame(names)
        if not is_tame:
            try:
                flow.follow(self._built, [self.root, *self.persistent, *self._loose], compiled.keys())
            except OutOfSteps as error:
                self.unfollowed = error
        try:
            flow.stored(self.persistent)
        except OutOfSteps as error:
            self.unfollowed = self.unfollowed or error
        spelling = self._spelled - flow.kept - self._called - flow.misuses.keys()
        called = self._called | flow.called
        excused = names_of(compiled, names) - flow.kept - flow.called - flow.misuses.keys()
        for one in names:
            if id(one) not in spelling and id(one) not in excused:
                yield Mention(one.module, one.name, one.position, id(one) in called, flow.misuses.get(id(one)))
        for odd in self._odd.values():
            if not is_tame or odd.name != _SETITEM:
                yield odd

    def note_odd(self, name: str, pos: int) -> None:
        """Remember the first time that the opcode before byte `pos` has an unpickler do what no pickler writes."""
        why = known_names.harm("pickle", name)
        self._odd.setdefault(name, Mention("pickle", name, pos - 1, called=True, misuse=why))

    def bombs(self, file_bytes: int) -> tuple[Bomb, ...]:
        """What loading the pickle allocates beyond what a file of this size holds, and keys that take too long."""
        found: list[Bomb] = []
        try:
            found += self.allocations.storage_bombs(self.persistent, file_bytes)
            found += self.allocations.bombs(self.flow.calls, self._built, len(self.data), self._highest_memo)
        except OutOfSteps as error:
            self.unfollowed = self.unfollowed or error
        return tuple(found)

    def put(self, index: int, value: Value) -> None:
        """As the machine does it, the highest entry noted."""
        self._highest_memo = max(self._highest_memo, index)
        super().put(index, value)

    # What the machine refuses.

    def call(self, function: Value, args: Value, pos: int, how: str = "reduce") -> Any:
        """Whatever is called gives something inert; what only spells a name gives that."""
        self.calls += 1
        if type(function) is Global:
            if how != "newobj" and plain(function) in known_names.SPELLING:
                spelled = self._spell(function, args, pos)
                if spelled is not None:
                    return spelled
            self._called.add(id(function))
        self.objects += 1
        if self.budget == 1:  # that of a `.metadata` is larger
            self.flow.steps.take(Budget.CALLS)
        made = Obj(function, args if type(args) is tuple else (args,), how)
        self.flow.made(made)
        return made

    def take_record(self, match: re.Match[bytes]) -> bool:
        """As the machine does it, both functions noted as called."""
        taken = super().take_record(match)
        if taken:
            made = self.stack[-1]
            for one in (made, made.args[-1]):
                if id(one.cls) not in self._usual:
                    self._record(one)
        return taken

    def _record(self, made: Obj) -> None:
        """A call of a record. The two names that nearly all of them have say nothing of what becomes of others."""
        if type(made.cls) is Global:
            self._called.add(id(made.cls))
            if plain(made.cls) in _RECORDED:
                self._usual.add(id(made.cls))
                return
        self.flow.made(made)

    def _spell(self, function: Global, args: Value, pos: int) -> Any:
        """What pickle means by these calls: a class in a class, `type(None)`, `Optional[int]`, `int | str`."""
        first, second = args if type(args) is tuple and len(args) == 2 else (None, None)
        name = plain(function)
        spelled: Any = None
        if name == "builtins.getattr" and type(first) is Global and type(second) is str and _PLAIN.fullmatch(second):
            if len(first.name) + len(second) <= _LONGEST_NAME:
                spelled = self.name(first.module, f"{first.name}.{second}", pos)
        elif name == "builtins.getattr" and type(first) is Obj and first.state is None:
            module = self.flow.root(first)
            if module and type(second) is str and known_names.is_hook_of_lazy_module(plain(module), second):
                spelled = self.name(module.module, f"{module.name}.{second}", pos)
        elif name == "builtins.type" and type(args) is tuple and len(args) == 1:
            spelled = self._nameless(args[0], pos)
        elif type(first) is not Global or not _is_type(second):
            pass
        elif name == "operator.getitem" and first.module == "typing":
            spelled = Obj(function, args)
        elif name == "functools.reduce" and type(second) in (tuple, list) and plain(first) == "operator.or_":
            self._spelled.add(id(first))
            spelled = Obj(function, args)
        if spelled is not None:
            self._spelled.add(id(function))
            self._loose.append(second)
        return spelled

    def _nameless(self, value: Value, pos: int) -> Global | None:
        if value is None:
            return self.name("types", "NoneType", pos)
        name = _NAMELESS.get(plain(value)) if type(value) is Global else None
        return self.name("types", name, pos) if name else None

    def name(self, module: Value, name: Value, pos: int) -> Global:
        """As the machine does it; strings of Python 2 may be bytes."""
        module, name = (str(one, "latin-1") if type(one) is bytes else one for one in (module, name))
        found = super().name(module, name, pos)
        if self.protocol > _LAST_OF_PYTHON_2 and known_names.renamed(module, name) != (module, name):
            why = "is a name of Python 2 in a later protocol, for which Python imports a file of that name"
            self.flow.note(found, why)
        return found

    def set_items(self, target: Value, flat: list[Value], pos: int) -> None:
        """Keys and values are set on anything. What they take the place of is kept to be looked at."""
        if type(target) in (dict, Obj) and not len(flat) % 2:
            held = (target.items or {}) if type(target) is Obj else target
            keys = list(map(as_key, flat[::2]))
            self.allocations.add_keys(target, [key for key in keys if type(key) is Key])
            self.flow.hashes(keys)
            if held:
                again = [(key, held[key]) for key in keys if key in held]
                self._loose.extend(again)
                if again:
                    self.note_odd(_SETITEM, pos)
            before = len(held)
            super().set_items(target, flat, pos)
            now = target.items if type(target) is Obj else target
            if now is not None and len(now) != before + len(keys):
                self._loose.extend(zip(keys, flat[1::2], strict=True))
                self.note_odd(_SETITEM, pos)
        elif type(target) is list:
            self._loose.extend(flat)
            self.note_odd(_SETITEM, pos)
        self.flow.changes(target)

    def add_elements(self, target: Value, elements: list[Value], pos: int, opcode: str) -> None:
        """Elements are appended to anything."""
        if type(target) in (list, Obj):
            super().add_elements(target, elements, pos, "APPEND")
        if type(target) is SetOf:
            target.elems.extend(elements)
        if opcode == "ADDITEMS":
            self.allocations.add_keys(target, elements)
            self.flow.hashes(elements)
        self.flow.changes(target)

    def built(self, target: Value, state: Value) -> None:
        """Remember a BUILD."""
        self.flow.finishes(target, state)
        self._built.append((target, state))

    def decimal(self, line: bytes, pos: int) -> int:
        """Integers as Python and C read them: with spaces and underscores, hexadecimal, octal, of any length.

        The C unpickler reads a line to its first NUL. Leading zeros add nothing, and nothing depends on the value of a
        number that is still too long.
        """
        line = line.partition(b"\0")[0]
        try:
            return super().decimal(line, pos)
        except MalformedError:
            if len(line) > _LONG and _NUMBER.fullmatch(line):
                digits = line.strip().lstrip(b"+-0_")
                return int(digits) if len(digits) <= _LONG and digits.isdigit() else _TOO_LONG
            return _integer(line, self.error(pos, "a number that is none"))

    def c_integer(self, line: bytes, pos: int) -> int:
        """As the machine does it; `strtol` accepts a line without digits as 0."""
        line = line.partition(b"\0")[0]
        return super().c_integer(line, pos) if line else 0

    def real(self, line: bytes, pos: int) -> float:
        """The same for what may have a fraction."""
        line = line.partition(b"\0")[0]
        if len(line) > _LONG and _NUMBER.fullmatch(line):
            return 0.0
        try:
            return float(line)
        except ValueError as error:
            raise self.error(pos, "a number that is none") from error

    # What may be a pickle itself.

    def take(self, start: int, length: int) -> bytes:
        """As the machine does it, what may be a pickle remembered."""
        data = super().take(start, length)
        if length >= _SHORTEST and _may_be_one(data):
            self.inner.append((start, data))
        return data

    def text(self, start: int, end: int) -> str:
        """As the machine does it, what may be a pickle remembered."""
        text = super().text(start, end)
        if end - start >= _SHORTEST:
            data = self.data
            if (
                _INNER_TEXT.match(data, start, end)
                or data.find(b"\n", start, end) >= 0
                or data.find(b"\xc2\x93", start, end) >= 0
            ):
                self.see(start, text)
        return text

    def see(self, start: int, text: Any) -> None:
        """Remember a text or bytes of another opcode that may be a pickle."""
        data = text if type(text) is bytes else text.encode("latin-1", "replace") if type(text) is str else b""
        if len(data) >= _SHORTEST and _may_be_one(data):
            self.inner.append((start, data))


def _is_type(value: Value) -> bool:
    """Whether this is what annotations are made of: names, plain values, other annotations, several of these.

    Of an object there would be methods that are called: `|`, and its text in an error.
    """
    waiting, seen = [value], 0
    while waiting and seen < _LONG:
        one, seen = waiting.pop(), seen + 1
        if type(one) in (tuple, list):
            waiting.extend(one[:_LONG])
        elif type(one) is Obj:
            if type(one.cls) is not Global or plain(one.cls) not in _ANNOTATIONS:
                return False
            waiting.extend(one.args[:_LONG])
        elif type(one) not in _OF_ANNOTATIONS:
            return False
    return not waiting


#: What makes annotations of others: of a GenericAlias the flow looks at what it stands for.
_ANNOTATIONS = frozenset(["operator.getitem", "functools.reduce", "types.GenericAlias"])
_OF_ANNOTATIONS = frozenset([type(None), Global, str, bytes, int, float, bool])
#: Digits of a number beyond which only its form is looked at.
_LONG = 256
_TOO_LONG = 10**_LONG
_NUMBER = re.compile(rb"[-+\s.0-9a-fA-FxXoO_]+")


def _may_be_one(data: bytes) -> bool:
    """Whether a string may hold a pickle, an archive or an array."""
    return _INNER.match(data) is not None or (data[0] in _BEGINNINGS and _mentions_name(data))


def _mentions_name(data: bytes) -> bool:
    """Return whether an opcode that imports a name may be in the bytes, in time linear in their length."""
    return _STACK_GLOBAL in data or any(_MODULE.search(words[1]) for words in _TWO_WORDS.finditer(data))


def _integer(line: bytes, error: MalformedError) -> int:
    for base in (10, 0):
        try:
            return int(line, base)
        except ValueError:
            continue
    raise error


def _build(m: Any, pos: int) -> int:
    state, target = m.stack.pop(), m.stack[-1]
    m.built(target, state)
    if type(target) is Obj:
        target.state = state
        if is_module(target) and type(target.cls) is Global:
            m.modules.append(target.cls.qualified)
    return pos


def _inst(m: Machine, pos: int) -> int:
    """The name is imported before its arguments are looked for."""
    function, end = _named(m, pos)
    args = tuple(m.pop_mark())
    m.stack.append(m.call(function, args, pos, "inst"))
    return _line_end(m, end)


def _global(m: Machine, pos: int) -> int:
    function, end = _named(m, pos)
    m.stack.append(function)
    return _line_end(m, end)


def _named(m: Machine, pos: int) -> tuple[Global, int]:
    """Return the name in two lines, and the byte after them, which is 0 where the second line has no end.

    The unpickler in Python imports such a name without its last character.
    """
    module, start = m.line(pos)
    end = m.data.find(b"\n", start)
    return m.name(native(module), native(m.data[start:end]), pos), end + 1


def _line_end(m: Machine, end: int) -> int:
    if not end:
        raise m.truncated("a line has no end")
    return end


def _extension(m: Machine, pos: int) -> int:
    """A code stands for a name that the loading program has registered."""
    width = 1 << (m.data[pos - 1] - 0x82)
    code = int.from_bytes(m.data[pos : pos + width], "little")
    m.stack.append(m.name("copyreg", f"_inverted_registry[{code}]", pos))
    return pos + width


def _frozenset(m: Any, pos: int) -> int:
    end = Machine.handlers[0x91](m, pos)
    m.allocations.add_keys(m.stack[-1], m.stack[-1].elems)
    m.flow.hashes(m.stack[-1].elems)
    return end


def _next_buffer(m: Machine, pos: int) -> int:
    m.stack.append(Persistent(None))
    return pos


def _same(m: Machine, pos: int) -> int:  # noqa: ARG001
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs, args = m.stack.pop(), m.stack.pop()
    made = m.call(m.stack[-1], args, pos, "newobj")
    if type(made) is Obj:
        made.kwargs = named_arguments(kwargs)
    m.stack[-1] = made
    return pos


def _persistent(m: Any, pos: int) -> int:
    pid = m.stack[-1]
    end = Machine.handlers[0x51](m, pos)
    if not _is_written_by_torch(pid):
        m.note_odd("Unpickler.persistent_load", pos)
    return end


def _is_written_by_torch(pid: Value) -> bool:
    """Return whether this is an id of a tensor, of a storage or of a class with its source code."""
    if type(pid) is not tuple:
        return type(pid) in (str, bytes, int)
    if pid[:1] == ("storage",):
        *parts, view = pid if len(pid) == _PARTS_WITH_VIEW else (*pid, None)
        views = view if type(view) is tuple else (view,)
        of_type = len(parts) == _PARTS_WITH_VIEW - 1 and type(parts[1]) is Global
        return of_type and all(type(part) in _PLAIN_TYPES for part in (parts[0], *parts[2:], *views))
    of_class = pid[1:] if pid[:1] == ("module",) else pid
    is_class = len(of_class) == _PARTS_OF_CLASS and type(of_class[0]) is Global
    return is_class and all(type(part) in _PLAIN_TYPES for part in of_class[1:])


def _seen(op: int) -> Handler:
    """The machine's own, and the string it pushes looked at."""
    handler = Machine.handlers[op]

    def push(m: Any, pos: int) -> int:
        end = handler(m, pos)
        m.see(pos, m.stack[-1])
        return end

    return push


_OTHERS: dict[int, Handler] = {
    0x53: _seen(0x53),
    0x56: _seen(0x56),
    0x51: _persistent,
    0x62: _build,
    0x63: _global,
    0x69: _inst,
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    0x91: _frozenset,
    0x92: _newobj_ex,
    0x97: _next_buffer,
    0x98: _same,
}
Scanner.handlers = tuple(_OTHERS.get(op, handler) for op, handler in enumerate(Machine.handlers))
_MEMOIZE = 0x94
#: The opcodes that torch/_weights_only_unpickler.py of torch 2.13 knows.
_KNOWN_TO_TORCH = frozenset(b"\x80c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a.")


def _looking(op: int, handler: Handler) -> Handler:
    """The same, the opcode noted as the first that torch does not know."""

    def note(m: Any, pos: int) -> int:
        if m._refused_opcode is None:
            m._refused_opcode = op
        m.handlers = Scanner.handlers
        return handler(m, pos)

    return handler if op in _KNOWN_TO_TORCH else note


_LOOKING = tuple(_looking(op, handler) for op, handler in enumerate(Scanner.handlers))
#: Opcodes that find something to work on when nothing is there yet: all but those that want a stack, or end.
_BEGINNINGS = frozenset(b"()]}NIFLSVXUTBCGJKMPcdl\x80\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x82\x83\x84\x95\x96\x97i")
