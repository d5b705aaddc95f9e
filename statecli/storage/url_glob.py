"""Globs in URLs, matched with the listings of folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from statecli.core.errors import UnreadableError
from statecli.storage.store import MAX_FOLDER_DEPTH, ListingBudget, Store
from statecli.storage.url import GLOB, join, split_url


def match_url_glob(store: Store, pattern: str) -> list[str]:
    """Return the URLs that match; see `Store.match_glob`. Raises UnreadableError for a folder that cannot be listed."""
    scheme, path, query = split_url(pattern)
    steps = path.split("/")
    fixed = next(n for n, step in enumerate(steps) if GLOB.search(step))
    if fixed == 0:
        raise UnreadableError(f"{pattern}: a glob cannot match a host or a bucket: write the full name")
    # `?` is not a wildcard in a URL; fnmatch matches it literally only in brackets.
    globs = [re.sub(r"(\[[^]]+\])|\?", lambda match: match[1] or "[?]", step) for step in steps[fixed:]]
    return list(dict.fromkeys(_Matcher(store, pattern).match(scheme + "/".join(steps[:fixed]) + query, globs)))


class _Matcher:
    """Matcher of one glob. It limits how many folders are listed."""

    def __init__(self, store: Store, pattern: str) -> None:
        self._store, self._budget = store, ListingBudget(pattern)

    def match(self, folder: str, steps: list[str], depth: int = 0) -> Iterator[str]:
        """Yield paths in a folder that match the pattern's remaining parts. An empty last part matches only folders."""
        if depth > MAX_FOLDER_DEPTH:
            raise UnreadableError(
                f"{folder}: is more than {MAX_FOLDER_DEPTH} folders deep; start the glob in a deeper folder"
            )
        if not any(steps):
            scheme, path, query = split_url(folder)
            yield scheme + "/".join((path.rstrip("/"), *steps)) + query if steps else folder
            return
        step, remaining_steps = steps[0], steps[1:]
        if step == "**":
            yield from self.match(folder, remaining_steps, depth)
        for name in self._list_names(folder):
            child = join(folder, name)
            if name.startswith(".") and not step.startswith(".") and self._store.is_folder(child):
                yield from (child,) if step == "**" or fnmatchcase(name.rstrip("/"), step) else ()
            elif step == "**":
                yield from () if remaining_steps else (child,)
                yield from self.match(child, steps, depth + 1) if self._store.is_folder(child) else ()
            elif fnmatchcase(name.rstrip("/"), step) and (not remaining_steps or self._store.is_folder(child)):
                yield from self.match(child, remaining_steps, depth + 1)

    def _list_names(self, folder: str) -> list[str]:
        problem = f"{folder}: statecli cannot list the names in this folder for the glob"
        try:
            names = self._store.list_names(folder)
            self._budget.take(folder, len(names))
        except UnreadableError as why:
            raise UnreadableError(f"{problem}: {why}") from why
        if (reason := self._store.explain_missing_names(folder)) is not None:
            raise UnreadableError(f"{problem}: {reason}")
        return names
