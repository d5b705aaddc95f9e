"""Estimate the rank of the difference of each changed matrix: an adapter or a pruned update has a low rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from statecli import values
from statecli.commands.diff import transformations
from statecli.commands.diff.result import Change
from statecli.core.dtypes import SPACING

if TYPE_CHECKING:
    from statecli.values.change_rank import RankTask


def estimate_change_ranks(changes: Sequence[Change], *, jobs: int) -> dict[int, int]:
    """Return the ranks by the number of the change; of float matrices with other values, and of kernels as matrices."""
    tasks = {n: task for n, change in enumerate(changes) if (task := _build_task(change)) is not None}
    ranks = zip(tasks, values.data_task.compute_derived(list(tasks.values()), jobs), strict=True)
    return {n: rank for n, rank in ranks if isinstance(rank, int)}


def _build_task(change: Change) -> RankTask | None:
    views = transformations.views
    before, after = views.get_data(change.before), views.get_data(change.after)
    if (
        change.values is None
        or change.values.l2 is None
        or before is None
        or after is None
        or before.shape != after.shape
    ):
        return None
    old, new = (views.flatten(views.locate(data, change.fqn)) for data in (before, after))
    if old is None or new is None or min(new.shape) < 2 or new.shape[1] > values.change_rank.MAX_COLUMNS:
        return None
    return values.change_rank.RankTask(change.fqn, old, new) if old.dtype in SPACING and new.dtype in SPACING else None
