"""Cache norms, counts and changes of tensors in the user's cache folder, so that values are read only once.

An entry is a file of plain JSON, found by a hash of the versions of all files of a checkpoint (path, size, device,
inode, time of the last write and of the last inode change) and of the places of its tensors. The cache is a hint, not
evidence: `audit` and `lock` do not use it. A damaged entry, an entry of another version, and a folder that is not the
user's own are ignored. Entries are replaced as a whole, so that several commands may write at the same time.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from statecli.core import posix
from statecli.core.model_state import ModelState
from statecli.storage.store import FileVersion

_Item = TypeVar("_Item")

#: Version of the format of entries; part of each key.
CACHE_FORMAT = "statecli.log-cache/3"
#: Largest size in bytes of an entry, and of all entries together.
MAX_ENTRY_BYTES = 64 << 20
MAX_CACHE_BYTES = 256 << 20
#: Fraction of MAX_CACHE_BYTES that remains after the oldest entries were removed.
KEPT_FRACTION = 0.75
#: Number of writes after which the size of the folder is checked again.
WRITES_PER_CHECK = 64
#: Smallest age in seconds of a cached file, because a second write within the resolution of the file system's clock
#: would leave the same version. FAT counts in steps of two seconds.
MIN_AGE_S = 2.0


def find_cache_folder() -> str:
    """Return the folder for caches of this user, existing or not."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or os.path.join(os.path.expanduser("~"), "AppData", "Local")
        return os.path.join(base, "statecli", "Cache")
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification requires an absolute path
        base = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return os.path.join(os.path.expanduser(base), "statecli")


class _Entry(msgspec.Struct, frozen=True):
    """Content of a cache file. `items` are decoded later, with the type that the reader expects."""

    key: str
    items: msgspec.Raw


class Cache:
    """Cache of measurements. If `enabled` is False, nothing is read or written."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._folder = os.path.join(find_cache_folder(), "log")
        self._enabled = enabled
        self._writes = 0

    def make_key(self, states: Sequence[ModelState], versions: Mapping[str, FileVersion | None]) -> str | None:
        """Return the cache key of the states, or None if a file is remote or was modified a moment ago."""
        if not self._enabled or not versions:
            return None
        paths = {
            byte_range.path
            for state in states
            for tensor in state.tensors
            for byte_range in tensor.ranges
            if byte_range.path
        }
        if not paths.issubset(versions) or None in versions.values():
            return None
        real_paths = {os.path.realpath(path): version for path, version in versions.items() if version is not None}
        if any(_get_age(path) < MIN_AGE_S for path in real_paths):
            return None
        tensors = [tensor for state in states for tensor in state.tensors]
        layout = [[tensor.section, tensor.fqn, tensor.kind, tensor.data, tensor.parts] for tensor in tensors]
        digest = hashlib.blake2b(digest_size=32)
        for part in (CACHE_FORMAT, sorted(real_paths.items()), [len(state.tensors) for state in states], layout):
            try:
                digest.update(msgspec.msgpack.encode(part))
            except (OverflowError, UnicodeEncodeError):  # a 65-bit integer, a surrogate
                return None
        return digest.hexdigest()

    def load(self, key: str | None, item_type: type[_Item], count: int) -> list[_Item] | None:
        """Return the cached items of the key, or None if there are not exactly `count` valid items."""
        if key is None:
            return None
        try:
            raw = _read_own_file(self._get_path(key))
            entry = msgspec.json.decode(raw, type=_Entry)
            items: list[Any] = msgspec.json.decode(entry.items, type=list[item_type])  # type: ignore[valid-type]
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return None
        return items if entry.key == key and len(items) == count else None

    def store(self, key: str | None, items: Sequence[object]) -> None:
        """Write an entry, or do nothing if the folder cannot be written."""
        if key is None:
            return
        with suppress(OSError, ValueError):
            data = msgspec.json.encode({"key": key, "items": items})
            if len(data) > MAX_ENTRY_BYTES:
                return
            if self._writes % WRITES_PER_CHECK == 0:
                _remove_oldest(self._folder)
            self._writes += 1
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            if _is_own(os.stat(self._folder)):
                _replace_file(self._get_path(key), data)

    def _get_path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}.json")


def _get_age(path: str) -> float:
    """Return the seconds since the last change of the file, or 0 if the file cannot be found."""
    try:
        status = os.stat(path)
    except OSError:
        return 0.0
    return time.time() - max(status.st_mtime, status.st_ctime if os.name != "nt" else 0.0)


def _is_own(status: os.stat_result) -> bool:
    """Return True if only this user can write the file, because other users could store false figures."""
    if os.name == "nt":
        return True
    return posix.is_own_file(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read_own_file(path: str) -> bytes:
    """Read a regular file that only this user can write. Raises OSError, and ValueError for other files."""
    if not _is_own(os.stat(os.path.dirname(path))):
        raise ValueError(path)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not _is_own(status) or status.st_size > MAX_ENTRY_BYTES:
            raise ValueError(path)
        return file.read(MAX_ENTRY_BYTES + 1)


def _replace_file(path: str, data: bytes) -> None:
    number, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=".tmp")  # mode 0600
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_oldest(folder: str) -> None:
    """Remove the oldest entries if the cache is too large."""
    with suppress(OSError), os.scandir(folder) as entries:
        sizes = []
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                sizes.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in sizes)
        if total <= MAX_CACHE_BYTES:
            return
        for _, size, path in sorted(sizes):
            if total <= MAX_CACHE_BYTES * KEPT_FRACTION:
                break
            with suppress(OSError):
                os.unlink(path)
                total -= size
