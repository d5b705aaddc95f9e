"""Find the file or package that Python would import from a folder for a module named in a pickle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache

import msgspec

from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import name_lists
from statecli.pickles.nodes import Global
from statecli.pickles.python2_names import rename_python2
from statecli.storage import files, lifetime

#: Suffixes of files that Python imports.
_MODULE_SUFFIX = compile_on_use(r"\.(?:py|pyc|pyw|so|pyd)\Z")
#: Modules that Python has imported before it reads a pickle.
_PRELOADED_MODULES = frozenset(
    ["builtins", "codecs", "_codecs", "collections", "copyreg", "enum", "functools", "operator", "types"]
)
#: Packages whose own repositories have pickles, so that only a module in the folder of the pickle counts.
_OWN_FOLDER_PACKAGES = frozenset(["torch", "numpy"])
#: Folders of installed packages, which name each other in lists: `isympy` and `sympy` in a `top_level.txt`.
_INSTALLED_FOLDERS = frozenset(["site-packages", "dist-packages"])
#: Names whose calls import another package, which may be absent -> the package.
_IMPORTS_OF_CALLS = {"zoneinfo.ZoneInfo._unpickle": "tzdata", "zoneinfo.ZoneInfo": "tzdata"}


#: Results that are kept; a file that is not a pickle may name any number of modules.
_MAX_RESULTS = 10_000


class _Listing(msgspec.Struct, frozen=True):
    """Names in a folder, and the file that Python imports for each module name."""

    names: frozenset[str]
    modules: dict[str, str]


class ModuleSearch:
    """Search for modules in folders. Each folder is listed once, and the latest results are kept."""

    def __init__(self) -> None:
        self._list_folder = cache(_list_folder)
        self._find_in_folder = lru_cache(_MAX_RESULTS)(self._search_folder)

    def find_import(self, module: str, name: str, folders: Sequence[str], *, by_torch_load: bool = False) -> str | None:
        """Return the first file in the folders that Python imports for a name; None if no folder has such a file.

        The path is relative to the folder. Some modules import further modules. `by_torch_load`: torch loads the
        pickle, and has imported numpy before.
        """
        module, name = rename_python2(module, name)
        top = module.partition(".")[0]
        if top in _PRELOADED_MODULES:
            return None
        modules = [module]
        if not (by_torch_load and top == "numpy"):
            packages = dict.fromkeys((top, ".".join(module.split(".", 2)[:2])))
            modules += [part for package in packages for part in _list_indirect_imports().get(package, ())]
        if f"{module}.{name}" in _IMPORTS_OF_CALLS:
            modules.append(_IMPORTS_OF_CALLS[f"{module}.{name}"])
        searched = folders[:1] if top in _OWN_FOLDER_PACKAGES else folders
        found = (self._find_in_folder(tuple(part.split(".")), folder) for part in modules for folder in searched)
        return next(filter(None, found), None)

    def _search_folder(self, parts: tuple[str, ...], folder: str) -> str | None:
        """Return the file that Python would import from the folder, also through inner folders without `__init__`."""
        for at, part in enumerate(parts):
            listing = self._list_folder(folder)
            if part in listing.modules:
                return "/".join((*parts[:at], listing.modules[part]))
            if part not in listing.names:
                return None
            folder = files.join(folder, part)
            init = self._list_folder(folder).modules.get("__init__")
            if init is not None:
                return "/".join((*parts[: at + 1], init))
        return None


class AdjacentFiles:
    """Files that Python may import for the names in a file: files in the same folder and in the parent folders.

    A command lists each folder once for all files.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        folder = files.get_folder(files.make_absolute(self._path))
        folders = (folder,) if files.reads_are_requests(folder) else (folder, *files.iter_parents(folder))
        return tuple(folder for folder in folders if files.get_name(folder) not in _INSTALLED_FOLDERS)

    def has_import(self, names: Iterable[Global]) -> bool:
        """Return True if Python may import one of the names from these files."""
        search = lifetime.for_command(ModuleSearch)
        return any(search.find_import(name.module, name.name, self._folders) for name in names)


@cache
def _list_indirect_imports() -> dict[str, list[str]]:
    """Map modules of the standard library and numpy to the further modules that they import."""
    return {module: imports.split() for module, imports in name_lists.read_lines("names.txt", "imports")}


def _list_folder(folder: str) -> _Listing:
    """Return the names in a folder; no names for a file and for a folder that cannot be listed."""
    names: frozenset[str] = frozenset()
    with suppress(UnreadableError, OSError):
        names = frozenset(files.list_names(folder))
    modules = {name.partition(".")[0]: name for name in sorted(names, reverse=True) if _MODULE_SUFFIX.search(name)}
    return _Listing(names, modules)
