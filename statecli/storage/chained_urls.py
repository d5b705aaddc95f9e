"""The outer URL of a chain, `https://…/a.zip` in `zip://m.pt::https://…/a.zip`, read by an object store of statecli.

The filesystems of fsspec would wait for ever, accept any range, and mistake another archive for the same one. A
filesystem that reads by the object stores replaces them. fsspec gets a token instead of the URL, so that fsspec neither
logs a URL nor keeps one on disk.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from hashlib import sha256
from typing import Any
from zipfile import ZIP_STORED, ZipExtFile, ZipInfo

import fsspec
from fsspec.implementations.zip import ZipFileSystem
from fsspec.spec import AbstractBufferedFile

from statecli.core.errors import UnreadableError
from statecli.storage.object_cache import HEAD_BYTES, RemoteFile
from statecli.storage.object_store import Listing, Missing, Unsure, open_store
from statecli.storage.store import FileVersion
from statecli.storage.url import has_host, join, split_url

#: Scheme of the filesystem for fsspec.
SCHEME = "statecli"
#: Most bytes fetched ahead of consecutive reads, and bytes skipped at a time.
MAX_AHEAD_BYTES, SKIP_BYTES = 1 << 20, 256 << 10
#: Most open readers of an archive: one a thread, and one at the beginning.
MAX_READERS = 17

_LINK = re.compile(r"::([a-zA-Z][a-zA-Z0-9+.-]*://)")
#: Suffix by which fsspec chooses the compression of an archive.
_SUFFIX = re.compile(r"\.[a-zA-Z0-9]{1,5}$")
#: Suffixes that fsspec does not know.
_LONG_SUFFIX = {".tgz": ".gz", ".tbz2": ".bz2", ".tbz": ".bz2", ".txz": ".xz"}
#: Local header of a member: the lengths of the name and of the extra field.
_HEADER = struct.Struct("<26x2H")


def _split_chain(url: str) -> tuple[str, str | None]:
    """Return the inner links and the outer URL; None without an outer URL that an object store reads."""
    match = next((link for link in _LINK.finditer(url) if has_host(link[1])), None)
    return (url, None) if match is None else (url[: match.start()], url[match.start() + 2 :])


class OuterUrls:
    """The outer URLs of chains by token, and their files by token and path; of one process."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._files: dict[str, RemoteFile] = {}

    def rewrite(self, url: str) -> tuple[str, str | None]:
        """Return the chain for fsspec, with a token as the outer URL, and the token."""
        inner, outer = _split_chain(url)
        if outer is None:
            return url, None
        suffix = _SUFFIX.search(split_url(outer).path)
        ending = suffix[0] if suffix else ""
        token = sha256(outer.encode()).hexdigest() + _LONG_SUFFIX.get(ending.lower(), ending)
        self._urls[token] = outer
        return f"{inner}::{SCHEME}://{token}", token

    def version(self, token: str) -> FileVersion | None:
        """Return the version of a file if the file was requested."""
        file = self._files.get(token)
        return None if file is None else file.version

    def open(self, path: str) -> RemoteFile:
        """Return the file of a token, or in the folder of a token."""
        if path not in self._files:
            url = self._url(path)
            self._files.setdefault(path, RemoteFile(url, open_store(url)))
        return self._files[path]

    def is_folder(self, path: str) -> bool:
        """Return True if the URL ends with a slash."""
        return split_url(self._url(path)).path.endswith("/")

    def listing(self, path: str) -> Listing:
        """Return the names in the folder."""
        url = self._url(path)
        return open_store(url).listing(url)

    def _url(self, path: str) -> str:
        token, _, rest = path.partition("/")
        return join(self._urls[token], *rest.split("/")) if rest else self._urls[token]


class StoreFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # it has no types
    """The object stores as a filesystem of fsspec. Errors of the stores are raised as they are."""

    protocol = SCHEME
    cachable = False

    def __init__(self, outer_urls: OuterUrls, **options: Any) -> None:
        super().__init__(**options)
        self._outer_urls = outer_urls

    @classmethod
    def _parent(cls, path: str) -> str:
        # So that fsspec looks for a file in the listing of the file itself.
        return path

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the entry of a file; fsspec does not call this for a folder."""
        path = self._strip_protocol(path)
        file = self._outer_urls.open(path)
        size = file.size
        assert file.version is not None  # noqa: S101 - set by size
        return {"name": path, "size": size, "type": "file", "ETag": file.version.marker}

    def exists(self, path: str, **_: Any) -> bool:
        """Return False for a missing file. A file that cannot be requested raises."""
        try:
            self.info(path)
        except Missing:
            return False
        return True

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return the entries of a folder, or of a file the file itself."""
        path = self._strip_protocol(path)
        entries = self._list_entries(path)
        return entries if detail else [entry["name"] for entry in entries]

    def _list_entries(self, path: str) -> list[dict[str, Any]]:
        why: UnreadableError | None = None
        try:
            if not self._outer_urls.is_folder(path):
                return [self.info(path)]
        except (Missing, Unsure) as error:
            why = error
        try:
            folders = self._outer_urls.listing(path).folders
        except (Missing, Unsure):
            if why is None:
                raise
            raise why from None
        kinds = {True: "directory", False: "file"}
        return [{"name": f"{path}/{name}", "size": None, "type": kinds[folders[name]]} for name in folders]

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], **_: Any) -> list[bytes]:
        """Raise errors; the method of fsspec returns an error as bytes."""
        return [self.cat_file(path, start, end) for path, start, end in zip(paths, starts, ends, strict=True)]

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Write a file whole or not at all, because a cache of fsspec would use a part as the whole file."""
        part = f"{lpath}.{os.getpid()}"
        try:
            with self.open(rpath) as source, open(part, "wb") as target:
                while data := source.read(MAX_AHEAD_BYTES):
                    target.write(data)
            os.replace(part, lpath)
        except BaseException:
            if os.path.lexists(part):
                os.remove(part)
            raise
        finally:
            self._outer_urls.open(self._strip_protocol(rpath)).release()

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> OpenFile:
        if mode != "rb":
            raise NotImplementedError
        file = self._outer_urls.open(path)
        file.prefetch_head()
        return OpenFile(self, path, file, block_size)


class OpenFile(AbstractBufferedFile):  # type: ignore[misc]  # as above
    """An open file: consecutive reads are fetched ahead, and not kept."""

    def __init__(self, filesystem: StoreFileSystem, path: str, file: RemoteFile, block_size: int | None = None) -> None:
        super().__init__(filesystem, path, "rb", block_size, cache_type="none", size=file.size)
        self.file = file
        file.add_reader()
        self._start, self._data, self._step = 0, b"", 0

    def _fetch_range(self, start: int, end: int) -> bytes:
        before = start - self._start
        if before >= 0 and end <= self._start + len(self._data):
            return self._data[before : end - self._start]
        cached = self.file.read_cached(start, end - start)
        if cached is not None:
            return cached
        follows = 0 <= before <= len(self._data) and bool(self._data)
        if not follows and end - start < HEAD_BYTES:
            # A header or a directory.
            self._start, self._data, self._step = start, self.file.read(start, end - start), HEAD_BYTES // 2
            return self._data
        self._step = min(2 * self._step, MAX_AHEAD_BYTES) if follows else end - start
        stop = min(max(end, start + self._step), self.size)
        self._start, self._data = start, self.file.request(start, stop - start)
        return self._data[: end - start]

    def close(self) -> None:
        """Close the file and drop the fetched bytes."""
        if not self.closed:
            self._data = b""
            self.file.remove_reader()
        super().close()


def open_members(filesystem: Any) -> Members | None:
    """Return the members of a zip archive that an object store reads; None for another filesystem."""
    is_archive = isinstance(filesystem, ZipFileSystem) and isinstance(filesystem.fo, OpenFile)
    return Members(filesystem) if is_archive else None


class Members:
    """The files in a zip archive, for many threads. An uncompressed file is a range of the archive.

    A compressed file can only be inflated from the beginning, so readers are kept for the reads that go on.
    """

    def __init__(self, filesystem: Any) -> None:
        self._zip, self._file = filesystem.zip, filesystem.fo
        self._starts: dict[int, int] = {}
        self._readers: list[tuple[str, ZipExtFile]] = []
        self._lock = threading.Lock()

    def get(self, path: str, offset: int, length: int) -> bytes:
        """Return these bytes of a member."""
        info = self._zip.getinfo(path)
        start, file = self._find_start(info), self._file.file
        if info.compress_type != ZIP_STORED or info.compress_size != info.file_size:
            return self._inflate(info, start, offset, length)
        cached: bytes | None = file.read_cached(start + offset, length)
        return file.request(start + offset, length) if cached is None else cached

    def _find_start(self, info: ZipInfo) -> int:
        """Return the offset of the bytes of a member."""
        with self._lock:
            at = info.header_offset
            if at not in self._starts:
                self._zip.open(info).close()  # compares the local header with the directory
                self._starts[at] = at + 30 + sum(_HEADER.unpack(self._file.file.read(at, 30)))
            return self._starts[at]

    def _inflate(self, info: ZipInfo, start: int, offset: int, length: int) -> bytes:
        reader = self._take_reader(info.filename, offset)
        if reader is None:
            source = OpenFile(self._file.fs, self._file.path, self._file.file)
            source.seek(start)
            reader = ZipExtFile(source, "r", info, None, True)
        while (left := offset - reader.tell()) > 0 and reader.read(min(left, SKIP_BYTES)):
            pass
        data = reader.read(length)
        with self._lock:
            self._readers.append((info.filename, reader))
            oldest = self._readers.pop(0)[1] if len(self._readers) > MAX_READERS else None
        if oldest is not None:
            oldest.close()
        return data

    def _take_reader(self, name: str, offset: int) -> ZipExtFile | None:
        """Remove and return the reader that has the fewest bytes to skip."""
        with self._lock:
            fits = [entry for entry in self._readers if entry[0] == name and entry[1].tell() <= offset]
            if not fits:
                return None
            best = max(fits, key=lambda entry: entry[1].tell())
            self._readers.remove(best)
            return best[1]


fsspec.register_implementation(SCHEME, StoreFileSystem, clobber=True)
