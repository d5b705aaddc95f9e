"""Object store for the fsspec schemes without a store of their own: `memory://`, `abfs://`, `sftp://`, …

Also shared code of all stores that use fsspec: optional packages, filesystems per process, errors and listings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import msgspec

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.core.installed_package import install_extra
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage.limits import settings
from statecli.storage.object_store import Listing, Missing, VersionedBytes, confirm_version
from statecli.storage.retry import Transient
from statecli.storage.store import CHANGED_TRY_AGAIN, FileVersion
from statecli.storage.url import is_chain

_Object = TypeVar("_Object")
_RANGE = compile_on_use(r"bytes (\d+)-(\d+)/(\d+)")
#: Maximum size in bytes of a file from a server without range requests, because it is fetched whole.
MAX_WHOLE_BYTES = 16 << 20
#: Number of bytes of an answer that are read at once.
PIECE_BYTES = 1 << 16
#: Version fields of fsspec backends, most reliable first.
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "generation",
    "content_md5",
    "md5",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)


def import_fsspec() -> Any:
    """Return the package fsspec. Raises MissingDependency if fsspec is not installed."""
    try:
        import fsspec
        import fsspec.asyn
        import fsspec.config
    except ImportError as missing:
        raise MissingDependency(f"URLs need the package fsspec: {install_extra('remote')}") from missing
    return fsspec


class PerProcess(Generic[_Object]):
    """Object that each process creates on first use, because fsspec's thread does not survive a fork."""

    def __init__(self, create: Callable[[], _Object]) -> None:
        self._create = create
        self._objects: dict[int, _Object] = {}

    def __call__(self) -> _Object:
        existing = self._objects.get(os.getpid())
        # Without a lock, because a fork may leave it locked by a thread of the parent. Two threads may both create an
        # object.
        return existing if existing is not None else self._objects.setdefault(os.getpid(), self._create())


def parse_range(
    content_range: str | None, content_length: int | None, offset: int, length: int
) -> tuple[int, int, int]:
    """Return start and end of the range that an answer contains, and the size of the whole object, in bytes.

    Raises UnreadableError for a range other than the requested one. A small object may come without a range.
    """
    if content_range is None:
        size = -1 if content_length is None else content_length
        if not 0 <= size <= MAX_WHOLE_BYTES:
            raise UnreadableError(
                "the store ignores range requests and would send the whole file; download the file first"
            )
        return 0, size, size
    match = _RANGE.fullmatch(content_range)
    start, last, size = map(int, match.groups()) if match else (-1, -1, -1)
    if (start, last + 1) != (offset, min(offset + length, size)) or content_length not in (None, last + 1 - start):
        raise UnreadableError("the store did not send the byte range that statecli requested; download the file first")
    return start, last + 1, size


class BucketAnswer(msgspec.Struct, frozen=True):
    """Answer of a bucket before its body is read. `marker` is the marker of its `FileVersion`."""

    content_range: str | None
    content_length: int | None
    marker: str | None
    body: Any

    async def read(self, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        """Check the headers, then read the body; return the result of `ObjectStore.get`."""
        start, end, size = parse_range(self.content_range, self.content_length, offset, length)
        version = FileVersion(size, self.marker)
        if expected is not None and expected != version:
            raise UnreadableError(CHANGED_TRY_AGAIN)
        pieces = []
        while piece := await self.body.read(PIECE_BYTES):
            pieces.append(piece)
        return VersionedBytes(check_length(b"".join(pieces), start, end)[offset - start :][:length], version)


def check_length(data: bytes, start: int, end: int) -> bytes:
    """Return the body of an answer. Raises Transient if the body does not have the announced length."""
    if len(data) != end - start:
        raise Transient(f"the connection was cut after {len(data)} of {end - start} bytes")
    return data


class Filesystem:
    """Filesystem of fsspec: an `ObjectStore`. `url` is any URL of this filesystem.

    Answers contain no version, so the version is requested again after each read.
    """

    def __init__(self, url: str) -> None:
        self._instance = PerProcess(lambda: _Instance(url))
        self._scheme = url.partition("://")[0]

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        return self._call(lambda instance: _get_range(instance, url, offset, length, expected))

    def listing(self, url: str) -> Listing:
        return self._call(lambda instance: _list_folder(instance, url))

    def _call(self, request: Callable[[_Instance], _Object]) -> _Object:
        try:
            return request(self._instance())
        except ImportError as missing:
            # fsspec's text is shown, because it names the package and contains no part of the URL.
            text = str(missing) if missing.__cause__ is not None else f"a package is missing: {missing.name}"
            raise MissingDependency(f"{self._scheme}://: {' '.join(text.split())}") from None
        except Exception as why:  # noqa: BLE001 - each of a hundred packages raises its own
            raise _translate_error(why, self._scheme) from None


class _Instance:
    """Filesystem of one process, created on first use, with a lock to serialise calls."""

    def __init__(self, url: str) -> None:
        if is_chain(url):
            raise UnreadableError("chains of URLs (`::`) are not supported: download and unpack the archive first")
        scheme = url.partition("://")[0]
        if scheme.lower() not in import_fsspec().available_protocols():
            raise UnreadableError(f"fsspec does not support {scheme}://")
        self._url, self._lock = url, threading.Lock()
        self._filesystem: Any = None

    @contextmanager
    def lock(self) -> Iterator[Any]:
        """Hold the filesystem during the block, because a synchronous filesystem serves one thread at a time."""
        with self._lock:
            if self._filesystem is None:
                # Disable fsspec's caches, because they would outlive the command.
                self._filesystem, _ = import_fsspec().core.url_to_fs(
                    self._url, skip_instance_cache=True, use_listings_cache=False
                )
        with nullcontext() if self._filesystem.async_impl else self._lock:
            yield self._filesystem

    def path(self, url: str) -> str:
        """Return the path of a URL inside the filesystem."""
        path: str = import_fsspec().core._un_chain(url, {})[0][0]
        return path

    def version(self, url: str) -> FileVersion:
        """Return the version of a file."""
        path = self.path(url)
        with self.lock() as filesystem:
            info = filesystem.info(path)
        if info["type"] == "directory":
            raise Missing("is a folder")
        if info.get("size") is None:
            raise UnreadableError(
                "the server does not report the file size, so range requests are impossible: download the file first"
            )
        version = next((str(info[key]) for key in _VERSION_FIELDS if info.get(key) is not None), None)
        return FileVersion(int(info["size"]), version)

    def read(self, url: str, offset: int, end: int) -> bytes:
        """Return bytes `offset` to `end` of a file."""
        path = self.path(url)
        with self.lock() as filesystem:
            return bytes(filesystem.cat_file(path, start=offset, end=end))


def _get_range(instance: _Instance, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
    if expected is None:
        expected = instance.version(url)
    end = min(offset + length, expected.size)
    data = instance.read(url, offset, end) if offset < end else b""
    data = check_length(data, offset, max(offset, end))
    return VersionedBytes(data, confirm_version(expected, instance.version(url)))


def _list_folder(instance: _Instance, url: str) -> Listing:
    path = instance.path(url)
    with instance.lock() as filesystem:
        entries = filesystem.ls(path, detail=True)
    names = ((entry["name"].rstrip("/"), entry["type"] == "directory") for entry in entries)
    folder_path = path.strip("/")
    return create_listing(
        {name.rpartition("/")[2]: is_folder for name, is_folder in names if name.lstrip("/") != folder_path}
    )


def add_page(folders: dict[str, bool], prefix: str, keys: Iterable[str], prefixes: Iterable[str]) -> None:
    """Add the names on a listing's page to `folders`, with True for each folder. `prefix` is the listed folder."""
    folders.update((key[len(prefix) :], False) for key in keys)
    for folder_prefix in prefixes:
        name = folder_prefix[len(prefix) : -1]
        # A key and a folder may have the same name; the slash distinguishes them.
        folders[f"{name}/" if name in folders else name] = True


def create_bucket_listing(folders: dict[str, bool], prefix: str) -> Listing:
    """Return the listing of a folder from the entries of all pages. Raises Missing if the folder contains no key."""
    if prefix and not folders:
        raise Missing("does not exist")
    named_entries = {name: is_folder for name, is_folder in folders.items() if name.strip("/")}
    # A key without a name is the marker of an empty folder; a key with two slashes is not.
    nameless = any(is_folder for name, is_folder in folders.items() if name not in named_entries)
    return Listing(
        named_entries, "statecli cannot read a file whose key contains two slashes (//)" if nameless else None
    )


def create_listing(folders: dict[str, bool]) -> Listing:
    """Return a listing without names that cannot be opened: empty, `.` and `..`."""
    return Listing({name: is_folder for name, is_folder in folders.items() if name.strip("/") not in ("", ".", "..")})


def _translate_error(why: Exception, scheme: str) -> Exception:
    """Convert an fsspec error to an error of statecli, because fsspec's text may contain secrets."""
    if isinstance(why, (UnreadableError, MissingDependency, Transient)):
        return why.with_traceback(None)  # drops the frames, which contain the URL
    if isinstance(why, FileNotFoundError):
        return Missing("does not exist")
    if isinstance(why, (IsADirectoryError, NotADirectoryError)):
        return Missing("is a folder" if isinstance(why, IsADirectoryError) else "is not a folder")
    if isinstance(why, PermissionError):
        return UnreadableError(f"access is refused: set {scheme} credentials with read access to this file")
    if "Credential" in type(why).__name__:
        return UnreadableError("access is refused: no credentials were found for this store; log in first")
    return translate_network_error(why)


def translate_network_error(why: Exception) -> Exception:
    """Convert a network error to an error of statecli; for other errors only the class name is shown."""
    kinds = {kind.__name__ for kind in type(why).__mro__}
    if any("Timeout" in kind for kind in kinds):
        return Transient(f"no answer in {settings().timeout:g} s")
    # Class names of Python, aiohttp and botocore, because importing these packages is slow.
    if kinds & {"ConnectionError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError", "gaierror"}:
        return Transient(f"the connection failed ({type(why).__name__})")
    return UnreadableError(f"cannot be read ({type(why).__name__})")
