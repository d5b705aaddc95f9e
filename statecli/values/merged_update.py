"""Check on every element whether a weight is the weight before with an update of low rank added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from statecli.core.dtypes import SPACING
from statecli.core.errors import StateError
from statecli.core.float_mode import with_denormals
from statecli.core.model_state import TensorData
from statecli.values.data_task import DataTask, run_derived, run_each
from statecli.values.elements import Array
from statecli.values.read import read_all_values, read_rows

#: Elements that are checked at a time: ten arrays of float64 take 40 MB.
_BLOCK_ELEMENTS = 1 << 19
#: Part of a change, by its norm, that another factor may leave and still fit.
_MAX_RESIDUAL = 0.05


class MergeTask(DataTask, frozen=True, gc=False):
    """Check whether after [rows, columns] is before + factor * left [rows, rank] @ right [rank, columns], rounded.

    All four have strides. `factor` is None if it is not known: then the best one is used.
    """

    before: TensorData
    after: TensorData
    left: TensorData
    right: TensorData
    factor: float | None = None

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """All four tensors."""
        return self.before, self.after, self.left, self.right


class MergeResult(msgspec.Struct, frozen=True, gc=False):
    """How a weight differs from the weight before with the update.

    Attributes:
        elements: Elements checked.
        exceptions: Elements that differ by more than rounding.
        factor: The factor of the update.
        max_abs: Largest difference of the elements that are not exceptions.
        fitting_factor: With exceptions, another factor that explains the change, or None.
    """

    elements: int
    exceptions: int
    factor: float
    max_abs: float
    fitting_factor: float | None = None


def check_merges(tasks: Sequence[MergeTask], *, jobs: int = 0) -> list[MergeResult | StateError | None]:
    """Return the result of each task, in order; None if the update has a value that is not finite."""
    return run_derived(merge_batch, tasks, jobs)


@with_denormals
def merge_batch(_: None, tasks: Sequence[MergeTask]) -> list[MergeResult | StateError | None]:
    """Return the result or the error of each task of a batch."""
    return run_each(_check_or_error, tasks)


def _check_or_error(task: MergeTask) -> MergeResult | StateError | None:
    try:
        with np.errstate(all="ignore"):
            left, right = (
                read_all_values(data, task.name).astype(np.float64).reshape(data.shape)
                for data in (task.left, task.right)
            )
            if not (np.isfinite(left).all() and np.isfinite(right).all()):
                return None
            factor = _fit_factor(task, left, right) if task.factor is None else task.factor
            if factor is None:
                return MergeResult(math.prod(task.after.shape), math.prod(task.after.shape), 0.0, 0.0)
            return _check(task, left, right, factor)
    except StateError as error:
        return error


def _check(task: MergeTask, left: Array, right: Array, factor: float) -> MergeResult:
    relative, smallest = SPACING[task.after.dtype]
    of_update = max(relative, *(SPACING[data.dtype][0] for data in (task.left, task.right)))
    rank = left.shape[1]
    exceptions, largest = 0, 0.0
    for start, stop, before, after in _read_blocks(task):
        update = factor * (left[start:stop] @ right)
        # Before, the update and the sum are rounded to the dtype of after; the products are summed in float32.
        sum_error = abs(factor) * rank * 2.0**-23 * (np.abs(left[start:stop]) @ np.abs(right))
        bound = relative / 2 * (np.abs(before) + np.abs(after)) + of_update * np.abs(update) + sum_error + smallest
        difference = np.abs(after - before - update)
        is_near = np.isfinite(difference) & (difference <= bound)
        fits = is_near | ((after == before) & np.isinf(before)) | (np.isnan(after) & np.isnan(before))
        exceptions += int(np.count_nonzero(~fits))
        largest = max(largest, float(np.max(difference, initial=0.0, where=is_near)))
    elements = math.prod(task.after.shape)
    fitting = _fit_factor(task, left, right) if exceptions and task.factor is not None else None
    return MergeResult(elements, exceptions, factor, largest, None if fitting == factor else fitting)


def _fit_factor(task: MergeTask, left: Array, right: Array) -> float | None:
    """Return the factor by least squares; None if no factor explains the change.

    A factor alpha / rank or alpha / sqrt(rank) with a whole alpha is preferred, because rounding moves the best one.
    """
    products = squares = own = 0.0
    for start, stop, before, after in _read_blocks(task):
        update, change = left[start:stop] @ right, after - before
        products += float(np.vdot(update, change))
        squares += float(np.vdot(update, update))
        own += float(np.vdot(change, change))
    if not squares:
        return 0.0
    if not math.isfinite(products) or not own or own - products**2 / squares > _MAX_RESIDUAL**2 * own:
        return None
    factor, rank = products / squares, left.shape[1]
    for scale in (rank, math.sqrt(rank)):
        near = round(factor * scale) / scale
        if abs(near - factor) < _MAX_RESIDUAL / 10 * abs(factor):
            return near
    return factor


def _read_blocks(task: MergeTask) -> Iterable[tuple[int, int, Array, Array]]:
    height, width = task.after.shape
    step = max(1, _BLOCK_ELEMENTS // max(width, 1))
    for start in range(0, height, step):
        stop = min(start + step, height)
        before, after = (
            read_rows(data, task.name, start, stop).astype(np.float64) for data in (task.before, task.after)
        )
        yield start, stop, before, after
