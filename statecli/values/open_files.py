"""Files that stay open between reads, so that a batch opens each file once for all its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from contextvars import ContextVar

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage.files import File

#: Maximum number of files that stay open without a reader.
MAX_OPEN_FILES = 64


def open_file(path: str) -> File:
    """Open a file. Raises `UnreadableError` if it is missing or not a regular file."""
    try:
        return files.open_file(path)
    except UnreadableError as error:
        raise type(error)(f"{path}: {error}") from error


class _OpenFile:
    __slots__ = ("file", "readers")

    def __init__(self, file: File) -> None:
        self.file, self.readers = file, 0


class OpenFiles:
    """Pool of open files, by path. At most `MAX_OPEN_FILES` of them stay open while no block uses them."""

    def __init__(self) -> None:
        self._files: dict[str, _OpenFile] = {}

    def close(self) -> None:
        """Close all files."""
        for entry in self._files.values():
            entry.file.close()
        self._files.clear()

    @contextmanager
    def borrow(self, path: str) -> Iterator[File]:
        """Lend a file to the block, and keep it open afterwards. Raises `UnreadableError` as `open_file` does."""
        entry = self._files.pop(path, None) or _OpenFile(open_file(path))
        self._files[path] = entry  # the last used file is last
        entry.readers += 1
        try:
            if len(self._files) > MAX_OPEN_FILES:
                self._close_unread()
            yield entry.file
        finally:
            entry.readers -= 1

    def _close_unread(self) -> None:
        for path in [path for path, entry in self._files.items() if not entry.readers][: -MAX_OPEN_FILES // 2]:
            self._files.pop(path).file.close()


#: Local files that the running batch keeps open, or None.
_batch_files: ContextVar[OpenFiles | None] = ContextVar("batch_files", default=None)


@contextmanager
def keep_files_open() -> Iterator[None]:
    """Let `borrow_file` open each file on disk only once while the block runs."""
    with closing(OpenFiles()) as open_files:
        token = _batch_files.set(open_files)
        try:
            yield
        finally:
            _batch_files.reset(token)


def borrow_file(path: str) -> AbstractContextManager[File]:
    """Open a file for the block, or lend a file that `keep_files_open` keeps open. Raises `UnreadableError`."""
    open_files = _batch_files.get()
    return closing(open_file(path)) if open_files is None or files.reads_are_requests(path) else open_files.borrow(path)
