"""What lies behind URLs: `files` asks here for what it asks of the disk elsewhere. Only the bytes needed travel.

    name shown ──▶ names.py (the URL as it was typed) ──▶ a store: http.py, hub.py, or fsspec's in filesystems.py
                                                            ▲
                        objects.py (what was fetched of an object) ── attempts.py (again, where that may help)

What is known of an object or a folder is known for one command; `forget` begins another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import msgspec

from statecli.errors import UnreadableError
from statecli.remote import names as _names
from statecli.remote.objects import Handle, Missing, Object
from statecli.remote.settings import settings
from statecli.remote.stores import Listing, Store, store_of

_One = TypeVar("_One")
_FILE, _FOLDER, _MISSING = "file", "folder", "missing"

_objects: dict[str, Object] = {}
_listings: dict[str, Listing | UnreadableError] = {}
_kinds: dict[str, str] = {}


def named(text: str) -> str:
    """The name that a URL has in everything that is shown; what is secret in it is known by that name from now on."""
    return _names.shown(text)


def forget() -> None:
    """Nothing is known any more of what lies behind URLs, but for the URLs themselves."""
    for known in (_objects, _listings, _kinds):
        known.clear()


def opened(path: str) -> Handle:
    """What lies there, open. Raises UnreadableError, without the path."""
    one = _object(path)
    one.prime()
    return Handle(one)


def exists(path: str) -> bool:
    """Whether there is a file or a folder; what cannot be asked counts as there, and opening it says why."""
    return _kind(path) != _MISSING


def isdir(path: str) -> bool:
    """Whether there is a folder."""
    return _kind(path) == _FOLDER


def isfile(path: str) -> bool:
    """Whether there is a file; what cannot be asked counts as one, and opening it says why."""
    return _kind(path) == _FILE


def names(path: str) -> list[str]:
    """The names of what is in the folder. Raises UnreadableError where that cannot be asked."""
    return list(_listed(path).folders)


def ahead(paths: Sequence[str]) -> None:
    """Fetches the beginning of each, many at a time."""
    side_by_side(lambda path: _object(path).try_prime(), [path for path in paths if path not in _objects])


def side_by_side(function: Callable[[_One], object], works: Sequence[_One]) -> None:
    """`function` of each, as many at a time as there may be connections."""
    if len(works) < 2:
        for work in works:
            function(work)
        return
    with ThreadPoolExecutor(min(settings().connections, len(works))) as threads:
        for _ in threads.map(function, works):
            pass


class Access(msgspec.Struct, frozen=True):
    """What another process needs: URLs as they were typed, by the names shown, and what is known of the objects."""

    urls: dict[str, str]
    known: dict[str, tuple[int, str | None]]

    def __repr__(self) -> str:
        return f"Access({', '.join(self.urls)})"


def access() -> Access:
    """What this process knows."""
    return Access(dict(_names.typed), {path: one.known for path, one in _objects.items() if one.known is not None})


def accept(found: Access) -> None:
    """Takes over what another process knows."""
    _names.typed.update(found.urls)
    for path, known in found.known.items():
        if path not in _objects:
            _objects[path] = Object(_names.url_of(path), _store(path), known)


# --- what is known ---------------------------------------------------------------------------------------------------


def _object(path: str) -> Object:
    if path not in _objects:
        _objects[path] = Object(_names.url_of(path), _store(path))
    return _objects[path]


@cache
def _store(path: str) -> Store:
    return store_of(_names.url_of(path))


def _kind(path: str) -> str:
    if path not in _kinds:
        _kinds[path] = _found_kind(path)
    return _kinds[path]


def _found_kind(path: str) -> str:
    if not _names.is_folder(path):
        try:
            _object(path).prime()
        except Missing:
            _objects.pop(path, None)
        except UnreadableError:
            return _FILE
        else:
            return _FILE
    try:
        return _FOLDER if _listed(path).folders else _MISSING
    except UnreadableError:
        return _MISSING


def _listed(path: str) -> Listing:
    if path not in _listings:
        _listings[path] = _listing(path)
    found = _listings[path]
    if isinstance(found, UnreadableError):
        raise found
    return found


def _listing(path: str) -> Listing | UnreadableError:
    from statecli import files

    try:
        found = _store(path).listing(_names.url_of(path))
    except UnreadableError as why:
        return why
    for name, is_folder in found.folders.items():
        inner = files.join(path, name)
        _kinds[inner] = _FOLDER if is_folder else _FILE
    return found
