"""Find layers that moved to another number: `layers.3` of one checkpoint is `layers.2` of the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from statecli.commands.diff.result import Change, Rounding, Status, TransformationKind
from statecli.commands.diff.transformations.layers import split_moved_layer
from statecli.report.transformation_text import (
    find_rounding,
    get_kind,
    get_transformation,
    has_exceptions,
    is_exact_cast,
    list_sources,
)


class MovedLayer(NamedTuple):
    """A layer with a new number: most of its tensors come from one layer with another number.

    Attributes:
        new, old: Numbers of the layer after and before.
        cosines: Cosine of each moved tensor, None if equal bit for bit.
        rounding: Rounding of the values of equal tensors; None if they are not rounded.
        wrong: The moved tensors with exceptions.
        others: The differing tensors of the layer that do not come from `old`.
    """

    new: int
    old: int
    cosines: list[float | None]
    rounding: Rounding | None
    wrong: list[Change]
    others: list[Change]


class ModuleLayers(msgspec.Struct, frozen=True):
    """The moved layers of a module, and the numbers of its lost and new layers."""

    moved: list[MovedLayer]
    lost_numbers: list[int]
    new_numbers: list[int]


def find_moved_layers(changes: Sequence[Change]) -> dict[str, ModuleLayers]:
    """Return the layers of each module with a moved layer. The key is the start of the layers' names, such as `h.`.

    A single tensor does not move a layer: more than half of its tensors must come from the same other layer.
    """
    old_numbers_by_layer: dict[tuple[str, int], Counter[int]] = {}
    for change in changes:
        names = _split_move(change)
        if names is not None:
            (stem, _, source), (_, _, number) = (name.rpartition(".") for name in names)
            old_numbers_by_layer.setdefault((f"{stem}." if stem else "", int(number)), Counter())[int(source)] += 1
    layers: dict[str, list[MovedLayer]] = {}
    tensors_of = {start: _group_by_layer(changes, start) for start, _ in old_numbers_by_layer}
    for (start, new), olds in old_numbers_by_layer.items():
        tensors = [change for change in tensors_of[start][new] if change.after is not None]
        weights = _select_weights(tensors)
        tensors = [change for change in tensors if change.status is not Status.IDENTICAL]
        (old, _), *_ = olds.most_common(1)
        if 2 * sum(_comes_from(change, start, old) for change in weights) > len(weights):
            moved_tensors = [change for change in tensors if _comes_from(change, start, old)]
            other_changes = [c for c in tensors if not (_comes_from(c, start, old) or is_exact_cast(c))]
            cosines = [get_transformation(change).cosine for change in moved_tensors]
            rounding = find_rounding(moved_tensors)
            inexact_changes = [change for change in moved_tensors if has_exceptions(change)]
            layers.setdefault(start, []).append(MovedLayer(new, old, cosines, rounding, inexact_changes, other_changes))
    return {start: _build_layers(tensors_of[start], sorted(moved_layers)) for start, moved_layers in layers.items()}


def _build_layers(tensors_of: Mapping[int, Sequence[Change]], moved_layers: list[MovedLayer]) -> ModuleLayers:
    olds, news = {layer.old for layer in moved_layers}, {layer.new for layer in moved_layers}
    lost_numbers, new_numbers = [], []
    for number, tensors in sorted(tensors_of.items()):
        weights_before = _select_weights([c for c in tensors if c.before is not None])
        weights_after = _select_weights([c for c in tensors if c.after is not None])
        if number not in olds and 2 * sum(c.after is None or _has_other_values(c) for c in weights_before) > len(
            weights_before
        ):
            lost_numbers.append(number)
        if number not in news and 2 * sum(c.before is None or _has_other_values(c) for c in weights_after) > len(
            weights_after
        ):
            new_numbers.append(number)
    return ModuleLayers(moved_layers, lost_numbers, new_numbers)


def _select_weights(changes: list[Change]) -> list[Change]:
    """Return only the matrices if there are any, because biases and norms of a new model are equal in all layers."""
    return [c for c in changes if (row := c.after or c.before) and len(row.shape or ()) > 1] or changes


def _group_by_layer(changes: Sequence[Change], start: str) -> dict[int, list[Change]]:
    tensors: dict[int, list[Change]] = {}
    for change in changes:
        if change.fqn.startswith(start):
            number, dot, _ = change.fqn[len(start) :].partition(".")
            if dot and number.isascii() and number.isdecimal() and len(number) < 10:
                tensors.setdefault(int(number), []).append(change)
    return tensors


def _comes_from(change: Change, start: str, old: int) -> bool:
    names = _split_move(change)
    return names is not None and names[0] == f"{start}{old}"


def _split_move(change: Change) -> tuple[str, str] | None:
    is_move = get_kind(change) in (TransformationKind.MOVED, TransformationKind.SWAPPED)
    return split_moved_layer(list_sources(change)[0], change.fqn) if is_move else None


def _has_other_values(change: Change) -> bool:
    return get_kind(change) in (TransformationKind.MOVED, TransformationKind.UNRELATED)


def is_in_moved_layer(change: Change, modules: Mapping[str, ModuleLayers]) -> bool:
    """Return True for a tensor that moved together with its layer."""
    names = _split_move(change)
    if names is None:
        return False
    (stem, _, old), (_, _, new) = (name.rpartition(".") for name in names)
    layers = modules.get(f"{stem}." if stem else "")
    return layers is not None and any((layer.old, layer.new) == (int(old), int(new)) for layer in layers.moved)


def list_new_layers(modules: Mapping[str, ModuleLayers]) -> tuple[str, ...]:
    """Return the names of the new layers, with a dot at the end."""
    return tuple(f"{start}{number}." for start, layers in modules.items() for number in layers.new_numbers)


def list_removed_layers(changes: Sequence[Change], modules: Mapping[str, ModuleLayers]) -> list[Change]:
    """Return the removed tensors that belong to removed layers. The line about moved layers names these layers."""
    names = tuple(f"{start}{number}." for start, layers in modules.items() for number in layers.lost_numbers)
    return [change for change in changes if change.status is Status.REMOVED and change.fqn.startswith(names)]
