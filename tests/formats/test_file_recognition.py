"""A file that is not a checkpoint is named by its real type; a checkpoint is recognised by content, not by name."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import pickle
import re
import sqlite3
import subprocess
import sys
import tarfile
import zipfile

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save

from statecli import formats
from statecli.core.errors import UnreadableError
from statecli.formats import unsupported

from .msgpacks import array, pack

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 435778770\n"
DVC = b"outs:\n- md5: 0123456789abcdef0123456789abcdef\n  size: 5\n  path: model.pt\n"


def pack_tar(*members: str) -> bytes:
    """Return a tar archive of small members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in members:
            info = tarfile.TarInfo(name)
            info.size = 5
            archive.addfile(info, io.BytesIO(b"12345"))
    return out.getvalue()


def pack_zip(*members: str) -> bytes:
    """Return a zip archive of small members."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in members:
            archive.writestr(name, b"12345")
    return out.getvalue()


def npy() -> bytes:
    """Return the file of a numpy array."""
    out = io.BytesIO()
    numpy.save(out, numpy.zeros(3))
    return out.getvalue()


def sqlite() -> bytes:
    """Return the bytes of a database with a single table."""
    with sqlite3.connect(":memory:") as database:
        database.execute("create table t (x)")
        return database.serialize() if hasattr(database, "serialize") else b"SQLite format 3\0" + bytes(84)


BARE_PICKLE = "is a bare pickle, not written by torch.save; statecli does not read it"
#: case -> (bytes, the line without its path), under any file name. FILE is the path of the file.
FOREIGN_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is an empty file"),
    "git-lfs": (LFS, "is a git-lfs pointer (for a file of 435,778,770 bytes): run: git lfs pull"),
    "git-annex": (b"/annex/objects/SHA256E-s100--abc.pt\n", "is a pointer of git-annex: run: git annex get FILE"),
    "git-lfs without a size": (LFS[:60], "is a git-lfs pointer: run: git lfs pull"),
    "DVC": (DVC, "is a DVC pointer, not the weights; run: dvc pull"),
    "HTML": (b"<!DOCTYPE html>\n<html>", "is an HTML page: the server sent a login page or an error page"),
    "HTML in capitals": (b"\r\n <HTML>", "is an HTML page: the server sent a login page or an error page"),
    "XML": (b'<?xml version="1.0"?><Error>', "is an XML document: the server sent an error page"),
    "JSON error": (b'{"error":"Access denied"}', "is a JSON error message: the download failed"),
    "JSON": (
        b'{"architectures": ["BertModel"]}',
        "is a JSON document; to read a sharded checkpoint, give its *.index.json file or its folder",
    ),
    "JSON list": (
        b"[1, 2, 3, 4]",
        "is a JSON document; to read a sharded checkpoint, give its *.index.json file or its folder",
    ),
    "text": (b"Entry not found", "is not a checkpoint (text file)"),
    "a template": (b"{%- for message in messages %}", "is not a checkpoint (text file)"),
    "a template with an expression first": (b"{{ bos_token }}", "is not a checkpoint (text file)"),
    "a log": (b"[INFO] epoch 1\n", "is not a checkpoint (text file)"),
    "long text": ("déjà vu ".encode() * 100, "is not a checkpoint (text file)"),
    "text cut in a character": (
        b"x" * 511 + "é".encode() * 20,
        "is not a checkpoint (text file)",
    ),
    "C code with a brace for its eighth byte": (b"int f() {\n}\n", "is not a checkpoint (text file)"),
    "gzip": (gzip.compress(b"x" * 99), "is a gzip file: unpack it first (gunzip)"),
    "bzip2": (bz2.compress(b"x" * 99), "is a bzip2 file: unpack it first (bunzip2)"),
    "xz": (lzma.compress(b"x" * 99), "is an xz file: unpack it first (unxz)"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x58" + bytes(9), "is a zstd file: unpack it first (unzstd)"),
    "lz4": (b"\x04\x22\x4d\x18" + bytes(9), "is an LZ4 file: unpack it first (unlz4)"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4" + bytes(20), "is a 7z archive: unpack it first (7z x)"),
    "RAR": (b"Rar!\x1a\x07\1\0" + bytes(20), "is a RAR archive: unpack it first (unrar x)"),
    "tar": (pack_tar("a.txt"), "is a tar archive: unpack it first (tar -xf)"),
    "torch.save of 2016": (
        pack_tar("sys_info", "pickle", "tensors", "storages"),
        "is a tar archive from torch before 0.1.10, which statecli does not read: load the file with "
        "torch.load(path, weights_only=False) if you trust its author, and save it again with torch.save",
    ),
    "empty zip": (pack_zip(), "is an empty zip archive"),
    "pickle": (pickle.dumps({"a": [1.0]}), BARE_PICKLE),
    **{
        f"pickle of protocol {protocol}, which has no mark": (
            pickle.dumps({"a": [1.0], "b": "text"}, protocol),
            BARE_PICKLE,
        )
        for protocol in (0, 1)
    },
    "pickle of protocol 0 that calls": (b"cos\nsystem\n(S'true'\ntR.\n", BARE_PICKLE),
    "text that begins like a pickle": (b"I am no pickle\n", "is not a checkpoint (text file)"),
    "GGML": (
        b"tjgg\3\0\0\0" + bytes(16),
        "is a GGML file from before GGUF (2023): convert the model again with llama.cpp",
    ),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "is an HDF5 file (Keras?), which statecli does not read"),
    "TorchScript flatbuffer": (
        b"\x18\0\0\0PTMF" + bytes(40),
        "is a TorchScript flatbuffer, which statecli does not read: save the program again with torch.jit.save",
    ),
    "ONNX": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0", "is an ONNX model, which statecli does not read"),
    "PDF": (b"%PDF-1.7\n", "is a PDF document"),
    "ELF": (b"\x7fELF\2\1\1" + bytes(9), "is a program (ELF)"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(9), "is a PNG picture"),
    "JPEG": (b"\xff\xd8\xff\xe0" + bytes(9), "is a JPEG picture"),
    "SQLite": (sqlite(), "is an SQLite database"),
    "zeros": (
        bytes(5000),
        "is a file of 5000 zero bytes: the write or the download did not finish",
    ),
    "white space": (b"\n" * 30, "is a file with only white space (30 bytes)"),
    "noise": (b"\xfe\xdc\xba" * 30, "is not in a format that statecli reads"),
}


@pytest.mark.parametrize("case", FOREIGN_FILES)
def test_file_is_named_by_its_content(case, tmp_path, line):
    """A file that is not a checkpoint is named by its content, under any suffix."""
    data, expected = FOREIGN_FILES[case]
    for suffix in (".pt", ".safetensors", ".bin", ""):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(data)
        assert line(path) == expected.replace("FILE", str(path))


@pytest.mark.parametrize("command", ["inspect", "audit", "diff", "lock"])
@pytest.mark.parametrize("name", [".env", "x.pt", "x.safetensors", "model.safetensors.index.json", "x.npz", "x.gguf"])
def test_no_command_prints_the_content_of_a_refused_file(command, name, tmp_path, statecli):
    """Neither the beginning of a text nor an invalid number of a header is printed."""
    for content in (b"SECRET=%s\n", b'"%s"', b"{%s", b"[%s", b"PK\3\4%s", b"\x93NUMPY%s", b"GGUF%s"):
        (tmp_path / name).write_bytes(content % b"hunter2hunter2")
        targets = [tmp_path / name] * (2 if command == "diff" else 1)
        result = statecli(command, *targets)
        assert result.code == 2, content
        assert "hunter" not in result.out + result.err, content


#: Offset of the bytes that identify a kind of file, if not 0.
SIGN_OFFSETS = {
    "tar": 257,
    "tar with a folder first": 257,
    "tar of nothing but a long name": 257,
    "torch.save of 2016": 257,
    "TorchScript flatbuffer": 4,
}


@pytest.mark.parametrize("case", sorted(FOREIGN_FILES.keys() - {"empty", "zeros", "noise"}))
def test_every_sign_is_needed(case):
    """With another byte in place of the identifying byte, the same file gets another description."""
    data, expected = FOREIGN_FILES[case]
    position = SIGN_OFFSETS.get(case, 0)
    changed_data = data[:position] + b"\xf5" + data[position + 1 :]
    assert f"is {unsupported.describe_content('file.pt', changed_data, len(changed_data))}" != expected.replace(
        "FILE", "file.pt"
    )


def test_every_magic_number_is_tested():
    """Each line of the table of first bytes has a case above."""
    expected_messages = [expected for _, expected in FOREIGN_FILES.values()]
    untested = [
        description
        for _, description in unsupported.MAGIC
        if not any(description in expected for expected in expected_messages)
    ]
    assert untested == ["a Windows program"]


def test_windows_program_is_named(tmp_path, line):
    """A program is named, and not taken for text."""
    path = tmp_path / "setup.pt"
    path.write_bytes(b"MZ\x90\0\3\0\0\0")
    assert line(path) == "is a Windows program"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            ("model.safetensors", "config.json"),
            "is a zip archive that contains model.safetensors: unpack it first (unzip)",
        ),
        (("m/", "m/a.pt", "m/b.bin"), "is a zip archive that contains m/a.pt, m/b.bin: unpack it first (unzip)"),
        (("inner.zip",), "is a zip archive that contains inner.zip: unpack it first (unzip)"),
        (("readme.txt",), "is a zip archive, but torch.save did not write it: it contains readme.txt"),
        (("folder/",), "is a zip archive, but torch.save did not write it: it contains no file"),
    ],
    ids=["model", "folder", "archive", "text", "nothing"],
)
def test_checkpoints_in_a_zip_are_named_in_the_error(members, expected, tmp_path, line):
    """The message names the checkpoints, and the command to unpack them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in members:
            archive.writestr(name, b"" if name.endswith("/") else b"12345")
    (tmp_path / "m.zip").write_bytes(out.getvalue())
    assert line(tmp_path / "m.zip") == expected


# Recognition by content.


@functools.cache
def build_contents() -> dict[str, bytes]:
    """Return a file of every format that statecli reads."""
    messages = {}
    for name, zipped in (("torch-zip", True), ("torch-legacy", False)):
        out = io.BytesIO()
        torch.save({"a": torch.zeros(3)}, out, _use_new_zipfile_serialization=zipped)
        messages[name] = out.getvalue()
    flax = pack({"a": array([3])})
    return {**messages, "safetensors": save({"a": torch.zeros(3)}), "npy": npy(), "flax-msgpack": flax}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin", ".json", ".index.json", "", ".md"])
@pytest.mark.parametrize("format", ["safetensors", "torch-zip", "torch-legacy", "npy", "flax-msgpack"])
def test_content_decides_the_format_under_any_suffix(format, suffix, tmp_path):
    """A checkpoint is read under any suffix, including a misleading suffix."""
    path = tmp_path / f"file{suffix}"
    path.write_bytes(build_contents()[format])
    state = formats.read(str(path))
    assert (state.format, [tensor.shape for tensor in state.tensors]) == (format, [(3,)])


def test_formats_do_not_overlap(tmp_path):
    """Exactly one format recognises each file."""
    for name, data in build_contents().items():
        takers = [format.name for format in formats.FORMATS if format.sniff("file", data[:4096])]
        assert takers == [name]


# Paths that cannot be opened.


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dev/zero", "is a character device, not a regular file"),
        ("/dev/random", "is a character device, not a regular file"),
        ("/proc/self/environ", "is an empty file"),
    ],
)
def test_device_files_are_refused(path, expected, line):
    """Endless and generated files are not read; files in /proc have the size 0."""
    if not os.path.exists(path):
        pytest.skip(f"no such file: {path}")
    assert line(path) == expected


def test_named_pipe_is_refused_without_blocking(tmp_path, line):
    """A named pipe without a writer is refused at once."""
    os.mkfifo(tmp_path / "fifo.pt")
    assert line(tmp_path / "fifo.pt") == "is a named pipe, not a regular file"


@pytest.mark.parametrize(
    ("link_target", "message"),
    [
        ("elsewhere", "the link leads to elsewhere, which does not exist"),
        (
            "../../blobs/0f",
            "the link leads to ../../blobs/0f, which is missing in the cache; download the repository again",
        ),
        (
            ".git/annex/objects/a/b/K/K",
            "its content is in git-annex but not on this machine; run: git annex get gone.pt",
        ),
    ],
)
def test_dangling_link_is_explained(tmp_path, line, in_tmp_path, link_target, message):
    """The line for a dangling link has the link's target and the way to get the content."""
    (tmp_path / "gone.pt").symlink_to(link_target)
    assert line("gone.pt") == f"cannot be opened: {message}"


def test_a_missing_folder_is_named(tmp_path, statecli):
    """The message has the first missing folder of the path."""
    result = statecli("inspect", tmp_path / "runs" / "1" / "a.pt")
    assert result.err.endswith(f"no such file or directory; the folder {tmp_path}/runs does not exist\n")


def test_control_characters_of_a_file_name_are_escaped(tmp_path, inspect):
    """Control characters of a path are escaped, so that they do not act on the terminal."""
    path = tmp_path / "\x1b[31mred.pt"
    path.write_bytes(b"Not Found")
    code, _, err = inspect(path)
    assert code == 2
    assert "\x1b" not in err
    assert "\\x1b[31mred.pt: is not a checkpoint" in err


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.text(max_size=99).map(str.encode))
def test_random_bytes_are_refused_in_one_line(tmp_path, data):
    """Any content raises only UnreadableError, in one line that starts with the path."""
    path = tmp_path / "any.pt"
    path.write_bytes(data)
    with pytest.raises(UnreadableError) as error:
        formats.read(str(path))
    assert re.fullmatch(rf"{re.escape(str(path))}: [^\n]+", str(error.value))


def test_listing_imports_neither_torch_nor_numpy(tmp_path):
    """A refused file gives one line on stderr and exit status 2; a listing imports neither torch nor numpy."""
    (tmp_path / "page.pt").write_bytes(b"<html>")
    (tmp_path / "fine.safetensors").write_bytes(save({"a": torch.zeros(3)}))
    run = [sys.executable, "-X", "importtime", "-m", "statecli", "inspect", "-f", "json"]
    page = subprocess.run([*run[:1], *run[3:], tmp_path / "page.pt"], capture_output=True, text=True)
    text = f"statecli: {tmp_path / 'page.pt'}: is an HTML page: the server sent a login page or an error page\n"
    assert (page.returncode, page.stdout, page.stderr) == (2, "", text)
    fine = subprocess.run([*run, tmp_path / "fine.safetensors"], capture_output=True, text=True)
    assert json.loads(fine.stdout)["tensors"][0]["fqn"] == "a"
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in fine.stderr.splitlines()}
    assert "statecli" in imported
    assert not imported & {"torch", "numpy", "safetensors", "rich.table"}
