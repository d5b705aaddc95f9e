"""Collect facts about the trained parameters in an optimizer's section: ids, names, shapes, and `fused`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statecli.core.model_state import OptimizerFacts, OptimizerGroup
from statecli.formats.torch.reading import Reading
from statecli.formats.torch.sections import Section
from statecli.pickles.graph import (
    FLAT_KEY_PREFIXES,
    LEAF_TYPES,
    as_mapping,
    as_sequence,
    get_attributes,
    is_flat_optimizer,
)

#: Names of optimizer states with the shape of their parameter, as in torch.optim and apex.
MOMENTS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "grad_avg", "acc_delta", "sum", "prev", "ax", "mu")


def has_training_facts(section: Section) -> bool:
    """Return whether the section is an optimizer's state that `collect_optimizer_facts` can read."""
    return section.role == "optimizer" or (section.role == "moments" and is_flat_optimizer(section.node))


def collect_optimizer_facts(section: Section, reading: Reading) -> OptimizerFacts:
    """Collect the parameters that an optimizer's `state_dict()` lists, with their names and shapes if recorded."""
    if is_flat_optimizer(section.node):
        return _collect_flat_facts(section, reading)
    items = as_mapping(section.node)
    if items is None:
        items = get_attributes(section.node)
    state = as_mapping(items["state"]) or {}
    groups = []
    for node in as_sequence(items["param_groups"]) or ():
        group = as_mapping(node) or {}
        ids = tuple(number for number in as_sequence(group.get("params")) or () if type(number) in (int, str))
        names = tuple(name for name in as_sequence(group.get("param_names")) or () if type(name) is str)
        shapes = tuple(_find_moment_shape(as_mapping(state.get(number)), reading) for number in ids)
        names_of_all = names if names and len(names) == len(ids) else None
        groups.append(OptimizerGroup(ids, names_of_all, shapes, _is_true(group.get("fused"))))
    return OptimizerFacts(section.path, tuple(groups))


def _find_moment_shape(state: Mapping[Any, Any] | None, reading: Reading) -> tuple[int, ...] | None:
    for name in MOMENTS:
        moment = reading.tensor((state or {}).get(name), name)
        if moment is not None:
            return moment.shape
    return None


def _is_true(value: object) -> bool:
    """Return whether Python treats the value as true. Any object counts as true."""
    return value not in (None, False, 0, "") if type(value) in LEAF_TYPES else True


def _collect_flat_facts(section: Section, reading: Reading) -> OptimizerFacts:
    """Collect the names and shapes of parameters from flat keys, such as "state.fc.weight.exp_avg"."""
    items = as_mapping(section.node) or {}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for key, value in items.items():
        name, _, moment = key.removeprefix(FLAT_KEY_PREFIXES[0]).rpartition(".") if type(key) is str else ("", "", "")
        if name and key.startswith(FLAT_KEY_PREFIXES[0]):
            shape = _find_moment_shape({moment: value}, reading)
            shapes[name] = shapes.get(name) or shape
    fused = any(type(key) is str and key.endswith(".fused") and _is_true(value) for key, value in items.items())
    return OptimizerFacts(section.path, (OptimizerGroup(tuple(shapes), None, tuple(shapes.values()), fused),))
