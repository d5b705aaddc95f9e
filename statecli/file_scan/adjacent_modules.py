"""Find Python modules next to a pickle that may be imported in place of the installed packages.

A pickle names a class, and Python looks for its module in the working directory first: in a notebook, with `python -c`
and with `python -m`. A clean name of a package not installed, or not imported yet, then runs a file of the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property

from msgspec import structs

from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Mention, ScannedPickle
from statecli.pickles.python2_names import rename_python2
from statecli.storage import files

#: Suffixes of files that Python imports.
_MODULE_SUFFIX = compile_on_use(r"\.(?:py|pyc|pyw|so|pyd)\Z")
#: Modules that Python has imported before it reads a pickle.
_PRELOADED_MODULES = frozenset(
    ["builtins", "codecs", "_codecs", "collections", "copyreg", "enum", "functools", "operator", "types"]
)
#: Packages whose own repositories have pickles, so that only a module in the folder of the pickle counts.
_OWN_FOLDER_PACKAGES = frozenset(["torch", "numpy"])
#: Names whose calls import another package, which may be absent -> the package.
_INDIRECT_IMPORTS = {"zoneinfo.ZoneInfo._unpickle": "tzdata", "zoneinfo.ZoneInfo": "tzdata"}


class ModuleFinder:
    """Finder of modules in the folder of a pickle and its parents, up to the audited folders or the current folder.

    Each folder is listed once, and each module is searched once in each folder.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._targets = tuple(targets)
        self._list_names = cache(_list_names)
        self._list_folders = cache(lambda folder: tuple(self._iter_folders(folder)))
        self._find_in_folder = cache(self._search_folder)

    @cached_property
    def _roots(self) -> tuple[str, ...]:
        """Audited folders and current folder; computed at first use, because all URLs are opened together before."""
        folders = (os.curdir, *filter(files.is_folder, self._targets))
        return tuple(map(files.make_absolute, folders))

    def mark_pickles(self, pickles: Iterable[ScannedPickle]) -> tuple[ScannedPickle, ...]:
        """Return the pickles, with a misuse for each name whose module may come from a file next to the pickle."""
        return tuple(map(self._mark_pickle, pickles))

    def _mark_pickle(self, pickle: ScannedPickle) -> ScannedPickle:
        if pickle.doer or not pickle.names:
            return pickle
        folders = self._list_folders(files.get_folder(files.make_absolute(pickle.place.path)))
        names = tuple(self._mark_name(mention, folders) for mention in pickle.names)
        return pickle if names == pickle.names else structs.replace(pickle, names=names)

    def _mark_name(self, mention: Mention, folders: Sequence[str]) -> Mention:
        module, name = rename_python2(mention.module, mention.name)
        modules = filter(None, (module, _INDIRECT_IMPORTS.get(f"{module}.{name}")))
        files_of_modules = (self._find_file(tuple(module.split(".")), folders) for module in modules)
        file = None if mention.misuse else next(filter(None, files_of_modules), None)
        if file is None:
            return mention
        why = (
            f"Python may import from {quoting.quote(file)}, a file in the folder of the checkpoint or in a parent "
            "folder"
        )
        return structs.replace(mention, misuse=why)

    def _iter_folders(self, folder: str) -> Iterator[str]:
        """Yield the folder of a file, and its parents that may be the working directory of a loader."""
        if not files.reads_are_requests(folder) or self._is_in_root(folder):
            yield folder
        yield from filter(self._is_in_root, files.iter_parents(folder))

    def _is_in_root(self, folder: str) -> bool:
        return any(folder == root or folder.startswith(f"{root.rstrip('/')}/") for root in self._roots)

    def _find_file(self, parts: tuple[str, ...], folders: Sequence[str]) -> str | None:
        """Return the file that Python would import for a module, relative to the folder; None if there is none."""
        if parts[0] in _PRELOADED_MODULES:
            return None
        searched = folders[:1] if parts[0] in _OWN_FOLDER_PACKAGES else folders
        return next(filter(None, (self._find_in_folder(parts, folder) for folder in searched)), None)

    def _search_folder(self, parts: tuple[str, ...], folder: str) -> str | None:
        """Return the file that Python would import; a folder without `__init__` counts only if it has the module."""
        for at, part in enumerate(parts):
            names = self._list_names(folder)
            name_of_module = next((name for name in names if _is_module(name, part)), None)
            if name_of_module is not None:
                return "/".join((*parts[:at], name_of_module))
            if part not in names:
                return None
            folder = files.join(folder, part)
            init = next((name for name in self._list_names(folder) if _is_module(name, "__init__")), None)
            if init is not None:
                return "/".join((*parts[: at + 1], init))
        return None


def _is_module(name: str, module: str) -> bool:
    return name.startswith(f"{module}.") and _MODULE_SUFFIX.search(name) is not None


def _list_names(folder: str) -> frozenset[str]:
    """Return the names in a folder; no names for a file and for a folder that cannot be listed."""
    with suppress(UnreadableError, OSError):
        return frozenset(files.list_names(folder))
    return frozenset()
