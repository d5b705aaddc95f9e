"""Recognise tensors whose values were in another tensor before, such as swapped tensors and renumbered layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from statecli.commands.diff.result import Change, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import is_evident
from statecli.commands.diff.transformations.layers import split_moved_layer
from statecli.commands.diff.transformations.ordinary_training import are_few, find_namesakes, was_replaced
from statecli.commands.diff.transformations.views import (
    get_data,
    is_cheap_to_sample,
    locate,
    name_rounding,
    take_sample,
    take_second_sample,
)
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import TensorInfo
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_copy, check_elements
from statecli.values.fingerprints import compute_fingerprints
from statecli.values.pair_plan import Pair
from statecli.values.row_digests import RowTask, compute_row_digests

_LAYER_NUMBER = compile_on_use(r"(?:(?<=\.)|^)[0-9]+(?=\.)")
#: Smallest number of elements of a moved tensor of whole numbers, because a few whole numbers are equal by chance.
_MIN_WHOLE_NUMBERS = 16

#: Rows of one shape on one side, with the indexes of their changes.
Rows = list[tuple[int, TensorInfo]]


def find_moves(
    changes: Sequence[Change],
    all_changes: Sequence[Change],
    sections: Mapping[str, str],
    *,
    jobs: int,
    looks_at_renames: bool = False,
) -> dict[int, Transformation]:
    """Return the moved tensors, keyed by index in `changes`. `sections` maps old to new sections.

    A tensor moved if its values equal those of another tensor before, bit for bit or after rounding to another dtype.
    Two tensors with each other's values were swapped. A few elements may differ. A sample of first elements selects the
    tensors to compare, or another sample if no tensor has the first. Of several equal sources, the first is taken.
    Constant tensors are not evidence. `all_changes` has explained and identical changes too: a layer's norms may come
    from there. Tensors on a single side are compared with each other if `looks_at_renames`.
    """
    candidates: dict[int, TensorInfo] = {}
    for before, after in group_rows(changes, all_changes, sections, looks_at_renames=looks_at_renames):
        candidates |= _find_candidates(before, after, take_sample, jobs)
        unmatched_rows = [(n, row) for n, row in after if n not in candidates]
        if unmatched_rows:
            candidates |= _find_candidates(before, unmatched_rows, take_second_sample, jobs)
    sources = _confirm(changes, candidates, jobs)
    if sources:
        rows = {n: source.row for n, source in sources.items()}
        sources |= _confirm(changes, follow_layers(changes, all_changes, rows, sections), jobs, is_layer=True)
    namesakes = find_namesakes(changes, all_changes, sources).items()
    readable = {n: row for n, row in namesakes if get_data(row) is not None and get_data(changes[n].after) is not None}
    sources |= _confirm(changes, readable, jobs)
    return build_moves(changes, sources, sections)


class MoveSource(NamedTuple):
    """Old tensor that has the values of a new tensor, except for `exceptions` elements."""

    row: TensorInfo
    exceptions: int


def _find_candidates(
    before: Rows, after: Rows, sample: Callable[[TensorInfo], TensorInfo], jobs: int
) -> dict[int, TensorInfo]:
    """Map the index of each change to the first old tensor with an equal sample. Skip unchanged tensors."""
    samples = [sample(row) for _, row in (*before, *after)]
    # The dtype of a sample: blocks of GGUF are sampled as float32.
    fingerprints = _compute_fingerprints(samples, samples[len(before)].dtype, jobs)
    sources: dict[object, Rows] = {}
    for entry, fingerprint in zip(before, fingerprints, strict=False):
        sources.setdefault(fingerprint, []).append(entry)
    candidates: dict[int, TensorInfo] = {}
    for (n, _), fingerprint in zip(after, fingerprints[len(before) :], strict=True):
        equal_rows = sources.get(fingerprint, []) if isinstance(fingerprint, int | tuple) else []
        if equal_rows and all(number != n for number, _ in equal_rows):
            candidates[n] = equal_rows[0][1]
    return candidates


def _compute_fingerprints(samples: Sequence[TensorInfo], dtype: str, jobs: int) -> Sequence[object]:
    """Return a fingerprint of each sample. If the dtypes of the samples differ, round the values to `dtype` first."""
    if all(sample.dtype == dtype for sample in samples):
        return compute_fingerprints(samples, jobs=jobs, derived=True)
    tasks = [RowTask(sample.fqn, data, dtype) for sample in samples if (data := sample.data) is not None]
    return compute_row_digests(tasks, jobs=jobs)


def follow_layers(
    changes: Sequence[Change],
    all_changes: Sequence[Change],
    source_of: Mapping[int, TensorInfo],
    sections: Mapping[str, str],
) -> dict[int, TensorInfo]:
    """For each tensor without a known source in a moved layer, return the tensor with this name in the old layer.

    A layer is a name up to a number. The layer moved if all of its tensors with a known source came from a single
    layer.
    """
    layers_of: dict[str, set[str]] = {}
    for n, source in source_of.items():
        if layers := split_moved_layer(source.fqn, changes[n].fqn):
            layers_of.setdefault(layers[1], set()).add(layers[0])
    rows = [change.before for change in all_changes if change.before is not None]
    sources = {(sections.get(row.section, row.section), row.fqn): row for row in rows}
    candidates: dict[int, TensorInfo] = {}
    for n, change in enumerate(changes):
        if n in source_of or get_data(change.after) is None:
            continue
        for end in (match.end() for match in _LAYER_NUMBER.finditer(change.fqn)):
            layers_before = layers_of.get(change.fqn[:end], set())
            name = "".join(layers_before) + change.fqn[end:]
            row_before = sources.get((change.section, name)) if len(layers_before) == 1 else None
            if row_before is not None:
                candidates[n] = row_before
    return candidates


def group_rows(
    changes: Sequence[Change],
    all_changes: Sequence[Change],
    sections: Mapping[str, str],
    *,
    looks_at_renames: bool = False,
) -> list[tuple[Rows, Rows]]:
    """Group old and new tensors that may have equal values. Each tensor has the index of its change.

    The new tensors of a group have one dtype, to which the dtypes of the old tensors can be cast. New tensors are those
    that were replaced or added; old tensors are all tensors, because layers are also copied. The index of a change
    outside `changes` is -1.
    """
    groups: dict[object, dict[str, tuple[Rows, Rows]]] = {}
    for n, change in enumerate(changes):
        row = change.after
        if row is not None and _may_move(row) and (change.before is None or was_replaced(change)):
            by_dtype = groups.setdefault((row.section, row.layout, row.shape), {})
            by_dtype.setdefault(row.dtype, ([], []))[1].append((n, row))
    numbers = {id(change): n for n, change in enumerate(changes)}
    for change in all_changes if groups else ():
        row = change.before
        if row is not None and _may_move(row):
            by_dtype = groups.get((sections.get(row.section, row.section), row.layout, row.shape), {})
            for dtype, group in by_dtype.items():
                if can_copy(row.dtype, dtype):
                    group[0].append((numbers.get(id(change), -1), row))
    # Groups of only added and only removed rows are left out, because the search for renames has compared these rows.
    return [
        (before, after)
        for by_dtype in groups.values()
        for before, after in by_dtype.values()
        if before
        and (
            looks_at_renames
            or any(row.dtype != after[0][1].dtype for _, row in before)
            or any(changes[n].before is not None for n, _ in after)
            or any(n < 0 or changes[n].after is not None for n, _ in before)
        )
    ]


def _may_move(row: TensorInfo) -> bool:
    min_elements = 2 if "float" in row.dtype else _MIN_WHOLE_NUMBERS
    return get_data(row) is not None and row.elements >= min_elements and is_cheap_to_sample(row)


def _confirm(
    changes: Sequence[Change], candidates: Mapping[int, TensorInfo], jobs: int, *, is_layer: bool = False
) -> dict[int, MoveSource]:
    """Return the candidates that are equal bit for bit, except for a few elements.

    Values that may be equal by chance count only in a layer whose other tensors moved.
    """
    pairs = {n: Pair(row, after) for n, row in candidates.items() if (after := changes[n].after) is not None}
    same_dtype_pairs = {n: pair for n, pair in pairs.items() if pair.before.dtype == pair.after.dtype}
    outcomes = compare_pairs(list(same_dtype_pairs.values()), CompareOptions(bitwise=True), jobs=jobs, derived=True)
    exceptions = {
        n: outcome.changed for n, outcome in zip(same_dtype_pairs, outcomes, strict=True) if isinstance(outcome, Delta)
    }
    casts = {
        n: task
        for n, pair in pairs.items()
        if n not in same_dtype_pairs and (task := _build_cast_task(pair)) is not None
    }
    for n, result in zip(casts, check_elements(list(casts.values()), jobs=jobs), strict=True):
        if isinstance(result, CheckResult) and result.elements:
            exceptions[n] = result.exceptions
    sources = {n: MoveSource(pairs[n].before, count) for n, count in exceptions.items()}
    return {
        n: source
        for n, source in sources.items()
        if are_few(changes[n], source.exceptions)
        and ((is_layer and not source.exceptions) or _is_evident(changes[n], source.exceptions, len(changes)))
    }


def _is_evident(change: Change, exceptions: int, ways: int) -> bool:
    data = get_data(change.after)
    return data is not None and is_evident(locate(data, change.fqn), change.fqn, prod(data.shape), exceptions, ways)


def _build_cast_task(pair: Pair) -> CheckTask | None:
    before, after = get_data(pair.before), get_data(pair.after)
    if before is None or after is None or before.shape != after.shape or not can_copy(before.dtype, after.dtype):
        return None
    sides = locate(before, pair.before.fqn), locate(after, pair.after.fqn)
    return CheckTask(pair.after.fqn, Operation.COPY, *sides)


def build_moves(
    changes: Sequence[Change], sources: Mapping[int, MoveSource], sections: Mapping[str, str]
) -> dict[int, Transformation]:
    """Return the moves, keyed by index in `changes`. Two tensors are swapped if each has the other's old values."""
    moves: dict[int, Transformation] = {}
    numbers = {id(change.before): n for n, change in enumerate(changes) if change.before is not None}
    for n, (row, exceptions) in sources.items():
        reverse_source = sources.get(numbers.get(id(row), -1))
        is_swap = reverse_source is not None and reverse_source.row is changes[n].before
        after = changes[n].after
        is_here = sections.get(row.section, row.section) == changes[n].section
        moves[n] = Transformation(
            TransformationKind.SWAPPED if is_swap else TransformationKind.MOVED,
            row.elements,
            exceptions,
            sources=(row.fqn,),
            source_section=None if is_here else row.section,
            rounding=name_rounding(row.dtype, after.dtype) if after is not None else None,
        )
    return moves
