"""Both containers of torch.save: their input to the graph's reader, and the error line for each invalid container."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zlib
from dataclasses import dataclass

import pytest
import torch
from torch.utils.serialization import config

from statecli import formats
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import ByteRange
from statecli.formats import torch_legacy, torch_zip
from statecli.pickles.nodes import Pickle
from statecli.storage.byte_source import HEAD_BYTES, ByteSource, Window
from statecli.storage.checkpoint_names import LEGACY_MAGIC_NUMBER

from .attacks import (
    Member,
    build,
    build_pickle,
    change_record,
    legacy,
    number,
    records,
    state_dict,
    tensor,
    text,
    without,
)


@dataclass
class Contents:
    """Arguments that a container reader passes to `build_state`."""

    pickle: Pickle
    storages: dict[str, ByteRange]
    target: str
    format: str
    oddities: list[str]
    tensors: tuple[()] = ()


@pytest.fixture
def contents(tmp_path, monkeypatch):
    """Return a function that reads bytes with a container reader; the reader of the graph is replaced."""

    def record_contents(
        pickle, storages, *, target, format, traits, oddities, requested_section, reads_all_storages=False
    ):
        return Contents(pickle, dict(storages), target, format, [oddity.name for oddity in oddities])

    monkeypatch.setattr(torch_zip, "build_state", record_contents)
    monkeypatch.setattr(torch_legacy, "build_state", record_contents)

    def read(data: bytes, reader=torch_zip) -> Contents:
        path = tmp_path / "file"
        path.write_bytes(data)
        return reader.read(str(path))

    return read


def refusal_line(contents, data, reader=torch_zip) -> str:
    """Return the error line of a reader that refuses the data."""
    with pytest.raises(UnreadableError) as error:
        contents(data, reader)
    assert "\n" not in str(error.value)
    return str(error.value)


# The source.


def test_a_source_reads_by_position(tmp_path):
    """Size, head and any byte range of a source match the file."""
    (tmp_path / "x").write_bytes(bytes(range(256)) * 32)
    with ByteSource(str(tmp_path / "x")) as source:
        assert (source.size, len(source.head)) == (8192, HEAD_BYTES)
        assert source.read(250, 10) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])


@pytest.mark.parametrize("span", [0, 1, 10, 10_000])
def test_window_returns_the_bytes_of_its_source(tmp_path, span):
    """A window with any span returns the bytes of its source: forwards, backwards and at the end."""
    data = bytes(n * 7 % 256 for n in range(1000))
    (tmp_path / "x").write_bytes(data)
    with ByteSource(str(tmp_path / "x")) as source:
        window = Window(source, span)
        for position, length in [(0, 5), (3, 30), (999, 1), (500, 100), (501, 3), (0, 1000)]:
            assert window.read(position, length) == data[position : position + length]
        with pytest.raises(
            MalformedError,
            match=(
                "file is truncated: bytes 999 to 1001 are needed, but the file has 1000; copy or download the file "
                "again"
            ),
        ):
            window.read(999, 2)


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (-1, 2), (0, -1), (2**70, 1)])
def test_reading_past_the_end_is_malformed(tmp_path, offset, length):
    """Ranges outside the file are not clipped."""
    (tmp_path / "x").write_bytes(bytes(10))
    with ByteSource(str(tmp_path / "x")) as source, pytest.raises(MalformedError, match="file is truncated"):
        source.read(offset, length)


def test_file_that_shrinks_during_the_read_is_malformed(tmp_path):
    """The size is recorded when the file is opened; bytes that are missing later are an error, not filled in."""
    (tmp_path / "x").write_bytes(bytes(100))
    with ByteSource(str(tmp_path / "x")) as source:
        os.truncate(tmp_path / "x", 50)
        with pytest.raises(MalformedError, match="the file has 50"):
            source.read(0, 100)


@pytest.mark.parametrize(
    ("create_path", "line"),
    [
        (lambda path: None, "cannot be opened: no such file or directory"),
        (lambda path: path.mkdir(), "is a directory, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is reached by a link through /dev"),
    ],
)
def test_path_that_is_not_a_readable_file_is_refused(tmp_path, create_path, line):
    """Each path is refused when the source opens it."""
    create_path(tmp_path / "x")
    with pytest.raises(UnreadableError, match=re.escape(line)):
        ByteSource(str(tmp_path / "x"))


def test_name_with_nul_is_refused():
    """The operating system refuses the name before a file system is asked."""
    with pytest.raises(UnreadableError, match="NUL"):
        ByteSource("a\0b")


# The zip.


def test_valid_archive_is_read(contents):
    """A valid archive has a graph, a storage with its place and checksum, and no oddity."""
    data = build(records())
    result = contents(data)
    (storage,) = result.storages.values()
    assert data[storage.offset :][: storage.length] == bytes(range(16))
    assert storage.crc32 == zlib.crc32(bytes(range(16)))
    assert (storage.big_endian, result.format, result.oddities) == (False, "torch-zip", [])
    assert list(result.pickle.root) == ["w"]


#: Archives that torch reads like the good archive: older torch wrote fewer records, libtorch writes data.pkl last.
ORDINARY_ARCHIVES = {
    **{
        f"without {name}": build(without(name))
        for name in (".format_version", ".storage_alignment", "byteorder", ".data/serialization_id")
    },
    "a top folder without a name": build(records(folder="")),
    "records in reverse order": build(records()[::-1]),
    "a deflated data.pkl": build(change_record("data.pkl", method=8)),
}


@pytest.mark.parametrize("data", ORDINARY_ARCHIVES.values(), ids=ORDINARY_ARCHIVES)
def test_ordinary_archives_are_read_without_an_oddity(contents, data):
    """Missing records are normal, and little-endian is the default."""
    result = contents(data)
    assert (list(result.pickle.root), list(result.storages), result.oddities) == (["w"], ["0"], [])
    assert not result.storages["0"].big_endian


def test_byteorder_record_applies_to_storages(contents):
    """The byteorder record applies to every storage."""
    assert contents(build(change_record("byteorder", data=b"big"))).storages["0"].big_endian


def test_checksum_of_zero_means_not_recorded(contents):
    """A checksum of 0 means not recorded, except for an empty storage, whose checksum is 0."""
    result = contents(build([*change_record("data/0", crc=0), Member("archive/data/1", b"")]))
    assert (result.storages["0"].crc32, result.storages["1"].crc32) == (None, 0)


def test_archive_without_checksums_has_an_oddity(contents):
    """torch.save can be configured to write no checksums; Python's zipfile refuses the archive."""
    result = contents(build(change_record("data.pkl", crc=0)))
    assert result.oddities == ["no-checksums"]


UNUSUAL_ARCHIVES = {
    "suffixed": build(records(), suffix=b"x"),
    "pickle-trailing": build(records(state_dict(w=tensor()) + b"more")),
    "unused-storages": build([*records(), Member("archive/data/1", b"x")]),
    "unused-records": build([*records(), Member("archive/extra", b"x")]),
    "format-version": build(change_record(".format_version", data=b"2")),
}


@pytest.mark.parametrize(("name", "data"), UNUSUAL_ARCHIVES.items(), ids=UNUSUAL_ARCHIVES)
def test_unusual_archive_is_read_with_an_oddity(contents, name, data):
    """Archives that torch accepts are read, with an oddity."""
    result = contents(data)
    assert result.oddities == [name]
    assert list(result.pickle.root) == ["w"]


INVALID_ARCHIVES = {
    "no version": (build(without("version")), "contains no version record"),
    "a version in words": (
        build(records(version=b"three")),
        "the version record contains 'three'; expected a positive integer",
    ),
    "version 0": (build(records(version=b"0")), "the version record contains '0'"),
    "version 999": (build(records(version=b"999")), "the version record says 999: a newer torch wrote the file"),
    "a huge version": (
        build(records(version=b"9" * 5000)),
        "archive/version has 5,000 bytes, more than statecli's limit of 64",
    ),
    "byteorder middle": (build(change_record("byteorder", data=b"middle")), "byteorder record contains 'middle'"),
    "an unfinished save": (build(without("data.pkl")), "contains no data.pkl: the save did not finish"),
    "TorchScript": (
        build([*records(), Member("archive/constants.pkl", b"x")]),
        "is a program of TorchScript or torch.export",
    ),
    "torch.export": (
        build([Member("m/archive_format", b"pt2"), Member("m/version", b"0")]),
        "is a program of TorchScript or torch.export",
    ),
    "old torch.export": (
        build([Member("serialized_exported_program.json", b"{}")]),
        "is a program of TorchScript or torch.export",
    ),
    "another zip": (build([Member("word/document.xml", b"<a/>")]), "is a zip archive, but torch.save did not write it"),
    "an empty zip": (build([]), "is a zip archive, but torch.save did not write it"),
    "a decoy first": (
        build([Member("decoy/x", b"x"), *records()]),
        "its record data.pkl is not in the folder of the archive's first record",
    ),
    "two folders": (
        build([*records(), Member("other/data/0", b"x")]),
        "record 'other/data/0' is outside the archive's folder 'archive/'",
    ),
    "a record above": (
        build([*records(), Member("../evil", b"x")]),
        "record '../evil' is outside the archive's folder 'archive/'",
    ),
    "no folder at all": (
        build([Member("data.pkl", b"x"), Member("version", b"3")]),
        "its record data.pkl is not in the folder of the archive's first record",
    ),
    "a nested folder": (
        build(records(folder="a/b")),
        ("its record data.pkl is not in the folder of the archive's first record"),
    ),
    "a folder with a NUL": (build(records(folder="a\0b")), "'a\\x00b/', contains a NUL"),
    "a folder and a NUL": (build([*records(folder="a\0"), Member("a", b"3")]), "'a\\x00/', contains a NUL"),
    "a damaged pickle": (build(change_record("data.pkl", crc=1)), "archive/data.pkl: checksum wrong"),
    "a compressed storage": (
        build(change_record("data/0", method=8)),
        "'archive/data/0' is compressed; save the checkpoint again with torch",
    ),
    "an empty pickle": (build(records(b"")), "data.pkl is truncated"),
    "a pickle of protocol 9": (build(records(b"\x80\x09N.")), "data.pkl: pickle protocol 9"),
}


@pytest.mark.parametrize("case", INVALID_ARCHIVES.values(), ids=INVALID_ARCHIVES)
def test_invalid_archive_is_refused_in_one_line(contents, case):
    """Each archive is refused, and the line names the problem."""
    data, message = case
    assert message in refusal_line(contents, data)


def test_a_truncated_archive_is_malformed(contents):
    """An archive cut at any byte is refused as truncated, not taken for another kind of file."""
    data = build(records())
    for end in range(4, len(data)):
        assert "file is truncated: " in refusal_line(contents, data[:end])


@pytest.mark.parametrize(
    ("head", "is_zip"), [(b"PK\3\4", True), (b"PK\5\6", False), (b"PK", False), (b"", False), (b"\x80\2", False)]
)
def test_zip_is_recognised_by_its_first_bytes(head, is_zip):
    """A zip is a file that starts with a local header; torch checks no more than the header either."""
    assert torch_zip.sniff("x.safetensors", head) is is_zip


# The old stream.

ONE_TENSOR = state_dict(w=tensor())
STREAM = legacy(ONE_TENSOR, [("0", 4, bytes(range(16)))])


def test_valid_stream_is_read(contents):
    """A valid stream has a graph and a storage at the place of its bytes."""
    result = contents(STREAM, torch_legacy)
    (storage,) = result.storages.values()
    assert STREAM[storage.offset :][: storage.length] == bytes(range(16))
    assert (storage.crc32, storage.big_endian, result.format, result.oddities) == (None, False, "torch-legacy", [])


def test_storages_follow_the_list_and_not_the_object(contents):
    """The key list is sorted as text, whatever the order of the tensors."""
    pickle = state_dict(a=tensor("9", 2, (2,)), b=tensor("10", 3, (3,), kind="DoubleStorage"))
    data = legacy(pickle, [("10", 3, bytes(24)), ("9", 2, b"\1" * 8)])
    storages = contents(data, torch_legacy).storages
    assert [(key, data[storage.offset :][: storage.length]) for key, storage in storages.items()] == [
        ("10", bytes(24)),
        ("9", b"\1" * 8),
    ]


def test_a_stream_of_a_big_endian_machine_is_little_endian(contents):
    """torch swaps the bytes that it writes on a big-endian machine, and ignores the description of the machine."""
    data = legacy(ONE_TENSOR, [("0", 4, bytes(16))], little=False)
    assert not contents(data, torch_legacy).storages["0"].big_endian


def test_bytes_after_the_stream_are_an_oddity(contents):
    """torch ignores bytes after the stream."""
    assert contents(STREAM + b"xyz", torch_legacy).oddities == ["suffixed"]


def test_stream_without_storages_is_read(contents):
    """An object without tensors is also a valid stream."""
    result = contents(legacy(build_pickle(number(1)), []), torch_legacy)
    assert (result.pickle.root, result.storages, result.oddities) == (1, {}, [])


def test_pickle_larger_than_the_first_window_is_read(contents):
    """The length of a pickle is not recorded; the reader finds the end of the pickle."""
    pickle_of_many = state_dict(**{f"layer{n}": tensor(str(n), 1, (1,)) for n in range(2000)})
    result = contents(legacy(pickle_of_many, [(str(n), 1, struct.pack("<f", n)) for n in range(2000)]), torch_legacy)
    assert len(result.pickle.root) == len(result.storages) == 2000


def test_a_pickle_over_the_limit_is_refused(contents, monkeypatch):
    """The window stops growing at the limit for a pickle."""
    monkeypatch.setattr(torch_legacy, "MAX_PICKLE_BYTES", 100_000)
    data = legacy(build_pickle(text("x" * 200_000)), [])
    assert "the object is a pickle of more than 100,000 bytes, the limit of statecli" in refusal_line(
        contents, data, torch_legacy
    )


def test_persistent_id_with_an_empty_view_is_read(contents):
    """The sixth item of an old persistent id is None if the storage is not a view."""
    six = tensor().replace(b"tQ", b"NtQ")
    assert list(contents(legacy(state_dict(w=six), [("0", 4, bytes(16))]), torch_legacy).storages) == ["0"]


def test_tensor_of_a_storage_view_is_unreadable(tmp_path):
    """The sixth item may be a view of the storage: its key, offset and number of elements."""
    view = b"(" + text("view") + number(1) + number(2) + b"t"
    pickled = state_dict(w=tensor(size=(2,)).replace(b"tQ", view + b"tQ"))
    (tmp_path / "file").write_bytes(legacy(pickled, [("0", 4, bytes(16))]))
    (row,) = formats.read(str(tmp_path / "file")).tensors
    assert "load the file with torch and save it again" in row.damage


def storage_id(*items: bytes) -> bytes:
    return legacy(build_pickle(b"(" + b"".join(items) + b"tQ"), [("0", 4, bytes(16))])


FLOAT = b"ctorch\nFloatStorage\n"
INVALID_STREAMS = {
    "another magic number": (legacy(ONE_TENSOR, [], magic=7), "its magic number is missing"),
    "another version": (
        STREAM.replace(build_pickle(number(1001)), build_pickle(number(1002))),
        "its format version is 1002",
    ),
    "a version that is a list": (
        STREAM.replace(build_pickle(number(1001)), build_pickle(b"]")),
        "its format version is not a 64-bit integer",
    ),
    "too few elements": (
        legacy(ONE_TENSOR, [("0", 3, bytes(12))]),
        ("storage '0' has 3 elements, but the pickle claims 4"),
    ),
    "a storage nobody uses": (
        legacy(ONE_TENSOR, [("0", 4, bytes(16)), ("1", 1, bytes(4))]),
        "a storage that no tensor uses",
    ),
    "a storage twice": (legacy(ONE_TENSOR, [("0", 4, bytes(16))] * 2), "the list of storages contains '0' twice"),
    "a size of 2**62": (
        legacy(state_dict(w=tensor(numel=2**62)), [("0", 2**62, bytes(16))]),
        "file is truncated: storage '0' needs bytes",
    ),
}


@pytest.mark.parametrize("case", INVALID_STREAMS.values(), ids=INVALID_STREAMS)
def test_invalid_stream_is_refused_in_one_line(contents, case):
    """Each stream is refused, and the line names the problem."""
    data, message = case
    assert message in refusal_line(contents, data, torch_legacy)


UNREADABLE_STORAGES = {
    "two sizes of one storage": (
        legacy(state_dict(a=tensor(numel=4), b=tensor(numel=5)), [("0", 4, bytes(16))]),
        "4 float32 elements on cpu and 5 float32 elements on cpu",
    ),
    "two types of one storage": (
        legacy(state_dict(a=tensor(), b=tensor(kind="IntStorage")), [("0", 4, bytes(16))]),
        "4 float32 elements on cpu and 4 int32 elements on cpu",
    ),
    **{
        name: (storage_id(*parts), "its storage is not recorded in the form that torch writes")
        for name, parts in {
            "an id of two": (text("storage"), FLOAT),
            "an id of another kind": (text("stor"), FLOAT, text("0"), text("cpu"), number(4)),
            "a type that is not a storage": (text("storage"), b"cos\nsystem\n", text("0"), text("cpu"), number(4)),
            "a type in words": (text("storage"), text("x"), text("0"), text("cpu"), number(4)),
            "a numeric key": (text("storage"), FLOAT, number(0), text("cpu"), number(4)),
        }.items()
    },
}


@pytest.mark.parametrize("case", UNREADABLE_STORAGES.values(), ids=UNREADABLE_STORAGES)
def test_storage_in_another_form_is_unreadable(tmp_path, case):
    """Its tensors have the reason; if no tensor declares the size of a listed storage, the file is refused."""
    data, message = case
    path = tmp_path / "file"
    path.write_bytes(data)
    try:
        reasons = [row.damage for row in formats.read(str(path)).tensors]
    except MalformedError as error:
        reasons, message = [str(error)], "a storage that no tensor uses"
    assert reasons
    assert all(message in reason for reason in reasons)


def test_truncated_stream_is_malformed(contents):
    """A stream is truncated if cut at any byte: inside a pickle, between two pickles or in the storages."""
    for end in range(1, len(STREAM)):
        assert "truncated" in refusal_line(contents, STREAM[:end], torch_legacy)


@pytest.mark.parametrize("protocol", range(6))
def test_stream_is_recognised_by_its_magic_in_any_protocol(protocol):
    """Protocol 0 writes the magic number in digits, protocols 4 and 5 in a frame."""
    assert torch_legacy.sniff("x", pickle.dumps(LEGACY_MAGIC_NUMBER, protocol) + b"more")
    assert not torch_legacy.sniff("x", pickle.dumps(LEGACY_MAGIC_NUMBER + 1, protocol) + b"more")


# Real files.


def save_value(path, value, **kwargs) -> str:
    torch.save(value, path, **kwargs)
    return str(path)


def values() -> dict[str, object]:
    base = torch.arange(10.0)
    return {
        "a": torch.randn(3, 4),
        "half": torch.randn(7).bfloat16(),
        "view": base[2:5],
        "base": base,
        "ids": torch.arange(5),
        "flag": torch.tensor(True),
        "c": torch.randn(2, dtype=torch.complex128),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("reader", [torch_zip, torch_legacy])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_storage_bytes_equal_the_tensors_of_torch(tmp_path, reader, protocol):
    """The bytes at each tensor's place are the bytes of the tensor that torch loads."""
    path = save_value(
        tmp_path / "net.v2.pt",
        values(),
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=reader is torch_zip,
    )
    data = (tmp_path / "net.v2.pt").read_bytes()
    loaded = torch.load(path, weights_only=False)  # weights_only does not know protocols 4 and 5
    with open(path, "rb") as file:
        assert reader.sniff(path, file.read(HEAD_BYTES))
    state = formats.read(path)
    assert [tensor.fqn for tensor in state.tensors] == list(loaded)
    for storage in state.tensors:
        tensor = loaded[storage.fqn]
        position = storage.data.storage.offset + storage.data.offset * tensor.element_size()
        expected = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes([int(tensor)])
        assert data[position : position + storage.nbytes] == expected
        stored = data[storage.data.storage.offset :][: storage.data.storage.length]
        assert storage.data.storage.crc32 in (None, zlib.crc32(stored))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_configured_alignment_and_checksums_are_read(tmp_path, alignment):
    """Storages are found where torch aligned them, and without checksums."""
    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    torch.serialization.set_crc32_options(False)
    try:
        path = save_value(tmp_path / "x.pt", {"w": torch.ones(5)})
    finally:
        config.save.storage_alignment = before
        torch.serialization.set_crc32_options(True)
    pickle, storages, oddities = torch_zip.read_contents(path)
    assert storages["0"].offset % alignment == 0
    assert (storages["0"].crc32, [oddity.name for oddity in oddities]) == (None, ["no-checksums"])
    assert list(pickle.root) == ["w"]


def test_failed_save_is_reported(tmp_path):
    """A failed save leaves a zip with a valid end, but without the object."""
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):  # depends on the release of Python
        torch.save({"f": lambda: 0}, tmp_path / "x.pt")
    with pytest.raises(MalformedError, match="the save did not finish"):
        torch_zip.read(str(tmp_path / "x.pt"))


def test_module_in_an_old_stream_is_read(tmp_path):
    """The persistent ids for classes in an old stream are read as the classes."""
    path = save_value(tmp_path / "x.pt", torch.nn.Linear(2, 3), _use_new_zipfile_serialization=False)
    assert {tensor.fqn: tensor.shape for tensor in formats.read(path).tensors} == {"weight": (3, 2), "bias": (3,)}
