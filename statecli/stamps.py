"""Whether a file is still the one that was read: written to, cut short or replaced, it is told apart by its stamp.

What lies behind a URL has none: each answer of a store says which version of it that is of, and is held to the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from statecli import files

#: Device, inode, size and time of the last write; None where there is no file to ask.
Stamp = tuple[int, int, int, int] | None

#: What is wrong with a file that is another by the end.
CHANGED = "changed while it was read: nothing it says counts; compare again"


def stamp(path: str) -> Stamp:
    """Of the file as it is now."""
    if files.is_remote(path):
        return None
    try:
        now = os.stat(path)
    except OSError:
        return None  # reading it will say so
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def stamps(paths: Iterable[str]) -> dict[str, Stamp]:
    """Of files, of those that folders hold, and of those beside the index of a checkpoint in several files."""
    return {one: stamp(one) for path in paths for one in (path, *_around(path))}


def _around(path: str) -> list[str]:
    if files.is_remote(path):
        return []
    is_folder = os.path.isdir(path)
    if not is_folder and not path.endswith(".json"):
        return []
    folder = os.path.dirname(os.path.join(path, "") if is_folder else path)
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder or os.curdir)]
    except OSError:
        return []  # reading it will say so


def changed(before: Mapping[str, Stamp]) -> list[str]:
    """The files that are no longer those that had these stamps."""
    return [path for path, then in before.items() if stamp(path) != then]
