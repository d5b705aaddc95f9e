"""Totals of a diff: the relative change of all changed parameters together, and the counts of NaN and Inf."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from statecli.commands.diff.result import Change, Diff, TransformationKind
from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.model_state import Kind
from statecli.core.units import format_number
from statecli.values.delta import ZERO_BEFORE, Delta

#: Kinds with codes on one side; a difference between codes and numbers means nothing.
_KINDS_WITH_CODES = (TransformationKind.QUANTIZED, TransformationKind.DEQUANTIZED, TransformationKind.CODES)
#: Number of significant digits in human-readable outputs.
DIGITS = 3


class ChangeTotals(msgspec.Struct, frozen=True):
    """Totals over the parameters whose values changed. Tied tensors count once.

    Attributes:
        tensors: Number of changed parameters with a norm. The other parameters have no common finite position, or no
            norm.
        l2: L2 norm of Δ; None if no parameter has a norm.
        relative_l2: `l2` over the L2 norm before, of the same parameters; None if the norm before is zero.
        nan_before, nan_after, inf_before, inf_after: Counts over all tensors whose values changed.
    """

    tensors: int = 0
    l2: float | None = None
    relative_l2: float | None = None
    nan_before: int = 0
    nan_after: int = 0
    inf_before: int = 0
    inf_after: int = 0


def sum_changes(diff: Diff) -> ChangeTotals:
    """Return the totals of a diff."""
    changes_with_values = [(change, change.values) for change in diff.changes if change.values is not None]
    norms = list(_list_norms(changes_with_values))
    l2 = math.hypot(*(change for change, _ in norms)) if norms else None
    before = math.hypot(*(norm for _, norm in norms))
    return ChangeTotals(
        tensors=len(norms),
        l2=_drop_not_finite(l2),
        relative_l2=_drop_not_finite(l2 / before) if l2 is not None and before else None,
        nan_before=sum(delta.nan_before for _, delta in changes_with_values),
        nan_after=sum(delta.nan_after for _, delta in changes_with_values),
        inf_before=sum(delta.inf_before for _, delta in changes_with_values),
        inf_after=sum(delta.inf_after for _, delta in changes_with_values),
    )


def _drop_not_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _list_norms(changes_with_values: Iterable[tuple[Change, Delta]]) -> Iterable[tuple[float, float]]:
    """Yield the L2 norms of Δ and of the old values for each changed parameter whose norms are known."""
    places: set[object] = set()
    for change, delta in changes_with_values:
        after = change.after
        stored_at = after is not None and (after.data or after.parts) and (after.data, after.parts)
        is_codes = after is not None and after.dtype in INTEGER_DTYPES  # codes of a quantized weight
        if change.kind is not Kind.PARAMETER or is_codes or (stored_at and stored_at in places):
            continue
        if change.transformation is not None and change.transformation.kind in _KINDS_WITH_CODES:
            continue
        places.add(stored_at)
        if delta.l2 is not None and delta.relative_l2:
            yield delta.l2, delta.l2 / delta.relative_l2
        elif delta.l2 is not None and delta.reason == ZERO_BEFORE:
            yield delta.l2, 0.0


def format_totals(totals: ChangeTotals) -> list[str]:
    """Format the totals: the relative change of several changed parameters, and counts of NaN and Inf that changed."""
    parts = []
    if totals.tensors > 1 and totals.relative_l2 is not None:
        parts.append(f"‖Δ‖/‖w‖ {format_number(totals.relative_l2, DIGITS)} of changed parameters")
    for word, before, after in (
        ("NaN", totals.nan_before, totals.nan_after),
        ("Inf", totals.inf_before, totals.inf_after),
    ):
        if before != after:
            parts.append(f"{word} {before:,} → {after:,}")
    return parts
