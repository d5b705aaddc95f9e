"""Store of a single file, `-`: standard input.

Readers read at several positions, so a pipe is copied to a nameless temporary file when it is first opened. A
redirected file is read in place.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

from statecli.core.errors import UnreadableError
from statecli.storage import lifetime
from statecli.storage.local import LocalFile, LocalStore, version_of
from statecli.storage.store import FileVersion

_FD = 0
_COPIED_AT_ONCE = 1 << 20


class StandardInputStore(LocalStore):
    """Store for the single path `-` (standard input). This path has neither a folder nor adjacent files."""

    def parents(self, path: str) -> Iterator[str]:  # noqa: ARG002 - see the class
        return iter(())

    def make_absolute(self, path: str) -> str:
        return path

    def exists(self, path: str) -> bool:  # noqa: ARG002 - see the class
        return True

    has_file = is_file = exists

    def is_folder(self, path: str) -> bool:  # noqa: ARG002 - see the class
        return False

    is_link = is_folder
    resolve_links = make_absolute

    def open(self, path: str) -> LocalFile:  # noqa: ARG002 - see the class
        """See `Store.open`. Raises UnreadableError for a terminal, and if copying a pipe fails."""
        return StandardInput()

    def size(self, path: str) -> int:
        return self.open(path).size

    def version(self, path: str) -> FileVersion | None:  # noqa: ARG002 - see the class
        """Return the version of the copy, or of the redirected file; see `Store.version`."""
        return version_of(os.fstat(lifetime.for_process(_Spool).fd))


class StandardInput(LocalFile):
    """Open file with the whole standard input."""

    def __init__(self) -> None:
        spool = lifetime.for_process(_Spool)
        self._fd = os.dup(spool.fd)
        self.size = os.fstat(self._fd).st_size


class _Spool:
    """Descriptor that can be read at any position: a redirected standard input, or a copy of a pipe."""

    def __init__(self) -> None:
        self._copy = None if stat.S_ISREG(_require_open().st_mode) else _copy_pipe()
        self.fd = _FD if self._copy is None else self._copy.fileno()


def _require_open() -> os.stat_result:
    # Check `sys.stdin`, because another file may have the descriptor of a closed standard input; Python notices this at
    # startup.
    if sys.stdin is None or os.isatty(_FD):
        state = "is closed" if sys.stdin is None else "is a terminal"
        raise UnreadableError(f"standard input {state}: pipe a checkpoint into statecli")
    return os.fstat(_FD)


def _copy_pipe() -> IO[bytes]:
    copy = tempfile.TemporaryFile(prefix="statecli-")  # noqa: SIM115 - open as long as the process
    try:
        while data := os.read(_FD, _COPIED_AT_ONCE):
            copy.write(data)
        copy.flush()
    except OSError as error:
        with suppress(OSError):  # closing writes the rest of the buffer, and fails again
            copy.close()
        problem = (error.strerror or "unknown error").lower()
        why = f"cannot copy standard input to {tempfile.gettempdir()}: {problem}; set TMPDIR to another folder"
        raise UnreadableError(why) from error
    return copy
