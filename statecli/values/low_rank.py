"""Compute the size of a low-rank update relative to the weight before the update."""

from __future__ import annotations

import math

import numpy as np

from statecli.core.model_state import TensorData
from statecli.values.data_task import DataTask
from statecli.values.read import open_view, read_all_values, read_values


class LowRankTask(DataTask, frozen=True, gc=False):
    """Compute ‖B A‖ / ‖W‖ for a weight W [out, in], A [rank, in] and B [out, rank], with Frobenius norms.

    The result is None if W is zero or a value is not finite.
    """

    weight: TensorData
    a: TensorData
    b: TensorData

    def compute(self) -> float | None:
        """Return ‖B A‖ / ‖W‖, or None if W is zero or a value is not finite."""
        a = read_all_values(self.a, self.name).astype(np.float64).reshape(self.a.shape)
        b = read_all_values(self.b, self.name).astype(np.float64).reshape(self.b.shape)
        squares = _sum_squares(self.weight, self.name)
        with np.errstate(all="ignore"):
            # ‖B A‖² is the sum of (Bᵀ B) * (A Aᵀ), two matrices of rank x rank.
            update = float(np.sum((b.T @ b) * (a @ a.T)))
            relative = float(np.sqrt(max(update, 0.0) / squares)) if squares else math.nan
        return relative if math.isfinite(relative) else None


def _sum_squares(data: TensorData, name: str) -> float:
    total = 0.0
    with open_view(data, name) as view:
        for chunk in read_values(view):
            values = chunk.astype(np.float64)
            total += float(np.dot(values, values))
    return total
