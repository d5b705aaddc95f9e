"""Recognise tensors whose rows or columns were reordered, for example by sorting the vocabulary.

The rows of q and k have two orders for rotary embeddings. The original LLaMA rotates neighbouring rows (interleaved).
transformers rotates a row of the first half of a head with a row of the second half (transformers,
models/llama/convert_llama_weights_to_hf.py, `permute`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from statecli.commands.diff.result import Change, RowOrder, Transformation, TransformationKind
from statecli.commands.diff.transformations.alignment import compute_digests_of_pairs
from statecli.commands.diff.transformations.evidence import MIN_BITS, count_bits, is_evident
from statecli.commands.diff.transformations.ordinary_training import MAX_EXCEPTIONS, was_replaced
from statecli.commands.diff.transformations.views import get_sampled, locate, name_rounding, permute, select
from statecli.core.model_state import TensorData
from statecli.values.element_checks import MAX_LISTED_ROWS, CheckResult, CheckTask, Operation, can_copy, check_elements

#: Largest fraction of new rows without an equal old row.
_MAX_LOST_SHARE = 1 / 10
#: Largest number of rows without an equal row that are compared with each other.
_MAX_COMPARED = 8
#: Smallest and largest number of rows of a head. With four rows, the permutation and its inverse are the same.
_MIN_HEAD, _MAX_HEAD = 6, 1024
#: Largest number of elements of a vector, such as the bias of q, that is read again to search its order.
_MAX_VECTOR = 1 << 16


class _Sides(NamedTuple):
    """Both sides of a tensor, with the dimension `axis` moved to the front."""

    name: str
    axis: int
    before: TensorData
    after: TensorData


def find_permutations(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the tensors with reordered rows, or else reordered columns, keyed by index in `changes`.

    Rows must be equal bit for bit, or after rounding to the new dtype. In a few other rows, the elements that differ
    from the most similar remaining row are the exceptions.
    """
    permuted: dict[int, Transformation] = {}
    for axis in (0, 1):
        sides = {
            n: pair for n, change in enumerate(changes) if n not in permuted and (pair := _list_sides(change, axis))
        }
        pairs = {n: (pair.name, pair.before, pair.after) for n, pair in sides.items()}
        for n, digests in compute_digests_of_pairs(pairs, jobs=jobs, is_strong=True).items():
            permutation = _find_rotary_order(sides[n], *digests, jobs) or _compare_rows(sides[n], *digests, jobs)
            permuted |= {n: permutation} if permutation is not None else {}
    return permuted


def _list_sides(change: Change, axis: int) -> _Sides | None:
    """Return both tensors with `axis` in front, or None if the tensor cannot have been reordered."""
    before, after = get_sampled(change.before), get_sampled(change.after)
    if before is None or after is None or before.shape != after.shape or not was_replaced(change):
        return None
    if len(before.shape) <= axis or before.shape[axis] < 2 or not can_copy(before.dtype, after.dtype):
        return None
    if len(before.shape) == 1 and before.shape[0] > _MAX_VECTOR:
        return None
    axes = [axis, *(n for n in range(len(before.shape)) if n != axis)]
    return _Sides(change.fqn, axis, *(permute(locate(side, change.fqn), axes) for side in (before, after)))


def _find_rotary_order(sides: _Sides, before: Sequence[int], after: Sequence[int], jobs: int) -> Transformation | None:
    """Return the change of the rotary order that makes the most rows equal, or None if rows or elements differ."""
    if sides.axis or (before[0] != after[0] and before[-1] != after[-1]):  # both orders keep the first and last row
        return None
    fewest = max(1, int(_MAX_LOST_SHARE * len(after))) + 1
    best: tuple[int, RowOrder, list[tuple[int, int]]] | None = None
    for heads, order, row_pairs in _list_rotary_orders(len(after)):
        wrong_pairs = [pair for pair in row_pairs if before[pair[0]] != after[pair[1]]]
        if len(wrong_pairs) < fewest:
            best, fewest = (heads, order, wrong_pairs), len(wrong_pairs)
    if best is None:
        return None
    heads, order, wrong_pairs = best
    elements, exceptions = math.prod(sides.after.shape), _count_exceptions(sides, wrong_pairs, jobs)
    is_few = exceptions <= max(1, MAX_EXCEPTIONS * elements)
    if not is_few or not is_evident(sides.after, sides.name, elements, exceptions, 2 * len(after)):
        return None
    rounding = name_rounding(sides.before.dtype, sides.after.dtype)
    kind = TransformationKind.REORDERED
    return Transformation(kind, elements, exceptions, rounding=rounding, order=order, heads=heads)


def _list_rotary_orders(count: int) -> Iterator[tuple[int, RowOrder, list[tuple[int, int]]]]:
    """Yield the number of heads, the new order, and pairs of the old and the new place of each row."""
    for size in range(_MIN_HEAD, min(_MAX_HEAD, count) + 1, 2):
        if count % size == 0:
            half = size // 2
            # The rows of interleaved heads, by their places in heads of rotated halves.
            places = [head + part * half + n for head in range(0, count, size) for n in range(half) for part in (0, 1)]
            yield count // size, RowOrder.INTERLEAVED, list(zip(places, range(count), strict=True))
            yield count // size, RowOrder.HALVES, list(zip(range(count), places, strict=True))


def _compare_rows(sides: _Sides, before: Sequence[int], after: Sequence[int], jobs: int) -> Transformation | None:
    """Return the permutation if nine in ten rows are equal. If many other rows differ, all of their elements count."""
    if len(sides.after.shape) < 2 or min(sides.after.shape[:2]) < 2:
        return None
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
    elements = math.prod(sides.after.shape)
    exceptions = math.prod(sides.after.shape[1:]) * len(unmatched_after)
    if len(unmatched_after) <= _MAX_COMPARED:
        unmatched_before = [n for numbers in places.values() for n in numbers]
        exceptions = _count_exceptions(sides, [(old, new) for new in unmatched_after for old in unmatched_before], jobs)
    # Bits for the choice of an order among all orders of the rows.
    ways = math.lgamma(len(after) + 1) / math.log(2)
    if count_bits(sides.after, sides.name, elements, exceptions) < MIN_BITS + ways:
        return None
    return Transformation(
        TransformationKind.PERMUTED,
        elements,
        exceptions,
        rounding=name_rounding(sides.before.dtype, sides.after.dtype),
        axis=sides.axis,
        rows=len(unmatched_after),
        first_rows=tuple(unmatched_after[:MAX_LISTED_ROWS]),
    )


def _count_exceptions(sides: _Sides, row_pairs: Sequence[tuple[int, int]], jobs: int) -> int:
    """Pair each new row with the most similar old row of `row_pairs`. Return the number of differing elements."""
    tasks = [
        CheckTask(sides.name, Operation.COPY, select(sides.before, old), select(sides.after, new))
        for old, new in row_pairs
    ]
    results = check_elements(tasks, jobs=jobs)
    counts = sorted(
        (result.exceptions if isinstance(result, CheckResult) else math.prod(sides.after.shape[1:]), row_pair)
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
