"""Remove from the report of a strict load all names that transformers' `from_pretrained` ignores or converts.

Only for models of transformers' own `PreTrainedModel`. These models list names that they do not save or may lack.
transformers renames and merges entries on load. The rules come from the installed package; nothing is converted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace
from torch import nn

from statecli.core.grouping import group_by
from statecli.core.model_state import TensorInfo
from statecli.live import hf_auto
from statecli.live.load_state_dict_result import Entries, LoadReport


def adjust_answer(module: nn.Module, entries: Entries, answer: LoadReport) -> LoadReport:
    """For a transformers model, remove from the report all names that `from_pretrained` ignores or converts."""
    hub = sys.modules.get("transformers.modeling_utils")
    if hub is None or not isinstance(module, hub.PreTrainedModel):
        return answer
    answer = _apply_ignore_patterns(module, answer)
    for sources, targets in _iter_conversions(module, entries, answer):
        answer = replace(
            answer,
            missing=_remove_names(answer.missing, targets),
            unexpected=_remove_names(answer.unexpected, sources),
            converted={**answer.converted, **dict.fromkeys(sources, tuple(targets))},
        )
    return answer


def _apply_ignore_patterns(module: Any, answer: LoadReport) -> LoadReport:
    """Remove the names that the class does not save, allows to be missing or does not read (`_keys_to_ignore_...`)."""
    unsaved = set(module._keys_to_ignore_on_save or ())
    ignored_missing = [name for name in answer.missing if name in unsaved]
    ignored_missing += _match_patterns(answer.missing, module._keys_to_ignore_on_load_missing)
    ignored_keys = _match_patterns(answer.unexpected, module._keys_to_ignore_on_load_unexpected)
    return replace(
        answer,
        missing=_remove_names(answer.missing, ignored_missing),
        unexpected=_remove_names(answer.unexpected, ignored_keys),
        unsaved=tuple(dict.fromkeys(ignored_missing)),
        unread=tuple(ignored_keys),
    )


def _match_patterns(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Return the names in which `re.search` finds one of the patterns, as transformers does."""
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns or ())]


def _remove_names(names: Iterable[str], names_to_remove: Iterable[str]) -> tuple[str, ...]:
    removed_names = set(names_to_remove)
    return tuple(name for name in names if name not in removed_names)


def _iter_conversions(module: Any, entries: Entries, answer: LoadReport) -> Iterator[tuple[list[str], list[str]]]:
    """Yield unexpected names, and the missing names into which transformers converts them, if tensor sizes agree."""
    meta = module.state_dict()
    missing = set(answer.missing)
    for targets, sources in _group_by_target(module, meta, answer.unexpected).items():
        source_tensors = [entries.tensors[name] for name in sources if name in entries.tensors]
        if (
            len(source_tensors) == len(sources)
            and missing.issuperset(targets)
            and _has_same_elements(source_tensors, [meta[target] for target in targets])
        ):
            yield sources, list(targets)


def _has_same_elements(sources: list[TensorInfo], targets: list[Any]) -> bool:
    """Return True if a single tensor keeps its shape, or if merged or split tensors keep the number of elements."""
    if len(sources) == len(targets) == 1 and sources[0].shape == tuple(targets[0].shape):
        return True
    is_merge_or_split = len(sources) > 1 or len(targets) > 1
    return is_merge_or_split and sum(tensor.elements for tensor in sources) == sum(tensor.numel() for tensor in targets)


def _group_by_target(module: Any, meta: Mapping[str, Any], names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Group names by the names into which transformers converts them. Return {} if this release converts no names."""
    rename = hf_auto.build_renaming(module, dict(meta))
    if rename is None:
        return {}
    return group_by(names, lambda name: tuple(rename(name)))
