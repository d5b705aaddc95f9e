"""Check whether two processes, or two runs, read the same file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from statecli.core.errors import UnreadableError
from statecli.storage import files

#: Number of samples of a file for its digest, evenly spaced from the first byte to the last.
SAMPLE_COUNT = 8
#: Size of a sample in bytes.
SAMPLE_BYTES = 4096


class FileIdentity(msgspec.Struct, frozen=True):
    """Properties that are equal for two copies of a file, or for two readers of a remote object.

    Equal samples do not prove equal files, because training may change a few bytes. A different modification time does
    not prove different files, because each job of a matrix has its own copy. So `merge` asks the user (`--copies`) if
    only the times differ.

    Attributes:
        bytes: Size in bytes; -1 if the file cannot be opened.
        version: Digest of samples of a local file, or ETag of a remote file; None if unknown.
        written: Time of the last modification of a local file, in nanoseconds.
    """

    bytes: int = -1
    version: str | None = None
    written: int | None = None

    def is_another(self, other: FileIdentity) -> bool:
        """Return whether the identities belong to different files. A file and its copy count as the same file."""
        return (self.bytes, self.version) != (other.bytes, other.version)


def identify_files(paths: Iterable[str]) -> dict[str, FileIdentity]:
    """Return the present identity of each file by path, in sorted order."""
    sorted_paths = sorted(paths)
    remote = _identify_remote([path for path in sorted_paths if files.is_remote(path)])
    return {path: remote[path] if path in remote else _identify_local(path) for path in sorted_paths}


def _identify_local(path: str) -> FileIdentity:
    import hashlib

    try:
        file = files.open_file(path)
    except UnreadableError:
        return FileIdentity()
    try:
        mtime_ns = os.stat(path).st_mtime_ns
        digest, last = hashlib.sha256(), max(file.size - SAMPLE_BYTES, 0)
        for n in range(SAMPLE_COUNT):
            digest.update(file.read(last * n // (SAMPLE_COUNT - 1), SAMPLE_BYTES))
        return FileIdentity(file.size, digest.hexdigest()[:16], mtime_ns)
    except OSError:
        return FileIdentity()
    finally:
        file.close()


def _identify_remote(paths: Sequence[str]) -> dict[str, FileIdentity]:
    identities = dict.fromkeys(paths, FileIdentity())
    files.prefetch(paths)
    for path in paths:
        with suppress(UnreadableError):
            files.open_file(path).close()
    access = files.export_access() if paths else None
    versions = {} if access is None else access.versions
    return {**identities, **{path: FileIdentity(*versions[path]) for path in paths if path in versions}}
