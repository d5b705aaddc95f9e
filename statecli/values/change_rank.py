"""Estimate the numerical rank of the change of a matrix: how many of its directions are more than rounding.

The singular values of a sketch, change @ random [columns, 136], are compared with those that the rounding of the values
after would have. Halko, Martinsson, Tropp: Finding structure with randomness (2011), section 4; the norm of a product
with a Gaussian matrix is bounded as by Chevet's inequality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from statecli.core.dtypes import SPACING
from statecli.core.errors import StateError
from statecli.core.float_mode import with_denormals
from statecli.core.model_state import TensorData
from statecli.values.data_task import DataTask, run_derived, run_each
from statecli.values.delta import MAX_RANK
from statecli.values.elements import Array
from statecli.values.read import read_rows

#: Columns of the sketch: a few more than the ranks that it has to show.
_SKETCH = MAX_RANK + 8
#: Columns of a matrix, at most: the random matrix takes 70 MB.
MAX_COLUMNS = 1 << 16
#: Elements that are read at a time: five arrays of float64 take 20 MB.
_BLOCK_ELEMENTS = 1 << 19
#: Roundings of the change, in spacings, before it is added: a product of matrices sums rounded terms.
_ROUNDINGS_OF_CHANGE = 4
#: Factor by which a singular value is above the bound of rounding.
_MARGIN = 1.25


class RankTask(DataTask, frozen=True, gc=False):
    """Estimate the rank of after - before, two matrices of one shape, with strides."""

    before: TensorData
    after: TensorData

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """All tensors of the task."""
        return self.before, self.after


def estimate_ranks(tasks: Sequence[RankTask], *, jobs: int = 0) -> list[int | StateError | None]:
    """Return the rank of each change, at most 128, in order; None if a value is not finite."""
    return run_derived(rank_batch, tasks, jobs)


@with_denormals
def rank_batch(_: None, tasks: Sequence[RankTask]) -> list[int | StateError | None]:
    """Return the result or the error of each task of a batch."""
    return run_each(_estimate_or_error, tasks)


def _estimate_or_error(task: RankTask) -> int | StateError | None:
    height, width = task.after.shape
    is_sketch = width > _SKETCH
    random = np.random.default_rng(0).standard_normal((width, _SKETCH), np.float32) if is_sketch else None
    relative, smallest = SPACING[task.after.dtype]
    triangle: Array = np.zeros((0, _SKETCH if is_sketch else width))
    largest_row, by_column = 0.0, np.zeros(width)
    step = max(1, _BLOCK_ELEMENTS // width)
    try:
        for start in range(0, height, step):
            stop = min(start + step, height)
            with np.errstate(all="ignore"):
                before, after = (
                    read_rows(data, task.name, start, stop).astype(np.float64) for data in (task.before, task.after)
                )
                change = after - before
            if not np.isfinite(change).all():
                return None
            # Rounding is uniform between two neighbours, so that its variance is spacing² / 12. A computed change has
            # a few roundings of its own.
            spacing = relative * (np.abs(after) + _ROUNDINGS_OF_CHANGE * np.abs(change)) + smallest
            variance = spacing**2 / 12
            largest_row = max(largest_row, float(variance.sum(axis=1).max()))
            by_column += variance.sum(axis=0)
            block = change if random is None else change @ random
            # The singular values of all rows are those of the triangle of their QR decomposition.
            triangle = np.asarray(np.linalg.qr(np.concatenate([triangle, block]), mode="r"))
    except StateError as error:
        return error
    values = np.linalg.svd(triangle, compute_uv=False)
    norm = math.sqrt(largest_row) + math.sqrt(float(by_column.max()))
    bound = norm if random is None else norm * math.sqrt(_SKETCH) + math.sqrt(float(by_column.sum()))
    precision = float(values[0]) * max(height, width) * np.finfo(np.float64).eps
    return min(int(np.count_nonzero(values > max(_MARGIN * bound, precision))), MAX_RANK)
