"""Measure the error of a quantized weight after its scale is applied, against the weight before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from statecli.core.errors import StateError
from statecli.core.float_mode import with_denormals
from statecli.core.model_state import TensorData
from statecli.values.compare_task import rechunk
from statecli.values.elements import require_element
from statecli.values.ranges import iter_paths, prefetch
from statecli.values.read import open_view, read_all_values, read_values
from statecli.workers import pool


class QuantizedTask(msgspec.Struct, frozen=True, gc=False):
    """Compute ‖W - Q * S‖ / ‖W‖ of a weight W and codes Q [out, in], and scales S of blocks of Q.

    `block` is the shape of a block; `divisor` divides the scales.
    """

    name: str
    weight: TensorData
    codes: TensorData
    scales: TensorData
    block: tuple[int, int]
    divisor: float = 1.0

    @property
    def size(self) -> int:
        """Bytes of the weight and its codes."""
        return sum(math.prod(data.shape) * require_element(data.dtype).size for data in (self.weight, self.codes))

    @property
    def paths(self) -> Iterable[str]:
        """Files of all three."""
        return iter_paths(self.weight, self.codes, self.scales)

    @property
    def identity(self) -> object:
        """The task itself."""
        return self


def measure_errors(tasks: Sequence[QuantizedTask], *, jobs: int = 0) -> list[float | StateError | None]:
    """Return the relative error of each task, in order; None if W is zero or a value is not finite."""
    if not tasks:
        return []
    return pool.run_tasks(quantized_batch, None, tasks, jobs=jobs, absent=None, derived=True)


@with_denormals
def quantized_batch(_: None, tasks: Sequence[QuantizedTask]) -> list[float | StateError | None]:
    """Return the result or the error of each task of a batch."""
    with prefetch(*(data for task in tasks for data in (task.weight, task.codes, task.scales))):
        return [_measure_or_error(task) for task in tasks]


def _measure_or_error(task: QuantizedTask) -> float | StateError | None:
    columns = task.codes.shape[1]
    grid = tuple(-(-size // block) for size, block in zip(task.codes.shape, task.block, strict=True))
    error = squares = 0.0
    at = 0
    try:
        scales = read_all_values(task.scales, task.name).astype(np.float64).reshape(grid) / task.divisor
        with open_view(task.weight, task.name) as weight, open_view(task.codes, task.name) as codes:
            blocks = zip(rechunk(read_values(weight)), rechunk(read_values(codes)), strict=True)
            for wanted, code in blocks:
                place = np.arange(at, at + code.size)
                scale = scales[place // columns // task.block[0], place % columns // task.block[1]]
                with np.errstate(all="ignore"):
                    values = wanted.astype(np.float64)
                    difference = values - code.astype(np.float64) * scale
                    error += float(np.dot(difference, difference))
                    squares += float(np.dot(values, values))
                at += code.size
    except StateError as failure:
        return failure
    relative = math.sqrt(error / squares) if squares and math.isfinite(error / squares) else math.nan
    return relative if math.isfinite(relative) else None
