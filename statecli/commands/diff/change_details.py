"""Add explanations to the changed tensors: transformations, a merged adapter, ranks and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from statecli import values
from statecli.commands.diff import transformations
from statecli.commands.diff.near_zero import find_near_zero
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Broken, Change, Field, Histogram, Inconclusive, Status
from statecli.commands.diff.transformations.ordinary_training import is_training
from statecli.commands.diff.value_comparison import describe_unknown
from statecli.core.dtypes import SPACING
from statecli.core.model_state import Kind, ModelState
from statecli.values.delta import Delta
from statecli.workers import pool

if TYPE_CHECKING:
    from statecli.values.change_rank import RankTask


class CheckedChanges(msgspec.Struct, frozen=True):
    """Changes that were checked, and the pairs of tensors that could not be checked."""

    changes: list[Change]
    broken: list[Broken]


def check_merge(changes: list[Change], before: ModelState, adapter: ModelState | None, jobs: int) -> CheckedChanges:
    """Mark changes that merging `adapter` explains. Return all changes, and the pairs that could not be checked."""
    if adapter is None or pool.is_partial():
        return CheckedChanges(changes, [])
    merge = transformations.merges.check_adapter(changes, before, adapter, jobs=jobs)
    for n, transformation in merge.transformations.items():
        changes[n] = replace(changes[n], transformation=transformation)
    return CheckedChanges(changes, merge.broken_pairs)


def explain_changes(
    changes: list[Change], request: Request, sections: Mapping[str, str], settings: Mapping[str, Any]
) -> list[Change]:
    """Add the recognised transformation to each change. `settings` are those of the new checkpoint."""
    are_identical = all(change.status is Status.IDENTICAL for change in changes)
    if are_identical or (not pool.is_distributed() and is_training(changes)):
        return changes
    return transformations.find.find_transformations(
        changes,
        sections,
        settings,
        expects_casts=request.cast,
        jobs=request.jobs,
    )


def estimate_ranks(changes: list[Change], request: Request) -> list[Change]:
    """Add the rank of the difference to each change, if requested. The update of an adapter has a low rank."""
    if not request.ranks or pool.is_partial() or all(change.values is None for change in changes):
        return changes
    tasks = {n: task for n, change in enumerate(changes) if (task := _build_rank_task(change)) is not None}
    ranks = values.data_task.compute_derived(list(tasks.values()), request.jobs)
    for n, rank in zip(tasks, ranks, strict=True):
        if isinstance(rank, int) and (delta := changes[n].values) is not None:
            changes[n] = replace(changes[n], values=replace(delta, rank=rank))
    return changes


def _build_rank_task(change: Change) -> RankTask | None:
    """Return the task that computes the rank of a float matrix's difference, or None for other tensors."""
    views = transformations.views
    before, after = views.get_data(change.before), views.get_data(change.after)
    if change.values is None or change.values.l2 is None or before is None or after is None:
        return None
    if before.shape != after.shape:
        return None
    old, new = (views.flatten(views.locate(data, change.fqn)) for data in (before, after))
    if old is None or new is None or min(new.shape) < 2 or new.shape[1] > values.change_rank.MAX_COLUMNS:
        return None
    return values.change_rank.RankTask(change.fqn, old, new) if old.dtype in SPACING and new.dtype in SPACING else None


def settle_codes(changes: Sequence[Change], targets: tuple[str, str]) -> CheckedChanges:
    """Return the changes, and an error for each quantized weight whose values could not be compared."""
    settled: list[Change] = []
    undecided: list[Broken] = []
    for change in changes:
        if change.not_compared is None or Field.VALUES not in change.fields:
            settled.append(change)
        elif change.transformation is not None:
            settled.append(replace(change, not_compared=None))
        else:
            assert change.after is not None  # noqa: S101 - both sides have values
            message = describe_unknown(targets, change.after, change.not_compared)
            undecided.append(Inconclusive(change.fqn, change.section, message))
            fields = tuple(field for field in change.fields if field is not Field.VALUES)
            if fields:
                settled.append(replace(change, fields=fields))
    return CheckedChanges(settled, undecided)


def compute_difference_histograms(changes: Sequence[Change], count: int) -> tuple[Histogram, ...]:
    """Return the histograms of the `count` most changed tensors."""
    if not count:
        return ()
    # Codes are not the values of a weight, so their difference has no largest value.
    spread = (
        c for c in changes if (d := c.values) and d.max_abs is not None and c.before and c.after and d.elements > 1
    )
    # Parameters come first, because counters and moments change most. Parameters that start near zero come last of the
    # parameters.
    largest_changes = sorted(spread, key=partial(_order_change, find_near_zero(changes)), reverse=True)[:count]
    pairs = [values.pair_plan.Pair(c.before, c.after) for c in largest_changes if c.before and c.after]
    spreads = values.histogram.compute_histograms(pairs, [c.values for c in largest_changes if c.values])
    return tuple(Histogram(c.fqn, c.section, *bins) for c, bins in zip(largest_changes, spreads, strict=True) if bins)


def _order_change(near_zero: frozenset[int], change: Change) -> tuple[bool, bool, float, float]:
    """Return a key that ranks changes: parameters before other tensors, then by the relative change.

    Tensors that were zero before, as most biases, come last: their relative change is undefined.
    """
    delta = change.values or Delta()
    is_parameter = change.kind is Kind.PARAMETER
    return is_parameter, id(change) not in near_zero, delta.relative_l2 or 0.0, delta.max_abs or 0.0
