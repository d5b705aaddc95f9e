"""What `from_pretrained` of transformers forgives and converts, where a strict `load_state_dict` would object.

Only of models that are transformers' own `PreTrainedModel`: they say which names they do not save or do not miss, and
their package renames and merges entries on load. It is asked of the package that is there; nothing is converted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace
from torch import nn

from statecli.core.state import TensorInfo
from statecli.live.load_state_dict_api import Answer, Entries


def adjusted(module: nn.Module, entries: Entries, answer: Answer) -> Answer:
    """The answer without what `from_pretrained` of this module gets over; the same for every other module."""
    hub = sys.modules.get("transformers.modeling_utils")
    if hub is None or not isinstance(module, hub.PreTrainedModel):
        return answer
    answer = _forgiven(module, answer)
    for sources, targets in _conversions(module, entries, answer):
        answer = replace(
            answer,
            missing=_without(answer.missing, targets),
            unexpected=_without(answer.unexpected, sources),
            converted={**answer.converted, **dict.fromkeys(sources, tuple(targets))},
        )
    return answer


def _forgiven(module: Any, answer: Answer) -> Answer:
    """Without the names that the class says it does not save, does not miss, or does not read."""
    unsaved = set(module._keys_to_ignore_on_save or ())
    missed = [name for name in answer.missing if name in unsaved]
    missed += _matching(answer.missing, module._keys_to_ignore_on_load_missing)
    unread = _matching(answer.unexpected, module._keys_to_ignore_on_load_unexpected)
    return replace(
        answer,
        missing=_without(answer.missing, missed),
        unexpected=_without(answer.unexpected, unread),
        unsaved=tuple(dict.fromkeys(missed)),
        unread=tuple(unread),
    )


def _matching(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """By `re.search`, as transformers has it."""
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns or ())]


def _without(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    known = set(others)
    return tuple(name for name in names if name not in known)


def _conversions(module: Any, entries: Entries, answer: Answer) -> Iterator[tuple[list[str], list[str]]]:
    """Names that are unexpected, and the missing ones that they are made into: as many elements on both sides."""
    meta = module.state_dict()
    missing = set(answer.missing)
    for targets, sources in _renamed(module, meta, answer.unexpected).items():
        held = [entries.tensors[name] for name in sources if name in entries.tensors]
        if len(held) == len(sources) and missing.issuperset(targets) and _fits(held, [meta[one] for one in targets]):
            yield sources, list(targets)


def _fits(held: list[TensorInfo], wanted: list[Any]) -> bool:
    """One for one, the shapes; what is merged or split keeps the number of its elements."""
    if len(held) == len(wanted) == 1 and held[0].shape == tuple(wanted[0].shape):
        return True
    several = len(held) > 1 or len(wanted) > 1
    return several and sum(one.elements for one in held) == sum(one.numel() for one in wanted)


def _renamed(module: Any, meta: Mapping[str, Any], names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """The names by what transformers makes of them together; none where its version knows no such thing."""
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:
        return {}
    every = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [one for one in every if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in every if isinstance(one, core_model_loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        own, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, module.base_model_prefix, dict(meta)
        )
        made = by_pattern[pattern].target_patterns if pattern is not None else [own]
        targets = tuple(own.replace(made[0], one) for one in made)
        found.setdefault(targets, []).append(name)
    return found
