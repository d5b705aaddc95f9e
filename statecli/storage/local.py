"""Store of files on disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase

from statecli.core import posix
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage.store import Extent, FileVersion, FolderEntries, Guard
from statecli.storage.url import is_remote

#: Name of standard input as a target.
STANDARD_INPUT = "-"

_GLOB = compile_on_use(r"[*?[]")

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)

#: Local files opened so far, with their versions at that time; None if no block records them.
_opened_versions: ContextVar[dict[str, FileVersion] | None] = ContextVar("opened_versions", default=None)


@contextmanager
def record_opened_files() -> Iterator[dict[str, FileVersion]]:
    """Record each local file opened by this thread in the block, with its version at the first opening."""
    outer_versions = _opened_versions.get()
    versions: dict[str, FileVersion] = {}
    token = _opened_versions.set(versions)
    try:
        yield versions
    finally:
        _opened_versions.reset(token)
        if outer_versions is not None:
            outer_versions.update(versions | outer_versions)


def spell_as_path(path: str) -> str:
    """Return a path in a form that can only mean a file on disk: `./-` for a file named `-` in the current folder."""
    return os.path.join(os.curdir, path) if path == STANDARD_INPUT or is_remote(path) else path


#: Folders of the system whose entries are devices, or depend on the process that opens them.
_PROCESS_FOLDERS = ("/proc", "/sys", "/dev")
#: Exception among these folders: files in memory.
_MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - a comparison
#: Maximum number of links that the system follows to open a file.
_MAX_LINKS = 40


def explain_process_link(path: str) -> str | None:
    """Return why a link in `path` through a folder such as /proc must not be followed; None without such a link.

    The link may lead a loader elsewhere than the audit: `/proc/self/cwd` is the loader's current folder. A path typed
    with the system folder's own name, like `/dev/stdin`, is accepted.
    """
    resolved, links = "", 0  # the root is ""
    # A relative path stays relative without a current folder, which may have been removed.
    absolute_path = path if os.path.isabs(path) or not os.path.exists(os.curdir) else os.path.join(os.getcwd(), path)
    pending = absolute_path.split("/")[::-1] if os.sep == "/" else []
    while pending and links <= _MAX_LINKS:
        step = pending.pop()
        parent = resolved.rpartition("/")[0] if step == os.pardir else resolved
        resolved = parent if step in ("", os.curdir, os.pardir) else f"{resolved}/{step}"
        if (folder := _get_process_folder(resolved, is_last=not any(pending))) is not None:
            different = "which points to a different file in each process; replace the link with the file"
            return f"is reached by a link through {folder}, {different}" if links else None
        if resolved == parent:
            continue
        try:
            link_target = os.readlink(resolved)
        except (OSError, ValueError):  # not a link
            continue
        links += 1
        resolved = "" if link_target.startswith("/") else parent
        pending.extend(link_target.split("/")[::-1])
    return None


def _get_process_folder(path: str, *, is_last: bool) -> str | None:
    """Return which of /proc, /sys and /dev contains an absolute path; else None. `is_last`: the path ends here."""
    if not path.startswith(_PROCESS_FOLDERS):
        return None
    if f"{path}/".startswith(f"{_MEMORY_FOLDER}/") or (_MEMORY_FOLDER.startswith(f"{path}/") and not is_last):
        return None
    return next((folder for folder in _PROCESS_FOLDERS if f"{path}/".startswith(f"{folder}/")), None)


class LocalStore:
    """Files on disk: a `Store` that uses `os.path`."""

    reads_are_requests = False

    def join(self, folder: str, *names: str) -> str:
        return spell_as_path(os.path.join(folder, *names))

    def split(self, path: str) -> tuple[str, str]:
        folder, name = os.path.split(path)
        return spell_as_path(folder), name

    def parents(self, path: str) -> Iterator[str]:
        from pathlib import PurePath  # slow import: every command imports this module

        return (spell_as_path(str(folder)) for folder in PurePath(path).parents)

    def make_relative(self, path: str, folder: str) -> str:
        return os.path.relpath(path, folder or os.curdir).replace(os.sep, "/")

    def make_absolute(self, path: str) -> str:
        return os.path.abspath(path)

    def is_glob(self, text: str) -> bool:
        return _GLOB.search(text) is not None

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    has_file = exists

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def resolve_links(self, path: str) -> str:
        return os.path.realpath(path)

    def list_names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def list_entries(self, folder: str) -> FolderEntries:
        """See `Store.list_entries`. Raises OSError. `os.scandir` returns names with kinds, which saves `stat` calls."""
        entries = FolderEntries([], [])
        with os.scandir(folder) as directory:
            for entry in sorted(directory, key=lambda entry: entry.name):
                (entries.folders if _is_folder(entry) else entries.files).append(entry.name)
        return entries

    def may_list(self, folder: str) -> bool:
        return os.access(folder, os.R_OK)

    def is_listed(self, path: str) -> bool:  # noqa: ARG002 - listings of a disk are not kept
        return False

    def explain_missing_names(self, folder: str) -> None:
        """Return None, because the system returns all names; see `Store.explain_missing_names`."""

    def match_glob(self, pattern: str) -> list[str]:
        import glob

        matches = (*glob.glob(pattern, recursive=True), *_match_hidden(pattern))
        return list(dict.fromkeys(map(spell_as_path, matches)))

    def open(self, path: str) -> LocalFile:
        """See `Store.open`. Refuses a fifo or `/dev/zero` named `model.pt` without reading or blocking."""
        return LocalFile(path)

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def version(self, path: str) -> FileVersion | None:
        """Return device, inode, size, and times of the last write and the last inode change; see `Store.version`."""
        try:
            return version_of(os.stat(path))
        except OSError:
            return None  # reading the file raises the error

    def find_crc32(self, path: str, offset: int, length: int) -> None:
        """See `Store.find_crc32`."""

    def confirm_guards(self, path: str) -> None:
        """See `Store.confirm_guards`. Does nothing, because guards of local files are checked when they are added."""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # the link leads to itself
        return False


class LocalFile:
    """Regular file on disk: a `File`.

    Read, not mapped, because touched pages of a mapping count as the process's memory, and touching a truncated file's
    missing pages kills the process.
    """

    __slots__ = ("_fd", "size")

    def __init__(self, path: str) -> None:
        self._fd = _open(path)
        try:
            with _ReadErrors():
                status = os.fstat(self._fd)
            self.size = _require_regular(status)
        except BaseException:
            self.close()
            raise
        versions = _opened_versions.get()
        if versions is not None:
            versions.setdefault(path, version_of(status))

    def read(self, offset: int, length: int) -> bytes:
        with _ReadErrors():
            return posix.read_at(self._fd, length, offset)

    def fill(self, offset: int, into: memoryview, read_ahead: int) -> int:  # noqa: ARG002 - the system reads ahead itself
        with _ReadErrors():
            return posix.fill_at(self._fd, into, offset)

    def prefetch(self, extents: Iterable[Extent]) -> None:
        """See `File.prefetch`."""

    def read_cached(self, offset: int, length: int) -> bytes | None:
        return self.read(offset, length)

    def guard(self, guards: Iterable[Guard]) -> None:
        for guard in guards:
            guard.check(self.read(guard.header, guard.start - guard.header))

    def measure(self) -> int:
        with _ReadErrors():
            return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _ReadErrors:
    """Context manager that converts an OSError to an UnreadableError whose text does not name the path.

    A class and not a generator, because every read enters the context and a generator takes four times as long.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            raise UnreadableError(f"cannot be read: {(error.strerror or 'unknown error').lower()}") from error


def version_of(status: os.stat_result) -> FileVersion:
    """Return the version of a file from its `stat` result."""
    marker = f"{status.st_dev} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"
    return FileVersion(status.st_size, marker)


def _open(path: str) -> int:
    if (reason := explain_process_link(path)) is not None:
        raise UnreadableError(reason)
    # O_NONBLOCK, because opening a named pipe would otherwise wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        link = _describe_broken_link(path) if isinstance(error, FileNotFoundError) and os.path.islink(path) else None
        problem = link or (error.strerror or "unknown error").lower()
        raise UnreadableError(f"cannot be opened: {problem}") from error
    except ValueError as error:
        raise UnreadableError("cannot be opened: its name contains a NUL character") from error


def _describe_broken_link(path: str) -> str:
    """Describe the target of a broken link, and how to get the content if git-annex or the hub's cache manages it."""
    import shlex

    link_target = os.readlink(path)
    steps = link_target.replace(os.sep, "/").split("/")
    if "annex" in steps and "objects" in steps:
        return f"its content is in git-annex but not on this machine; run: git annex get {shlex.quote(path)}"
    if "blobs" in steps:
        return f"the link leads to {link_target}, which is missing in the cache; download the repository again"
    return f"the link leads to {link_target}, which does not exist"


def _require_regular(status: os.stat_result) -> int:
    """Return the size of a regular file. Raises UnreadableError for a folder, a pipe, a device."""
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise UnreadableError(f"is {kind}, not a regular file")
    return status.st_size


def _match_hidden(pattern: str) -> Iterator[str]:
    """Yield the hidden files that a glob should match, and the hidden folders themselves without their contents."""
    import glob

    steps = pattern.split(os.sep)
    for n, step in enumerate(steps):
        if step.startswith(".") or not _GLOB.search(step):
            continue
        hidden_steps = [*steps[:n], *(["**"] if step == "**" else []), ".*"]
        for path in glob.iglob(os.sep.join(hidden_steps), recursive=True):
            if step in ("*", "**") or fnmatchcase(os.path.basename(path), step):
                yield from (path,) if n == len(steps) - 1 or os.path.isdir(path) else ()
