"""Whether a file is still the one that was read: written to, cut short or replaced, it is told apart by its stamp."""

from __future__ import annotations

import os
from collections.abc import Iterable

#: Device, inode, size and time of the last write; None where there is no file to ask.
Stamp = tuple[int, int, int, int] | None


def stamp(path: str) -> Stamp:
    """Of the file as it is now."""
    try:
        now = os.stat(path)
    except OSError:
        return None  # reading it will say so
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def stamps(paths: Iterable[str]) -> dict[str, Stamp]:
    """Of files, and of those that folders hold."""
    found: dict[str, Stamp] = {}
    for path in paths:
        if os.path.isdir(path):
            found |= {os.path.join(path, name): stamp(os.path.join(path, name)) for name in os.listdir(path)}
        else:
            found[path] = stamp(path)
    return found
