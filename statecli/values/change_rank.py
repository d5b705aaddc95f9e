"""Estimate the numerical rank of a matrix's change: the number of singular values that rounding cannot explain.

The singular values of a sketch, change @ random [columns, 136], are compared with those that rounding the new values
can cause. Halko, Martinsson, Tropp: Finding structure with randomness (2011), section 4; the norm of a product with a
Gaussian matrix is bounded as by Chevet's inequality.
"""

from __future__ import annotations

import math

import numpy as np

from statecli.core.dtypes import SPACING
from statecli.core.model_state import TensorData
from statecli.values.data_task import DataTask
from statecli.values.delta import MAX_RANK
from statecli.values.elements import MAX_UNSCALED, Array
from statecli.values.read import iter_row_blocks

#: Number of columns of the sketch: slightly more than the largest rank to report.
_SKETCH_COLUMNS = MAX_RANK + 8
#: Maximum number of columns of a matrix: the random matrix then takes 36 MB.
MAX_COLUMNS = 1 << 16
#: Rounding error of a computed change before it is added, in spacings between floats: a matrix product sums rounded
#: terms.
_ROUNDINGS_OF_CHANGE = 4
#: A singular value counts if it exceeds the bound of rounding by at least this factor.
_BOUND_MARGIN = 1.25


class RankTask(DataTask, frozen=True, gc=False):
    """Estimate the rank (at most 128) of after - before, two strided matrices of equal shape.

    The result is None if a value is not finite.
    """

    before: TensorData
    after: TensorData

    def compute(self) -> int | None:
        """Return the estimated rank, or None if a value is not finite."""
        height, width = self.after.shape
        is_sketch = width > _SKETCH_COLUMNS
        random = np.random.default_rng(0).standard_normal((width, _SKETCH_COLUMNS), np.float32) if is_sketch else None
        relative, smallest = SPACING[self.after.dtype]
        triangle: Array = np.zeros((0, _SKETCH_COLUMNS if is_sketch else width))
        largest_row, by_column = 0.0, np.zeros(width)
        exponent = _find_exponent(smallest)
        for rows in iter_row_blocks(self.before, self.after, self.name):
            with np.errstate(all="ignore"):
                change = rows.after - rows.before
            if not np.isfinite(change).all():
                return None
            # A power of two keeps all digits, and squares within float64.
            largest = max(float(np.abs(rows.after).max()), float(np.abs(change).max()), smallest)
            shift = min(0, exponent - _find_exponent(largest))
            exponent -= shift
            triangle, by_column = np.ldexp(triangle, shift), np.ldexp(by_column, 2 * shift)
            largest_row = math.ldexp(largest_row, 2 * shift)
            after, change = np.ldexp(rows.after, -exponent), np.ldexp(change, -exponent)
            # Rounding errors are uniform between two adjacent floats, so their variance is spacing² / 12. A computed
            # change has some roundings of its own.
            spacing = relative * (np.abs(after) + _ROUNDINGS_OF_CHANGE * np.abs(change))
            spacing += math.ldexp(smallest, -exponent)
            variance = spacing**2 / 12
            largest_row = max(largest_row, float(variance.sum(axis=1).max()))
            by_column += variance.sum(axis=0)
            block = change if random is None else change @ random
            # The triangle of the QR decomposition has the same singular values as all rows.
            triangle = np.asarray(np.linalg.qr(np.concatenate([triangle, block]), mode="r"))
        values = np.linalg.svd(triangle, compute_uv=False)
        norm = math.sqrt(largest_row) + math.sqrt(float(by_column.max()))
        bound = norm if random is None else norm * math.sqrt(_SKETCH_COLUMNS) + math.sqrt(float(by_column.sum()))
        precision = float(values[0]) * max(height, width) * np.finfo(np.float64).eps
        return min(int(np.count_nonzero(values > max(_BOUND_MARGIN * bound, precision))), MAX_RANK)


def _find_exponent(size: float) -> int:
    """Return the exponent e with size ≈ 2 ** e, or 0 if the square of `size` fits float64 without scaling."""
    return 0 if 1 / MAX_UNSCALED < size < MAX_UNSCALED else math.frexp(size)[1]
