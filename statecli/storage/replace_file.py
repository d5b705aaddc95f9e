"""Replace a file by a complete file, or leave it unchanged."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO


@contextmanager
def replace_file(path: str) -> Iterator[IO[bytes]]:
    """Yield a file to write. After the block, the file replaces `path`; until then `path` is unchanged.

    Mode, owner and links are kept. If `path` is a special file, or its folder is read-only, the file is written in
    place. Raises OSError.
    """
    try:
        existing_status = os.stat(path)
    except FileNotFoundError:
        existing_status = None
    temporary = _create_temporary_file(os.path.realpath(path), existing_status)
    if temporary is None:
        with open(path, "wb") as file:
            yield file
        return
    try:
        with open(temporary, "wb") as file:
            yield file
        _move_into_place(temporary, os.path.realpath(path), existing_status)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _create_temporary_file(path: str, existing_status: os.stat_result | None) -> str | None:
    """Create an empty temporary file next to `path`; return None if `path` must be written in place."""
    if existing_status is not None:
        if not stat.S_ISREG(existing_status.st_mode):
            return None
        # Raises for a file without permission to write, which must not be replaced.
        os.close(os.open(path, os.O_WRONLY))
    temporary = os.path.join(os.path.dirname(path), f".statecli-{os.urandom(8).hex()}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except PermissionError:
        if existing_status is None:
            raise
        return None
    return temporary


def _move_into_place(temporary: str, path: str, existing_status: os.stat_result | None) -> None:
    """Rename the temporary file to `path`. Copy its content if `path` has other hard links or is a mount point."""
    if existing_status is not None:
        with suppress(OSError, AttributeError):  # the file of another user, a system without owners
            os.chown(temporary, existing_status.st_uid, existing_status.st_gid)
        with suppress(OSError):
            os.chmod(temporary, stat.S_IMODE(existing_status.st_mode))
    if existing_status is None or existing_status.st_nlink == 1:
        try:
            os.replace(temporary, path)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    with open(temporary, "rb") as new, open(path, "wb") as file:
        while piece := new.read(1 << 20):
            file.write(piece)
