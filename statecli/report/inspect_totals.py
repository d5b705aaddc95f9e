"""Counts of a tensor list: parameters, bytes, dtypes and the tensors of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.commands.inspect.quantized_rows import fold_tensors, select_weights
from statecli.commands.inspect.run import Inspection
from statecli.core import sizes
from statecli.core.model_state import Evidence, Kind, ModelState, TensorInfo, TensorKey
from statecli.core.units import format_count, format_section, format_size, plural
from statecli.report import folder_settings

if TYPE_CHECKING:
    from statecli.core.logical_weights import LogicalWeight

#: Largest number of dtypes in the subtitle.
MAX_SHOWN_DTYPES = 3


def has_stats(inspection: Inspection) -> bool:
    """Return True if the statistics of a tensor were computed."""
    return any(tensor.stats is not None for tensor in inspection.state.tensors)


def list_weights_by_row(inspection: Inspection) -> dict[TensorKey, LogicalWeight]:
    """Return the quantized weights that have a row, by section and name, or {} if their tensors have rows instead."""
    if inspection.to is not None or has_stats(inspection):
        return {}
    return {TensorKey(weight.codes.section, weight.fqn): weight for weight in inspection.weights}


def describe_count(count: int, noun: str) -> str:
    """Format a number with its noun: `1 parameter`, `7.2 B parameters`."""
    return f"1 {noun}" if count == 1 else f"{format_count(count)} {noun}s"


def format_subtitle(inspection: Inspection) -> str:
    """Return `torch-zip, 78 tensors, 8.79 kB, float32: 1.08 K parameters, all trainable; sections model, optimizer`."""
    state = inspection.state
    tensors, size = len(state.tensors), _sum_stored_bytes(inspection)
    parameters = count_parameters(inspection)
    text = format_parameters_of(inspection, parameters)
    if inspection.weights:
        state = replace(state, tensors=tuple(fold_tensors(state.tensors, inspection.weights)))
    counts = f": {text}{_describe_trainable(state, parameters)}" if parameters else ""
    sections = f"; sections {', '.join(map(format_section, state.sections))}" if len(state.sections) > 1 else ""
    dtypes = f", {_list_dtypes(state.tensors)}" if state.tensors else ""
    size_text = f"{plural(tensors, 'tensor')}, {format_size(size)}"
    return f"{state.format}, {size_text}{dtypes}{counts}{sections}{_format_scalars(state)}"


def _sum_stored_bytes(inspection: Inspection) -> int:
    """Return the size of all tensors in bytes. For a quantized tensor subclass, sum the sizes of its inner tensors."""
    of_subclasses = [weight for weight in inspection.weights if len(weight.parts) == 1]
    return sizes.sum_bytes(fold_tensors(inspection.state.tensors, of_subclasses))


def count_parameters(inspection: Inspection) -> int:
    """Count the elements of all parameters. A quantized weight counts as the weight that it represents."""
    tensors = fold_tensors(inspection.state.tensors, inspection.weights)
    return sizes.sum_by_kind(tensors)[Kind.PARAMETER.value].elements


def format_parameters_of(inspection: Inspection, count: int) -> str:
    """Return `90.4 K parameters`. Mark the number as an upper limit or incomplete if sizes are unknown."""
    weights = select_weights(inspection.state.tensors, inspection.weights)
    has_upper_bound = sum(weight.shape is None and weight.elements is not None for weight in weights)
    unknown = sum(weight.elements is None for weight in weights)
    text = f"{describe_count(count, 'parameter')}{' at most' if has_upper_bound else ''}"
    return f"{text} and {plural(unknown, 'weight')} of unknown size" if unknown else text


def _describe_trainable(state: ModelState, parameters: int) -> str:
    """Describe how many elements of the parameters require grad. Return "" if requires_grad is not recorded."""
    rows = [tensor for tensor in state.tensors if tensor.kind is Kind.PARAMETER]
    if any(row.requires_grad is None for row in rows):
        return ""
    trainable = sizes.sum_by_kind([row for row in rows if row.requires_grad])[Kind.PARAMETER.value].elements
    count = {parameters: "all", 0: "none"}.get(trainable, format_count(trainable))
    return f", {count} trainable"


def _list_dtypes(tensors: Sequence[TensorInfo]) -> str:
    """Return the dtypes that take the most bytes, and the number of further dtypes."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.nbytes
    dtypes = [dtype for dtype, _ in counts.most_common()]
    further_text = f" and {len(dtypes) - MAX_SHOWN_DTYPES} more dtypes" if len(dtypes) > MAX_SHOWN_DTYPES else ""
    return f"{' + '.join(dtypes[:MAX_SHOWN_DTYPES])}{further_text}"


def _format_scalars(state: ModelState) -> str:
    """Format the first scalars at the top level of a checkpoint, such as epoch and step."""
    # Remove the group before a key, because every key of a GGUF file has a group.
    values_by_key = {key.removeprefix("general."): value for key, value in state.metadata.values.items()}
    scalars = {
        **folder_settings.select_headline(state.metadata),
        **{key: value for key, value in values_by_key.items() if "." not in key},
    }
    texts = [f"{key}={value}" for key, value in scalars.items() if len(str(value)) <= 40]
    return f"; {', '.join(texts[:6])}" if texts else ""


def count_hidden_parts(inspection: Inspection) -> int:
    """Return the number of tensors that have no row of their own, because they share a quantized weight's row."""
    weights = list_weights_by_row(inspection)
    if not weights:
        return 0
    rows = {row.key for row in inspection.state.tensors}
    return sum(len(weight.parts) - 1 for key, weight in weights.items() if key in rows)


def format_totals(state: ModelState, part_count: int) -> tuple[str, ...]:
    """Format a line of totals for each kind of tensor. `part_count` is the number of tensors without their own row."""
    summary = sizes.sum_by_kind(state.tensors)
    assumed_count = len([t for t in state.tensors if t.evidence is Evidence.ASSUMED and t.kind is Kind.PARAMETER])
    lines = []
    for kind, total in summary.items():
        if total.tensors:
            of_some = f" of {assumed_count:,}" if assumed_count < total.tensors else ""
            assumed_text = f" (kind{of_some} assumed)" if kind == Kind.PARAMETER.value and assumed_count else ""
            tensors = plural(total.tensors, "tensor")
            if part_count and kind == Kind.PARAMETER.value:
                tensors = f"{plural(total.tensors, 'weight')} in {plural(total.tensors + part_count, 'tensor')}"
            counts = f"{tensors}{assumed_text}, {plural(total.elements, 'element')}"
            lines.append(f"{kind:<12} {counts}, {total.bytes:,} bytes")
    return tuple(lines)
