"""Recognise projections whose rows in each head were reordered between the two forms of rotary embeddings.

The original LLaMA rotates neighbouring rows of q and k (interleaved). transformers rotates a row of the first half of a
head with a row of the second half (transformers, models/llama/convert_llama_weights_to_hf.py, `permute`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecli.commands.diff.result import Change, RowOrder, Transformation, TransformationKind
from statecli.commands.diff.transformations.alignment import compute_digests_of_pairs
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.ordinary_training import MAX_EXCEPTIONS, was_replaced
from statecli.commands.diff.transformations.views import (
    get_data,
    is_cheap_to_sample,
    locate,
    name_rounding,
    narrow,
    permute,
    split_rows,
)
from statecli.core.model_state import TensorData
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_copy, check_elements

#: Smallest and largest number of rows of a head. With four rows, the permutation and its inverse are the same.
_MIN_HEAD, _MAX_HEAD = 6, 1024
#: Smallest fraction of rows that must be at their place in the other order.
_MIN_ROW_SHARE = 0.5


def find_reordered_heads(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the tensors with reordered rows in each head, keyed by index in `changes`."""
    sides: dict[int, tuple[TensorData, TensorData]] = {}
    for n, change in enumerate(changes):
        before, after = get_data(change.before), get_data(change.after)
        if before is None or after is None or before.shape != after.shape or not was_replaced(change):
            continue
        if before.shape and before.shape[0] >= 2 * _MIN_HEAD and can_copy(before.dtype, after.dtype):
            sides[n] = locate(before, change.fqn), locate(after, change.fqn)
    sides = _select_with_ends(changes, sides, jobs)
    digests = compute_digests_of_pairs({n: (changes[n].fqn, *pair) for n, pair in sides.items()}, jobs=jobs)
    checks = [
        (n, *best, _build_task(changes[n].fqn, sides[n], *best))
        for n, row_digests in digests.items()
        for best in _find_orders(*row_digests)
    ]
    reordered: dict[int, Transformation] = {}
    results = check_elements([task for *_, task in checks], jobs=jobs)
    for (n, heads, order, task), result in zip(checks, results, strict=True):
        if not isinstance(result, CheckResult) or result.exceptions > max(1, MAX_EXCEPTIONS * result.elements):
            continue
        ways = 2 * task.after.shape[0]
        if is_evident(sides[n][1], task.name, result.elements, result.exceptions, ways):
            reordered[n] = Transformation(
                TransformationKind.REORDERED,
                result.elements,
                result.exceptions,
                rounding=name_rounding(task.before.dtype, task.after.dtype),
                order=order,
                heads=heads,
            )
    return reordered


def _select_with_ends(
    changes: Sequence[Change], sides: dict[int, tuple[TensorData, TensorData]], jobs: int
) -> dict[int, tuple[TensorData, TensorData]]:
    """Select pairs with an equal first or last row, because both row orders keep the first and the last row in place.

    Two rows are read instead of all, but not rows that are costly to read from a remote file.
    """
    cheap = {
        n: pair
        for n, pair in sides.items()
        if all(map(is_cheap_to_sample, filter(None, (changes[n].before, changes[n].after))))
    }
    tasks = [
        CheckTask(changes[n].fqn, Operation.COPY, narrow(pair[0], 0, row, 1), narrow(pair[1], 0, row, 1))
        for n, pair in cheap.items()
        for row in (0, pair[0].shape[0] - 1)
    ]
    results = check_elements(tasks, jobs=jobs)
    are_equal = [isinstance(result, CheckResult) and not result.exceptions for result in results]
    ends = zip(cheap.items(), are_equal[::2], are_equal[1::2], strict=True)
    return {n: pair for (n, pair), first, last in ends if first or last}


def _find_orders(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, RowOrder]]:
    """Yield the number of heads and the row order that make the most rows equal, if at least half become equal."""
    best = 0
    best_order: tuple[int, RowOrder] | None = None
    for size in range(_MIN_HEAD, min(_MAX_HEAD, len(old)) + 1, 2):
        if len(old) % size:
            continue
        half_size = size // 2
        places = [
            head + part * half_size + n
            for head in range(0, len(old), size)
            for n in range(half_size)
            for part in (0, 1)
        ]
        for order, source, target in ((RowOrder.INTERLEAVED, old, new), (RowOrder.HALVES, new, old)):
            equal_count = sum(source[place] == row for place, row in zip(places, target, strict=True))
            if equal_count > best:
                best, best_order = equal_count, (len(old) // size, order)
    if best_order is not None and best >= _MIN_ROW_SHARE * len(old):
        yield best_order


def _build_task(name: str, pair: tuple[TensorData, TensorData], heads: int, order: RowOrder) -> CheckTask:
    """Return a check that compares both tensors in the same layout: [heads, rows of a half, halves, other axes]."""
    size = pair[0].shape[0] // heads
    views = []
    for data, is_interleaved in zip(pair, (order is RowOrder.HALVES, order is RowOrder.INTERLEAVED), strict=True):
        view = split_rows(data, 2 if is_interleaved else size // 2)
        split_view = split_rows(view, view.shape[0] // heads)
        remaining_axes = range(3, 3 + len(data.shape) - 1)
        views.append(split_view if is_interleaved else permute(split_view, (0, 2, 1, *remaining_axes)))
    return CheckTask(name, Operation.COPY, views[0], views[1])
