"""The `.metadata` file of torch.distributed.checkpoint: tensors, their chunks, and the byte range of each chunk.

It is a pickle of one `Metadata` object, which torch reads with `pickle.load`. Sources: metadata.py, filesystem.py and
default_planner.py in torch/distributed/checkpoint of torch 2.13. Before torch 2.0, its classes were in other modules;
newer fields may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import MalformedError, UnreadableError
from statecli.formats.shared.tiling import Chunk, Sizes
from statecli.formats.torch.arguments import MAX_DIMENSIONS, MAX_ELEMENTS
from statecli.pickles.errors import TruncatedPickle
from statecli.pickles.graph import as_mapping, as_sequence, get_attributes, get_name
from statecli.pickles.machine import METADATA_BUDGET_FACTOR, Machine, read_pickle
from statecli.pickles.nodes import Global, Key, Obj
from statecli.storage import lifetime

#: Maximum size of one `.metadata` file in bytes; each chunk takes 250 bytes.
MAX_METADATA_BYTES = 256 * 2**20
#: Maximum number of keys and indexes in a path in the nested state_dict.
MAX_PATH_STEPS = 200
#: Maximum number of list items in the nested state_dict that no name refers to (empty containers).
MAX_EMPTY_ITEMS = 1_000_000
_DCP_PREFIX = "torch.distributed."
_TRUNCATION_ADVICE = (
    "the save did not finish, or the copy is incomplete; copy the folder again, or save the checkpoint again"
)
#: Names that a `.metadata` may import. Torch before 2.0 had these classes in other modules, and torch before 2.3 the
#: classes of a tensor's properties.
NEEDED_NAMES = frozenset(
    (
        *(f"torch.{dtype}" for dtype in ELEMENT_BITS),
        *("torch.Size", "torch.serialization._get_layout"),
        *(
            f"torch.distributed.{package}.{name}"
            for package in ("checkpoint", "_shard.checkpoint")
            for name in (
                *("metadata.BytesStorageMetadata", "metadata.ChunkStorageMetadata", "metadata.Metadata"),
                *("metadata.MetadataIndex", "metadata.StorageMeta", "metadata.TensorProperties"),
                *("metadata.TensorStorageMetadata", "metadata._MEM_FORMAT_ENCODING", "filesystem._StorageInfo"),
            )
        ),
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        # Class of the folder's path: depends on the operating system and the Python version of the saving process.
        *(
            f"{module}.{pure}{system}Path"
            for module in ("pathlib", "pathlib._local")
            for pure in ("", "Pure")
            for system in ("Posix", "Windows")
        ),
    )
)
#: Names of the class of a key and of the class of a value of `storage_data`.
_INDEX_CLASSES = frozenset(name for name in NEEDED_NAMES if name.endswith(".MetadataIndex"))
_PLACE_CLASSES = frozenset(name for name in NEEDED_NAMES if name.endswith("._StorageInfo"))


class Stored(msgspec.Struct, frozen=True):
    """Location of an item: `length` bytes in a file of the folder. These bytes are one archive of torch.save.

    `start` is the start of the chunk; None for a value other than a tensor. `transforms` names the stream transforms
    that were applied to the bytes during writing.
    """

    start: Sizes | None
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class SavedTensor(msgspec.Struct, gc=False):
    """A saved tensor: its global `shape` and its chunks. If the chunks are unreadable, `fault` has the reason."""

    dtype: str
    shape: Sizes
    requires_grad: bool
    chunks: list[Chunk]
    fault: str | None = None


class Metadata(msgspec.Struct, gc=False):
    """Contents of one `.metadata`. `order` lists the names of all items in the order of the state_dict.

    `tensors` maps a name to a saved tensor or to the reason for an unreadable tensor. `paths` maps a name to its path
    in the nested state_dict, if the planner wrote the paths; `places` maps a name to its pieces. `foreign` are imports
    of the pickle that no DCP metadata needs.
    """

    order: list[str]
    tensors: dict[str, SavedTensor | str]
    paths: dict[str, tuple[str | int, ...]]
    places: dict[str, list[Stored]]
    foreign: list[Global]


class _Scanned(dict[str, tuple[bytes, Metadata]]):
    """Cache of `parse_for_scan`: bytes and metadata of the last pickle. The key is the pickle's label."""


def parse_for_scan(data: bytes, label: str) -> Metadata:
    """Parse a pickle as `parse_metadata` does, and cache the result, because an audit parses each pickle twice."""
    scanned = lifetime.for_command(_Scanned)
    scanned.clear()
    scanned[label] = data, parse_metadata(data, label)
    return scanned[label][1]


def parse_metadata(data: bytes, label: str) -> Metadata:
    """Parse the metadata in a pickle. `label` names the pickle in messages.

    Raises MalformedError for a pickle of anything else, UnreadableError for an unknown version.
    """
    scanned = lifetime.for_command(_Scanned).pop(label, None)
    if scanned is not None and scanned[0] == data:
        return scanned[1]
    if not data:
        raise MalformedError(f"{label} is empty: {_TRUNCATION_ADVICE}")
    try:
        pickle = read_pickle(data, label, budget=METADATA_BUDGET_FACTOR, machine_class=_Machine)
    except TruncatedPickle as error:
        raise type(error)(f"{error}: {_TRUNCATION_ADVICE}") from None
    root = pickle.root
    name = get_name(root.cls) if type(root) is Obj else ""
    if not (name.startswith(_DCP_PREFIX) and name.endswith(".Metadata")):
        raise MalformedError(
            f"{label} does not contain metadata of torch.distributed.checkpoint; copy the folder "
            "again, or save the checkpoint again"
        )
    fields = root.state if type(root.state) is dict else {}
    _check_version(fields.get("version"), label)
    entries = _get_named_items(
        fields.get("state_dict_metadata"),
        f"{label} has no state_dict_metadata with a name for each tensor; save the checkpoint again",
    )
    tensors = {fqn: _read_tensor(node) for fqn, node in entries.items() if not _is_bytes(node)}
    paths = dict(_read_paths(fields.get("planner_data")))
    # Order by the planner's paths, because they have the order of the state_dict; a rank's plan begins with sharded
    # tensors.
    order = list(dict.fromkeys([*(fqn for fqn in paths if fqn in entries), *entries]))
    foreign = [mention for mention in pickle.globals if mention.qualified not in NEEDED_NAMES]
    return Metadata(order, tensors, paths, _read_places(fields.get("storage_data"), label), foreign)


class _Machine(Machine):
    """Pickle machine that resolves `getattr(Enum, "MEMBER")`, which Python 3.11.0 to 3.11.2 write for enum members.

    Refuses a dict that changes after becoming the state of an object, because BUILD copies the dict.
    """

    def __init__(self, data: bytes, label: str, *, fast: bool, module_ids: bool) -> None:
        super().__init__(data, label, fast=fast, module_ids=module_ids)
        self.reaches = False
        self.states: set[int] = set()

    def set_state(self, target: Obj, state: object) -> None:
        """Set the state of an object. Raises MalformedError for a second state."""
        if target.state is not None:
            raise MalformedError(
                f"{self.label} sets the contents of an object twice; torch never writes this, so a load may give other "
                "values than statecli shows: save the checkpoint again"
            )
        super().set_state(target, state)
        self.states.add(id(state))

    def set_items(self, target: object, flat: list[Any], pos: int) -> None:
        if id(target) in self.states:
            raise MalformedError(
                f"{self.label} sets the contents of an object and later changes them; torch never writes this, so a "
                "load may give other values than statecli shows: save the checkpoint again"
            )
        super().set_items(target, flat, pos)

    def build_call(self, function: object, args: object, pos: int, how: str = "reduce") -> Obj:
        """Build a call as `Machine` does. Report `getattr` as an import unless it only gets enum members."""
        if get_name(function) == _GETATTR:
            first, second = args if type(args) is tuple and len(args) == 2 else (None, None)
            if get_name(first).endswith("MEM_FORMAT_ENCODING") and type(second) is str and second.isupper():
                return super().build_call(first, (second,), pos, how)
            self.reaches = True
        return super().build_call(function, args, pos, how)

    def run(self, start: int = 0) -> None:
        super().run(start)
        if not self.reaches:
            self.globals = {key: mention for key, mention in self.globals.items() if mention.qualified != _GETATTR}


_GETATTR = "builtins.getattr"


def _check_version(version: object, label: str) -> None:
    if type(version) is str and not version.startswith("1."):
        message = f"{label} has version {quoting.value(version)}, which a newer torch wrote; statecli knows only 1.0.0"
        raise UnreadableError(f"{message}; update statecli, or save the checkpoint again with an older torch")
    if version is not None and type(version) is not str:
        number = type(version) in (int, float, bool)
        description = f"version {quoting.value(version)}" if number else "a version of an unknown type"
        raise UnreadableError(f"{label} has {description}, but torch writes version 1.0.0; save the checkpoint again")


def _get_named_items(node: object, otherwise: str) -> Mapping[str, Any]:
    items = as_mapping(node)
    if items is None or not all(type(key) is str for key in items):
        raise MalformedError(otherwise)
    return items


def _is_bytes(node: object) -> bool:
    return type(node) is Obj and get_name(node.cls).endswith(".BytesStorageMetadata")


def _read_paths(node: object) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield each name with its path (keys and indexes) in the nested state_dict. Only some planners write paths.

    Raises MalformedError if the indexes ask for longer lists than the names can fill: torch would make these lists.
    """
    lengths: dict[tuple[Any, ...], int] = {}
    names = as_mapping(node) or {}
    for fqn, path in names.items():
        steps = as_sequence(path) or ()
        is_short = 0 < len(steps) <= MAX_PATH_STEPS
        for at, step in enumerate(steps):
            if type(step) is int and step >= 0:
                parent_path = tuple(steps[:at]) if is_short else (fqn, at)
                lengths[parent_path] = max(lengths.get(parent_path, 0), step + 1)
        is_plain = type(fqn) is str and type(path) in (tuple, list) and is_short
        if is_plain and all(type(step) is str or (type(step) is int and step >= 0) for step in steps):
            yield fqn, tuple(steps)
    total = sum(lengths.values())
    if total > len(names) + MAX_EMPTY_ITEMS:
        raise MalformedError(
            f".metadata describes lists of {total:,} items in total, but has only {len(names):,} names; torch would "
            "fill the rest with None, which may exhaust the memory"
        )


def _read_tensor(node: object) -> SavedTensor | str:
    """Return a saved tensor. For a malformed tensor, return the reason as text."""
    fields = _get_state(node)
    try:
        dtype, grad = _read_properties(fields.get("properties"))
        shape = _read_sizes(fields.get("size"), "shape")
    except MalformedError as error:
        return str(error)
    if prod(shape) > MAX_ELEMENTS:
        return f"shape {quoting.shape(shape)} is impossible: 2^63 elements or more"
    try:
        return SavedTensor(dtype, shape, grad, _read_chunks(fields.get("chunks"), shape))
    except MalformedError as error:
        return SavedTensor(dtype, shape, grad, [], f"{error}; save the checkpoint again")


def _read_chunks(node: object, shape: Sizes) -> list[Chunk]:
    if type(node) is not list:
        raise MalformedError(".metadata lists no chunks of this tensor")
    return [_read_chunk(chunk, shape) for chunk in node]


def _read_chunk(node: object, shape: Sizes) -> Chunk:
    fields = _get_state(node)
    start, size = _read_sizes(fields.get("offsets"), "chunk"), _read_sizes(fields.get("sizes"), "chunk")
    if not len(start) == len(size) == len(shape):
        raise MalformedError(
            f"a chunk has {len(size)} sizes and {len(start)} offsets, but the tensor has {len(shape)} "
            f"dimensions: {list(shape)[:8]}"
        )
    return Chunk(start, size)


def _read_sizes(node: object, label: str) -> Sizes:
    """Return the sizes in a torch.Size or a tuple."""
    # Same as `get_name(node.cls) == "torch.Size"` in half the time, because each chunk has two sizes.
    if type(node) is Obj and type(node.cls) is Global and (node.cls.module, node.cls.name) == ("torch", "Size"):
        node = node.args[0] if node.args else ()
    numbers = tuple(node) if type(node) is list else node
    if type(numbers) is not tuple or len(numbers) > MAX_DIMENSIONS:
        raise MalformedError(f"its {label} is not a tuple of sizes")
    for n in numbers:
        if type(n) is not int or not 0 <= n <= MAX_ELEMENTS:
            number = quoting.value(n) if type(n) is int else "a value that is not an integer"
            raise MalformedError(f"its {label} contains {number}; expected integers from 0 to 2^63 - 1")
    return numbers


def _read_places(node: object, label: str) -> dict[str, list[Stored]]:
    """Return the byte ranges of each item, by the item's name. Raises MalformedError for an incomplete record.

    Refuses dicts that may have further entries, because the scanner finds the archives by these byte ranges.
    """
    items = _list_items(node)
    if items is None and type(node) is Obj:
        raise MalformedError(
            f"{label} creates storage_data with a function call; torch never writes this, so the positions of the "
            "tensors are unknown; save the checkpoint again"
        )
    if items is None:
        raise MalformedError(
            f"{label} has no storage_data, so the positions of the tensors are unknown; save the checkpoint again"
        )
    stored_by_name: dict[str, list[Stored]] = {}
    for key, value in items.items():
        index = _read_attributes(key.value if type(key) is Key else key, _INDEX_CLASSES)
        fqn = index.get("fqn") if index else None
        if index is None or type(fqn) is not str:
            raise MalformedError(f"{label} has a storage record without a tensor name; save the checkpoint again")
        stored_by_name.setdefault(fqn, []).append(
            _read_stored(index.get("offset"), _read_attributes(value, _PLACE_CLASSES), fqn)
        )
    return stored_by_name


def _read_stored(start: object, fields: Mapping[str, Any] | None, fqn: str) -> Stored:
    fields = fields or {}
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    transforms = fields.get("transform_descriptors")
    if type(file) is not str or type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise MalformedError(
            f"{quoting.name(fqn)}: .metadata does not record the position of this tensor; save the checkpoint again"
        )
    streams: Any = transforms if type(transforms) in (list, tuple) else [transforms] if transforms else ()
    names = tuple(stream if type(stream) is str else "?" for stream in streams)
    return Stored(None if start is None else _read_sizes(start, "chunk"), file, offset, length, names)


def _list_items(node: object) -> Mapping[Any, Any] | None:
    """Return the items of a dict or a plain OrderedDict, or None for any other object."""
    if type(node) is Obj and get_name(node.cls) == "collections.OrderedDict" and _has_only(node, "items"):
        return node.items or {}
    return node if type(node) is dict else None


def _read_attributes(node: object, names: frozenset[str]) -> Mapping[str, Any] | None:
    """Return the attributes of an object of these classes, or None if it has content besides attributes."""
    if type(node) is Obj and type(node.state) is dict and get_name(node.cls) in names and _has_only(node, "state"):
        return node.state
    return None


def _has_only(node: Obj, part: str) -> bool:
    """Return whether a pickled object has no content outside the field `part`, such as `state` or `items`."""
    parts = {"args": node.args, "kwargs": node.kwargs, "state": node.state, "items": node.items, "elems": node.elems}
    return not any(value for name, value in parts.items() if name != part)


def _get_state(node: object) -> Mapping[str, Any]:
    """Return the attributes that a pickle's BUILD opcode gives to an object."""
    if type(node) is Obj and type(node.state) is dict:
        return node.state
    return get_attributes(node)


def _read_properties(node: object) -> tuple[str, bool]:
    """Return a tensor's dtype and requires_grad from its pickled properties: a tuple, or an object with attributes."""
    state = node.state if type(node) is Obj else None
    if type(state) is tuple and len(state) >= 3:
        dtype, _, grad = state[:3]
    else:
        fields = get_attributes(node)
        dtype, grad = fields.get("dtype"), fields.get("requires_grad")
    name = get_name(dtype).removeprefix("torch.")
    if name not in ELEMENT_BITS:
        raise MalformedError(f"unknown dtype {quoting.name(get_name(dtype) or 'without a name')}")
    return name, grad is True
