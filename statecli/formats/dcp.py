"""A folder written by `torch.distributed.checkpoint` (DCP): `.metadata` and the `.distcp` files of the ranks.

`.metadata` lists the chunks of each tensor and their places (`shared/dcp_metadata.py`); each item of a `.distcp` file
is a whole archive of torch.save, opened only when its values are read. Other values (an epoch, an lr, the names in
param_groups) are archives too, read up to `MAX_ITEMS`. The planner's paths rebuild the saved nested dict, which is then
treated as a pickle of torch.save. After a save without collectives, each rank has a `__0.metadata` of its own. Neither
devices nor tied weights are recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, nbytes
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ARCHIVE, Box, Boxes, ByteRange, ModelState, Oddity, Packing, ReadFile, TensorData
from statecli.core.oddity_kind import OddityKind
from statecli.formats import torch_zip
from statecli.formats.shared import dcp_ranks
from statecli.formats.shared.dcp_data_files import BadFile, DataFiles
from statecli.formats.shared.dcp_metadata import (
    MAX_METADATA_BYTES,
    Metadata,
    SavedTensor,
    Stored,
    parse_for_scan,
    parse_metadata,
)
from statecli.formats.shared.dcp_nested_dict import build_nested
from statecli.formats.shared.tiling import Chunk, Sizes, find_fault
from statecli.formats.torch.objects import build_state
from statecli.formats.torch.tensors import Tensor
from statecli.pickle_scan.one_pickle import begins_as_pickle
from statecli.pickles.nodes import Global, Pickle
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource, add_subject_to_errors, read_small_file
from statecli.storage.checkpoint_names import EXTRA_STATE, METADATA, METADATA_NAME
from statecli.storage.store import Extent

NAME = "dcp"
TRAITS = FormatTraits(
    never_mapped="torch.distributed.checkpoint never memory-maps its files, so alignment does not matter",
    is_in_pieces=True,
    is_loaded_by_dcp=True,
)

SUFFIX = ".distcp"
#: Text near the start of a metadata pickle, and the number of bytes in which it is searched.
_METADATA_MARK = b"torch.distributed."
MARK_SEARCH_BYTES = 64
#: Limits of the values read in addition to tensors (each is an archive): their number, and their bytes in total.
MAX_ITEMS = 2_000
MAX_ITEM_BYTES = 64 * 2**20
#: Maximum number of extra states of modules, counted in addition to `MAX_ITEMS`. Extra states beyond the limit become
#: unreadable rows, because modules unpickle them.
MAX_EXTRA_STATES = 10_000
_UNREAD_EXTRA_STATE = (
    "is an extra state that statecli did not read (too many, too large or compressed); its module may unpickle the "
    "state during loading"
)


def sniff(path: str, head: bytes) -> bool:
    """Return whether the path is a DCP folder, or a file of a DCP folder."""
    if files.is_folder(path):
        names = members(path)
        return any(name.endswith(SUFFIX) or _is_metadata(files.join(path, name)) for name in names)
    return files.get_name(path).endswith(SUFFIX) or _METADATA_MARK in head[:MARK_SEARCH_BYTES] or _is_metadata(path)


def _is_metadata(path: str) -> bool:
    """Return whether torch's reader would unpickle this file: a pickle with the name of a metadata file."""
    if not METADATA_NAME.fullmatch(files.get_name(path)):
        return False
    try:
        with ByteSource(path) as source:
            return _METADATA_MARK in source.head[:MARK_SEARCH_BYTES] or begins_as_pickle(source)
    except UnreadableError:  # not a file of this format: other programs also write a `.metadata`
        return False


def members(path: str) -> tuple[str, ...]:
    """List the folder's metadata and its `.distcp` files, including files that the metadata does not name.

    Raises UnreadableError for a folder that cannot be listed.
    """
    return tuple(
        name for name in checkpoint_folder.list_files(path) if name.endswith(SUFFIX) or METADATA_NAME.fullmatch(name)
    )


class UnreadableFile(NamedTuple):
    """Metadata file that cannot be read, with the reason."""

    name: str
    reason: str


class StoredPlaces(NamedTuple):
    """Byte ranges that the metadata of a folder assigns to each file, and the metadata files that cannot be read."""

    by_file: dict[str, list[Stored]]
    unreadable: list[UnreadableFile]


def collect_places(path: str) -> StoredPlaces:
    """Collect all byte ranges that the folder's metadata assigns to each file."""
    stored_by_file: dict[str, list[Stored]] = {}
    unreadable_files = []
    for name in members(path):
        if METADATA_NAME.fullmatch(name):
            try:
                metadata = parse_for_scan(read_small_file(files.join(path, name), MAX_METADATA_BYTES), name)
            except UnreadableError as error:
                unreadable_files.append(UnreadableFile(name, str(error)))
                continue
            for stored in (stored for places in metadata.places.values() for stored in places):
                stored_by_file.setdefault(stored.file, []).append(stored)
    return StoredPlaces(stored_by_file, unreadable_files)


def read(path: str, read_file: ReadFile) -> ModelState:  # noqa: ARG001 - the archives inside are not read as files
    """Read every tensor and value named in the metadata.

    A tensor whose chunks contradict each other, or are in a missing or bad file, is a row with `damage`. Raises
    UnreadableError for a single file of such a folder, and for unreadable metadata.
    """
    if not files.is_folder(path):
        folder = files.get_folder(path) or "."
        raise UnreadableError(
            f"is one file of a torch.distributed.checkpoint folder; give the folder instead: {folder}"
        )
    return _Folder(path).build_state()


class _Folder:
    def __init__(self, path: str) -> None:
        self.path = path
        self.oddities: list[Oddity] = []
        self.storages: dict[str, ByteRange] = {}
        metadatas, unreadable = _read_metadata(path)
        self.metadata, rivals = dcp_ranks.merge_metadata(list(metadatas.values()))
        self.files = DataFiles(path, self.metadata, [rival.other for rival in rivals], self.oddities)
        _check_apart(self.metadata)
        self.globals: list[Global] = []
        self.hole_reason = self._note_adjacent_files(metadatas, unreadable)
        if len(metadatas) > 1:
            readable_rivals = [rival for rival in rivals if self.files.can_read(rival.first, rival.other)]
            self.oddities.append(dcp_ranks.describe_merge(path, len(metadatas), readable_rivals))

    def _note_adjacent_files(self, metadatas: Mapping[str, Metadata], unreadable: Mapping[str, UnreadableError]) -> str:
        """Add oddities for unread and missing files. Return the reason to report for tensors that lack chunks."""
        names = members(self.path)
        other_metadata = [
            name for name in names if METADATA_NAME.fullmatch(name) and name not in metadatas and name not in unreadable
        ]
        unused_files = [name for name in names if name.endswith(SUFFIX) and name not in self.files.ends]
        unused_files = [name for name in unused_files if _holds_bytes(files.join(self.path, name))]
        missing_names = (
            []
            if METADATA in metadatas
            else [name for name in dcp_ranks.find_missing_names(metadatas, unused_files) if name not in unreadable]
        )
        reasons = [str(error) for error in unreadable.values()]
        if missing_names:
            reasons.append(
                f"{quoting.names(missing_names)} {'are' if missing_names[1:] else 'is'} missing; copy the folder again"
            )
        self.oddities.extend(
            Oddity(OddityKind.MISSING_RANK.value, f"statecli did not read the data of a rank: {reason}")
            for reason in reasons
        )
        if other_metadata:
            message = f"statecli did not read other metadata files next to .metadata: {quoting.names(other_metadata)}"
            self.oddities.append(Oddity("other-metadata", message))
        ranks_without_metadata = dcp_ranks.parse_ranks([*unreadable, *missing_names])
        unlisted_files = [name for name in unused_files if not dcp_ranks.parse_ranks([name]) & ranks_without_metadata]
        if unlisted_files:
            message = (
                f"no metadata file lists these files, so statecli did not read them: {quoting.names(unlisted_files)}; "
                "the files may be from another save"
            )
            self.oddities.append(Oddity("unused-file", message))
        if checkpoint_folder.LIGHTNING_META in checkpoint_folder.list_files(self.path):
            name = checkpoint_folder.LIGHTNING_META
            message = f"Lightning saved epoch and hyper_parameters in {name}; to read these values, give this file"
            self.oddities.append(Oddity("unread-settings", message))
        return "; ".join(reasons[:2]) or "save the checkpoint again"

    def build_state(self) -> ModelState:
        """Return the contents of the folder as the saved nested dict."""
        items = _Items(self)
        nodes = {
            fqn: self._build_tensor(fqn) if fqn in self.metadata.tensors else items.read_object(fqn)
            for fqn in self.metadata.order
        }
        root = build_nested(nodes, self.metadata.paths)
        pickle = Pickle(root, self.globals, 0, [], [])
        state = build_state(pickle, self.storages, target=self.path, format=NAME, traits=TRAITS, oddities=self.oddities)
        return _note_foreign_names(state, self.metadata.foreign)

    def locate_item(self, stored: Stored, length: int) -> ByteRange:
        """Return the byte range of an item in its archive. `length` is the item's unpacked size in bytes."""
        return ByteRange(
            files.join(self.path, stored.file), stored.offset, length, packing=Packing(ARCHIVE, stored.length)
        )

    def _build_tensor(self, fqn: str) -> Tensor:
        """Build a tensor from its chunks. If this is not possible, the tensor's `damage` has the reason."""
        saved = self.metadata.tensors[fqn]
        if isinstance(saved, str):
            return _build_damaged_tensor(saved)
        try:
            return self._check_tensor(fqn, saved)
        except UnreadableError as error:
            elements = prod(saved.shape)
            size = nbytes(saved.dtype, elements)
            return Tensor(saved.dtype, saved.shape, elements, size, None, saved.requires_grad, damage=str(error))

    def _check_tensor(self, fqn: str, saved: SavedTensor) -> Tensor:
        if saved.fault:
            raise MalformedError(saved.fault)
        chunks = [chunk for chunk in saved.chunks if 0 not in chunk.shape]
        places = _match_chunks(chunks, self.metadata.places.get(fqn, ()))
        fault = find_fault(saved.shape, chunks) if 0 not in saved.shape else None
        if fault:
            raise MalformedError(f"{fault}; {self.hole_reason}")
        for place in places:
            self.files.check_place(place)
        elements = prod(saved.shape)
        size = nbytes(saved.dtype, elements)
        transforms = next((place.transforms for place in places if place.transforms), None)
        data = None if transforms else self._locate_data(saved, chunks, places, size)
        note = (
            "statecli cannot read the values: torch.distributed.checkpoint stored them with the transform "
            f"{quoting.names(transforms)}, which statecli cannot reverse"
            if transforms
            else _describe_chunks(saved.shape, chunks)
        )
        return Tensor(saved.dtype, saved.shape, elements, size, None, saved.requires_grad, note=note, data=data)

    def _locate_data(self, saved: SavedTensor, chunks: list[Chunk], places: list[Stored], size: int) -> TensorData:
        if len(places) == 1:
            return TensorData(self.locate_item(places[0], size), saved.dtype, saved.shape)
        boxes = tuple(
            Box(start, TensorData(self.locate_item(place, nbytes(saved.dtype, prod(shape))), saved.dtype, shape))
            for (start, shape), place in zip(chunks, places, strict=True)
        )
        storage = ByteRange(self.path, 0, size, boxes=Boxes(saved.shape, ELEMENT_BITS[saved.dtype] // 8, boxes))
        return TensorData(storage, saved.dtype, saved.shape)


def _build_damaged_tensor(why: str) -> Tensor:
    return Tensor("unknown", None, 0, 0, None, False, damage=why)


class _Items:
    """Reader of the saved values that are not tensors. `MAX_ITEMS` and `MAX_ITEM_BYTES` limit how many are read."""

    def __init__(self, folder: _Folder) -> None:
        self.folder = folder
        names = [fqn for fqn in folder.metadata.order if fqn not in folder.metadata.tensors]
        # Read the names of trained parameters and the extra states first, because the former show what an optimizer
        # trains and modules unpickle the latter.
        names.sort(key=lambda fqn: not (EXTRA_STATE in fqn or fqn.endswith((".params", ".param_names"))))
        extra_states = sum(EXTRA_STATE in fqn for fqn in names)
        self.chosen: set[str] = set()
        bytes_left = MAX_ITEM_BYTES
        for fqn in names[: MAX_ITEMS + min(extra_states, MAX_EXTRA_STATES)]:
            places = folder.metadata.places.get(fqn, ())
            bytes_left -= sum(place.length for place in places)
            if bytes_left >= 0 and not any(place.transforms for place in places):
                self.chosen.add(fqn)
        names_not_read = [fqn for fqn in names if fqn not in self.chosen]
        if names_not_read:
            count = f"{len(names_not_read)} of {len(self.chosen) + len(names_not_read)} values that are not tensors"
            message = f"statecli did not read {count}: {quoting.names(names_not_read)}"
            folder.oddities.append(Oddity("values-not-read", message))
        self._prefetch()

    def _prefetch(self) -> None:
        """Prefetch all bytes that `read_object` will read from remote storage."""
        extents_by_path: dict[str, list[Extent]] = {}
        for stored in (stored for fqn in self.chosen for stored in self.folder.metadata.places.get(fqn, ())):
            if stored.file in self.folder.files.sizes:
                path = files.join(self.folder.path, stored.file)
                extents_by_path.setdefault(path, []).append(Extent(stored.offset, stored.length))
        with files.prefetch_extents(extents_by_path):
            pass

    def read_object(self, fqn: str) -> Any:
        """Return the object saved as `fqn`, or None if skipped. An unreadable object becomes a damaged tensor."""
        if fqn not in self.chosen:
            return _build_damaged_tensor(_UNREAD_EXTRA_STATE) if EXTRA_STATE in fqn else None
        places = self.folder.metadata.places.get(fqn, ())
        if len(places) != 1:
            return _build_damaged_tensor(
                f".metadata records {len(places)} positions of this value; expected 1; save the checkpoint again"
            )
        stored = places[0]
        try:
            self.folder.files.check_place(stored)
            return self._read_item(fqn, stored)
        except UnreadableError as error:
            origin = "" if isinstance(error, BadFile) else f"the archive at byte {stored.offset} of {stored.file}: "
            return _build_damaged_tensor(f"{origin}{error}")

    def _read_item(self, fqn: str, stored: Stored) -> Any:
        """Return the root of an item's pickle. Prefix its storage keys, because each archive numbers them from 0."""
        folder = self.folder
        pickle, storages, _ = torch_zip.read_contents(
            files.join(folder.path, stored.file), stored.offset, stored.length
        )
        for node in pickle.persistent:
            if type(node.pid) is tuple and len(node.pid) > 2 and type(node.pid[2]) is str:
                node.pid = (*node.pid[:2], f"{fqn}:{node.pid[2]}", *node.pid[3:])
        folder.storages.update((f"{fqn}:{key}", storage) for key, storage in storages.items())
        folder.globals.extend(pickle.globals)
        return pickle.root


def _read_metadata(path: str) -> tuple[dict[str, Metadata], dict[str, UnreadableError]]:
    """Read `.metadata` or, if missing, the metadata file of each rank. Also return the errors of unreadable files."""
    names = [name for name in members(path) if METADATA_NAME.fullmatch(name)]
    if not names:
        raise UnreadableError(
            "is a torch.distributed.checkpoint folder without .metadata: the save did not finish, or the copy failed"
        )
    metadatas: dict[str, Metadata] = {}
    unreadable: dict[str, UnreadableError] = {}
    for name in [METADATA] if METADATA in names else sorted(names, key=lambda name: (len(name), name)):
        try:
            with add_subject_to_errors(name):
                data = read_small_file(files.join(path, name), MAX_METADATA_BYTES)
            metadatas[name] = parse_metadata(data, name)
        except UnreadableError as error:
            unreadable[name] = error
    if not metadatas:
        raise next(iter(unreadable.values()))
    return metadatas, unreadable


def _holds_bytes(path: str) -> bool:
    """Return whether the file is not empty. A rank that has nothing to save writes an empty file."""
    return files.is_file(path) and files.get_size(path) > 0


def _note_foreign_names(state: ModelState, names: Sequence[Global]) -> ModelState:
    """Add an oddity for unexpected names that torch imports when it unpickles `.metadata`."""
    if not names:
        return state
    qualified = list(dict.fromkeys(mention.qualified for mention in names))
    noun = "a function or class" if len(qualified) == 1 else f"{len(qualified)} functions or classes"
    message = f"torch.distributed.checkpoint unpickles .metadata; this imports or calls {noun}: "
    oddity = Oddity(OddityKind.FOREIGN_GLOBALS.value, message + quoting.names(qualified))
    mentions = tuple((mention.qualified, mention.position) for mention in names)
    return replace(state, oddities=(*state.oddities, oddity), globals=(*mentions, *state.globals))


def _check_apart(metadata: Metadata) -> None:
    """Raise MalformedError if the byte ranges of two values overlap, unless both ranges are equal."""
    spans = sorted(
        (stored.file, stored.offset, stored.length, fqn)
        for fqn, places in metadata.places.items()
        for stored in places
        if stored.length
    )
    last = ("", 0, 0, "")
    for span in spans:
        file, offset, length, fqn = span
        if file == last[0] and offset < last[1] + last[2] and (offset, length) != last[1:3]:
            raise MalformedError(
                f"two values overlap in {quoting.name(file)}: {quoting.name(last[3])} has bytes {last[1]} to "
                f"{last[1] + last[2]}, but {quoting.name(fqn)} starts at byte {offset}; a load gives wrong values: "
                "save the checkpoint again"
            )
        if file != last[0] or offset + length > last[1] + last[2]:
            last = span


def _match_chunks(chunks: list[Chunk], places: Sequence[Stored]) -> list[Stored]:
    """Return the stored byte range of each chunk. The record of a byte range has the start index of its chunk."""
    if len(chunks) <= len(places) and all(map(_is_place_of, chunks, places)):
        return list(places[: len(chunks)])
    sorted_places = sorted((stored for stored in places if stored.start is not None), key=_get_start)
    matched = []
    for chunk in chunks:
        at = bisect_left(sorted_places, chunk.start, key=_get_start)
        if at == len(sorted_places) or not _is_place_of(chunk, sorted_places[at]):
            raise MalformedError(
                f".metadata does not record the position of the chunk with shape {list(chunk.shape)} at offset "
                f"{list(chunk.start)}; save the checkpoint again"
            )
        matched.append(sorted_places[at])
    return matched


def _is_place_of(chunk: Chunk, stored: Stored) -> bool:
    return stored.start == chunk.start


def _get_start(stored: Stored) -> tuple[int, ...]:
    return stored.start or ()


def _describe_chunks(shape: Sizes, chunks: Sequence[Chunk]) -> str | None:
    """Describe into how many chunks, and along which dimensions, a tensor was cut. Return None for a single chunk."""
    if len(chunks) < 2:
        return None
    axes = [str(axis) for axis, size in enumerate(shape) if any(chunk.shape[axis] < size for chunk in chunks)]
    return f"{len(chunks)} chunks, cut along dimension{'s' * (len(axes) > 1)} {' and '.join(axes)}"
