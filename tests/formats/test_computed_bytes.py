"""Bytes that a pickle computes are reported: a loader may unpickle them, and the scan reads only literals."""

from __future__ import annotations

import _codecs
import array
import pickle
from collections import deque

import pytest
import torch
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from statecli.file_scan.scan import scan_pickles

#: A pickle that would run code.
HIDDEN = b"\x80\x04cbuiltins\nexec\n(X\x05\x00\x00\x00a = 1tR."


class Call:
    """A call of a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


NUMBERS = list(HIDDEN)
COMPUTED = {
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
    "a tensor of a bytearray": Call(torch.ByteTensor, bytearray(HIDDEN)),
    "a storage of numbers": Call(torch.UntypedStorage, NUMBERS),
}


def is_reported(path):
    """Whether the scan names a misused function, or an error."""
    return any(mention.misuse for one in scan_pickles(str(path)) for mention in one.names)


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_bytes_are_reported(name, tmp_path, statecli):
    """In a checkpoint, in a bare pickle of each protocol, and in a distributed checkpoint."""
    torch.save({"w": torch.ones(2), "x": COMPUTED[name]}, tmp_path / "a.pt")
    assert is_reported(tmp_path / "a.pt")
    assert statecli("audit", tmp_path / "a.pt", "--no-config").code != 0
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps([COMPUTED[name]], protocol))
        assert is_reported(tmp_path / "a.pkl"), protocol


def test_bytes_as_picklers_write_them_are_clean(tmp_path):
    """In every protocol: empty, literal, with all values of a byte; tensors and storages; a size."""
    whole = bytes(range(256))
    plain = [b"", b"a", whole, bytearray(), bytearray(whole), array.array("d", [1.0]), array.array("l", [7])]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(plain, protocol))
        assert not is_reported(tmp_path / "a.pkl"), protocol
    state = {"w": torch.ones(2), "s": torch.Size([2, 3]), "p": torch.nn.Parameter(torch.ones(1)), "d": torch.float16}
    state |= {"raw": whole, "array": bytearray(whole), "u": torch.ones(3).untyped_storage(), "n": torch.tensor(1)}
    torch.save(state, tmp_path / "a.pt")
    assert not is_reported(tmp_path / "a.pt")


def test_a_distributed_checkpoint_is_scanned_too(tmp_path, statecli):
    """An item of DCP is an archive of torch.save."""
    torch.save({"w": torch.ones(2), "x": COMPUTED["a tensor of numbers"]}, tmp_path / "a.pt")
    value = Call(torch.ByteTensor, NUMBERS)
    torch.save({"m": {"w": torch.ones(2)}}, tmp_path / "plain.pt")
    torch_save_to_dcp(tmp_path / "plain.pt", tmp_path / "dcp")
    (item,) = (tmp_path / "dcp").glob("*.distcp")
    assert statecli("audit", tmp_path / "dcp", "--no-config").code == 0
    torch.save({"x": value}, item)
    assert statecli("audit", tmp_path / "dcp", "--no-config").code != 0
