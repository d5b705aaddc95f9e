"""Bytes computed by a pickle are reported: a loader may unpickle them, and the scan reads only literals."""

from __future__ import annotations

import _codecs
import array
import pickle
from collections import deque

import numpy
import pytest
import torch
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from statecli.file_scan.scan import scan_pickles

from .attacks import Call, Called

#: A pickle that runs code.
HIDDEN_PICKLE = b"\x80\x04cbuiltins\nexec\n(X\x05\x00\x00\x00a = 1tR."


NUMBERS = list(HIDDEN_PICKLE)
COMPUTED_BYTES = {
    "bytes of numbers": Call(bytes, NUMBERS),
    "bytes of a tuple": Call(bytes, tuple(NUMBERS)),
    "bytes of a deque": Call(bytes, deque(NUMBERS)),
    "a bytearray of numbers": Call(bytearray, NUMBERS),
    "bytes of a bytearray": Call(bytes, Call(bytearray, NUMBERS)),
    "text in UTF-16": Call(_codecs.encode, "a\u0463b", "utf-16-le"),
    "text in UTF-8": Call(_codecs.encode, "torch.float32", "utf-8"),
    "bytes of a text in UTF-16": Call(bytes, "a\u0463b", "utf-16-le"),
    "an array of bytes": Call(array.array, "B", NUMBERS),
    "a tensor of numbers": Call(torch.ByteTensor, NUMBERS),
    "a tensor of a tuple": Call(torch.CharTensor, tuple(number % 128 for number in NUMBERS)),
    "a tensor of large numbers": Call(torch.LongTensor, [1, 2, 3]),
    "a tensor of a bytearray": Call(torch.ByteTensor, bytearray(HIDDEN_PICKLE)),
    "a storage of numbers": Call(torch.UntypedStorage, NUMBERS),
    "a tensor of a tensor": Call(torch.ByteTensor, torch.tensor(NUMBERS, dtype=torch.uint8)),
    "a tensor of a storage": Call(torch.ByteTensor, torch.tensor(NUMBERS, dtype=torch.uint8).untyped_storage()),
    "bytes of numpy in UTF-16": Call(numpy.bytes_, "a\u0463b", "utf-16-le"),
    "a text in UTF-16": Call(str, b"aabb", "utf-16-le"),
    "text in another spelling of the codec": Call(_codecs.encode, "torch.float32", "latin-1"),
    "text in ASCII": Call(_codecs.encode, "torch.float32", "ascii"),
    "bytes of bytes": Call(bytes, HIDDEN_PICKLE),
    "an array of bytes of bytes": Call(array._array_reconstructor, array.array, "H", 3, Call(bytes, b"abcd")),
    "a record of numpy": Call(numpy.void, tuple(NUMBERS), ",".join(["u1"] * len(NUMBERS))),
    "a record of bytes": Call(numpy.void, [b"a", b"b"]),
    "numbers of numpy": Call(numpy.float64, [1.0, 2.0]),
    "a cast of an array": Call(numpy.uint8, numpy.arange(3)),
    "a masked array of numbers": Call(numpy.ma.MaskedArray, [1.0, 2.0]),
    "a size of a bytearray": Call(torch.Size, bytearray(HIDDEN_PICKLE)),
    "a size of a tensor": Call(torch.Size, torch.tensor([1, 2])),
    "an array of a deque": Call(array.array, "Q", deque([1])),
}


def swap(size):
    """Return the hidden pickle with the bytes of each number in reverse order."""
    return b"".join(PADDED_PICKLE[position : position + size][::-1] for position in range(0, len(PADDED_PICKLE), size))


#: Arrays as picklers write them: their bytes in memory are the hidden pickle, their bytes in the file are not.
PADDED_PICKLE = HIDDEN_PICKLE + b"." * (-len(HIDDEN_PICKLE) % 16)
ROWS = numpy.frombuffer(PADDED_PICKLE, "u1").reshape(8, -1)
ARRAYS = {
    **{f"numpy {code}": numpy.frombuffer(swap(size), f">{code}") for code, size in [("u2", 2), ("i8", 8), ("f8", 8)]},
    "numpy c16": numpy.frombuffer(swap(8), ">c16"),
    "numpy rows": numpy.asfortranarray(ROWS),
    "numpy columns": numpy.asfortranarray(ROWS.reshape(-1, 8)),
    "numpy cube": numpy.asfortranarray(ROWS.reshape(2, 2, 2, -1)),
    "numpy rows in the other order": numpy.asfortranarray(numpy.frombuffer(swap(2), ">u2").reshape(4, -1)),
    **{f"array {code}": array.array(code, PADDED_PICKLE) for code in "HIQlqd"},
    "array of another machine": Call(array._array_reconstructor, array.array, "H", 3, swap(2)),
    "an ordered buffer": Call(
        numpy._core.numeric._frombuffer, ROWS.tobytes(order="F"), numpy.dtype("u1"), ROWS.shape, "F"
    ),
    "masked numpy u2": numpy.ma.masked_array(numpy.frombuffer(swap(2), ">u2")),
    "masked numpy rows": numpy.ma.masked_array(numpy.asfortranarray(ROWS)),
    "array of longer numbers": Call(array._array_reconstructor, array.array, "Q", 11, swap(8)),
}


#: Loads the array of each file, then its bytes.
LOAD_BYTES = """
import pickle, sys
for path in sys.argv[1:]:
    pickle.loads(pickle.load(open(path, "rb"))[0].tobytes())
"""


def is_reported(path):
    """Return whether the scan reports a misused function."""
    return any(mention.misuse for finding in scan_pickles(str(path)) for mention in finding.names)


@pytest.mark.parametrize("name", COMPUTED_BYTES)
def test_computed_bytes_are_reported(name, tmp_path, statecli):
    """The bytes are in a checkpoint and in a bare pickle of each protocol."""
    torch.save({"w": torch.ones(2), "x": COMPUTED_BYTES[name]}, tmp_path / "a.pt")
    assert is_reported(tmp_path / "a.pt")
    assert statecli("audit", tmp_path / "a.pt", "--no-config").code == 1
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps([COMPUTED_BYTES[name]], protocol))
        assert is_reported(tmp_path / "a.pkl"), protocol


@pytest.mark.parametrize("name", ARRAYS)
def test_bytes_of_an_array_are_scanned_as_in_memory(name, tmp_path, forked_python):
    """Python and numpy swap and order bytes when they unpickle; the bytes from `tobytes` are then a pickle."""
    paths = [tmp_path / f"{protocol}.pkl" for protocol in range(5)]
    for protocol, path in enumerate(paths):
        path.write_bytes(pickle.dumps([ARRAYS[name]], protocol))
    process = forked_python(LOAD_BYTES, *paths)
    assert process.returncode == 0, process.stderr
    for path in paths:
        assert any(mention.name == "exec" for finding in scan_pickles(str(path)) for mention in finding.names), path


@pytest.mark.parametrize("form", ["text", "bytes of bytes", "text of a text"])
def test_the_data_of_an_array_is_read_in_every_form(form, tmp_path, forked_python):
    """numpy accepts a Latin-1 text, which Python 2 wrote, and the result of a call as the data of an array."""
    data = {"text": swap(2).decode("latin-1"), "bytes of bytes": Call(bytes, swap(2))}
    data["text of a text"] = Call(str, data["text"])
    function, arguments, state = numpy.frombuffer(swap(2), ">u2").__reduce__()
    with_data = Called(function, arguments, (*state[:-1], data[form]))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([with_data], 4))
    process = forked_python("import pickle; pickle.loads(pickle.load(open('a.pkl', 'rb'))[0].tobytes())", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    names = [mention for finding in scan_pickles(str(tmp_path / "a.pkl")) for mention in finding.names]
    assert any(mention.name == "exec" or mention.misuse for mention in names)


APPENDS = b"(" + b"".join(b"K" + bytes([number]) for number in HIDDEN_PICKLE) + b"e"
SETITEMS = (
    b"("
    + b"".join(b"K" + bytes([offset]) + b"K" + bytes([number]) for offset, number in enumerate(HIDDEN_PICKLE))
    + b"u"
)
EMPTY, ZEROS = b"cbuiltins\nbytearray\n)R", b"cbuiltins\nbytearray\nK" + bytes([len(HIDDEN_PICKLE)]) + b"\x85R"
BYTEARRAY8 = b"\x96" + len(HIDDEN_PICKLE).to_bytes(8, "little") + bytes(len(HIDDEN_PICKLE))
CHANGED_BYTEARRAYS = {
    "appends": EMPTY + APPENDS,
    "append": EMPTY + b"".join(b"K" + bytes([number]) + b"a" for number in HIDDEN_PICKLE),
    "newobj": b"cbuiltins\nbytearray\n)\x81" + APPENDS,
    "setitems": ZEROS + SETITEMS,
    "bytearray8 and appends": b"\x96" + bytes(8) + APPENDS,
    "bytearray8 and setitems": BYTEARRAY8 + SETITEMS,
    "array and appends": b"carray\narray\nX\x01\x00\x00\x00B\x85R" + APPENDS,
}


@pytest.mark.parametrize("form", CHANGED_BYTEARRAYS)
def test_changed_bytearray_is_reported(form, tmp_path, forked_python):
    """Python calls extend and __setitem__ of the bytearray; the pickle in the bytearray runs."""
    (tmp_path / "a.pkl").write_bytes(b"\x80\x05]" + CHANGED_BYTEARRAYS[form] + b"a.")
    process = forked_python("import pickle; pickle.loads(bytes(pickle.load(open('a.pkl', 'rb'))[0]))", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert is_reported(tmp_path / "a.pkl")


def test_byte_order_that_is_not_text_is_reported(tmp_path):
    """numpy accepts bytes as the byte order."""
    function, arguments, state = numpy.frombuffer(swap(2), ">u2").__reduce__()
    data = pickle.dumps([Called(function, arguments, (*state[:-1], swap(2)))], 2)
    order = data.index(b"X\x01\x00\x00\x00>")
    for other_order in (b"c_codecs\nencode\nX\x01\x00\x00\x00>X\x06\x00\x00\x00latin1\x86R", b"N", b"K\x01"):
        (tmp_path / "a.pkl").write_bytes(data[:order] + other_order + data[order + 6 :])
        assert is_reported(tmp_path / "a.pkl")


def test_the_work_for_shared_numbers_is_bounded(tmp_path):
    """A list shared by many calls is not packed for each call."""
    numbers = [1] * 100_000
    shared = pickle.dumps([Call(array.array, "Q", numbers) for _ in range(2000)], 4)
    (tmp_path / "a.pkl").write_bytes(shared)
    (finding,) = scan_pickles(str(tmp_path / "a.pkl"))
    assert finding.unread is not None
    assert "at its limit" in finding.unread


def test_plain_bytes_of_picklers_are_not_reported(tmp_path):
    """Every protocol: empty and literal bytes, all values of a byte, tensors, storages and a size."""
    all_bytes = bytes(range(256))
    plain = [b"", b"a", all_bytes, bytearray(), bytearray(all_bytes), array.array("d", [1.0]), array.array("l", [7])]
    plain += [numpy.bytes_(b"a"), numpy.str_("a"), numpy.arange(9, dtype=">i4"), numpy.ones((3, 4), order="F")]
    plain += [array.array("H"), array.array("u", "text")]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(plain, protocol))
        assert not is_reported(tmp_path / "a.pkl"), protocol
    state = {"w": torch.ones(2), "s": torch.Size([2, 3]), "p": torch.nn.Parameter(torch.ones(1)), "d": torch.float16}
    state |= {
        "raw": all_bytes,
        "array": bytearray(all_bytes),
        "u": torch.ones(3).untyped_storage(),
        "n": torch.tensor(1),
    }
    torch.save(state, tmp_path / "a.pt")
    assert not is_reported(tmp_path / "a.pt")


def test_a_distributed_checkpoint_is_scanned_too(tmp_path, statecli):
    """An item of DCP is an archive of torch.save."""
    torch.save({"m": {"w": torch.ones(2)}}, tmp_path / "plain.pt")
    torch_save_to_dcp(tmp_path / "plain.pt", tmp_path / "dcp")
    (item,) = (tmp_path / "dcp").glob("*.distcp")
    assert statecli("audit", tmp_path / "dcp", "--no-config").code == 0
    torch.save({"x": COMPUTED_BYTES["a tensor of numbers"]}, item)
    assert statecli("audit", tmp_path / "dcp", "--no-config").code == 2
