"""Recognise quantized weights with their scales, and measure the error after dequantizing.

fp8, blocks     weight * weight_scale_inv, a scale for 128 x 128 (DeepSeek-V3, transformers' finegrained_fp8)
fp8, int8       weight * weight_scale, one scale, or one a row (compressed-tensors, torchao exports)
int8, by row    weight * SCB / 127 (bitsandbytes LLM.int8())
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from statecli.commands.diff.result import Change, Field, Transformation, TransformationKind
from statecli.commands.diff.transformations.views import get_data
from statecli.core.model_state import TensorInfo
from statecli.values.quantized_error import QuantizedTask, measure_errors

#: Types of codes. A larger error than this is not the quantization of the weight before.
_CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
_MAX_ERROR = 0.25


class _Scheme(NamedTuple):
    """Name of the scales in place of `weight`, the divisor of a scale, and the sizes of square blocks to try."""

    scales: str
    divisor: float = 1.0
    block: int | None = None


_SCHEMES = (_Scheme("weight_scale_inv", block=128), _Scheme("weight_scale"), _Scheme("SCB", 127.0))


def find_quantized(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the quantized weights by the number of the change, each with its error relative to the weight before."""
    candidates = [n for n, change in enumerate(changes) if Field.DTYPE in change.fields and _has_codes(change)]
    if not candidates:
        return {}
    rows = {(row.section, row.fqn): row for change in changes if (row := change.after) is not None}
    tasks: dict[int, tuple[_Scheme, QuantizedTask]] = {}
    for n in candidates:
        task_of_change = _find_task(changes[n], rows)
        if task_of_change is not None:
            tasks[n] = task_of_change
    errors = measure_errors([task for _, task in tasks.values()], jobs=jobs)
    return {
        n: Transformation(
            TransformationKind.QUANTIZED,
            math.prod(task.codes.shape),
            sources=(scheme.scales,),
            blocks=task.block,
            relative_l2=error,
        )
        for (n, (scheme, task)), error in zip(tasks.items(), errors, strict=True)
        if isinstance(error, float) and error <= _MAX_ERROR
    }


def _has_codes(change: Change) -> bool:
    before, after = change.before, change.after
    return before is not None and after is not None and after.dtype in _CODES and "float" in before.dtype


def _find_task(change: Change, rows: Mapping[tuple[str, str], TensorInfo]) -> tuple[_Scheme, QuantizedTask] | None:
    module, _, name = change.fqn.rpartition(".")
    weight, codes = get_data(change.before), get_data(change.after)
    if name != "weight" or weight is None or codes is None or len(codes.shape) != 2 or weight.shape != codes.shape:
        return None
    for scheme in _SCHEMES:
        scales = get_data(rows.get((change.section, f"{module}.{scheme.scales}")))
        block = _find_block(codes.shape, scales.shape, scheme) if scales is not None else None
        if scales is not None and block is not None:
            return scheme, QuantizedTask(change.fqn, weight, codes, scales, block, scheme.divisor)
    return None


def _find_block(codes: tuple[int, ...], scales: tuple[int, ...], scheme: _Scheme) -> tuple[int, int] | None:
    """Return the shape of the block of a scale: the whole, a row, or a square; None for other shapes."""
    rows, columns = codes
    if math.prod(scales) == 1:
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    size = scheme.block
    if size is not None and scales == (-(-rows // size), -(-columns // size)):
        return size, size
    return None
