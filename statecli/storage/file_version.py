"""Whether a file is still the one that was read: written to, cut short, replaced or touched, it has another stamp.

What lies behind a URL has none: each answer of a store says which version of it that is of, and is held to the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage.files import LocalVersion

#: The version of a local file; None where there is no file to ask.
Stamp = LocalVersion | None

#: What is wrong with a file that is another by the end.
CHANGED = "changed while it was read: nothing it says counts; compare again"
TRY_AGAIN = "changed while it was read: try again"


def stamp(path: str) -> Stamp:
    """Of the file as it is now."""
    if files.is_remote(path):
        return None
    try:
        return files.version_of(os.stat(path))
    except OSError:
        return None  # reading it will say so


def stamps(paths: Iterable[str]) -> dict[str, Stamp]:
    """Of files, and of nothing that lies in folders: `files.recording_opened` has what is read there."""
    return {path: stamp(path) for path in paths if not os.path.isdir(path)}


def changed(before: Mapping[str, Stamp]) -> list[str]:
    """The files that are no longer those that had these stamps."""
    return [path for path, then in before.items() if stamp(path) != then]


def refuse_changed(before: Mapping[str, Stamp]) -> None:
    """Raise `UnreadableError` for the first file that is no longer the one that had this stamp."""
    for path in changed(before):
        raise UnreadableError(f"{path}: {TRY_AGAIN}")


@contextmanager
def unchanged_files() -> Iterator[None]:
    """Raise `UnreadableError` after the block for a file that changed since the block opened it first."""
    with files.recording_opened() as opened:
        yield
    refuse_changed(opened)
