"""Find folders that the author of a target may have written: the target, its parent folders and its subfolders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from statecli.storage import files
from statecli.targets.location import find_path

#: Largest number of links followed to a file: Linux follows 40.
_MAX_LINKS = 64


def is_judged_with(folder: str, target: str) -> bool:
    """Return whether the folder is a target, or lies above or below a target. Symbolic links are followed."""
    start = _find_start(target)
    return start is not None and _is_on_way(folder, list(_iter_resolved(start)))


def _find_start(target: str) -> str | None:
    """Return the path of a target; for a glob, return the folder before the first wildcard.

    Returns None for a URL and for a class of a module.
    """
    path = find_path(target)
    if path is None or files.is_remote(path):
        return None
    if not os.path.lexists(path):
        path = re.split(r"[^/\\]*[*?\[]", path, maxsplit=1)[0]
    return path or os.curdir


def _is_on_way(folder: str, steps: list[str]) -> bool:
    return folder in steps or is_below(folder, steps[-1])


def is_below(path: str, folder: str) -> bool:
    """Return whether an absolute path lies in an absolute folder, at any depth."""
    return path.startswith(os.path.join(folder, ""))


def _iter_resolved(path: str) -> Iterator[str]:
    """Yield each file and folder that the system visits to open the path, including links and their destinations."""
    drive, path_without_drive = os.path.splitdrive(os.path.join(os.getcwd(), path))
    current_path = drive + os.sep
    steps = path_without_drive.replace(os.altsep or os.sep, os.sep).split(os.sep)[::-1]
    links = 0
    while steps:
        step = steps.pop()
        current_path = (
            os.path.dirname(current_path)
            if step == os.pardir
            else os.path.join(current_path, step)
            if step != os.curdir
            else current_path
        )
        yield current_path
        if os.path.islink(current_path) and links < _MAX_LINKS:
            links += 1
            destination = os.readlink(current_path)
            steps.extend(destination.split(os.sep)[::-1])
            current_path = drive + os.sep if os.path.isabs(destination) else os.path.dirname(current_path)
            yield current_path
