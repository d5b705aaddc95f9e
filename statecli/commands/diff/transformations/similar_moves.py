"""Recognise tensors that were moved and then trained, by their similarity to an old tensor with a different name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from statecli.commands.diff.result import Change, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.moves import follow_layers, group_rows
from statecli.commands.diff.transformations.ordinary_training import MAX_COSINE, was_replaced
from statecli.commands.diff.transformations.views import get_data, locate, take_sample
from statecli.core.model_state import TensorInfo
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.pair_plan import Pair
from statecli.values.similarity import find_most_similar

#: Largest number of tensors of one shape on a side that are compared with each other.
_MAX_ROWS = 512
#: Largest change of a moved tensor, as a fraction of its change from the tensor of the same name.
_MAX_SHARE_OF_CHANGE = 0.5


def find_similar_moves(
    changes: Sequence[Change], all_changes: Sequence[Change], sections: Mapping[str, str], *, jobs: int
) -> dict[int, Transformation]:
    """Return the moves with the cosine between the old and the new values, keyed by index in `changes`.

    `all_changes`: see `find_moves`.
    """
    candidates: dict[int, TensorInfo] = {}
    for before, after in group_rows(changes, all_changes, sections):
        if max(len(before), len(after)) <= _MAX_ROWS and "float" in after[0][1].dtype:
            candidates.update(_find_candidates(before, after))
    moves = dict(_confirm(changes, candidates, jobs))
    sources = {n: candidates[n] for n in moves}
    if moves:
        moves |= _confirm(changes, follow_layers(changes, all_changes, sources, sections), jobs, is_layer=True)
    return moves


def _find_candidates(
    before: Sequence[tuple[int, TensorInfo]], after: Sequence[tuple[int, TensorInfo]]
) -> Iterator[tuple[int, TensorInfo]]:
    """Yield (index in `changes`, old tensor) if the old tensor most similar to a new one is from a different change."""
    old, new = ([take_sample(row) for _, row in side] for side in (before, after))
    for (n, _), best in zip(after, find_most_similar(new, old), strict=True):
        if best is not None and before[best][0] != n:
            yield n, before[best][1]


def _confirm(
    changes: Sequence[Change], candidates: Mapping[int, TensorInfo], jobs: int, *, is_layer: bool = False
) -> dict[int, Transformation]:
    pairs = {n: Pair(row, after) for n, row in candidates.items() if (after := changes[n].after) is not None}
    outcomes = compare_pairs(list(pairs.values()), CompareOptions(), jobs=jobs, derived=True)
    moves: dict[int, Transformation] = {}
    for (n, pair), outcome in zip(pairs.items(), outcomes, strict=True):
        data = get_data(pair.after)
        if not isinstance(outcome, Delta) or not _is_similar(outcome, changes[n], is_layer=is_layer):
            continue
        if is_layer or (
            data is not None and is_evident(locate(data, pair.after.fqn), pair.after.fqn, outcome.elements)
        ):
            names = (pair.before.fqn,)
            moves[n] = Transformation(TransformationKind.MOVED, outcome.elements, sources=names, cosine=outcome.cosine)
    return moves


def _is_similar(outcome: Delta, change: Change, *, is_layer: bool) -> bool:
    if outcome.cosine is None or outcome.relative_l2 is None or outcome.cosine < MAX_COSINE:
        return False
    if not is_layer:
        return change.values is None or was_replaced(change)
    change_l2 = change.values.relative_l2 if change.values is not None else None
    return change_l2 is None or outcome.relative_l2 <= _MAX_SHARE_OF_CHANGE * change_l2
