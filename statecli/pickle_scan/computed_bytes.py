"""Find bytes that a pickle computes from numbers, texts or other bytes, because the scan reads only literal bytes.

Some loaders unpickle or evaluate bytes of their data: `bytes([128, 4, …])` and `torch.ByteTensor([128, …])` hide such
bytes. No pickler and no version of `torch.save` writes these calls. Picklers write bytes as literal bytes, and in
protocols 0 to 2 as a text with the codec latin-1 (`_codecs.encode`, `bytearray(text, "latin-1")`).

Picklers write arrays of numbers as calls that compute. Python builds an `array.array` from a list of numbers, and swaps
the bytes of an array from another machine. numpy swaps the bytes of an array in the other byte order. These bytes are
computed here too, and are scanned as if they stood in the pickle.
"""

from __future__ import annotations

import array

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import numpy_dtype_states
from statecli.pickle_scan.text_values import TEXT_CLASSES
from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.nodes import Obj, Value

_BYTEARRAY = "builtins.bytearray"
_BYTES_CLASSES = frozenset(["builtins.bytes", "numpy.bytes_", _BYTEARRAY])
_ENCODE = "_codecs.encode"
_ARRAY, _REBUILD_ARRAY = "array.array", "array._array_reconstructor"
#: Codec that `bytearray` writes in protocol 2, and codecs that hide nothing when they decode.
_BYTEARRAY_CODEC = "latin-1"
_TEXT_CODECS = frozenset(["latin1", "latin-1", "iso-8859-1", "ascii", "us-ascii", "utf8", "utf-8"])
_SIZE_CLASS = "torch.Size"
#: Classes of numpy's scalars and arrays; pickles create their objects with numpy's own functions.
_NUMPY_CLASS = compile_on_use(
    r"numpy\.(?:\w*(?:bool|int|float|complex|long|half|single|double|byte|short|void|record|str|unicode)\w*"
    r"|datetime64|timedelta64|object_|rec\.record|ma\.(?:core\.)?MaskedArray)"
)
_FROM_BUFFER = ".numeric._frombuffer"
#: Classes that create a tensor or a storage from their arguments.
_TENSOR_CLASSES = compile_on_use(
    r"torch(?:\.cuda|\.sparse|\.cuda\.sparse)?\.\w*(?:Tensor|Storage)|torch\.storage\.\w*Storage"
)
#: Dtype code of numpy arrays whose elements consist of two numbers.
_COMPLEX_CODE = "c"

REASON = (
    "computes bytes from numbers or strings during loading; torch.save never writes this, and the bytes may be a "
    "second pickle that a loader unpickles"
)


def computes_bytes(name: str, call: Obj) -> bool:
    """Return True if a call makes data (bytes, text, size, tensor, storage) in a way that picklers never use."""
    args: tuple[Value, ...] = call.args
    if name == _ENCODE:
        return bool(args or call.kwargs) and (bool(call.kwargs) or read_raw_bytes(call) is None)
    if name in _BYTES_CLASSES:  # pickle writes arguments only for bytearray
        is_text = len(args) == 2 and type(args[0]) is str and type(args[1]) is str and args[1] == _BYTEARRAY_CODEC
        is_literal = len(args) == 1 and read_raw_bytes(args[0]) is not None
        return bool(args or call.kwargs) and not (name == _BYTEARRAY and (is_text or is_literal) and not call.kwargs)
    if name in TEXT_CLASSES and name != "numpy.str_":
        is_literal_text = not args or type(args[0]) is str or read_raw_bytes(args[0]) is not None
        codec = args[1] if len(args) > 1 else _BYTEARRAY_CODEC
        is_plain = type(codec) is str and codec.lower().replace("_", "-") in _TEXT_CODECS
        return not (is_literal_text and is_plain)
    if _NUMPY_CLASS.fullmatch(name):
        return bool(args or call.kwargs)
    if name == _SIZE_CLASS:
        return bool(args) and not (type(args[0]) in (list, tuple) and all(type(size) is int for size in args[0]))
    if name == _ARRAY:
        return len(args) > 1 and type(args[1]) is not bytes and (args[0] in ("b", "B") or not _is_numbers(args[1]))
    if name == _REBUILD_ARRAY:
        return len(args) > 3 and _read_data(args[3]) is None
    if name.endswith(_FROM_BUFFER):
        return len(args) > 3 and args[3] != "C" and _read_data(args[0]) is None
    return bool(args) and _TENSOR_CLASSES.fullmatch(name) is not None


def count_numbers(name: str, call: Obj) -> int:
    """Return the number of elements that a call of `array.array` copies; 0 for other calls."""
    return len(call.args[1]) if name == _ARRAY and len(call.args) > 1 and type(call.args[1]) in (list, str) else 0


def compute_array(name: str, call: Obj) -> bytes | None:
    """Return the bytes of the array that a call computes; None for other calls, and for calls that Python refuses."""
    args: tuple[Value, ...] = call.args
    try:
        if name == _ARRAY and len(args) == 2 and _is_numbers(args[1]):
            return array.array(args[0], args[1]).tobytes()
        if name.endswith(_FROM_BUFFER) and len(args) == 4 and args[3] != "C":
            return _compute_array(args[2], args[1], args[0], is_fortran=True, is_swapped=False)
        if name == _REBUILD_ARRAY and len(args) == 4:
            # Python's own pickles call this function, which packs numbers and runs nothing of the file.
            return array._array_reconstructor(array.array, args[1], args[2], _read_data(args[3])).tobytes()  # type: ignore[attr-defined,no-any-return]
    except (TypeError, ValueError, OverflowError):
        pass  # Python refuses the call too
    return None


def has_computed_data(state: tuple[Value, ...]) -> bool:
    """Return True if a numpy array's state takes its data from a call. numpy itself never writes such a state."""
    data = numpy_dtype_states.split_array_state(state)[-1]
    # Protocol 2 writes empty bytes as `bytes()`.
    return type(data) is Obj and read_raw_bytes(data) is None and bool(data.args or data.kwargs or data.state)


def compute_numpy_array(state: tuple[Value, ...]) -> bytes | None:
    """Return a numpy array's bytes in little-endian C order; None if the bytes in the state already have this order."""
    shape, dtype, is_fortran, data = numpy_dtype_states.split_array_state(state)
    is_swapped = type(dtype) is Obj and numpy_dtype_states.is_swapped(dtype)
    return _compute_array(shape, dtype, data, is_fortran=bool(is_fortran), is_swapped=is_swapped)


def _compute_array(shape: Value, dtype: Value, raw: Value, *, is_fortran: bool, is_swapped: bool) -> bytes | None:
    data = _read_data(raw)
    size = numpy_dtype_states.count_element_bytes(dtype, dtype.state) if type(dtype) is Obj else None
    if not data or type(dtype) is not Obj or not size or len(data) % size:
        return None
    is_transposed = (
        is_fortran and type(shape) is tuple and numpy_dtype_states.count_elements(shape) == len(data) // size
    )
    if not is_swapped and not (is_transposed and len(shape) > 1):
        return None
    number = {_COMPLEX_CODE: size // 2, "U": 4}.get(numpy_dtype_states.get_code(dtype), size)
    out = bytearray(len(data))
    for at in range(size):
        source = at - at % number + number - 1 - at % number if is_swapped else at
        plane = data[source::size]
        out[at::size] = _order_by_rows(plane, shape) if is_transposed else plane
    return bytes(out)


def _order_by_rows(plane: bytes, shape: tuple[int, ...]) -> bytes:
    """Reorder bytes, one for each element, from column-major order (Fortran) to row-major order (C)."""
    if len(shape) < 2:
        return plane
    first, last = shape[0], shape[-1]
    if first <= last:
        return b"".join(_order_by_rows(plane[index::first], shape[1:]) for index in range(first))
    ordered, block = bytearray(len(plane)), len(plane) // last
    for index in range(last):
        ordered[index::last] = _order_by_rows(plane[index * block :][:block], shape[:-1])
    return bytes(ordered)


def _is_numbers(value: Value) -> bool:
    """Return True for a text or for a list of numbers or characters, the contents of a pickled `array.array`."""
    return type(value) is str or (type(value) is list and all(type(number) in (int, float, str) for number in value))


def _read_data(value: Value) -> bytes | None:
    """Return the data in an array's state as bytes; None for data in another form. A text is bytes of Python 2."""
    if type(value) is str:
        return value.encode("latin-1", "replace")
    return read_raw_bytes(value)
