"""Find renamed tensors by their equal bytes, as `git diff -M` finds renamed files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import msgspec
from msgspec.structs import replace

from statecli import values
from statecli.commands.diff.pairing import Match, MatchedBy
from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import ChecksumMismatch, StateError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.core.part_rows import replace_data
from statecli.values.delta import CompareOptions, Delta

Rows = list[TensorInfo]

#: Largest number of last components of a name that are compared, because a file may have names of a million components.
_MAX_SUFFIX_PARTS = 64


class Renames(msgspec.Struct, frozen=True):
    """Result of the search for renamed tensors. `inconclusive` maps the `id` of a tensor to its error."""

    matches: list[Match]
    inconclusive: dict[int, StateError]


def find_renames(
    matches: Sequence[Match], sections: Mapping[str, str], is_selected: Callable[[TensorInfo], bool], *, jobs: int
) -> Renames:
    """Find renamed tensors: equal section, dtype, shape and bits, but different names.

    Only groups with tensors left on both sides and with a selected tensor are read. Of several equal tensors, the
    tensors whose names have the longest common end are paired, then the first of each side. Constant values (a bias of
    zeros) are weak evidence: there, the last component of the names must be equal.
    """
    groups = [group for group in _group_candidates(matches, sections) if any(map(is_selected, (*group[0], *group[1])))]
    errors: dict[int, StateError] = {}
    pairs = [
        pair
        for old_rows, new_rows in _split_by_fingerprint(groups, jobs, errors)
        for pair in pair_by_suffix(old_rows, new_rows)
    ]
    matches_by_bytes = [
        Match(old_rows, new_rows, MatchedBy.BYTES) for old_rows, new_rows in _confirm_pairs(pairs, jobs, errors)
    ]
    return Renames(matches_by_bytes, _find_inconclusive(groups, matches_by_bytes, errors))


def _find_inconclusive(
    groups: Sequence[tuple[Rows, Rows]], matches_by_bytes: Sequence[Match], errors: dict[int, StateError]
) -> dict[int, StateError]:
    """Return the errors of unpaired tensors: the read error of the tensor itself, or of a possible partner."""
    paired_ids = {id(row) for match in matches_by_bytes for row in (match.before, match.after)}
    inconclusive = {}
    for group in groups if errors else ():
        for rows, others in (group, group[::-1]):
            partner_error = next((errors[id(row)] for row in others if id(row) in errors), None)
            for row in rows:
                error = errors.get(id(row), partner_error)
                if error is not None and id(row) not in paired_ids:
                    inconclusive[id(row)] = error
    return inconclusive


def _group_candidates(matches: Sequence[Match], sections: Mapping[str, str]) -> list[tuple[Rows, Rows]]:
    """Group unpaired tensors that may be renamed to each other: equal in section, dtype, layout and shape."""
    groups: dict[object, tuple[Rows, Rows]] = {}
    for match in matches:
        if match.before is not None and match.after is not None:
            continue
        row = match.output_row
        if row.shape is None or (row.data is None and not row.parts):
            continue
        section = row.section if match.before is None else sections.get(row.section)
        groups.setdefault((section, row.dtype, row.layout, row.shape), ([], []))[match.before is None].append(row)
    return [group for group in groups.values() if group[0] and group[1]]


def _split_by_fingerprint(
    groups: Sequence[tuple[Rows, Rows]], jobs: int, errors: dict[int, StateError]
) -> Iterator[tuple[Rows, Rows]]:
    """Split each group by fingerprints of the tensors' bytes. Unreadable tensors are added to `errors`."""
    if not groups:
        return
    rows = [(n, side, row) for n, group in enumerate(groups) for side in (0, 1) for row in group[side]]
    groups_by_fingerprint: dict[tuple[int, int], tuple[Rows, Rows]] = {}
    fingerprints = values.fingerprints.compute_fingerprints(
        [row for _, _, row in rows], jobs=jobs, group_keys=[n for n, _, _ in rows]
    )
    for (n, side, row), fingerprint in zip(rows, fingerprints, strict=True):
        if isinstance(fingerprint, StateError):
            errors[id(row)] = fingerprint
        elif fingerprint is not None:
            groups_by_fingerprint.setdefault((n, fingerprint), ([], []))[side].append(row)
    yield from (group for group in groups_by_fingerprint.values() if group[0] and group[1])


def pair_by_suffix(before: Rows, after: Rows) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Pair tensors whose names have the longest common ending. Equally good candidates are paired in order."""
    old_paths = [(row, row.fqn.split(".")) for row in before]
    new_paths = [(row, row.fqn.split(".")) for row in after]
    longest = min(max(len(path) for _, path in old_paths), max(len(path) for _, path in new_paths))
    for depth in range(min(longest, _MAX_SUFFIX_PARTS), -1, -1):
        free_rows: dict[tuple[str, ...], list[TensorInfo]] = {}
        for row, path in reversed(old_paths):
            if len(path) >= depth:
                free_rows.setdefault(tuple(path[len(path) - depth :]), []).append(row)
        paired_ids: set[int] = set()
        for row, path in new_paths:
            candidates = free_rows.get(tuple(path[len(path) - depth :])) if len(path) >= depth else None
            if candidates:
                first = candidates.pop()
                paired_ids |= {id(first), id(row)}
                yield first, row
        old_paths = [entry for entry in old_paths if id(entry[0]) not in paired_ids]
        new_paths = [entry for entry in new_paths if id(entry[0]) not in paired_ids]


def _confirm_pairs(
    pairs: list[tuple[TensorInfo, TensorInfo]], jobs: int, errors: dict[int, StateError]
) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Yield the pairs that are equal bit for bit. Constant tensors must also have the same last name component.

    Adds unreadable rows to `errors`.
    """
    if not pairs:
        return
    outcomes = values.compare.compare_pairs(
        [values.pair_plan.Pair(old, new) for old, new in pairs], CompareOptions(bitwise=True), jobs=jobs, derived=True
    )
    for pair, outcome in zip(pairs, outcomes, strict=True):
        try:
            has_one_last_name = len({row.fqn.rpartition(".")[2] for row in pair}) == 1
            if _is_equal(outcome) and (has_one_last_name or not is_constant(pair[0])):
                yield pair
        except StateError as error:
            errors.update({id(row): error for row in pair})


def _is_equal(outcome: object) -> bool:
    """Return True for equal bytes. Read errors are raised, except that damaged bytes count as different."""
    if isinstance(outcome, StateError) and not isinstance(outcome, ChecksumMismatch):
        raise outcome
    return isinstance(outcome, Delta) and not outcome.changed


def is_constant(row: TensorInfo) -> bool:
    """Return True if all elements of the tensor, or of each of its parts, are equal bit for bit."""
    parts = [row.data] if row.data is not None else [data for _, data in row.parts]
    return all(_is_fill(values.ranges.resolve_data(data, row.fqn), row) for data in parts)


def _is_fill(data: TensorData, row: TensorInfo) -> bool:
    # Fast path: the first two elements of each dimension decide for most tensors.
    return prod(data.shape) < 2 or (_is_repeated(_truncate(data, 2), row) and _is_repeated(data, row))


def _truncate(data: TensorData, size: int) -> TensorData:
    strides = data.strides or contiguous_strides(data.shape)
    return replace(data, shape=tuple(min(dim, size) for dim in data.shape), strides=strides)


def _is_repeated(data: TensorData, row: TensorInfo) -> bool:
    """Return True if each element equals its neighbour along every dimension."""
    strides = data.strides or contiguous_strides(data.shape)
    pairs = []
    for dim, size in enumerate(data.shape):
        if size > 1:
            shape = (*data.shape[:dim], size - 1, *data.shape[dim + 1 :])
            first = replace(data, shape=shape, strides=strides)
            second = replace(first, offset=data.offset + strides[dim])
            pairs.append(values.pair_plan.Pair(replace_data(row, first), replace_data(row, second)))
    outcomes = values.compare.compare_pairs(pairs, CompareOptions(bitwise=True), jobs=1, derived=True)
    return all(map(_is_equal, outcomes))
