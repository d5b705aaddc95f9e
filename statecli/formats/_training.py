"""What a training checkpoint says beside its tensors: what each optimizer trains, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statecli.formats._graph import attributes, dotted, entries, mapping, sequence
from statecli.formats._reading import Reading
from statecli.formats._sections import MAX_SECTION_DEPTH, Section
from statecli.formats._tensors import Decoder
from statecli.state import OptimizerFacts, OptimizerGroup, Scalar

#: Characters of a settings container's path.
MAX_SETTING = 1_000
MAX_METADATA = 1_000

#: Optimizer state of the same shape as its parameter, by the names torch.optim and apex give it.
MOMENTS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "grad_avg", "acc_delta", "sum", "prev", "ax", "mu")


def optimizer_facts(section: Section, decoder: Decoder) -> OptimizerFacts:
    """Which parameters an optimizer says it trains, as far as its `state_dict()` tells."""
    items = mapping(section.node)
    if items is None:
        items = attributes(section.node)
    state = mapping(items["state"]) or {}
    groups = []
    for node in sequence(items["param_groups"]) or ():
        group = mapping(node) or {}
        ids = tuple(one for one in sequence(group.get("params")) or () if type(one) in (int, str))
        names = tuple(one for one in sequence(group.get("param_names")) or () if type(one) is str)
        shapes = tuple(_moment_shape(mapping(state.get(one)), decoder) for one in ids)
        groups.append(OptimizerGroup(ids, names if names and len(names) == len(ids) else None, shapes))
    return OptimizerFacts(section.path, tuple(groups))


def _moment_shape(state: Mapping[Any, Any] | None, decoder: Decoder) -> tuple[int, ...] | None:
    for name in MOMENTS:
        moment = decoder.tensor((state or {}).get(name), name)
        if moment is not None:
            return moment.shape
    return None


def scalars(root: Any, skip: set[int], reading: Reading) -> dict[str, Scalar]:
    """Numbers and words beside the tensors (epoch, step, lr), by dotted path; the models' own containers left out.

    Lists of more than 64 entries are data, not settings, and are passed over.
    """
    found: dict[str, Scalar] = {}
    seen: set[int] = set(skip)
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        path, node, depth = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        below = []
        if len(path) > MAX_SETTING:
            reading.odd("metadata-cut", f"a name of {len(path)} characters holds settings, which are left out")
            continue
        for key, child in entries(node):
            if type(child) in _SCALARS:
                if len(found) == MAX_METADATA:
                    reading.odd("metadata-cut", f"holds more than {MAX_METADATA} settings; the first of them are kept")
                    return found
                found[dotted(path, key)] = _json_scalar(child)
            elif depth < MAX_SECTION_DEPTH and _is_settings(child):
                below.append((dotted(path, key), child, depth + 1))
        stack.extend(reversed(below))
    return found


_SCALARS = frozenset([str, int, float, bool, type(None)])


def _is_settings(node: Any) -> bool:
    return mapping(node) is not None or (type(node) in (list, tuple) and len(node) <= 64)


def _json_scalar(value: Any) -> Scalar:
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if type(value) is int and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str and len(value) > 1000:
        return value[:997] + "..."
    return value  # type: ignore[no-any-return]
