"""Tensors of equal bytes under another name, as `git diff -M` finds files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from statecli.commands.diff.pairing import Match, Way
from statecli.core.errors import ChecksumMismatch, StateError
from statecli.core.state import TensorData, TensorInfo
from statecli.values.delta import Delta, How

Rows = list[TensorInfo]


class Renames(NamedTuple):
    """The matches that were found, and by `id` the rows of which nobody can tell whether they are renamed, with why."""

    matches: list[Match]
    untold: dict[int, StateError]


def found(
    matches: Sequence[Match], sections: Mapping[str, str], wanted: Callable[[TensorInfo], bool], *, jobs: int
) -> Renames:
    """Matches of tensors that no name matched, of the same section, dtype and shape and bit for bit equal.

    Only groups with tensors left on both sides are read, and of these only groups with a wanted one. Of several equal
    tensors, those whose names have the longest end in common are paired, then the first of each side. Values that
    are all one (a bias of zeros) are weak evidence: there, the last component of the names must agree.
    """
    groups = [group for group in _groups(matches, sections) if any(map(wanted, (*group[0], *group[1])))]
    failed: dict[int, StateError] = {}
    pairs = [pair for one, two in _equal(groups, jobs, failed) for pair in by_suffix(one, two)]
    same = [Match(one, two, Way.BYTES) for one, two in _confirmed(pairs, jobs, failed)]
    return Renames(same, _untold(groups, same, failed))


def _untold(
    groups: Sequence[tuple[Rows, Rows]], same: Sequence[Match], failed: dict[int, StateError]
) -> dict[int, StateError]:
    """The rows that failed, and those without a partner whose partner one of these may be."""
    taken = {id(row) for match in same for row in (match.before, match.after)}
    untold = {}
    for group in groups if failed else ():
        for rows, others in (group, group[::-1]):
            why = next((failed[id(row)] for row in others if id(row) in failed), None)
            for row in rows:
                error = failed.get(id(row), why)
                if error is not None and id(row) not in taken:
                    untold[id(row)] = error
    return untold


def _groups(matches: Sequence[Match], sections: Mapping[str, str]) -> list[tuple[Rows, Rows]]:
    """Tensors without a partner that could be each other's: same sections, dtype, layout and shape."""
    groups: dict[object, tuple[Rows, Rows]] = {}
    for match in matches:
        if match.before is not None and match.after is not None:
            continue
        row = match.shown
        if row.shape is None or (row.data is None and not row.parts):
            continue
        section = row.section if match.before is None else sections.get(row.section)
        groups.setdefault((section, row.dtype, row.layout, row.shape), ([], []))[match.before is None].append(row)
    return [group for group in groups.values() if group[0] and group[1]]


def _equal(
    groups: Sequence[tuple[Rows, Rows]], jobs: int, failed: dict[int, StateError]
) -> Iterator[tuple[Rows, Rows]]:
    """The groups parted further, by the fingerprints of their bytes; `failed` is given the rows that have none."""
    if not groups:
        return
    from statecli.values.compare import fingerprints

    rows = [(n, side, row) for n, group in enumerate(groups) for side in (0, 1) for row in group[side]]
    equal: dict[tuple[int, int], tuple[Rows, Rows]] = {}
    marks = fingerprints([row for _, _, row in rows], jobs=jobs, together=[n for n, _, _ in rows])
    for (n, side, row), mark in zip(rows, marks, strict=True):
        if isinstance(mark, StateError):
            failed[id(row)] = mark
        elif mark is not None:
            equal.setdefault((n, mark), ([], []))[side].append(row)
    yield from (group for group in equal.values() if group[0] and group[1])


def by_suffix(before: Rows, after: Rows) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Pair those whose names share the most last components, in order where several do."""
    one = [(row, row.fqn.split(".")) for row in before]
    two = [(row, row.fqn.split(".")) for row in after]
    longest = min(max(len(path) for _, path in one), max(len(path) for _, path in two))
    for depth in range(longest, -1, -1):
        free: dict[tuple[str, ...], list[TensorInfo]] = {}
        for row, path in reversed(one):
            if len(path) >= depth:
                free.setdefault(tuple(path[len(path) - depth :]), []).append(row)
        taken: set[int] = set()
        for row, path in two:
            candidates = free.get(tuple(path[len(path) - depth :])) if len(path) >= depth else None
            if candidates:
                first = candidates.pop()
                taken |= {id(first), id(row)}
                yield first, row
        one = [entry for entry in one if id(entry[0]) not in taken]
        two = [entry for entry in two if id(entry[0]) not in taken]


def _confirmed(
    pairs: list[tuple[TensorInfo, TensorInfo]], jobs: int, failed: dict[int, StateError]
) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Those that are equal bit for bit, which a fingerprint only hints at, and are no mere fill under another name.

    `failed` is given the rows of those of which that cannot be told.
    """
    if not pairs:
        return
    from statecli.values.compare import Pair, compare_all

    outcomes = compare_all([Pair(one, two) for one, two in pairs], How(bitwise=True), jobs=jobs, derived=True)
    for pair, outcome in zip(pairs, outcomes, strict=True):
        try:
            if _is_equal(outcome) and (_ends_alike(*pair) or not _is_constant(pair[0])):
                yield pair
        except StateError as error:
            failed.update({id(row): error for row in pair})


def _is_equal(outcome: object) -> bool:
    """Raises the error that it is. Damaged bytes equal no others, and are told of where they are checked."""
    if isinstance(outcome, StateError) and not isinstance(outcome, ChecksumMismatch):
        raise outcome
    return isinstance(outcome, Delta) and not outcome.changed


def _ends_alike(before: TensorInfo, after: TensorInfo) -> bool:
    return before.fqn.rpartition(".")[2] == after.fqn.rpartition(".")[2]


def _is_constant(row: TensorInfo) -> bool:
    """Whether all elements are one value bit for bit, or there is none; of a tensor made of parts, in each part."""
    from statecli.values.ranges import resolved

    parts = [row.data] if row.data is not None else [data for _, data in row.parts]
    return all(_is_fill(resolved(data, row.fqn), row) for data in parts)


def _is_fill(data: TensorData, row: TensorInfo) -> bool:
    # Of most tensors, the first two of each dimension tell.
    return prod(data.shape) < 2 or (_repeats(_cut(data, 2), row) and _repeats(data, row))


def _cut(data: TensorData, size: int) -> TensorData:
    return replace(data, shape=tuple(min(dim, size) for dim in data.shape), strides=_strides(data))


def _strides(data: TensorData) -> tuple[int, ...]:
    if data.strides is not None:
        return data.strides
    return tuple(prod(data.shape[dim + 1 :]) for dim in range(len(data.shape)))


def _repeats(data: TensorData, row: TensorInfo) -> bool:
    """Whether each element is the next one along every dimension."""
    from statecli.values.compare import Pair, compare_all

    strides = _strides(data)
    pairs = []
    for dim, size in enumerate(data.shape):
        if size > 1:
            shape = (*data.shape[:dim], size - 1, *data.shape[dim + 1 :])
            first = replace(data, shape=shape, strides=strides)
            pairs.append(Pair(_of(row, first), _of(row, replace(first, offset=data.offset + strides[dim]))))
    outcomes = compare_all(pairs, How(bitwise=True), jobs=1, derived=True)
    return all(map(_is_equal, outcomes))


def _of(row: TensorInfo, data: TensorData) -> TensorInfo:
    return replace(row, shape=data.shape, elements=prod(data.shape), layout="strided", data=data, parts=())
