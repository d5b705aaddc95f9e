"""Metadata of a save without collectives: merges the metadata of each rank and finds missing or different data.

Each rank writes `__0.metadata` for its own data: a tensor's global shape with its own chunks. Other values are saved
whole by every rank, and may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Oddity
from statecli.formats.shared.dcp_metadata import Metadata, SavedTensor, Stored
from statecli.storage import files
from statecli.storage.byte_source import Source

_RANK = compile_on_use(r"__(?P<rank>\d{1,9})(?:_\d+\.distcp|\.metadata)")
#: Ranks that are looked for, which is more than any save had.
MAX_RANKS = 100_000
#: Bytes that are compared of what several ranks saved.
MAX_COMPARED = 64 * 2**20


class Rival(NamedTuple):
    """Name saved by two ranks: the place of the first rank and the place of the second."""

    fqn: str
    mine: Stored
    theirs: Stored


def merge_metadata(metadatas: Sequence[Metadata]) -> tuple[Metadata, list[Rival]]:
    """Merge the metadata of all ranks, and list names saved whole by several ranks; the first rank wins."""
    first, rivals = metadatas[0], list[Rival]()
    for other in metadatas[1:]:
        for fqn in other.order:
            rivals.extend(_join(first, other, fqn))
        first.foreign.extend(other.foreign)
    return first, rivals


def _join(first: Metadata, other: Metadata, fqn: str) -> Iterator[Rival]:
    """Add the other rank's chunks of a name."""
    mine, theirs = first.tensors.get(fqn), other.tensors.get(fqn)
    places = other.places.get(fqn, [])
    if fqn not in first.places and mine is None:
        first.order.append(fqn)
        first.places[fqn] = places
        if theirs is not None:
            first.tensors[fqn] = theirs
        if fqn in other.paths:
            first.paths[fqn] = other.paths[fqn]
        return
    if isinstance(mine, SavedTensor) and isinstance(theirs, SavedTensor):
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            shapes = f"{mine.dtype} {quoting.shape(mine.shape)} and {theirs.dtype} {quoting.shape(theirs.shape)}"
            first.tensors[fqn] = f"the tensor differs between two ranks: {shapes}; save the checkpoint again"
            return
        chunks = set(mine.chunks)
        mine.chunks.extend(chunk for chunk in theirs.chunks if chunk not in chunks)
        mine.wrong = mine.wrong or theirs.wrong
    here = first.places.setdefault(fqn, [])
    by_start = {stored.start: stored for stored in here}
    for stored in places:
        if stored.start in by_start:
            yield Rival(fqn, by_start[stored.start], stored)
        elif mine is not None and theirs is not None:
            here.append(stored)


def find_missing_names(names: Iterable[str], members: Iterable[str]) -> list[str]:
    """List the metadata of ranks between those of `names`, or with a file among the folder's `members`."""
    here = parse_ranks(names)
    if not here:
        return []
    between = range(min(max(here), MAX_RANKS))
    return [f"__{rank}.metadata" for rank in sorted({*between, *parse_ranks(members)} - here)]


def parse_ranks(names: Iterable[str]) -> set[int]:
    """Return the ranks of files with these names."""
    return {int(match["rank"]) for name in names if (match := _RANK.fullmatch(name))}


def describe_merge(path: str, count: int, rivals: Sequence[Rival]) -> Oddity:
    """Describe a folder of several ranks: names on which the ranks disagree. All `rivals` are in readable files.

    Raises UnreadableError for a file that changes meanwhile.
    """
    message = f"saved by {count} ranks without communication, so each rank has its own metadata file"
    differ, unread = _find_difference(path, rivals)
    if differ:
        message += (
            "; these values differ between ranks, and statecli shows the values of the first rank: "
            f"{quoting.names(differ)}"
        )
    if unread:
        message += f"; these values were not compared between ranks: {quoting.names(unread)}"
    return Oddity("rank-metadata", message)


def _find_difference(path: str, rivals: Sequence[Rival]) -> tuple[list[str], list[str]]:
    """List names whose archives differ (torch.save is deterministic), and names not compared."""
    differ: dict[str, None] = {}
    unread: dict[str, None] = {}
    left = MAX_COMPARED
    for rival in sorted(rivals, key=lambda rival: rival.mine.length):
        if rival.mine.length != rival.theirs.length:
            differ[rival.fqn] = None
            continue
        left -= 2 * rival.mine.length
        if left < 0:
            unread[rival.fqn] = None
        elif _read_stored(path, rival.mine) != _read_stored(path, rival.theirs):
            differ[rival.fqn] = None
    return list(differ), [fqn for fqn in unread if fqn not in differ]


def _read_stored(path: str, stored: Stored) -> bytes:
    with Source(files.join(path, stored.file), stored.offset, stored.length) as source:
        return source.read(0, stored.length)
