"""Storages of a pickle: their persistent ids, checked against the bytes of the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES
from statecli.core.errors import MalformedError
from statecli.core.model_state import ByteRange
from statecli.formats.torch.arguments import MAX_DEVICE, check_device, truncate_value
from statecli.pickles.graph import get_name
from statecli.pickles.nodes import Global, Persistent


class StorageId(msgspec.Struct, gc=False):
    """Persistent id of a storage. Torch writes the word "storage" first. The values are not checked."""

    word: Any
    cls: Any
    key: Any
    location: Any
    elements: Any
    view: Any = None

    @classmethod
    def read(cls, pid: object) -> StorageId | None:
        """Return the items of a persistent id as a StorageId, or None for an id with too few items."""
        return cls(*pid[:6]) if type(pid) is tuple and len(pid) >= 5 else None


class ResolvedStorage(NamedTuple):
    """Storage whose id agrees with the file. `place` is None for a meta storage. `length` is in bytes."""

    key: str
    dtype: str
    device: str
    place: ByteRange | None
    length: int


class StorageResolver:
    """Storages of one file: the byte range of each key (`places`), and the dtype of each storage class (`dtypes`).

    `persistent` are all storages that the pickle names, for a loader that uses the first description of each. All
    errors are `MalformedError`, and name the FQN and both numbers.
    """

    def __init__(
        self, places: Mapping[str, ByteRange], dtypes: Mapping[str, str], persistent: Iterable[Persistent]
    ) -> None:
        self.places, self.dtypes = places, dtypes
        #: Keys of storages with two descriptions -> both descriptions.
        self.disputed = _find_disputed(persistent)
        #: Storages by the `id()` of their persistent id, which stays unique because the pickle's graph keeps it alive.
        self._resolved: dict[int, ResolvedStorage] = {}

    def resolve(self, node: object, fqn: str) -> ResolvedStorage:
        """Return the storage of a persistent id. Each id is checked only once."""
        pid = node.pid if type(node) is Persistent else None
        resolved = self._resolved.get(id(pid))
        if resolved is None:
            resolved = self._resolved[id(pid)] = self._resolve_id(StorageId.read(pid), fqn)
        return resolved

    def _resolve_id(self, storage_id: StorageId | None, fqn: str) -> ResolvedStorage:
        if storage_id is None or storage_id.word != "storage":
            raise MalformedError(
                f"{fqn}: its storage is not recorded in the form that torch writes; save the checkpoint again"
            )
        cls, key, location, elements = storage_id.cls, storage_id.key, storage_id.location, storage_id.elements
        dtype = self.dtypes.get(cls.name) if type(cls) is Global else None
        if dtype is None or type(key) is not str or type(location) is not str:
            raise MalformedError(
                f"{fqn}: its storage is not recorded in the form that torch writes "
                f"({truncate_value(get_name(cls) or cls)}); save the checkpoint again"
            )
        check_device(location, fqn)
        if type(elements) is not int or elements < 0:
            raise MalformedError(
                f"{fqn}: storage {truncate_value(key)} claims {truncate_value(elements)} elements; "
                "expected an integer of 0 or more"
            )
        length = elements * ELEMENT_BITS[dtype] // 8
        if storage_id.view is not None:
            raise MalformedError(
                f"{fqn}: its storage is a view of a storage, which statecli does not read; torch before 0.4 wrote such "
                "views: load the file with torch and save it again"
            )
        if key in self.disputed:
            raise MalformedError(
                f"{fqn}: the pickle describes storage {truncate_value(key)} in two ways: {self.disputed[key]}; torch "
                "uses the first for all tensors"
            )
        place = self.places.get(key)
        if place is None and location != "meta":
            raise MalformedError(
                f"{fqn}: storage {truncate_value(key)} is not in the file; "
                "copy the file again, or save the checkpoint again"
            )
        if place is not None and place.length != length:
            raise MalformedError(
                f"{fqn}: storage {quoting.name(key)} has {place.length} bytes in the file, but the pickle claims "
                f"{truncate_value(length)}; copy or download the file again"
            )
        # Keep the bytes of a "meta" storage, because torch.load reads them if map_location names another device.
        return ResolvedStorage(key, dtype, location, place, length)


def _find_disputed(persistent: Iterable[Persistent]) -> dict[str, str]:
    """Return, by key, both descriptions of each storage that the pickle describes in two ways.

    torch uses the first description for all mentions, and saves only one. A storage of 0 elements in both descriptions
    is not disputed, because torch creates it again for each description.
    """
    first_ids: dict[str, tuple[Any, ...]] = {}
    view_keys: set[str] = set()
    disputed: dict[str, str] = {}
    for storage in persistent:
        pid = storage.pid
        if type(pid) is not tuple or len(pid) < 5 or type(pid[2]) is not str:
            continue
        first_pid = first_ids.setdefault(pid[2], pid)
        if first_pid is pid and len(pid) == 5:  # nearly all storages of a large file
            continue
        storage_id, first = StorageId(*pid[:6]), StorageId(*first_pid[:6])
        first_description, second_description = _describe_storage(first), _describe_storage(storage_id)
        if first_description != second_description and not first.elements == storage_id.elements == 0:
            disputed.setdefault(storage_id.key, f"{first_description} and {second_description}")
        if type(storage_id.view) is tuple and storage_id.view and type(storage_id.view[0]) is str:
            view_keys.add(storage_id.view[0])
    disputed.update((key, "a storage and a view of a storage") for key in view_keys & first_ids.keys())
    return disputed


def _describe_storage(storage_id: StorageId) -> str:
    cls, location = storage_id.cls, storage_id.location
    dtype = STORAGE_DTYPES.get(cls.name, "unknown") if type(cls) is Global else "unknown"
    location = str(location, "latin-1") if type(location) is bytes else location
    device = location[:MAX_DEVICE] if type(location) is str else "unknown"
    return f"{truncate_value(storage_id.elements)} {dtype} elements on {device}"
