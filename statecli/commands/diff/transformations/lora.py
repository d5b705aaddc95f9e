"""Read the updates of a LoRA adapter in the format of peft.

peft adds scale * B @ A to a weight of [out, in]: A is [rank, in], B is [out, rank], and scale is lora_alpha / rank, or
lora_alpha / sqrt(rank) with `use_rslora` (peft, tuners/lora/layer.py). The update of an embedding of [entries, width]
is the transpose: `lora_embedding_A` is [rank, entries], `lora_embedding_B` is [width, rank].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Scalar, TensorInfo

_PREFIX = "base_model.model."
#: Name of a factor: `q_proj.lora_A.weight`, in a whole model `q_proj.lora_A.default.weight` with the name of the
#: adapter.
_FACTOR = compile_on_use(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.(?!bias)[^.]+)??(?:\.weight)?"
)
_CONFIG = "adapter_config"
_PLAIN_KEY = compile_on_use(r"[\w.]+")


class LoraUpdate(msgspec.Struct, frozen=True):
    """Update of the weight of `module`. `scale` and `alpha` are None if the configuration lacks them."""

    module: str
    a: TensorInfo
    b: TensorInfo
    rank: int
    is_embedding: bool
    scale: float | None
    alpha: float | None = None


class LoraAdapter(msgspec.Struct, frozen=True):
    """The tensors of an adapter.

    Attributes:
        updates: Updates of weights.
        replaced: Tensors that replace a tensor of the model, by the name of the replaced tensor.
        unknown: Parts of other methods (DoRA), by module; such modules are not among the updates.
    """

    updates: tuple[LoraUpdate, ...]
    replaced: Mapping[str, TensorInfo]
    unknown: Mapping[str, TensorInfo]


def parse_adapter(rows: Iterable[TensorInfo], settings: Mapping[str, Scalar]) -> LoraAdapter:
    """Return the updates of a LoRA adapter. `settings` contains its config under keys `adapter_config.*`."""
    factors: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
    other_rows: list[TensorInfo] = []
    for row in rows:
        match = _FACTOR.fullmatch(row.fqn)
        if match is None:
            other_rows.append(row)
        else:
            key = match["module"].removeprefix(_PREFIX), bool(match["embedding"])
            factors.setdefault(key, {})[match["side"]] = row
    unknown = {row.fqn.removeprefix(_PREFIX).rpartition(".lora_")[0]: row for row in other_rows if ".lora_" in row.fqn}
    updates = []
    for (module, is_embedding), sides in factors.items():
        if sides.keys() < {"A", "B"}:
            unknown.setdefault(module, *sides.values())
        if module in unknown:
            continue
        rank = sides["A"].shape[0] if sides["A"].shape else 0
        alpha = _find_alpha(settings, module)
        scale = _compute_scale(settings, alpha, rank)
        updates.append(LoraUpdate(module, sides["A"], sides["B"], rank, is_embedding, scale, alpha))
    # Other tensors replace tensors of the model (`modules_to_save`, biases trained with `bias="lora_only"` or `"all"`).
    replaced = {
        re.sub(r"\.modules_to_save(\.default)?(?=\.)|\.base_layer(?=\.)", "", row.fqn.removeprefix(_PREFIX)): row
        for row in other_rows
        if ".lora_" not in row.fqn and (".base_layer." not in row.fqn or row.fqn.endswith(".base_layer.bias"))
    }
    return LoraAdapter(tuple(updates), replaced, unknown)


def _compute_scale(settings: Mapping[str, Scalar], alpha: float | None, rank: int) -> float | None:
    if alpha is None or rank < 1:
        return None
    return alpha / (math.sqrt(rank) if settings.get(f"{_CONFIG}.use_rslora") is True else rank)


def _find_alpha(settings: Mapping[str, Scalar], module: str) -> float | None:
    """Return the alpha of the first `alpha_pattern` entry that is a suffix of the module's name, else the default."""
    start = f"{_CONFIG}.alpha_pattern."
    patterns = {key.removeprefix(start): value for key, value in settings.items() if key.startswith(start)}
    if settings.get(start[:-1]) not in (None, "{}") or not all(map(_PLAIN_KEY.fullmatch, patterns)):
        return None  # statecli runs no regular expression from a file
    default = settings.get(f"{_CONFIG}.lora_alpha")
    alpha = next((value for key, value in patterns.items() if f".{module}".endswith(f".{key}")), default)
    return None if isinstance(alpha, bool) or not isinstance(alpha, int | float) else alpha
