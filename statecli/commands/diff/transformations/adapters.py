"""Recognise a LoRA adapter made for the old weights, and measure its update of each weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from statecli.commands.diff.result import Change, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.lora import LoraUpdate, parse_adapter
from statecli.commands.diff.transformations.views import get_data
from statecli.core.errors import StateError
from statecli.core.model_state import Scalar, TensorData, TensorInfo
from statecli.values.data_task import compute_derived
from statecli.values.low_rank import LowRankTask


def find_adapters(
    changes: Sequence[Change], all_changes: Sequence[Change], settings: Mapping[str, Scalar], *, jobs: int
) -> dict[int, Transformation]:
    """Return the updates of a LoRA adapter (B·A), keyed by the index of the tensor B in `changes`."""
    added_rows = [
        (n, row) for n, change in enumerate(changes) if change.status is Status.ADDED and (row := change.after)
    ]
    updates = parse_adapter((row for _, row in added_rows), settings).updates
    if not updates:
        return {}
    number_of = {row.fqn: n for n, row in added_rows}
    weights = {row.fqn: row for change in all_changes if (row := change.before) is not None}
    measurable_updates = [
        (weight, update, task)
        for update in updates
        if (weight := weights.get(f"{update.module}.weight")) is not None
        if (task := _build_task(weight, update)) is not None
    ]
    results = compute_derived([task for *_, task in measurable_updates], jobs)
    adapters: dict[int, Transformation] = {}
    for (weight, update, task), relative in zip(measurable_updates, results, strict=True):
        if not isinstance(relative, StateError):
            scale = 1.0 if update.scale is None else update.scale
            adapters[number_of[update.b.fqn]] = Transformation(
                TransformationKind.ADAPTER,
                math.prod(task.weight.shape),
                sources=(weight.fqn, update.a.fqn),
                factor=update.scale,
                alpha=update.alpha,
                rank=task.a.shape[0],
                relative_l2=None if relative is None else relative * scale,
            )
    return adapters


def _build_task(weight: TensorInfo, update: LoraUpdate) -> LowRankTask | None:
    data: list[TensorData] = [
        row_data for row in (weight, update.a, update.b) if (row_data := get_data(row)) is not None
    ]
    if len(data) < 3 or any(len(side.shape) != 2 or "float" not in side.dtype for side in data):
        return None
    shape, (rank, inner), (outer, width) = (side.shape for side in data)
    return LowRankTask(weight.fqn, *data) if rank == width and shape in ((outer, inner), (inner, outer)) else None
