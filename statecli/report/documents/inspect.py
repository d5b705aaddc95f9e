"""JSON document of `inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import UNSET, UnsetType

from statecli.commands.inspect.quantized_rows import fold_tensors, select_weights
from statecli.commands.inspect.run import Inspection
from statecli.core.finding import Finding
from statecli.core.model_state import Kind, Oddity, Scalar, TensorInfo
from statecli.core.quantized_layout_names import QuantizedLayout
from statecli.core.sizes import Totals, sum_by_kind
from statecli.core.version import __version__
from statecli.report import Problem, Rows
from statecli.report.documents.shared import (
    AcceptedRow,
    ProblemRow,
    TensorRow,
    build_accepted_rows,
    build_problem_row,
    build_tensor_row,
    strip_wordings,
)
from statecli.report.layer_roles import Role, list_roles

if TYPE_CHECKING:
    from statecli.core.logical_weights import LogicalWeight


class QuantizedRow(msgspec.Struct, frozen=True):
    """A quantized weight. `tensors` are its tensors, the codes first; `bytes` is the size of all its tensors.

    `dtype` and `bits` describe a code. `shape` is null if the checkpoint does not store the shape; `elements` is then
    an upper limit, or null. `defect` is the problem with the tensors.
    """

    fqn: str
    section: str
    layout: QuantizedLayout
    dtype: str
    bits: int | None
    shape: tuple[int, ...] | None
    elements: int | None
    bytes: int
    tensors: tuple[str, ...]
    defect: str | None


class WeightTotals(msgspec.Struct, frozen=True):
    """Sums over a checkpoint with quantized weights. Each quantized weight counts as one weight.

    `parameters` is the number of elements of all parameters; `quantized` the number of quantized weights, `tensors` the
    number of their tensors. `unknown_shapes` weights do not store their shape: `parameters` is then an upper limit,
    without the elements of `unknown_elements` weights.
    """

    parameters: int
    quantized: int
    tensors: int
    unknown_shapes: int
    unknown_elements: int


class InspectDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """`statecli inspect -f json`. Consumers ignore keys they do not know.

    `roles` are the tensors that each layer has, with the size of their values; the key needs `--stats`.

    `inputs` describes the arguments of forward; the key is left out if forward was not called.
    """

    schema: str
    statecli: str
    target: str
    format: str
    sections: tuple[str, ...]
    summary: dict[str, Totals]
    tensors: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...] = ()
    metadata: Mapping[str, Scalar] = {}
    to: str | UnsetType = UNSET
    inputs: str | UnsetType = UNSET
    verdict: str = ""
    problems: tuple[ProblemRow, ...] = ()
    accepted: tuple[AcceptedRow, ...] = ()
    quantized: tuple[QuantizedRow, ...] = ()
    weights: WeightTotals | UnsetType = UNSET
    roles: tuple[Role, ...] = ()


def build_inspect_document(inspection: Inspection, problems: Iterable[Problem], verdict: str) -> InspectDocument:
    """Return the document of an inspection."""
    state = inspection.state
    weights = select_weights(state.tensors, inspection.weights)
    owners = {part.key: weight.fqn for weight in weights for part in weight.parts[1:]}
    owners |= {w.codes.key: w.fqn for w in weights if len(w.parts) > 1}
    distributions, spectra = inspection.distributions, inspection.spectra
    build_row = (
        partial(build_tensor_row, owners=owners, distributions=distributions, spectra=spectra)
        if owners or distributions or spectra
        else build_tensor_row
    )
    return InspectDocument(
        "statecli.inspect/1",
        __version__,
        state.target,
        state.format,
        state.sections,
        sum_by_kind(state.tensors),
        cast("tuple[TensorRow, ...]", Rows(build_row, state.tensors)),
        strip_wordings(inspection.findings),
        state.oddities,
        state.metadata.values,
        inspection.to if inspection.to is not None else UNSET,
        inspection.inputs if inspection.inputs is not None else UNSET,
        verdict,
        tuple(map(build_problem_row, problems)),
        build_accepted_rows(inspection.accepted),
        cast("tuple[QuantizedRow, ...]", Rows(_build_quantized_row, weights)) if weights else (),
        _sum_weights(state.tensors, weights) if weights else UNSET,
        list_roles(state.tensors),
    )


def _build_quantized_row(weight: LogicalWeight) -> QuantizedRow:
    return QuantizedRow(
        fqn=weight.fqn,
        section=weight.codes.section,
        layout=weight.layout,
        dtype=weight.dtype,
        bits=weight.bits,
        shape=weight.shape,
        elements=weight.elements,
        bytes=weight.nbytes,
        tensors=tuple(part.fqn for part in weight.parts),
        defect=weight.defect or None,
    )


def _sum_weights(tensors: Iterable[TensorInfo], weights: Sequence[LogicalWeight]) -> WeightTotals:
    return WeightTotals(
        parameters=sum_by_kind(fold_tensors(tensors, weights))[Kind.PARAMETER.value].elements,
        quantized=len(weights),
        tensors=sum(len(weight.parts) for weight in weights),
        unknown_shapes=sum(weight.shape is None for weight in weights),
        unknown_elements=sum(weight.elements is None for weight in weights),
    )
