"""What lies behind URLs: `files` asks here for what it asks of the disk elsewhere. Only the bytes needed travel.

    name shown ──▶ names.py (the URL as it was typed) ──▶ a store: http.py, hub.py, or fsspec's in filesystems.py
                                                            ▲
                        objects.py (what was fetched of an object) ── attempts.py (again, where that may help)

What is known of an object or a folder is known for one command; `forget` begins another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, TypeGuard

import msgspec

from statecli.core.errors import StateError, UnreadableError
from statecli.storage import files, object_cache, retry, unlisted_folder
from statecli.storage import url as _names
from statecli.storage.limits import settings
from statecli.storage.object_cache import Handle, Missing, Object
from statecli.storage.parallel import side_by_side
from statecli.storage.retry import repeated
from statecli.storage.store import Listing, Store, Unsure, store_of
from statecli.storage.store import forget as forget_stores

_FILE, _FOLDER, _MISSING = "file", "folder", "missing"

#: Objects whose beginnings are kept once they were read: a folder may hold a million.
KEPT = 4096

_objects: dict[str, Object] = {}
_kept: dict[str, Object] = {}
#: What the stores say is in a folder, and what was found in those that they list for nobody.
_listings: dict[str, Listing | UnreadableError] = {}
_trials: dict[str, Listing | UnreadableError] = {}
_kinds: dict[str, str] = {}
#: What others found out about remote files, by keys of theirs.
remembered: dict[Any, Any] = {}


def named(text: str) -> str:
    """The name that a URL has in everything that is shown; what is secret in it is known by that name from now on."""
    return _names.shown(text)


def named_in(text: str) -> str:
    """Text that is no URL, with such names for the URLs in it."""
    return _names.inside(text)


def hide_in_typo(text: str) -> None:
    """What may be a password in a text that is nearly a URL is shown nowhere from now on."""
    _names.hide_in_typo(text)


def meant_by(text: str) -> str:
    """The text again, with the URLs as they were typed."""
    return _names.outside(text)


def forget() -> None:
    """Nothing is known any more of what lies behind URLs, but for the URLs themselves."""
    remembered.clear()
    for known in (_objects, _kept, _listings, _trials, _kinds):
        known.clear()
    _store.cache_clear()
    settings.cache_clear()
    retry.forget()
    forget_stores()


def opened(path: str) -> Handle:
    """What lies there, open. Raises UnreadableError, without the path."""
    if _names.is_folder(path):
        raise Missing("is an empty folder" if not _listed(path).folders else "is a folder")
    one = _object(path)
    try:
        one.prime()
    except Missing:
        listed = _listings.get(files.absolute(path))
        if _is_refused(listed):
            raise listed from None
        raise
    _kept[path] = one
    if len(_kept) > KEPT:
        _kept.pop(next(iter(_kept))).release()
    return Handle(one)


def exists(path: str) -> bool:
    """Whether there is a file or a folder; what cannot be asked counts as there, and opening it says why."""
    return _kind(path) != _MISSING


def has_file(path: str) -> bool:
    """Whether there is a file; what cannot be asked counts as one. Nothing is asked for below its name."""
    if path not in _kinds:
        if path not in _objects and _is_not_listed(path):
            return False
        try:
            _object(path).prime()
        except Missing:
            return False
        except UnreadableError:  # whoever opens it meets the same
            pass
        _kinds[path] = _FILE
    return _kinds[path] != _MISSING


def isdir(path: str) -> bool:
    """Whether there is a folder."""
    return _kind(path) == _FOLDER


def isfile(path: str) -> bool:
    """Whether there is a file; what cannot be asked counts as one, and opening it says why."""
    return _kind(path) == _FILE


def names_in(path: str) -> list[str]:
    """The names of what is in the folder. Raises UnreadableError where that cannot be asked."""
    return list(_listed(path).folders)


def may_list(path: str) -> bool:
    """Whether the names in the folder are known, or can be asked for."""
    path = files.absolute(path)
    return isinstance(_told(path), Listing) or isinstance(_trials.get(path), Listing)


def is_listed(path: str) -> bool:
    """Whether the folder around it was listed with it."""
    around, name = files.split(path)
    found = _listings.get(around)
    return isinstance(found, Listing) and name in found.folders


def unlisted(path: str) -> str | None:
    """Why the names in the folder are not all of them, if that is so."""
    path = files.absolute(path)
    found = _trials.get(path, _listings.get(path))
    return found.unlisted if isinstance(found, Listing) else None


def ahead(paths: Sequence[str]) -> None:
    """Fetches the beginning of each, of a folder its names, many at a time."""
    wanted = [path for path in paths if path not in _objects and path not in _listings]
    if len(wanted) > 1:
        with files.watched(len(wanted)) as done:

            def one(path: str) -> None:
                _ahead(path)
                done()

            side_by_side(one, wanted)
    else:
        side_by_side(_ahead, wanted)


def _ahead(path: str) -> None:
    with suppress(StateError):  # whoever opens it meets the same
        if _kinds.get(path) == _FOLDER or _names.is_folder(path):
            _told(files.absolute(path))
        else:
            _object(path).prime()


@contextmanager
def fetched(wanted: Mapping[str, list[tuple[int, int]]]) -> Iterator[None]:
    """Around reading these (offset, length) of several files, which are fetched many at a time."""
    ahead(list(wanted))
    primed = [(one, spans) for path, spans in wanted.items() if (one := _object(path)).known is not None]
    with ExitStack() as stack:
        for one, _ in primed:
            one.opened()
            stack.callback(one.closed)
        side_by_side(_try_fetch, [(one, span) for one, spans in primed for span in one.missing(spans)])
        yield


def _try_fetch(work: tuple[Object, list[int]]) -> None:
    with suppress(UnreadableError):  # whoever reads it meets the same, and says so
        work[0].fetch(work[1])


def is_in_use() -> bool:
    """Whether anything has been opened since `forget`."""
    return bool(_objects)


def crc32_of(path: str, offset: int, length: int) -> int | None:
    """That of these bytes, where all of them were read as values, or are here."""
    return _object(path).crc32_of(offset, offset + length)


def confirm(path: str) -> None:
    """Asks all of a file's guards that were not. Raises MalformedError, without the path, as they do."""
    if path in _objects:
        _objects[path].confirm()


@contextmanager
def reading(ranges: Iterable[tuple[str, int, int]]) -> Iterator[None]:
    """Around reading the values of these (path, offset, length) in this thread, one after another."""
    with object_cache.reading((_object(path), offset, length) for path, offset, length in ranges):
        yield


class Access(msgspec.Struct, frozen=True):
    """What another process needs: URLs as they were typed, by the names shown, and what is known of the objects."""

    urls: dict[str, _names.Typed]
    known: dict[str, tuple[int, str | None]]
    moved: dict[str, dict[int, tuple[int, int]]]
    #: Which command it is that wants it.
    command: str

    def __repr__(self) -> str:
        return f"Access({', '.join(self.urls)})"


def access() -> Access:
    """What this process knows. Raises MalformedError where an archive's directory, on trust so far, is wrong."""
    for path in list(_objects):
        try:
            confirm(path)
        except UnreadableError as why:
            raise type(why)(f"{path}: {why}") from why
    known = {path: one.known for path, one in _objects.items() if one.known is not None}
    moved = {path: one.moved for path, one in _objects.items() if one.moved}
    return Access(dict(_names.typed), known, moved, remembered.setdefault(Access, os.urandom(8).hex()))


def accept(found: Access) -> None:
    """Takes over what another process knows."""
    if remembered.get(Access) != found.command:  # a worker lives on, and what it knows may be so no longer
        forget()
        remembered[Access] = found.command
    _names.typed.update(found.urls)
    for path, known in found.known.items():
        if path not in _objects:
            _objects[path] = Object(_names.url_of(path), _store(path), known)
        _objects[path].moved.update(found.moved.get(path, {}))


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
    why: UnreadableError | None = None
    if not _names.is_folder(path):
        if path not in _objects and _is_not_listed(path):
            return _MISSING
        try:
            _object(path).prime()
        except UnreadableError as error:
            why = error
        if isinstance(why, Missing):
            _objects.pop(path, None)
        elif not isinstance(why, Unsure):
            return _FILE
    try:
        if _listed(path).folders:
            return _FOLDER
    except UnreadableError as error:
        if _is_refused(error):
            return _FILE
    return _MISSING if why is None or isinstance(why, Missing) else _FILE


def _is_refused(listed: Listing | UnreadableError | None) -> TypeGuard[UnreadableError]:
    """Whether there may be a folder that cannot be asked for."""
    return isinstance(listed, UnreadableError) and not isinstance(listed, (Missing, Unsure))


def _is_not_listed(path: str) -> bool:
    """Whether the folder around it was listed without it; a server may hide what begins with a dot."""
    around, name = files.split(path)
    found = _listings.get(around)
    return isinstance(found, Listing) and name not in found.folders and not name.startswith(".")


def _listed(path: str) -> Listing:
    path = files.absolute(path)
    found = _told(path)
    if isinstance(found, Unsure):
        if path not in _trials:
            _trials[path] = unlisted_folder.tried(path, found, ahead, _object)
        found = _trials[path]
    if isinstance(found, UnreadableError):
        raise found
    return found


def _told(path: str) -> Listing | UnreadableError:
    if path not in _listings:
        _listings[path] = _listing(path)
    return _listings[path]


def _listing(path: str) -> Listing | UnreadableError:
    try:
        url = _names.url_of(path)
        found = repeated(lambda: _store(path).listing(url), url)
        found = unlisted_folder.with_hidden(found, path, _object)
    except UnreadableError as why:
        return why
    for name, is_folder in found.folders.items():
        inner = files.join(path, name)
        _kinds[inner] = _FOLDER if is_folder else _FILE
    return found
