"""Measure the error of a quantized weight after dequantizing, relative to the original weight."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec.structs import replace

from statecli.core.dtypes import contiguous_strides
from statecli.core.model_state import TensorData
from statecli.core.quantized_layouts import QuantizedPart
from statecli.values.data_task import DataTask
from statecli.values.dequantize import DequantizeRule, open_rows
from statecli.values.element_checks import round_to
from statecli.values.ranges import resolve_data
from statecli.values.read import ROW_BLOCK_ELEMENTS, read_rows

#: Limits for factors of input channels: minimum spread relative to their mean, and maximum median. A wrong scale of the
#: whole tensor has no spread or a median far from 1; AWQ and SmoothQuant keep their factors around 1.
_MIN_FACTOR_SPREAD, _MAX_FACTOR_MEDIAN = 0.1, 4.0


class StoredPart(msgspec.Struct, frozen=True):
    """One of the tensors that store a quantized weight, with its role."""

    part: QuantizedPart
    data: TensorData


class QuantizedError(msgspec.Struct, frozen=True, gc=False):
    """Error of a dequantized weight Q relative to the original weight W, in L2 norms.

    Attributes:
        relative: ‖W - Q‖ / ‖W‖.
        by_channel: The same after Q is multiplied by the best factor for each input channel, which minimizes the error:
            AWQ and SmoothQuant move such factors into the layer before. Such factors are positive and differ by
            channel; otherwise `by_channel` is `relative`.
        changed: Number of elements that differ after rounding Q to the dtype of W.
    """

    relative: float
    by_channel: float
    changed: int


class QuantizedTask(DataTask, frozen=True, gc=False):
    """Compute ‖W - Q‖ / ‖W‖ of a weight W [out, in] and its dequantized codes Q.

    The result is None if W is zero or a value is not finite.
    """

    weight: TensorData
    rule: DequantizeRule
    parts: tuple[StoredPart, ...]

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """Tensors of the task."""
        return self.weight, *(part.data for part in self.parts)

    def compute(self) -> QuantizedError | None:
        """Return the error of the weight, or None if W is zero or a value is not finite."""
        height, width = self.rule.shape
        products, squares, weight_squares = np.zeros((3, width))
        error, changed_count = 0.0, 0
        step = max(1, ROW_BLOCK_ELEMENTS // width)
        dequantize_rows = open_rows(self.rule, {part.part: part.data for part in self.parts}, self.name)
        weight = resolve_data(self.weight, self.name)
        weight = replace(weight, strides=weight.strides or contiguous_strides(weight.shape))
        for start in range(0, height, step):
            stop = min(start + step, height)
            weight_rows = read_rows(weight, self.name, start, stop).astype(np.float64)
            with np.errstate(all="ignore"):
                codes = dequantize_rows(start, stop)
                difference = weight_rows - codes
                changed_count += int(np.count_nonzero(round_to(codes, self.weight.dtype) != weight_rows))
                error += float(np.einsum("ij,ij->", difference, difference))
                products += np.einsum("ij,ij->j", weight_rows, codes)
                squares += np.einsum("ij,ij->j", codes, codes)
                weight_squares += np.einsum("ij,ij->j", weight_rows, weight_rows)
        with np.errstate(all="ignore"):
            factors = np.where(squares > 0, products / squares, 1.0)
            explained_squares = np.where(squares > 0, products**2 / squares, 0.0)
            unexplained_sum = float(np.sum(np.maximum(weight_squares - explained_squares, 0.0)))
            total = float(weight_squares.sum())
        if not total or not math.isfinite(error / total) or not math.isfinite(unexplained_sum):
            return None
        relative = math.sqrt(error / total)
        is_centred = 1 / _MAX_FACTOR_MEDIAN < float(np.median(factors)) < _MAX_FACTOR_MEDIAN
        are_factors = is_centred and factors.min() > 0 and factors.std() > _MIN_FACTOR_SPREAD * factors.mean()
        return QuantizedError(relative, math.sqrt(unexplained_sum / total) if are_factors else relative, changed_count)
