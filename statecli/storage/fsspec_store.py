"""Every place that fsspec knows and that has no module of its own here: `memory://`, `abfs://`, `zip://m.pt::s3://…`, …

What is of all of them is here too: packages that may be missing, and what is made anew in each process.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.storage.limits import settings
from statecli.storage.retry import Transient
from statecli.storage.store import Known, Listing, Missing, Unsure, merged

if TYPE_CHECKING:
    from statecli.storage import chained_urls

_Made = TypeVar("_Made")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
#: Bytes of an answer that are taken although a range of it was asked for.
WHOLE = 16 << 20
#: What tells two versions of an object apart, as filesystems call it, the surest first.
_VERSIONS = ("ETag", "etag", "generation", "content_md5", "md5", "LastModified", "last_modified", "mtime", "created")

#: What Python says of an object that is no archive, by what it was taken for.
_NO_ARCHIVE = {"zip": ("BadZipFile", "EOFError", "error"), "tar": ("ReadError", "EOFError", "BadGzipFile", "error")}


def imported() -> Any:
    """fsspec. Raises MissingDependency."""
    try:
        import fsspec
        import fsspec.asyn
        import fsspec.config
    except ImportError as missing:
        raise MissingDependency("URLs need the package fsspec: pip install 'statecli[remote]'") from missing
    return fsspec


class PerProcess(Generic[_Made]):
    """What is made where it is first needed, and again in a process that was forked: fsspec's thread stays behind."""

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._make = make
        self._made: dict[int, _Made] = {}

    def __call__(self) -> _Made:
        made = self._made.get(os.getpid())
        # Two threads may both make one; a lock could be held by a thread that a fork leaves behind.
        return made if made is not None else self._made.setdefault(os.getpid(), self._make())


def span(content_range: str | None, content_length: int | None, offset: int, length: int) -> tuple[int, int, int]:
    """The first byte of an answer, the one behind its last, and the size of the object: before the body is read.

    Raises UnreadableError for another range than was asked for; without a range all is taken, where it is little.
    """
    if content_range is None:
        size = -1 if content_length is None else content_length
        if not 0 <= size <= WHOLE:
            raise UnreadableError("the store ignores ranges and would send all of it: download it first")
        return 0, size, size
    found = _RANGE.fullmatch(content_range)
    start, last, size = map(int, found.groups()) if found else (-1, -1, -1)
    if (start, last + 1) != (offset, min(offset + length, size)) or content_length not in (None, last + 1 - start):
        raise UnreadableError("the store answered with another range than was asked for")
    return start, last + 1, size


def held(data: bytes, start: int, end: int) -> bytes:
    """The body of an answer that said so. Raises Transient where it was cut."""
    if len(data) != end - start:
        raise Transient(f"the connection was cut after {len(data)} of {end - start} bytes")
    return data


class Filesystem:
    """A filesystem of fsspec; `url` is any of those that it is for.

    What is behind it tells no version with its answers, so it is asked for again after each read.
    """

    def __init__(self, url: str) -> None:
        self._instance = PerProcess(lambda: _Instance(url))
        self._scheme = url.partition("://")[0]

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`."""
        return self._asked(lambda instance: _got(instance, url, offset, length, known))

    def listing(self, url: str) -> Listing:
        """As `Store.listing`."""
        return self._asked(lambda instance: _listed(instance, url))

    def _asked(self, ask: Callable[[_Instance], _Made]) -> _Made:
        try:
            return ask(self._instance())
        except ImportError as missing:
            # fsspec's own text names the package, and nothing of the URL.
            told = str(missing) if missing.__cause__ is not None else f"a package is missing: {missing.name}"
            raise MissingDependency(f"{self._scheme}://: {' '.join(told.split())}") from None
        except Exception as why:  # noqa: BLE001 - each of a hundred packages raises its own
            raise _said(why, self._scheme) from None


class _Instance:
    """A filesystem of one process, made where it is first needed, and who may ask it at a time."""

    def __init__(self, url: str) -> None:
        known = imported().available_protocols()
        from statecli.storage import chained_urls

        self._chains, self._around = chained_urls, chained_urls.Around()
        written, token = self._around.written(url)
        for scheme in re.findall(r"([a-zA-Z][a-zA-Z0-9+.-]*)(?=://)", written):
            if scheme.lower() not in known and (token is None or scheme != chained_urls.SCHEME):
                raise UnreadableError(f"fsspec knows no {scheme}://")
        self._url, self._lock = url, threading.Lock()
        self._made: Any = None
        self._members: chained_urls.Members | None = None

    @contextmanager
    def asked(self) -> Iterator[Any]:
        """Around asking the filesystem: those that are not made for it are asked by one thread at a time."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
                self._members = self._chains.members(self._made)
        with nullcontext() if self._made.async_impl else self._lock:
            yield self._made

    def path(self, url: str) -> str:
        """The way in the filesystem."""
        path: str = imported().core._un_chain(self._around.written(url)[0], {})[0][0]
        return path

    def version(self, url: str) -> Known:
        """The size of a file, and what tells two versions apart: of it, or of what it lies in."""
        path = self.path(url)
        with self.asked() as filesystem:
            found = filesystem.info(path)
        if found["type"] == "directory":
            raise Missing("is a folder")
        if found.get("size") is None:
            raise UnreadableError("its size is not told, and so it cannot be read in parts: download it first")
        token = self._around.written(url)[1]
        outer = None if token is None else self._around.known(token)
        if outer is None:
            version = next((str(found[key]) for key in _VERSIONS if found.get(key) is not None), None)
            return int(found["size"]), version
        first, second, *_ = f"{outer[1] or ''}\n".split("\n")
        return int(found["size"]), f"{first}\n{second}\n{outer[0]} {found.get('CRC', '')}"

    def read(self, url: str, offset: int, end: int) -> bytes:
        """Bytes of a file."""
        path = self.path(url)
        with self.asked() as filesystem:
            if self._members is None:
                return bytes(filesystem.cat_file(path, start=offset, end=end))
        return self._members.get(path, offset, end - offset)

    def _make(self) -> Any:
        url, token = self._around.written(self._url)
        ours = {} if token is None else {self._chains.SCHEME: {"around": self._around}}
        try:
            # Its caches would outlive the command.
            found, _ = imported().core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **ours)
        except (Missing, Unsure) as why:
            # An archive is none of the files that may be in a folder of its name.
            kind = Missing if isinstance(why, Missing) else UnreadableError
            raise kind(f"the object behind its `::` {why}" if str(why).startswith("is ") else str(why)) from None
        return found


def _got(instance: _Instance, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
    if known is None:
        known = instance.version(url)
    end = min(offset + length, known[0])
    data = instance.read(url, offset, end) if offset < end else b""
    return held(data, offset, max(offset, end)), merged(known, instance.version(url))


def _listed(instance: _Instance, url: str) -> Listing:
    path = instance.path(url)
    with instance.asked() as filesystem:
        found = filesystem.ls(path, detail=True)
    own = path.strip("/")
    return listing_of({_name(one): one["type"] == "directory" for one in found if one["name"].strip("/") != own})


def _name(entry: Mapping[str, Any]) -> str:
    name: str = entry["name"].rstrip("/").rpartition("/")[2]
    return name


def take_page(folders: dict[str, bool], prefix: str, keys: Iterable[str], prefixes: Iterable[str]) -> None:
    """Adds what one page of a bucket's listing has in the folder `prefix`: whether each name is a folder's."""
    folders.update((key[len(prefix) :], False) for key in keys)
    for one in prefixes:
        name = one[len(prefix) : -1]
        # A key and a folder may have one name.
        folders[f"{name}/" if name in folders else name] = True


def bucket_listing(folders: dict[str, bool], prefix: str) -> Listing:
    """What all pages have together. Raises Missing for a folder that no key is in, and that is no key itself."""
    if prefix and not folders:
        raise Missing("is not there")
    named = {name: is_folder for name, is_folder in folders.items() if name.strip("/")}
    # An empty folder's own key has no name in it, and that is no key behind two slashes.
    nameless = any(is_folder for name, is_folder in folders.items() if name not in named)
    return Listing(named, "no name is that of what lies behind two slashes (//)" if nameless else None)


def listing_of(folders: dict[str, bool]) -> Listing:
    """Without what no name can mean."""
    return Listing({name: is_folder for name, is_folder in folders.items() if name.strip("/") not in ("", ".", "..")})


def _said(why: Exception, scheme: str) -> Exception:
    """The error of ours for one of a package, whose own text may hold what must not be shown."""
    if isinstance(why, (UnreadableError, MissingDependency, Transient)):
        return why.with_traceback(None)  # whose frames hold the URL of what a chain lies in
    if isinstance(why, FileNotFoundError):
        return Missing("is not there")
    if isinstance(why, (IsADirectoryError, NotADirectoryError)):
        return Missing("is a folder" if isinstance(why, IsADirectoryError) else "is no folder")
    if isinstance(why, PermissionError):
        return UnreadableError(f"access is refused: give {scheme} credentials that may read it")
    if "Credential" in type(why).__name__:
        return UnreadableError("no credentials were found that may read it: log in where it lies")
    kind = scheme.rpartition("::")[2].lower()
    if type(why).__name__ in _NO_ARCHIVE.get(kind, ()):
        return UnreadableError(f"the object behind its `::` is no {kind} archive, or a damaged one")
    return unreached(why)


def unreached(why: Exception) -> Exception:
    """The error of ours for what went wrong on the way; what did not is said to be unknown, by its name alone."""
    kinds = {one.__name__ for one in type(why).__mro__}
    if any("Timeout" in one for one in kinds):
        return Transient(f"no answer in {settings().timeout:g} s")
    # Of Python; of aiohttp; of botocore, which is not imported for this.
    if kinds & {"ConnectionError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError", "gaierror"}:
        return Transient(f"the connection failed ({type(why).__name__})")
    return UnreadableError(f"cannot be read ({type(why).__name__})")
