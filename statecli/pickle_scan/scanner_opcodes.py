"""Opcodes that the scanner of pickles handles in its own way, and the opcodes that torch.load refuses."""

from __future__ import annotations

from typing import Any

from statecli.pickle_scan.expected_calls import get_keyword_arguments
from statecli.pickles.graph import is_module
from statecli.pickles.machine import Machine
from statecli.pickles.machine_state import NO_FRAME, MachineState
from statecli.pickles.nodes import Global, Obj, Persistent, Value
from statecli.pickles.opcodes import Handler

#: Dict of copyreg in which an unpickler looks up the name of an extension code.
EXTENSION_REGISTRY = "_inverted_registry"
#: Number of parts in the persistent id of a storage (a zip archive lacks the last part), of a view, and of a class.
_PARTS_WITH_VIEW, _PARTS_OF_VIEW, _PARTS_OF_CLASS = 6, 3, 3
_PLAIN_TYPES = frozenset([str, bytes, int, type(None)])


def _do_build(m: Any, pos: int) -> int:
    state, target = m.stack.pop(), m.stack[-1]
    m.add_build(target, state)
    if type(target) is Obj:
        target.state = state
        if is_module(target) and type(target.cls) is Global:
            m.module_classes.append(target.cls.qualified)
    return pos


def _do_extension(m: MachineState, pos: int) -> int:
    """Push a placeholder name for an extension code, because only the loading program knows the registered name."""
    width = 1 << (m.data[pos - 1] - 0x82)
    code = int.from_bytes(m.data[pos : pos + width], "little")
    m.stack.append(m.intern_name("copyreg", f"{EXTENSION_REGISTRY}[{code}]", pos))
    return pos + width


def _do_frame(m: Any, pos: int) -> int:
    """Handle FRAME. Accept a frame longer than the rest of the file, as Python's `pickle._Unpickler` does."""
    start = pos + 8
    end = start + int.from_bytes(m.data[pos:start], "little")
    if m.frame_end != NO_FRAME or len(m.data) < start or end <= m.size:
        return Machine.handlers[0x95](m, pos)
    m.frame_end = min(end, NO_FRAME - 1)
    return start


def _do_frozenset(m: Any, pos: int) -> int:
    end = Machine.handlers[0x91](m, pos)
    m.allocations.add_keys(m.stack[-1], m.stack[-1].elems)
    m.flow.add_keys(m.stack[-1].elems)
    return end


def _do_next_buffer(m: MachineState, pos: int) -> int:
    m.stack.append(Persistent(None))
    return pos


def _do_nothing(m: MachineState, pos: int) -> int:  # noqa: ARG001
    return pos


def _do_newobj_ex(m: MachineState, pos: int) -> int:
    kwargs, args = m.stack.pop(), m.stack.pop()
    call = m.build_call(m.stack[-1], args, pos, "newobj")
    if type(call) is Obj:
        call.kwargs = get_keyword_arguments(kwargs)
    m.stack[-1] = call
    return pos


def _do_persistent(m: Any, pos: int) -> int:
    pid = m.stack[-1]
    end = Machine.handlers[0x51](m, pos)
    if not _is_written_by_torch(pid):
        m.note_unusual_opcode("Unpickler.persistent_load", pos)
    return end


def _is_written_by_torch(pid: Value) -> bool:
    """Return True for a persistent id of a tensor, a storage or a class with its source, as torch writes such ids."""
    if type(pid) is not tuple:
        return type(pid) in (str, bytes, int)
    if pid[:1] == ("storage",):
        *parts, view = pid if len(pid) == _PARTS_WITH_VIEW else (*pid, None)
        views = view if type(view) is tuple else (view,)
        of_type = len(parts) == _PARTS_WITH_VIEW - 1 and type(parts[1]) is Global and len(views) <= _PARTS_OF_VIEW
        return of_type and all(type(part) in _PLAIN_TYPES for part in (parts[0], *parts[2:], *views))
    source = pid[1:] if pid[:1] == ("module",) else pid
    is_class = len(source) == _PARTS_OF_CLASS and type(source[0]) is Global
    return is_class and all(type(part) in _PLAIN_TYPES for part in source[1:])


def _keep_string(op: int) -> Handler:
    """Return a handler like the base class's, which also keeps the pushed string as possible nested data."""
    handler = Machine.handlers[op]

    def push(m: Any, pos: int) -> int:
        end = handler(m, pos)
        m.keep_nested_data(pos, m.stack[-1])
        return end

    return push


_SCANNER_OPCODES: dict[int, Handler] = {
    0x53: _keep_string(0x53),
    0x56: _keep_string(0x56),
    0x51: _do_persistent,
    0x62: _do_build,
    0x82: _do_extension,
    0x83: _do_extension,
    0x84: _do_extension,
    0x91: _do_frozenset,
    0x92: _do_newobj_ex,
    0x95: _do_frame,
    0x97: _do_next_buffer,
    0x98: _do_nothing,
}
SCANNER_HANDLERS = tuple(_SCANNER_OPCODES.get(op, handler) for op, handler in enumerate(Machine.handlers))
MEMOIZE = 0x94
#: The opcodes that torch/_weights_only_unpickler.py of torch 2.13 knows.
TORCH_OPCODES = frozenset(b"\x80c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a.")


def _watch_opcode(op: int, handler: Handler) -> Handler:
    """Return a handler like `handler` that also records the first opcode unknown to torch."""

    def note(m: Any, pos: int) -> int:
        if m.first_unknown_opcode is None:
            m.first_unknown_opcode = op
        m.handlers = SCANNER_HANDLERS
        return handler(m, pos)

    return handler if op in TORCH_OPCODES else note


#: Handlers that search for the first opcode unknown to torch, and then give way to `SCANNER_HANDLERS`.
WATCHING_HANDLERS = tuple(_watch_opcode(op, handler) for op, handler in enumerate(SCANNER_HANDLERS))
