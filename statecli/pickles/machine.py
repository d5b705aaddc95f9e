"""Pickles read symbolically: a stack machine that builds a graph of what a pickle says and does nothing it says.

Nothing is imported and nothing is called: a name stays a `Global`, a call stays an `Obj`. Neither
`pickle.Unpickler` with inert classes nor `torch.load(weights_only=True)` will do, because both hash what a file
gives as dictionary keys and recurse over it: a few hundred bytes hang them for ever, two megabytes overflow the C
stack. So here

- only short and cheap keys are hashed (`Key` wraps the rest by identity), and nothing recurses;
- every length is compared with the bytes left before anything is allocated;
- opcodes, memo entries, containers, stack and nesting of marks each have a budget.

The graph may be cyclic, and a shared tuple can make it exponential when printed: walk it with a set of ids, and
never pass a node to `repr`, `str` or `hash` (tuples hash recursively).

The opcodes are those of the `pickletools` module, protocols 0 to 5. The 28 opcodes that torch writes for each tensor
are taken in one step where they are exactly as torch writes them (`_RECORD`); `load(..., fast=False)` takes every
opcode by itself and is the reference the fast path is tested against.
"""

from __future__ import annotations

import gc
import re
import struct
import sys
from codecs import escape_decode
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import length_hint
from typing import Any, ClassVar, TypeAlias

import msgspec

from statecli.core.errors import MalformedError

#: The highest pickle protocol there is (Python 3.8).
HIGHEST_PROTOCOL = 5
#: A tensor of a state_dict takes 32 opcodes; this is 300,000 tensors and at most a few seconds.
MAX_OPCODES = 10_000_000
#: How many times as much is read of the metadata of torch.distributed.checkpoint: 600,000 chunks, of a large model
#: and its optimizer on hundreds of ranks.
METADATA_BUDGET = 4
MAX_MEMO = 3_000_000
#: Lists, dicts, sets and calls; tuples are bounded by the opcodes.
MAX_OBJECTS = 3_000_000
MAX_STACK = 1_000_000
MAX_MARKS = 10_000
MAX_GLOBALS = 100_000
#: Values that all objects hold as arguments or state: so many, and so many for each opcode. More of them are shared by
#: many objects, which picklers do not write, and are read again for each.
MAX_HELD = 200_000
MAX_HELD_PER_OPCODE = 16
#: Arguments whose own values count as held: functions take a container among their first.
_COUNTED_ARGUMENTS = 4
#: Containers filled from containers, which are filled from containers, that are followed.
MAX_COPIES = 8
#: Opcodes between two looks at the budgets.
_BURST = 50_000
#: Integers of more bytes are no number a checkpoint has use for, and past 4300 digits Python does not print them.
MAX_INT_BYTES = 1024
MAX_TEXT_NUMBER = 2 * MAX_INT_BYTES
#: hash(n) is n modulo 2**61 - 1, so larger integers can all be made to collide.
_HASHED_INT = 2**60
_HASHED_BYTES = 65_536
#: Values in a key that are compared with those of other keys where no machine keeps what it read of them.
MAX_KEY_PARTS = 64
#: Containers in one another that are read as a key. Deeper ones overflow the stack where Python hashes them.
MAX_KEY_NESTING = 10_000
#: Duplicate keys that are kept to be named.
MAX_DUPLICATES = 100
STOP = b"."
#: The end of the open frame where no frame is open: after every byte.
NO_FRAME = sys.maxsize

Value = Any  # what a pickle can build: the classes below, and None, bool, int, float, str, bytes, list, tuple, dict


class Global(msgspec.Struct, eq=False):
    """A name the pickle would import, and the byte of its first mention. One object a name and load."""

    module: str
    name: str
    position: int

    @property
    def qualified(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<Global {self.qualified!r}>"


class Obj(msgspec.Struct, eq=False):
    """A call the pickle would make, and what it would do to the result.

    `cls` is what was called, nearly always a Global; `how` is reduce, newobj, obj or inst. `kwargs` is a dict for
    NEWOBJ_EX, `state` the last BUILD, `items` the dict items set on it, `elems` what was appended or added.
    """

    cls: Value
    args: tuple[Value, ...]
    how: str = "reduce"
    kwargs: dict[Value, Value] | None = None
    state: Value = None
    items: dict[Value, Value] | None = None
    elems: list[Value] | None = None

    def __repr__(self) -> str:
        return f"<Obj {self.how}>"


class Key(msgspec.Struct, eq=False):
    """A dictionary key that must not be hashed as it is: a tuple, a float, a node, a huge integer.

    It equals the keys that Python takes for the same one, by `plain`: a number, text, bytes, or ("token", bytes) for a
    container or a huge integer. None where only the node itself is the same.
    """

    value: Value
    plain: Value = None

    def __repr__(self) -> str:
        return "<Key>"

    def __hash__(self) -> int:
        return id(self.value) if self.plain is None else hash(self.plain)

    def __eq__(self, other: object) -> bool:
        if type(other) is not Key:
            return bool(self.plain is not None and self.plain == other)
        if self.plain is None or other.plain is None:
            return self.value is other.value
        return bool(self.plain is other.plain or self.plain == other.plain)


class Persistent(msgspec.Struct, eq=False):
    """What the pickle left to its container: torch's storages, `("storage", type, key, location, numel)`."""

    pid: Value

    def __repr__(self) -> str:
        return "<Persistent>"


class SetOf(msgspec.Struct, eq=False):
    """A set or a frozenset, as the list of what was put into it."""

    elems: list[Value]

    def __repr__(self) -> str:
        return "<SetOf>"


class Pickle(msgspec.Struct, eq=False):
    """One pickle: its `root`, the `globals` in the order of their first mention, its storages in theirs.

    `end` is the first byte after it, `protocol` what it says of itself (0 where it does not), `duplicate_keys` up
    to 100 dictionary keys that were set twice; the last value won, as it does for torch.
    """

    root: Value
    globals: list[Global]
    end: int
    persistent: list[Persistent]
    duplicate_keys: list[Value]
    protocol: int

    def __repr__(self) -> str:
        return f"<Pickle of {self.end} bytes>"


class TruncatedPickle(MalformedError):
    """The bytes end before the pickle does."""


class TruncatedFrame(TruncatedPickle):
    """A frame ends after the last byte: CPython's C unpickler refuses it, the one in Python reads what is there."""


class MisframedPickle(MalformedError):
    """An opcode crosses the end of its frame, a frame begins inside another, or STOP comes before the frame's end.

    Unpicklers read different opcodes from such bytes. No pickler writes them.
    """


class OverBudget(MalformedError):
    """The pickle goes on, and reading it further would take too long or too much memory."""


def load(
    data: bytes | memoryview,
    what: str = "data.pkl",
    start: int = 0,
    *,
    fast: bool = True,
    module_ids: bool = False,
    budget: int = 1,
    kind: type[Machine] | None = None,
) -> Pickle:
    """The graph of the pickle at byte `start` of `data`.

    `module_ids` takes the persistent id ("module", class, file, source) for the class, as old whole modules mean it,
    and (class, file, source), as those in a tar archive do.
    `budget` multiplies how many opcodes, memo entries and objects are read; `kind` is the machine that reads them.
    Raises MalformedError with `what` and the byte where it cannot go on, TruncatedPickle where the bytes end.
    """
    machine = (kind or Machine)(bytes(data), what, fast=fast, module_ids=module_ids)
    machine.budget = budget
    with without_gc():
        machine.run(start)
    return Pickle(
        machine.root,
        list(machine.globals.values()),
        machine.end,
        machine.persistent,
        machine.duplicates,
        machine.protocol,
    )


@contextmanager
def without_gc() -> Iterator[None]:
    """Reading only allocates: the collector would walk the growing graph again and again, for a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Stopped(Exception):
    """STOP was met."""


def as_key(value: Value, tokens: Tokens | None = None) -> Value:
    """`value` as a dictionary key: itself if hashing it is cheap, else wrapped. Text that `str` makes of text is text.

    Two keys are equal where Python's are: 1 and 1.0, tuples of equal values. Without `tokens`, containers of more than
    `MAX_KEY_PARTS` values equal themselves alone.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int and -_HASHED_INT < value < _HASHED_INT:
        return value
    if kind is bytes and len(value) <= _HASHED_BYTES:
        return value
    plain = (Tokens(MAX_KEY_PARTS) if tokens is None else tokens).plain(value)
    return plain if type(plain) is str else Key(value, plain)


class Tokens:
    """Bytes that are the same for containers that are equal as dictionary keys. Each container is read once.

    Nothing is hashed but bytes, whose hashes nobody can foresee, and nothing recurses.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        #: By the id of a container, which is kept alive so that no other has its id.
        self._known: dict[int, tuple[Value, bytes]] = {}
        self._left = limit
        #: Whether a container was too deep to be read; it is equal to itself alone, and Python cannot hash it.
        self.is_partial = False

    def plain(self, value: Value) -> Value:
        """Return `Key.plain` of a value."""
        if type(value) is tuple and id(value) in self._known:
            return "token", self._known[id(value)][1]
        value = _spelled(value)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) in (bool, str, float) or (type(value) is int and abs(value) < _HASHED_INT):
            return value
        if type(value) is bytes and len(value) <= _HASHED_BYTES:
            return value
        if _parts(value) is not None:
            self._read(value)
        elif type(value) not in (int, bytes, Global):
            return None
        token = self._of(value)
        return None if self._left < 0 else ("token", token)

    def _read(self, root: Value) -> None:
        """Find the tokens of a container and of those in it, as far as they may be read."""
        waiting, entered, depth = [root], set[int](), 0
        while waiting and self._left >= 0:
            value = waiting[-1]
            tag, parts = _parts(value) or (b"", ())
            if id(value) in self._known:
                waiting.pop()
            elif depth > MAX_KEY_NESTING:
                self.is_partial = True
                self._known.update((id(deep), (deep, b"o%d" % id(deep))) for deep in waiting)
            elif id(value) not in entered:
                entered.add(id(value))  # what holds itself, which cannot be hashed, is entered once
                depth += 1
                self._left -= 1 + len(parts)
                waiting.extend(part for part in parts if id(part) not in entered and _parts(part) is not None)
            else:
                waiting.pop()
                depth -= 1
                tokens = [self._of(part) for part in parts]
                self._known[id(value)] = (value, _joined(tag, sorted(set(tokens)) if tag == _SET else tokens))

    def _of(self, value: Value) -> bytes:
        """The token of a container that was read, or of any other value."""
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        spelled = _spelled(value)
        if type(spelled) in (str, bytes):
            self._left -= len(spelled) // MAX_KEY_PARTS
        token = _leaf_token(spelled) if self._left >= 0 else b""
        if len(token) > _SHORT_TOKEN:
            token = _joined(b"", [token])
            self._known[id(value)] = (value, token)
        return token


def _parts(value: Value) -> tuple[bytes, Sequence[Value]] | None:
    """The kind and the values of what is compared by its values: tuples, shapes, frozen sets, complex numbers."""
    if type(value) is tuple:
        return _TUPLE, value
    if type(value) is SetOf:
        return _SET, value.elems
    if type(value) is not Obj or type(value.cls) is not Global or value.cls.name not in _COMPARED or not value.args:
        return None
    name, first = _python_name(value.cls), value.args[0]
    if name == "builtins.complex" and all(type(number) in (int, float, bool) for number in value.args[:2]):
        return _COMPLEX, (*value.args, 0)[:2]
    if name in _COMPARED_CLASSES and len(value.args) == 1 and type(first) in (tuple, list):
        return _COMPARED_CLASSES[name], first
    if name in _COMPARED_CLASSES and len(value.args) == 1 and type(first) is SetOf:
        return _COMPARED_CLASSES[name], first.elems
    return None


def _spelled(value: Value) -> Value:
    """The text, bytes or number that a call spells out; other values as they are."""
    if type(value) is not Obj or type(value.cls) is not Global or value.cls.name not in _SPELLING or not value.args:
        return value
    name, first = _python_name(value.cls), value.args[0]
    if name == "builtins.complex" and type(first) in (int, float, bool) and value.args[1:] in ((), (0,)):
        return first
    if name == "_codecs.encode":
        return _encoded(value)
    if name.endswith(".multiarray.scalar"):
        return _numpy_number(value)
    kind = _SPELLED.get(name)
    return first if kind is not None and type(first) is kind and len(value.args) == 1 else value


def _encoded(call: Obj) -> Value:
    """The bytes that protocol 2 writes as text; the call itself where they are others, or many."""
    text = call.args[0]
    if type(text) is not str or call.args[1:] != ("latin1",) or len(text) > _HASHED_BYTES:
        return call
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        return call


def _numpy_number(call: Obj) -> Value:
    """The number that a scalar of numpy equals; the call itself where it is of another type."""
    dtype, data = call.args if len(call.args) == 2 else (None, None)
    code = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    raw, form = _spelled(data), _NUMPY_CODES.get(code) if type(code) is str else None
    if type(raw) is not bytes or form is None or struct.calcsize(form) != len(raw):
        return call
    state = dtype.state if type(dtype) is Obj and type(dtype.state) is tuple else ()
    return struct.unpack((">" if ">" in state[1:2] else "<") + form, raw)[0]


def is_computed(key: Obj, tokens: Tokens) -> bool:
    """Return whether a call makes a value of Python's own that is not known here, which may equal another key."""
    return _python_name(key.cls) in _COMPUTING and tokens.plain(key) is None


def _python_name(name: Value) -> str:
    return name.qualified.replace("__builtin__.", "builtins.") if type(name) is Global else ""


def _leaf_token(value: Value) -> bytes:
    """The token of what is no container; what is only itself has its id, as NaN."""
    if value is None:
        return b"N"
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) in (int, bool):
        return b"i%x" % value
    if type(value) is float and value == value:
        return b"f" + struct.pack("<d", value)
    if type(value) is str:
        return b"s" + value.encode("utf-8", "surrogatepass")
    if type(value) is bytes:
        return b"b" + value
    if type(value) is Global:
        return b"g" + _DTYPE_ALIASES.get(value.qualified, value.qualified).encode("utf-8", "surrogatepass")
    return b"o%d" % id(value)


def _joined(tag: bytes, tokens: Iterable[bytes]) -> bytes:
    joined = tag + b"".join([b"%d:%b" % (len(token), token) for token in tokens])
    if len(joined) <= _SHORT_TOKEN:
        return joined
    import hashlib  # OpenSSL below it takes longer to load than most checkpoints to list

    return tag + b"#" + hashlib.sha256(joined).digest()


_TUPLE, _SET, _COMPLEX = b"T", b"S", b"C"
_COMPARED_CLASSES = {"builtins.tuple": _TUPLE, "torch.Size": _TUPLE, "builtins.frozenset": _SET}
_COMPARED = frozenset(["tuple", "Size", "frozenset", "complex"])
#: Calls that give back what they are given, by the type of that; and the plain names of all that `_spelled` looks at.
_SPELLED = {
    "builtins.str": str,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.bytes": bytes,
    "builtins.bool": bool,
}
_SPELLING = frozenset(["str", "int", "float", "bytes", "bool", "complex", "encode", "scalar"])
#: Calls whose results are equal to plain values.
_COMPUTING = frozenset([*_SPELLED, *_COMPARED_CLASSES, "builtins.complex", "_codecs.encode"])
_NUMPY_CODES = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
}
#: Two names of torch for one type of elements.
_DTYPE_ALIASES = {
    f"torch.{alias}": f"torch.{name}"
    for alias, name in {
        "float": "float32",
        "double": "float64",
        "half": "float16",
        "cfloat": "complex64",
        "cdouble": "complex128",
        "chalf": "complex32",
        "int": "int32",
        "long": "int64",
        "short": "int16",
    }.items()
}
#: Bytes of a token that stands for itself; of a longer one its hash does.
_SHORT_TOKEN = 64


class Machine:
    """The state of one parse. `metastack` holds the stacks below each mark; `stack` is the one above the last.

    `memo` holds the entries 0..n-1, which is how every pickler numbers them; `far` the ones out of that order.
    """

    #: What each of the 256 opcodes does; one that reads on where this one refuses replaces some.
    handlers: tuple[Handler, ...]
    #: Characters of a global's name, which is looked at for each call of it.
    longest_name: ClassVar[int] = 4096

    def __init__(self, data: bytes, what: str, *, fast: bool, module_ids: bool) -> None:
        self.data = data
        self.what = what
        self.fast = fast
        self.module_ids = module_ids
        self.stack: list[Value] = []
        self.metastack: list[list[Value]] = []
        self.memo: list[Value] = []
        self.far: dict[int, Value] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.persistent: list[Persistent] = []
        self.duplicates: list[Value] = []
        #: The byte after the open frame, NO_FRAME outside of frames; whether there was a frame.
        self.frame_end = NO_FRAME
        self.framed = False
        #: Whether there was a MEMOIZE, which has no handler of its own.
        self.memoizes = False
        self.root: Value = None
        self.end = 0
        self.protocol = 0
        self.objects = 0
        self.held = 0
        #: Arguments and states in which something can still grow.
        self.holders: list[Value] = []
        self.budget = 1
        self._bursts = 0
        self._left: Iterator[None] = repeat(None, 0)
        self.numbers = _Numbers()
        self.shapes = _Shapes(self.numbers)
        self.tokens = Tokens()

    def run(self, start: int) -> None:
        """Read from byte `start` to STOP; sets `root` and `end`."""
        pos = start
        try:
            for _ in repeat(None, MAX_OPCODES * self.budget // _BURST):
                pos = self._burst(pos)
                self._bursts += 1
                self._check_budgets(pos)
        except _Stopped:
            return
        raise self.too_much(pos, f"more than {MAX_OPCODES * self.budget} opcodes")

    def _next_burst(self) -> Iterator[None]:
        self._left = repeat(None, _BURST)
        return self._left

    @property
    def opcodes(self) -> int:
        """Number of opcodes that were read; a record of a tensor counts as one."""
        return self._bursts * _BURST + (_BURST - length_hint(self._left)) % _BURST

    def error(self, pos: int, text: str) -> MalformedError:
        """The line for something wrong with the opcode before byte `pos`."""
        return MalformedError(f"{self.what}: {text} (byte {pos - 1})")

    def truncated(self, text: str = "the pickle ends in the middle") -> TruncatedPickle:
        """The line for bytes that end too soon."""
        return TruncatedPickle(f"{self.what} is truncated: {text} (byte {len(self.data)})")

    def too_much(self, pos: int, text: str) -> OverBudget:
        """The line for a pickle that is read no further."""
        return OverBudget(str(self.error(pos, text)))

    def misframed(self, pos: int, text: str) -> MisframedPickle:
        """The line for a frame that the opcodes before byte `pos` do not keep to."""
        return MisframedPickle(str(self.error(pos, f"{text}, which no pickler writes")))

    def end_frame(self, pos: int) -> int:
        """Leave the open frame, which must end at byte `pos`; return the end of the frame that is open now."""
        if pos != self.frame_end:
            raise self.misframed(pos, f"an opcode crosses the end of its frame at byte {self.frame_end}")
        self.frame_end = NO_FRAME
        return NO_FRAME

    def _check_budgets(self, pos: int) -> None:
        if len(self.memo) + len(self.far) > MAX_MEMO * self.budget:
            raise self.too_much(pos, f"more than {MAX_MEMO * self.budget} memo entries")
        if self.objects > MAX_OBJECTS * self.budget:
            raise self.too_much(pos, f"more than {MAX_OBJECTS * self.budget} objects")
        if len(self.stack) > MAX_STACK:
            raise self.too_much(pos, f"more than {MAX_STACK} values wait on the stack")
        if len(self.metastack) > MAX_MARKS:
            raise self.too_much(pos, f"more than {MAX_MARKS} open marks")
        if len(self.globals) > MAX_GLOBALS:
            raise self.too_much(pos, f"names more than {MAX_GLOBALS} globals")

    def _burst(self, pos: int) -> int:
        """Read up to `_BURST` opcodes from byte `pos` on; return the byte after the last. Frequent ones are here."""
        data, stack, memo, far, handlers = self.data, self.stack, self.memo, self.far, self.handlers
        u32, size, fast, record, frame_end = _U32, len(data), self.fast, _RECORD, self.frame_end
        try:
            for _ in self._next_burst():
                if pos >= frame_end:
                    frame_end = self.end_frame(pos)
                op = data[pos]
                pos += 1
                if op == 0x72 or op == 0x71:  # LONG_BINPUT, BINPUT
                    if op == 0x72:
                        (index,) = u32(data, pos)
                        pos += 4
                    else:
                        index = data[pos]
                        pos += 1
                    if index == len(memo) and not far:
                        memo.append(stack[-1])
                    else:
                        self.put(index, stack[-1])
                elif op == 0x94 and not far:  # MEMOIZE
                    memo.append(stack[-1])
                    self.memoizes = True
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                    index, pos = (data[pos], pos + 1) if op == 0x68 else (u32(data, pos)[0], pos + 4)
                    stack.append(memo[index] if index < len(memo) else self.get(index, pos))
                elif op == 0x58:  # BINUNICODE
                    (length,) = u32(data, pos)
                    pos += 4 + length
                    stack.append(self.text(pos - length, pos))
                elif op == 0x28:  # MARK
                    if fast and (m := record(data, pos)) and m.end() <= frame_end and self.take_record(m):
                        pos = m.end()
                    else:
                        self.metastack.append(stack)
                        self.stack = stack = []
                elif op == 0x74:  # TUPLE
                    items = tuple(stack)
                    self.stack = stack = self.metastack.pop()
                    stack.append(items)
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = self.call(stack[-1], args, pos)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                else:
                    pos = handlers[op](self, pos)
                    stack, frame_end = self.stack, self.frame_end
        except IndexError as error:
            if pos >= size and data[pos - 1 : pos] != STOP:
                raise self.truncated() from error
            raise self.error(pos, "the stack holds too little for this opcode") from error
        except struct.error as error:
            raise self.truncated() from error
        return pos

    def take_record(self, match: re.Match[bytes]) -> bool:
        """Do what the opcodes of a matched `_RECORD` do, or nothing and False where they do more than it says.

        They do more when a memo entry is not the next one, or is read that the record itself writes.
        """
        tag, kind, n, key, p0, location, numel, p1, offset, size, p2, stride, p3, grad, hooks, p4, p5, p6 = (
            match.groups()
        )
        numbers, memo, stack = self.numbers, self.memo, self.stack
        next_ = len(memo)
        puts = p0 + p1 + p2 + p3 + p4 + p5 + p6 if size else p0 + p1 + p4 + p5 + p6
        wanted = next_ * _ONES_7 + _STEPS_7 if size else next_ * _ONES_5 + _STEPS_5
        if self.far or int.from_bytes(puts, "little") != wanted or n[0] != len(key) or not stack:
            return False
        tag, kind, location, hooks = numbers[tag], numbers[kind], numbers[location], numbers[hooks]
        if tag >= next_ or kind >= next_ or location >= next_ or hooks >= next_:
            return False
        function = stack[-1]
        if type(function) not in _CALLABLE or type(memo[hooks]) not in _CALLABLE:
            return False
        name = str(key, "ascii")
        pid = (memo[tag], memo[kind], name, memo[location], numbers[numel])
        storage = Persistent(pid)
        self.persistent.append(storage)
        called = Obj(memo[hooks], ())
        shape, strides = (self.shapes[size], self.shapes[stride]) if size else ((), ())
        args = (storage, numbers[offset], shape, strides, grad == b"\x88", called)
        made = stack[-1] = Obj(function, args)
        memo.extend((name, pid, shape, strides, called, args, made) if size else (name, pid, called, args, made))
        self.objects += 3
        return True

    # What the handlers share.

    def text(self, start: int, end: int) -> str:
        """The UTF-8 string in these bytes. Pickle lets lone surrogates pass, and so must a reader of it."""
        if end > len(self.data):
            raise self.truncated("a string runs past the end of the pickle")
        try:
            return str(self.data[start:end], "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.error(start + error.start + 1, "invalid UTF-8 in a string") from error

    def take(self, start: int, length: int) -> bytes:
        """`length` bytes from byte `start`."""
        if start + length > len(self.data):
            raise self.truncated("a string runs past the end of the pickle")
        return self.data[start : start + length]

    def line(self, pos: int) -> tuple[bytes, int]:
        """The text argument at byte `pos`, without its newline, and the byte after that."""
        end = self.data.find(b"\n", pos)
        if end < 0:
            raise self.truncated("a line has no end")
        return self.data[pos:end], end + 1

    def put(self, index: int, value: Value) -> None:
        """Remember `value` as memo entry `index`, in whatever order they come."""
        if index < 0:
            raise MalformedError(f"{self.what}: memo entry {index} is negative")
        if index < len(self.memo):
            self.memo[index] = value
        elif index == len(self.memo) and not self.far:
            self.memo.append(value)
        else:
            self.far[index] = value

    def get(self, index: int, pos: int) -> Value:
        """Memo entry `index`."""
        if 0 <= index < len(self.memo):
            return self.memo[index]
        if index not in self.far:
            raise self.error(pos, f"memo entry {index} is read before it is written")
        return self.far[index]

    def pop_mark(self) -> list[Value]:
        """The values above the last mark; the stack below becomes the stack."""
        items = self.stack
        self.stack = self.metastack.pop()
        return items

    def name(self, module: Value, name: Value, pos: int) -> Global:
        """The one Global of this name."""
        if type(module) is not str or type(name) is not str:
            raise self.error(pos, "a global whose name is no string")
        if len(module) + len(name) > self.longest_name:
            raise self.error(pos, f"a global whose name has {len(module) + len(name):,} characters")
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name, pos - 1)
        return found

    def call(self, function: Value, args: Value, pos: int, how: str = "reduce") -> Obj:
        """The inert result of calling `function`."""
        if type(args) is not tuple:
            raise self.error(pos, f"a call with {_a(args)} for its arguments")
        if type(function) not in _CALLABLE:
            raise self.error(pos, f"a call of {_a(function)}")
        self.objects += 1
        self.count_held(args, pos)
        return Obj(function, args, how)

    def count_held(self, values: Value, pos: int) -> None:
        """Count the values that an object gets. Raises OverBudget where many objects share many values."""
        if type(values) is tuple:
            self.held += sum([len(one) for one in values[:_COUNTED_ARGUMENTS] if type(one) in _CONTAINERS])
            if not _GROWING.isdisjoint(map(type, values[:_COUNTED_ARGUMENTS])):
                self.holders.append(values)
        elif type(values) in _GROWING:
            self.holders.append((values,))
        if type(values) in _CONTAINERS:
            self.held += len(values)
        self._check_held(self.held, pos)

    def recount_held(self, pos: int) -> None:
        """Count again what objects hold, because their lists and dicts may have grown since."""
        held = sum([_size(one) for values in self.holders for one in values[:_COUNTED_ARGUMENTS]])
        self._check_held(held, pos)

    def _check_held(self, held: int, pos: int) -> None:
        if held > MAX_HELD and held > MAX_HELD + MAX_HELD_PER_OPCODE * self.opcodes:
            raise self.too_much(pos, f"objects share values that count as {held:,}, more than 16 for each opcode")

    def set_items(self, target: Value, flat: list[Value], pos: int) -> None:
        """SETITEMS: `flat` is key, value, key, value…"""
        if type(target) is Obj:
            if target.items is None:
                target.items = {}
            target = target.items
        if type(target) is not dict:
            raise self.error(pos, f"SETITEM on {_a(target)}")
        if len(flat) % 2:
            raise self.error(pos, "a dictionary key without a value")
        keys = flat[0::2]
        if not _STRINGS.issuperset(map(type, keys)):
            keys = [as_key(key, self.tokens) for key in keys]
        before = len(target)
        if before and not target.keys().isdisjoint(keys):
            self._note_duplicates(target, keys)
            before = -1
        target.update(zip(keys, flat[1::2], strict=True))
        if before >= 0 and len(target) != before + len(keys):
            self._note_duplicates((), keys)

    def _note_duplicates(self, known: Container[Value], keys: Iterable[Value]) -> None:
        seen: set[Value] = set()
        for key in keys:
            if (key in known or key in seen) and len(self.duplicates) < MAX_DUPLICATES:
                self.duplicates.append(key)
            seen.add(key)

    def set_state(self, target: Obj, state: Value) -> None:
        """BUILD."""
        target.state = state

    def add_elements(self, target: Value, elements: list[Value], pos: int, opcode: str) -> None:
        """APPENDS and ADDITEMS."""
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
            raise self.error(pos, f"{opcode} on {_a(target)}")

    def integer(self, data: bytes) -> Value:
        """A little-endian two's complement of any length; an absurdly long one as a call, not made as all are not."""
        if len(data) > MAX_INT_BYTES:
            self.objects += 1
            return Obj(_INT, (data,))
        return int.from_bytes(data, "little", signed=True)

    def decimal(self, line: bytes, pos: int) -> int:
        """An integer in text."""
        if len(line) > MAX_TEXT_NUMBER:
            raise self.error(pos, f"absurd integer of {len(line)} digits")
        if not _DECIMAL.fullmatch(line):
            raise self.error(pos, "a number that is none")
        return int(line)

    def c_integer(self, line: bytes, pos: int) -> int:
        """The integer of INT, which the C unpickler reads with `strtol`: octal where it begins with 0."""
        return int(line, 8) if _OCTAL.fullmatch(line) else self.decimal(line, pos)

    def real(self, line: bytes, pos: int) -> float:
        """A number with a fraction in text."""
        if len(line) > MAX_TEXT_NUMBER:
            raise self.error(pos, f"absurd number of {len(line)} digits")
        try:
            return float(line)
        except ValueError as error:
            raise self.error(pos, "a number that is none") from error


class _Numbers(dict[bytes, int]):
    """The number in BININT1, BININT2, BININT, BINGET or LONG_BINGET, decoded once."""

    def __missing__(self, raw: bytes) -> int:
        if len(self) >= _MAX_CACHE:
            self.clear()
        number = self[raw] = int.from_bytes(raw[1:], "little", signed=raw[0] == 0x4A)
        return number


class _Shapes(dict[bytes, tuple[int, ...]]):
    """The tuple of numbers in these opcodes, made once: few models have more than dozens of shapes."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __missing__(self, raw: bytes) -> tuple[int, ...]:
        if len(self) >= _MAX_CACHE:
            self.clear()
        shape = self[raw] = tuple(self._numbers[one] for one in _NUMBERS.findall(raw))
        return shape


_MAX_CACHE = 65_536
_NUMBER = rb"(?:K.|M..|J....)"
_NUMBERS = re.compile(_NUMBER, re.DOTALL)
_GET = rb"(h.|j....)"
_PUT = rb"r(....)"
#: One to three numbers and TUPLE1 to TUPLE3, or a MARK, more numbers and TUPLE.
_SHAPE = rb"(N\x85|NN\x86|NNN\x87|\(N{4,16}t)".replace(b"N", _NUMBER)
#: What torch writes between the function `_rebuild_tensor_v2`, its MARK included, and the memo entry of the tensor:
#: the storage's persistent id, offset, size, stride, requires_grad, an empty OrderedDict. Opcodes are prefix codes, so
#: bytes that match can be read in no other way.
_RECORD = re.compile(
    b"".join(
        (
            *(rb"\(", _GET, _GET, rb"X(.)\0\0\0([0-9]{1,20})", _PUT, _GET, b"(", _NUMBER, b")t", _PUT, b"Q"),
            *(b"(", _NUMBER, b")", b"(?:", _SHAPE, _PUT, _SHAPE, _PUT, rb"|\)\))", rb"([\x88\x89])"),
            *(_GET, rb"\)R", _PUT, b"t", _PUT, b"R", _PUT),
        )
    ),
    re.DOTALL,
).match
# Five or seven consecutive memo entries from n, written as one number of 32-bit digits, are n * ONES + STEPS.
_ONES_5, _STEPS_5 = (sum(digit << 32 * place for place, digit in enumerate(run)) for run in ([1] * 5, range(5)))
_ONES_7, _STEPS_7 = (sum(digit << 32 * place for place, digit in enumerate(run)) for run in ([1] * 7, range(7)))
_DECIMAL = re.compile(rb"[+-]?[0-9]+")
_OCTAL = re.compile(rb"\s*[+-]?0[0-7]+")
#: In whose place stands an integer of more than `MAX_INT_BYTES`.
_INT = Global("builtins", "int", 0)
_U32 = struct.Struct("<I").unpack_from
_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from
_STRINGS = frozenset([str])
_CONTAINERS = frozenset([list, tuple, dict])
_GROWING = frozenset([list, dict, Obj])
#: A call can return something to call, as functools.partial does.
_CALLABLE = frozenset([Global, Obj])

_NOUNS: dict[type, str] = {
    type(None): "None",
    bool: "a bool",
    int: "an int",
    float: "a float",
    str: "a string",
    bytes: "bytes",
    list: "a list",
    tuple: "a tuple",
    dict: "a dict",
    SetOf: "a set",
    Persistent: "a storage",
    Obj: "the result of a call",
}


def _a(value: Value) -> str:
    """What `value` is, in words; never its repr, which can be exponential."""
    if type(value) is Global:
        return f"the class {value.qualified[:200]!r}"
    return _NOUNS.get(type(value), "an unknown thing")


def _size(value: Value) -> int:
    """How many values a container has; one that a call fills from another has as many, however deep."""
    size = 0
    for _ in range(MAX_COPIES):
        if type(value) is not Obj:
            break
        size += len(value.items or ()) + len(value.elems or ())
        value = next(
            (one for one in value.args[:_COUNTED_ARGUMENTS] if type(one) in _CONTAINERS or type(one) is Obj), ()
        )
    return size + len(value) if type(value) in _CONTAINERS else size


# The opcodes. Each takes the byte after the opcode and returns the byte after its argument.

Handler: TypeAlias = Callable[[Machine, int], int]


def _unknown(m: Machine, pos: int) -> int:
    raise m.error(pos, f"unknown opcode 0x{m.data[pos - 1]:02x}")


def _stop(m: Machine, pos: int) -> int:
    m.root = m.stack.pop()
    m.end = pos
    m.recount_held(pos)
    if m.frame_end != NO_FRAME and pos != m.frame_end:
        raise m.misframed(pos, f"STOP comes before the end of its frame at byte {m.frame_end}")
    raise _Stopped


def _proto(m: Machine, pos: int) -> int:
    m.protocol = m.data[pos]
    if m.protocol > HIGHEST_PROTOCOL:
        raise m.error(pos, f"pickle protocol {m.protocol}, and the highest there is is {HIGHEST_PROTOCOL}")
    return pos + 1


def _frame(m: Machine, pos: int) -> int:
    length: int = _U64(m.data, pos)[0]
    m.framed = True
    start = pos + 8
    if m.frame_end != NO_FRAME:
        raise m.misframed(pos, f"a frame begins inside the frame that ends at byte {m.frame_end}")
    if length > len(m.data) - start:
        raise TruncatedFrame(str(m.truncated("a frame runs past the end of the pickle")))
    m.frame_end = start + length
    return start


def _mark(m: Machine, pos: int) -> int:
    m.metastack.append(m.stack)
    m.stack = []
    return pos


def _pop(m: Machine, pos: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()
    return pos


def _pop_mark(m: Machine, pos: int) -> int:
    m.pop_mark()
    return pos


def _dup(m: Machine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _constant(value: Value) -> Handler:
    def push(m: Machine, pos: int) -> int:
        m.stack.append(value)
        return pos

    return push


def _text_int(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    # Protocol 0 writes True and False as these.
    m.stack.append(line == b"01" if line in (b"00", b"01") else m.c_integer(line, pos))
    return end


def _text_long(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    m.stack.append(m.decimal(line.removesuffix(b"L"), pos))
    return end


def _text_float(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    m.stack.append(m.real(line, pos))
    return end


def _binint(m: Machine, pos: int) -> int:
    m.stack.append(_I32(m.data, pos)[0])
    return pos + 4


def _binint1(m: Machine, pos: int) -> int:
    m.stack.append(m.data[pos])
    return pos + 1


def _binint2(m: Machine, pos: int) -> int:
    m.stack.append(_U16(m.data, pos)[0])
    return pos + 2


def _long1(m: Machine, pos: int) -> int:
    length = m.data[pos]
    m.stack.append(m.integer(m.take(pos + 1, length)))
    return pos + 1 + length


def _long4(m: Machine, pos: int) -> int:
    length: int = _I32(m.data, pos)[0]
    if length < 0:
        raise m.error(pos, f"absurd integer of {length} bytes")
    m.stack.append(m.integer(m.take(pos + 4, length)))
    return pos + 4 + length


def _binfloat(m: Machine, pos: int) -> int:
    m.stack.append(_F64(m.data, pos)[0])
    return pos + 8


def native(data: bytes) -> str | bytes:
    """A Python 2 string: text where it is UTF-8, as torch decodes it, else the bytes."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _text_string(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    line = line.strip()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
        raise m.error(pos, "a string without its quotes")
    try:
        m.stack.append(native(escape_decode(line[1:-1])[0]))
    except ValueError as error:
        raise m.error(pos, "a string with a broken escape") from error
    return end


def _text_unicode(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    try:
        m.stack.append(str(line, "raw-unicode-escape"))
    except UnicodeDecodeError as error:
        raise m.error(pos, "a string with a broken escape") from error
    return end


def _binstring(m: Machine, pos: int) -> int:
    length: int = _I32(m.data, pos)[0]
    if length < 0:
        raise m.error(pos, f"a string of {length} bytes")
    m.stack.append(native(m.take(pos + 4, length)))
    return pos + 4 + length


def _short_binstring(m: Machine, pos: int) -> int:
    length = m.data[pos]
    m.stack.append(native(m.take(pos + 1, length)))
    return pos + 1 + length


def _binunicode(m: Machine, pos: int) -> int:
    length: int = _U32(m.data, pos)[0]
    m.stack.append(m.text(pos + 4, pos + 4 + length))
    return pos + 4 + length


def _short_binunicode(m: Machine, pos: int) -> int:
    length = m.data[pos]
    m.stack.append(m.text(pos + 1, pos + 1 + length))
    return pos + 1 + length


def _binunicode8(m: Machine, pos: int) -> int:
    length: int = _U64(m.data, pos)[0]
    m.stack.append(m.text(pos + 8, pos + 8 + length))
    return pos + 8 + length


def _binbytes(m: Machine, pos: int) -> int:
    length: int = _U32(m.data, pos)[0]
    m.stack.append(m.take(pos + 4, length))
    return pos + 4 + length


def _short_binbytes(m: Machine, pos: int) -> int:
    length = m.data[pos]
    m.stack.append(m.take(pos + 1, length))
    return pos + 1 + length


def _binbytes8(m: Machine, pos: int) -> int:
    length: int = _U64(m.data, pos)[0]
    m.stack.append(m.take(pos + 8, length))
    return pos + 8 + length


def _tuple(m: Machine, pos: int) -> int:
    items = tuple(m.pop_mark())
    m.stack.append(items)
    return pos


def _tuple1(m: Machine, pos: int) -> int:
    m.stack[-1] = (m.stack[-1],)
    return pos


def _tuple2(m: Machine, pos: int) -> int:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)
    return pos


def _tuple3(m: Machine, pos: int) -> int:
    last = m.stack.pop()
    middle = m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)
    return pos


def _empty_list(m: Machine, pos: int) -> int:
    m.objects += 1
    m.stack.append([])
    return pos


def _list(m: Machine, pos: int) -> int:
    m.objects += 1
    items = m.pop_mark()
    m.stack.append(items)
    return pos


def _append(m: Machine, pos: int) -> int:
    value = m.stack.pop()
    m.add_elements(m.stack[-1], [value], pos, "APPEND")
    return pos


def _appends(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    m.add_elements(m.stack[-1], items, pos, "APPEND")
    return pos


def _empty_dict(m: Machine, pos: int) -> int:
    m.objects += 1
    m.stack.append({})
    return pos


def _dict(m: Machine, pos: int) -> int:
    m.objects += 1
    flat = m.pop_mark()
    made: dict[Value, Value] = {}
    m.set_items(made, flat, pos)
    m.stack.append(made)
    return pos


def _setitem(m: Machine, pos: int) -> int:
    value = m.stack.pop()
    key = m.stack.pop()
    target = m.stack[-1]
    if type(target) is dict and type(key) in _STRINGS and key not in target:
        target[key] = value
    else:
        m.set_items(target, [key, value], pos)
    return pos


def _setitems(m: Machine, pos: int) -> int:
    flat = m.pop_mark()
    m.set_items(m.stack[-1], flat, pos)
    return pos


def _empty_set(m: Machine, pos: int) -> int:
    m.objects += 1
    m.stack.append(SetOf([]))
    return pos


def _frozenset(m: Machine, pos: int) -> int:
    m.objects += 1
    items = m.pop_mark()
    m.stack.append(SetOf(items))
    return pos


def _additems(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    m.add_elements(m.stack[-1], items, pos, "ADDITEMS")
    return pos


def _text_put(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    m.put(m.decimal(line, pos), m.stack[-1])
    return end


def _binput(m: Machine, pos: int) -> int:
    m.put(m.data[pos], m.stack[-1])
    return pos + 1


def _long_binput(m: Machine, pos: int) -> int:
    m.put(_U32(m.data, pos)[0], m.stack[-1])
    return pos + 4


def _memoize(m: Machine, pos: int) -> int:
    # `far` and `memo` never share an index while `far` holds any.
    m.put(len(m.memo) + len(m.far), m.stack[-1])
    return pos


def _text_get(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    m.stack.append(m.get(m.decimal(line, pos), pos))
    return end


def _binget(m: Machine, pos: int) -> int:
    m.stack.append(m.get(m.data[pos], pos))
    return pos + 1


def _long_binget(m: Machine, pos: int) -> int:
    m.stack.append(m.get(_U32(m.data, pos)[0], pos))
    return pos + 4


def _global(m: Machine, pos: int) -> int:
    module, end = m.line(pos)
    name, end = m.line(end)
    m.stack.append(m.name(native(module), native(name), pos))
    return end


def _stack_global(m: Machine, pos: int) -> int:
    name = m.stack.pop()
    m.stack[-1] = m.name(m.stack[-1], name, pos)
    return pos


def _extension(m: Machine, pos: int) -> int:
    raise m.error(pos, "the pickle uses a copyreg extension code, whose meaning is not in the file")


def _buffer(m: Machine, pos: int) -> int:
    raise m.error(pos, "the pickle wants an out-of-band buffer, which no file has")


def _reduce(m: Machine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args, pos)
    return pos


def _newobj(m: Machine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args, pos, "newobj")
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs = m.stack.pop()
    args = m.stack.pop()
    if type(kwargs) is not dict:
        raise m.error(pos, f"a call with {_a(kwargs)} for its keyword arguments")
    made = m.call(m.stack[-1], args, pos, "newobj")
    m.count_held(kwargs, pos)
    made.kwargs = kwargs
    m.stack[-1] = made
    return pos


def _obj(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    m.stack.append(m.call(items[0], tuple(items[1:]), pos, "obj"))
    return pos


def _inst(m: Machine, pos: int) -> int:
    module, end = m.line(pos)
    name, end = m.line(end)
    args = tuple(m.pop_mark())
    m.stack.append(m.call(m.name(native(module), native(name), pos), args, pos, "inst"))
    return end


def _build(m: Machine, pos: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Obj:
        raise m.error(pos, f"BUILD on {_a(target)}")
    m.count_held(state, pos)
    m.set_state(target, state)
    return pos


def _persistent(m: Machine, pid: Value) -> Value:
    if m.module_ids and type(pid) is tuple and len(pid) in (3, 4):
        cls = pid[-3]
        if type(cls) is Global and (len(pid) == 3 or pid[0] == "module"):
            return cls
    m.objects += 1
    made = Persistent(pid)
    m.persistent.append(made)
    return made


def _text_persid(m: Machine, pos: int) -> int:
    line, end = m.line(pos)
    m.stack.append(_persistent(m, native(line)))
    return end


def _binpersid(m: Machine, pos: int) -> int:
    m.stack[-1] = _persistent(m, m.stack[-1])
    return pos


_OPCODES: dict[int, Handler] = {
    0x28: _mark,
    0x29: _constant(()),
    0x2E: _stop,
    0x30: _pop,
    0x31: _pop_mark,
    0x32: _dup,
    0x42: _binbytes,
    0x43: _short_binbytes,
    0x46: _text_float,
    0x47: _binfloat,
    0x49: _text_int,
    0x4A: _binint,
    0x4B: _binint1,
    0x4C: _text_long,
    0x4D: _binint2,
    0x4E: _constant(None),
    0x50: _text_persid,
    0x51: _binpersid,
    0x52: _reduce,
    0x53: _text_string,
    0x54: _binstring,
    0x55: _short_binstring,
    0x56: _text_unicode,
    0x58: _binunicode,
    0x5D: _empty_list,
    0x61: _append,
    0x62: _build,
    0x63: _global,
    0x64: _dict,
    0x65: _appends,
    0x67: _text_get,
    0x68: _binget,
    0x69: _inst,
    0x6A: _long_binget,
    0x6C: _list,
    0x6F: _obj,
    0x70: _text_put,
    0x71: _binput,
    0x72: _long_binput,
    0x73: _setitem,
    0x74: _tuple,
    0x75: _setitems,
    0x7D: _empty_dict,
    0x80: _proto,
    0x81: _newobj,
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    0x85: _tuple1,
    0x86: _tuple2,
    0x87: _tuple3,
    0x88: _constant(True),
    0x89: _constant(False),
    0x8A: _long1,
    0x8B: _long4,
    0x8C: _short_binunicode,
    0x8D: _binunicode8,
    0x8E: _binbytes8,
    0x8F: _empty_set,
    0x90: _additems,
    0x91: _frozenset,
    0x92: _newobj_ex,
    0x93: _stack_global,
    0x94: _memoize,
    0x95: _frame,
    0x96: _binbytes8,
    0x97: _buffer,
    0x98: _buffer,
}
Machine.handlers = tuple(_OPCODES.get(op, _unknown) for op in range(256))
