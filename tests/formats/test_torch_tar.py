"""Tar archives of torch.save before 0.1.10, written by hand in the format of that time; torch 2.13 is the oracle."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from statecli import formats
from statecli.commands.audit.run import Request, audit
from statecli.core.errors import UnreadableError
from statecli.file_scan.scan import scan_pickles
from statecli.rules.pickles import RULES
from statecli.targets.target_result import TargetStatus

from .attacks import build_pickle, call_function, global_name, legacy, number, state_dict, tensor, text

SYS_INFO = build_pickle(b"}" + text("protocol_version") + number(1000) + b"s")
FLOATS = np.arange(12, dtype="<f4")
LONGS = np.array([7, 8], dtype="<i8")


def storage(key: int, kind: str, data: np.ndarray, location: bytes = text("cpu")) -> bytes:
    """Return an entry of the member `storages`."""
    entry = build_pickle(number(key) + location + global_name("torch", kind) + b"\x87")
    return entry + struct.pack("<q", data.size) + data.tobytes()


def tensor_entry(key: int, storage_key: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """Return an entry of the member `tensors`."""
    head = build_pickle(number(key) + number(storage_key) + global_name("torch", "FloatTensor") + b"\x87")
    return head + struct.pack(f"<ii{2 * len(size) + 1}q", len(size), 0, *size, *stride, offset)


def persistent(key: int) -> bytes:
    """Return the reference to a tensor or a storage in the object's pickle: its key as text."""
    return text(str(key)) + b"Q"


def members(**changes: bytes) -> dict[str, bytes]:
    """Return the members for a state_dict with four tensors (`v` over a storage view) and a storage."""
    named_views = b"]((" + number(13) + number(11) + number(8) + number(4) + b"te"
    entries = tensor_entry(21, 11, (3, 4), (4, 1)) + tensor_entry(22, 11, (4, 2), (1, 4), 4)
    entries += tensor_entry(23, 12, (2,), (1,)) + tensor_entry(24, 13, (2, 2), (2, 1))
    keys = {"a": 21, "t": 22, "n": 23, "v": 24, "s": 12}
    body = b"}(" + b"".join(text(name) + persistent(key) for name, key in keys.items()) + b"u"
    contents = {
        "sys_info": SYS_INFO,
        "pickle": build_pickle(body),
        "tensors": build_pickle(number(4)) + entries,
        "storages": build_pickle(number(2))
        + storage(11, "FloatStorage", FLOATS)
        + storage(12, "LongStorage", LONGS)
        + build_pickle(named_views),
    }
    return {**contents, **changes}


def pack_tar(
    contents: dict[str, bytes],
    form: int = tarfile.PAX_FORMAT,
    change: Callable[[tarfile.TarInfo], object] | None = None,
) -> bytes:
    """Return a tar as written by torch: times have fractions, so each member has an extended header.

    `change` edits the header of a member; its time then has no fraction.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=form) as archive:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1488888888
            if change is not None:
                change(info)
            elif form == tarfile.PAX_FORMAT:
                info.mtime = 1488888888.25
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def write_file(tmp_path):
    """Return a function that writes bytes to a file and returns the path."""

    def write(data: bytes, name: str = "x.pt") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def load(path):
    return torch.load(path, weights_only=False)


def list_findings(path) -> list[tuple[str, str]]:
    """Return the findings of the rules about pickles."""
    names = tuple(rule.name for rule in RULES)
    (target,) = audit(Request((str(path),), select=names)).targets
    return [(finding.rule, finding.message) for finding in target.findings]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_tensors_are_not_read(form, write_file):
    """The error suggests a remedy: torch still loads the file."""
    path = write_file(pack_tar(members(), form))
    assert set(load(path)) == set("atnvs")
    with pytest.raises(UnreadableError, match=r"from torch before 0\.1\.10.*save it again with torch\.save"):
        formats.read(str(path))


def test_honest_tar_is_an_unscanned_pickle(write_file):
    """The pickles of an honest tar have no harmful name, but only the first pickle of each member is read."""
    path = write_file(pack_tar(members()))
    assert {rule for rule, _ in list_findings(path)} == {"unscanned-pickle"}
    assert {"storages", "tensors", "pickle"} <= {finding.where for finding in scan_pickles(str(path))}


def system(mark: Path) -> bytes:
    return call_function(global_name("os", "system"), text(f"touch {mark}"))


CALL_PLACES = {
    "the number of storages": lambda call: {"storages": build_pickle(call) + b""},
    "a location": lambda call: {
        "storages": build_pickle(number(1))
        + storage(11, "FloatStorage", FLOATS, call + b"0" + text("cpu"))
        + build_pickle(b"]")
    },
    "behind the elements": lambda call: {
        "storages": build_pickle(number(1)) + storage(11, "FloatStorage", FLOATS) + build_pickle(call + b"0]")
    },
    "the number of tensors": lambda call: {"tensors": build_pickle(call + b"0" + number(0))},
    "behind the strides": lambda call: {
        "tensors": build_pickle(number(2)) + tensor_entry(21, 11, (3, 4), (4, 1)) + build_pickle(call)
    },
    "the object": lambda call: {"pickle": build_pickle(call)},
    "elements that are a pickle": lambda call: {
        "storages": build_pickle(number(1)) + storage(11, "ByteStorage", np.frombuffer(b"x", "u1")) + build_pickle(call)
    },
}


#: Places after numbers, where statecli does not look for a pickle.
AFTER_NUMBERS = ("behind the elements", "behind the strides", "elements that are a pickle")


@pytest.mark.parametrize("place", CALL_PLACES)
def test_call_in_any_member_is_reported(place, write_file, tmp_path):
    """A call in any member is reported; behind elements or strides, only as an unscanned pickle."""
    mark = tmp_path / "ran"
    path = write_file(pack_tar(members(**CALL_PLACES[place](system(mark)))))
    rules = {rule for rule, _ in list_findings(path)}
    assert "unscanned-pickle" in rules
    assert ("unsafe-global" in rules) == (place not in AFTER_NUMBERS)
    assert not mark.exists()
    with contextlib.suppress(Exception):  # torch may refuse the rest
        load(path)
    assert mark.exists()


def link_storages(call: bytes) -> bytes:
    """Return a tar in which `storages` is a link to another member."""

    def change(info: tarfile.TarInfo) -> None:
        if info.name == "storages":
            info.type, info.linkname = tarfile.LNKTYPE, "other"

    contents = members()
    del contents["storages"]
    return pack_tar({**contents, "other": build_pickle(call), "storages": b""}, change=change)


def resize_member(call: bytes) -> bytes:
    """Return a tar in which only the extended header has the size of `pickle`; its own header has 0."""
    contents = members(pickle=build_pickle(call))
    archive = bytearray(pack_tar(contents, change=lambda info: info.pax_headers.update(size=str(info.size))))
    position = archive.index(b"pickle\0")
    assert position % 512 == 0
    archive[position + 124 : position + 136] = b"%011o\0" % 0
    archive[position + 148 : position + 156] = b" " * 8
    archive[position + 148 : position + 156] = b"%06o\0 " % sum(archive[position : position + 512])
    return bytes(archive)


@pytest.mark.parametrize(
    ("build_data", "expected"),
    [
        (link_storages, ["loading the nested pickle calls os.system, which runs shell commands (other, byte 2)"]),
        (resize_member, ["loading the file calls os.system, which runs shell commands (pickle, byte 2)"]),
    ],
    ids=["a link", "a size in an extended header"],
)
def test_a_call_in_a_linked_or_resized_member_is_reported(build_data, expected, write_file, tmp_path):
    """tarfile follows the link, and prefers the size in the extended header."""
    mark = tmp_path / "ran"
    path = write_file(build_data(system(mark)))
    assert [message for rule, message in list_findings(path) if rule == "unsafe-global"] == expected
    assert not mark.exists()
    with contextlib.suppress(Exception):  # torch may refuse the rest
        load(path)
    assert mark.exists()


def header(begin: bytes, size: int, kind: bytes = b"0") -> bytes:
    """Return a tar header of 512 bytes that starts with `begin`; its checksum is a negative number in base 256."""
    block = bytearray(begin.ljust(512, b"\0"))
    block[124:136] = b"%011o\0" % size
    block[156:157] = kind
    block[157:257], block[265:329] = b"\x80" * 100, b"\x80" * 64
    block[148:156] = b" " * 8
    signed = sum(struct.unpack("<512b", block))
    assert signed < 0
    block[148:156] = b"\xff" + (256**7 + signed).to_bytes(7, "big")
    return bytes(block)


def pad_block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def polyglot_legacy(hidden: bytes, kind: bytes = b"0") -> bytes:
    """Return a legacy stream that starts with a tar header: its machine description has the bytes of the header."""
    stream = legacy(state_dict(w=tensor()), [("0", 4, bytes(16))])
    position = stream.index(b"}" + text("little_endian"))
    begin = stream[: position + 1] + text("x") + b"B" + struct.pack("<I", 512 - position - 1 - 6 - 5)
    remainder = b"s" + stream[position + 1 :]
    extra = pad_block(remainder)
    return header(begin, len(extra), kind) + extra + hidden


def polyglot_safetensors(hidden: bytes) -> bytes:
    """Return a safetensors file whose only tensor is the archive."""
    description = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    size = len(hidden) + 512 - 8 - 96
    text_of = (description % (size, size)).ljust(96)
    begin = struct.pack("<Q", 96) + text_of
    return header(begin, 0) + hidden


POLYGLOTS = {
    "a legacy file": lambda call: polyglot_legacy(pack_tar(members(pickle=build_pickle(call)))),
    "a legacy file, with the call in the tensors": lambda call: polyglot_legacy(
        pack_tar(members(tensors=build_pickle(call)), tarfile.GNU_FORMAT)
    ),
    "a legacy file, with the call in the storages": lambda call: polyglot_legacy(
        pack_tar(members(storages=build_pickle(call)), tarfile.USTAR_FORMAT)
    ),
    "a safetensors file": lambda call: polyglot_safetensors(pack_tar(members(pickle=build_pickle(call)))),
}


@pytest.mark.parametrize("name", POLYGLOTS)
def test_tar_with_a_negative_checksum_is_scanned(name, write_file, tmp_path):
    """torch.load tries tarfile first, and tarfile accepts signed checksums in base 256."""
    mark = tmp_path / "ran"
    path = write_file(POLYGLOTS[name](system(mark)))
    assert {"unsafe-global", "unscanned-pickle"} <= {rule for rule, _ in list_findings(path)}
    with contextlib.suppress(Exception):  # torch may refuse the rest
        load(path)
    assert mark.exists()


@pytest.mark.parametrize("kind", [b"0", b"x"], ids=["a member", "an extended header"])
def test_file_that_is_also_a_tar_is_an_unscanned_pickle(kind, write_file):
    """torch loads other tensors than statecli lists."""
    path = write_file(polyglot_legacy(pack_tar(members()), kind))
    assert set(load(path)) == set("atnvs")
    assert [row.fqn for row in formats.read(str(path)).tensors] == ["w"]
    assert [rule for rule, _ in list_findings(path) if rule == "unscanned-pickle"]


def hide_member(call: bytes, before: str = "") -> bytes:
    """Return an archive whose first member is another file; `before` is the variation."""

    def change(info: tarfile.TarInfo) -> None:
        if before == "link" and info.name == "readme":
            info.type, info.linkname, info.size = tarfile.SYMTYPE, "a", 0
        if before == "path" and info.name == "storages":
            info.name, info.pax_headers = "other", {"path": "storages"}

    form = tarfile.GNU_FORMAT if before == "gnu" else tarfile.PAX_FORMAT
    return pack_tar({"readme": b"hello", **members(storages=build_pickle(call))}, form, change)


@pytest.mark.parametrize("before", ["", "path", "gnu", "link"])
def test_a_tar_that_torch_unpickles_is_not_skipped_in_a_folder(before, write_file, tmp_path):
    """A tar is a target because of its members, not because of its name or its first member."""
    mark = tmp_path / "ran"
    path = write_file(hide_member(system(mark), before), "learned_embeds.bin")
    (target,) = audit(Request((str(tmp_path),))).targets
    assert target.status is not TargetStatus.SKIPPED
    with contextlib.suppress(Exception):  # torch may refuse the rest
        load(path)
    assert mark.exists()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tar_of_other_files_is_skipped_in_a_folder(form, write_file, tmp_path):
    """An archive of pictures and folders with long names is not a checkpoint."""
    write_file(
        pack_tar({"readme": b"a" * 700, "storages/a.png": b"b", f"{'long/' * 40}storages.txt": b"c"}, form), "a.tar"
    )
    (target,) = audit(Request((str(tmp_path),))).targets
    assert target.status is TargetStatus.SKIPPED


def test_every_beginning_is_refused_or_read(write_file):
    """Each truncated tar is read or raises UnreadableError, never another error."""
    archive = pack_tar(members(), tarfile.USTAR_FORMAT)
    for end in range(1, len(archive), 97):
        path = write_file(archive[:end])
        with contextlib.suppress(UnreadableError):
            formats.read(str(path))
        list_findings(path)


def test_scan_of_other_files_does_not_import_tarfile(tmp_path):
    """Scans of other files do not import tarfile, because the import takes as long as the import of statecli."""
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    code = "import sys; from statecli.file_scan.scan import *; scan_pickles('a.pt'); print('tarfile' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
