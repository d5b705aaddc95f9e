"""Rebuild the nested dict that torch.distributed.checkpoint flattened for the save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from statecli.pickles.graph import as_sequence


def build_nested(nodes: dict[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    """Rebuild the nested dict that was saved, from its flattened objects and their paths.

    An object without a path, or with a path that contradicts another path, is stored in the root dict by its name.
    """
    root: dict[Any, Any] = {}
    containers: dict[int, _Container] = {id(root): _Container(root, None, root)}
    for fqn, node in nodes.items():
        *steps, last_step = paths.get(fqn, (fqn,))
        container = _find_container(root, steps, containers)
        if container is None or last_step in container:
            root[fqn] = node
        else:
            container[last_step] = node
    # Reversed, so that inner containers, which were created later, are converted first.
    for entry in reversed(containers.values()):
        indexes = entry.mapping is not root and all(type(key) is int for key in entry.mapping)
        if indexes and sorted(entry.mapping) == list(range(len(entry.mapping))):
            entry.parent[entry.key] = [entry.mapping[n] for n in range(len(entry.mapping))]
    for entry in containers.values():
        _convert_parameter_ids(entry.mapping)
    return root


def _convert_parameter_ids(optimizer: dict[Any, Any]) -> None:
    """Restore the integer keys of an optimizer's state, because the planner turned all keys into text.

    Add a missing state, because DCP does not save the empty dict of SGD without momentum.
    """
    groups = optimizer.get("param_groups")
    params_by_group = [group.get("params") for group in groups if type(group) is dict] if type(groups) is list else []
    state = optimizer.setdefault("state", {}) if any(params_by_group) else None
    if type(state) is not dict:
        return
    ids = {number for params in params_by_group for number in as_sequence(params) or () if type(number) in (int, str)}
    numbers = {str(number): number for number in ids if type(number) is int and str(number) not in ids}
    renamed_state = {numbers.get(key, key): value for key, value in state.items()}
    state.clear()
    state.update(renamed_state)


class _Container(msgspec.Struct, frozen=True):
    """Dict created by `build_nested`, with its parent dict and key. Only such dicts may receive further objects."""

    parent: dict[Any, Any]
    key: str | int | None
    mapping: dict[Any, Any]


def _find_container(
    root: dict[Any, Any], steps: list[str | int], containers: dict[int, _Container]
) -> dict[Any, Any] | None:
    """Return the dict at a path, and create missing dicts. Return None if the path leads into a saved value."""
    node = root
    for step in steps:
        if step not in node:
            child: dict[Any, Any] = {}
            containers[id(child)] = _Container(node, step, child)
            node[step] = child
        if id(node[step]) not in containers:
            return None
        node = node[step]
    return node
