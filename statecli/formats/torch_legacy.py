"""The format of `torch.save` before torch 1.6: five pickles, then the bytes of each storage.

The pickles: a magic number, the version 1001, a dict about the machine, the object, the sorted storage keys. Then, for
each key in order, the number of elements as a little-endian int64 and the elements, unaligned. The elements are
little-endian as well: torch swaps them on a big-endian machine, and ignores the dict. There is neither an index nor a
checksum, so a storage is found by walking over all storages before. Source: torch/serialization.py (`_legacy_save`,
`_legacy_load`) of torch 2.13, still used by `_use_new_zipfile_serialization=False`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ByteRange, ModelState, Oddity, Place
from statecli.core.oddity_kind import OddityKind
from statecli.formats.torch import checkpoint_pickle
from statecli.formats.torch.objects import build_state
from statecli.formats.torch.reading import Contents
from statecli.formats.torch.storages import StorageId
from statecli.pickles.errors import TruncatedPickle
from statecli.pickles.nodes import Global, Pickle
from statecli.storage.byte_source import ByteSource, Window
from statecli.storage.checkpoint_names import LEGACY_MAGIC_NUMBER
from statecli.storage.files import Guard
from statecli.storage.store import Extent

NAME = "torch-legacy"
TRAITS = FormatTraits(is_legacy=True, may_hold_settings_alone=True)

VERSION = 1001
#: Maximum size of one pickle in bytes, the same as for data.pkl in a zip archive.
MAX_PICKLE_BYTES = 256 * 2**20
#: Bytes that are read first, and the factor by which the window grows until the pickle fits, because its length is not
#: recorded.
_FIRST_WINDOW_BYTES = 64 * 1024
_WINDOW_GROWTH = 8

_PICKLES = ("the magic number", "the version", "the machine's description", "the object", "the list of storages")
#: Pickle of the magic number in each protocol: LONG in 0 and 1, LONG1 in 2 and 3, framed from 4 on.
_MAGIC = compile_on_use(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.|L119547037146038801333356L\n\.", re.DOTALL
)


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the file starts with the pickle of the magic number."""
    return _MAGIC.match(head) is not None


def read(path: str, section: str | None = None) -> ModelState:
    """Read the state of one stream. Raises UnreadableError for a damaged or truncated stream."""
    pickle, storages, oddities = read_contents(path)
    return build_state(
        pickle, storages, target=path, format=NAME, traits=TRAITS, oddities=oddities, requested_section=section
    )


def read_contents(path: str) -> Contents:
    """Return the object's pickle, each storage's byte range, and oddities of the stream. Raises as `read` does."""
    oddities: list[Oddity] = []
    with ByteSource(path) as source:
        magic, version, _, pickle, keys = _read_pickles(source)
        _check_version(magic.root, version.root)
        storages = dict(_locate_storages(source, keys, _collect_declared(pickle)))
        end = max((storage.offset + storage.length for storage in storages.values()), default=keys.end)
        if end < source.size:
            surplus = source.size - end
            message = f"{surplus} bytes are appended after the last storage"
            oddities.append(Oddity(OddityKind.SUFFIXED.value, message, place=Place(path, end, surplus)))
    return Contents(pickle, storages, oddities)


def _read_pickles(source: ByteSource) -> list[Pickle]:
    """Read the five pickles. Change `end` of each pickle to count from the start of the file."""
    pickles: list[Pickle] = []
    at = 0
    for label in _PICKLES:
        pickle = _read_pickle_at(source, at, label)
        at += pickle.end
        pickle.end = at
        pickles.append(pickle)
    return pickles


def _read_pickle_at(source: ByteSource, at: int, label: str) -> Pickle:
    """Read the pickle at byte `at`. Its length is not recorded, so try windows of growing size."""
    remaining_bytes, window = source.size - at, _FIRST_WINDOW_BYTES
    while True:
        data = source.read(at, min(window, remaining_bytes, MAX_PICKLE_BYTES))
        try:
            return checkpoint_pickle.load(data, f"{label} (a pickle at byte {at})", module_ids=True)
        except TruncatedPickle:
            if len(data) == remaining_bytes:
                raise
            if len(data) == MAX_PICKLE_BYTES:
                raise MalformedError(
                    f"{label} is a pickle of more than {MAX_PICKLE_BYTES:,} bytes, the limit of statecli"
                ) from None
        window *= _WINDOW_GROWTH


def _check_version(magic: object, version: object) -> None:
    if type(magic) is not int or magic != LEGACY_MAGIC_NUMBER:
        raise UnreadableError("is a pickle, but torch.save did not write it: its magic number is missing")
    if type(version) is not int or version != VERSION:
        version_text = version if type(version) is int and abs(version) < 2**63 else "not a 64-bit integer"
        raise MalformedError(f"its format version is {version_text}, but torch.save always writes {VERSION}")


def _collect_declared(pickle: Pickle) -> dict[str, tuple[str, int]]:
    """Return the dtype and number of elements of each storage by key, as its first persistent id declares them."""
    declared_by_key: dict[str, tuple[str, int]] = {}
    for persistent in pickle.persistent:
        storage = StorageId.read(persistent.pid)
        if storage is None or len(persistent.pid) > 6:  # torch refuses an id of more items
            continue
        key, numel = storage.key, storage.elements
        dtype = STORAGE_DTYPES.get(storage.cls.name) if type(storage.cls) is Global else None
        if dtype is not None and type(key) is str and type(numel) is int and numel >= 0:
            declared_by_key.setdefault(key, (dtype, numel))
    return declared_by_key


def _locate_storages(
    source: ByteSource, keys: Pickle, declared_by_key: dict[str, tuple[str, int]]
) -> Iterator[tuple[str, ByteRange]]:
    """Yield the byte range of each storage after the pickles, in the order of the key list."""
    if type(keys.root) is not list:
        raise MalformedError("the file is damaged: its last pickle is not the list of storages")
    is_trusted = source.is_trusted
    if source.reads_are_requests:
        places = list(_walk_storages(source, keys, declared_by_key))
        if is_trusted:
            source.guard(
                Guard(at, at + 8, at + 8 + size, partial(_check_count, key, numel)) for key, at, numel, size in places
            )
        else:
            source.prefetch(Extent(at, 8) for _, at, _, _ in places)
    is_dense = len(keys.root) * _FIRST_WINDOW_BYTES > source.size and not source.reads_are_requests
    window = Window(source, _FIRST_WINDOW_BYTES if is_dense else 0)
    for key, at, numel, length in _walk_storages(source, keys, declared_by_key):
        if not is_trusted:
            _check_count(key, numel, window.read(at, 8))
        yield key, ByteRange(source.path, at + 8, length)


def _walk_storages(
    source: ByteSource, keys: Pickle, declared_by_key: dict[str, tuple[str, int]]
) -> Iterator[tuple[str, int, int, int]]:
    """Yield key, offset of the element count, element count and size in bytes of each storage."""
    seen: set[str] = set()
    at = keys.end
    for key in keys.root:
        if type(key) is not str or key not in declared_by_key:
            raise MalformedError(
                "the list of storages contains a storage that no tensor uses, so the size of this storage is unknown"
            )
        if key in seen:
            raise MalformedError(f"the list of storages contains {key!r} twice")
        seen.add(key)
        dtype, numel = declared_by_key[key]
        # A storage of packed quantized values counts its bytes.
        length = numel * ELEMENT_BITS[dtype] // 8
        yield key, at, numel, length
        at += 8 + length
        if at > source.size:
            raise MalformedError(
                f"file is truncated: storage {key!r} needs bytes {at - length} to {at}, but the file has "
                f"{source.size}; copy or download the file again"
            )


def _check_count(key: str, numel: int, recorded: bytes) -> None:
    """Raise MalformedError for a wrong element count."""
    count = int.from_bytes(recorded, "little", signed=True)
    if count != numel:
        raise MalformedError(f"storage {key!r} has {count} elements, but the pickle claims {numel}")
