"""Store of files behind URLs. Fetches only the bytes that a reader needs.

    masked name ──▶ masked_url.py (the URL as typed) ──▶ object store: http.py, hub.py, s3.py, gcs.py, fsspec_store.py
                                                           ▲
                      object_cache.py (the fetched bytes of a file) ── retry.py (requests again after an error)

The store's knowledge of a file or a folder is valid for one command; see `lifetime`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TypeGuard

import msgspec

from statecli.core.errors import StateError, UnreadableError
from statecli.core.model_state import Place
from statecli.storage import lifetime, masked_url, object_cache, unlisted_folder, url, url_glob
from statecli.storage.object_cache import ExpectedRead, Handle, RemoteFile, Span
from statecli.storage.object_store import Listing, Missing, Unsure, open_store
from statecli.storage.parallel import run_in_threads
from statecli.storage.prefetch_progress import report_prefetch
from statecli.storage.retry import retry
from statecli.storage.store import Extent, FileVersion, FolderEntries

_FILE, _FOLDER, _MISSING = "file", "folder", "missing"

#: Maximum number of files whose beginnings are kept after the first read, because a folder may contain a million files.
MAX_KEPT_FILES = 4096


class Access(msgspec.Struct, frozen=True):
    """Data with which another process can read the same files.

    Attributes:
        urls: URLs as typed, by their masked names.
        versions: The version of each opened file.
        command: The command for which the other process works.
    """

    urls: dict[str, masked_url.TypedUrl]
    versions: dict[str, FileVersion]
    command: str

    def __repr__(self) -> str:
        return f"Access({', '.join(self.urls)})"


class RemoteStore:
    """Files behind URLs, for one command: a `Store` that uses object stores. Paths are masked names."""

    reads_are_requests = True

    def __init__(self) -> None:
        #: Random name of the command, by which a worker process notices the next command.
        self.command = os.urandom(8).hex()
        self._files: dict[str, RemoteFile] = {}
        self._kept_files: dict[str, RemoteFile] = {}
        #: Listings from the object stores, and listings by requests for usual names.
        self._listings: dict[str, Listing | UnreadableError] = {}
        self._trials: dict[str, Listing | UnreadableError] = {}
        self._kinds: dict[str, str] = {}

    # --- syntax -------------------------------------------------------------------------------------------------------

    join = staticmethod(url.join)
    split = staticmethod(url.split)
    parents = staticmethod(url.parents)
    make_relative = staticmethod(url.make_relative)
    make_absolute = staticmethod(url.make_absolute)
    is_glob = staticmethod(url.is_glob)

    # --- names --------------------------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """See `Store.exists`. A path that cannot be requested counts as present; opening this path raises the error."""
        return self._get_kind(path) != _MISSING

    def has_file(self, path: str) -> bool:
        """See `Store.has_file`. A path that cannot be requested counts as present."""
        if path not in self._kinds:
            if path not in self._files and self._is_absent_from_listing(path):
                return False
            try:
                self._get_file(path).prefetch_head()
            except Missing:
                return False
            except UnreadableError:  # opening the file raises the same error
                pass
            self._kinds[path] = _FILE
        return self._kinds[path] != _MISSING

    def is_folder(self, path: str) -> bool:
        return self._get_kind(path) == _FOLDER

    def is_file(self, path: str) -> bool:
        """See `Store.is_file`. A path that cannot be requested counts as a file; opening this path raises the error."""
        return self._get_kind(path) == _FILE

    def is_link(self, path: str) -> bool:  # noqa: ARG002 - a URL is not a link
        return False

    def resolve_links(self, path: str) -> str:
        return path

    def list_names(self, folder: str) -> list[str]:
        return list(self._list(folder).folders)

    def list_entries(self, folder: str) -> FolderEntries:
        entries = FolderEntries([], [])
        for name in sorted(self.list_names(folder)):
            (entries.folders if self.is_folder(url.join(folder, name)) else entries.files).append(name)
        return entries

    def may_list(self, folder: str) -> bool:
        folder = url.make_absolute(folder)
        return isinstance(self._ask_listing(folder), Listing) or isinstance(self._trials.get(folder), Listing)

    def is_listed(self, path: str) -> bool:
        folder, name = url.split(path)
        listing = self._listings.get(folder)
        return isinstance(listing, Listing) and name in listing.folders

    def explain_missing_names(self, folder: str) -> str | None:
        folder = url.make_absolute(folder)
        listing = self._trials.get(folder, self._listings.get(folder))
        return listing.incomplete if isinstance(listing, Listing) else None

    def match_glob(self, pattern: str) -> list[str]:
        """See `Store.match_glob`. Raises UnreadableError for a folder that cannot be listed."""
        return url_glob.match_url_glob(self, pattern)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def open(self, path: str) -> Handle:
        if url.is_folder_url(path):
            raise Missing("is an empty folder" if not self._list(path).folders else "is a folder")
        file = self._get_file(path)
        try:
            file.prefetch_head()
        except Missing:
            listing = self._listings.get(url.make_absolute(path))
            if _is_refused(listing):
                raise listing from None
            raise
        self._kept_files[path] = file
        if len(self._kept_files) > MAX_KEPT_FILES:
            self._kept_files.pop(next(iter(self._kept_files))).release()
        return Handle(file)

    def size(self, path: str) -> int:
        return self.open(path).size

    def version(self, path: str) -> None:
        """Return None: the store itself compares the version of each read; see `Store.version`."""

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch the beginnings of files, and listings of folders, in advance. Errors are raised at the opening."""
        unknown_paths = [path for path in paths if path not in self._files and path not in self._listings]
        with report_prefetch(len(unknown_paths)) as report_one:

            def prefetch_path(path: str) -> None:
                with suppress(StateError):  # opening the file raises the same error
                    if self._kinds.get(path) == _FOLDER or url.is_folder_url(path):
                        self._ask_listing(url.make_absolute(path))
                    else:
                        self._get_file(path).prefetch_head()
                report_one()

            run_in_threads(prefetch_path, unknown_paths)

    @contextmanager
    def prefetch_extents(self, extents_by_path: Mapping[str, list[Extent]]) -> Iterator[None]:
        """Fetch the extents of each file and keep them during the block. Errors are raised by the reads."""
        self.prefetch(list(extents_by_path))
        existing_files = {
            file: extents
            for path, extents in extents_by_path.items()
            if (file := self._get_file(path)).version is not None
        }
        with ExitStack() as stack:
            for file in existing_files:
                file.add_reader()
                stack.callback(file.remove_reader)
            fetches = [
                _Fetch(file, span) for file, extents in existing_files.items() for span in file.missing_spans(extents)
            ]
            run_in_threads(_try_fetch, fetches)
            yield

    def expect_values(self, places: Iterable[Place]) -> AbstractContextManager[None]:
        """Fetch adjacent byte ranges in one request while the block reads all ranges in order in this thread."""
        return object_cache.expect_values(
            ExpectedRead(self._get_file(place.path), place.offset, place.length) for place in places
        )

    def find_crc32(self, path: str, offset: int, length: int) -> int | None:
        """See `Store.find_crc32`. Only bytes that were read as values or are cached have a CRC-32."""
        return self._get_file(path).find_crc32(offset, offset + length)

    def confirm_guards(self, path: str) -> None:
        if path in self._files:
            self._files[path].confirm_guards()

    # --- other processes ----------------------------------------------------------------------------------------------

    @property
    def is_in_use(self) -> bool:
        """Whether this command requested a file."""
        return bool(self._files)

    def export_access(self) -> Access:
        """Return this process's state for other processes. Raises MalformedError if a guard of a file fails."""
        for path in list(self._files):
            try:
                self.confirm_guards(path)
            except UnreadableError as why:
                raise type(why)(f"{path}: {why}") from why
        versions = {path: file.version for path, file in self._files.items() if file.version is not None}
        return Access(dict(masked_url.typed_urls()), versions, self.command)

    # --- known listings and kinds -------------------------------------------------------------------------------------

    def _get_file(self, path: str, version: FileVersion | None = None) -> RemoteFile:
        if path not in self._files:
            link = masked_url.unmask_url(path)
            self._files[path] = RemoteFile(link, open_store(link), version)
        return self._files[path]

    def _get_kind(self, path: str) -> str:
        if path not in self._kinds:
            self._kinds[path] = self._find_kind(path)
        return self._kinds[path]

    def _find_kind(self, path: str) -> str:
        why: UnreadableError | None = None
        if not url.is_folder_url(path):
            if path not in self._files and self._is_absent_from_listing(path):
                return _MISSING
            try:
                self._get_file(path).prefetch_head()
            except UnreadableError as error:
                why = error
            if not isinstance(why, (Missing, Unsure)):
                return _FILE
        try:
            if self._list(path).folders:
                return _FOLDER
        except UnreadableError as error:
            if _is_refused(error):
                return _FILE
        return _MISSING if why is None or isinstance(why, Missing) else _FILE

    def _is_absent_from_listing(self, path: str) -> bool:
        """Return whether the folder's fetched listing lacks the name; False for dot files, which servers may hide."""
        folder, name = url.split(path)
        listing = self._listings.get(folder)
        return isinstance(listing, Listing) and name not in listing.folders and not name.startswith(".")

    def _list(self, folder: str) -> Listing:
        folder = url.make_absolute(folder)
        listing = self._ask_listing(folder)
        if isinstance(listing, Unsure):
            if folder not in self._trials:
                self._trials[folder] = unlisted_folder.try_usual_names(folder, listing, self.prefetch, self._get_file)
            listing = self._trials[folder]
        if isinstance(listing, UnreadableError):
            raise listing
        return listing

    def _ask_listing(self, folder: str) -> Listing | UnreadableError:
        if folder not in self._listings:
            self._listings[folder] = self._request_listing(folder)
        return self._listings[folder]

    def _request_listing(self, folder: str) -> Listing | UnreadableError:
        try:
            link = masked_url.unmask_url(folder)
            listing = retry(lambda: open_store(link).listing(link), link)
            listing = unlisted_folder.add_hidden_names(listing, folder, self._get_file)
        except UnreadableError as why:
            return why
        for name, is_folder in listing.folders.items():
            self._kinds[url.join(folder, name)] = _FOLDER if is_folder else _FILE
        return listing


def remote_store() -> RemoteStore:
    """Return the store of this command."""
    return lifetime.for_command(RemoteStore)


def accept_access(access: Access) -> None:
    """Accept the state of another process. If that process runs another command, first forget the earlier command."""
    store = remote_store()
    if store.command != access.command:
        lifetime.forget_command()
        store = remote_store()
        store.command = access.command
    masked_url.typed_urls().update(access.urls)
    for path, version in access.versions.items():
        store._get_file(path, version)


class _Fetch(msgspec.Struct, frozen=True):
    """Bytes to fetch, and their file."""

    file: RemoteFile
    span: Span


def _try_fetch(fetch: _Fetch) -> None:
    with suppress(UnreadableError):  # reading the bytes raises the same error
        fetch.file.fetch(fetch.span)


def _is_refused(listing: Listing | UnreadableError | None) -> TypeGuard[UnreadableError]:
    """Return whether the listing could not be fetched, for example because access is refused."""
    return isinstance(listing, UnreadableError) and not isinstance(listing, (Missing, Unsure))
