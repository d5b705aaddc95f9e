"""Find existing paths similar to a missing path, to suggest them in an error."""

from __future__ import annotations

import os

#: Least similarity of a suggested name, from 0 to 1: two.py (0.67) is not suggested for net.py.
_SIMILARITY = 0.7
_MAX_PATHS = 3


def suggest_similar_paths(path: str, extension: str = "") -> str:
    """Return `did you mean weights.pt?` for a missing path, or "" if no path is similar."""
    paths = find_similar_paths(path, extension)
    return f"did you mean {' or '.join(paths)}?" if paths else ""


def append_suggestion(problem: str, path: str) -> str:
    """Return the problem with a path, followed by a similar existing path if the path does not exist."""
    suggestion = "" if os.path.lexists(path) else suggest_similar_paths(path)
    return f"{problem}; {suggestion}" if suggestion else problem


def find_similar_paths(path: str, extension: str = "") -> list[str]:
    """Return existing paths with names similar to a missing path, or with the file extension that the path lacks.

    The name of the file ends with `extension`; a folder of the path may be missing too.
    """
    *folders, name = path.replace(os.altsep or os.sep, os.sep).rstrip(os.sep).split(os.sep)
    parent = ""
    for folder in folders:
        # An empty name is the root, or is between two slashes.
        exact = os.path.join(parent, folder) if folder else parent or os.sep
        if not os.path.isdir(exact):
            names = [entry for entry in list_names(parent) if os.path.isdir(os.path.join(parent, entry))]
            similar = _choose_similar(folder, names)
            if not similar:
                return []
            exact = os.path.join(parent, similar[0])
        parent = exact
    names = [entry for entry in list_names(parent) if entry.endswith(extension)]
    names_with_extension = sorted(entry for entry in names if os.path.splitext(entry)[0] == name)
    exact_names = [name] if name in names else names_with_extension[:_MAX_PATHS]
    return [os.path.join(parent, entry) for entry in exact_names or _choose_similar(name, names)]


def _choose_similar(name: str, names: list[str]) -> list[str]:
    from difflib import get_close_matches

    equal_names = [candidate for candidate in names if candidate.lower() == name.lower()]
    return equal_names[:1] or get_close_matches(name, names, 1, _SIMILARITY)


def list_names(folder: str) -> list[str]:
    """Return the names in a folder, or [] if the folder is unreadable."""
    try:
        return os.listdir(folder or os.curdir)
    except OSError:
        return []
