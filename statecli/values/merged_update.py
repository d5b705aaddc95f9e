"""Check element by element whether a new weight is the old weight plus a low-rank update."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from statecli.core.dtypes import SPACING
from statecli.core.model_state import TensorData
from statecli.values.data_task import DataTask
from statecli.values.elements import Array
from statecli.values.read import iter_row_blocks, read_all_values

#: Maximum residual of a fitting factor, relative to the norm of the change.
_MAX_RESIDUAL = 0.05


class MergeResult(msgspec.Struct, frozen=True, gc=False):
    """Difference between the new weight and the old weight plus the update.

    Attributes:
        elements: Number of checked elements.
        exceptions: Number of elements that differ by more than rounding.
        factor: Factor of the update.
        max_abs: Largest difference among elements that are not exceptions.
        fitting_factor: If there are exceptions, another factor that explains the change, or None.
    """

    elements: int
    exceptions: int
    factor: float
    max_abs: float
    fitting_factor: float | None = None


class MergeTask(DataTask, frozen=True, gc=False):
    """Check whether after [rows, columns] is before + factor * left [rows, rank] @ right [rank, columns], rounded.

    All four tensors have strides. If `factor` is None, the best factor is used. The result is None if the update has a
    value that is not finite.
    """

    before: TensorData
    after: TensorData
    left: TensorData
    right: TensorData
    factor: float | None = None

    def compute(self) -> MergeResult | None:
        """Return how the new weight differs from the old weight plus the update, or None for a nonfinite update."""
        with np.errstate(all="ignore"):
            left, right = (
                read_all_values(data, self.name).astype(np.float64).reshape(data.shape)
                for data in (self.left, self.right)
            )
            if not (np.isfinite(left).all() and np.isfinite(right).all()):
                return None
            factor = _fit_factor(self, left, right) if self.factor is None else self.factor
            if factor is None:
                return MergeResult(math.prod(self.after.shape), math.prod(self.after.shape), 0.0, 0.0)
            return _check(self, left, right, factor)


def _check(task: MergeTask, left: Array, right: Array, factor: float) -> MergeResult:
    relative, smallest = SPACING[task.after.dtype]
    of_update = max(relative, *(SPACING[data.dtype][0] for data in (task.left, task.right)))
    rank = left.shape[1]
    exceptions, largest = 0, 0.0
    for start, stop, before, after in iter_row_blocks(task.before, task.after, task.name):
        update = factor * (left[start:stop] @ right)
        # `before`, the update and the sum are rounded to the dtype of `after`; products are summed in float32.
        sum_error = abs(factor) * rank * 2.0**-23 * (np.abs(left[start:stop]) @ np.abs(right))
        bound = relative / 2 * (np.abs(before) + np.abs(after)) + of_update * np.abs(update) + sum_error + smallest
        difference = np.abs(after - before - update)
        is_near = np.isfinite(difference) & (difference <= bound)
        is_explained = is_near | ((after == before) & np.isinf(before)) | (np.isnan(after) & np.isnan(before))
        exceptions += int(np.count_nonzero(~is_explained))
        largest = max(largest, float(np.max(difference, initial=0.0, where=is_near)))
    elements = math.prod(task.after.shape)
    fitted_factor = _fit_factor(task, left, right) if exceptions and task.factor is not None else None
    return MergeResult(elements, exceptions, factor, largest, None if fitted_factor == factor else fitted_factor)


def _fit_factor(task: MergeTask, left: Array, right: Array) -> float | None:
    """Return the factor of the update by least squares, or None if no factor explains the change.

    Prefers a factor alpha / rank or alpha / sqrt(rank) with a whole alpha, because rounding shifts the best factor.
    """
    products = squares = change_squares = 0.0
    for start, stop, before, after in iter_row_blocks(task.before, task.after, task.name):
        update, change = left[start:stop] @ right, after - before
        products += float(np.vdot(update, change))
        squares += float(np.vdot(update, update))
        change_squares += float(np.vdot(change, change))
    if not squares:
        return 0.0
    if (
        not (math.isfinite(products) and math.isfinite(change_squares))
        or not change_squares
        or change_squares - products * (products / squares) > _MAX_RESIDUAL**2 * change_squares
    ):
        return None
    factor, rank = products / squares, left.shape[1]
    for scale in (rank, math.sqrt(rank)):
        rounded_factor = round(factor * scale) / scale
        if abs(rounded_factor - factor) < _MAX_RESIDUAL / 10 * abs(factor):
            return rounded_factor
    return factor
