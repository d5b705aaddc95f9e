"""Compare dictionary keys of a pickle as Python compares them, without hashing values that a file can choose.

Only short values and bytes are hashed, and nothing recurses.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence

from statecli.pickles.nodes import Global, Key, Obj, SetOf, Value
from statecli.pickles.numpy_types import is_number_or_date, read_number, read_text

#: Limit of the integers that are hashed: hash(n) is n modulo 2**61 - 1, so a file can choose larger integers that all
#: collide.
_HASHABLE_INT_LIMIT = 2**60
_MAX_HASHABLE_BYTES = 65_536
#: Largest number of values in a key that is compared by its values, if `wrap_key` gets no `tokens`.
MAX_KEY_PARTS = 64
#: Largest nesting of containers in a key that is read: Python's stack overflows when it hashes deeper containers.
MAX_KEY_NESTING = 10_000


def wrap_key(value: Value, tokens: Tokens | None = None) -> Value:
    """Return `value` as a dictionary key: unchanged if cheap to hash, else wrapped in a `Key`.

    A call such as `str('a')` becomes its text. Two keys are equal if they are equal in Python: 1 and 1.0, tuples of
    equal values. Without `tokens`, containers of more than `MAX_KEY_PARTS` values equal only themselves.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int and -_HASHABLE_INT_LIMIT < value < _HASHABLE_INT_LIMIT:
        return value
    if kind is bytes and len(value) <= _MAX_HASHABLE_BYTES:
        return value
    plain_key = (Tokens(MAX_KEY_PARTS) if tokens is None else tokens).compute_plain(value)
    return plain_key if type(plain_key) is str else Key(value, plain_key)


class Tokens:
    """Cache of tokens (bytes) for containers. Two tokens are equal exactly if the containers are equal as keys.

    Each container is read once, without recursion. Only bytes are hashed: a file cannot predict their hashes.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        #: Container and token, by the id of the container, which is kept alive so that no other object gets its id.
        self._cached_tokens: dict[int, tuple[Value, bytes]] = {}
        self._parts_left = limit
        #: Whether a container was nested too deeply to be read; it equals only itself, and Python cannot hash it.
        self.is_partial = False

    def compute_plain(self, value: Value) -> Value:
        """Return the value for `Key.plain`: the value itself or a token. None means that the key equals only itself."""
        if type(value) is tuple and id(value) in self._cached_tokens:
            return "token", self._cached_tokens[id(value)][1]
        value = _get_spelled_value(value)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) in (bool, str, float) or (type(value) is int and abs(value) < _HASHABLE_INT_LIMIT):
            return value
        if type(value) is bytes and len(value) <= _MAX_HASHABLE_BYTES:
            return value
        if _get_parts(value) is not None:
            self._read(value)
        elif type(value) not in (int, bytes, Global):
            return None
        token = self._find_token(value)
        return None if self._parts_left < 0 else ("token", token)

    def _read(self, root: Value) -> None:
        """Compute and cache the tokens of a container and of its inner containers, up to the limits."""
        waiting, entered, depth = [root], set[int](), 0
        while waiting and self._parts_left >= 0:
            value = waiting[-1]
            tag, parts = _get_parts(value) or (b"", ())
            if id(value) in self._cached_tokens:
                waiting.pop()
            elif depth > MAX_KEY_NESTING:
                self.is_partial = True
                self._cached_tokens.update((id(deep), (deep, b"o%d" % id(deep))) for deep in waiting)
            elif id(value) not in entered:
                entered.add(id(value))  # a container that holds itself, which Python cannot hash, is entered once
                depth += 1
                self._parts_left -= 1 + len(parts)
                waiting.extend(part for part in parts if id(part) not in entered and _get_parts(part) is not None)
            else:
                waiting.pop()
                depth -= 1
                tokens = [self._find_token(part) for part in parts]
                self._cached_tokens[id(value)] = (
                    value,
                    _join_tokens(tag, sorted(set(tokens)) if tag == _SET else tokens),
                )

    def _find_token(self, value: Value) -> bytes:
        """Return the token of a value. A container must have been read by `_read` before."""
        cached = self._cached_tokens.get(id(value))
        if cached is not None:
            return cached[1]
        spelled_value = _get_spelled_value(value)
        if type(spelled_value) in (str, bytes):
            self._parts_left -= len(spelled_value) // MAX_KEY_PARTS
        token = _create_leaf_token(spelled_value) if self._parts_left >= 0 else b""
        if len(token) > _MAX_PLAIN_TOKEN_BYTES:
            token = _join_tokens(b"", [token])
            self._cached_tokens[id(value)] = (value, token)
        return token


def _get_parts(value: Value) -> tuple[bytes, Sequence[Value]] | None:
    """Return the tag and the elements of a value that is compared by its elements, such as a tuple; else None."""
    if type(value) is tuple:
        return _TUPLE, value
    if type(value) is SetOf:
        return _SET, value.elems
    if (
        type(value) is not Obj
        or type(value.cls) is not Global
        or value.cls.name not in _COMPARED_NAMES
        or not value.args
    ):
        return None
    name, first = _get_python_name(value.cls), value.args[0]
    if name == "builtins.complex" and all(type(number) in (int, float, bool) for number in value.args[:2]):
        return _COMPLEX, (*value.args, 0)[:2]
    elements = first.elems if type(first) is SetOf else first
    is_compared = name in _TAG_BY_CLASS and len(value.args) == 1 and type(elements) in (tuple, list)
    return (_TAG_BY_CLASS[name], elements) if is_compared else None


def _get_spelled_value(value: Value) -> Value:
    """Return the text, bytes or number that a call such as `str('a')` creates; other values unchanged."""
    if (
        type(value) is not Obj
        or type(value.cls) is not Global
        or value.cls.name not in _SPELLING_NAMES
        or not value.args
    ):
        return value
    name, first = _get_python_name(value.cls), value.args[0]
    if name == "builtins.complex" and type(first) in (int, float, bool) and value.args[1:] in ((), (0,)):
        return first
    if name == "_codecs.encode":
        return _decode_latin1(value)
    if name.endswith(".multiarray.scalar"):
        return _decode_numpy_scalar(value)
    kind = _SPELLED_TYPES.get(name)
    return first if kind is not None and type(first) is kind and len(value.args) == 1 else value


def _decode_latin1(call: Obj) -> Value:
    """Return the bytes that protocol 2 writes as an encoded text. Return any other call, and a long text, unchanged."""
    text = call.args[0]
    if type(text) is not str or call.args[1:] != ("latin1",) or len(text) > _MAX_HASHABLE_BYTES:
        return call
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        return call


def _decode_numpy_scalar(call: Obj) -> Value:
    """Return the number or text that a numpy scalar equals; the call itself for other types."""
    dtype, data = call.args if len(call.args) == 2 else (None, None)
    raw = _get_spelled_value(data)
    if type(raw) is not bytes:
        return call
    text = read_text(dtype, raw)
    value = read_number(dtype, raw) if text is None else text
    return call if value is None else value


def is_computed(key: Obj, tokens: Tokens) -> bool:
    """Return True if a call creates a key of unknown value. The value may equal a text that is also a key."""
    name, args = _get_python_name(key.cls), key.args
    if name == _RECONSTRUCTOR and len(args) > 1 and _get_python_name(args[1]) == "builtins.object":
        return False
    if name.endswith(".multiarray.scalar") and args and is_number_or_date(args[0]):
        return False
    return name.startswith(_TEXT_PREFIXES) and name not in _NAMES_WITHOUT_TEXT and tokens.compute_plain(key) is None


def _get_python_name(name: Value) -> str:
    return name.qualified if type(name) is Global else ""


def _create_leaf_token(value: Value) -> bytes:
    """Return the token of a value that is not a container. The token of NaN is its id: NaN equals only itself."""
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


def _join_tokens(tag: bytes, tokens: Iterable[bytes]) -> bytes:
    content = tag + b"".join([b"%d:%b" % (len(token), token) for token in tokens])
    if len(content) <= _MAX_PLAIN_TOKEN_BYTES:
        return content
    import hashlib  # imported here, because loading OpenSSL takes longer than listing most checkpoints

    return tag + b"#" + hashlib.sha256(content).digest()


_TUPLE, _SET, _COMPLEX = b"T", b"S", b"C"
#: Function that creates an object from its class, a base class and the value of the base class, such as a text.
_RECONSTRUCTOR = "copyreg._reconstructor"
_TAG_BY_CLASS = {"builtins.tuple": _TUPLE, "torch.Size": _TUPLE, "builtins.frozenset": _SET}
_COMPARED_NAMES = frozenset(["tuple", "Size", "frozenset", "complex"])
#: Classes that return an argument of a certain type unchanged -> this type.
#: `_SPELLING_NAMES`: last parts of the names of all calls that `_get_spelled_value` reads.
_SPELLED_TYPES = {
    "builtins.str": str,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.bytes": bytes,
    "builtins.bool": bool,
    "numpy.str_": str,
    "torch.torch_version.TorchVersion": str,
}
_SPELLING_NAMES = frozenset(
    [
        *("str", "unicode", "basestring", "int", "long", "float", "bytes", "bool", "complex"),
        *("encode", "scalar", "str_", "TorchVersion"),
    ]
)
#: Prefixes of names whose objects may equal a text, because they create, hold or return a text; and exceptions below
#: these prefixes.
_TEXT_PREFIXES = (
    *("builtins.", "numpy.", "collections.", "copyreg.", "_codecs.", "functools.", "operator.", "omegaconf."),
    *("torch.jit.", "torch.torch_version.", "torch.Size"),
)
_NAMES_WITHOUT_TEXT = frozenset(
    ["builtins.object", "builtins.range", "builtins.slice", "builtins.getattr", "numpy.dtype"]
)
#: Aliases of torch's dtypes -> names of the dtypes.
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
#: Longest token that is used unchanged, in bytes; a longer token is replaced by its hash.
_MAX_PLAIN_TOKEN_BYTES = 64
