"""Find strings in a pickle that may themselves be a pickle, an archive or an array."""

from __future__ import annotations

import re

from statecli.core.lazy_pattern import compile_on_use

#: Strings that may hold a pickle, an archive or an array: bytes by their beginning, text as UTF-8 if it is Latin-1.
_NESTED_BYTES = compile_on_use(rb"\x80[\x00-\x05]|PK\x03\x04|\x93NUMPY")
_NESTED_TEXT = compile_on_use(rb"\xc2\x80[\x00-\x05]|PK\x03\x04|\xc2\x93NUMPY")
#: Signs of an import in an older pickle, which may begin with any opcode: STACK_GLOBAL, or two lines, of which the
#: first holds an opcode and a module and the second is the name. A match begins only at the start of a word, because
#: otherwise a long word would be read again from each of its letters.
_STACK_GLOBAL = b"\x93"
_TWO_WORDS = compile_on_use(rb"(?<![\w.])([\w.]+)\r?\n(?=[A-Za-z_][\w.]*\r?\n)", re.ASCII)
_MODULE = compile_on_use(rb"[ci][A-Za-z_]")
#: Length of the shortest pickle that calls anything.
_MIN_PICKLE_BYTES = 6
#: Opcodes that can begin a pickle: all except those that need values on the stack or end the pickle.
_FIRST_OPCODES = frozenset(b"()]}NIFLSVXUTBCGJKMPcdl\x80\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x82\x83\x84\x95\x96\x97i")


def may_be_nested_data(data: bytes) -> bool:
    """Return True if a string may hold a pickle, an archive or an array."""
    if len(data) < _MIN_PICKLE_BYTES:
        return False
    return _NESTED_BYTES.match(data) is not None or (data[0] in _FIRST_OPCODES and _mentions_name(data))


def _mentions_name(data: bytes) -> bool:
    """Return True if the bytes may have an opcode that imports a name. The check takes linear time."""
    return _STACK_GLOBAL in data or any(_MODULE.search(words[1]) for words in _TWO_WORDS.finditer(data))


def may_be_nested_text(data: bytes, start: int, end: int) -> bool:
    """Return True if this text may hold a pickle, an archive or an array: a fast check with false positives."""
    if end - start < _MIN_PICKLE_BYTES:
        return False
    is_begun = _NESTED_TEXT.match(data, start, end) is not None
    return is_begun or data.find(b"\n", start, end) >= 0 or data.find(b"\xc2\x93", start, end) >= 0
