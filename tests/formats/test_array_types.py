"""States of a numpy dtype: states that numpy writes are sound, all other states are reported."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from statecli.pickle_scan.imported_names import Scanner

from .attacks import Called, build_pickle, call_function, global_name, number, numbers, short, text

CODES = "? i1 u1 S1 U1 V1 u8 f2 f4 f8 g c8 c16 G S3 U5 V7 O M8[ns] m8[D] l p"
#: Functions that make a type of another type.
SHAPES = {
    "itself": np.dtype,
    "the other byte order": lambda code: np.dtype(code).newbyteorder(),
    "aligned": lambda code: np.dtype([("a", code), ("b", "u1")], align=True),
    "nested": lambda code: np.dtype([("a", code, (2, 3)), ("b", [("c", code), ("d", "O")])]),
    "subarray": lambda code: np.dtype((code, (2,))),
    "titled": lambda code: np.dtype([(("title", "name"), code)]),
    "empty": lambda _: np.dtype([]),
}


def list_misuses(data):
    """Return the names and reasons in a pickle for what is used for anything but holding data."""
    scanner = Scanner(data, "it")
    scanner.run(0)
    return [(mention.qualified, mention.misuse) for mention in scanner.iter_mentions() if mention.misuse]


def list_misused_names(value, protocol):
    """Return the names in the pickle of `value` that are used for anything but holding data."""
    return [name for name, _ in list_misuses(pickle.dumps(value, protocol))]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_dtypes_that_numpy_writes_are_not_reported(shape, protocol):
    """The dtype alone, an array and a scalar of the dtype are not reported."""
    for code in CODES.split():
        dtype = SHAPES[shape](code)
        array = np.zeros(2, dtype)
        assert [list_misused_names(value, protocol) for value in (dtype, array, array[0])] == [[], [], []], code


@pytest.mark.parametrize("place", range(8))
def test_record_dtype_with_a_changed_field_is_reported(place):
    """In a record of objects and numbers, each part that gives the place or type of the objects is changed."""
    function, args, state = np.dtype([("a", "O"), ("b", "i4")]).__reduce__()
    version, order, subarray, names, fields, size, alignment, flags = state
    objects, numbers = np.dtype("O"), np.dtype("i4")
    changed_state = [
        (version, order, subarray, names, fields, size, alignment, 0),
        (version, order, subarray, names, fields, size - 1, alignment, flags),
        (version, order, subarray, names, {**fields, "b": (numbers, 9)}, size, alignment, flags),
        (version, order, subarray, names, {**fields, "b": (numbers, -1)}, size, alignment, flags),
        (version, order, subarray, names, {"a": (numbers, 0)}, size, alignment, flags),
        (version, order, (objects, (2,)), None, None, size, alignment, flags),
        (version, order, (numbers, (2,)), None, None, size, alignment, flags),
        (version, order, (numbers, (-2,)), None, None, size, alignment, 0),
    ][place]
    assert list_misused_names(Called(function, args, state), 4) == []
    assert list_misused_names(Called(function, args, changed_state), 4) == ["numpy.dtype"]


O8 = np.dtype("O")
#: States of types that make numpy take bytes of the file for addresses, divide by zero or look up missing fields.
UNSOUND_STATES = {
    "references that are not pickled as a list": ("O8", (3, "|", None, None, None, -1, -1, 1)),
    "the same with other flags": ("O8", (3, "|", None, None, None, -1, -1, 61)),
    "the same in a record": ("V8", (3, "|", None, ("a",), {"a": (O8, 0)}, 8, 1, 1)),
    "new memory that is not cleared": ("O8", (3, "|", None, None, None, -1, -1, 3)),
    "numbers as a list": ("i4", (3, "<", None, None, None, -1, -1, 2)),
    "a number over an object": ("V8", (3, "|", None, ("a", "b"), {"a": (O8, 0), "b": (np.dtype("u8"), 0)}, 8, 1, 27)),
    "half a number over an object": (
        "V9",
        (3, "|", None, ("a", "b"), {"a": (O8, 1), "b": (np.dtype("i2"), 0)}, 9, 1, 27),
    ),
    "objects over objects": ("V12", (3, "|", None, ("a", "b"), {"a": (O8, 0), "b": (O8, 4)}, 12, 1, 27)),
    "a name without a field": ("V8", (3, "|", None, ("a", "b"), {"a": (np.dtype("i4"), 0)}, 8, 1, 16)),
    "an alignment of 0": ("V8", (3, "|", None, ("a",), {"a": (np.dtype("i4"), 0)}, 8, 0, 16)),
    "an alignment of a terabyte": ("S4", (3, "|", None, None, None, 4, 2**40, 0)),
    "another size than its code says": ("S4", (3, "|", None, None, None, 8, 1, 0)),
    "a size of numbers": ("i4", (3, "<", None, None, None, 1, 4, 0)),
    "a byte order of objects": ("O8", (3, ">", None, None, None, -1, -1, 63)),
    "an old version": ("f8", (2, "<", None, None, None, -1, -1, 0)),
    "metadata that is none": ("f8", (4, "<", None, None, None, -1, -1, 0, 5)),
    "a date without a unit": ("M8", (3, "<", None, None, None, -1, -1, 0)),
}


@pytest.mark.parametrize(("code", "state"), UNSOUND_STATES.values(), ids=list(UNSOUND_STATES))
def test_dtype_state_that_numpy_never_writes_is_reported(code, state):
    """The state has wrong flags, wrong fields or a wrong unit."""
    assert list_misused_names(Called(np.dtype, (code, False, True), state), 4) == ["numpy.dtype"]


CONSTRUCT = np.zeros(0).__reduce__()[0]
EMPTY = (np.ndarray, (0,), b"b")


CONSTRUCTOR = f"{CONSTRUCT.__module__}._reconstruct"


def build_array(dtype, elements, shape=(4,)):
    """Return an object that is pickled as an array of `dtype` with these elements."""
    return Called(CONSTRUCT, EMPTY, (1, shape, dtype, False, elements))


def encode_dtype_without_state(code):
    """Return the opcodes of the dtype with this code, without a state."""
    return call_function(global_name("numpy", "dtype"), text(code), b"\x89", b"\x88")


def build_object_array(
    dtype=None, elements=b"](K\x01K\x02K\x03e", shape=None, *, constructor_call=None, bracket=b"t", extra_opcodes=b""
):
    """Return an array of objects of shape (4,): the list has three objects, and numpy reads four pointers."""
    array = constructor_call or call_function(
        global_name(CONSTRUCT.__module__, "_reconstruct"), global_name("numpy", "ndarray"), numbers(0), short(b"b")
    )
    parts = (
        b"K\x01"
        + (shape or numbers(4))
        + (dtype or encode_dtype_without_state("O8"))
        + b"\x89"
        + elements
        + extra_opcodes
    )
    return array + (b"](" if bracket == b"e" else b"(") + parts + bracket + b"b"


MASKED_ARRAY = ("numpy.ma.core", "MaskedArray")
STRING_DTYPE = ("numpy._core._internal", "_convert_to_stringdtype_kwargs")
#: Arrays whose lists are too short, with types created in every way, and states of every kind.
SHORT_LISTS = {
    "a class of types": build_object_array(call_function(global_name("numpy.dtypes", "ObjectDType"))),
    "a class of types, made by pickle": build_object_array(global_name("numpy.dtypes", "ObjectDType") + b")\x81"),
    "a class of texts": build_object_array(call_function(global_name("numpy.dtypes", "StringDType"))),
    "a code of texts": build_object_array(encode_dtype_without_state("T")),
    "texts as numpy writes them": build_object_array(call_function(global_name(*STRING_DTYPE), number(1))),
    "a function that gives its argument": build_object_array(
        call_function(global_name("torch.jit._pickle", "restore_type_tag"), encode_dtype_without_state("O8"), text("x"))
    ),
    "a type by its __new__": build_object_array(
        call_function(global_name("copyreg", "__newobj__"), global_name("numpy", "dtype"), text("O8"))
    ),
    "a scalar that is a type": build_object_array(
        call_function(
            global_name(CONSTRUCT.__module__, "scalar"),
            encode_dtype_without_state("O8"),
            encode_dtype_without_state("O8"),
        )
    ),
    "a list that a call gives": build_object_array(elements=call_function(global_name("builtins", "list"))),
    "a shape that a call gives": build_object_array(shape=call_function(global_name("torch", "Size"), numbers(4))),
    "a list for the state": build_object_array(bracket=b"e"),
    "a masked array": build_object_array(
        constructor_call=global_name(*MASKED_ARRAY) + b"]\x85\x81", extra_opcodes=short(b"") + b"N"
    ),
    "a masked array that is called": build_object_array(
        constructor_call=call_function(global_name(*MASKED_ARRAY), b"]"), extra_opcodes=short(b"") + b"N"
    ),
    "a matrix": build_object_array(
        constructor_call=call_function(
            global_name(CONSTRUCT.__module__, "_reconstruct"), global_name("numpy", "matrix"), numbers(0), short(b"b")
        )
    ),
}


@pytest.mark.parametrize("name", SHORT_LISTS)
def test_object_array_with_a_short_list_is_reported(name):
    """numpy takes the memory after the list for addresses of objects."""
    misuses = list_misuses(build_pickle(SHORT_LISTS[name]))
    assert any("a state that no checkpoint needs" in reason for _, reason in misuses)


@pytest.mark.parametrize("name", ["a class of types", "a list for the state", "a masked array"])
def test_object_array_with_a_short_list_crashes_numpy(name, tmp_path):
    """The installed numpy crashes: with a shape of 4,000, numpy reads memory far after the end of the list."""
    data = build_pickle(SHORT_LISTS[name].replace(numbers(4), numbers(4000)))
    (tmp_path / "a.pkl").write_bytes(data)
    code = "import pickle; print(pickle.load(open('a.pkl', 'rb')).shape)"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    if name == "a list for the state" and process.returncode == 1:
        pytest.skip("pickle of this Python refuses a list as state")
    assert process.returncode < 0


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_arrays_are_not_reported(protocol):
    """Record arrays, masked arrays, arrays whose fields share bytes, matrices, polynomials, and texts of any length."""
    fields = [("a", "i4"), ("b", "f4")]
    shared = np.zeros(2, {"names": ["a", "b"], "formats": ["f8", "i2"], "offsets": [0, 4]})
    values = [np.rec.array([(1, 2.0)], dtype=fields), np.ma.zeros(2, fields), shared]
    values += [np.matrix([[1, 2]]), np.poly1d([1, 2]), np.array([[1, None]], object)]
    if hasattr(getattr(np, "dtypes", None), "StringDType"):
        array_with_missing = np.array(["a", np.nan], np.dtypes.StringDType(na_object=np.nan, coerce=False))
        values += [np.array(["a", "bcd"], "T"), array_with_missing, np.array([], "T"), np.array([["a"]], "T")]
    assert [list_misused_names(value, protocol) for value in values] == [[] for _ in values]


def test_string_dtype_with_other_objects_is_reported():
    """numpy calls the methods of the missing-value object and of each element, so any other object is reported."""
    shape = numbers(1)
    space = call_function(global_name("types", "SimpleNamespace"))
    for dtype, element in [
        (call_function(global_name(*STRING_DTYPE), number(1), space), text("a")),
        (call_function(global_name(*STRING_DTYPE), number(1)), space),
    ]:
        assert list_misuses(build_pickle(build_object_array(dtype, b"](" + element + b"e", shape)))


@pytest.mark.parametrize(
    "body",
    [
        call_function(global_name("numpy", "poly1d"), b"](K\x01K\x02e", b"\x88"),
        global_name("numpy", "poly1d")
        + b")\x81}"
        + text("coeffs")
        + call_function(global_name("types", "SimpleNamespace"))
        + b"sb",
    ],
    ids=["called", "of objects"],
)
def test_polynomial_without_a_plain_array_is_reported(body):
    """A polynomial is reported unless its coefficients are a plain array: numpy calls methods of other objects."""
    assert "numpy.poly1d" in [name for name, _ in list_misuses(build_pickle(body))]


def test_array_with_fewer_objects_than_elements_is_reported():
    """numpy reads memory after the end of the list, also for a record of objects."""
    for dtype in O8, np.dtype([("a", "O")]):
        assert list_misused_names(build_array(dtype, [1, 2, 3, 4]), 2) == []
        assert list_misused_names(build_array(dtype, [1, 2, 3]), 2) == [CONSTRUCTOR]


def test_dtype_changed_after_use_is_reported():
    """Bytes of an array become addresses if its type later gets fields of objects, or other fields."""
    dtype = call_function(global_name("numpy", "dtype"), text("V8"), b"\x89", b"\x88")
    object_type = call_function(global_name("numpy", "dtype"), text("O8"), b"\x89", b"\x88")
    object_type += b"(K\x03" + text("|") + b"NNN" + number(-1) + number(-1) + b"K\x3ftb"
    empty = call_function(
        global_name(CONSTRUCT.__module__, "_reconstruct"), global_name("numpy", "ndarray"), numbers(0), short(b"b")
    )
    array = empty + b"(K\x01" + numbers(1) + b"h\x01" + b"\x89" + short(b"A" * 8) + b"tb"
    field = text("a") + object_type + b"K\x00\x86"
    state = b"h\x01(K\x03" + text("|") + b"N" + text("a") + b"\x85h\x02" + number(8) + number(1) + number(27) + b"tb"
    fields = b"}q\x02" + field + b"s0"
    for body, when in [
        (dtype + b"q\x01" + fields + array + state, "after"),
        (dtype + b"q\x01" + fields + state + b"h\x02" + field + b"s0", "other fields"),
    ]:
        assert "numpy.dtype" in [name for name, _ in list_misuses(build_pickle(body))], when


@pytest.mark.parametrize(
    "args",
    [
        (np.dtype([("a", "O")]),),
        (np.dtype([("a", "O")]), np.full(1, 0x41414141)),
        (np.dtype([("a", "O")]), build_array(np.dtype([("a", "O")]), [], (0,))),
    ],
    ids=["nothing", "numbers", "no element"],
)
def test_scalar_from_an_array_of_objects_is_reported(args):
    """numpy reads the first element of the given array, whatever its type and size."""
    function = np.float64(1).__reduce__()[0]
    assert list_misused_names(np.zeros(1, [("a", "O")])[0], 4) == []
    assert list_misused_names(Called(function, args), 4) == [f"{CONSTRUCT.__module__}.scalar"]
