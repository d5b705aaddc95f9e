"""Sentences about the tensors whose values stand out: NaN, infinity, and outliers among the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.units import format_fqn, format_section, plural
from statecli.report import NamedTensors
from statecli.report.layer_roles import list_roles
from statecli.report.row_order import arrange_naturally


def list_unusual_values(state: ModelState) -> tuple[NamedTensors, ...]:
    """Return a sentence for each kind of unusual values, or () if the values were not read."""
    return tuple(_iter_sentences(state))


def _iter_sentences(state: ModelState) -> Iterator[NamedTensors]:
    by_section = len(state.sections) > 1
    measured_tensors = arrange_naturally([tensor for tensor in state.tensors if tensor.stats is not None])
    for name, noun in (("nan", "NaN"), ("inf", "infinity")):
        tensors = [tensor for tensor in measured_tensors if getattr(tensor.stats, name)]
        if tensors:
            verb = "contains" if len(tensors) == 1 else "contain"
            text = f"{plural(len(tensors), 'tensor')} {verb} {noun}"
            yield NamedTensors(text, _list_labels(tensors, by_section=by_section), f"{name}>0")
    outliers = {(role.section, fqn) for role in list_roles(state.tensors) for fqn in role.outliers}
    if outliers:
        tensors = [tensor for tensor in measured_tensors if tensor.key in outliers]
        text = f"{plural(len(tensors), 'outlier')} among the layers"
        yield NamedTensors(text, _list_labels(tensors, by_section=by_section), "remark:*outlier*")


def _list_labels(tensors: Sequence[TensorInfo], *, by_section: bool) -> tuple[str, ...]:
    """Return the tensor names as the page's list shows them. With `by_section`, the section comes first."""
    return tuple(
        f"{format_section(tensor.section)}: {format_fqn(tensor.fqn)}" if by_section else format_fqn(tensor.fqn)
        for tensor in tensors
    )
