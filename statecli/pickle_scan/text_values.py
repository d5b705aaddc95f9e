"""Read the texts of a pickle, also from objects that Python uses like a text, such as a `numpy.str_`."""

from __future__ import annotations

from typing import Final

from statecli.pickle_scan import known_names, numpy_dtype_states
from statecli.pickles import numpy_types
from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.keys import wrap_key
from statecli.pickles.nodes import Global, Key, Obj, Value

_USER_STRING = "collections.UserString"
#: Classes that create a text from their argument.
TEXT_CLASSES = frozenset(["builtins.str", "numpy.str_", _USER_STRING, "torch.torch_version.TorchVersion"])
_SCALAR_FUNCTIONS = frozenset(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core"))
#: Prefix of the node classes of OmegaConf, and their attribute with the value.
_OMEGACONF_NODES, _NODE_VALUE = "omegaconf.nodes.", "_val"
#: Largest number of nested texts that are read.
_MAX_NESTED_TEXTS = 8
#: Result for a text that a call computes, because only Python can compute the text.
COMPUTED_TEXT: Final[Value] = Key(None)


def read_text(value: Value) -> Value:
    """Return the text that a value creates, or `COMPUTED_TEXT` if only Python can compute the text.

    Return any other value unchanged, also a key of a dict that is not a text.
    """
    node = value.value if type(value) is Key else value
    if type(node) is not Obj:
        return value
    is_text = False
    for _ in range(_MAX_NESTED_TEXTS):
        is_text = is_text or split_call(node)[0] in TEXT_CLASSES
        inner = _unwrap(node)
        if inner is node:
            break
        node = inner
        if type(node) is not Obj:
            return node if type(node) is str else COMPUTED_TEXT if is_text or node is COMPUTED_TEXT else value
    key = wrap_key(node)
    return key if type(key) is str else COMPUTED_TEXT if is_text or inner is not node else value


def is_plain_text(value: Value) -> bool:
    """Return True for a text, or for a call that creates a text and sets no attributes."""
    if type(value) is not Obj:
        return type(value) is str
    name, args = split_call(value)
    if name in _SCALAR_FUNCTIONS:
        return len(args) == 2 and numpy_dtype_states.get_code(args[0]) == "U"
    return name in TEXT_CLASSES and value.state is None and all(type(part) is str for part in args)


def read_bytearray(value: Value) -> bytes | None:
    """Return the bytes of a bytearray (b"?" if a call computes them); None for other values."""
    name, args = split_call(value) if type(value) is Obj else ("", ())
    if name != "builtins.bytearray":
        return None
    match args:
        case (str() as text, str() as codec) if codec in ("latin-1", "latin1"):
            return text.encode("latin-1", "replace")
        case (data,):
            return read_raw_bytes(data) or b"?"
    return b"?"


def _unwrap(node: Obj) -> Value:
    """Return the value inside a call, such as the text in `str('a')`; the call itself if it has no such value."""
    name, args = split_call(node)
    attributes = node.state if type(node.state) is dict else {}
    if name in TEXT_CLASSES:
        data = attributes.get("data") if name == _USER_STRING and "data" in attributes else args[0] if args else ""
        is_plain = len(args) <= 1 and not node.kwargs and type(data) in (str, Obj)
        return data if is_plain else COMPUTED_TEXT
    code = numpy_dtype_states.get_code(args[0]) if name in _SCALAR_FUNCTIONS and len(args) == 2 else ""
    if code == "O":
        return args[1]  # numpy gives back the object
    if code == "U":
        raw = read_raw_bytes(args[1])
        text = None if raw is None else numpy_types.read_text(args[0], raw)
        return COMPUTED_TEXT if text is None else text
    return attributes.get(_NODE_VALUE, node) if name.startswith(_OMEGACONF_NODES) else node


def split_call(node: Obj) -> tuple[str, tuple[Value, ...]]:
    """Return the `module.name` of the class from which a call creates an object, and the class's arguments."""
    name, args = _get_name(node.cls), node.args
    match name, args:
        case "copyreg.__newobj__", (cls, *rest):
            return _get_name(cls), tuple(rest)
        case "copyreg.__newobj_ex__", (cls, rest, *_):
            return _get_name(cls), rest if type(rest) is tuple else (rest,)
        case "copyreg._reconstructor", (cls, _, state):
            return _get_name(cls), (state,)
    return name, args


def _get_name(cls: Value) -> str:
    return known_names.get_plain_name(cls.module, cls.name) if type(cls) is Global else ""
