"""numpy's arrays and archives: values equal `numpy.load`, and nothing is unpickled."""

from __future__ import annotations

import io
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.lib import format as library

from statecli import formats
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import Evidence, Kind
from statecli.file_scan import compressed_records
from statecli.file_scan.scan import scan_pickles
from statecli.formats import npz
from statecli.formats.shared import npy_array
from statecli.values.read import open_view, read_all_values, read_items

from .attacks import Call, Member, build, records
from .test_any_bytes import read_or_refuse


def save_npz(tmp_path, packed: bool = False, **arrays: Any) -> str:
    """Write arrays with `numpy.savez` or `savez_compressed`; return the path."""
    path = tmp_path / "arrays.npz"
    (numpy.savez_compressed if packed else numpy.savez)(path, **arrays)
    return str(path)


def file(tmp_path, data: bytes, name: str = "array.npy") -> str:
    """Write `data` to a file; return the path."""
    (tmp_path / name).write_bytes(data)
    return str(tmp_path / name)


def npy(literal: str, data: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    """Return the file of an array with the header `literal`, whatever the header says."""
    text = literal.encode("utf-8")
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + text + data


def format_header(descr: str = "'<f4'", order: str = "False", shape: str = "(2,)") -> str:
    """Return a header as numpy writes a header, with these parts."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def read_stored_bytes(tensor: Any) -> bytes:
    """Return the bytes of the tensor's elements in C order and native byte order."""
    with open_view(tensor.data) as view:
        return b"".join(block.tobytes() for block in read_items(view))


CODES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8", "c16")


@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
def test_numbers_equal_numpy_load(tmp_path, packed, order):
    """Order, shape, dtype and values agree for all types, byte orders, C and Fortran order, scalars, empty arrays.

    The real part and the imaginary part of a complex number are swapped separately.
    """
    arrays: dict[str, numpy.ndarray] = {}
    for code in CODES:
        array = numpy.arange(24).reshape(2, 3, 4).astype(f"{order}{code}")
        arrays |= {f"{code}.c": array, f"{code}.f": numpy.asfortranarray(array), f"{code}.0": array[:0]}
        arrays |= {f"{code}.scalar": array[1, 2, 3], f"{code}.turned": array.transpose(1, 2, 0)}
    path = save_npz(tmp_path, packed, **arrays)
    actual = {tensor.fqn: tensor for tensor in formats.read(path).tensors}
    with numpy.load(path) as loaded:
        assert list(actual) == loaded.files
        for name, tensor in actual.items():
            expected = loaded[name]
            assert (tensor.dtype, tensor.shape) == (expected.dtype.name, expected.shape)
            assert tensor.nbytes == expected.nbytes
            assert numpy.array_equal(read_all_values(tensor.data).reshape(expected.shape), expected)


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
@pytest.mark.parametrize(
    ("array", "dtype", "note"),
    [
        (numpy.array(["ab", "cdé"]), "numpy U3", None),
        (numpy.array([b"a", b"xyz"]), "numpy S3", None),
        (numpy.array(["2020-01-01"], "M8[D]"), "numpy M8[D]", None),
        (numpy.array([5], "m8[ns]"), "numpy m8[ns]", None),
        (numpy.zeros(2, "V2"), "numpy V2", "void of 2 bytes: perhaps bfloat16, which numpy saves as void"),
        (numpy.zeros(2, "V1"), "numpy V1", "void of 1 byte: perhaps a float8 type, which numpy saves as void"),
        (numpy.zeros(2, "V5"), "numpy V5", "void of 5 bytes"),
        (
            numpy.ones(2, [("a", "<f4"), ("b", ">i8", (2, 3))]),
            "numpy V52 [('a', '<f4'), ('b', '>i8', (2, 3))]",
            "records of 52 bytes: a, b",
        ),
        (
            numpy.ones(2, [("a", [("x", "u1"), ("y", "<f8")])]),
            "numpy V9 [('a', [('x', '|u1'), ('y', '<f8')])]",
            "records of 9 bytes: a",
        ),
        (
            numpy.ones(2, numpy.dtype([("a", "u1"), ("b", "<f8")], align=True)),
            "numpy V16 [('a', '|u1'), ('', '|V7'), ('b', '<f8')]",
            "records of 16 bytes: a, b",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_other_dtypes_are_listed_with_their_bytes(tmp_path, array, dtype, note, packed):
    """Text, times, void and records are shown with their size, and compared by their bytes.

    They are not trained, but bfloat16 and float8, which numpy saves as bytes without a type, may be.
    """
    (tensor,) = formats.read(save_npz(tmp_path, packed, a=array)).tensors
    assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.note) == (dtype, array.shape, array.nbytes, note)
    assert read_stored_bytes(tensor) == array.tobytes()
    is_number = "perhaps" in (note or "")
    kind = (Kind.PARAMETER, Evidence.ASSUMED) if is_number else (Kind.OTHER, Evidence.CONVENTION)
    assert (tensor.kind, tensor.evidence) == kind


RECORD = [("lr", "<f4"), ("wd", "<f4")]
OTHER_RECORDS = {
    "names": [("lr", "<f4"), ("eps", "<f4")],
    "types": [("lr", "<i4"), ("wd", "<f4")],
    "byte order": [("lr", ">f4"), ("wd", "<f4")],
    "order": [("wd", "<f4"), ("lr", "<f4")],
    "one field of two": [("lr", "<f4", (2,))],
    "a record in a record": [("lr", RECORD)],
    "a title": [(("rate", "lr"), "<f4"), ("wd", "<f4")],
    "times": [("lr", "<M8[s]")],
    "times of another unit": [("lr", "<M8[ms]")],
    "text": [("lr", "U1"), ("wd", "S4")],
    "bool": [("lr", "?"), ("wd", "<f4"), ("x", "V3")],
    "padding": {"names": ["lr"], "formats": ["<f4"], "itemsize": 8},
    "many fields": [(f"field{n}", "u1") for n in range(8)],
}


@pytest.mark.parametrize("case", OTHER_RECORDS)
def test_a_record_has_one_dtype_in_all_formats(tmp_path, case):
    """A pickle has offsets where a .npy has padding; a recarray has the class numpy.record.

    The same bytes are other values with other fields, so they have another dtype.
    """
    dtypes = []
    for array in (numpy.array([(1.0, 2.0)], RECORD), numpy.array([(1.0, 2.0)], RECORD).view(OTHER_RECORDS[case])):
        numpy.savez(tmp_path / "a.npz", r=array)
        torch.save({"r": array, "w": torch.ones(1)}, tmp_path / "a.pt")
        torch.save({"r": array.view(numpy.recarray), "w": torch.ones(1)}, tmp_path / "b.pt")
        tensors = [formats.read(str(tmp_path / name)).tensors[0] for name in ("a.npz", "a.pt", "b.pt")]
        assert [read_stored_bytes(tensor) for tensor in tensors] == [array.tobytes()] * 3
        assert {tensor.dtype for tensor in tensors} == {tensors[0].dtype}
        dtypes.append(tensors[0].dtype)
    first, second = dtypes
    assert first == "numpy V8 [('lr', '<f4'), ('wd', '<f4')]"
    assert (second[:10], second != first) == ("numpy V8 [", True)
    assert len(second) <= 120


def test_fields_out_of_order_have_their_offsets(tmp_path):
    """numpy saves records of this kind only in pickles."""
    dtypes = []
    for n, offsets in enumerate(([0, 2], [2, 0], [0, 4])):
        array = numpy.zeros(1, numpy.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": offsets}))
        torch.save({"r": array, "w": torch.ones(1)}, tmp_path / f"{n}.pt")
        dtypes.append(formats.read(str(tmp_path / f"{n}.pt")).tensors[0].dtype)
    assert dtypes == [
        "numpy V4 [('a', '<i4'), ('b', '<i2', offset 2)]",
        "numpy V6 [('', '|V2'), ('a', '<i4'), ('b', '<i2', offset 0), ('', '|V4')]",
        "numpy V6 [('a', '<i4'), ('b', '<i2')]",
    ]


def test_long_dtypes_end_in_a_digest(tmp_path):
    """Two long dtypes that differ in their last field have different digests."""
    dtypes = []
    for last in ("x", "y"):
        array = numpy.zeros(1, [(f"field{n}", "<f4") for n in range(500)] + [(last, "<f4")])
        dtypes.append(formats.read(save_npz(tmp_path, a=array)).tensors[0].dtype)
    assert dtypes[0] != dtypes[1]
    assert max(map(len, dtypes)) <= 120


@pytest.mark.parametrize("unit", ["M8[s]", "M8[25s]", "m8[ns]", "M8"])
def test_times_in_a_pickle_have_their_unit(tmp_path, unit):
    """The unit is in the state of the dtype in a pickle, and in the name of the dtype in a .npy."""
    array = numpy.zeros(2, unit)
    torch.save({"r": array, "w": torch.ones(1)}, tmp_path / "a.pt")
    assert formats.read(str(tmp_path / "a.pt")).tensors[0].dtype == f"numpy {unit}"
    numpy.savez(tmp_path / "a.npz", r=array)
    assert formats.read(str(tmp_path / "a.npz")).tensors[0].dtype == f"numpy {unit}"


def test_record_with_too_many_fields_is_damage(tmp_path):
    """Each level doubles the fields, but the pickle has each level once."""
    dtype = numpy.dtype("u1")
    for _ in range(16):
        dtype = numpy.dtype([("a", dtype), ("b", dtype)])
    torch.save({"r": numpy.zeros(0, dtype), "w": torch.ones(1)}, tmp_path / "a.pt")
    assert "a numpy dtype has more than 10,000 fields" in formats.read(str(tmp_path / "a.pt")).tensors[0].damage


def test_field_names_in_header_version_3_are_read(tmp_path):
    """Header version 3 is UTF-8, versions 1 and 2 are Latin-1."""
    array = numpy.zeros(2, [("größe", "<f4"), ("重", "<f4")])
    numpy.save(tmp_path / "a.npy", array)
    assert (tmp_path / "a.npy").read_bytes()[6] == 3
    assert formats.read(str(tmp_path / "a.npy")).tensors[0].note == "records of 8 bytes: größe, 重"


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("fortran", [False, True])
def test_npy_file_is_one_tensor(tmp_path, version, fortran):
    """A `.npy` of each version gives a tensor without a name of its own, called `tensor` as in files of torch.save."""
    array = numpy.arange(6, dtype=">f4").reshape(2, 3)
    array = numpy.asfortranarray(array) if fortran else array
    out = io.BytesIO()
    library.write_array(out, array, version)
    state = formats.read(file(tmp_path, out.getvalue()))
    (tensor,) = state.tensors
    assert (state.format, tensor.fqn, tensor.dtype, tensor.shape) == ("npy", "tensor", "float32", (2, 3))
    assert numpy.array_equal(read_all_values(tensor.data).reshape(2, 3), array)


def test_facts_that_npz_does_not_record_are_unknown(tmp_path):
    """An npz records no devices, no requires_grad and no buffers."""
    for tensor in formats.read(save_npz(tmp_path, a=numpy.ones(2), c=numpy.ones(2, "c8"))).tensors:
        assert (tensor.kind, tensor.evidence, tensor.persistent) == ("parameter", "assumed", None)
        assert (tensor.device, tensor.requires_grad, tensor.saved) == (None, None, True)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), max_size=5), st.sampled_from(CODES), st.booleans(), st.sampled_from("<>"))
def test_random_arrays_equal_numpy(tmp_path, shape, code, fortran, order):
    """The values equal numpy's for any shape, type and order."""
    tensor = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(f"{order}{code}")
    tensor = numpy.asfortranarray(tensor) if fortran else tensor
    numpy.save(tmp_path / "a.npy", tensor)
    (row,) = formats.read(str(tmp_path / "a.npy")).tensors
    assert (row.dtype, row.shape) == (tensor.dtype.name, tensor.shape)
    assert numpy.array_equal(read_all_values(row.data).reshape(tensor.shape), tensor)


# Headers of other writers.

LITERALS = {
    "in another order": "{'shape': (2,), 'fortran_order': False, 'descr': '<f4'}",
    "with other quotes": '{"descr": "<f4", "fortran_order": False, "shape": (2,)}',
    "without spaces": "{'descr':'<f4','fortran_order':False,'shape':(2,)}",
    "over several lines": "{\n 'descr': '<f4',\n 'fortran_order': False,\n 'shape': (2,),\n}\n",
    "of Python 2": "{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }",
    "with the byte order of the machine": "{'descr': '=f4', 'fortran_order': False, 'shape': (2,), }",
}


@pytest.mark.parametrize("case", LITERALS)
def test_header_spellings_of_other_writers_are_read(tmp_path, case):
    """numpy reads these spellings as the same header."""
    (tensor,) = formats.read(file(tmp_path, npy(LITERALS[case], bytes(8)))).tensors
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("float32", (2,), 8)


# Objects.


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
def test_objects_are_named_and_not_loaded(tmp_path, packed, inspect):
    """The objects are a pickle: statecli does not execute the pickle, and an audit finds its calls."""
    objects = numpy.array([Call(open, str(tmp_path / "harm"), "w"), None], dtype=object)
    path = save_npz(tmp_path, packed, x=numpy.ones(3), labels=objects)
    actual = {tensor.fqn: tensor for tensor in formats.read(path).tensors}
    assert (actual["labels"].dtype, actual["labels"].data) == ("numpy O", None)
    assert (actual["labels"].kind, actual["labels"].evidence) == (Kind.OTHER, Evidence.CONVENTION)
    assert actual["labels"].note == "Python objects, saved as a pickle: not loaded"
    assert inspect(path, "--stats")[0] == 0
    (pickled,) = scan_pickles(path)
    assert "labels" in pickled.where
    assert "open" in {name.name for name in pickled.names}
    assert not (tmp_path / "harm").exists()


def test_records_with_objects_are_objects(tmp_path):
    """An object field makes numpy pickle the whole record."""
    array = numpy.zeros(2, [("a", "<f4"), ("b", object)])
    (tensor,) = formats.read(save_npz(tmp_path, a=array)).tensors
    assert (tensor.dtype, tensor.data) == ("numpy O [('a', '<f4'), ('b', '|O')]", None)


def test_an_audit_does_not_inflate_numbers(tmp_path, monkeypatch):
    """A scan does not decompress arrays of numbers, however large."""
    monkeypatch.setattr(compressed_records, "MAX_INFLATED_BYTES", 1000)
    assert scan_pickles(save_npz(tmp_path, True, a=numpy.zeros(100_000))) == ()


# Damaged arrays.

DAMAGED_ARRAYS = {
    "an unknown key": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}"),
        "not a dict with the keys descr",
    ),
    "a list as a key": (npy("{[]: 1}"), "invalid .npy header: not a Python literal"),
    "a missing key": (
        npy("{'descr': '<f4', 'shape': (2,)}"),
        "not a dict with the keys descr, fortran_order and shape",
    ),
    "a key that is a number": (npy("{1: 2}"), "not a dict with the keys descr, fortran_order and shape"),
    "no dict": (npy("[1, 2]"), "not a dict with the keys descr, fortran_order and shape"),
    "something behind it": (npy(format_header() + " 1"), "invalid .npy header: not a Python literal"),
    "nothing": (npy(""), "invalid .npy header: not a Python literal"),
    "a dict that is not closed": (npy(format_header()[:-1]), "invalid .npy header: not a Python literal"),
    "a call": (npy(format_header(shape="(__import__('os').getpid(),)")), "is not a dict of texts and numbers"),
    "arithmetic": (npy(format_header(shape="(9**9**9,)")), "is not a dict of texts and numbers"),
    "a number of 20 digits": (npy(format_header(shape=f"({10**19},)")), "invalid .npy header"),
    "a number of 60,000 digits": (npy(format_header(shape=f"({'9' * 60_000},)")), "invalid .npy header"),
    "a negative size": (npy(format_header(shape="(-1,)")), "is not a dict of texts and numbers"),
    "a size that is true": (npy(format_header(shape="(True,)")), "its shape is not a tuple of integers"),
    "a shape that is a number": (npy(format_header(shape="(2)")), "its shape is not a tuple of integers"),
    "a shape that is a list": (npy(format_header(shape="[2]")), "its shape is not a tuple of integers"),
    "2^66 elements": (npy(format_header(shape=f"({2**33}, {2**33})")), "is impossible: 2^63 elements or more"),
    "too many dimensions": (
        npy(format_header(shape=f"({'1, ' * 1025})")),
        "has 1025 dimensions, more than statecli's limit of 1024",
    ),
    "an order that is a number": (npy(format_header(order="1")), "its fortran_order is 1; expected True or False"),
    "brackets without end": (
        npy(format_header(descr="[" * 5000)),
        "invalid .npy header: not a Python literal, or nested too deeply",
    ),
    "brackets in order": (
        npy(format_header(descr="[" * 500 + "]" * 500)),
        "invalid .npy header: not a Python literal, or nested too deeply",
    ),
    "commas alone": (npy(format_header(descr="[,]")), "invalid .npy header"),
    "no comma": (npy(format_header(shape="(2 3)")), "invalid .npy header: not a Python literal"),
    "an unknown type": (npy(format_header(descr="'<x4'")), "its descr '<x4' is not a dtype that numpy saves"),
    "a type of 10 digits": (npy(format_header(descr="'<V1000000000'")), "is not a dtype that numpy saves"),
    "a type that is a number": (npy(format_header(descr="4")), "its descr is not a dtype code or a list of fields"),
    "a field of one": (npy(format_header(descr="[('a',)]")), "its descr is not a dtype code or a list of fields"),
    "a field of shape True": (npy(format_header(descr="[('a', '<f4', (True,))]")), "its descr is not a dtype code or"),
    "a field too large": (npy(format_header(descr=f"[('a', '<f8', ({2**62},))]")), "its descr is not a dtype code or"),
    "2^40 elements of nothing": (
        npy(format_header(descr="'|V0'", shape=f"({2**40},)"), bytes(8)),
        "claims 1099511627776 elements of 0 bytes each, but the file has only 87 bytes; statecli refuses such an array",
    ),
    "a header beyond the end": (
        npy(format_header(), length=5000),
        "is truncated: its header needs 5010 bytes, but only",
    ),
    "a header of 4 GB": (npy(format_header(), version=2, length=2**32 - 1), "its header claims 4294967295 bytes"),
    "no UTF-8": (npy("", version=3, length=2, data=b"\xff\xff"), "its header is not valid UTF-8 near byte 0"),
    "version 4": (npy(format_header(), version=4), "has .npy format version 4.0, but statecli reads only 1.0 to 3.0"),
    "the magic number alone": (b"\x93NUMPY", "is truncated: its header needs 10 bytes, but only 6 exist"),
    "version alone": (b"\x93NUMPY\1\0\x76", "is truncated"),
}


SIZES = ("", "0", "1", "2", "3", "4", "8", "10", "16", "32", "08")
#: Types of another machine, or with another size of a pointer.
FOREIGN_CODES = re.compile(r"[<>|=]?(?:f12|c24|O4)")


@pytest.mark.parametrize("order", ["", "<", ">", "|", "="])
@pytest.mark.parametrize("kind", "?biufcSUVOmM")
def test_type_code_is_read_as_numpy_does_or_refused(tmp_path, kind, order):
    """numpy reads a single letter as a C type: `b` is int8, `f` float32, `c` a text of one byte."""
    refused_codes = []
    for code in (order + kind + size + unit for size in SIZES for unit in ("", "[s]")):
        path = file(tmp_path, npy(format_header(descr=f"'{code}'", shape="(1,)"), bytes(256)))
        try:
            expected = numpy.dtype(code)
        except TypeError:
            expected = None
        try:
            (tensor,) = formats.read(path).tensors
        except MalformedError:
            refused_codes += [code] if expected is not None else []
            continue
        if FOREIGN_CODES.fullmatch(code) or tensor.dtype == "numpy O":
            continue
        assert (code, tensor.nbytes) == (code, expected.itemsize)
        if expected.kind in "biufc":
            assert (code, tensor.dtype.removeprefix("numpy ").removeprefix(">")) == (code, expected.name)
            assert tensor.data.storage.big_endian == (order == ">" and expected.itemsize > 1)
    # Spellings that numpy never writes.
    assert refused_codes == [order + kind] * (kind in "bifc") + [f"{order}{kind}08"] * (kind in "iufcOmM")


@pytest.mark.parametrize("case", sorted(DAMAGED_ARRAYS))
def test_damaged_array_is_refused_or_unreadable(case, tmp_path, line, inspect):
    """A damaged .npy is refused in one line; in an archive, stored or deflated, only this array is unreadable."""
    data, expected = DAMAGED_ARRAYS[case]
    assert expected in line(file(tmp_path, data))
    for method in (0, 8):
        intact_member = Member("good.npy", npy(format_header(), bytes(8)), method=method)
        path = file(tmp_path, build([Member("bad.npy", data, method=method), intact_member]), "a.npz")
        damaged, intact = formats.read(path).tensors
        assert expected in damaged.damage
        assert damaged.damage.startswith(f"{path}: bad: ")
        assert intact.shape == (2,)
        code, out, err = inspect(path)
        assert (code, err.count("\n")) == (2, 1)
        assert "good" in out


@pytest.mark.parametrize("method", [None, 0, 8], ids=["alone", "stored", "deflated"])
def test_truncated_array_is_unreadable(method, tmp_path, inspect):
    """The header gives the array's dtype and shape; the exit status is 2."""
    data = npy(format_header(), bytes(7))
    path = file(tmp_path, data)
    if method is not None:
        path = file(tmp_path, build([Member("tensor.npy", data, method=method)]), "a.npz")
    (tensor,) = formats.read(path).tensors
    reason = "float32 [2] takes 8 bytes, but 7 follow the header: truncated; copy or download the file again"
    assert (tensor.dtype, tensor.shape, tensor.data) == ("float32", (2,), None)
    assert tensor.damage == f"{path}: tensor: {reason}"
    assert formats.read(path).oddities == ()
    code, out, err = inspect(path)
    assert (code, err) == (2, f"statecli: {tensor.damage}\n")
    assert "[2]" in out


def test_elements_without_bytes_are_read(tmp_path):
    """numpy can save an array of a few elements that have no bytes."""
    (tensor,) = formats.read(save_npz(tmp_path, a=numpy.empty(3, "V0"))).tensors
    assert (tensor.dtype, tensor.shape, tensor.damage) == ("numpy V0", (3,), None)


@pytest.mark.parametrize("dtype", [numpy.longdouble, numpy.clongdouble], ids=["real", "complex"])
def test_longdouble_is_compared_by_its_bytes(dtype, tmp_path, statecli):
    """The number of bytes depends on the machine; a lock has their digest, and a diff reports other values."""
    zeros, changed = numpy.zeros(3, dtype), numpy.zeros(3, dtype)
    changed[1] = 1
    for name, array in (("first", zeros), ("same", zeros), ("other", changed)):
        (tmp_path / name).mkdir()
        save_npz(tmp_path / name, a=array, b=numpy.ones(2))
    first, same, other = (str(tmp_path / name / "arrays.npz") for name in ("first", "same", "other"))
    tensor = formats.read(first).tensors[0]
    assert tensor.dtype == f"numpy {numpy.dtype(dtype).name}"
    assert read_stored_bytes(tensor) == zeros.tobytes()
    lock = str(tmp_path / "lock.json")
    assert statecli("lock", first, "-o", lock).code == 0
    assert statecli("audit", same, "--lock", lock).code == statecli("diff", first, same).code == 0
    assert statecli("diff", first, other).code == 1
    assert statecli("inspect", first, "--stats").code == 0


@pytest.mark.parametrize("code", ["U2", "m8[s]", "M8[D]", "f16"])
def test_swapped_byte_order_changes_the_elements(tmp_path, statecli, code):
    """numpy swaps text, times and long numbers as well."""
    elements = numpy.frombuffer(numpy.array([98, 99] * 4, "<i4").tobytes(), f"<{code}")
    arrays = {"a": elements, "b": numpy.frombuffer(elements.tobytes(), f">{code}"), "c": elements.astype(f">{code}")}
    for name, array in arrays.items():
        numpy.save(tmp_path / f"{name}.npy", array)
    first_path, swapped_path, same_path = (str(tmp_path / f"{name}.npy") for name in arrays)
    # statecli compares no numbers of 16 bytes.
    assert statecli("diff", first_path, swapped_path).code == (2 if code == "f16" else 1)
    assert statecli("diff", first_path, same_path).code == (2 if code == "f16" else 0)


def test_record_that_is_not_an_array_is_damage(tmp_path):
    """The name alone does not make a record an array."""
    path = file(tmp_path, build([Member("a.npy", b"x"), Member("b.npy", npy(format_header(), bytes(8)))]), "a.npz")
    assert "a: is not a numpy array" in formats.read(path).tensors[0].damage


def test_bytes_after_an_array_are_reported(tmp_path):
    """numpy ignores the bytes after an array."""
    data = npy(format_header(), bytes(11))
    npy_state = formats.read(file(tmp_path, data))
    npz_state = formats.read(file(tmp_path, build([Member("a.npy", data)]), "a.npz"))
    assert [oddity.message for oddity in npy_state.oddities] == ["3 bytes follow the array: numpy.load ignores them"]
    assert [oddity.message for oddity in npz_state.oddities] == ["3 bytes follow the array a: numpy.load ignores them"]
    assert {oddity.name for oddity in (*npy_state.oddities, *npz_state.oddities)} == {"suffixed"}


# Damaged archives.

ARRAY = npy(format_header(), bytes(8))


def test_false_decompressed_size_is_damage(tmp_path, inspect):
    """An array that decompresses to another size than in the directory is damaged when its values are read."""
    for size in (len(ARRAY) - 1, len(ARRAY) + 1, 2**31):
        path = file(tmp_path, build([Member("a.npy", ARRAY, method=8, size=size)]), "a.npz")
        code, _, err = inspect(path, "--stats")
        assert (code, err.count("\n")) == (2, 1)


def test_array_that_does_not_decompress_is_damage(tmp_path):
    """The header of the array cannot be read."""
    path = file(tmp_path, build([Member("a.npy", ARRAY, method=8, packed=b"\xff" * 40)]), "a.npz")
    assert "a: cannot be decompressed: the file is damaged" in formats.read(path).tensors[0].damage


def test_a_bomb_is_not_inflated(tmp_path, monkeypatch):
    """16 MiB of zeros are compressed: statecli decompresses only as many bytes as a header may have."""
    monkeypatch.setattr(npz, "MAX_VERIFIED_BYTES", 2**24)
    bomb = npy(format_header(shape=f"({2**22},)"), bytes(2**24))
    path = file(tmp_path, build([Member("a.npy", bomb, method=8)]), "a.npz")
    lengths = []
    head = npz._read_head
    monkeypatch.setattr(
        npz, "_read_head", lambda record, source, length: lengths.append(length) or head(record, source, length)
    )
    (tensor,) = formats.read(path).tensors
    assert (tensor.shape, lengths) == ((2**22,), [npy_array.USUAL_HEADER_BYTES])


def test_a_flipped_bit_is_found(tmp_path, inspect):
    """The checksum covers the array's whole file, stored or deflated."""
    for method in (0, 8):
        data = bytearray(build([Member("a.npy", ARRAY, method=method, crc=1)]))
        code, _, err = inspect(file(tmp_path, bytes(data), "a.npz"), "--stats")
        assert code == 2
        assert "a.npy: checksum wrong: " in err
        assert "recorded 00000001" in err


@pytest.mark.parametrize("packed", [False, True])
def test_every_flipped_bit_of_a_header_is_found(tmp_path, packed):
    """A header with another dtype or shape of the same size is not listed: the checksum of zip covers the header."""
    path = save_npz(tmp_path, packed, a=numpy.arange(8, dtype="<f4").reshape(2, 4))
    data = Path(path).read_bytes()
    start = data.index(b"a.npy") + 5 + 20
    unfound_flips = []
    for position in range(start, start + (60 if packed else 128)):
        for bit in (1, 2, 8):
            flipped = bytearray(data)
            flipped[position] ^= bit
            try:
                (row,) = formats.read(file(tmp_path, bytes(flipped), "b.npz")).tensors
            except UnreadableError:
                continue
            if not row.damage:
                assert (row.dtype, row.shape) == ("float32", (2, 4)), (position, bit)
                unfound_flips.append(flipped)
    # Other deflated bits may inflate to the same bytes.
    assert len(unfound_flips) == packed


def test_a_header_that_contradicts_its_size_is_checked_in_any_archive(tmp_path, monkeypatch):
    """The checksum is verified even if the archive is beyond the limit for checksums."""
    monkeypatch.setattr(npz, "MAX_VERIFIED_BYTES", 0)
    path = save_npz(tmp_path, a=numpy.zeros((2, 400), "<f4"))
    data = Path(path).read_bytes()
    (row,) = formats.read(file(tmp_path, data.replace(b"(2, 400)", b"(2, 300)"), "b.npz")).tensors
    assert "checksum wrong" in row.damage
    (row,) = formats.read(path).tensors
    assert (row.shape, row.damage) == ((2, 400), None)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            [Member("a.npy", ARRAY), Member("a.npy", ARRAY)],
            "two records are named 'a.npy'; programs may read either record",
        ),
        ([Member("a.npy", ARRAY, method=12)], "'a.npy' is compressed with bzip2, which statecli cannot unpack"),
        ([Member("a.npy", ARRAY, flags=1)], "'a.npy' is encrypted, and statecli cannot decrypt it"),
        ([Member("a.npy", ARRAY, offset=10**6)], "is outside the archive"),
    ],
    ids=["twice", "bzip2", "encrypted", "elsewhere"],
)
def test_a_damaged_archive_is_refused(tmp_path, line, members, expected):
    """After these defects no record of the archive can be trusted."""
    assert expected in line(file(tmp_path, build(members), "a.npz"))


def test_names_that_differ_only_by_case_are_an_oddity(tmp_path):
    """The archive has two arrays, which are the same file on some systems."""
    state = formats.read(file(tmp_path, build([Member("a.npy", ARRAY), Member("A.npy", ARRAY)]), "a.npz"))
    assert [tensor.fqn for tensor in state.tensors] == ["a", "A"]
    assert [oddity.name for oddity in state.oddities] == ["case-only-names"]


def test_paths_in_names_are_not_followed(tmp_path):
    """A path is part of the name, and is not followed."""
    names = ["../../etc/passwd", "/abs", "a/b", "", ".npy", "x.npy", "a\nb", "é"]
    state = formats.read(file(tmp_path, build([Member(f"{name}.npy", ARRAY) for name in names]), "a.npz"))
    assert [tensor.fqn for tensor in state.tensors] == names


def test_other_files_in_the_archive_are_noted(tmp_path):
    """The other files are named: a library of another format may load them."""
    members = [Member("a.npy", ARRAY), Member("notes.txt", b"x"), Member("b.pkl", pickle.dumps(1))]
    (oddity,) = formats.read(file(tmp_path, build(members), "a.npz")).oddities
    assert (oddity.name, oddity.message) == (
        "unused-records",
        "statecli did not read files in the archive that are not arrays: notes.txt, b.pkl",
    )


@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
def test_an_array_without_the_suffix_is_an_array(tmp_path, method):
    """numpy.load decides by the first bytes of a record, not by its name."""
    members = [Member("w.npy", ARRAY), *(Member(name, ARRAY, method=method) for name in ("bias", "b.txt", "folder/x"))]
    path = file(tmp_path, build([*members, Member("cut", ARRAY[:5]), Member("none", b"")]), "a.npz")
    state = formats.read(path)
    with numpy.load(path) as loaded:
        names = [name for name in loaded.files if isinstance(loaded[name], numpy.ndarray)]
        assert [tensor.fqn for tensor in state.tensors] == names
        for tensor in state.tensors:
            assert numpy.array_equal(read_all_values(tensor.data).reshape(tensor.shape), loaded[tensor.fqn])
    assert [oddity.message for oddity in state.oddities] == [
        "statecli did not read files in the archive that are not arrays: cut, none"
    ]


@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
def test_damaged_array_without_the_suffix_spoils_no_other(tmp_path, method):
    """The record begins as an array, so that numpy.load fails on the record."""
    members = [Member("w.npy", ARRAY), Member("bias", npy(format_header(), bytes(7)), method=method)]
    first, second = formats.read(file(tmp_path, build(members), "a.npz")).tensors
    assert (first.damage, "truncated" in second.damage) == (None, True)


def test_torch_archive_with_an_added_array_stays_torch(tmp_path):
    """An added array does not turn the archive into an archive of numpy."""
    path = file(tmp_path, build([*records(), Member("archive/a.npy", ARRAY)]), "a.pt")
    assert formats.read(path).format == "torch-zip"


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
def test_every_beginning_is_refused(tmp_path, packed, line):
    """A download may stop at any byte."""
    with open(save_npz(tmp_path, packed, a=numpy.ones(3), b=numpy.arange(4)), "rb") as source:
        content = source.read()
    for end in range(len(content)):
        with pytest.raises(UnreadableError):
            formats.read(file(tmp_path, content[:end], "cut.npz"))


@given(st.binary(max_size=100))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_after_the_magic_are_read_or_refused(tmp_path, data):
    """Any bytes are read, or refused in one line."""
    for version in (b"\1\0", b"\2\0", b"\3\0", b""):
        (tmp_path / "any.npy").write_bytes(b"\x93NUMPY" + version + data)
        read_or_refuse(tmp_path / "any.npy")


@given(st.text(alphabet="(){}[],:'\"0129LTrueFalsdc<f4 \\", max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_header_text_is_read_or_refused(tmp_path, text):
    """Any text in a header is read, or refused in one line."""
    (tmp_path / "any.npy").write_bytes(npy(text, bytes(8)))
    read_or_refuse(tmp_path / "any.npy")


def test_a_second_archive_inside_the_zip64_end_record_is_refused(tmp_path):
    """Python's zipfile takes the end record in front of the locator; the locator points to the first end record."""
    mark = tmp_path / "ran"
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.array([Call(Path.touch, mark)], dtype=object), allow_pickle=True)
    honest = build([Member("weight.npy", npy(format_header(), bytes(8)))])
    ends = 20 + 22  # the locator and the old end record
    hidden = build([Member("weight.npy", buffer.getvalue())])[:-ends]
    record = len(honest) - ends - 56
    length = struct.pack("<Q", 44 + len(hidden))
    forged = honest[: record + 4] + length + honest[record + 12 : -ends] + hidden + honest[-ends:]
    path = file(tmp_path, forged, "a.npz")
    numpy.load(path, allow_pickle=True)["weight"]
    assert mark.exists()
    with pytest.raises(
        UnreadableError, match=r"zip archive is damaged: its second end record \(zip64\) is not at byte"
    ):
        formats.read(path)
    assert any("pathlib.Path.touch" in name.qualified for pickle in scan_pickles(path) for name in pickle.names)


DUPLICATE_NAMES = {
    "bare name after": ("w.npy", "w"),
    "bare name before": ("w", "w.npy"),
    "suffix twice": ("w.npy", "w.npy.npy"),
}


@pytest.mark.parametrize("name", DUPLICATE_NAMES)
def test_two_records_of_one_name_are_unreadable(tmp_path, name):
    """numpy gives the record with the bare name for both records."""
    first, second = DUPLICATE_NAMES[name]
    ones_file, zeros_file = io.BytesIO(), io.BytesIO()
    numpy.save(ones_file, numpy.ones(3))
    numpy.save(zeros_file, numpy.zeros(3))
    path = file(tmp_path, build([Member(first, ones_file.getvalue()), Member(second, zeros_file.getvalue()),
                                 Member("v.npy", ones_file.getvalue())]), "a.npz")  # fmt: skip
    fqn = min((first, second), key=len)
    with numpy.load(path) as loaded:
        state = formats.read(path)
        rows = {row.fqn: row for row in state.tensors}
        assert state.oddities == ()  # both records are arrays
        assert numpy.array_equal(loaded[fqn], numpy.ones(3) if first == fqn else numpy.zeros(3))
    assert (
        f"two records have the same array name ('{fqn}' and '{fqn}.npy'), so numpy.load returns only one of them"
        in rows[fqn].damage
    )
    assert rows[fqn].data is None
    for other in rows.keys() - {fqn}:
        assert not rows[other].damage
