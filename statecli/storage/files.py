"""Files and folders by name, on disk or behind a URL: what readers ask instead of `os`, and so need not know which.

What lies behind a URL has the name that `remote` shows of it, which holds no secret; only `remote` knows the rest.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

from statecli.core.errors import UnreadableError

#: `https://…`, and what fsspec chains: `simplecache::s3://…`.
_URL = re.compile(r"(?:[a-zA-Z][a-zA-Z0-9+.-]*::)*[a-zA-Z][a-zA-Z0-9+.-]+://")
#: What is nearly one, with a user and a password; no `pkg.mod:Net("a@b")`.
_TYPO = re.compile(r"(?!-|[\w./\\-]+:[\w.]+\(.*\)$)[^\s:@]*:\S+@")
#: A host by its number: `[::1]`.
_ADDRESS = re.compile(r"^\[[0-9a-fA-F:.]*\]")
#: What makes a way of a URL a glob.
_MAGIC = re.compile(r"[*[]")
#: Schemes that lie in nothing else, so that `::` is a part of their ways.
_PLAIN = frozenset(f"{scheme}://" for scheme in ("http", "https", "s3", "s3a", "gs", "gcs", "hf"))
#: What alone begins a query where `?` may be in a name.
_QUERY = {"s3": "?versionId=", "s3a": "?versionId=", "gs": "?generation=", "gcs": "?generation=", "hf": None}

#: How many folders may lie in each other: a server may list itself in each of its folders.
DEEPEST = 64

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


class Guard(NamedTuple):
    """Bytes `start` to `stop`, of which it is not yet known that they are what a directory says: `header` is where what
    says so begins, up to `start`, and `check` gives by its bytes how much later they begin, 0 mostly, or raises
    MalformedError.
    """

    header: int
    start: int
    stop: int
    check: Callable[[bytes], int]


class File(Protocol):
    """An open file, read by position, by one thread at a time."""

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from `offset` on: `length` of them, or fewer where the file ends before."""

    def fill(self, offset: int, into: memoryview, ahead: int) -> int:
        """Reads bytes from `offset` on into a buffer; how many, 0 at the end. The next `ahead` are wanted too, soon."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These (offset, length) are about to be read: where each read is a journey, they are fetched together."""

    def here(self, offset: int, length: int) -> bytes | None:
        """These bytes where it costs nothing to read them, None where it is a journey."""

    def guard(self, guards: Iterable[Guard]) -> None:
        """From now on, no byte of these is handed out before its header is confirmed."""

    def now(self) -> int:
        """Its size at this moment, for what is to be said of one that was cut short."""

    def close(self) -> None:
        """A second call does nothing."""


def is_remote(path: str) -> bool:
    """Whether the name is a URL."""
    return "://" in path and _URL.match(path) is not None


class Link(NamedTuple):
    """A URL in three: `https://`, `host/m.pt`, `?version=3`; of a chain `zip://`, `m.pt`, `::https://host/a.zip`."""

    scheme: str
    way: str
    rest: str


def link(url: str) -> Link:
    """Where in a URL the way is that leads from folder to file."""
    found = _URL.match(url)
    assert found is not None, "no URL"  # noqa: S101 - whoever asks has one
    scheme, behind = url[: found.end()], url[found.end() :]
    at = query_at(scheme, behind)
    if not is_plain(scheme):
        # An address of IPv6 in its brackets has `::` too.
        end = re.search(r"::(?![0-9a-fA-F:.]*\])", behind[:at])
        at = end.start() if end else at
    return Link(scheme, behind[:at], behind[at:])


def query_at(scheme: str, behind: str) -> int:
    """Where the query begins in what is behind a `scheme://`; its length where there is none."""
    mark = _QUERY.get(scheme.removesuffix("://").rpartition("::")[2].lower(), "?")
    at = -1 if mark is None else behind.find(mark)
    return len(behind) if at < 0 else at


def shown(text: str) -> str:
    """What was typed, as it may be shown: of URLs, also behind `--option=` and in a text, names without what is secret.

    `remote` knows the rest from now on. `file:///…` is the path.
    """
    if "://" not in text or os.path.lexists(text):
        return _local(text)
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    if value[:7].lower() == "file://":
        from urllib.request import url2pathname

        return option + equals + _local(url2pathname(value[7:].removeprefix("localhost")))
    if is_remote(value) and os.path.lexists(value):
        return text
    found: str = _remote().named(value) if is_remote(value) else _remote().named_in(value)
    return option + equals + found


def _local(text: str) -> str:
    """The same; what may be a password in it, where it names no file, is shown nowhere from now on."""
    if _TYPO.match(text) and not os.path.lexists(text.partition("#")[0]):
        _remote().hide_in_typo(text)
    return text


def harmless(text: str) -> str:
    """The text without what was typed and may not be shown, as in `https:/me:pw@host`, which is no URL."""
    import sys

    secrets = sys.modules.get("statecli.storage.redact")
    return secrets.without(text) if secrets else text


def forget() -> None:
    """What is known of remote files is of an earlier command: this one asks again."""
    import sys

    if "statecli.storage.remote" in sys.modules:
        _remote().forget()


def meant(text: str) -> str:
    """The text again, with the URLs as they were typed: for a model's own arguments, and nothing that is shown."""
    import sys

    found: str = _remote().meant_by(text) if "://" in text and "statecli.storage.remote" in sys.modules else text
    return found


def is_plain(scheme: str) -> bool:
    """Whether ways of a `scheme://` begin with a host or a bucket, and lie in nothing else."""
    return scheme.rpartition("::")[2].lower() in _PLAIN


# --- names -----------------------------------------------------------------------------------------------------------


def join(folder: str, *names: str) -> str:
    """As `os.path.join`; the query of a URL, and what it lies in, stay at its end."""
    if not is_remote(folder):
        return os.path.join(folder, *names)
    scheme, way, rest = link(folder)
    names = tuple(_quoted(scheme, name) for name in names)
    steps = (way.rstrip("/"), *names) if way else names
    return scheme + "/".join(step for step in steps if step) + rest


def split(path: str) -> tuple[str, str]:
    """As `os.path.split`; the query of a URL stays with the folder."""
    if not is_remote(path):
        return os.path.split(path)
    scheme, way, rest = link(path)
    folder, _, name = way.rpartition("/")
    return scheme + folder + rest, _unquoted(scheme, name)


def _quoted(scheme: str, name: str) -> str:
    """A name as it is written in such a URL; a way of several too."""
    if not _is_web(scheme) or re.fullmatch(r"[\w./-]*", name, re.ASCII):
        return name
    from urllib.parse import quote

    return quote(name, safe="/!$&'()*+,;=:@~")


def _unquoted(scheme: str, name: str) -> str:
    if not _is_web(scheme) or "%" not in name:
        return name
    from urllib.parse import unquote

    return unquote(name)


def _is_web(scheme: str) -> bool:
    return scheme.lower().endswith(("http://", "https://"))


def folder(path: str) -> str:
    """As `os.path.dirname`."""
    return split(path)[0]


def name(path: str) -> str:
    """As `os.path.basename`."""
    return split(path)[1]


def parents(path: str) -> Iterator[str]:
    """The folders around it, the nearest first; of a URL down to its host or bucket."""
    if not is_remote(path):
        from pathlib import PurePath  # every command imports this module

        yield from map(str, PurePath(path).parents)
        return
    scheme, way, rest = link(path)
    way = way.rstrip("/")
    while "/" in way:
        way = way.rpartition("/")[0]
        yield scheme + way + rest


def relative(path: str, folder: str) -> str:
    """As `os.path.relpath`, with `/` everywhere; a URL that does not lie in the folder is what it is."""
    if not is_remote(path):
        return os.path.relpath(path, folder or os.curdir).replace(os.sep, "/")
    inner, outer = link(path), link(folder) if is_remote(folder) else Link("", "", "")
    around = outer.way.rstrip("/") + "/" if outer.way else ""
    lies_in = (inner.scheme, inner.rest) == (outer.scheme, outer.rest) and f"{inner.way}/".startswith(around)
    return _unquoted(inner.scheme, inner.way[len(around) :].strip("/")) or os.curdir if lies_in else path


# --- what is there ---------------------------------------------------------------------------------------------------


def exists(path: str) -> bool:
    """As `os.path.lexists`."""
    return _remote().exists(path) if is_remote(path) else os.path.lexists(path)


def has_file(path: str) -> bool:
    """Whether there is something of a name that only a file can have: no URL is asked for as a folder."""
    return _remote().has_file(path) if is_remote(path) else os.path.lexists(path)


def isdir(path: str) -> bool:
    """As `os.path.isdir`."""
    return _remote().isdir(path) if is_remote(path) else os.path.isdir(path)


def isfile(path: str) -> bool:
    """As `os.path.isfile`."""
    return _remote().isfile(path) if is_remote(path) else os.path.isfile(path)


def size(path: str) -> int:
    """As `os.path.getsize`. Raises OSError, or UnreadableError for what is remote."""
    if not is_remote(path):
        return os.path.getsize(path)
    found: int = _remote().opened(path).size
    return found


def names(path: str) -> list[str]:
    """As `os.listdir`. Raises OSError, or UnreadableError for what is remote."""
    if not is_remote(path):
        return os.listdir(path)
    found: list[str] = _remote().names_in(path)
    return found


def may_list(path: str) -> bool:
    """Whether the folder's names may be asked for: a local one may be entered and not listed."""
    if not is_remote(path):
        return os.access(path, os.R_OK)
    found: bool = _remote().may_list(path)
    return found


def is_listed(path: str) -> bool:
    """Whether the names of a folder of a URL, which were asked for, have this one."""
    return is_remote(path) and bool(_remote().is_listed(path))


def unlisted(path: str) -> str | None:
    """Why the names that a folder is said to have are not all of them; None where they are."""
    if not is_remote(path):
        return None
    found: str | None = _remote().unlisted(path)
    return found


def cut_short(path: str, section: str | None, error: Exception) -> str | None:
    """What to do where a URL without its `#section` is that of no file: the name of one may have a `#`."""
    if not section or not is_remote(path):
        return None
    from statecli.storage.store import Missing

    if not isinstance(error, Missing):
        return None
    is_web = _is_web(link(path).scheme)
    advice = "is written %23" if is_web else f"needs the section behind it: #{section}#model"
    return f"#{section} was taken for a section: # in a name {advice}"


def islink(path: str) -> bool:
    """As `os.path.islink`; no URL is one."""
    return not is_remote(path) and os.path.islink(path)


def real(path: str) -> str:
    """As `os.path.realpath`; a URL is what it is."""
    return path if is_remote(path) else os.path.realpath(path)


def absolute(path: str) -> str:
    """As `os.path.abspath`; a URL is that already, without the slash that a folder's may have at its end."""
    if not is_remote(path):
        return os.path.abspath(path)
    scheme, way, rest = link(path)
    return scheme + way.rstrip("/") + rest


def has_magic(text: str) -> bool:
    """Whether it may be a glob; `?` is none in a URL."""
    if is_remote(text):
        return _MAGIC.search(_ADDRESS.sub("", link(text).way)) is not None
    return re.search(r"[*?[]", text) is not None


def matching(pattern: str) -> list[str]:
    """As `glob.glob` with `**` and with hidden names: of a URL by what its folders are said to hold.

    Of hidden folders there are those whose parents match; no step of the glob but one that begins with a dot enters
    them. Raises UnreadableError for a folder of a URL that cannot be listed.
    """
    if not is_remote(pattern):
        import glob

        return list(dict.fromkeys((*glob.glob(pattern, recursive=True), *_hidden(pattern))))
    scheme, way, rest = link(pattern)
    steps = way.split("/")
    fixed = next(n for n, step in enumerate(steps) if _MAGIC.search(step))
    if fixed == 0 and not rest.startswith("::"):
        raise UnreadableError(f"{pattern}: the glob is of a host or a bucket: name it")
    # To fnmatch, `?` is a wildcard, but in brackets.
    globs = [re.sub(r"(\[[^]]+\])|\?", lambda found: found[1] or "[?]", step) for step in steps[fixed:]]
    return list(dict.fromkeys(_matching(scheme + "/".join(steps[:fixed]) + rest, globs)))


def _hidden(pattern: str) -> Iterator[str]:
    """Yield the hidden files that a local glob matches, and the hidden folders that it does not enter."""
    import glob

    steps = pattern.split(os.sep)
    for n, step in enumerate(steps):
        if step.startswith(".") or not has_magic(step):
            continue
        above = [*steps[:n], *(["**"] if step == "**" else []), ".*"]
        for path in glob.iglob(os.sep.join(above), recursive=True):
            if step in ("*", "**") or fnmatchcase(os.path.basename(path), step):
                yield from (path,) if n == len(steps) - 1 or os.path.isdir(path) else ()


def _matching(around: str, steps: list[str], depth: int = 0) -> Iterator[str]:
    """What is in a folder of a URL, by the steps of a glob that are left; an empty last one takes folders alone."""
    if depth > DEEPEST:
        raise UnreadableError(f"{around}: lies in more than {DEEPEST} folders: name one further in")
    if not any(steps):
        scheme, way, behind = link(around)
        yield scheme + "/".join((way.rstrip("/"), *steps)) + behind if steps else around
        return
    first, rest = steps[0], steps[1:]
    if first == "**":
        yield from _matching(around, rest, depth)
    for name in _names_in(around):
        inner = join(around, name)
        if name.startswith(".") and not first.startswith(".") and isdir(inner):
            yield from (inner,) if first == "**" or fnmatchcase(name.rstrip("/"), first) else ()
        elif first == "**":
            yield from () if rest else (inner,)
            yield from _matching(inner, steps, depth + 1) if isdir(inner) else ()
        elif fnmatchcase(name.rstrip("/"), first) and (not rest or isdir(inner)):
            yield from _matching(inner, rest, depth + 1)


def _names_in(around: str) -> list[str]:
    needed = f"{around}: the glob needs the names of what is there"
    try:
        found = names(around)
    except UnreadableError as why:
        raise UnreadableError(f"{needed}: {why}") from why
    if (beside := unlisted(around)) is not None:
        raise UnreadableError(f"{needed}: {beside}")
    return found


def ahead(paths: Iterable[str]) -> None:
    """Fetches the beginning of each remote file, many at a time: they are about to be opened one after another.

    Of what is known to be a folder its names are fetched. What goes wrong is said by whoever opens it.
    """
    wanted = [path for path in paths if is_remote(path)]
    if wanted:
        _remote().ahead(wanted)


@contextmanager
def fetched(wanted: Mapping[str, list[tuple[int, int]]]) -> Iterator[None]:
    """Around reading these (offset, length) of files, of which those of remote ones are fetched together.

    What goes wrong is said by whoever reads them.
    """
    far = {path: spans for path, spans in wanted.items() if is_remote(path)}
    if not far:
        yield
        return
    with _remote().fetched(far):
        yield


@contextmanager
def reading(ranges: Iterable[tuple[str, int, int]]) -> Iterator[None]:
    """Around reading values in this thread: these (path, offset, length), one after another.

    Of what is remote, neighbours are fetched together, and nothing that is not among them.
    """
    wanted = [one for one in ranges if is_remote(one[0])]
    if not wanted:
        yield
        return
    with _remote().reading(wanted):
        yield


def crc32_of(path: str, offset: int, length: int) -> int | None:
    """CRC-32 of these bytes where it is known without reading them again, as of what is remote and was read."""
    found: int | None = _remote().crc32_of(path, offset, length) if is_remote(path) else None
    return found


def confirm(path: str) -> None:
    """Asks all of a file's guards that were not. Raises MalformedError, without the path, as they do."""
    if is_remote(path):
        _remote().confirm(path)


def remembered() -> dict[Any, Any]:
    """What else was found out about what is remote, for as long as one command."""
    found: dict[Any, Any] = _remote().remembered
    return found


def is_anything_remote() -> bool:
    """Whether what lies behind a URL has been opened."""
    import sys

    return "statecli.storage.remote" in sys.modules and bool(_remote().is_in_use())


#: Around fetching so many files; what it gives is called after each.
Watch = Callable[[int], AbstractContextManager[Callable[[], None]]]
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watched(total: int) -> AbstractContextManager[Callable[[], None]]:
    """Around fetching so many files, for whoever watches."""
    watch = _watch.get()
    return nullcontext(lambda: None) if watch is None else watch(total)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Around what may fetch many files."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


_thorough: ContextVar[bool] = ContextVar("thorough", default=False)


def is_thorough() -> bool:
    """Whether readers look at all that they look at on disk, however far away it is."""
    return _thorough.get()


@contextmanager
def thorough() -> Iterator[None]:
    """Around what judges a file, also by what is not needed to read it."""
    before = _thorough.set(True)
    try:
        yield
    finally:
        _thorough.reset(before)


def _remote() -> Any:
    from statecli.storage import remote

    return remote


# --- open files ------------------------------------------------------------------------------------------------------


def opened(path: str) -> File:
    """Opens a regular file or what is behind a URL.

    Raises UnreadableError, without the path, for what is missing, not permitted or no regular file. Opening never
    blocks and never follows a device: a fifo or `/dev/zero` named `model.pt` is refused before a byte is read.
    """
    if is_remote(path):
        found: File = _remote().opened(path)
        return found
    return LocalFile(path)


#: Device, inode, size, and the times in nanoseconds of the last write and of the last change to the inode.
LocalVersion = tuple[int, int, int, int, int]

#: The local files that were opened so far, each with its version at that time; None while nobody records them.
_opened: ContextVar[dict[str, LocalVersion] | None] = ContextVar("opened", default=None)


def version_of(status: os.stat_result) -> LocalVersion:
    """Return what tells a file from the one that replaces it, and from itself after a write."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def recording_opened() -> Iterator[dict[str, LocalVersion]]:
    """Record each local file that this thread opens in the block, with its version when it was first opened."""
    outer = _opened.get()
    found: dict[str, LocalVersion] = {}
    token = _opened.set(found)
    try:
        yield found
    finally:
        _opened.reset(token)
        if outer is not None:
            outer.update(found | outer)


class LocalFile:
    """A regular file on disk. Read, not mapped: touched pages of a mapping count as the process's own memory, and a
    process that touches mapped bytes of a file which somebody cuts short is killed.
    """

    __slots__ = ("_fd", "size")

    def __init__(self, path: str) -> None:
        self._fd = _open(path)
        try:
            with _ReadErrors():
                status = os.fstat(self._fd)
            self.size = _regular(status)
        except BaseException:
            self.close()
            raise
        opened_here = _opened.get()
        if opened_here is not None:
            opened_here.setdefault(path, version_of(status))

    def read(self, offset: int, length: int) -> bytes:
        """As `File.read`. The kernel hands out at most 2 GiB at once. Raises UnreadableError."""
        with _ReadErrors():
            data = os.pread(self._fd, length, offset)
            if len(data) == length or not data:
                return data
            parts, have = [data], len(data)
            while have < length and (part := os.pread(self._fd, length - have, offset + have)):
                parts.append(part)
                have += len(part)
            return b"".join(parts)

    def fill(self, offset: int, into: memoryview, ahead: int) -> int:  # noqa: ARG002 - the system reads ahead itself
        """As `File.fill`. Raises UnreadableError."""
        with _ReadErrors():
            if hasattr(os, "preadv"):
                return os.preadv(self._fd, [into], offset)
            os.lseek(self._fd, offset, os.SEEK_SET)
            data = os.read(self._fd, len(into))
            into[: len(data)] = data
            return len(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `File.prefetch`: nothing, it is as quick to read them."""

    def here(self, offset: int, length: int) -> bytes | None:
        """As `File.here`."""
        return self.read(offset, length)

    def guard(self, guards: Iterable[Guard]) -> None:
        """As `File.guard`."""
        for guard in guards:
            guard.check(self.read(guard.header, guard.start - guard.header))

    def now(self) -> int:
        """As `File.now`."""
        with _ReadErrors():
            return os.fstat(self._fd).st_size

    def close(self) -> None:
        """As `File.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _ReadErrors:
    """Context manager that raises UnreadableError, without the path, for an error of the system.

    A class, because it is around every read and a generator costs four times as much.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            raise UnreadableError(f"cannot be read: {(error.strerror or 'unknown error').lower()}") from error


def _open(path: str) -> int:
    # Without O_NONBLOCK, opening a named pipe waits for ever for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        raise UnreadableError(f"cannot be opened: {(error.strerror or 'unknown error').lower()}") from error
    except ValueError as error:
        raise UnreadableError("cannot be opened: its name holds a NUL character") from error


def _regular(status: os.stat_result) -> int:
    """The size of what is a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise UnreadableError(f"is {kind}, not a regular file")
    return status.st_size


# --- other processes -------------------------------------------------------------------------------------------------


def access() -> Any:
    """What another process needs to read the same remote files, as plain data; None where none was named.

    It may hold what the user typed into a URL, which must not be shown.
    """
    import sys

    return _remote().access() if "statecli.storage.remote" in sys.modules else None


def accept(found: Any) -> None:
    """In another process, before its work: what `access` gave there."""
    if found is not None:
        _remote().accept(found)
