"""Of a save without collectives: the metadata of each rank, put together, and what is missing or differs among them.

Each rank writes `__0.metadata` of what it saved itself, a tensor's global shape with its own chunks. What is no DTensor
each of them has whole, and nothing holds it to be the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from statecli.core import quoting
from statecli.core.state import Oddity
from statecli.formats.shared.dcp_metadata import Metadata, SavedTensor, Stored
from statecli.storage import files
from statecli.storage.source import Source

_RANK = re.compile(r"__(?P<rank>\d{1,9})(?:_\d+\.distcp|\.metadata)")
#: Ranks that are looked for, which is more than any save had.
MAX_RANKS = 100_000
#: Bytes that are compared of what several ranks saved.
MAX_COMPARED = 64 * 2**20


class Rival(NamedTuple):
    """One name that two ranks saved: where the first has it, and where another."""

    fqn: str
    mine: Stored
    theirs: Stored


def merged(found: Sequence[Metadata]) -> tuple[Metadata, list[Rival]]:
    """What all ranks saved, and what several of them did. What several have whole is the first one's."""
    first, rivals = found[0], list[Rival]()
    for other in found[1:]:
        for fqn in other.order:
            rivals.extend(_join(first, other, fqn))
        first.foreign.extend(other.foreign)
    return first, rivals


def _join(first: Metadata, other: Metadata, fqn: str) -> Iterator[Rival]:
    """Add what another rank has of one name."""
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
            first.tensors[fqn] = f"two ranks disagree about it: {shapes}; save it again"
            return
        known = set(mine.chunks)
        mine.chunks.extend(chunk for chunk in theirs.chunks if chunk not in known)
        mine.wrong = mine.wrong or theirs.wrong
    here = first.places.setdefault(fqn, [])
    held = {one.start: one for one in here}
    for one in places:
        if one.start in held:
            yield Rival(fqn, held[one.start], one)
        elif mine is not None and theirs is not None:
            here.append(one)


def missing(names: Iterable[str], members: Iterable[str]) -> list[str]:
    """The metadata of ranks that lie between those of `names`, or have a file among the folder's `members`."""
    here = ranks(names)
    if not here:
        return []
    between = range(min(max(here), MAX_RANKS))
    return [f"__{rank}.metadata" for rank in sorted({*between, *ranks(members)} - here)]


def ranks(names: Iterable[str]) -> set[int]:
    """Those that wrote files of these names."""
    return {int(match["rank"]) for name in names if (match := _RANK.fullmatch(name))}


def told(path: str, count: int, rivals: Sequence[Rival]) -> Oddity:
    """What to know of such a folder: which names the ranks do not agree about. All of `rivals` are in their files.

    Raises UnreadableError for a file that changes meanwhile.
    """
    said = f"saved by {count} ranks without collectives"
    differ, unread = _differing(path, rivals)
    if differ:
        said += f"; they saved different values, and the first one's are shown: {quoting.names(differ)}"
    if unread:
        said += f"; whether all saved the same was not looked at: {quoting.names(unread)}"
    return Oddity("rank-metadata", said)


def _differing(path: str, rivals: Sequence[Rival]) -> tuple[list[str], list[str]]:
    """The names whose archives differ, as torch.save writes the same bytes for the same; and those not compared."""
    differ: dict[str, None] = {}
    unread: dict[str, None] = {}
    left = MAX_COMPARED
    for one in sorted(rivals, key=lambda one: one.mine.length):
        if one.mine.length != one.theirs.length:
            differ[one.fqn] = None
            continue
        left -= 2 * one.mine.length
        if left < 0:
            unread[one.fqn] = None
        elif _bytes(path, one.mine) != _bytes(path, one.theirs):
            differ[one.fqn] = None
    return list(differ), [fqn for fqn in unread if fqn not in differ]


def _bytes(path: str, one: Stored) -> bytes:
    with Source(files.join(path, one.file), one.offset, one.length) as source:
        return source.read(0, one.length)
