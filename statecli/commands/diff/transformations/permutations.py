"""Recognise tensors whose rows or columns were reordered, for example by sorting the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from statecli.commands.diff.result import Change, Transformation, TransformationKind
from statecli.commands.diff.transformations.alignment import compute_digests_of_pairs
from statecli.commands.diff.transformations.evidence import MIN_BITS, count_bits
from statecli.commands.diff.transformations.ordinary_training import was_replaced
from statecli.commands.diff.transformations.views import get_sampled, locate, name_rounding, permute, select
from statecli.core.model_state import TensorData
from statecli.values.element_checks import MAX_LISTED_ROWS, CheckResult, CheckTask, Operation, can_copy, check_elements

#: Largest fraction of new rows without an equal old row.
_MAX_LOST_SHARE = 1 / 10
#: Largest number of rows without an equal row that are compared with each other.
_MAX_COMPARED = 8


def find_permutations(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the tensors with reordered rows, or else reordered columns, keyed by index in `changes`.

    Nine in ten rows must be equal bit for bit, or after rounding to the new dtype. In a few other rows, the elements
    that differ from the most similar remaining row are the exceptions. If there are many other rows, all of their
    elements are exceptions.
    """
    permuted: dict[int, Transformation] = {}
    for axis in (0, 1):
        sides = {
            n: pair for n, change in enumerate(changes) if n not in permuted and (pair := _list_sides(change, axis))
        }
        pairs = {n: (changes[n].fqn, *pair) for n, pair in sides.items()}
        for n, digests in compute_digests_of_pairs(pairs, jobs=jobs, is_strong=True).items():
            permutation = _compare_rows(changes[n].fqn, sides[n], *digests, axis, jobs)
            permuted |= {n: permutation} if permutation is not None else {}
    return permuted


def _list_sides(change: Change, axis: int) -> tuple[TensorData, TensorData] | None:
    """Return both tensors with `axis` in front, or None if the tensor cannot have been reordered."""
    before, after = get_sampled(change.before), get_sampled(change.after)
    if before is None or after is None or before.shape != after.shape or not was_replaced(change):
        return None
    if len(before.shape) < 2 or min(before.shape[:2]) < 2 or not can_copy(before.dtype, after.dtype):
        return None
    axes = [axis, *(n for n in range(len(before.shape)) if n != axis)]
    return permute(locate(before, change.fqn), axes), permute(locate(after, change.fqn), axes)


def _compare_rows(
    name: str,
    sides: tuple[TensorData, TensorData],
    before: Sequence[int],
    after: Sequence[int],
    axis: int,
    jobs: int,
) -> Transformation | None:
    places: dict[int, list[int]] = {}
    for n, digest in enumerate(before):
        places.setdefault(digest, []).append(n)
    unmatched_after = []
    for n, digest in enumerate(after):
        if places.get(digest):
            places[digest].pop()
        else:
            unmatched_after.append(n)
    if len(unmatched_after) > max(1, _MAX_LOST_SHARE * len(after)):
        return None
    # Without a move, a row with an outlier is the same change in place.
    if sum(old != new for old, new in zip(before, after, strict=True)) <= len(unmatched_after):
        return None
    rows, elements = math.prod(sides[1].shape[1:]), math.prod(sides[1].shape)
    unmatched_before = [n for numbers in places.values() for n in numbers]
    exceptions = rows * len(unmatched_after)
    if 0 < len(unmatched_after) <= _MAX_COMPARED:
        exceptions = _count_exceptions(name, sides, unmatched_before, unmatched_after, jobs)
    # Bits for the choice of an order among all orders of the rows.
    ways = math.lgamma(len(after) + 1) / math.log(2)
    if count_bits(sides[1], name, elements, exceptions) < MIN_BITS + ways:
        return None
    return Transformation(
        TransformationKind.PERMUTED,
        elements,
        exceptions,
        rounding=name_rounding(sides[0].dtype, sides[1].dtype),
        axis=axis,
        rows=len(unmatched_after),
        first_rows=tuple(unmatched_after[:MAX_LISTED_ROWS]),
    )


def _count_exceptions(
    name: str,
    sides: tuple[TensorData, TensorData],
    unmatched_before: Sequence[int],
    unmatched_after: Sequence[int],
    jobs: int,
) -> int:
    """Pair unmatched new rows with the most similar unmatched old rows. Return the number of differing elements."""
    row_pairs = [(old, new) for new in unmatched_after for old in unmatched_before]
    tasks = [CheckTask(name, Operation.COPY, select(sides[0], old), select(sides[1], new)) for old, new in row_pairs]
    results = check_elements(tasks, jobs=jobs)
    counts = sorted(
        (result.exceptions if isinstance(result, CheckResult) else math.prod(sides[1].shape[1:]), row_pair)
        for row_pair, result in zip(row_pairs, results, strict=True)
    )
    used_before: set[int] = set()
    used_after: set[int] = set()
    exceptions = 0
    for count, (old, new) in counts:
        if old not in used_before and new not in used_after:
            used_before.add(old)
            used_after.add(new)
            exceptions += count
    return exceptions
