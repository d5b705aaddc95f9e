"""Show a quantized weight as a single row, in place of its tensors or before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.core.model_state import Evidence, Kind, TensorInfo, TensorKey
from statecli.core.units import join_names

if TYPE_CHECKING:
    from statecli.core.logical_weights import LogicalWeight

_MAX_SHOWN_PARTS = 8


def fold_tensors(
    tensors: Iterable[TensorInfo], weights: Sequence[LogicalWeight], *, parts: bool = False
) -> list[TensorInfo]:
    """Replace the tensors of each quantized weight by one row. With `parts`, the tensors follow the row.

    A weight is shown where its codes are among the tensors; otherwise its tensors stay.
    """
    rows = list(tensors)
    if not weights:
        return rows
    weight_by_codes = {weight.codes.key: weight for weight in select_weights(rows, weights)}
    hidden_parts = {part.key for weight in weight_by_codes.values() for part in weight.parts} - weight_by_codes.keys()
    folded = []
    for row in rows:
        if (weight := weight_by_codes.get(row.key)) is not None:
            folded.append(build_row(weight))
            if parts and len(weight.parts) > 1:
                folded.extend(replace(part, note=f"part of {weight.fqn}") for part in weight.parts)
        elif row.key not in hidden_parts:
            folded.append(row)
    return folded


def select_weights(tensors: Iterable[TensorInfo], weights: Sequence[LogicalWeight]) -> list[LogicalWeight]:
    """Return the weights whose codes are among the tensors."""
    if not weights:
        return []
    present = {row.key for row in tensors}
    return [weight for weight in weights if weight.codes.key in present]


def build_row(weight: LogicalWeight) -> TensorInfo:
    """Return the row of a quantized weight: its own name, shape and elements, and the bytes of all its tensors."""
    codes = weight.codes
    is_registered = codes.evidence in (Evidence.REGISTERED, Evidence.TYPE) and codes.kind is Kind.PARAMETER
    return replace(
        codes,
        fqn=weight.fqn,
        dtype=weight.dtype,
        shape=weight.shape,
        elements=weight.elements or 0,
        nbytes=weight.nbytes,
        kind=Kind.PARAMETER,
        evidence=codes.evidence if is_registered else Evidence.CONVENTION,
        storage_bytes=None,
        note=describe_parts(weight),
        data=None,
        parts=(),
    )


def list_rows_by_part(weights: Iterable[LogicalWeight]) -> dict[TensorKey, TensorInfo]:
    """Map (section, name) of each tensor of a quantized weight to the row of the weight."""
    rows = {}
    for weight in weights:
        row = build_row(weight)
        rows.update({part.key: row for part in weight.parts})
    return rows


def describe_parts(weight: LogicalWeight) -> str:
    """Describe the defect and the tensors of a weight: `shape not stored; from weight, absmax, quant_map`."""
    last = weight.fqn.rpartition(".")[2]
    names = [name.removeprefix(f"{last}.") for name in weight.names]
    return "; ".join(filter(None, (describe_defect(weight), f"from {join_names(names, _MAX_SHOWN_PARTS)}")))


def describe_defect(weight: LogicalWeight) -> str:
    """Return the defect of a quantized weight, such as `shape not stored`, or "" for a sound weight."""
    return weight.defect or ("shape not stored" if weight.shape is None else "")
