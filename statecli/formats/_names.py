"""The Python names that one pickle would import, read on past what `_pickle.Machine` refuses and Python would do.

The machine stops at the first thing that no honest pickle does. A hostile one does it to be left unread: a call of what
a call returned, a BUILD on a class, an item set on a module. Here each of these has some inert result and reading goes
on, to the STOP or to what no unpickler can read either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from statecli.errors import MalformedError
from statecli.formats._graph import is_module
from statecli.formats._pickle import Global, Handler, Machine, Obj, Persistent, Value
from statecli.state import Mention

_PLAIN = re.compile(r"[A-Za-z_]\w*")
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
#: Strings that may hold a pickle, an archive or an array: bytes by their beginning, text as UTF-8 if it is Latin-1.
_INNER = re.compile(rb"\x80[\x00-\x05]|PK\x03\x04|\x93NUMPY|[()\]}NIFLSVXUcd][^\n]{0,300}\n", re.DOTALL)
_INNER_TEXT = re.compile(rb"\xc2\x80[\x00-\x05]|PK\x03\x04|\xc2\x93NUMPY|[()\]}NIFLSVXUcd][^\n]{0,300}\n", re.DOTALL)
#: No pickle that calls anything is shorter.
_SHORTEST = 6


class Scanner(Machine):
    """A machine that reads on. `inner` are strings that begin like a pickle, `modules` the classes of whole modules.

    `patched` are the names that the pickle would change for the whole process: attributes of a class (BUILD), items.
    """

    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(data, what, fast=True, module_ids=True)
        self.inner: list[tuple[int, bytes]] = []
        self.modules: list[str] = []
        self.patched: list[Global] = []
        self._called: set[int] = set()
        self.calls = 0
        self._opaque = False
        self._resolved = False

    def mentions(self) -> Iterator[Mention]:
        """Each name once, in the order of first mention. `getattr` is left out where it only spelled out others."""
        spelled = self._resolved and not self._opaque
        patched = {id(one) for one in self.patched}
        for one in self.globals.values():
            if not (spelled and one.qualified in _GETATTR):
                yield Mention(one.module, one.name, one.position, id(one) in self._called, id(one) in patched)

    # What the machine refuses.

    def call(self, function: Value, args: Value, pos: int, how: str = "reduce") -> Any:
        """Whatever is called gives something inert; `getattr` of a name gives the longer name."""
        self.calls += 1
        if type(function) is Global:
            self._called.add(id(function))
            if function.qualified in _GETATTR:
                attribute = self._attribute(args, pos)
                if attribute is not None:
                    return attribute
        self.objects += 1
        return Obj(function, args if type(args) is tuple else (args,), how)

    def take_record(self, match: re.Match[bytes]) -> bool:
        """As the machine does it, the function noted as called."""
        function = self.stack[-1] if self.stack else None
        taken = super().take_record(match)
        if taken and type(function) is Global:
            self._called.add(id(function))
        return taken

    def _attribute(self, args: Value, pos: int) -> Global | None:
        owner, name = args if type(args) is tuple and len(args) == 2 else (None, None)
        if type(owner) is not Global or type(name) is not str or not _PLAIN.fullmatch(name):
            self._opaque = True
            return None
        self._resolved = True
        return self.name(owner.module, f"{owner.name}.{name}", pos)

    def name(self, module: Value, name: Value, pos: int) -> Global:
        """As the machine does it; strings of Python 2 may be bytes."""
        module, name = (str(one, "latin-1") if type(one) is bytes else one for one in (module, name))
        return super().name(module, name, pos)

    def set_items(self, target: Value, flat: list[Value], pos: int) -> None:
        """Keys and values are set on anything."""
        if type(target) in (dict, Obj) and not len(flat) % 2:
            super().set_items(target, flat, pos)
        self.changed(target)

    def add_elements(self, target: Value, elements: list[Value], pos: int, opcode: str) -> None:  # noqa: ARG002
        """Elements are appended to anything."""
        if type(target) in (list, Obj):
            super().add_elements(target, elements, pos, "APPEND")
        self.changed(target)

    def changed(self, target: Value) -> None:
        """Note what is changed if it is no object of the pickle's own."""
        if type(target) is Global:
            self.patched.append(target)

    def decimal(self, line: bytes, pos: int) -> int:
        """Integers as Python reads them: with spaces and underscores, hexadecimal."""
        try:
            return super().decimal(line, pos)
        except MalformedError:
            if len(line) > 256:
                raise
            return _integer(line, self.error(pos, "a number that is none"))

    # What may be a pickle itself.

    def take(self, start: int, length: int) -> bytes:
        """As the machine does it, what begins like a pickle remembered."""
        data = super().take(start, length)
        if length >= _SHORTEST and _INNER.match(data):
            self.inner.append((start, data))
        return data

    def text(self, start: int, end: int) -> str:
        """As the machine does it, what begins like a pickle remembered."""
        text = super().text(start, end)
        if end - start >= _SHORTEST and _INNER_TEXT.match(self.data, start, end):
            self.see(start, text)
        return text

    def see(self, start: int, text: Any) -> None:
        """Remember a text or bytes of another opcode that may be a pickle."""
        data = text if type(text) is bytes else text.encode("latin-1", "replace") if type(text) is str else b""
        if len(data) >= _SHORTEST and _INNER.match(data):
            self.inner.append((start, data))


def _integer(line: bytes, error: MalformedError) -> int:
    for base in (10, 0):
        try:
            return int(line, base)
        except ValueError:
            continue
    raise error


def _build(m: Any, pos: int) -> int:
    state, target = m.stack.pop(), m.stack[-1]
    if type(target) is Obj:
        target.state = state
        if is_module(target) and type(target.cls) is Global:
            m.modules.append(target.cls.qualified)
    m.changed(target)
    return pos


def _inst(m: Machine, pos: int) -> int:
    """The name is imported before its arguments are looked for."""
    module, end = m.line(pos)
    name, end = m.line(end)
    function = m.name(module, name, pos)
    args = tuple(m.pop_mark())
    m.stack.append(m.call(function, args, pos, "inst"))
    return end


def _extension(m: Machine, pos: int) -> int:
    """A code stands for a name that the loading program has registered."""
    width = 1 << (m.data[pos - 1] - 0x82)
    code = int.from_bytes(m.data[pos : pos + width], "little")
    m.stack.append(m.name("copyreg", f"_inverted_registry[{code}]", pos))
    return pos + width


def _next_buffer(m: Machine, pos: int) -> int:
    m.stack.append(Persistent(None))
    return pos


def _same(m: Machine, pos: int) -> int:  # noqa: ARG001
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs, args = m.stack.pop(), m.stack.pop()
    made = m.call(m.stack[-1], args, pos, "newobj")
    if type(kwargs) is dict and type(made) is Obj:
        made.kwargs = kwargs
    m.stack[-1] = made
    return pos


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
    0x62: _build,
    0x69: _inst,
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    0x92: _newobj_ex,
    0x97: _next_buffer,
    0x98: _same,
}
Scanner.handlers = tuple(_OTHERS.get(op, handler) for op, handler in enumerate(Machine.handlers))
