"""Storages of a pickle: names that contradict each other, and views of a storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from statecli.core.dtypes import STORAGE_DTYPES
from statecli.core.errors import MalformedError
from statecli.core.model_state import ByteRange
from statecli.formats.torch.arguments import MAX_DEVICE, truncate_value
from statecli.pickles.nodes import Global, Persistent


def select_view(root: ByteRange, view: Any, itemsize: int, fqn: str) -> ByteRange:
    """Return the part of a storage named by the sixth item of its persistent id: (view key, offset, size), in elements.

    Only torch before 0.4 wrote this item: a storage could be a view of another.
    """
    if type(view) is not tuple or len(view) != 3 or any(type(n) is not int or n < 0 for n in view[1:]):
        raise MalformedError(f"{fqn}: the view of its storage is not a tuple of key, offset and size")
    offset, length = view[1] * itemsize, view[2] * itemsize
    if offset + length > root.length:
        raise MalformedError(
            f"{fqn}: its view needs bytes {offset} to {offset + length}, but the storage has {root.length} bytes"
        )
    return ByteRange(root.path, root.offset + offset, length, None, root.big_endian)


def find_disputed(persistent: Iterable[Persistent]) -> dict[str, str]:
    """Return the keys of storages and views with two different descriptions, with both descriptions.

    torch uses the first description for all mentions, and saves only one. A storage without bytes (on meta, or empty)
    is not disputed, because torch creates it again for each description.
    """
    first: dict[str, tuple[Any, ...]] = {}
    views: dict[str, tuple[Any, ...]] = {}
    disputed: dict[str, str] = {}
    for storage in persistent:
        pid = storage.pid
        if type(pid) is not tuple or len(pid) < 5 or type(pid[2]) is not str:
            continue
        first_pid = first.setdefault(pid[2], pid)
        if first_pid is not pid:
            first_description, second_description = _describe_storage(first_pid), _describe_storage(pid)
            if first_description != second_description and not first_pid[4] == pid[4] == 0:
                disputed.setdefault(pid[2], f"{first_description} and {second_description}")
        view = pid[5] if len(pid) > 5 else None
        if type(view) is tuple and len(view) == 3 and type(view[0]) is str:
            first_pid = views.setdefault(view[0], pid)
            if first_pid is not pid and (first_pid[2], *first_pid[5][1:]) != (pid[2], *view[1:]):
                disputed.setdefault(view[0], "two views with different storages, offsets or sizes")
    disputed.update((key, "a storage and a view of a storage") for key in views.keys() & first.keys())
    return disputed


def _describe_storage(pid: tuple[Any, ...]) -> str:
    """Describe a storage by its elements, type and device, as in its persistent id."""
    kind, location, numel = pid[1], pid[3], pid[4]
    dtype = STORAGE_DTYPES.get(kind.name, "unknown") if type(kind) is Global else "unknown"
    location = str(location, "latin-1") if type(location) is bytes else location
    return (
        f"{truncate_value(numel)} {dtype} elements on {location[:MAX_DEVICE] if type(location) is str else 'unknown'}"
    )
