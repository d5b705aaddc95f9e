"""Search for transformations of tensors that explain the changes left unexplained by the plain diff."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from statecli.commands.diff.result import Change, Rounding, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.adapters import find_adapters
from statecli.commands.diff.transformations.casts import find_casts
from statecli.commands.diff.transformations.factors import (
    find_changed_transposes,
    find_factors,
    find_transposes,
    pair_with_transpose,
)
from statecli.commands.diff.transformations.insertions import find_insertions
from statecli.commands.diff.transformations.joins import find_joins
from statecli.commands.diff.transformations.moves import find_moves
from statecli.commands.diff.transformations.not_finite import count_new_not_finite
from statecli.commands.diff.transformations.ordinary_training import was_replaced
from statecli.commands.diff.transformations.permutations import find_permutations
from statecli.commands.diff.transformations.quantized import drop_numbers_of_codes, find_float_codes, find_quantized
from statecli.commands.diff.transformations.resizes import find_resizes, find_similar_resizes
from statecli.commands.diff.transformations.similar_moves import find_similar_moves
from statecli.commands.diff.transformations.transposed_moves import find_transposed_moves
from statecli.core.model_state import Kind, Scalar
from statecli.workers import pool

#: Smallest number of elements of an unrelated tensor: the cosine of independent values then has a standard deviation of
#: 1 / sqrt(elements) or less.
_MIN_UNRELATED_ELEMENTS = 256
_STANDARD_DEVIATIONS = 3
#: Smallest fraction of differing elements in an unrelated tensor, because a few elements are equal by chance.
_MIN_CHANGED = 0.9


def find_transformations(
    changes: Sequence[Change],
    sections: Mapping[str, str],
    settings: Mapping[str, Scalar],
    *,
    expects_casts: bool,
    jobs: int,
) -> list[Change]:
    """Return the changes. Each has the transformation of its tensor if one was recognised.

    Later hypotheses are tried only on changes that earlier hypotheses left unexplained. `sections` maps old to new
    sections, and `settings` are those of the new checkpoint. A tensor that cannot be read has no transformation: the
    diff reports its error. A shard runs only its part of the planned checks. If casts are expected (`--cast`), a few
    values are enough for a cast.
    """
    explained = list(changes)
    casts, resizes = find_casts(changes, is_expected=expects_casts, jobs=jobs), find_resizes(changes, jobs=jobs)
    if pool.is_partial():  # the other hypotheses need the results of all shards
        return list(changes)
    quantized = find_quantized(changes, sections, jobs=jobs)
    # A cast with exceptions may be another tensor of a moved layer, because norms of neighbouring layers differ little.
    exact_casts = {
        n: cast for n, cast in casts.items() if not cast.exceptions and cast.rounding is not Rounding.STOCHASTIC
    }
    inexact_casts = {id(changes[n]): cast for n, cast in casts.items() if n not in exact_casts}
    for n, transformation in {**exact_casts, **resizes}.items():
        if explained[n].transformation is None:
            explained[n] = replace(explained[n], transformation=transformation)
    for n, codes in quantized.items():
        if changes[n].transformation is None:
            explained[n] = replace(explained[n], transformation=codes.transformation, values=codes.values)
    resized = [n for n, change in enumerate(explained) if _is_open(change) or _is_inexact_resize(change)]
    for n, insertion in find_insertions([changes[n] for n in resized], jobs=jobs).items():
        previous = explained[resized[n]].transformation
        if previous is None or insertion.exceptions < previous.exceptions:
            explained[resized[n]] = replace(explained[resized[n]], transformation=insertion)
    searches = _list_searches(changes, sections, settings, inexact_casts, jobs)
    parts = {(changes[n].section, name) for n, codes in quantized.items() for name in codes.transformation.sources}
    open_numbers = [n for n, change in enumerate(explained) if _is_open(change) and not _is_part(change, parts)]
    for search in searches:
        open_numbers = [n for n in open_numbers if _is_open(explained[n])]
        if not open_numbers:
            break
        for n, transformation in search([explained[n] for n in open_numbers]).items():
            explained[open_numbers[n]] = replace(explained[open_numbers[n]], transformation=transformation)
    explained = [drop_numbers_of_codes(change) for change in explained]
    for n, counts in count_new_not_finite(explained, jobs=jobs).items():
        explained[n] = replace(explained[n], values=counts)
    return explained


#: Function that returns the transformations of some changes, by the index of the change.
_Search = Callable[[Sequence[Change]], dict[int, Transformation]]


def _list_searches(
    changes: Sequence[Change],
    sections: Mapping[str, str],
    settings: Mapping[str, Scalar],
    inexact: Mapping[int, Transformation],
    jobs: int,
) -> tuple[_Search, ...]:
    """Return the searches for transformations in order. Each gets the changes that earlier searches did not explain."""
    return (
        partial(find_moves, all_changes=changes, sections=sections, jobs=jobs),
        partial(find_similar_moves, all_changes=changes, sections=sections, jobs=jobs),
        partial(find_similar_resizes, jobs=jobs),
        partial(find_factors, jobs=jobs),
        partial(find_transposes, jobs=jobs),
        partial(find_transposed_moves, all_changes=changes, sections=sections, jobs=jobs),
        partial(find_permutations, jobs=jobs),
        partial(find_changed_transposes, jobs=jobs),
        partial(find_joins, jobs=jobs),
        partial(find_adapters, all_changes=changes, settings=settings, jobs=jobs),
        lambda remaining: {
            n: cast for n, change in enumerate(remaining) if (cast := inexact.get(id(change))) is not None
        },
        find_float_codes,
        _find_unrelated,
    )


def _is_inexact_resize(change: Change) -> bool:
    transformation = change.transformation
    return (
        transformation is not None
        and transformation.kind is TransformationKind.RESIZED
        and bool(transformation.exceptions)
    )


def _is_part(change: Change, parts: Container[tuple[str, str]]) -> bool:
    """Return True if the tensor was added or removed with a recognised quantized weight, for example as its scales."""
    return change.status in (Status.ADDED, Status.REMOVED) and change.key in parts


def _is_open(change: Change) -> bool:
    return change.status not in (Status.IDENTICAL, Status.RENAMED) and change.transformation is None


def _find_unrelated(changes: Sequence[Change]) -> dict[int, Transformation]:
    """Return replaced tensors whose cosine with the old values is as small as between independent values."""
    unrelated = {}
    for n, change in enumerate(changes):
        values = change.values
        if values is None or values.cosine is None or values.left_out or not was_replaced(change):
            continue
        if values.changed < _MIN_CHANGED * values.elements:  # most elements of unrelated tensors differ
            continue
        if change.kind is Kind.OPTIMIZER:  # after some steps, momentum is independent of its earlier values
            continue
        limit = _STANDARD_DEVIATIONS / math.sqrt(values.elements)
        is_independent = values.elements >= _MIN_UNRELATED_ELEMENTS and abs(values.cosine) < limit
        if is_independent and pair_with_transpose(change) is None:  # a changed transpose is not unrelated
            unrelated[n] = Transformation(TransformationKind.UNRELATED, values.elements)
    return unrelated
