"""Descriptions of files that are not checkpoints, so that an error says more than "cannot read"."""

from __future__ import annotations

import os
import re

from statecli import core, pickle_scan
from statecli.core.errors import BarePickle, UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.formats.shared import tar_archive
from statecli.pickle_scan.code_in_text import find_code_in_text
from statecli.storage import checkpoint_folder, files, zip_archive
from statecli.storage.byte_source import ByteSource

#: Magic numbers before GGUF: "ggml", "ggmf", "ggjt" and the "ggla" of adapters, as little-endian bytes.
_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")
#: Text that git-annex leaves for an unlocked file without its content.
_ANNEX_POINTER = b"/annex/objects/"
#: First bytes of a file -> description and advice.
MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "a gzip file: unpack it first (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "a zstd file: unpack it first (unzstd)"),
    (b"\x04\x22\x4d\x18", "an LZ4 file: unpack it first (unlz4)"),
    (b"BZh", "a bzip2 file: unpack it first (bunzip2)"),
    (b"\xfd7zXZ\x00", "an xz file: unpack it first (unxz)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first (7z x)"),
    (b"Rar!", "a RAR archive: unpack it first (unrar x)"),
    (b"PK\x05\x06", "an empty zip archive"),
    *((magic, "a GGML file from before GGUF (2023): convert the model again with llama.cpp") for magic in _GGML),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras?), which statecli does not read"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "a program (ELF)"),
    (b"MZ", "a Windows program"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"SQLite format 3\x00", "an SQLite database"),
)

#: Beginning of an ONNX model: its ir_version and its producer's name.
_ONNX = compile_on_use(rb"\x08[\x01-\x20]\x12[\x01-\x40][ -~]{2}")
_DVC = compile_on_use(rb"(?:outs:\n- md5:|md5: [0-9a-f]{32}\n)")
#: Beginning of a file of `torch.compiler.save_cache_artifacts` or `CompiledArtifact.save`: a checksum of the rest
#: (missing in older files), then a version, a name, or the key of the code.
_COMPILED = compile_on_use(rb"(?:.{4})?\0{7}(?:\x01|[\x13\x15](?:Cache|AOT)CompiledArtifact|\x20.{32}\0{4})", re.DOTALL)
#: Start of a JSON object or list. A template of Jinja also begins with a brace, and a line of a log with a bracket.
_JSON_START = compile_on_use(rb'\{\s*(?:["}]|\Z)|\[\s*(?:[\[\]{"\d-]|true|false|null|\Z)')
_LFS_SIZE = compile_on_use(rb"\nsize (\d{1,20})\s")

_JSON = "a JSON document"
_TEXT = "a text file"
_UNKNOWN = "not in a format that statecli reads"
_OLD_TAR = (
    "a tar archive from torch before 0.1.10, which statecli does not read: load the file with torch.load(path, "
    "weights_only=False) if you trust its author, and save it again with torch.save"
)
_PICKLE = "a bare pickle, not written by torch.save; statecli does not read it"


def explain_refusal(path: str, head: bytes, size: int) -> UnreadableError:
    """Return the error for a file of unknown format. Its message describes the content and suggests a remedy.

    A file that begins like text may be a pickle of protocol 0 or 1.
    """
    description = describe_content(path, head, size)
    with ByteSource(path) as source:
        if not (head.startswith(b"PK\3\4") or _is_tar(head)) and zip_archive.ends_as_zip(source):
            return UnreadableError(
                "has a zip archive after other data; loaders open this archive, but statecli cannot read it. Do not "
                "load the file"
            )
        if (reason := find_code_in_text(path, source)) is not None:
            return UnreadableError(
                f"is a text file that can run code: {reason}. statecli does not check such code; remove the file "
                "unless you trust its author"
            )
        if is_compiled(head):
            return UnreadableError(
                "is a torch.compile cache, which statecli does not read: loading the file runs its pickles and its "
                "compiled code; compile the model again instead"
            )
        if description in (_TEXT, _UNKNOWN):
            description = _PICKLE if pickle_scan.one_pickle.begins_as_pickle(source) else description
    if description == _PICKLE:
        return BarePickle(f"is {description}")
    if description == _TEXT and path.endswith(".py"):
        return core.target_suggestions.describe_python_file(path).build_error(UnreadableError)
    if description == _TEXT:
        return UnreadableError("is not a checkpoint (text file)")
    if description == _JSON and b'"statecli.lock/' in head[:200]:
        return UnreadableError(
            "is a lock file; to compare a checkpoint with this lock, run: statecli audit CHECKPOINT --lock FILE"
        )
    if description == _JSON and os.path.basename(path) == checkpoint_folder.CONFIG:
        advice = checkpoint_folder.advise_class(path)
        return UnreadableError(f"is a configuration that does not name a model class; {advice}")
    advice = "; to read a sharded checkpoint, give its *.index.json file or its folder" if description == _JSON else ""
    return UnreadableError(f"is {description}{advice}")


def describe_content(path: str, head: bytes, size: int) -> str:
    """Describe the content in one clause: "a git-lfs pointer (…): run: git lfs pull".

    `head` is the start of the file: a few hundred bytes or more, if it has as many. `size` is its length in bytes.
    """
    if head.startswith(b"version https://git-lfs"):
        return _describe_lfs_pointer(head)
    if head.startswith(_ANNEX_POINTER):
        return f"a pointer of git-annex: run: git annex get{path and ' ' + quote_for_shell(path)}"
    for magic, description in MAGIC:
        if head.startswith(magic):
            return description
    if is_flatbuffer(head):
        return "a TorchScript flatbuffer, which statecli does not read: save the program again with torch.jit.save"
    if tar_archive.is_written_by_torch(head):
        return _OLD_TAR
    if _is_tar(head):
        return "a tar archive: unpack it first (tar -xf)"
    if head[:1] == b"\x80" and head[1:2] <= b"\x05" and len(head) > 2:
        return _PICKLE
    if files.get_name(path).endswith(".onnx") or _ONNX.match(head):
        return "an ONNX model, which statecli does not read"
    return _describe_text(head, size)


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def is_code(path: str, source: ByteSource) -> bool:
    """Return whether a loader would run code of a file that statecli cannot read in any format."""
    return is_compiled(source.head) or is_flatbuffer(source.head) or find_code_in_text(path, source) is not None


def is_flatbuffer(head: bytes) -> bool:
    """Return whether `torch.jit.load` reads a file with this beginning as a TorchScript flatbuffer."""
    return head[4:8] == b"PTMF"


def is_compiled(head: bytes) -> bool:
    """Return whether `torch.compiler.load_cache_artifacts` unpickles a file with this beginning."""
    return _COMPILED.match(head) is not None


def _describe_lfs_pointer(head: bytes) -> str:
    size = _LFS_SIZE.search(head)
    size_text = f" (for a file of {int(size[1]):,} bytes)" if size else ""
    return f"a git-lfs pointer{size_text}: run: git lfs pull"


def _describe_text(head: bytes, size: int) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head.strip(b"\0"):
        return f"a file of {size} zero bytes: the write or the download did not finish"
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page: the server sent a login page or an error page"
    if start.startswith(b"<"):
        return "an XML document: the server sent an error page"
    if start.startswith((b'{"error', b'{"message', b'{ "error')):
        return "a JSON error message: the download failed"
    if _JSON_START.match(start):
        return _JSON
    if _DVC.match(head):
        return "a DVC pointer, not the weights; run: dvc pull"
    if not head.strip():
        return f"a file with only white space ({size} bytes)"
    if _is_text(head):
        return _TEXT
    return _UNKNOWN


def _is_text(head: bytes) -> bool:
    try:
        text = head[:512].decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        if error.start < len(head[:512]) - 4:
            return False
        text = head[: error.start].decode("utf-8")
    return all(char.isprintable() or char in "\t\r\n\f" for char in text)
