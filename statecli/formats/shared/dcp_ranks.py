"""Merge the metadata of ranks that saved without collectives, and find missing or different data.

Each rank writes `__0.metadata` for its own data: a tensor's global shape with its own chunks. Other values are saved
whole by every rank, and may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Oddity
from statecli.formats.shared.dcp_metadata import Metadata, SavedTensor, Stored
from statecli.storage import files
from statecli.storage.byte_source import ByteSource

_RANK = compile_on_use(r"__(?P<rank>\d{1,9})(?:_\d+\.distcp|\.metadata)")
#: Maximum rank that is considered; no known save had as many ranks.
MAX_RANKS = 100_000
#: Maximum number of bytes that are compared between ranks that saved the same names.
MAX_COMPARED_BYTES = 64 * 2**20


class Rival(msgspec.Struct, frozen=True):
    """Name of an item that two ranks saved, with the byte range of each rank's data."""

    fqn: str
    first: Stored
    other: Stored


def merge_metadata(metadatas: Sequence[Metadata]) -> tuple[Metadata, list[Rival]]:
    """Merge the metadata of all ranks into `metadatas[0]`. Also return a Rival for each item that two ranks saved."""
    first, rivals = metadatas[0], list[Rival]()
    for metadata in metadatas[1:]:
        for fqn in metadata.order:
            rivals.extend(_add_chunks(first, metadata, fqn))
        first.foreign.extend(metadata.foreign)
    return first, rivals


def _add_chunks(first: Metadata, other: Metadata, fqn: str) -> Iterator[Rival]:
    """Add the other rank's chunks of a tensor to `first`. Yield a Rival for each item that both ranks saved."""
    tensor, other_tensor = first.tensors.get(fqn), other.tensors.get(fqn)
    other_places = other.places.get(fqn, [])
    if fqn not in first.places and tensor is None:
        first.order.append(fqn)
        first.places[fqn] = other_places
        if other_tensor is not None:
            first.tensors[fqn] = other_tensor
        if fqn in other.paths:
            first.paths[fqn] = other.paths[fqn]
        return
    if isinstance(tensor, SavedTensor) and isinstance(other_tensor, SavedTensor):
        if (tensor.dtype, tensor.shape) != (other_tensor.dtype, other_tensor.shape):
            shapes = " and ".join(f"{saved.dtype} {quoting.shape(saved.shape)}" for saved in (tensor, other_tensor))
            first.tensors[fqn] = f"the tensor differs between two ranks: {shapes}; save the checkpoint again"
            return
        chunks = set(tensor.chunks)
        tensor.chunks.extend(chunk for chunk in other_tensor.chunks if chunk not in chunks)
        tensor.fault = tensor.fault or other_tensor.fault
    first_places = first.places.setdefault(fqn, [])
    by_start = {stored.start: stored for stored in first_places}
    for stored in other_places:
        if stored.start in by_start:
            yield Rival(fqn, by_start[stored.start], stored)
        elif tensor is not None and other_tensor is not None:
            first_places.append(stored)


def find_missing_names(names: Iterable[str], members: Iterable[str]) -> list[str]:
    """List missing metadata files of ranks below the highest rank in `names`, and of ranks with files in `members`."""
    ranks = parse_ranks(names)
    if not ranks:
        return []
    between = range(min(max(ranks), MAX_RANKS))
    return [f"__{rank}.metadata" for rank in sorted({*between, *parse_ranks(members)} - ranks)]


def parse_ranks(names: Iterable[str]) -> set[int]:
    """Return the rank numbers in these file names."""
    return {int(match["rank"]) for name in names if (match := _RANK.fullmatch(name))}


def describe_merge(path: str, count: int, rivals: Sequence[Rival]) -> Oddity:
    """Return an `Oddity` about a folder that ranks saved independently: the values that differ between ranks.

    All `rivals` must be in readable files. Raises UnreadableError for a file that changes meanwhile.
    """
    message = f"saved by {count} ranks without communication, so each rank has its own metadata file"
    differing_names, names_not_compared = _find_difference(path, rivals)
    if differing_names:
        message += (
            "; these values differ between ranks, and statecli shows the values of the first rank: "
            f"{quoting.names(differing_names)}"
        )
    if names_not_compared:
        message += f"; these values were not compared between ranks: {quoting.names(names_not_compared)}"
    return Oddity("rank-metadata", message)


def _find_difference(path: str, rivals: Sequence[Rival]) -> tuple[list[str], list[str]]:
    """Compare the items that several ranks saved. Return the names of items that differ, and of items not compared."""
    differing_names: dict[str, None] = {}
    names_not_compared: dict[str, None] = {}
    bytes_left = MAX_COMPARED_BYTES
    for rival in sorted(rivals, key=lambda rival: rival.first.length):
        if rival.first.length != rival.other.length:
            differing_names[rival.fqn] = None
            continue
        bytes_left -= 2 * rival.first.length
        if bytes_left < 0:
            names_not_compared[rival.fqn] = None
        elif _read_stored(path, rival.first) != _read_stored(path, rival.other):
            differing_names[rival.fqn] = None
    return list(differing_names), [fqn for fqn in names_not_compared if fqn not in differing_names]


def _read_stored(path: str, stored: Stored) -> bytes:
    with ByteSource(files.join(path, stored.file), stored.offset, stored.length) as source:
        return source.read(0, stored.length)
