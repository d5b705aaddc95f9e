"""Order of the changes of a diff: `--sort` and `--top`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statecli.commands.diff.result import Change, Field, Status, TransformationKind
from statecli.core.model_state import TensorKey
from statecli.core.output import ChangeOrder
from statecli.report import RowView
from statecli.report.change_text import has_new_not_finite
from statecli.report.row_order import order_by_name


def arrange_changes(changes: Sequence[Change], view: RowView) -> Sequence[Change]:
    """Return the rows to show, in the order of `--sort`.

    By default new NaN and Inf come first or, if rows are hidden, the largest changes. In an order by change, scales and
    other parts of a recognised quantized weight come last, because the error of the weight includes them.
    """
    order = view.sort or (ChangeOrder.CHANGE if view.hides_rows else None)
    if order is None:
        return sorted(changes, key=lambda change: not has_new_not_finite(change))
    parts = _list_quantized_parts(changes)
    keys: dict[str, Any] = {
        ChangeOrder.NAME: order_by_name,
        ChangeOrder.SIZE: lambda change: -_count_bytes(change),
        ChangeOrder.CHANGE: lambda change: (change.key in parts, order_change(change)),
    }
    return sorted(changes, key=keys[order.value])[: view.top]


def _list_quantized_parts(changes: Sequence[Change]) -> set[TensorKey]:
    """Return the keys of quantized weights' tensors that only one checkpoint has. Omit tensors with new NaN or Inf."""
    kinds = (TransformationKind.QUANTIZED, TransformationKind.DEQUANTIZED)
    parts_by_section = [
        (change.section, transformation.sources)
        for change in changes
        if (transformation := change.transformation) and transformation.kind in kinds
    ]
    names = {TensorKey(section, name) for section, sources in parts_by_section for name in sources}
    one_sided = [change for change in changes if change.status in (Status.ADDED, Status.REMOVED)]
    own_names = {change.key for change in one_sided if not has_new_not_finite(change)}
    return names & own_names - {change.key for change in changes if change.transformation is not None}


def order_change(change: Change) -> tuple[int, float, float, int]:
    """Return a sort key: new NaN or Inf, then added, removed and reshaped tensors, then falling relative L2 change."""
    has_measure = change.before is not None and change.after is not None and Field.SHAPE not in change.fields
    rank = 0 if has_new_not_finite(change) else 2 if has_measure else 1
    delta = change.values
    relative, largest = (delta.relative_l2 or 0.0, delta.max_abs or 0.0) if delta is not None else (0.0, 0.0)
    return rank, -relative, -largest, -_count_bytes(change)


def _count_bytes(change: Change) -> int:
    return max(tensor.nbytes for tensor in (change.before, change.after) if tensor is not None)
