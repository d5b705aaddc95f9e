"""Lines of protocol 0 that an unpickler accepts hide no call, wherever the pickle is.

Each pickle runs `touch` when loaded: the oracle loads the pickle in a separate process.
"""

from __future__ import annotations

import pickle
import struct
import zipfile

import pytest

from statecli.commands.audit.run import Request, audit
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickles.machine import Machine

from ..forked_python import run_python

CALL = b"0cposix\nsystem\n(S'touch PWNED'\ntR."
# Kind of the line -> opcodes that push a value.
LINES = {
    "a float with a NUL": b"F1\0\n",
    "a float with a NUL and other text": b"F-1e3\0other\n",
    "an integer with a NUL": b"I1\0other\n",
    "an integer of NULs": b"I\0\0\n",
    "an octal integer": b"I0777\n",
    "a long with a NUL": b"L1\0other\n",
    "a hexadecimal long": b"L0xffL\n",
    "a memo entry with a NUL": b"Np1\0other\n0g1\0else\n",
    "a memo entry with spaces": b"Np 1 \n0g+01\n",
    "a long integer with a NUL": b"I1\0" + b"x" * 5000 + b"\n",
}
OBJECTS = {
    "a field": b"[('a', '|O')]",
    "an array of a type": b"('|O', (1,))",
    "fields inside a field": b"[('a', [('b', '|O')])]",
    "a list in text": b"'i4,O'",
}
LOAD = "import pickle; pickle.load(open('x', 'rb'))"
LOAD_IN_PYTHON = "import pickle; pickle._Unpickler(open('x', 'rb')).load()"
LOAD_ARRAY = "import numpy; numpy.load('x', allow_pickle=True)"


#: Leaves 4 GiB of memory, and five seconds or 0.2 seconds of CPU time, to a process.
LIMIT_MEMORY = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
LIMIT = LIMIT_MEMORY + "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"
LIMIT_TIME = LIMIT_MEMORY + "import signal; signal.setitimer(signal.ITIMER_VIRTUAL, 0.2)\n"


def load(program, data, folder):
    """Load the bytes in another process; return whether the command in the bytes ran."""
    (folder / "x").write_bytes(data)
    run_python(["-c", LIMIT + program], "statecli", cwd=folder, timeout=30)
    return (folder / "PWNED").exists()


def array(descr, pickle):
    """Return a numpy file whose elements are the pickle."""
    header = b"{'descr': " + descr + b", 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + pickle


def rules_of(path):
    """Return the rules with a finding in an audit of the path."""
    return {finding.rule for target in audit(Request([str(path)])).targets for finding in target.findings}


@pytest.mark.parametrize("name", LINES)
def test_number_line_does_not_hide_a_call(name, tmp_path):
    """The C unpickler reads numbers to the first NUL."""
    assert load(LOAD, LINES[name] + CALL, tmp_path)
    assert "unsafe-global" in rules_of(tmp_path / "x")


@pytest.mark.parametrize("name", ["a float with a NUL", "an integer of NULs", "a memo entry with a NUL"])
def test_number_line_does_not_hide_a_call_in_a_folder_or_archive(name, tmp_path):
    """A file in a folder, and a record without a pickle's suffix, are scanned in the same way."""
    (tmp_path / "vocab.bin").write_bytes(LINES[name] + CALL)
    assert "unsafe-global" in rules_of(tmp_path)
    (tmp_path / "vocab.bin").unlink()
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("vocab", LINES[name] + CALL)
    assert "unsafe-global" in rules_of(tmp_path / "model.npz")


@pytest.mark.parametrize("descr", OBJECTS)
def test_array_of_objects_does_not_hide_a_call(descr, tmp_path):
    """numpy unpickles every type with objects, so an invalid line of a pickle is reported as unscanned."""
    data = array(OBJECTS[descr], b"F1\0\n" + CALL)
    assert load(LOAD_ARRAY, data, tmp_path)
    assert "unsafe-global" in rules_of(tmp_path / "x")
    (tmp_path / "x").write_bytes(array(OBJECTS[descr], b"Fno\n" + CALL))
    assert "unscanned-pickle" in rules_of(tmp_path / "x")


def test_a_name_without_its_newline_is_reported(tmp_path):
    """The unpickler in Python, which joblib uses, accepts a last line without a newline."""
    data = b"(S'touch PWNED'\niposix\nsystemX"
    assert load(LOAD_IN_PYTHON, data, tmp_path)
    assert "unsafe-global" in rules_of(tmp_path / "x")


def test_bytes_that_import_a_name_and_break_off_are_reported(tmp_path):
    """The import runs the module; a list of words with a similar beginning is text."""
    (tmp_path / "evil.py").write_text("open('PWNED', 'w')")
    data = b"cevil\nname\n\0"
    assert load("import sys; sys.path.insert(0, ''); " + LOAD, data, tmp_path)
    assert rules_of(tmp_path / "x") == {"local-module", "unscanned-pickle"}
    (tmp_path / "x").write_bytes(b"cat\ndog\nhorse\n")
    assert not rules_of(tmp_path / "x")


HASHES = b"}N" + b"".join(b"q" + bytes([n]) + b"0h" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
BOMBS = {
    "a memo entry": b"]r\xff\xff\xff\x7f.",
    "a memo entry in a line": b"(I1\nlp2000000000\n.",
    "a key that nests": HASHES + b"K\1s.",
    "a key that nests, in text": b"(dN" + b"".join(b"p%d\n0(g%d\ng%d\nt" % (n, n, n) for n in range(60)) + b"I1\ns.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_of_protocol_0_is_reported(name, tmp_path):
    """The pickle has no names and does not begin with PROTO; bytes after the pickle do not change the result."""
    oracle = f"import pickle\ntry: pickle.loads({BOMBS[name]!r})\nexcept MemoryError: open('PWNED', 'w')"
    process = run_python(["-c", LIMIT_TIME + oracle], "statecli", cwd=tmp_path, timeout=30)
    is_refused = "memo" in name  # Python refuses a large memo, and never ends with such a key
    assert (process.returncode < 0, (tmp_path / "PWNED").exists()) == (not is_refused, is_refused)
    for trailer in (b"", b"other"):
        (tmp_path / "vocab.bin").write_bytes(BOMBS[name] + trailer)
        assert "allocation-bomb" in rules_of(tmp_path)


def test_an_integer_with_a_leading_zero_is_octal():
    """The C unpickler reads INT with strtol: a shape of 0100 has 64 elements, not 100."""
    line = b"I010000000000\n."
    assert Machine(line, "data.pkl", fast=True, module_ids=False).parse_c_integer(line[1:-2], 1) == pickle.loads(line)
    for data in (line, b"I-017\n.", b"I 07\n.", b"I010\0z\n."):
        scanner = Scanner(data, "data.pkl")
        scanner.run(0)
        assert scanner.root == pickle.loads(data)
