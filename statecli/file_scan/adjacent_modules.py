"""Find Python modules next to a pickle that may be imported in place of the installed packages.

A pickle names a class, and Python looks for its module in the working directory first: in a notebook, with `python -c`
and with `python -m`. If the package of a clean name is not installed or not imported yet, Python runs a file there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property

from msgspec import structs

from statecli.core.model_state import Mention, ScannedPickle
from statecli.pickle_scan import known_names
from statecli.pickle_scan.module_search import ModuleSearch
from statecli.storage import files


class ModuleFinder:
    """Finder of modules in a pickle's folder and its parent folders, up to an audited folder or the current folder.

    Each folder is listed once. `in_repository`: the current folder is in a git repository, so folders above the audited
    ones have the user's own code, and only files that replace a package on the list of clean names are reported there.
    """

    def __init__(self, targets: Iterable[str], *, in_repository: bool) -> None:
        self._targets = tuple(targets)
        self._in_repository = in_repository
        self._search = ModuleSearch()
        self._list_folders = cache(lambda folder: tuple(self._iter_folders(folder)))

    @cached_property
    def _roots(self) -> tuple[str, ...]:
        """Audited folders and the current folder, computed at first use, after all URLs were opened together."""
        folders = (os.curdir, *filter(files.is_folder, self._targets))
        return tuple(map(files.make_absolute, folders))

    def mark_pickles(self, pickles: Iterable[ScannedPickle]) -> tuple[ScannedPickle, ...]:
        """Return the pickles. If Python may import a name from a file near the pickle, record this file at the name."""
        return tuple(map(self._mark_pickle, pickles))

    def _mark_pickle(self, pickle: ScannedPickle) -> ScannedPickle:
        if pickle.doer or not pickle.names:
            return pickle
        folders = self._list_folders(files.get_folder(files.make_absolute(pickle.place.path)))
        with_target = (*folders[:1], *(folder for folder in folders[1:] if not self._has_own_code(folder)))
        names = tuple(
            self._mark_name(
                mention,
                folders if known_names.is_clean_mention(mention) else with_target,
                by_torch_load=pickle.by_torch_load,
            )
            for mention in pickle.names
        )
        return pickle if names == pickle.names else structs.replace(pickle, names=names)

    def _mark_name(self, mention: Mention, folders: Sequence[str], *, by_torch_load: bool) -> Mention:
        if mention.misuse:
            return mention
        file = self._search.find_import(mention.module, mention.name, folders, by_torch_load=by_torch_load)
        return mention if file is None else structs.replace(mention, local_file=file)

    def _iter_folders(self, folder: str) -> Iterator[str]:
        """Yield `folder`, and its parent folders that may be the working folder of a loader."""
        if not files.reads_are_requests(folder) or self._is_in_root(folder):
            yield folder
        yield from filter(self._is_in_root, files.iter_parents(folder))

    def _is_in_root(self, folder: str) -> bool:
        return any(_is_inside(folder, root) for root in self._roots)

    def _has_own_code(self, folder: str) -> bool:
        return self._in_repository and not any(_is_inside(folder, root) for root in self._roots[1:])


def _is_inside(folder: str, root: str) -> bool:
    return folder == root or folder.startswith(f"{root.rstrip('/')}/")
