"""Sections of a checkpoint: containers with the state of a model or an optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.pickles.graph import (
    LEAF_TYPES,
    append_key,
    as_mapping,
    as_sequence,
    get_attributes,
    is_flat_optimizer,
    is_module,
    is_optimizer,
    iter_entries,
    iter_non_items,
    list_child_nodes,
)
from statecli.pickles.nodes import Obj

#: Maximum depth of sections, for example `models.generator.ema`; a deeper container is part of its section.
MAX_SECTION_DEPTH = 8

#: Words in keys under which training scripts save a model's state.
MODEL_WORDS = compile_on_use(
    r"(?:^|[_.])(?:model|models|module|state_dict|net|network|weights?|params?|ema|teacher|student|generator|discriminator"
    r"|encoder|decoder|backbone|head|swa|averaged|shadow)(?:$|[_.\d])",
    re.IGNORECASE,
)
#: Words in keys of tensors that belong neither to a model nor to an optimizer.
OTHER_WORDS = compile_on_use(
    r"(?:^|_)(?:rng|random|seed|scheduler|schedulers|loops|callbacks|scaler|sampler)(?:$|_)", re.IGNORECASE
)


class Section(msgspec.Struct):
    """Container with the state of a model or an optimizer: its path, the container itself (`node`), and its role.

    `role` is "module", "optimizer", "model", "other", or "moments" for a container inside an optimizer. `keys` lead
    from the root to the node; None if the path has an attribute, or if the section has only some entries of a dict.
    """

    path: str
    node: Any
    role: str
    keys: tuple[str | int, ...] | None = None


class Search:
    """Search for containers that hold tensors. A container that is shared in the file is searched only once."""

    def __init__(self, decoder: TensorDecoder) -> None:
        self.is_tensor = decoder.is_tensor
        self.holds_tensor_by_id: dict[int, bool] = {}

    def holds_tensor(self, node: object) -> bool:
        if id(node) not in self.holds_tensor_by_id:
            self._search(node)
        return self.holds_tensor_by_id.get(id(node), False)

    def _search(self, root: object) -> None:
        ancestors: list[Any] = []
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            node, is_finished = stack.pop()
            if is_finished:
                ancestors.pop()
                continue
            if self.holds_tensor_by_id.get(id(node)) or self.is_tensor(node):
                self.holds_tensor_by_id.update((id(parent), True) for parent in (*ancestors, node))
                return
            if type(node) in LEAF_TYPES or id(node) in self.holds_tensor_by_id:
                continue
            self.holds_tensor_by_id[id(node)] = False
            ancestors.append(node)
            stack.append((node, True))
            stack.extend((child, False) for child in list_child_nodes(node) if type(child) not in LEAF_TYPES)


def find_sections(root: object, search: Search, requested_section: str | None = None) -> list[Section]:
    """Find the sections of a checkpoint, in file order. A plain state_dict is one section, `model`.

    `requested_section` is the dotted path of a container that must be a section, or contain sections, if it has
    tensors. The search takes place while the file is read, because the tensors are named relative to the container.
    """
    sections = _find_all(root, search)
    if not requested_section or any(f"{section.path}.".startswith(f"{requested_section}.") for section in sections):
        return sections
    candidates = (
        node
        for node in _resolve_path(requested_section, root)
        if not search.is_tensor(node) and search.holds_tensor(node)
    )
    node = next(candidates, None)
    if node is None:
        return sections
    enclosing_sections = [
        section for section in sections if section.node is root or requested_section.startswith(f"{section.path}.")
    ]
    role = max(enclosing_sections, key=lambda section: len(section.path)).role if enclosing_sections else "other"
    other_sections = [section for section in sections if section not in enclosing_sections]
    return [*other_sections, *_find_within(requested_section, node, "moments" if role == "optimizer" else role, search)]


def _resolve_path(path: str, root: object) -> Iterator[Any]:
    """Yield each object that a dotted path may mean, because keys may contain dots, and 1 and '1' look the same."""
    stack = [(f"{path}.", root)]
    while stack:
        remaining_path, node = stack.pop()
        if not remaining_path:
            yield node
        steps = ((f"{append_key('', key)}.", child) for key, child in iter_entries(node))
        stack.extend((remaining_path[len(step) :], child) for step, child in steps if remaining_path.startswith(step))


def _find_within(path: str, node: object, role: str, search: Search) -> list[Section]:
    if is_module(node):
        return [Section(path, node, "module")]
    if is_optimizer(node):
        return [Section(path, node, "optimizer")]
    if role == "model" and _should_descend(node, search):
        return list(_iter_sections(path, node, search, 0))
    return [Section(path, node, role)]


def _find_all(root: object, search: Search) -> list[Section]:
    if is_module(root):
        return [Section("model", root, "module", ())]
    if is_optimizer(root):
        return [Section("optimizer", root, "optimizer")]
    if _is_generator_state(root):
        return [Section("rng", root, "other")]
    if is_flat_optimizer(root):
        return [Section("optimizer", root, "moments")]
    if not _should_descend(root, search):
        return [Section("model", root, "model", ())]
    return list(_iter_sections("", root, search, 0, ()))


#: Keys of random generator states, as the Trainer, Lightning and accelerate write them in files with nothing else.
_GENERATOR_KEYS = frozenset(["python", "numpy", "cpu", "cuda", "torch", "mps", "xpu", "npu", "hpu", "random"])


def _is_generator_state(root: object) -> bool:
    names = [key for key in islice(as_mapping(root) or (), 32) if type(key) is str]
    return bool(names) and all(name in _GENERATOR_KEYS or OTHER_WORDS.search(name) for name in names)


def _iter_sections(
    path: str, node: object, search: Search, depth: int, keys: tuple[str | int, ...] | None = None
) -> Iterator[Section]:
    other_entries: dict[Any, Any] = {}
    sections: list[Section] = []
    children = (
        (step.removeprefix("."), child) for step, child in iter_non_items(node) if type(child) not in LEAF_TYPES
    )
    for key, child in chain(iter_entries(node), children):
        role = _find_role(child, str(key), search)
        child_path = append_key(path, key)
        if role is None:
            other_entries[key] = child
        elif role == "other" or role == "model":
            is_nested = (
                depth < MAX_SECTION_DEPTH and not OTHER_WORDS.search(str(key)) and _should_descend(child, search)
            )
            child_keys = _extend_keys(keys, node, key, child)
            sections.extend(
                _iter_sections(child_path, child, search, depth + 1, child_keys)
                if is_nested
                else [Section(child_path, child, role, child_keys)]
            )
        else:
            sections.append(Section(child_path, child, role, _extend_keys(keys, node, key, child)))
    if any(search.is_tensor(value) for value in other_entries.values()):
        # torchtitan saves the model's entries next to the optimizer's.
        is_model = (
            not path
            and _looks_like_state(other_entries, "")
            and not any(section.role in _MODEL_ROLES for section in sections)
        )
        yield Section("model", other_entries, "model") if is_model else Section(path, other_entries, "other")
    yield from sections


def _extend_keys(keys: tuple[str | int, ...] | None, node: Any, key: Any, child: Any) -> tuple[str | int, ...] | None:
    """Extend the keys of a container by its child's key. Return None if the child is not an item of the container."""
    if keys is None or type(key) not in (str, int):
        return None
    if as_mapping(node) is not None:
        return (*keys, key) if (as_mapping(node) or {}).get(key) is child else None
    return (*keys, key) if type(node) in (list, tuple) else None


_MODEL_ROLES = frozenset(["model", "module"])


def _find_role(node: object, key: str, search: Search) -> str | None:
    """Return the role of a container as a section, or None for a tensor, a scalar or a container without tensors."""
    if is_module(node):
        return "module"
    if is_optimizer(node):
        return "optimizer"
    if as_mapping(node) is None and as_sequence(node) is None and type(node) is not Obj:
        return None
    if search.is_tensor(node) or not search.holds_tensor(node):
        return None
    if is_flat_optimizer(node):
        return "moments"
    if OTHER_WORDS.search(key):
        return "other"
    return "model" if _looks_like_state(node, key) else "other"


def _looks_like_state(node: object, key: str) -> bool:
    if MODEL_WORDS.search(key) or (type(node) is Obj and "_metadata" in get_attributes(node)):
        return True
    names = [name for name in islice(as_mapping(node) or (), 64) if type(name) is str]
    return any("." in name or name in ("weight", "bias") for name in names)


def _should_descend(node: object, search: Search) -> bool:
    """Return whether the entries of a container are separate sections, not the nested state of one model."""
    for key, child in islice(iter_entries(node), 4096):
        if is_module(child) or is_optimizer(child) or is_flat_optimizer(child):
            return True
        items = as_mapping(child)
        if items is None:
            if type(child) is list and any(is_optimizer(item) or is_module(item) for item in islice(child, 64)):
                return True
            continue
        if (type(key) is str and key.endswith("_extra_state")) or not search.holds_tensor(child):
            continue
        if _looks_like_state(child, str(key)) or OTHER_WORDS.search(str(key)):
            return True
    return False
