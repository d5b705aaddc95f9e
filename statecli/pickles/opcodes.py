"""Handlers of the pickle opcodes of protocols 0 to 5 (see the standard module `pickletools`).

Each handler takes the byte after the opcode and returns the byte after its argument. `Machine._run_burst` does the most
frequent opcodes itself, so they have no handler here.
"""

from __future__ import annotations

import struct
from codecs import escape_decode
from collections.abc import Callable
from typing import TypeAlias

from statecli.pickles.machine_state import NO_FRAME, NO_LINE_BREAK, STRING_TYPES, MachineState
from statecli.pickles.nodes import Global, Obj, Persistent, SetOf, Value, describe

#: Highest pickle protocol (since Python 3.8).
HIGHEST_PROTOCOL = 5
_U8 = struct.Struct("<B")
_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d").unpack_from

Handler: TypeAlias = Callable[[MachineState, int], int]


class Stopped(Exception):
    """Signal of the STOP opcode, which ends the reading of a pickle."""


def do_unknown(m: MachineState, pos: int) -> int:
    """Raise MalformedError for a byte that is not an opcode of any protocol."""
    raise m.build_error(pos, f"unknown opcode 0x{m.data[pos - 1]:02x}")


def do_stop(m: MachineState, pos: int) -> int:
    m.root = m.stack.pop()
    m.end = pos
    m.recount_held_values(pos)
    if m.frame_end != NO_FRAME and pos != m.frame_end:
        raise m.build_misframed_error(pos, f"the pickle ends before the end of its block (frame) at byte {m.frame_end}")
    raise Stopped


def do_proto(m: MachineState, pos: int) -> int:
    m.protocol = m.data[pos]
    if m.protocol > HIGHEST_PROTOCOL:
        raise m.build_unsupported_error(
            pos, f"pickle protocol {m.protocol} is unknown; statecli knows protocols up to {HIGHEST_PROTOCOL}"
        )
    return pos + 1


def do_frame(m: MachineState, pos: int) -> int:
    length: int = _U64.unpack_from(m.data, pos)[0]
    start = pos + 8
    if m.frame_end != NO_FRAME:
        raise m.build_misframed_error(pos, f"a block (frame) begins inside the block that ends at byte {m.frame_end}")
    if length > len(m.data) - start:
        raise m.build_truncated_error("a block (frame) runs past the end of the pickle", start + length)
    m.frame_end, m.has_frames = start + length, True
    return start


def do_pop(m: MachineState, pos: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()
    return pos


def do_pop_mark(m: MachineState, pos: int) -> int:
    m.pop_mark()
    return pos


def do_dup(m: MachineState, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _push_constant(value: Value) -> Handler:
    def push(m: MachineState, pos: int) -> int:
        m.stack.append(value)
        return pos

    return push


def _push_line(parse: Callable[[MachineState, bytes, int], Value]) -> Handler:
    """Return the handler of an opcode whose argument is a line of text."""

    def push(m: MachineState, pos: int) -> int:
        line, end = m.read_line(pos)
        m.stack.append(parse(m, line, pos))
        return end

    return push


def parse_int(m: MachineState, line: bytes, pos: int) -> int:
    # Protocol 0 writes True as 01 and False as 00.
    return line == b"01" if line in (b"00", b"01") else m.parse_c_integer(line, pos)


def do_binint(m: MachineState, pos: int) -> int:
    m.stack.append(_I32(m.data, pos)[0])
    return pos + 4


def do_binint2(m: MachineState, pos: int) -> int:
    m.stack.append(_U16(m.data, pos)[0])
    return pos + 2


def do_long1(m: MachineState, pos: int) -> int:
    length = m.data[pos]
    m.stack.append(m.read_integer(pos + 1, length))
    return pos + 1 + length


def do_long4(m: MachineState, pos: int) -> int:
    length: int = _I32(m.data, pos)[0]
    if length < 0:
        raise m.build_error(pos, f"an integer has a negative length ({length} bytes)")
    m.stack.append(m.read_integer(pos + 4, length))
    return pos + 4 + length


def do_binfloat(m: MachineState, pos: int) -> int:
    m.stack.append(_F64(m.data, pos)[0])
    return pos + 8


def decode_python2_string(data: bytes) -> str | bytes:
    """Return a Python 2 string as text if the bytes are UTF-8, as torch decodes them, else as bytes."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def parse_string(m: MachineState, line: bytes, pos: int) -> str | bytes:
    line = line.strip()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
        raise m.build_error(pos, "a string has no quotes around it")
    try:
        return decode_python2_string(escape_decode(line[1:-1])[0])
    except ValueError as error:
        raise m.build_error(pos, "a string has an invalid escape sequence") from error


def parse_unicode(m: MachineState, line: bytes, pos: int) -> str:
    try:
        return str(line, "raw-unicode-escape")
    except UnicodeDecodeError as error:
        raise m.build_error(pos, "a string has an invalid escape sequence") from error


def do_binstring(m: MachineState, pos: int) -> int:
    length: int = _I32(m.data, pos)[0]
    if length < 0:
        raise m.build_error(pos, f"a string has a negative length ({length} bytes)")
    m.stack.append(decode_python2_string(m.read_bytes(pos + 4, length)))
    return pos + 4 + length


def do_short_binstring(m: MachineState, pos: int) -> int:
    length = m.data[pos]
    m.stack.append(decode_python2_string(m.read_bytes(pos + 1, length)))
    return pos + 1 + length


def _push_sized(length: struct.Struct, *, is_text: bool) -> Handler:
    """Return the handler of an opcode whose argument is text or bytes after their length."""
    unpack, width = length.unpack_from, length.size

    def push(m: MachineState, pos: int) -> int:
        start = pos + width
        size: int = unpack(m.data, pos)[0]
        m.stack.append(m.read_text(start, start + size) if is_text else m.read_bytes(start, size))
        return start + size

    return push


def do_tuple2(m: MachineState, pos: int) -> int:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)
    return pos


def do_tuple3(m: MachineState, pos: int) -> int:
    last = m.stack.pop()
    middle = m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)
    return pos


def do_empty_list(m: MachineState, pos: int) -> int:
    m.object_count += 1
    m.stack.append([])
    return pos


def do_list(m: MachineState, pos: int) -> int:
    m.object_count += 1
    items = m.pop_mark()
    m.stack.append(items)
    return pos


def do_append(m: MachineState, pos: int) -> int:
    value = m.stack.pop()
    m.add_elements(m.stack[-1], [value], pos, "APPEND")
    return pos


def do_appends(m: MachineState, pos: int) -> int:
    items = m.pop_mark()
    m.add_elements(m.stack[-1], items, pos, "APPEND")
    return pos


def do_empty_dict(m: MachineState, pos: int) -> int:
    m.object_count += 1
    m.stack.append({})
    return pos


def do_dict(m: MachineState, pos: int) -> int:
    m.object_count += 1
    flat = m.pop_mark()
    items: dict[Value, Value] = {}
    m.set_items(items, flat, pos)
    m.stack.append(items)
    return pos


def do_setitem(m: MachineState, pos: int) -> int:
    value = m.stack.pop()
    key = m.stack.pop()
    target = m.stack[-1]
    if type(target) is dict and type(key) in STRING_TYPES and key not in target:
        target[key] = value
    else:
        m.set_items(target, [key, value], pos)
    return pos


def do_setitems(m: MachineState, pos: int) -> int:
    flat = m.pop_mark()
    m.set_items(m.stack[-1], flat, pos)
    return pos


def do_empty_set(m: MachineState, pos: int) -> int:
    m.object_count += 1
    m.stack.append(SetOf([]))
    return pos


def do_frozenset(m: MachineState, pos: int) -> int:
    m.object_count += 1
    items = m.pop_mark()
    m.stack.append(SetOf(items))
    return pos


def do_additems(m: MachineState, pos: int) -> int:
    items = m.pop_mark()
    m.add_elements(m.stack[-1], items, pos, "ADDITEMS")
    return pos


def do_text_put(m: MachineState, pos: int) -> int:
    line, end = m.read_line(pos)
    m.put_memo(m.parse_decimal(line, pos), m.stack[-1])
    return end


def do_memoize(m: MachineState, pos: int) -> int:
    # `sparse_memo` and `memo` never share an index while `sparse_memo` has entries.
    m.put_memo(len(m.memo) + len(m.sparse_memo), m.stack[-1])
    return pos


def do_global(m: MachineState, pos: int) -> int:
    function, end = _read_name_lines(m, pos, "utf-8")
    m.stack.append(function)
    return _require_line_end(m, end)


def _read_name_lines(m: MachineState, pos: int, encoding: str) -> tuple[Global, int]:
    """Return the name in the next two lines, and the position after them (0 if the second line has no end).

    Python's `pickle._Unpickler` imports an unfinished name without its last character. No unpickler imports a name in
    another encoding.
    """
    module, start = m.read_line(pos)
    end = m.data.find(b"\n", start)
    try:
        return m.intern_name(str(module, encoding), str(m.data[start:end], encoding), pos), end + 1
    except UnicodeDecodeError as error:
        if end < 0:  # the bytes may end inside of a character
            raise m.build_truncated_error(NO_LINE_BREAK) from error
        raise m.build_error(pos, f"the name of an imported function or class is not {encoding} text") from error


def _require_line_end(m: MachineState, end: int) -> int:
    if not end:
        raise m.build_truncated_error(NO_LINE_BREAK)
    return end


def do_stack_global(m: MachineState, pos: int) -> int:
    name = m.stack.pop()
    m.stack[-1] = m.intern_name(m.stack[-1], name, pos)
    return pos


def do_extension(m: MachineState, pos: int) -> int:
    raise m.build_unsupported_error(
        pos,
        "the pickle refers to a class only by a number (copyreg extension code), so the loading program decides "
        "which class this is",
    )


def do_buffer(m: MachineState, pos: int) -> int:
    raise m.build_unsupported_error(
        pos,
        "the pickle needs data that is not in the file (an out-of-band buffer of pickle protocol 5), so the file "
        "cannot be loaded alone",
    )


def do_newobj(m: MachineState, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = m.build_call(m.stack[-1], args, pos, "newobj")
    return pos


def do_newobj_ex(m: MachineState, pos: int) -> int:
    kwargs = m.stack.pop()
    args = m.stack.pop()
    if type(kwargs) is not dict:
        raise m.build_error(pos, f"the keyword arguments of a call are {describe(kwargs)}, not a dict")
    call = m.build_call(m.stack[-1], args, pos, "newobj")
    m.count_held_values(kwargs, pos)
    call.kwargs = kwargs
    m.stack[-1] = call
    return pos


def do_obj(m: MachineState, pos: int) -> int:
    items = m.pop_mark()
    m.stack.append(m.build_call(items[0], tuple(items[1:]), pos, "obj"))
    return pos


def do_inst(m: MachineState, pos: int) -> int:
    """Handle INST. The name is imported before the arguments are popped, as in Python."""
    function, end = _read_name_lines(m, pos, "ascii")
    args = tuple(m.pop_mark())
    m.stack.append(m.build_call(function, args, pos, "inst"))
    return _require_line_end(m, end)


def do_build(m: MachineState, pos: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Obj:
        raise m.build_error(
            pos,
            f"the pickle sets the state of {describe(target)}, but Python's pickle sets the state only of an object "
            "that a call created",
        )
    m.count_held_values(state, pos)
    m.set_state(target, state)
    return pos


def _build_persistent(m: MachineState, pid: Value) -> Value:
    if m.module_ids and type(pid) is tuple and len(pid) in (3, 4):
        cls = pid[-3]
        if type(cls) is Global and (len(pid) == 3 or pid[0] == "module"):
            return cls
    m.object_count += 1
    storage = Persistent(pid)
    m.persistent.append(storage)
    return storage


def do_binpersid(m: MachineState, pos: int) -> int:
    m.stack[-1] = _build_persistent(m, m.stack[-1])
    return pos


_OPCODES: dict[int, Handler] = {
    0x29: _push_constant(()),
    0x2E: do_stop,
    0x30: do_pop,
    0x31: do_pop_mark,
    0x32: do_dup,
    0x42: _push_sized(_U32, is_text=False),
    0x43: _push_sized(_U8, is_text=False),
    0x46: _push_line(lambda m, line, pos: m.parse_float(line, pos)),
    0x47: do_binfloat,
    0x49: _push_line(parse_int),
    0x4A: do_binint,
    0x4C: _push_line(lambda m, line, pos: m.parse_decimal(line.removesuffix(b"L"), pos)),
    0x4D: do_binint2,
    0x4E: _push_constant(None),
    0x50: _push_line(lambda m, line, _: _build_persistent(m, decode_python2_string(line))),
    0x51: do_binpersid,
    0x53: _push_line(parse_string),
    0x54: do_binstring,
    0x55: do_short_binstring,
    0x56: _push_line(parse_unicode),
    0x5D: do_empty_list,
    0x61: do_append,
    0x62: do_build,
    0x63: do_global,
    0x64: do_dict,
    0x65: do_appends,
    0x67: _push_line(lambda m, line, pos: m.get_memo(m.parse_decimal(line, pos), pos)),
    0x69: do_inst,
    0x6C: do_list,
    0x6F: do_obj,
    0x70: do_text_put,
    0x73: do_setitem,
    0x75: do_setitems,
    0x7D: do_empty_dict,
    0x80: do_proto,
    0x81: do_newobj,
    0x82: do_extension,
    0x83: do_extension,
    0x84: do_extension,
    0x86: do_tuple2,
    0x87: do_tuple3,
    0x88: _push_constant(True),
    0x89: _push_constant(False),
    0x8A: do_long1,
    0x8B: do_long4,
    0x8C: _push_sized(_U8, is_text=True),
    0x8D: _push_sized(_U64, is_text=True),
    0x8E: _push_sized(_U64, is_text=False),
    0x8F: do_empty_set,
    0x90: do_additems,
    0x91: do_frozenset,
    0x92: do_newobj_ex,
    0x93: do_stack_global,
    0x94: do_memoize,
    0x95: do_frame,
    0x96: _push_sized(_U64, is_text=False),
    0x97: do_buffer,
    0x98: do_buffer,
}
HANDLERS: tuple[Handler, ...] = tuple(_OPCODES.get(op, do_unknown) for op in range(256))
