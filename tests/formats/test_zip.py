"""The strict zip reader: accepted archives, oddities, and the error line for each contradiction."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.serialization import skip_data

from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError
from statecli.core.model_state import Place
from statecli.storage import zip_archive
from statecli.storage.byte_source import ByteSource
from statecli.storage.zip_archive import FARTHEST_END, MAX_INFLATED_BYTES, MAX_PADDING, Archive

from .attacks import Lies, Member, build, change_record, records

LIMIT = 2**20


@pytest.fixture
def open_archive(tmp_path):
    """Return a function that opens bytes as an archive."""
    sources = []

    def read(data: bytes) -> Archive:
        path = tmp_path / f"{len(sources)}.zip"
        path.write_bytes(data)
        sources.append(ByteSource(str(path)))
        return Archive(sources[-1])

    yield read
    for source in sources:
        source.close()


def contents(archive: Archive) -> dict[str, bytes]:
    return {name: archive.read(record, LIMIT) for name, record in archive.records.items()}


def oddities(archive: Archive) -> list[str]:
    return [oddity.name for oddity in archive.oddities]


def test_records_equal_zipfile(open_archive):
    """Names, order and contents agree with Python's zipfile on a good archive."""
    data = build(records())
    with zipfile.ZipFile(io.BytesIO(data)) as oracle:
        expected_records = {name: oracle.read(name) for name in oracle.namelist()}
    archive = open_archive(data)
    assert contents(archive) == expected_records
    assert list(archive.records) == list(expected_records)
    assert archive.oddities == []


@pytest.mark.parametrize(("field_name", "is_refused"), [(b"a/data.pkl", True), (b"a/x", False), (b"", False)])
def test_another_name_in_an_extra_field_is_refused(field_name, is_refused, open_archive):
    """zipfile of Python 3.12 and later uses the name in the field; the next field is not part of the name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("a/x")
        info.extra = struct.pack("<HHBI", 0x7075, 5 + len(field_name), 1, zlib.crc32(b"a/x")) + field_name
        info.extra += struct.pack("<HH", 0xCAFE, 0)
        archive.writestr(info, b"content")
    if is_refused:
        with pytest.raises(MalformedError, match="a second, different name in the zip archive"):
            open_archive(out.getvalue())
    else:
        assert list(open_archive(out.getvalue()).records) == ["a/x"]


def test_data_offset_gives_the_place_of_the_content(open_archive):
    """The offset includes the padding, which torch adds to the local header only."""
    data = build(records())
    for member in records():
        record = open_archive(data).records[str(member.name)]
        assert data[record.data_offset :][: record.size] == member.data


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=20), st.binary(max_size=300), st.sampled_from([0, 8])), max_size=12)
)
@settings(max_examples=60, deadline=None)
def test_archives_written_by_zipfile_are_read(tmp_path_factory, entries):
    """Archives of Python's zipfile, stored and deflated, come back whole."""
    entries = {
        name.replace("\0", "_").replace("\\", "_"): (data, method)
        for name, data, method in entries
        if name.isprintable()
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer:
        for name, (data, method) in entries.items():
            writer.writestr(zipfile.ZipInfo(name), data, method)
    path = tmp_path_factory.getbasetemp() / "written.zip"
    path.write_bytes(buffer.getvalue())
    with ByteSource(str(path)) as source:
        assert contents(Archive(source)) == {name: data for name, (data, _) in entries.items()}


@pytest.mark.parametrize(
    ("first", "folder"), [("net/data.pkl", "net"), ("/data.pkl", ""), ("data.pkl", None), ("a/b/data.pkl", "a")]
)
def test_folder_is_the_top_folder_of_the_first_record(open_archive, first, folder):
    """torch takes the top folder of the first record, and an empty name counts."""
    assert open_archive(build([Member(first, b"x")])).folder == folder


ACCEPTED_ARCHIVES = {
    "zip64 sizes in the directory": build([Member(f"a/{n}", b"xyz" * n, zip64=True) for n in range(3)]),
    "sizes in the zip64 end record only": build(records(), Lies(only_in_zip64=True)),
    "no zip64 records": build(records(), Lies(zip64=False)),
    "no checksums": build([Member("a/x", b"content", crc=0)]),
    "no records": build([]),
    "a name of 60 kB": build([Member("a/" + "n" * 60_000, b"x")]),
    "a name with NUL": build([Member("a/\0b", b"x")]),
    "a name that is no UTF-8": build([Member(b"a/\xff\xfe", b"x")]),
    "a directory entry": build([Member("a/", b"", marks=0x10), Member("a/x", b"x", marks=0x20)]),
}


@pytest.mark.parametrize("data", ACCEPTED_ARCHIVES.values(), ids=ACCEPTED_ARCHIVES)
def test_unusual_valid_archive_has_no_oddity(open_archive, data):
    """Unusual but valid archives are read without an oddity."""
    archive = open_archive(data)
    assert archive.oddities == []
    contents(archive)


ODDITIES = {
    "suffixed": (build(records(), suffix=b"junk"), "4 bytes are appended after the zip archive", (0, 4)),
    "zip-comment": (build(records(), Lies(comment=b"hello")), "the zip archive ends with a comment of 5 bytes", (0, 5)),
    "suffixed after a comment": (
        build(records(), Lies(comment=b"hello"), suffix=b"junk"),
        "4 bytes are appended after the zip archive",
        (5, 4),
    ),
    "case-only-names": (build([*records(), Member("archive/DATA.PKL")]), "upper and lower case", None),
}


@pytest.mark.parametrize(("name", "case"), ODDITIES.items(), ids=ODDITIES)
def test_unexpected_part_is_an_oddity_with_its_place(open_archive, name, case):
    """Parts that every reader accepts, but that are unexpected, are oddities, with their place after the archive."""
    data, message, place = case
    archive = open_archive(data)
    (oddity,) = archive.oddities
    assert (oddity.name, message in oddity.message) == (name.partition(" ")[0], True)
    if place is not None:
        after, length = place
        assert oddity.place == Place(archive.path, len(build(records())) + after, length)


def _with_end_comment_length(data: bytes, length: int) -> bytes:
    return data[:-2] + struct.pack("<H", length)


def test_truncated_comment_is_an_oddity(open_archive):
    """The end record promises more comment than there is."""
    assert oddities(open_archive(_with_end_comment_length(build(records()), 9))) == ["suffixed"]


GOOD = build(records())
TWO_NAMES = [Member("archive/data/0", b"abcd"), Member("archive/data/0", b"efgh")]
MALFORMED_ARCHIVES = {
    "duplicate": (build([*records(), *TWO_NAMES[:1]]), "two records are named 'archive/data/0'"),
    "duplicate of one content": (build([TWO_NAMES[0], TWO_NAMES[0]]), "two records are named 'archive/data/0'"),
    "two records on one header": (
        build([Member("a/x", b"abcd"), Member("a/y", b"abcd", offset=0)]),
        "the records 'a/x' and 'a/y' overlap; copy or download the file again",
    ),
    "records that overlap": (
        build([Member("a/x", b"abcd", size=80, packed_size=80), Member("a/y", b"efgh" * 9)]),
        "the records 'a/x' and 'a/y' overlap; copy or download the file again",
    ),
    "local name": (
        build(change_record("data.pkl", local_name=b"archive/data.pkx")),
        "'archive/data.pkl': its own header contradicts",
    ),
    "local method": (
        build(change_record("data.pkl", local_method=8)),
        "own header contradicts the archive's list of records",
    ),
    "encrypted in the local header": (build(change_record("data.pkl", local_flags=0x0809)), "own header contradicts"),
    "local sizes without a descriptor": (
        build(change_record("data.pkl", local_flags=0x0800)),
        "own header contradicts",
    ),
    "a name in cp437 or UTF-8": (build([Member("a/é".encode(), b"x", flags=8)]), "does not declare the encoding"),
    "a local name in cp437": (
        build([Member("a/é", b"x", flags=0x0808, local_flags=8)]),
        "does not declare the encoding of its name",
    ),
    "local signature": (
        build(change_record("data/0", local_signature=b"PK\0\0")),
        "the zip archive is damaged: its list of records (central directory) puts",
    ),
    "local extra past the end": (
        build(change_record(".data/serialization_id", local_extra_length=60_000)),
        "is outside the archive",
    ),
    "header that runs into the directory": (
        build(change_record(".data/serialization_id", offset=GOOD.index(b"PK\1\2") - 10)),
        "'archive/.data/serialization_id' is outside the archive: its header is at byte",
    ),
    "header past the end": (build(change_record("data/0", offset=10**6)), "'archive/data/0' is outside the archive"),
    "size": (
        build(change_record("data/0", size=8)),
        ("stored without compression, but the archive's list of records gives two sizes, 16 and 8 bytes"),
    ),
    "both sizes past the end": (
        build(change_record(".data/serialization_id", size=10**6, packed_size=10**6)),
        "is outside the archive: it ends at byte",
    ),
    "a prefix": (build(records(), prefix=b"#!/bin/sh\n"), "its second end record (zip64) is not at byte"),
    "a zip before it": (GOOD + GOOD, "its second end record (zip64) is not at byte"),
    "an other zip in the comment": (
        build(records(), Lies(comment=build([Member("b/x")]))),
        "its second end record (zip64) is not at byte",
    ),
    "more records counted": (
        build(records(), Lies(count=1)),
        "its list of records (central directory) has 7 entries, but its end record says 8",
    ),
    "no records counted": (
        build(records(), Lies(count=-7)),
        "its list of records (central directory) has 7 entries, but its end record says 0",
    ),
    "directory offset": (
        build(records(), Lies(directory_at=-8)),
        "its list of records (central directory) should end at byte",
    ),
    "directory size": (
        build(records(), Lies(directory_size=8)),
        "its list of records (central directory) should end at byte",
    ),
    "directory moved as a whole": (
        build(records(), Lies(directory_at=-8, directory_size=8)),
        "the zip archive is damaged: ",
    ),
    "zip64 locator": (build(records(), Lies(locator=-4)), "its second end record (zip64) is not at byte"),
    "zip64 locator past the end": (
        build(records(), Lies(locator=10**6)),
        ("its second end record (zip64) is not at byte"),
    ),
    "zip64 locator missing": (
        build(records(), Lies(only_in_zip64=True, missing_locator=True)),
        "but the file has no such record",
    ),
    "zip64 signature": (GOOD.replace(b"PK\6\6", b"PK\6\0"), "its second end record (zip64) is not at byte"),
    "zip64 length": (
        GOOD.replace(b"PK\6\6" + struct.pack("<Q", 44), b"PK\6\6" + struct.pack("<Q", 45)),
        "its second end record (zip64) is not at byte",
    ),
    "data in the zip64 record": (
        GOOD.replace(b"PK\6\6" + struct.pack("<Q", 44), b"PK\6\6" + struct.pack("<Q", 48)).replace(
            b"PK\6\7", b"mark" + b"PK\6\7"
        ),
        "its second end record (zip64) is not at byte",
    ),
    "signature of an entry": (
        GOOD.replace(b"PK\1\2", b"PK\1\0", 1),
        "no entry of its list of records (central directory) begins at byte 0 of the list",
    ),
    "an entry past the end": (
        b"\xff\xff".join((GOOD[: GOOD.rindex(b"PK\1\2") + 30], GOOD[GOOD.rindex(b"PK\1\2") + 32 :])),
        "an entry of its list of records (central directory) runs past the end of the list",
    ),
    "several disks": (build(records(), Lies(disk=1)), "spans several files"),
    "a folder with content": (
        build(change_record("data/0", marks=0x10)),
        "'archive/data/0' is marked as a folder but has 16 bytes of data",
    ),
    "a record on another disk": (build(change_record("data/0", disk=1)), "spans several files"),
    "truncated": (GOOD[:-30], "contain no end record of a zip archive"),
}


@pytest.mark.parametrize("case", MALFORMED_ARCHIVES.values(), ids=MALFORMED_ARCHIVES)
def test_contradiction_is_malformed(open_archive, case):
    """Each contradiction in an archive has its error line."""
    data, message = case
    with pytest.raises(MalformedError) as error:
        open_archive(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def build_plain_archive(flags: int = 0) -> tuple[bytearray, int]:
    """Return a record stored by zipfile (sizes and checksum in its header), and the place of the directory."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/x", b"abcd")
    data = bytearray(file.getvalue())
    position = data.index(b"PK\1\2")
    for place in (6, position + 8):
        struct.pack_into("<H", data, place, flags)
    return data, position


@pytest.mark.parametrize("field", [14, 18, 22], ids=["checksum", "compressed size", "size"])
@pytest.mark.parametrize("flags", [0x0000, 0x0008, 0x0010, 0x0004, 0x0800])
def test_local_field_is_ignored_only_before_a_descriptor(open_archive, field, flags):
    """Only bit 3 of the flags announces a descriptor: torch writes zeros in the header and the sizes after the data."""
    data, _ = build_plain_archive(flags)
    struct.pack_into("<I", data, field, 0)
    if flags == 0x0008:
        assert contents(open_archive(bytes(data))) == {"a/x": b"abcd"}
        return
    with pytest.raises(MalformedError, match="its own header contradicts the archive's list of records"):
        open_archive(bytes(data))


def test_a_local_field_may_point_to_zip64(open_archive):
    """Sizes of 0xFFFFFFFF mean that an extra field has the sizes."""
    data, _ = build_plain_archive()
    struct.pack_into("<II", data, 18, 0xFFFFFFFF, 0xFFFFFFFF)
    assert contents(open_archive(bytes(data))) == {"a/x": b"abcd"}


def test_archive_of_several_disks_is_refused(open_archive):
    """Both end records are checked: an archive of several disks is refused."""
    data, _ = build_plain_archive()
    end = data.index(b"PK\5\6")
    struct.pack_into("<H", data, end + 8, 2)
    with pytest.raises(MalformedError, match="spans several files"):
        open_archive(bytes(data))
    archive = bytearray(build(records()))
    struct.pack_into("<Q", archive, archive.index(b"PK\6\6") + 24, 8)
    with pytest.raises(MalformedError, match="spans several files"):
        open_archive(bytes(archive))


@pytest.mark.parametrize(
    ("field", "form", "field_noun"),
    [(8, "<HH", "number of records"), (12, "<I", "size of the list"), (16, "<I", "position of the list")],
    ids=["records", "size", "offset"],
)
def test_the_two_end_records_agree(open_archive, field, form, field_noun):
    """Records, size and offset of the directory agree, or the short end record refers to the zip64 end record."""
    archive = bytearray(build(records()))
    position = archive.index(b"PK\5\6") + field
    struct.pack_into(form, archive, position, *([0xFFFF] * 2 if form == "<HH" else [0xFFFFFFFF]))
    assert len(open_archive(bytes(archive)).records) == len(records())
    struct.pack_into(form, archive, position, *([6] * 2 if form == "<HH" else [6]))
    with pytest.raises(
        MalformedError, match=rf"its two end records \(zip and zip64\) contradict each other: the {field_noun}"
    ):
        open_archive(bytes(archive))


def test_directory_at_the_limits_is_read(open_archive, monkeypatch):
    """A number equal to the limit is allowed, and a larger number is refused."""
    data = build(records())
    size = struct.unpack_from("<I", data, data.index(b"PK\5\6") + 12)[0]
    for name, limit in (("MAX_RECORDS", len(records())), ("MAX_DIRECTORY_BYTES", size)):
        with monkeypatch.context() as patch:
            patch.setattr(zip_archive, name, limit)
            assert len(open_archive(data).records) == len(records())
            patch.setattr(zip_archive, name, limit - 1)
            with pytest.raises(MalformedError, match="more than statecli's limits of"):
                open_archive(data)


def test_a_record_is_verified_piece_by_piece(open_archive, monkeypatch):
    """In pieces of any size, stored or deflated, the right checksum passes and a wrong checksum fails."""
    content = bytes(range(256)) * 40 + bytes(50_000)
    for piece in (1, 7, 1000, 1 << 20):
        monkeypatch.setattr(zip_archive, "_PIECE_BYTES", piece if piece > 1 else 64)
        for method in (0, 8):
            intact_archive = open_archive(build([Member("a/x", content, method=method)]))
            intact_archive.verify(intact_archive.records["a/x"])
            damaged_archive = open_archive(build([Member("a/x", content, method=method, crc=1)]))
            with pytest.raises(ChecksumMismatch, match="checksum wrong"):
                damaged_archive.verify(damaged_archive.records["a/x"])
            unknown = open_archive(build([Member("a/x", content, method=method, crc=0)]))
            unknown.verify(unknown.records["a/x"])
    lying = open_archive(build([Member("a/x", content, method=8, size=100)]))
    with pytest.raises(MalformedError, match="does not decompress to the 100 bytes"):
        lying.verify(lying.records["a/x"])


UNREADABLE_ARCHIVES = {
    "encrypted": (
        build(change_record("data/0", flags=0x0809)),
        "'archive/data/0' is encrypted, and statecli cannot decrypt it",
    ),
    "bzip2": (build(change_record("data/0", method=12)), "is compressed with bzip2"),
    "lzma": (build(change_record("data/0", method=14)), "is compressed with lzma"),
    "an unknown method": (build(change_record("data/0", method=77)), "is compressed with method 77"),
}


@pytest.mark.parametrize("case", UNREADABLE_ARCHIVES.values(), ids=UNREADABLE_ARCHIVES)
def test_encryption_and_other_compression_are_unreadable(open_archive, case):
    """The error names encryption and other compression methods."""
    data, message = case
    with pytest.raises(UnreadableError) as error:
        open_archive(data)
    assert message in str(error.value)


def test_a_wrong_checksum_is_found_when_the_record_is_read(open_archive):
    """Opening reads no content; the error of a read has both checksums."""
    archive = open_archive(build([Member("a/x", b"content", crc=0x12345678)]))
    with pytest.raises(MalformedError, match=r"a/x: checksum wrong: computed [0-9a-f]{8}, recorded 12345678"):
        archive.read(archive.records["a/x"], LIMIT)


@pytest.mark.parametrize("size", [8, 200])
def test_deflated_record_with_a_false_size_is_malformed(open_archive, size):
    """More or fewer bytes than the directory records are an error."""
    archive = open_archive(build([Member("a/x", b"x" * 100, method=8, size=size)]))
    with pytest.raises(MalformedError, match="does not decompress to the"):
        archive.read(archive.records["a/x"], LIMIT)


def test_invalid_deflate_stream_is_malformed(open_archive):
    """Bytes that zlib refuses are an error of the archive, with the reason that zlib gives."""
    archive = open_archive(build([Member("a/x", b"x" * 100, method=8, packed=b"\xff" * 40)]))
    with pytest.raises(MalformedError, match=r"a/x cannot be decompressed: .* \(Error -3 .*: invalid block type\)"):
        archive.read(archive.records["a/x"], LIMIT)


def test_a_deflate_bomb_is_refused_before_it_is_inflated(open_archive):
    """The limit for compressed records is lower than the limit of the caller."""
    archive = open_archive(build([Member("a/x", b"x", method=8, size=MAX_INFLATED_BYTES + 1)]))
    with pytest.raises(MalformedError, match=r"compressed and takes 67,108,865 bytes unpacked, more"):
        archive.read(archive.records["a/x"], 2**40)


def test_a_stored_record_over_the_limit_is_refused(open_archive):
    """The limit of the caller applies to stored records."""
    archive = open_archive(build([Member("a/x", b"12345")]))
    with pytest.raises(MalformedError, match="has 5 bytes, more than statecli's limit of 4"):
        archive.read(archive.records["a/x"], 4)


@pytest.mark.parametrize("local_name", [b"e", b"evil"])
def test_a_nameless_record_with_a_local_name_is_refused(open_archive, local_name):
    """The two names of a record must agree, also if the name in the directory is empty."""
    with pytest.raises(MalformedError, match="its own header contradicts the archive's list of records"):
        open_archive(build([Member(b"", b"x", local_name=local_name)]))


@pytest.mark.parametrize("name", ["archive/e", "archive/\u00e9"])
@pytest.mark.parametrize("local_name", [b"", b"archive/x"])
def test_a_record_with_another_local_name_is_refused(open_archive, name, local_name):
    """An empty name in the local header also differs, whatever the letters of the name in the directory."""
    member = Member(name, b"x", flags=0x0808, local_name=local_name)
    with pytest.raises(MalformedError, match="its own header contradicts the archive's list of records"):
        open_archive(build([*records(), member]))


def test_bytes_before_the_first_record_are_an_oddity(open_archive):
    """Offsets that include the first bytes are valid, but a reader from the beginning finds something else."""
    member = Member("a/x", b"content")
    body = bytearray(b"#!/bin/sh\n" + member.local(10))
    directory = member.central(10)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(body), 0)
    archive = open_archive(bytes(body) + directory + end)
    (oddity,) = archive.oddities
    assert (oddity.name, oddity.place) == ("prefixed", Place(archive.path, 0, 10))
    assert contents(archive) == {"a/x": b"content"}


def with_local_extra(name: str, extra: int) -> bytes:
    """Return two records, of which `name` has an extra field of `extra` bytes in its local header only."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for text in ("a/x", "a/y"):
            archive.writestr(text, b"abcd")
    data = bytearray(file.getvalue())
    position = data.index(b"PK\3\4", 1 if name == "a/y" else 0)
    struct.pack_into("<H", data, position + 28, extra)
    data[position + 33 : position + 33] = bytes(extra)
    end = data.index(b"PK\5\6")
    struct.pack_into("<I", data, end + 16, struct.unpack_from("<I", data, end + 16)[0] + extra)
    if name == "a/x":
        second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
        struct.pack_into("<I", data, second + 42, struct.unpack_from("<I", data, second + 42)[0] + extra)
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "extra", "spaces"),
    [("a/y", MAX_PADDING, []), ("a/y", MAX_PADDING + 1, [("a/x", 37, MAX_PADDING + 1)]), ("a/x", 1000, [])],
)
def test_a_space_between_two_records_is_wider_than_padding(open_archive, name, extra, spaces):
    """A space has the name of the record before; bytes before the first record's data are not a space."""
    archive = open_archive(with_local_extra(name, extra))
    assert contents(archive) == {"a/x": b"abcd", "a/y": b"abcd"}
    assert archive.spaces == [(before, Place(archive.path, position, length)) for before, position, length in spaces]


def test_space_before_the_directory_has_the_last_record_name(open_archive):
    """The space has the name of the record before, as between two records."""
    member = Member("a/x", b"abcd", flags=0x0800)
    body = member.local(0)
    directory = member.central(0)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(body) + 200, 0)
    # Sizes and checksum in the local header: no descriptor follows.
    body = body[:14] + struct.pack("<III", zlib.crc32(b"abcd"), 4, 4) + body[26:]
    archive = open_archive(body + bytes(200) + directory + end)
    ((name, place),) = archive.spaces
    assert (name, place.offset + place.length) == ("a/x", len(body) + 200)


FIELD_SIZES = {"size": 8, "packed": 8, "offset": 8, "disk": 4}


def build_zip64_archive(fields: tuple[str, ...], before: bytes = b"", missing_bytes: int = 0) -> bytes:
    """Return an archive with a record at byte 64 whose directory entry leaves `fields` to its zip64 extra field."""
    first, second = Member("a/x", bytes(4)), Member("a/y", b"abcd")
    position = len(first.local(0))
    values = {"size": 4, "packed": 4, "offset": position, "disk": 0}
    header_values = {
        name: (2 ** (32 if name != "disk" else 16) - 1 if name in fields else values[name]) for name in FIELD_SIZES
    }
    field_data = b"".join(values[name].to_bytes(FIELD_SIZES[name], "little") for name in FIELD_SIZES if name in fields)
    field_data = field_data[: len(field_data) - missing_bytes]
    extra = before + struct.pack("<HH", 1, len(field_data)) + field_data
    entry = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        b"PK\1\2",
        *(0, 0, 0x0808, 0, 0, 0, zlib.crc32(b"abcd"), header_values["packed"], header_values["size"], 3, len(extra), 0),
        *(header_values["disk"], 0, 0, header_values["offset"]),
    )
    body, directory = first.local(0) + second.local(position), first.central(0) + entry + b"a/y" + extra
    return body + directory + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(body), 0)


SUBSETS = [fields for n in range(5) for fields in combinations(FIELD_SIZES, n)]


@pytest.mark.parametrize("fields", SUBSETS, ids="-".join)
def test_zip64_field_holds_only_the_overflowed_values(open_archive, fields):
    """The field has any of size, compressed size, offset and disk, in this order; Python's zipfile agrees."""
    data = build_zip64_archive(fields)
    assert contents(open_archive(data)) == {"a/x": bytes(4), "a/y": b"abcd"}
    with zipfile.ZipFile(io.BytesIO(data)) as oracle:
        assert oracle.read("a/y") == b"abcd"


@pytest.mark.parametrize("fields", SUBSETS[1:], ids="-".join)
def test_a_zip64_field_that_is_too_short_is_malformed(open_archive, fields):
    """statecli does not invent the missing bytes."""
    with pytest.raises(MalformedError, match="its list of records lacks the"):
        open_archive(build_zip64_archive(fields, missing_bytes=1))


def test_zip64_field_is_found_after_other_fields(open_archive):
    """Each extra field has a length, which may be 0."""
    before = struct.pack("<HHI", 0x5455, 4, 1) + struct.pack("<HH", 0xCAFE, 0)
    assert contents(open_archive(build_zip64_archive(("size", "offset"), before)))["a/y"] == b"abcd"


@pytest.mark.parametrize("length", [17, 400, 0xFFFF], ids=["by a byte", "by far", "by the most"])
def test_long_extra_field_is_malformed_only_if_needed(open_archive, length):
    """If the sizes fit into the entry, neither statecli nor torch reads the extra field."""
    extra_field = struct.pack("<HHI", 0x5455, length, 1)
    with pytest.raises(MalformedError, match="an optional field of 'a/y' is longer than the entry"):
        open_archive(build_zip64_archive(("size",), extra_field))
    data = bytearray(build(records(), Lies(zip64=False)))
    last, end = data.rindex(b"PK\1\2"), data.index(b"PK\5\6")
    struct.pack_into("<H", data, last + 30, len(extra_field))
    struct.pack_into("<I", data, end + 12, end + len(extra_field) - data.index(b"PK\1\2"))
    data[end:end] = extra_field
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    name = ".data/serialization_id"
    assert reader.get_record(name) == contents(open_archive(bytes(data)))[f"archive/{name}"] == b"0" * 40


def test_a_name_in_an_extra_field_past_its_end_is_malformed(open_archive):
    """The error names the record."""
    extra = struct.pack("<HHI", 0x7075, 400, 1)
    with pytest.raises(MalformedError, match="an optional field of 'a/y' is longer than the entry"):
        open_archive(build_zip64_archive((), extra))


@pytest.mark.parametrize("field", ["records", "size", "offset"])
def test_missing_zip64_end_record_is_malformed(open_archive, field):
    """A single field of the three is enough."""
    data = bytearray(build(records(), Lies(zip64=False)))
    end = data.index(b"PK\5\6")
    position, form = {"records": (8, "<HH"), "size": (12, "<I"), "offset": (16, "<I")}[field]
    struct.pack_into(form, data, end + position, *([0xFFFF] * 2 if field == "records" else [0xFFFFFFFF]))
    with pytest.raises(
        MalformedError, match=r"refers to a second end record \(zip64\), but the file has no such record"
    ):
        open_archive(bytes(data))


@pytest.mark.parametrize(
    ("signature", "field", "value"),
    [(b"PK\6\7", 4, 1), (b"PK\6\7", 16, 2), (b"PK\6\6", 16, 1), (b"PK\6\6", 20, 1)],
    ids=["disk of the zip64 record", "number of disks", "this disk", "first disk"],
)
def test_a_zip64_record_of_several_disks_is_refused(open_archive, signature, field, value):
    """Each field with the number of a disk is checked."""
    data = bytearray(GOOD)
    struct.pack_into("<I", data, data.index(signature) + field, value)
    with pytest.raises(MalformedError, match="spans several files"):
        open_archive(bytes(data))


@pytest.mark.parametrize("field", [4, 6], ids=["this disk", "first disk"])
def test_end_record_may_refer_to_zip64_for_its_disk(open_archive, field):
    """0xFFFF refers to the zip64 end record; any disk other than the first is refused."""
    data = bytearray(GOOD)
    struct.pack_into("<H", data, data.index(b"PK\5\6") + field, 0xFFFF)
    assert len(open_archive(bytes(data)).records) == len(records())
    struct.pack_into("<H", data, data.index(b"PK\5\6") + field, 1)
    with pytest.raises(MalformedError, match="spans several files"):
        open_archive(bytes(data))


@pytest.mark.parametrize("size", [2**20, 2**20 + 1, 3 * 2**20])
def test_a_deflated_record_of_more_than_a_piece_is_read_and_verified(open_archive, size):
    """3 kB that inflate to 3 MiB are read whole, and verified in pieces."""
    intact_archive = open_archive(build([Member("a/x", bytes(size), method=8)]))
    assert intact_archive.read(intact_archive.records["a/x"], 2**30) == bytes(size)
    intact_archive.verify(intact_archive.records["a/x"])
    assert max(map(len, intact_archive._inflate_pieces(intact_archive.records["a/x"]))) == 2**20
    damaged_archive = open_archive(build([Member("a/x", bytes(size), method=8, crc=1)]))
    with pytest.raises(ChecksumMismatch, match="checksum wrong"):
        damaged_archive.verify(damaged_archive.records["a/x"])


# --- records of 4 GiB, in sparse files -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2**32 - 2, 2**32 - 1, 2**32])
def test_directory_gives_the_place_of_a_4_gib_record(tmp_path, size):
    """torch widens the local headers of records of 4 GiB, and of all later records, before the padding."""
    for length in range(1, 65):
        path = tmp_path / ("n" * length)
        with skip_data():
            torch.save([torch.empty(size, dtype=torch.uint8), torch.ones(3)], path)
        with ByteSource(str(path)) as source:
            actual_records = Archive(source).records
        path.unlink()
        assert actual_records[f"{path.name}/data/0"].size == size
        assert {name: zip_archive._align(record) for name, record in actual_records.items()} == {
            name: record.data_offset for name, record in actual_records.items()
        }


@pytest.mark.parametrize("length", range(1, 65, 8))
def test_directory_gives_the_place_of_a_record_at_4_gib(tmp_path, length):
    """An offset of 0xFFFFFFFF in an entry refers to another field, so torch widens the header of the record."""
    path, size, distance = tmp_path / ("n" * length), 2**32 - 4096, 0
    for _ in range(2):
        size += distance
        with skip_data():
            torch.save([torch.empty(size, dtype=torch.uint8), torch.ones(3)], path)
        with ByteSource(str(path)) as source:
            actual_records = Archive(source).records
        distance = 2**32 - 1 - actual_records[f"{path.name}/data/1"].offset
    assert distance == 0
    assert {name: zip_archive._align(record) for name, record in actual_records.items()} == {
        name: record.data_offset for name, record in actual_records.items()
    }


# --- number and size of reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size", "reads", "share"), [(500, 10, 50, 2), (64, 200_000, 300, 0.01)], ids=["small", "large"]
)
def test_headers_are_read_together_where_records_are_small(open_archive, monkeypatch, count, size, reads, share):
    """Several small records take a single read; next to large records, only few bytes are read."""
    lengths = []
    read_source = ByteSource.read
    monkeypatch.setattr(
        ByteSource, "read", lambda self, position, length: lengths.append(length) or read_source(self, position, length)
    )
    data = build([Member(f"a/{n}", bytes(size)) for n in range(count)])
    assert len(open_archive(data).records) == count
    assert len(lengths) < reads
    assert sum(lengths) < share * len(data)


# --- a file that ends as an archive ----------------------------------------------------------------------------------


@pytest.fixture
def has_archive_at_end(tmp_path):
    """Return a function that checks if loaders find an archive at the end of the bytes."""

    def check(data: bytes) -> bool:
        (tmp_path / "m").write_bytes(data)
        with ByteSource(str(tmp_path / "m")) as source:
            return zip_archive.ends_as_zip(source)

    return check


def is_loaded_by_its_end(data: bytes) -> bool:
    """Return whether zipfile or torch lists records of the bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.namelist():
                return True
    except zipfile.BadZipFile:
        pass
    try:
        return bool(torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records())
    except RuntimeError:
        return False


SHORT = build(records(), Lies(zip64=False))
FILES_LOADED_BY_THE_END = {
    "an archive": SHORT,
    "a zip64 archive": GOOD,
    "behind other bytes, with offsets from its own start": b"#!/bin/sh\n" + SHORT,
    "a zip64 archive behind other bytes": b"#!/bin/sh\n" + build(records(), Lies(only_in_zip64=True)),
    "behind as many bytes as its size": bytes(len(SHORT)) + SHORT,
    "with a comment": build(records(), Lies(zip64=False, comment=bytes(65_535))),
    "before bytes of another file": SHORT + bytes(60_000),
    "an archive that ends in front of a read of torch": SHORT + bytes(FARTHEST_END - 22),
}
FILES_NOT_LOADED = {
    "text": b"PK\5\6, and so on",
    "less than an end record": b"PK\5\6",
    "an end record that is cut short": b"#!" + SHORT[:-1],
    "a zip64 archive that is cut short": b"#!" + GOOD[:-1],
    "no records": build([], Lies(zip64=False)),
    "behind the last record of another file": bytes(99) + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, 9, 9, 0),
    "an archive in front of everything that is searched": SHORT + bytes(FARTHEST_END - 21),
}


@pytest.mark.parametrize("name", FILES_LOADED_BY_THE_END)
def test_archive_at_the_end_of_a_file_is_found(has_archive_at_end, name):
    """torch.hub, torch.jit.load and pandas would open the archive, whatever the first bytes are."""
    data = FILES_LOADED_BY_THE_END[name]
    assert has_archive_at_end(data)
    assert is_loaded_by_its_end(data) == ("in front of a read" not in name)


@pytest.mark.parametrize("name", FILES_NOT_LOADED)
def test_file_that_no_loader_opens_is_not_an_archive(has_archive_at_end, name):
    """A false alarm would stop a CI job."""
    assert not has_archive_at_end(FILES_NOT_LOADED[name])
    assert not is_loaded_by_its_end(FILES_NOT_LOADED[name])


# --- names in the central directory ----------------------------------------------------------------------------------


@pytest.fixture
def mentions_name(tmp_path):
    """Return a function that checks if the directory of an archive mentions a name."""

    def check(data: bytes, *names: bytes) -> bool:
        (tmp_path / "m.zip").write_bytes(data)
        return zip_archive.mentions(str(tmp_path / "m.zip"), *names)

    return check


@pytest.mark.parametrize("lies", [Lies(), Lies(zip64=False), Lies(only_in_zip64=True)], ids=["both", "short", "zip64"])
def test_directory_mentions_only_its_names(mentions_name, lies):
    """Contents and local headers are not searched."""
    data = build([Member("archive/data.pkl", b"/constants.pkl"), Member("archive/x", local_name=b"archive/z")], lies)
    assert mentions_name(data, b"/data.pkl")
    assert mentions_name(data, b"/nothing", b"/x")
    assert not mentions_name(data, b"/constants.pkl")
    assert not mentions_name(data, b"/z")
    assert not mentions_name(data, b"/nothing", b"/neither")


@pytest.mark.parametrize("only_in_zip64", [False, True])
def test_long_directory_is_searched_only_at_both_ends(mentions_name, only_in_zip64):
    """Only 64 KiB at either end of the directory are searched; its end lies in the last 64 KiB of the file."""
    names = [f"a/{n:05}-{'n' * 60}" for n in range(3000)]
    names[0], names[1500], names[-1] = "a/first", "a/middle", "a/last"
    data = build([Member(name) for name in names], Lies(only_in_zip64=only_in_zip64))
    mentions = [mentions_name(data, name) for name in (b"a/first", b"a/00500-", b"a/middle", b"a/02500-", b"a/last")]
    assert mentions == [True, True, False, True, True]
    assert not mentions_name(data, b"a/00700-")


def test_file_that_is_not_an_archive_mentions_no_name(mentions_name, tmp_path):
    """Bytes of any kind, a truncated end record, and a missing or empty file mention no name."""
    for data in (b"", b"x", b"data.pkl" * 999, GOOD[:-1], GOOD[: GOOD.index(b"PK\5\6") + 4], b"PK\5\6data.pkl"):
        assert not mentions_name(data, b"data.pkl")
    assert not zip_archive.mentions(str(tmp_path / "missing"), b"data.pkl")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [(12, 2**32 - 2, True), (16, None, True), (16, 2**32 - 2, False), (16, 2**32 - 1, False)],
    ids=["too long", "at the end of the file", "behind the file", "in a zip64 record that is not there"],
)
def test_false_end_record_is_searched_without_an_error(mentions_name, field, value, expected):
    """The part of the directory in the file is searched; the reader of the archive reports the error."""
    data = bytearray(build(records(), Lies(zip64=False)))
    struct.pack_into("<I", data, data.index(b"PK\5\6") + field, len(data) if value is None else value)
    assert mentions_name(bytes(data), b"data.pkl") is expected
    assert mentions_name(bytes(data), b"nothing") is False
