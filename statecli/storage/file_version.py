"""Detect local files that change while a command reads them.

A remote file has no version here, because its store compares the version of each answer with that of the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage.store import CHANGED_TRY_AGAIN, FileVersion as FileVersion

#: Error for a file that has another version at the end, because results were already computed from its bytes.
RESULT_NOT_VALID = "changed while statecli read it, so the result is not valid; compare again"


class FileChanged(UnreadableError):
    """Error: the file `path` changed after its header was read."""

    def __init__(self, path: str, prefix: str = "") -> None:
        super().__init__(f"{prefix}{RESULT_NOT_VALID}")
        self.path = path


#: Function that returns the present version of a file.
read_version = files.get_version


def read_versions(paths: Iterable[str]) -> dict[str, FileVersion | None]:
    """Return the version of each path, except folders. For files in folders, use `files.record_opened_files`."""
    return {path: read_version(path) for path in paths if not os.path.isdir(path)}


def find_changed(versions: Mapping[str, FileVersion | None]) -> list[str]:
    """Return the files whose present version differs from the given version."""
    return [path for path, then in versions.items() if read_version(path) != then]


def refuse_changed(versions: Mapping[str, FileVersion | None]) -> None:
    """Raise `UnreadableError` for the first file whose present version differs from the given version."""
    for path in find_changed(versions):
        raise UnreadableError(f"{path}: {CHANGED_TRY_AGAIN}")


@contextmanager
def refuse_files_that_change() -> Iterator[None]:
    """Raise `UnreadableError` after the block if a file has changed since its first opening in the block."""
    with files.record_opened_files() as opened_versions:
        yield
    refuse_changed(opened_versions)
