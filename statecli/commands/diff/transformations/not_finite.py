"""Count new NaN and infinities in added or resized tensors. The plain diff does not compare these tensors."""

from __future__ import annotations

from collections.abc import Sequence

from statecli.commands.diff.result import Change, Status, TransformationKind
from statecli.core.model_state import Stats, TensorInfo, TensorKey
from statecli.values.delta import Delta
from statecli.values.stats import compute_stats

#: Kinds with elements that do not exist before, such as new rows. Other kinds have such elements only as exceptions.
_KINDS_WITH_NEW_ELEMENTS = (TransformationKind.RESIZED, TransformationKind.ADAPTER)


def count_new_not_finite(changes: Sequence[Change], *, jobs: int) -> dict[int, Delta]:
    """Return the counts, keyed by index in `changes`. Tensors without new NaN and infinities are left out.

    Other measures of the difference are None. The number of differing elements is the number of exceptions, or of new
    NaN and infinities if larger.
    """
    sides = _list_sides(changes)
    tensors = [row for before, after in sides.values() for row in (*before, *after)]
    stats = iter(compute_stats(tensors, jobs=jobs))
    counts: dict[int, Delta] = {}
    for n, (before, after) in sides.items():
        old, new = ([s for _ in side if isinstance(s := next(stats), Stats)] for side in (before, after))
        nan_before, nan_after = (sum(s.nan or 0 for s in side) for side in (old, new))
        inf_before, inf_after = (sum(s.inf or 0 for s in side) for side in (old, new))
        transformation = changes[n].transformation
        if transformation is not None and (nan_after > nan_before or inf_after > inf_before):
            new_ones = max(0, nan_after - nan_before) + max(0, inf_after - inf_before)
            counts[n] = Delta(
                sum(row.elements for row in after),
                max(transformation.exceptions, new_ones),
                nan_before=nan_before,
                nan_after=nan_after,
                inf_before=inf_before,
                inf_after=inf_after,
            )
    return counts


def _list_sides(changes: Sequence[Change]) -> dict[int, tuple[list[TensorInfo], list[TensorInfo]]]:
    """Return the old and new tensors of each transformation that may add elements, keyed by index in `changes`."""
    old = {row.key: row for change in changes if (row := change.before) is not None}
    added_rows = {change.key: change.after for change in changes if change.status is Status.ADDED}
    sides = {}
    for n, change in enumerate(changes):
        transformation = change.transformation
        if transformation is None or change.values is not None or change.status is Status.IDENTICAL:
            continue
        if transformation.exceptions or transformation.kind in _KINDS_WITH_NEW_ELEMENTS:
            section = change.before.section if change.before is not None else change.section
            section = section if transformation.source_section is None else transformation.source_section
            before = [change.before, *(old.get(TensorKey(section, name)) for name in transformation.sources)]
            after = [
                change.after,
                *(added_rows.get(TensorKey(change.section, name)) for name in transformation.sources),
            ]
            sides[n] = [row for row in before if row is not None], [row for row in after if row is not None]
    return sides
