"""Read a pickle symbolically: a stack machine that builds a graph of the pickle and runs nothing.

Nothing is imported and nothing is called: a name stays a `Global`, a call stays an `Obj`. Neither
`pickle.Unpickler` with inert classes nor `torch.load(weights_only=True)` can be used, because both hash the dictionary
keys of a file and recurse over them. A few hundred bytes hang them for ever, and two megabytes overflow the C stack.

Opcodes, memo entries, containers, stack and nesting of marks each have a budget.

torch writes the same 28 opcodes for each tensor. If they match `_RECORD`, they are read in a single step, and
`_native.c`, if compiled, reads the entries that follow. `read_pickle(..., fast=False)` reads every opcode by itself and
is the reference for the tests.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from itertools import islice, repeat
from operator import length_hint

from statecli.core.garbage_collector import pause_gc
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickles.compiled_records import native
from statecli.pickles.machine_state import BURST_OPCODES, CALLABLE_TYPES, MachineState
from statecli.pickles.nodes import Obj, Persistent, Pickle, Value
from statecli.pickles.opcodes import HANDLERS, Handler, Stopped

#: Budget of opcodes: a tensor of a state_dict takes 32, so 300,000 tensors are read, in a few seconds at most.
MAX_OPCODES = 10_000_000
#: Factor on the budgets for the metadata of torch.distributed.checkpoint, which allows 600,000 chunks: a large model
#: and its optimizer on hundreds of ranks.
METADATA_BUDGET_FACTOR = 4
MAX_MEMO_ENTRIES = 3_000_000
#: Budget of lists, dicts, sets and calls; the budget of opcodes also limits the tuples.
MAX_OBJECTS = 3_000_000
MAX_STACK_VALUES = 1_000_000
MAX_OPEN_MARKS = 10_000
MAX_GLOBALS = 100_000
STOP = b"."
_STOP = STOP[0]
_U32 = struct.Struct("<I").unpack_from
#: Opcodes counted for an entry of a state_dict (BINUNICODE, LONG_BINPUT, a GET, the tensor's record), and objects
#: counted for a record.
_OPCODES_OF_ENTRY, _OBJECTS_OF_RECORD = 4, 3


def read_pickle(
    data: bytes | memoryview,
    label: str = "data.pkl",
    start: int = 0,
    *,
    fast: bool = True,
    module_ids: bool = False,
    budget: int = 1,
    machine_class: type[Machine] | None = None,
) -> Pickle:
    """Return the graph of the pickle at byte `start` of `data`.

    With `module_ids`, the persistent ids ("module", class, file, source) of old whole modules and (class, file, source)
    of tar archives are read as the class. `budget` multiplies the limits on opcodes, memo entries and objects.
    `machine_class` replaces `Machine`.

    Raises MalformedError with `label` and the byte of the error, TruncatedPickle if the bytes end too soon.
    """
    machine = (machine_class or Machine)(bytes(data), label, fast=fast, module_ids=module_ids)
    machine.budget = budget
    with pause_gc():
        machine.run(start)
    return Pickle(
        machine.root,
        list(machine.globals.values()),
        machine.end,
        machine.persistent,
        machine.duplicate_keys,
    )


class Machine(MachineState):
    """Pickle reader that reads opcodes in bursts, and checks its budgets after each burst."""

    #: Handler of each of the 256 opcodes. A subclass that continues after an error replaces some handlers.
    handlers: tuple[Handler, ...] = HANDLERS

    def __init__(self, data: bytes, label: str, *, fast: bool, module_ids: bool) -> None:
        super().__init__(data, label, fast=fast, module_ids=module_ids)
        self.numbers = _Numbers()
        self.shapes = _Shapes(self.numbers)

    def run(self, start: int) -> None:
        """Read the pickle from byte `start` to its STOP opcode; set `root` and `end`."""
        pos = start
        try:
            for _ in repeat(None, MAX_OPCODES * self.budget // BURST_OPCODES):
                pos = self._run_burst(pos)
                self._bursts += 1
                self._check_budgets(pos)
        except Stopped:
            return
        raise self.build_budget_error(
            pos, f"the pickle has more than {MAX_OPCODES * self.budget} instructions, the limit of statecli"
        )

    def _check_budgets(self, pos: int) -> None:
        if len(self.memo) + len(self.sparse_memo) > MAX_MEMO_ENTRIES * self.budget:
            raise self.build_budget_error(
                pos,
                f"the pickle memo has more than {MAX_MEMO_ENTRIES * self.budget} objects, the limit of statecli",
            )
        if self.object_count > MAX_OBJECTS * self.budget:
            raise self.build_budget_error(
                pos, f"the pickle has more than {MAX_OBJECTS * self.budget} objects, the limit of statecli"
            )
        if len(self.stack) > MAX_STACK_VALUES:
            raise self.build_budget_error(
                pos, f"the pickle has more than {MAX_STACK_VALUES} values on its stack, the limit of statecli"
            )
        if len(self.metastack) > MAX_OPEN_MARKS:
            raise self.build_budget_error(
                pos, f"the pickle nests lists and calls more than {MAX_OPEN_MARKS} levels deep, the limit of statecli"
            )
        if len(self.globals) > MAX_GLOBALS:
            raise self.build_budget_error(
                pos, f"the pickle imports more than {MAX_GLOBALS} functions and classes, the limit of statecli"
            )

    def _run_burst(self, pos: int) -> int:
        """Read up to `BURST_OPCODES` opcodes from byte `pos`, and return the position after them."""
        data, stack, memo, sparse_memo, handlers = self.data, self.stack, self.memo, self.sparse_memo, self.handlers
        u32, size, fast, record, frame_end, op = _U32, len(data), self.fast, _RECORD.match, self.frame_end, 0
        try:
            self._remaining = repeat(None, BURST_OPCODES)
            for _ in self._remaining:
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
                    if index == len(memo) and not sparse_memo:
                        memo.append(stack[-1])
                    else:
                        self.put_memo(index, stack[-1])
                elif op == 0x94 and not sparse_memo:  # MEMOIZE
                    memo.append(stack[-1])
                    self.has_memoize = True
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                    index, pos = (data[pos], pos + 1) if op == 0x68 else (u32(data, pos)[0], pos + 4)
                    stack.append(memo[index] if index < len(memo) else self.get_memo(index, pos))
                elif op == 0x58:  # BINUNICODE
                    (length,) = u32(data, pos)
                    pos += 4 + length
                    stack.append(self.read_text(pos - length, pos))
                elif op == 0x28:  # MARK
                    if fast and (m := record(data, pos)) and m.end() <= frame_end and self.take_record(m):
                        pos = m.end() if native is None else self.take_similar_records(m.end())
                    else:
                        self.metastack.append(stack)
                        self.stack = stack = []
                elif op == 0x74:  # TUPLE
                    items = tuple(stack)
                    self.stack = stack = self.metastack.pop()
                    stack.append(items)
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = self.build_call(stack[-1], args, pos)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                else:
                    pos = handlers[op](self, pos)
                    stack, frame_end = self.stack, self.frame_end
        except IndexError as error:
            if pos >= size and op != _STOP:  # compares the opcode, because a last byte `.` may be an argument
                raise self.build_truncated_error() from error
            raise self.build_error(pos, "an instruction needs more values than the stack has") from error
        except struct.error as error:
            raise self.build_truncated_error() from error
        return pos

    def take_record(self, match: re.Match[bytes]) -> bool:
        """Read a tensor record that matches `_RECORD`. Return False for a record that must be read opcode by opcode.

        This is so if a memo entry is out of order, or if the record reads a memo entry that it writes itself.
        """
        tag, kind, n, key, p0, location, numel, p1, offset, size, p2, stride, p3, grad, hooks, p4, p5, p6 = (
            match.groups()
        )
        numbers, memo, stack = self.numbers, self.memo, self.stack
        next_ = len(memo)
        puts = p0 + p1 + p2 + p3 + p4 + p5 + p6 if size else p0 + p1 + p4 + p5 + p6
        expected_puts = next_ * _ONES_7 + _STEPS_7 if size else next_ * _ONES_5 + _STEPS_5
        if self.sparse_memo or int.from_bytes(puts, "little") != expected_puts or n[0] != len(key) or not stack:
            return False
        tag, kind, location, hooks = numbers[tag], numbers[kind], numbers[location], numbers[hooks]
        if tag >= next_ or kind >= next_ or location >= next_ or hooks >= next_:
            return False
        function = stack[-1]
        if type(function) not in CALLABLE_TYPES or type(memo[hooks]) not in CALLABLE_TYPES:
            return False
        name = str(key, "ascii")
        pid = (memo[tag], memo[kind], name, memo[location], numbers[numel])
        storage = Persistent(pid)
        self.persistent.append(storage)
        hooks_call = Obj(memo[hooks], ())
        shape, strides = (self.shapes[size], self.shapes[stride]) if size else ((), ())
        args = (storage, numbers[offset], shape, strides, grad == b"\x88", hooks_call)
        tensor = stack[-1] = Obj(function, args)
        memo.extend(
            (name, pid, shape, strides, hooks_call, args, tensor) if size else (name, pid, hooks_call, args, tensor)
        )
        self.object_count += _OBJECTS_OF_RECORD
        return True

    def take_similar_records(self, pos: int) -> int:
        """Read further tensor records that make the same calls as the last record; return the position after them.

        Each entry counts as many opcodes as without this method.
        """
        tensor = self.stack[-1]
        hooks = tensor.args[-1].cls
        limit = length_hint(self._remaining) // _OPCODES_OF_ENTRY if self.may_repeat(tensor.cls, hooks) else 0
        pos, count = native.take_records(
            *(self.data, pos, self.frame_end, limit, self.stack, self.memo, self.persistent, self.shapes),
            *(Obj, Persistent, tensor.cls, hooks),
        )
        self.object_count += _OBJECTS_OF_RECORD * count
        deque(islice(self._remaining, _OPCODES_OF_ENTRY * count), maxlen=0)
        return pos

    def may_repeat(self, function: Value, hooks: Value) -> bool:  # noqa: ARG002  # for machines that note calls
        """Return True if further tensor records with these calls need no call of `take_record`."""
        return True


class _Numbers(dict[bytes, int]):
    """Cache of the numbers in integer opcodes (BININT1, BININT2, BININT) and memo opcodes (BINGET, LONG_BINGET)."""

    def __missing__(self, raw: bytes) -> int:
        if len(self) >= _MAX_CACHE:
            self.clear()
        number = self[raw] = int.from_bytes(raw[1:], "little", signed=raw[0] == 0x4A)
        return number


class _Shapes(dict[bytes, tuple[int, ...]]):
    """Cache of shapes and strides by their opcodes, because few models have more than dozens of shapes."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __missing__(self, raw: bytes) -> tuple[int, ...]:
        if len(self) >= _MAX_CACHE:
            self.clear()
        shape = self[raw] = tuple(self._numbers[number] for number in _NUMBERS.findall(raw))
        return shape


_MAX_CACHE = 65_536
_NUMBER = rb"(?:K.|M..|J....)"
_NUMBERS = compile_on_use(_NUMBER, re.DOTALL)
_GET = rb"(h.|j....)"
_PUT = rb"r(....)"
#: One to three numbers and TUPLE1 to TUPLE3, or a MARK, more numbers and TUPLE.
_SHAPE = rb"(N\x85|NN\x86|NNN\x87|\(N{4,16}t)".replace(b"N", _NUMBER)
#: Opcodes that torch writes after the function `_rebuild_tensor_v2`, from its MARK to the memo entry of the tensor.
#: They contain the storage's persistent id, offset, size, stride, requires_grad, an empty OrderedDict. Opcodes are
#: prefix codes, so bytes that match can be read in no other way.
_RECORD = compile_on_use(
    b"".join(
        (
            *(rb"\(", _GET, _GET, rb"X(.)\0\0\0([0-9]{1,20})", _PUT, _GET, b"(", _NUMBER, b")t", _PUT, b"Q"),
            *(b"(", _NUMBER, b")", b"(?:", _SHAPE, _PUT, _SHAPE, _PUT, rb"|\)\))", rb"([\x88\x89])"),
            *(_GET, rb"\)R", _PUT, b"t", _PUT, b"R", _PUT),
        )
    ),
    re.DOTALL,
)
# Five or seven consecutive memo entries from n, written as one number of 32-bit digits, are n * ONES + STEPS.
_ONES_5, _STEPS_5 = (sum(digit << 32 * place for place, digit in enumerate(run)) for run in ([1] * 5, range(5)))
_ONES_7, _STEPS_7 = (sum(digit << 32 * place for place, digit in enumerate(run)) for run in ([1] * 7, range(7)))
