"""Find bytes that a pickle computes from numbers or texts, because the scan reads only bytes that stand in the pickle.

Some loaders unpickle or evaluate bytes of the data that they got: `bytes([128, 4, …])` and `torch.ByteTensor([128, …])`
hide such bytes. No pickler and no version of `torch.save` writes such calls. They write bytes as literal bytes, and in
protocols 0 to 2 as a text with the codec latin-1 (`_codecs.encode`, `bytearray(text, "latin-1")`).
"""

from __future__ import annotations

import re

from statecli.pickles.graph import get_name, read_raw_bytes
from statecli.pickles.nodes import Global, Obj, Persistent, Value

_BYTES = frozenset(["builtins.bytes", "builtins.bytearray"])
_ENCODE = "_codecs.encode"
_ARRAY = "array.array"
_CODECS = frozenset(["latin1", "latin-1", "iso-8859-1", "ascii", "us-ascii"])
#: Classes that make a tensor or a storage from a sequence of numbers.
_TENSORS = re.compile(r"torch(?:\.cuda|\.sparse|\.cuda\.sparse)?\.\w*(?:Tensor|Storage)|torch\.storage\.\w*Storage")

WHY = "computes bytes from numbers or texts, which torch.save never writes; a loader may unpickle these bytes"


def computes_bytes(name: str, call: Obj) -> bool:
    """Return True if the call makes bytes, a tensor or a storage of anything but literal bytes or a latin-1 text."""
    args: tuple[Value, ...] = call.args
    if name == _ENCODE:
        codec = args[1] if len(args) == 2 else None
        return bool(args or call.kwargs) and not (type(args[0]) is str and not call.kwargs and _is_plain_codec(codec))
    if name in _BYTES:
        if call.kwargs or len(args) > 2:
            return True
        if len(args) == 2:
            return not (type(args[0]) is str and _is_plain_codec(args[1]))
        return bool(args) and not _is_literal(args[0])
    if name == _ARRAY:
        return bool(args) and args[0] in ("b", "B") and len(args) > 1 and type(args[1]) is not bytes
    return _TENSORS.fullmatch(name) is not None and any(_holds_numbers(argument) for argument in args)


def _is_plain_codec(codec: Value) -> bool:
    return type(codec) is str and codec.lower().replace("_", "-") in _CODECS


def _is_literal(value: Value) -> bool:
    """Return True for bytes, for bytes as protocol 2 has them, and for the length of empty bytes."""
    return type(value) in (bytes, int) or (type(value) is Obj and read_raw_bytes(value) is not None)


def _holds_numbers(value: Value) -> bool:
    """Return True unless the value is a size, a dtype, a storage, or a tensor as torch.save writes it."""
    if type(value) is Obj:
        return not get_name(value.cls).rpartition(".")[2].startswith("_rebuild")
    return type(value) not in (int, bool, type(None), Global, Persistent)
