"""Set Python's search path for modules: installed packages, and a folder only if the user typed code in it.

A downloaded folder may contain a transformers.py or a numpy.py, and inspecting the folder must not run either. Typing
`net.py:Net` or `pkg.mod:Net` requests this code. The folder of statecli itself counts as installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from statecli.core.safe_search_path import DROPPED_ENTRIES, HOME


@contextmanager
def use_folder(folder: str) -> Iterator[None]:
    """Put `folder`, and the entries that `drop_relative_entries` removed, first in sys.path while the block runs."""
    added_entries = [folder, *DROPPED_ENTRIES]
    sys.path[:0] = added_entries
    try:
        yield
    finally:
        for entry in added_entries:
            if entry in sys.path:
                sys.path.remove(entry)


@contextmanager
def use_installed_only(*folders: str) -> Iterator[None]:
    """Import only installed packages while the block runs: neither from the current folder nor from `folders`."""
    previous_path = list(sys.path)
    with suppress(OSError):  # the current folder may have been removed
        folders = (os.getcwd(), *folders)
    excluded_folders = set(map(os.path.realpath, folders)) - {os.path.realpath(HOME)}
    kept_entries = [
        entry for entry in previous_path if os.path.isabs(entry) and os.path.realpath(entry) not in excluded_folders
    ]
    sys.path[:] = kept_entries
    try:
        yield
    finally:
        sys.path[:] = [*previous_path, *(entry for entry in sys.path if entry not in kept_entries)]


@contextmanager
def use_folder_last(folder: str = os.curdir) -> Iterator[None]:
    """Import installed packages first in the block, then from dropped sys.path entries, and last from `folder`.

    For a module that the user typed: a file of the current folder does not take the place of an installed module.
    """
    with use_installed_only():
        previous_path = list(sys.path)
        sys.path.extend(DROPPED_ENTRIES)
        with suppress(OSError):  # the current folder may have been removed
            sys.path.append(os.path.abspath(folder))
        try:
            yield
        finally:
            sys.path[:] = previous_path
