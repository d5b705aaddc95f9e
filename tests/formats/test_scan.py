"""The scan of a file's pickles: every name that unpickling would import, wherever the pickle is, within limits."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import pickle
import random
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import save_file

from statecli import formats
from statecli.core.errors import MalformedError
from statecli.file_scan import compressed_records, scan as _scan
from statecli.file_scan.scan import scan_pickles
from statecli.pickle_scan.one_pickle import FIRST_WINDOW_BYTES, begins_as_pickle
from statecli.pickle_scan.step_budget import Budget
from statecli.pickles import machine
from statecli.storage.byte_source import ByteSource

from .attacks import (
    Call,
    Member,
    build,
    build_pickle,
    call_function,
    global_name,
    legacy,
    number,
    records,
    short,
    state_dict,
    tensor,
    text,
)
from .test_pickle import BOMBS
from .torch_archives import write_archive

SYSTEM = call_function(global_name("os", "system"), text("touch PWNED"))


@pytest.fixture
def scan_bytes(tmp_path):
    """Return the findings for the pickles of a file with these bytes."""

    def scan(data):
        (tmp_path / "file").write_bytes(data)
        return scan_pickles(str(tmp_path / "file"))

    return scan


def names(pickles):
    """Return all names of all pickles."""
    return {name.qualified for pickle in pickles for name in pickle.names}


class Recording:
    """Records the names that an unpickler would import. Nothing is imported: an inert class stands for each name."""

    def __init__(self, *args, **kwargs):
        self.seen = set()
        super().__init__(*args, **kwargs)

    def find_class(self, module, name):
        self.seen.add(f"{module}.{name}")
        return type("Inert", (_Inert,), {})

    def persistent_load(self, pid):
        return _Inert()


class _Inert:
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return _Inert()

    append = extend = add = __setitem__ = __setstate__ = __call__


class CUnpickler(Recording, pickle.Unpickler):
    """The usual unpickler, in C."""


class PythonUnpickler(Recording, pickle._Unpickler):
    """The unpickler in Python, from which the C unpickler was made."""


def list_imports(data, unpickler):
    """Return the names that this unpickler imports before its end or its error."""
    reader = unpickler(io.BytesIO(data))
    # A hostile stream may fail with any exception; the imports before the exception count.
    with contextlib.suppress(Exception):
        reader.load()
    return reader.seen


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary(max_size=9)
)
objects = (
    st.builds(Fraction, st.integers())
    | st.builds(Decimal, st.integers())
    | st.builds(UUID, int=st.integers(0, 2**128 - 1))
    | st.builds(timedelta, st.integers(-9, 9))
    | st.dates()
    | st.builds(PurePosixPath, st.sampled_from(["a", "b/c"]))
    | st.sampled_from([OrderedDict, Counter, defaultdict, np.float32, PurePosixPath, date, print, len])
    | st.builds(np.float64, st.floats(allow_nan=False))
    | st.builds(deque, st.lists(st.integers(), max_size=2))
    | st.builds(complex, st.floats(allow_nan=False))
)
values = st.recursive(
    plain | objects,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(OrderedDict)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(values, st.sampled_from(range(6)))
@example(2.1703873502658385e-153, 1)  # its ninth byte is that of a safetensors header
@settings(max_examples=100)
def test_names_of_an_honest_pickle_equal_its_imports(tmp_path_factory, value, protocol):
    """Both sets of names are equal in every protocol."""
    data = pickle.dumps(value, protocol)
    path = tmp_path_factory.getbasetemp() / "honest"
    path.write_bytes(b"\x80\x02" + data if protocol < 2 else data)
    (actual, *others) = scan_pickles(str(path))
    assert not others
    assert actual.unread is None
    assert names([actual]) == list_imports(data, CUnpickler)


PIECES = [
    b"(",
    b"t",
    b"l",
    b"d",
    b"R",
    b"b",
    b"o",
    b"0",
    b"1",
    b"2",
    b"s",
    b"u",
    b"a",
    b"e",
    b"Q",
    b"\x81",
    b"\x85",
    b"\x86",
    b"\x87",
    b"\x90",
    b"\x91",
    b"\x92",
    b"\x93",
    b"\x94",
    b"\x8f",
    b"]",
    b"}",
    b")",
    b"N",
    b"\x88",
    b"K\x01",
    b"q\x00",
    b"q\x07",
    b"h\x00",
    b"h\x01",
    b"h\x07",
    b"p1\n",
    b"g1\n",
    b"p 2\n",
    b"g2\n",
    b"I0x10\n",
    b"I01\n",
    b"L5L\n",
    b"F1.5\n",
    b"Vmm\n",
    b"S'nn'\n",
    b"U\x02oo",
    b"\x8a\x01\x05",
    b"C\x01a",
    b"\x95" + struct.pack("<Q", 0),
    b"Pid\n",
    b"iold\nClass\n",
    global_name("first", "One"),
    global_name("second", "a.b.Two"),
    short("module") + short("Name") + b"\x93",
    text("third") + text("Three") + b"\x93",
]


#: More pieces that leave a value on the stack, or have a name that a scan could miss.
WEIGHTED = PIECES + 3 * [piece for piece in PIECES if len(piece) > 6] + 4 * [b"N", b")", b"}", b"("]


@given(st.sampled_from([b"", b"(NNN", b"NNNNN(N", b"](", b"}("]), st.lists(st.sampled_from(WEIGHTED), max_size=30))
@settings(max_examples=100)
def test_scan_knows_every_name_that_unpicklers_import(tmp_path_factory, begin, pieces):
    """For any opcodes in any order, the scan knows each name that either unpickler imports."""
    data = b"\x80\x04" + global_name("zeroth", "Zero") + begin + b"".join(pieces) + b"."
    path = tmp_path_factory.getbasetemp() / "hostile"
    path.write_bytes(data)
    findings = scan_pickles(str(path))
    imports = list_imports(data, CUnpickler) | list_imports(data, PythonUnpickler)
    assert imports <= names(findings)


def test_name_after_an_inst_opcode_is_read(scan_bytes):
    """INST takes its arguments after the mark, and its result is in front of the mark again."""
    data = build_pickle(b"N(N" + b"iold\nClass\n" + b"\x86" + global_name("first", "One"))
    assert names(scan_bytes(data)) == {"old.Class", "first.One"} == list_imports(data, CUnpickler)


def test_name_after_data_that_statecli_refuses_is_found(scan_bytes):
    """Both unpicklers import a name after data that the machine refuses; the scan does not stop there."""
    data = (
        b"\x80\x04"
        + global_name("zeroth", "Zero")
        + b"N}"
        + text("a")
        + number(1)
        + b"s\x86b"
        + global_name("first", "One")
        + b"."
    )
    assert list_imports(data, CUnpickler) == list_imports(data, PythonUnpickler) == {"zeroth.Zero", "first.One"}
    with pytest.raises(MalformedError):
        machine.read_pickle(data)
    assert names(scan_bytes(data)) == {"zeroth.Zero", "first.One"}


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_random_bytes_are_scanned_without_an_error(tmp_path_factory, data):
    """A file, a record, and the bytes after a protocol are scanned without an exception."""
    path = tmp_path_factory.getbasetemp() / "bytes"
    for content in (data, b"\x80\x04" + data, b"PK\3\4" + data, build([*records(), Member("archive/x.pkl", data)])):
        path.write_bytes(content)
        scan_pickles(str(path))


@given(st.data())
@settings(max_examples=100)
def test_pickle_of_a_damaged_archive_is_scanned(tmp_path_factory, data):
    """Any byte outside of the pickle and its local header may change: the name is found."""
    archive = build(records(state_dict(w=tensor(), x=SYSTEM)))
    position = data.draw(st.integers(archive.index(b"archive/.format"), len(archive) - 1))
    damaged = archive[:position] + bytes([archive[position] ^ data.draw(st.integers(1, 255))]) + archive[position + 1 :]
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged)
    assert "os.system" in names(scan_pickles(str(path)))


def test_name_has_the_offset_of_its_byte(scan_bytes):
    """The byte counts from the start of the pickle, and the place of the pickle counts from the start of the file."""
    data = build(records(state_dict(w=tensor(), x=SYSTEM)))
    (finding,) = scan_bytes(data)
    mention = next(name for name in finding.names if name.module == "os")
    assert finding.exact
    assert data[finding.place.offset + mention.position :].startswith(b"cos\nsystem\n")
    assert mention.called


def test_compressed_pickle_has_the_place_of_its_record(scan_bytes):
    """The bytes of the decompressed pickle are not in the file."""
    members = records(state_dict(w=tensor(), x=SYSTEM))
    members[0].method = 8
    data = build(members)
    (finding,) = scan_bytes(data)
    assert not finding.exact
    content = data[finding.place.offset : finding.place.offset + finding.place.length]
    assert content == members[0].content


def test_every_pickle_of_a_legacy_file_is_read(scan_bytes):
    """A legacy file has five pickles, each reported with its first byte."""
    actual = scan_bytes(legacy(state_dict(w=tensor(), x=SYSTEM), [("0", 4, bytes(16))]))
    assert len(actual) == 5
    assert "os.system" in names(actual[3:4])
    assert actual[3].where == f"the file, the pickle at byte {actual[3].place.offset}"


def test_a_pickle_longer_than_a_window_is_read_whole(scan_bytes):
    """A legacy file does not record the length of its pickles."""
    big = {f"layer.{n}.weight": n for n in range(20_000)}
    data = pickle.dumps(big, 2)[:-1] + b"0" + SYSTEM + b"."
    (actual,) = scan_bytes(data)
    assert actual.unread is None
    assert names([actual]) == {"os.system"}
    assert actual.place.length == len(data) > 100_000


LONG_LINE_REPEATS = 70_000
CALL = b"cos\nsystem\n(S'true'\ntR."
LONG_LINES = {
    "a module": b"cos." + b"a" * LONG_LINE_REPEATS + b"\nsystem\n(S'true'\ntR.",
    "a name": b"cos\n" + b"s" * LONG_LINE_REPEATS + b"\n(S'true'\ntR.",
    "an instance": b"(S'true'\ni" + b"os." + b"a" * LONG_LINE_REPEATS + b"\nsystem\n.",
    "an integer": b"I" + b"0" * LONG_LINE_REPEATS + b"1\n0" + CALL,
    "an integer with underscores": b"L" + b"1_" * LONG_LINE_REPEATS + b"1L\n0" + CALL,
    "a long integer": b"L" + b"7" * LONG_LINE_REPEATS + b"L\n0" + CALL,
    "a hexadecimal one": b"I0x" + b"f" * LONG_LINE_REPEATS + b"\n0" + CALL,
    "a float": b"F" + b"0" * LONG_LINE_REPEATS + b".5\n0" + CALL,
    "bytes": b"S'" + b"a" * LONG_LINE_REPEATS + b"'\n0" + CALL,
    "a text of three megabytes": b"V" + b"a" * 3_000_000 + b"\n0" + CALL,
    "a memo entry": b"cos\nsystem\np" + b"0" * LONG_LINE_REPEATS + b"1\n0g1\n(S'true'\ntR.",
    "an outer object": b"P" + b"a" * LONG_LINE_REPEATS + b"\n0" + CALL,
}


@pytest.mark.parametrize("name", LONG_LINES)
def test_a_line_of_any_length_is_read(tmp_path, name):
    """A name, a number or a text longer than a window does not hide the opcodes after the line: the call is found.

    A walk sees the pickle too: a file that begins like text is read until its lines end.
    """
    path = tmp_path / "model.dat"
    path.write_bytes(LONG_LINES[name])
    (finding,) = scan_pickles(str(path))
    assert finding.unread is None
    (mention,) = finding.names
    assert (mention.module.partition(".")[0], mention.name[:1], mention.called) == ("os", "s", True)
    with ByteSource(str(path)) as source:
        assert begins_as_pickle(source)


@pytest.mark.parametrize("start", [b"I0\n0", b"\x80\x02"], ids=["text", "protocol"])
def test_a_character_across_the_end_of_a_window_does_not_end_the_pickle(tmp_path, start):
    """The first window ends inside of a name; the name without its last byte ends inside of a character."""
    head = start + b"N0" * 30_000 + b"ctorch.ops\n"
    name = b"a" * (FIRST_WINDOW_BYTES - 2 - len(head)) + "é".encode()
    path = tmp_path / "model.dat"
    path.write_bytes(head + name + b"a\n0cos\nsystem\n(S'id'\ntR.")
    (finding,) = scan_pickles(str(path))
    assert finding.unread is None
    assert ("os", "system", True) in [(mention.module, mention.name, mention.called) for mention in finding.names]
    with ByteSource(str(path)) as source:
        assert begins_as_pickle(source)


@pytest.mark.parametrize("text", [b"I1,", b"cos,", b"F0,", b"{", b"S", b"V(I", b"I am ", b"0"], ids=ascii)
@pytest.mark.parametrize("end", [b"", b"\n", b"\n1\n"], ids=ascii)
def test_long_line_of_text_is_not_a_pickle(tmp_path, text, end):
    """A table, numbers or a document in a single line are not a pickle."""
    path = tmp_path / "notes.dat"
    path.write_bytes(text + text * LONG_LINE_REPEATS + end)
    with ByteSource(str(path)) as source:
        assert not begins_as_pickle(source)


#: Incomplete pickles of printable text that call nothing by an opcode: their changes of an object run methods.
_TEXT_PICKLES = {
    "a state of a function": b"cshutil\nwhich\n(dS'__setstate__'\ncos\nsystem\nsbS'touch PWNED'\nb~",
    "an item of an imported object": b"cos\nenviron\nS'PWNED'\nS'1'\ns~",
    "items of an imported object": b"cos\nenviron\n(S'PWNED'\nS'1'\nu~",
    "an element of an imported object": b"csys\npath_hooks\nS'PWNED'\na~",
    "a state of a class": b"ccollections\nUserList\n(dS'__init_subclass__'\ncos\nsystem\nsb~",
}


@pytest.mark.parametrize("pickled", _TEXT_PICKLES.values(), ids=list(_TEXT_PICKLES))
def test_text_pickle_that_changes_an_import_fails_the_audit(tmp_path, pickled, statecli, forked_python):
    """A pickle with `touch` writes PWNED when torch loads the file; a sound model next to the pickle is no excuse."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "checkpoint.pth.tar").write_bytes(pickled)
    forked_python("import torch; torch.load('checkpoint.pth.tar', weights_only=False)", cwd=tmp_path)
    assert (tmp_path / "PWNED").exists() == (b"touch" in pickled)
    assert statecli("audit", str(tmp_path)).code == 2


def _persistent_id(text: str) -> bytes:
    """Return a persistent id for which torch returns its second part, a text."""
    return b"(" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in ("module", text, "", "")) + b"tQ"


_NUMBER = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_EQUAL_NUMBERS = {
    "a decimal": pickle.dumps(Decimal(0x1950A86A20F9469CFC6C), 2),
    "a number below another": b"N0" + _NUMBER,
    "a number in msgpack": b"\x8a\xa4" + b"k000\xc5\1\0".ljust(164, b"\0") + b"0" + _NUMBER,
}


def test_an_import_of_a_computed_name_is_not_harmless(tmp_path, statecli):
    """The bytes do not begin like a pickle, but the ids of a loader may return any text."""
    payload = b"N0" + _persistent_id("posix") + _persistent_id("system") + b"\x93" + b"."
    (tmp_path / "a.bin").write_bytes(payload)
    (finding,) = scan_pickles(str(tmp_path / "a.bin"))
    assert "the name of an imported function or class is computed during loading" in (finding.unread or "")


@pytest.mark.parametrize(
    ("name", "code"), [("model.pt", 2), ("model.pkl", 1), ("features.npy", 1), ("weights.msgpack", 2)]
)
def test_import_by_the_name_of_another_import_fails_the_audit(tmp_path, name, code, statecli, forked_python):
    """`posix.__name__` is a text. The import by the text comes first, so that the bytes look like text."""
    pickled = b"cbuiltins\n__name__\nVopen\n\x93(VPWNED\nVw\ntR."
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    flax = b"\x8c\xa1a\xc5\x80\x20" + (b"x" * 157 + pickled).ljust(0x8020) + b"\xa1b\xc0"
    (tmp_path / name).write_bytes(flax if name.endswith("msgpack") else pickled)
    forked_python(f"import pickle; pickle.load(open('{name}', 'rb'))", cwd=tmp_path)
    assert (tmp_path / "PWNED").exists()
    assert statecli("audit", tmp_path / name).code == code
    assert statecli("audit", tmp_path).code == code


@pytest.mark.parametrize(
    ("first", "name"),
    [
        *((first, "model.pt") for first in _EQUAL_NUMBERS),
        ("a number below another", "model.pkl"),
        ("a number in msgpack", "model.msgpack"),
    ],
)
def test_a_number_equal_to_the_magic_number_begins_a_legacy_file(tmp_path, first, name, statecli, forked_python):
    """torch compares the first object with `!=`, and unpickles four more; its ids may return names for them."""
    payload = _persistent_id("builtins") + _persistent_id("open") + b"\x93\x8c\x05PWNED\x8c\x01w\x86R."
    (tmp_path / name).write_bytes(_EQUAL_NUMBERS[first] + b"M\xe9\x03." + b"}." + payload + b"].")
    forked_python(f"import torch; torch.load('{name}', weights_only=False)", cwd=tmp_path)
    assert (tmp_path / "PWNED").exists()
    assert statecli("audit", tmp_path / name).code == (1 if name == "model.pkl" else 2)


_UNUSUAL_MODULES = ("lib-dynload", "évil", "7zip", "two words")


@pytest.mark.parametrize("module", _UNUSUAL_MODULES)
@pytest.mark.parametrize("magic", [b"L119547037146038801333356L\n.", b""], ids=["legacy in text", "bare"])
def test_import_of_an_unusual_module_name_is_reported(tmp_path, module, magic, statecli, forked_python):
    """`import` accepts names that are not identifiers. The pickle runs in torch, and audit reports its import."""
    (tmp_path / f"{module}.py").write_text("def run(path): open(path, 'w')\n")
    protocol = b"I1001\n.}." if magic else b""
    call = b"\x8c" + bytes([len(module.encode())]) + module.encode() + b"\x8c\x03run\x93\x8c\x05PWNED\x85R"
    (tmp_path / "model.pt").write_bytes(magic + protocol + b"N0" * (not magic) + call + b"0}." + b"]." * bool(magic))
    load = "torch.load('model.pt', weights_only=False)" if magic else "pickle.load(open('model.pt', 'rb'))"
    forked_python(f"import pickle, sys, torch; sys.path.insert(0, '.'); {load}", cwd=tmp_path)
    assert (tmp_path / "PWNED").exists()
    result = statecli("audit", str(tmp_path))
    assert result.code == (1 if magic else 2)
    assert f"{module}.run" in result.out
    (tmp_path / "model.pt").rename(tmp_path / ".metadata")  # torch.distributed.checkpoint unpickles this file
    assert statecli("audit", str(tmp_path)).code == 2


#: A call of a name with a blank, because `torch.ops` has an attribute of any text; the pickle is then incomplete.
_BROKEN_CALL = (
    b"\x80\x04"
    + (text("torch") + text("ops.a b.__class__.__getattr__.__globals__.get") + b"\x93")
    + (text("__builtins__") + b"\x85R0")
    + (text("two words") + text("run") + b"\x93" + text("PWNED") + b"\x85R\xff")
)


def test_safetensors_file_that_is_also_a_pickle_fails_the_audit(tmp_path, statecli, forked_python):
    """The length of the header begins with BINUNICODE, whose text ends within the header. torch runs the pickle."""
    (tmp_path / "two words.py").write_text("def run(path): open(path, 'w')\n")
    size = 64 * 64 * 4
    start = b'{"__metadata__":{"format":"pt","a":"'
    weight = json.dumps({"dtype": "F32", "shape": [64, 64], "data_offsets": [0, size]}).encode()
    length = 3 + len(start)
    header = (start + b'V"},"weight":' + weight + b"}").ljust(0x58 + 256 * length - 1) + b"\n"
    data = bytes([0x58, length]) + bytes(6) + header + _BROKEN_CALL.ljust(size, b"\0")
    (tmp_path / "model.pt").write_bytes(data)
    load = "torch.load('model.pt', weights_only=False)"
    code = f"import contextlib, sys, torch; sys.path.insert(0, '.')\nwith contextlib.suppress(Exception): {load}"
    forked_python(code, cwd=tmp_path)
    assert (tmp_path / "PWNED").exists()
    result = statecli("audit", str(tmp_path / "model.pt"))
    assert result.code == 1
    assert "two words.run" in result.out


@pytest.mark.parametrize("name", [".metadata", "weights", "notes.txt", "second.pkl"])
def test_incomplete_pickle_with_a_call_fails_in_any_file(tmp_path, statecli, name):
    """The file may have any name, the pickle may be incomplete, or may be the second pickle of the file."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    first = pickle.dumps({"a": 1}) if name == "second.pkl" else b""
    (tmp_path / name).write_bytes(first + b"N0" + _BROKEN_CALL)
    assert statecli("audit", str(tmp_path)).code == (2 if name == ".metadata" else 1)


def test_import_without_a_call_is_reported(tmp_path, statecli):
    """`ctypes.cdll` loads a library for each attribute; here as the third pickle of a legacy file in text."""
    name = text("ctypes") + text("cdll./tmp/library") + b"\x93."
    (tmp_path / "model.pt").write_bytes(b"L119547037146038801333356L\n.I1001\n.\x80\x04" + name + b"\x80\x04}.].")
    result = statecli("audit", str(tmp_path / "model.pt"))
    assert result.code == 1
    assert "ctypes.cdll" in result.out


def test_text_that_begins_like_an_import_is_clean(tmp_path, statecli):
    """A list of packages, a file of ignored names, and a heading are not pickles."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    texts = ("click\nnumpy\npandas\n", "cache/\nbuild\n.venv\n", "cafés\nnaïf\nc\n", "contents\n====\n.. x\n")
    for position, content in enumerate(texts):
        (tmp_path / f"{position}.txt").write_text(content)
    assert statecli("audit", str(tmp_path)).code == 0


def test_empty_blocks_do_not_hide_an_array_of_objects(tmp_path, statecli):
    """numpy decompresses any number of empty blocks before the data."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    body = b"\0\0\0\xff\xff" * 14_000 + deflate.compress(buffer.getvalue()) + deflate.flush()
    plain = io.BytesIO()
    np.save(plain, np.ones(1))
    members = [Member("a.npy", plain.getvalue()), Member("data/x", buffer.getvalue(), method=8, packed=body)]
    (tmp_path / "e.npz").write_bytes(build(members))
    assert np.load(tmp_path / "e.npz", allow_pickle=True)["data/x"][0] == {"a": 1}
    result = statecli("audit", str(tmp_path / "e.npz"))
    assert "data/x" in result.out


def test_code_that_zlib_does_not_inflate_is_reported(tmp_path, statecli):
    """torch decompresses with another library, which accepts data that zlib refuses; `.PY` is code for torch too."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        members = [Member(name, archive.read(name)) for name in archive.namelist()]
    folder = members[0].name.partition("/")[0]
    for name, code in ((f"{folder}/code/__torch__/data/x.PY", 1), (f"{folder}/data/x", 2)):
        invalid_member = Member(name, b"x", method=8, packed=b"\xfd\xff" * 20)
        (tmp_path / "model.pt").write_bytes(build([*members, invalid_member]))
        result = statecli("audit", str(tmp_path / "model.pt"))
        assert (result.code, "unscanned-pickle" in result.out) == (code, True)
    assert statecli("audit", str(tmp_path / "whole.pt")).code == 0


def test_ordered_dict_from_a_dict_is_reported(tmp_path, statecli):
    """torch loads `OrderedDict([{key: 0, value: 0}])` by default; an OrderedDict of a number is not listed either."""
    ordered_dict = b"ccollections\nOrderedDict\n"
    pair = b"}(" + text("best_model_path") + b"K\0" + text("local:///tmp/x") + b"K\0u"
    state = ordered_dict + b"]" + pair + b"a\x85R"
    callbacks = b"}" + text("callbacks") + b"}" + text("ModelCheckpoint") + state + b"ss"
    (tmp_path / "a.ckpt").write_bytes(build(records(build_pickle(callbacks))))
    result = statecli("audit", str(tmp_path / "a.ckpt"))
    assert result.code == 1
    assert "is a dict whose entries are computed during loading" in result.out
    (tmp_path / "b.ckpt").write_bytes(build(records(build_pickle(b"}" + text("a") + ordered_dict + b"K\1\x85Rs"))))
    result = statecli("audit", str(tmp_path / "b.ckpt"))
    assert "is a dict whose entries are computed during loading" in result.out


def test_getattr_of_a_name_is_the_longer_name(scan_bytes):
    """pickle writes a nested class this way before protocol 4; getattr itself is then not reported."""
    getattr_ = global_name("__builtin__", "getattr")
    assert names(scan_bytes(build_pickle(call_function(getattr_, global_name("m", "Outer"), text("Inner"))))) == {
        "m.Outer",
        "m.Outer.Inner",
    }
    opaque = build_pickle(call_function(getattr_, call_function(global_name("m", "f")), text("Inner")))
    assert "__builtin__.getattr" in names(scan_bytes(opaque))
    combined_pickle = build_pickle(
        call_function(getattr_, global_name("m", "Outer"), text("Inner")) + b"0" + opaque[2:-1]
    )
    assert "__builtin__.getattr" in names(scan_bytes(combined_pickle))


def test_getattr_with_a_default_is_not_taken_for_a_name(scan_bytes):
    """The result depends on the attributes that exist."""
    data = build_pickle(
        call_function(global_name("builtins", "getattr"), global_name("m", "Outer"), text("Inner"), b"N")
    )
    assert names(scan_bytes(data)) == {"builtins.getattr", "m.Outer"}


def test_the_shards_of_an_index_are_scanned(tmp_path):
    """The shards are scanned for the index and for its folder; other files are not part of the checkpoint."""
    for name, body in (("model-00001-of-00001.bin", b"N"), ("other.pkl", SYSTEM)):
        (tmp_path / name).write_bytes(build(records(state_dict(w=tensor(), x=body))))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"w": "model-00001-of-00001.bin"}}')
    for target in (tmp_path, index):
        assert [finding.place.path for finding in scan_pickles(str(target))] == [
            str(tmp_path / "model-00001-of-00001.bin")
        ]


@pytest.mark.parametrize("name", ["x.INDEX.JSON", "x.index.a.b.json", "ds_checkpoint.json", "model.safetensors", "x"])
def test_an_index_of_any_name_has_shards(tmp_path, name):
    """The reader recognises an index by content, also as the weights of a folder."""
    (tmp_path / "w.bin").write_bytes(build(records(state_dict(w=tensor(), x=SYSTEM))))
    (tmp_path / name).write_text('{"weight_map": {"w": "w.bin"}}')
    for target in (tmp_path / name, *([tmp_path] if name == "model.safetensors" else [])):
        assert {finding.place.path for finding in scan_pickles(str(target))} == {str(tmp_path / "w.bin")}
        assert [row.fqn for row in formats.read(str(target)).tensors] == ["w"]


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    """A path that leaves the folder is not followed."""
    (tmp_path / "a.pkl").write_bytes(build_pickle(SYSTEM))
    (tmp_path / "in").mkdir()
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "../a.pkl"}}')
    assert scan_pickles(str(index)) == ()


def test_metadata_file_with_an_unusual_start_is_scanned(tmp_path):
    """torch always unpickles `.metadata`, so that a module is imported even if the pickle is incomplete."""
    (tmp_path / ".metadata").write_bytes(b"N0cevil_module\nx\n\xff")
    (finding,) = scan_pickles(str(tmp_path / ".metadata"))
    assert names([finding]) == {"evil_module.x"}
    assert "unknown opcode 0xff" in finding.unread


def test_an_array_of_joblib_is_not_called_damage(scan_bytes):
    """joblib writes the array after its wrapper, into the pickle."""
    (finding,) = scan_bytes(b"\x80\x04" + global_name("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81\x0b\xff")
    assert "joblib writes the data of an array" in finding.unread


@pytest.mark.parametrize("arguments", [b"](K\x01e", b"}", text("ab"), global_name("m", "x"), b"\x8f"], ids=repr)
@pytest.mark.parametrize("opcode", [b"R", b"\x81", b"}\x92"], ids=["REDUCE", "NEWOBJ", "NEWOBJ_EX"])
def test_call_arguments_that_are_not_a_tuple_are_reported(scan_bytes, opcode, arguments):
    """The unpickler in Python, which joblib, dill and pandas use, calls the function with the elements."""
    (finding,) = scan_bytes(
        b"\x80\x04" + global_name("numpy.random._pickle", "__generator_ctor") + arguments + opcode + b"."
    )
    misuses = [name.misuse for name in finding.names if name.name == "__generator_ctor"]
    assert "is called by the pickle with an object instead of a tuple of arguments" in misuses[0]


@pytest.mark.parametrize("name", ["epoch_12.metadata", ".metadata", "__0.metadata"])
@pytest.mark.parametrize("wrap", [records, lambda body: body])
def test_file_name_of_metadata_does_not_hide_a_hazard(tmp_path, name, wrap):
    """Any loader reads a file of any name; only the Metadata of torch.distributed.checkpoint has no other loader."""
    path = tmp_path / name
    data = {"w": torch.ones(1), "numpy": ("MT19937", list(range(624)), 2**30)}
    if wrap is records:
        torch.save(data, tmp_path / "archive.pt")
        (tmp_path / "archive.pt").rename(path)
    else:
        path.write_bytes(pickle.dumps({**data, "w": None}, 2))
    assert any(hazard.is_error for pickled in scan_pickles(str(path)) for hazard in pickled.hazards)


def test_the_data_of_metadata_is_not_walked(tmp_path):
    """The Metadata of a large checkpoint has hundreds of thousands of chunks."""
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    data = metadata.Metadata({}, planner_data={"numpy": ("MT19937", list(range(624)), 2**30)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(data, 2))
    (scanned,) = scan_pickles(str(tmp_path / ".metadata"))
    assert not scanned.hazards


@pytest.mark.parametrize(
    "content", [b"", b"cats\nand dogs\n", b"can\nyou\n(see)\n.", b"{}", bytes(1000), b"\x89PNG\r\n"]
)
def test_other_content_has_no_pickle(content, scan_bytes):
    """Text may begin with the letter of an opcode."""
    assert scan_bytes(content) == ()


def test_text_in_a_checkpoint_is_not_a_pickle(scan_bytes):
    """A prompt or a note may begin like an opcode."""
    notes = ["cats\nand\ndogs", "(a) first\n(b) second\n", "c\nd\ne.", "I am\nhere.", "]\n}"]
    (actual,) = scan_bytes(
        build(records(state_dict(w=tensor(), **{f"n{n}": text(note) for n, note in enumerate(notes)})))
    )
    assert names([actual]) <= {"torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "collections.OrderedDict"}


def test_missing_file_has_no_pickle(tmp_path):
    """The reader of the tensors reports the missing file."""
    assert scan_pickles(str(tmp_path / "missing")) == ()


def test_inflation_bomb_is_reported_as_unread(scan_bytes, monkeypatch):
    """2 MB of one opcode are compressed to 2 kB; no more than the limit is inflated."""
    sizes = []

    class Inflater:
        def __init__(self, bits):
            self.inflater = zlib.decompressobj(bits)

        def decompress(self, data, max_bytes=0):
            sizes.append(len(inflated := self.inflater.decompress(data, max_bytes)))
            return inflated

        @property
        def eof(self):
            return self.inflater.eof

    recording = SimpleNamespace(decompressobj=Inflater, MAX_WBITS=zlib.MAX_WBITS, error=zlib.error)
    monkeypatch.setattr(compressed_records, "zlib", recording)
    monkeypatch.setattr(compressed_records, "MAX_INFLATED_BYTES", 100_000)
    members = records(b"]" * 2_000_000)
    members[0].method = 8
    findings = scan_bytes(build(members))
    assert any("unpacks to more than" in (finding.unread or "") for finding in findings)
    assert 100_000 <= max(sizes) <= 100_001
    assert sum(sizes) < 200_000


def test_nested_pickles_have_a_depth_limit(scan_bytes):
    """A string in a string in a string: the scan reports its last level."""
    data = build_pickle(SYSTEM)
    for _ in range(8):
        data = build_pickle(b"B" + struct.pack("<I", len(data)) + data)
    actual = scan_bytes(data)
    assert "are nested more than 4" in actual[-1].unread
    assert len(actual) == 2


def test_number_of_strings_has_a_limit(scan_bytes, monkeypatch):
    """A file with more strings than the limit is reported as read in part."""
    monkeypatch.setattr(Budget.PIECES, "limit", 10)
    strings = b"".join(b"B" + struct.pack("<I", 8) + build_pickle(b"]0NNN") + b"0" for _ in range(20))
    actual = scan_bytes(build_pickle(strings + b"N"))
    assert actual[-1].unread == (
        "statecli stopped the scan at its limit of 10 records and strings, and did not read the rest of the file"
    )


def test_code_is_read_before_many_storages(scan_bytes, monkeypatch):
    """A limit on records hides no call in the code of the same archive."""
    monkeypatch.setattr(Budget.PIECES, "limit", 10)
    code = Member("a/code/__torch__.py", b"def f(x):\n  t = torch.from_file('/etc/passwd')\n  return t\n")
    storages = [Member(f"a/data/{n}", b"x" * 80) for n in range(20)]
    actual = scan_bytes(build([*storages, code]))
    assert any(mention.name == "from_file" for finding in actual for mention in finding.names)
    assert (
        actual[-1].unread
        == "statecli stopped the scan at its limit of 10 records and strings, and did not read the rest of the file"
    )


def test_unread_rest_of_many_pickles_is_reported(scan_bytes):
    """After many empty pickles comes a call: the scan reports that the end was not read."""
    row = scan_bytes(b"N." * 100 + SYSTEM + b".")
    assert [finding.unread is not None for finding in row] == [True]
    assert scan_bytes(b"N." * 20 + b"\1\2") == ()


def test_number_of_opcodes_has_a_limit(scan_bytes, monkeypatch):
    """The limit covers all pickles together."""
    monkeypatch.setattr(Budget.OPCODES, "limit", 200_000)
    actual = scan_bytes(build([Member(f"a/{n}.pkl", build_pickle(b"N0" * 60_000 + b"N")) for n in range(5)]))
    assert len(actual) == 3
    assert [finding.unread is not None for finding in actual] == [False, True, True]
    assert actual[-1].unread == (
        "statecli stopped the scan at its limit of 200,000 pickle instructions, and did not read the rest of the file"
    )


#: (beginning, repeated opcodes): each repetition takes as long as a call, in three or four opcodes.
SLOW_OPCODES = {
    "a key that is a tuple": (b"}", b"K\1\x85Ns"),
    "a key that is an object": (call_function(global_name("m", "c")) + b"q\0}", b"h\0Ns"),
    "a key that Python refuses": (b"]q\0}", b"h\0Ns"),
    "an item of an object": (call_function(global_name("m", "c")), b"NNs"),
    "a state of an object": (call_function(global_name("m", "c")), b"Nb"),
}


@pytest.mark.parametrize(("begin", "unit"), SLOW_OPCODES.values(), ids=SLOW_OPCODES)
def test_slow_opcodes_count_as_calls(begin, unit, scan_bytes, monkeypatch):
    """A compressed record of 40 KB has ten million opcodes, which would take minutes."""
    monkeypatch.setattr(Budget.CALLS, "limit", 1000)
    (finding,) = scan_bytes(build_pickle(begin + unit * 1002))
    assert finding.unread.startswith("statecli stopped the scan at its limit of 1,000 calls")
    assert all(finding.unread is None for finding in scan_bytes(build_pickle(begin + unit * 400)))


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_bombs_are_scanned_like_ordinary_pickles(data, scan_bytes):
    """A pickle that hangs or crashes an unpickler is scanned in a moment, and is freed without a crash.

    The slowest takes 2 s of CPU on a machine of two cores; a time proportional to the square of the length would be
    hours.
    """
    gc.freeze()  # the collection below covers the objects of the scan, not the libraries
    start_time = time.process_time()
    scan_bytes(data)
    assert time.process_time() - start_time < 10
    gc.collect()


def test_a_scan_imports_neither_pickle_nor_torch(tmp_path):
    """The scan does not import the modules that the file names either."""
    (tmp_path / "a.pt").write_bytes(
        build(records(state_dict(w=tensor(), x=call_function(global_name("wave", "open")))))
    )
    code = f"""
        import sys
        from statecli.file_scan.scan import scan_pickles
        assert len(scan_pickles({str(tmp_path / "a.pt")!r})) == 1
        assert not set(sys.modules) & {{"pickle", "_pickle", "torch", "numpy", "wave"}}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_payload_of_the_tests_runs_when_unpickled(tmp_path):
    """Unpickled in a separate process, a payload writes its file: tests that find no file could have found a file."""
    (tmp_path / "a.pkl").write_bytes(build_pickle(SYSTEM))
    code = "import pickle; pickle.load(open('a.pkl', 'rb'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "PWNED").exists()


def test_a_real_checkpoint_has_one_pickle(tmp_path):
    """The records of its storages are scanned and are not pickles, whatever their first bytes are."""
    begins = torch.tensor([0x80, 2, 0x5D, 0x2E] + [0] * 60, dtype=torch.uint8)
    torch.save({"w": begins, "v": torch.randn(100)}, tmp_path / "a.pt")
    findings = scan_pickles(str(tmp_path / "a.pt"))
    assert [finding.where for finding in findings] == ["a/data.pkl"]


def test_equal_pickles_are_reported_at_each_place(scan_bytes):
    """Equal pickles are read once; their imports are reported in every archive."""
    harmful, harmless = build(records(state_dict(w=tensor(), x=SYSTEM))), build(records())
    data = harmless + harmful + harmless + harmful
    actual = [finding for finding in scan_bytes(data) if "os.system" in names([finding])]
    assert [finding.place.offset for finding in actual] == [
        data.index(b"\x80\x02", position) for position in (len(harmless), len(harmless) * 2 + len(harmful))
    ]


def test_pickle_too_long_for_the_cache_is_read(scan_bytes, monkeypatch):
    """A pickle too long for the cache is scanned, and a pickle is scanned when the cache is full."""
    monkeypatch.setattr(_scan, "MAX_CACHED_PICKLES", 1)
    long_archive = build(records(state_dict(w=tensor(), x=text("a" * 5000))))
    harmful = build(records(state_dict(w=tensor(), x=text("a" * 5000), y=SYSTEM)))
    assert "os.system" in names(scan_bytes(build(records()) + long_archive + harmful))
    assert "os.system" in names(scan_bytes(build(records()) + build(records(state_dict(w=tensor(), x=SYSTEM)))))


def _write_archive(data_pkl: bytes, storage: bytes) -> bytes:
    """Return an archive of torch's writer with the storage as its first record, at byte 64."""
    stream = io.BytesIO()
    write_archive({"data/0": storage, "data.pkl": data_pkl, "byteorder": b"little"}, stream)
    return stream.getvalue()


def _write_two_archives(harm: object) -> bytes:
    """Return two harmless archives.

    Read as a single archive, they end in the records of a third archive, which is hidden in a storage of the first.
    """
    harmful = pickle.dumps(((harm,), {}), 2)
    harmless = pickle.dumps(("x" * (len(harmful) - len(pickle.dumps(("", {}), 2))), {}), 2)
    last, hidden = _write_archive(harmless, bytes(64)), _write_archive(harmful, bytes(64))
    return _write_archive(harmless, hidden[64:-98] + bytes(4096)) + last  # 98 bytes: the end records


@pytest.mark.parametrize("record", ["data/sample_inputs/model.pt", "data/constants/custom_obj_0"])
def test_two_archives_in_a_record_fail_the_audit(tmp_path, record, statecli):
    """torch.load takes the last end record and counts from the first byte; the oracle is torch.load."""
    mark = tmp_path / "ran"
    two_archives = _write_two_archives(Call(exec, f"open({str(mark)!r}, 'w')"))
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("a/archive_format", "pt2")
        archive.writestr(f"a/{record}", two_archives)
    assert any(finding.unread for finding in scan_pickles(str(tmp_path / "a.pt2")))
    assert statecli("audit", str(tmp_path / "a.pt2")).code == 2
    assert not mark.exists()
    torch.load(io.BytesIO(two_archives), weights_only=False)
    assert mark.exists()


def test_two_archives_in_a_file_fail_the_audit(tmp_path, statecli):
    (tmp_path / "a").write_bytes(_write_two_archives(Call(exec, f"open({str(tmp_path / 'ran')!r}, 'w')")))
    assert any(finding.unread for finding in scan_pickles(str(tmp_path / "a")))
    assert statecli("audit", str(tmp_path / "a")).code == 2


def test_two_archives_in_an_item_fail_the_audit(tmp_path, statecli, monkeypatch):
    """The item is beyond the number of items that the reader of tensors opens."""
    from torch.distributed.checkpoint import metadata as dcp_metadata, save as save_dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = tmp_path / "ckpt"
    save_dcp({"w": torch.ones(4), "k": "text"}, checkpoint_id=folder, no_dist=True)
    two_archives = _write_two_archives(Call(exec, f"open({str(tmp_path / 'ran')!r}, 'w')"))
    (folder / "__1_0.distcp").write_bytes(two_archives)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    text = next(place for index, place in metadata.storage_data.items() if index.fqn == "k")
    monkeypatch.setattr("statecli.formats.dcp.MAX_ITEMS", 20)
    for n in range(20):
        item = f"k{n:04}"
        metadata.state_dict_metadata[item] = dcp_metadata.BytesStorageMetadata()
        metadata.planner_data[item] = (item,)
        place = _StorageInfo("__1_0.distcp", 0, len(two_archives)) if n == 19 else text
        metadata.storage_data[dcp_metadata.MetadataIndex(item)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert any(finding.unread for finding in scan_pickles(str(folder)))
    assert statecli("audit", str(folder)).code == 1


def test_archive_folder_with_a_nul_fails_the_audit(tmp_path, statecli, forked_python):
    """torch looks up each record by the text before the NUL: a single record is version, list of modules and module."""
    mark = tmp_path / "ran"
    array = io.BytesIO()
    np.save(array, np.ones(3, np.float32))
    code = f'1\n"""\nos\n"""\nimport os\nopen({str(mark)!r}, "w")\n'.encode()
    records = [(b"A\0B/w.npy", array.getvalue()), (b"A\0B/m.py\0.npy", array.getvalue()), (b"A", code)]
    body = directory = b""
    for name, data in records:
        sizes = struct.pack("<IIIH", zlib.crc32(data), len(data), len(data), len(name))
        position, head = len(body), struct.pack("<HHHHH", 20, 0, 0, 0, 0)
        body += b"PK\3\4" + head + sizes + b"\0\0" + name + data
        directory += b"PK\1\2\x14\0" + head + sizes + bytes(12) + struct.pack("<I", position) + name
    end = struct.pack("<HHHHIIH", 0, 0, len(records), len(records), len(directory), len(body), 0)
    (tmp_path / "a.pt").write_bytes(body + directory + b"PK\5\6" + end)
    assert any("NUL" in (finding.unread or "") for finding in scan_pickles(str(tmp_path / "a.pt")))
    assert statecli("audit", str(tmp_path / "a.pt"), "--fail-on", "error").code == 1
    assert not mark.exists()
    forked_python(f"import torch; torch.package.PackageImporter({str(tmp_path / 'a.pt')!r}).import_module('m')")
    assert mark.exists()


def test_graph_of_a_pickle_is_freed_without_the_collector(tmp_path):
    """No object of 16,000 waits for the garbage collector, even if the first window ended inside the pickle."""
    path = tmp_path / "dates.pkl"
    path.write_bytes(pickle.dumps([date(2000 + n % 1000, 1, 1 + n % 28) for n in range(8000)]))
    assert path.stat().st_size > FIRST_WINDOW_BYTES
    gc.collect()
    gc.disable()
    try:
        (scanned,) = scan_pickles(str(path))
        unreachable = gc.collect()
    finally:
        gc.enable()
    assert [mention.name for mention in scanned.names] == ["date"]
    assert unreachable < 1000


@pytest.mark.parametrize("first_byte", b"ci\x82\x83\x84\x95NC]")
def test_random_bytes_in_a_pickle_are_not_a_pickle(first_byte, tmp_path):
    """A digest, a state of a generator or an array may begin with any opcode."""
    generator = random.Random(first_byte)  # noqa: S311
    strings = [bytes([first_byte]) + generator.randbytes(1000) for _ in range(2000)]
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(strings, 4))
    (scanned,) = scan_pickles(str(tmp_path / "x.pkl"))
    assert not scanned.names


@pytest.mark.parametrize("end", [b".", b"", b"\xff"])
def test_call_of_an_extension_code_is_reported_in_a_damaged_pickle(end, tmp_path):
    """The call runs before the data breaks off. Picklers write the protocol before an extension code."""
    for start, is_reported in ((b"\x80\4", True), (b"", end == b".")):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("notes", start + b"\x82\7)R" + end)
        names = [mention.name for scanned in scan_pickles(str(tmp_path / "x.npz")) for mention in scanned.names]
        assert names == ["_inverted_registry[7]"] * is_reported


@pytest.mark.parametrize("data", [b"c\xe9vil\nx\n(", b"cevil\n\xe9\n(", b"(i\xc3\xa9vil\nx\n("])
def test_name_that_is_not_text_is_not_imported(data, tmp_path):
    """Both unpicklers decode the name first, so that text in Latin-1 is not a pickle."""
    for load in (pickle.loads, pickle._loads):
        with pytest.raises(UnicodeDecodeError):
            load(data)
    (tmp_path / "x.dat").write_bytes(data)
    assert not scan_pickles(str(tmp_path / "x.dat"))
