"""Recognise a LoRA adapter of the checkpoint before, and measure its update of each weight.

peft adds scale * B @ A to a weight of [out, in]: A is [rank, in], B is [out, rank], and scale is lora_alpha / rank, or
lora_alpha / sqrt(rank) with `use_rslora` (peft, tuners/lora/layer.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from statecli.commands.diff.result import Change, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.views import get_data
from statecli.core.model_state import Scalar, TensorData, TensorInfo
from statecli.values.low_rank import LowRankTask, measure_updates

_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")
_CONFIG = "adapter_config"


class _Update(NamedTuple):
    number: int
    weight: TensorInfo
    fqn_a: str
    task: LowRankTask


def find_adapters(
    changes: Sequence[Change], everything: Sequence[Change], settings: Mapping[str, Scalar], *, jobs: int
) -> dict[int, Transformation]:
    """Return the updates by the number of the change of their B. `settings` are those of the checkpoint after."""
    added = {change.fqn: n for n, change in enumerate(changes) if change.status is Status.ADDED}
    modules = [name.removesuffix(_ENDS[1]) for name in added if name.endswith(_ENDS[1])]
    if not modules:
        return {}
    weights = {row.fqn: row for change in everything if (row := change.before) is not None}
    updates: list[_Update] = []
    for module in modules:
        number_a, number_b = added.get(module + _ENDS[0]), added[module + _ENDS[1]]
        weight = weights.get(f"{module.removeprefix(_PREFIX)}.weight")
        if number_a is None or weight is None:
            continue
        task = _build_task(weight, changes[number_a].after, changes[number_b].after)
        if task is not None:
            updates.append(_Update(number_b, weight, module + _ENDS[0], task))
    results = measure_updates([update.task for update in updates], jobs=jobs)
    adapters: dict[int, Transformation] = {}
    for update, relative in zip(updates, results, strict=True):
        rank = update.task.a.shape[0]
        if isinstance(relative, float):
            scale = _find_scale(settings, rank)
            adapters[update.number] = Transformation(
                TransformationKind.ADAPTER,
                math.prod(update.task.weight.shape),
                sources=(update.weight.fqn, update.fqn_a),
                factor=scale,
                rank=rank,
                relative_l2=relative * (1.0 if scale is None else scale),
            )
    return adapters


def _build_task(weight: TensorInfo, a: TensorInfo | None, b: TensorInfo | None) -> LowRankTask | None:
    data: list[TensorData] = [own for row in (weight, a, b) if (own := get_data(row)) is not None]
    if len(data) < 3 or any(len(side.shape) != 2 or "float" not in side.dtype for side in data):
        return None
    (rows, columns), (rank, inner), (outer, width) = (side.shape for side in data)
    return LowRankTask(weight.fqn, *data) if (rows, columns, rank) == (outer, inner, width) else None


def _find_scale(settings: Mapping[str, Scalar], rank: int) -> float | None:
    """Return the scale of an update; None if the configuration does not say it for all modules alike."""
    alpha = settings.get(f"{_CONFIG}.lora_alpha")
    patterns = (settings.get(f"{_CONFIG}.{name}") for name in ("alpha_pattern", "rank_pattern"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or any(p not in (None, "{}") for p in patterns):
        return None
    return alpha / (math.sqrt(rank) if settings.get(f"{_CONFIG}.use_rslora") is True else rank)
