"""Files that content-addressed caches name by their digest, and the digest of their actual content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import msgspec

from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import checkpoint_folder, files
from statecli.targets.section_of_target import split_section

#: Path of a blob: `…/blobs/DIGEST` of huggingface_hub, `…/blobs/sha256-DIGEST` of ollama. 64 digits are a SHA-256; 40
#: digits are the SHA-1 by which git names the file, as the Hub does for files outside of LFS.
_BLOB = compile_on_use(r"[/\\]blobs[/\\](?:sha256-)?(?P<digest>[0-9a-f]{64}|[0-9a-f]{40})\Z")
_SHA256_DIGITS = 64
#: Number of bytes that are hashed at a time.
_PIECE_BYTES = 8 << 20


class NamedFile(msgspec.Struct, frozen=True):
    """A file whose name is a digest: its path, its size in bytes, and the digest in its name."""

    path: str
    size: int
    expected: str


class CheckedFile(msgspec.Struct, frozen=True):
    """A named file and the digest of its content. `digest` is None if the file was not read (see `unread_because`)."""

    file: NamedFile
    digest: str | None = None
    unread_because: str | None = None


def list_named_files(text: str) -> Iterator[NamedFile]:
    """Yield the files on disk that are named by their digest: the target itself, or files directly in its folder."""
    path = split_section(text)[0]
    if files.is_remote(path) or not files.exists(path):
        return
    paths = [files.join(path, name) for name in checkpoint_folder.list_files(path)] if files.is_folder(path) else [path]
    for file in paths:
        match = _BLOB.search(files.resolve_links(file))
        if match:
            yield NamedFile(file, files.get_size(file), match["digest"])


def compute_digest(file: NamedFile) -> CheckedFile:
    """Compute the digest of a file with the hash algorithm that fits the digest in its name."""
    import hashlib

    is_sha256 = len(file.expected) == _SHA256_DIGITS
    # git hashes the size before the bytes.
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    try:
        with closing(files.open_file(file.path)) as opened_file:
            for start in range(0, opened_file.size, _PIECE_BYTES):
                digest.update(opened_file.read(start, min(_PIECE_BYTES, opened_file.size - start)))
    except (UnreadableError, OSError) as error:
        return CheckedFile(file, unread_because=f"digest not computed, because the file cannot be read ({error})")
    return CheckedFile(file, digest.hexdigest())
