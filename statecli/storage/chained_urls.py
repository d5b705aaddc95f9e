"""What a chain lies in, where a store of ours has it: `https://…/a.zip` in `zip://m.pt::https://…/a.zip`.

fsspec's own would wait for ever, believe whatever range comes, and take another archive for the same one. In its place
stands a filesystem that reads by our stores; fsspec knows a token, so that no URL is in what it logs or keeps on disk.
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
from statecli.storage import files
from statecli.storage.object_cache import GUESS, Object
from statecli.storage.store import Known, Listing, Missing, Unsure, store_of

#: What fsspec calls the filesystem here.
SCHEME = "statecli"
#: Bytes that are fetched at most ahead of reads that follow one another, and passed over at a time.
AHEAD, SKIP = 1 << 20, 256 << 10
#: Places of an archive at which unpacking may go on: a thread each, and one at the beginning.
READERS = 17

_LINK = re.compile(r"::([a-zA-Z][a-zA-Z0-9+.-]*://)")
#: By which fsspec tells how an archive is packed.
_SUFFIX = re.compile(r"\.[a-zA-Z0-9]{1,5}$")
#: It does not know these.
_SHORT = {".tgz": ".gz", ".tbz2": ".bz2", ".tbz": ".bz2", ".txz": ".xz"}
#: The header before a member: the lengths of its name and of what is behind that, before the bytes.
_HEADER = struct.Struct("<26x2H")


def _outer(url: str) -> tuple[str, str | None]:
    """The links before what lies in nothing else, and that; None where no store of ours has it."""
    found = next((one for one in _LINK.finditer(url) if files.is_plain(one[1])), None)
    return (url, None) if found is None else (url[: found.start()], url[found.start() + 2 :])


class Around:
    """What chains lie in, by tokens and the ways behind them; of one process."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._objects: dict[str, Object] = {}

    def written(self, url: str) -> tuple[str, str | None]:
        """The chain as fsspec gets it, and the token in it."""
        before, outer = _outer(url)
        if outer is None:
            return url, None
        suffix = _SUFFIX.search(files.link(outer).way)
        ending = suffix[0] if suffix else ""
        token = sha256(outer.encode()).hexdigest() + _SHORT.get(ending.lower(), ending)
        self._urls[token] = outer
        return f"{before}::{SCHEME}://{token}", token

    def known(self, token: str) -> Known | None:
        """What is known of an object, if it was asked for."""
        one = self._objects.get(token)
        return None if one is None else one.known

    def object(self, path: str) -> Object:
        """What is behind a token, or in the folder behind it."""
        if path not in self._objects:
            url = self._url(path)
            self._objects.setdefault(path, Object(url, store_of(url)))
        return self._objects[path]

    def is_folder(self, path: str) -> bool:
        """Whether it can be nothing else, as its URL ends."""
        return files.link(self._url(path)).way.endswith("/")

    def listing(self, path: str) -> Listing:
        """What is in the folder."""
        url = self._url(path)
        return store_of(url).listing(url)

    def _url(self, path: str) -> str:
        token, _, way = path.partition("/")
        return files.join(self._urls[token], *way.split("/")) if way else self._urls[token]


class Behind(fsspec.AbstractFileSystem):  # type: ignore[misc]  # it has no types
    """All that our stores have, for fsspec. Their errors are raised as they are."""

    protocol = SCHEME
    cachable = False

    def __init__(self, around: Around, **options: Any) -> None:
        super().__init__(**options)
        self._around = around

    @classmethod
    def _parent(cls, path: str) -> str:
        # Whoever looks for an object in the listing around it finds it in its own.
        return path

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Of an object: nothing asks so about a folder."""
        path = self._strip_protocol(path)
        one = self._around.object(path)
        size = one.size
        assert one.known is not None  # noqa: S101 - it has a size
        return {"name": path, "size": size, "type": "file", "ETag": one.known[1]}

    def exists(self, path: str, **_: Any) -> bool:
        """What cannot be asked is not taken for missing."""
        try:
            self.info(path)
        except Missing:
            return False
        return True

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a folder; an object itself."""
        path = self._strip_protocol(path)
        entries = self._entries(path)
        return entries if detail else [one["name"] for one in entries]

    def _entries(self, path: str) -> list[dict[str, Any]]:
        why: UnreadableError | None = None
        try:
            if not self._around.is_folder(path):
                return [self.info(path)]
        except (Missing, Unsure) as error:
            why = error
        try:
            found = self._around.listing(path).folders
        except (Missing, Unsure):
            if why is None:
                raise
            raise why from None
        kinds = {True: "directory", False: "file"}
        return [{"name": f"{path}/{name}", "size": None, "type": kinds[found[name]]} for name in found]

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], **_: Any) -> list[bytes]:
        """fsspec's own returns an error as if it were bytes."""
        return [self.cat_file(path, start, end) for path, start, end in zip(paths, starts, ends, strict=True)]

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """A cache takes whatever has the name for all of the object."""
        part = f"{lpath}.{os.getpid()}"
        try:
            with self.open(rpath) as source, open(part, "wb") as target:
                while data := source.read(AHEAD):
                    target.write(data)
            os.replace(part, lpath)
        except BaseException:
            if os.path.lexists(part):
                os.remove(part)
            raise
        finally:
            self._around.object(self._strip_protocol(rpath)).release()

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> File:
        if mode != "rb":
            raise NotImplementedError
        one = self._around.object(path)
        one.prime()
        return File(self, path, one, block_size)


class File(AbstractBufferedFile):  # type: ignore[misc]  # as above
    """An object, open: what is read piece after piece is fetched ahead, and not kept."""

    def __init__(self, filesystem: Behind, path: str, one: Object, block_size: int | None = None) -> None:
        super().__init__(filesystem, path, "rb", block_size, cache_type="none", size=one.size)
        self.one = one
        one.opened()
        self._start, self._data, self._step = 0, b"", 0

    def _fetch_range(self, start: int, end: int) -> bytes:
        before = start - self._start
        if before >= 0 and end <= self._start + len(self._data):
            return self._data[before : end - self._start]
        here = self.one.here(start, end - start)
        if here is not None:
            return here
        follows = 0 <= before <= len(self._data) and bool(self._data)
        if not follows and end - start < GUESS:
            # A header or a directory.
            self._start, self._data, self._step = start, self.one.read(start, end - start), GUESS // 2
            return self._data
        self._step = min(2 * self._step, AHEAD) if follows else end - start
        stop = min(max(end, start + self._step), self.size)
        self._start, self._data = start, self.one.get(start, stop - start)
        return self._data[: end - start]

    def close(self) -> None:
        """Nothing of it is held any more."""
        if not self.closed:
            self._data = b""
            self.one.closed()
        super().close()


def members(filesystem: Any) -> Members | None:
    """Those of a zip archive that lies in a store of ours."""
    is_ours = isinstance(filesystem, ZipFileSystem) and isinstance(filesystem.fo, File)
    return Members(filesystem) if is_ours else None


class Members:
    """The files in a zip archive, for many threads: what is not packed is a range of the archive.

    The rest can be unpacked from its beginning alone, so that whoever reads on goes on where somebody was.
    """

    def __init__(self, filesystem: Any) -> None:
        self._zip, self._file = filesystem.zip, filesystem.fo
        self._starts: dict[int, int] = {}
        self._readers: list[tuple[str, ZipExtFile]] = []
        self._lock = threading.Lock()

    def get(self, path: str, offset: int, length: int) -> bytes:
        """These bytes of a member."""
        info = self._zip.getinfo(path)
        start, one = self._start(info), self._file.one
        if info.compress_type != ZIP_STORED or info.compress_size != info.file_size:
            return self._unpacked(info, start, offset, length)
        here: bytes | None = one.here(start + offset, length)
        return one.get(start + offset, length) if here is None else here

    def _start(self, info: ZipInfo) -> int:
        """Where its bytes begin."""
        with self._lock:
            at = info.header_offset
            if at not in self._starts:
                self._zip.open(info).close()  # which compares what is said of it twice
                self._starts[at] = at + 30 + sum(_HEADER.unpack(self._file.one.read(at, 30)))
            return self._starts[at]

    def _unpacked(self, info: ZipInfo, start: int, offset: int, length: int) -> bytes:
        reader = self._taken(info.filename, offset)
        if reader is None:
            source = File(self._file.fs, self._file.path, self._file.one)
            source.seek(start)
            reader = ZipExtFile(source, "r", info, None, True)
        while (left := offset - reader.tell()) > 0 and reader.read(min(left, SKIP)):
            pass
        data = reader.read(length)
        with self._lock:
            self._readers.append((info.filename, reader))
            gone = self._readers.pop(0)[1] if len(self._readers) > READERS else None
        if gone is not None:
            gone.close()
        return data

    def _taken(self, name: str, offset: int) -> ZipExtFile | None:
        """The reader that has the least to pass over."""
        with self._lock:
            fits = [one for one in self._readers if one[0] == name and one[1].tell() <= offset]
            if not fits:
                return None
            best = max(fits, key=lambda one: one[1].tell())
            self._readers.remove(best)
            return best[1]


fsspec.register_implementation(SCHEME, Behind, clobber=True)
