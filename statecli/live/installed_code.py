"""Recognize files of installed libraries (users do not edit these), and format file names as the user typed them."""

from __future__ import annotations

import functools
import os
import sys

#: The folder of statecli.
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: The folder of the standard library.
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
#: Names of folders into which pip installs.
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_installed_file(filename: str) -> bool:
    """Return True for a file of the standard library or of an installed package."""
    return _is_installed_file(filename, tuple(sys.path))


@functools.lru_cache(maxsize=4096)
def _is_installed_file(filename: str, search_path: tuple[str, ...]) -> bool:
    if filename.startswith(STANDARD_LIBRARY) or any(folder in filename for folder in _PACKAGE_FOLDERS):
        return True
    roots = (os.path.abspath(entry) for entry in search_path)
    return any(filename.startswith(root + os.sep) and _is_in_record(root, filename) for root in roots)


def _is_in_record(root: str, filename: str) -> bool:
    """Return True if a record of `pip install --target` in the folder `root` lists the package of the file."""
    package = filename[len(root) + 1 :].partition(os.sep)[0]
    return package in _list_recorded_packages(root)


@functools.lru_cache(maxsize=64)
def _list_recorded_packages(root: str) -> frozenset[str]:
    """Return the top-level names of all packages listed in the `RECORD` files of a folder."""
    packages: set[str] = set()
    try:
        folders = [entry.path for entry in os.scandir(root) if entry.name.endswith(".dist-info")]
        for record in filter(os.path.isfile, (os.path.join(folder, "RECORD") for folder in folders)):
            with open(record, encoding="utf-8") as file:
                packages.update(line.partition("/")[0].partition(",")[0] for line in file)
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(packages)


def format_path(filename: str, typed_paths: dict[str, str]) -> str:
    """Return the typed file name, or else the path relative to the current folder or to a sys.path entry."""
    absolute = os.path.abspath(filename)
    if absolute in typed_paths:
        return typed_paths[absolute]
    roots = [os.getcwd(), *sorted({os.path.abspath(entry or ".") for entry in sys.path}, key=len, reverse=True)]
    if is_installed_file(absolute):
        roots = [*roots[1:], roots[0]]
    for root in roots:
        if absolute.startswith(root.rstrip(os.sep) + os.sep):
            return os.path.relpath(absolute, root)
    return os.path.basename(absolute)
