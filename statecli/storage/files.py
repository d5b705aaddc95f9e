"""Files and folders by path, on disk or behind a URL, so that readers need not distinguish the two.

`store_for` selects the store. Only the functions that prepare reads and those for text treat URLs differently. A URL is
represented by its masked name (`masked_url`), without secrets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from statecli import storage
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Place
from statecli.storage import lifetime, local
from statecli.storage.lifetime import forget_command
from statecli.storage.local import STANDARD_INPUT, LocalStore, record_opened_files
from statecli.storage.store import MAX_FOLDER_DEPTH, Extent, File, FileVersion, Guard, Store
from statecli.storage.url import is_remote, is_web, split_url

if TYPE_CHECKING:
    from statecli.storage.remote import Access, RemoteStore

__all__ = [
    "MAX_FOLDER_DEPTH",
    "STANDARD_INPUT",
    "File",
    "FileVersion",
    "Guard",
    "forget_command",
    "is_remote",
    "record_opened_files",
    "split_url",
]

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
#: Text that may be a misspelt URL with user and password; not a call like `pkg.mod:Net("a@b")`.
_MISSPELT_URL = compile_on_use(r"(?!-|[\w./\\-]+:[\w.]+\(.*\)$)[^\s:@]*:\S+@")
_LOCAL = LocalStore()


def store_for(path: str) -> Store:
    """Return the store that reads the path: files on disk, standard input, or files behind URLs."""
    if path == STANDARD_INPUT:
        return lifetime.for_process(storage.standard_input.StandardInputStore)
    return _remote_store() if is_remote(path) else _LOCAL


def _remote_store() -> RemoteStore:
    # Import on use, because a command with local files only does not need threads, locks and msgspec for URLs.
    return storage.remote.remote_store()


def _remote_store_in_use() -> RemoteStore | None:
    return _remote_store() if "statecli.storage.remote" in sys.modules else None


# --- methods of the store of a path ----------------------------------------------------------------------------------


def _call_store(
    method: Callable[Concatenate[Store, str, _Arguments], _Result],
) -> Callable[Concatenate[str, _Arguments], _Result]:
    """Return a function that takes a path, and calls `method` of the store for this path."""
    name = method.__name__

    def call(path: str, /, *arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        result: _Result = getattr(store_for(path), name)(path, *arguments, **options)
        return result

    return call


join = _call_store(Store.join)
split = _call_store(Store.split)
iter_parents = _call_store(Store.parents)
make_relative = _call_store(Store.make_relative)
make_absolute = _call_store(Store.make_absolute)
is_glob = _call_store(Store.is_glob)
exists = _call_store(Store.exists)
has_file = _call_store(Store.has_file)
is_folder = _call_store(Store.is_folder)
is_file = _call_store(Store.is_file)
is_link = _call_store(Store.is_link)
resolve_links = _call_store(Store.resolve_links)
list_names = _call_store(Store.list_names)
list_entries = _call_store(Store.list_entries)
may_list = _call_store(Store.may_list)
is_listed = _call_store(Store.is_listed)
explain_missing_names = _call_store(Store.explain_missing_names)
match_glob = _call_store(Store.match_glob)
open_file = _call_store(Store.open)
get_size = _call_store(Store.size)
get_version = _call_store(Store.version)
find_crc32 = _call_store(Store.find_crc32)
confirm_guards = _call_store(Store.confirm_guards)


def get_folder(path: str) -> str:
    """Return the folder of a file, like `os.path.dirname`."""
    return split(path)[0]


def get_name(path: str) -> str:
    """Return the name of a file, like `os.path.basename`."""
    return split(path)[1]


def explain_process_link(path: str) -> str | None:
    """Return why a symbolic link in the path leads to another file in each process; None for ordinary paths."""
    return local.explain_process_link(path) if store_for(path) is _LOCAL else None


def reads_are_requests(path: str) -> bool:
    """Return whether a read of the file takes a request to a server, so that batched reads are faster."""
    return store_for(path).reads_are_requests


# Only reads behind a URL are prepared, because the system reads ahead on a disk.


def prefetch(paths: Iterable[str]) -> None:
    """Fetch the beginnings of remote files before they are opened, many at a time; see `RemoteStore.prefetch`."""
    if remote_paths := [path for path in paths if is_remote(path)]:
        _remote_store().prefetch(remote_paths)


def prefetch_extents(extents_by_path: Mapping[str, list[Extent]]) -> AbstractContextManager[None]:
    """Fetch the extents of remote files together and keep them for the reads in the block."""
    remote_extents = {path: extents for path, extents in extents_by_path.items() if is_remote(path)}
    return _remote_store().prefetch_extents(remote_extents) if remote_extents else nullcontext()


def expect_values(places: Iterable[Place]) -> AbstractContextManager[None]:
    """Fetch adjacent byte ranges in one request while the block reads all ranges in order in this thread."""
    remote_places = [place for place in places if is_remote(place.path)]
    return _remote_store().expect_values(remote_places) if remote_places else nullcontext()


_is_strict: ContextVar[bool] = ContextVar("is_strict", default=False)


def is_strict() -> bool:
    """Return whether readers check remote files as completely as local files, even if this takes more requests."""
    return _is_strict.get()


@contextmanager
def read_strictly() -> Iterator[None]:
    """Let readers check remote files completely in the block, including parts that a reader does not need.

    Audit uses this function. Other commands save these requests, so `inspect` may list the tensors of a hostile remote
    archive but refuse a local copy.
    """
    token = _is_strict.set(True)
    try:
        yield
    finally:
        _is_strict.reset(token)


# --- text of the user ------------------------------------------------------------------------------------------------


def mask_urls(text: str) -> str:
    """Return typed text with its URLs masked, also after `--option=`. `file:///…` becomes a path.

    The typed URLs are remembered, and the masked names can be opened.
    """
    if "://" not in text or os.path.lexists(text):
        return _hide_typo(text)
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    if value[:7].lower() == "file://":
        from urllib.request import url2pathname

        return option + equals + _hide_typo(url2pathname(value[7:].removeprefix("localhost")))
    if is_remote(value) and os.path.lexists(value):
        return text
    if is_remote(value):
        return option + equals + storage.masked_url.mask_url(value)
    # A glob like `*://me:pw@host/*` is not a URL, but its password is hidden as in a misspelt URL.
    return option + equals + storage.masked_url.mask_urls_in(_hide_typo(value))


def _hide_typo(text: str) -> str:
    """If the text is a misspelt URL, hide its possible password in all later text. Return `text` unchanged."""
    if ":" in text and _MISSPELT_URL.match(text) and not os.path.lexists(text.partition("#")[0]):
        storage.masked_url.hide_in_typo(text)
    return text


def remove_secrets(text: str) -> str:
    """Return the text without typed secrets, also in misspelt URLs like `https:/me:pw@host`."""
    if "statecli.storage.redact" not in sys.modules:
        return text
    return storage.redact.remove_secrets(text)


def unmask_urls(text: str) -> str:
    """Return the text with URLs as the user typed them, to pass to a model. Never show the result."""
    if "://" not in text or "statecli.storage.masked_url" not in sys.modules:
        return text
    return storage.masked_url.unmask_urls_in(text)


def suggest_escaped_hash(path: str, section: str | None, error: Exception) -> str | None:
    """Return advice for a URL whose file does not exist: `#section` may belong to the file's name. Else return None."""
    if not section or not is_remote(path) or not isinstance(error, storage.object_store.Missing):
        return None
    longer = f"add a section such as #model after the name: #{section}#model"
    advice = "write %23" if is_web(split_url(path).scheme) else longer
    return f"statecli read #{section} as the name of a section; if # belongs to the file name, {advice}"


# --- commands and processes ------------------------------------------------------------------------------------------


def is_anything_remote() -> bool:
    """Return whether this command requested a remote file."""
    store = _remote_store_in_use()
    return store is not None and store.is_in_use


def export_access() -> Access | None:
    """Return the data with which another process can read the same remote files; None if no URL was used.

    The data may contain secrets of typed URLs and must not be shown.
    """
    store = _remote_store_in_use()
    return None if store is None else store.export_access()


def import_access(access: Access | None) -> None:
    """Accept data from `export_access` of another process."""
    if access is not None:
        storage.remote.accept_access(access)
