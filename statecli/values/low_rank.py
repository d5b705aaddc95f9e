"""Measure an update of low rank against the weight that it is added to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from statecli.core.errors import StateError
from statecli.core.float_mode import with_denormals
from statecli.core.model_state import TensorData
from statecli.values.data_task import DataTask, run_derived, run_each
from statecli.values.elements import Array
from statecli.values.read import open_view, read_all_values, read_values


class LowRankTask(DataTask, frozen=True, gc=False):
    """Compute ‖B A‖ / ‖W‖ of a weight W [out, in], A [rank, in] and B [out, rank]; Frobenius norms."""

    weight: TensorData
    a: TensorData
    b: TensorData

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """All tensors of the task."""
        return self.weight, self.a, self.b


def measure_updates(tasks: Sequence[LowRankTask], *, jobs: int = 0) -> list[float | StateError | None]:
    """Return ‖B A‖ / ‖W‖ of each task, in order; None if W is zero or a value is not finite."""
    return run_derived(low_rank_batch, tasks, jobs)


@with_denormals
def low_rank_batch(_: None, tasks: Sequence[LowRankTask]) -> list[float | StateError | None]:
    """Return the result or the error of each task of a batch."""
    return run_each(_measure_or_error, tasks)


def _measure_or_error(task: LowRankTask) -> float | StateError | None:
    try:
        a = read_all_values(task.a, task.name).astype(np.float64).reshape(task.a.shape)
        b = read_all_values(task.b, task.name).astype(np.float64).reshape(task.b.shape)
        squares = _sum_squares(task.weight, task.name)
    except StateError as error:
        return error
    with np.errstate(all="ignore"):
        # ‖B A‖² is the sum of (Bᵀ B) * (A Aᵀ), two matrices of rank x rank.
        update: Array = np.sum((b.T @ b) * (a @ a.T))
        relative = float(np.sqrt(max(float(update), 0.0) / squares)) if squares else math.nan
    return relative if math.isfinite(relative) else None


def _sum_squares(data: TensorData, name: str) -> float:
    total = 0.0
    with open_view(data, name) as view:
        for chunk in read_values(view):
            values = chunk.astype(np.float64)
            total += float(np.dot(values, values))
    return total
