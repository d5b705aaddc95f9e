"""`statecli inspect`: select, measure and move the tensors of a target, and report findings about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from statecli import core, live, values
from statecli.commands import inspect as inspect_package, verify
from statecli.commands.inspect import rules
from statecli.commands.inspect.quantized_rows import list_rows_by_part
from statecli.commands.inspect.unregistered_harm import Harm
from statecli.core import move_rules, registration_rules
from statecli.core.error_causes import Failure
from statecli.core.errors import ModelError, UsageError, option
from statecli.core.finding import Consequence, Finding, Severity, Wording
from statecli.core.model_state import Kind, ModelState, Stats, TensorInfo, TensorKey
from statecli.core.parameter_or_buffer import MODEL_KINDS
from statecli.core.progress import Progress
from statecli.core.quantized_codes import may_be_quantized
from statecli.core.result_views import ResultViews
from statecli.core.selection import Selection, glob_names, select
from statecli.core.severity import decide_tensor_severity
from statecli.core.unstored_ties import add_unstored_ties
from statecli.core.value_distribution import Distribution
from statecli.core.value_spectrum import Spectrum
from statecli.live.spec import ModelSpec
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load

if TYPE_CHECKING:
    import torch
    from torch import nn

    from statecli.commands.verify.forward_effects import CalledModel
    from statecli.core.logical_weights import LogicalWeight
    from statecli.live.built_model import BuiltModel
    from statecli.targets.target_result import Accepted


class Request(msgspec.Struct, frozen=True):
    """The options of `inspect`.

    `input` are texts such as `int64:2x16<30522`, `inputs` names a function for the arguments of forward. If both are
    empty, forward is not called.
    """

    target: str
    to: str | None = None
    model: str | None = None
    stats: bool = False
    distributions: bool = False
    spectra: bool = False
    selection: Selection = Selection()
    init_device: str | None = None
    input: tuple[str, ...] = ()
    inputs: str | None = None


class Inspection(ResultViews, msgspec.Struct, frozen=True):
    """Result of `inspect`.

    Attributes:
        state: The selected tensors, and the settings next to them.
        findings: Reasons for exit status 1.
        to: Device to which the tensors were moved; None without a move.
        inputs: Description of the inputs of forward; None if forward was not called.
        weights: The quantized weights; the state has their tensors.
        distributions: Distribution of the values, by section and name of the tensor.
        spectra: Singular values of the matrices, by section and name of the tensor.
        accepted: Findings accepted by `ignore` or a baseline, with the reasons; `findings` does not have them.
    """

    state: ModelState
    findings: tuple[Finding, ...] = ()
    to: str | None = None
    inputs: str | None = None
    weights: tuple[LogicalWeight, ...] = ()
    distributions: Mapping[TensorKey, Distribution] = {}
    spectra: Mapping[TensorKey, Spectrum] = {}
    accepted: tuple[Accepted, ...] = ()

    @property
    def broken(self) -> list[Failure]:
        """The name of each unreadable tensor, with the reason."""
        return [Failure(tensor.fqn, tensor.damage) for tensor in self.state.tensors if tensor.damage]


def inspect(request: Request, progress: Progress | None = None, python_inputs: object = None) -> Inspection:
    """Read a target, select its tensors and, if requested, move and measure them.

    `python_inputs` are inputs from the Python API. Raises `StateError`; `FilteredOut` if the filters leave no tensor.
    """
    spec = load.find_class_spec(request.target)
    if spec is not None:
        return _inspect_class(request, spec, python_inputs)
    if request.init_device is not None and request.model is None:
        raise UsageError(
            f"{option('--init-device', request.init_device)}: {request.target} is not a model class, "
            "so statecli does not build a model; leave the option out"
        )
    if _has_inputs(request, python_inputs):
        option_text = (
            option("--input", request.input[0]) if request.input else option("--input-from", request.inputs or None)
        )
        raise UsageError(
            f"{option_text}: {request.target} is a checkpoint, which has no forward to call; leave the option out"
        )
    if not (request.stats or request.to):
        return _inspect_checkpoint(request, progress)
    with refuse_files_that_change():
        return _inspect_checkpoint(request, progress)


def _inspect_class(request: Request, spec: ModelSpec, python_inputs: object) -> Inspection:
    for name, is_given in (("--distributions", request.distributions), ("--spectra", request.spectra)):
        if is_given:
            raise UsageError(
                f"{option(name)}: needs a checkpoint, and {request.target} is a class; use {option('--stats')}"
            )
    if request.model is not None:
        raise UsageError(
            f"{option('--model')}: needs a checkpoint, and {request.target} is a class; leave the option out"
        )
    return inspect_built_model(
        live.build.build(spec, init_device=request.init_device, values=request.stats), request, python_inputs
    )


def inspect_live_model(module: nn.Module, request: Request, python_inputs: object) -> Inspection:
    """Inspect a live model without changing the model: move and call a copy.

    A model that cannot be copied is listed without a move.
    """
    try:
        built_model = verify.live_model.build_copy(module)
    except ModelError as error:
        if request.to is not None or _has_inputs(request, python_inputs):
            raise
        reason = str(error).removeprefix(f"{request.target}: ")
        state = live.model_reader.read_without_move(
            verify.model_under_test.wrap_live_model(module), request.target, reason, stats_of=_choose_measure(request)
        )
        weights = inspect_package.quantized.list_live_weights(module, state)
        return Inspection(select(state, request.selection, request.target), weights=weights)
    return inspect_built_model(built_model, request, python_inputs)


def inspect_built_model(built_model: BuiltModel, request: Request, python_inputs: object) -> Inspection:
    """Inspect a model that statecli built itself, and overwrite its values after `request.stats` has read them.

    Raises ModelError if forward or a move would read a freed storage.
    """
    calls_forward = _has_inputs(request, python_inputs)
    if calls_forward or request.to not in (None, "meta"):
        live.measure.check_no_freed_storage(built_model.module, request.target)
    called_model: CalledModel | None = None
    if calls_forward:
        inputs = request.input, request.inputs, python_inputs
        called_model = verify.forward_effects.call_built_model(built_model, request.target, *inputs)
        built_model = called_model.built_model
    measure = _choose_measure(request)
    if request.to is None:
        state = live.model_reader.read(built_model, request.target, stats_of=measure)
    else:
        state = live.model_reader.move(built_model, request.target, request.to, stats_of=measure)
    weights = inspect_package.quantized.list_live_weights(built_model.listed_module, state)
    parts = list_rows_by_part(weights) if request.selection else {}
    state = select(called_model.mark_state(state) if called_model else state, request.selection, request.target, parts)
    harm = inspect_package.harm_in_forward.measure_harm(called_model, state) if called_model else {}
    tensor_findings = (
        _report_left_behind(state, request.to, harm) if request.to else _report_unregistered(state, harm, weights)
    )
    findings = (*tensor_findings, *_report_random_buffers(state), *_report_broken_ties(state))
    return Inspection(state, findings, request.to, called_model.inputs.text if called_model else None, weights)


def _has_inputs(request: Request, python_inputs: object) -> bool:
    return bool(request.input) or request.inputs is not None or python_inputs is not None


def _choose_measure(request: Request) -> Callable[[torch.Tensor], Stats] | None:
    return values.stats.compute_live_stats if request.stats else None


def _inspect_checkpoint(request: Request, progress: Progress | None) -> Inspection:
    state = load.read_checkpoint(request.target)
    findings: list[Finding] = []
    if request.model is not None:
        text = load.resolve_auto_class(request.model, request.target)
        names = [tensor.fqn for tensor in state.tensors if tensor.kind in MODEL_KINDS]
        model, renamed_names = load.read_class_state(text, init_device=request.init_device, names=names)
        state, findings = core.model_kinds.classify_by_model(state, model, renamed_names)
    else:
        state = add_unstored_ties(state)
    full_state = state
    is_quantized = may_be_quantized(state.tensors) or any(row.parts for row in state.tensors)
    weights = inspect_package.quantized.list_weights(state) if is_quantized else ()
    state = select(state, request.selection, request.target, list_rows_by_part(weights) if request.selection else {})
    if state is not full_state:
        findings = list(_select_findings(findings, full_state, state, request))
    size = sum(tensor.nbytes for tensor in state.tensors)
    if request.stats:
        state = values.stats.fill_stats(state, progress(size) if progress else None)
    distributions: Mapping[TensorKey, Distribution] = {}
    if request.distributions:
        distributions = values.distribution.compute_distributions(state.tensors, progress(size) if progress else None)
    spectra: Mapping[TensorKey, Spectrum] = {}
    if request.spectra:
        spectra = values.spectrum.compute_spectra(state.tensors, progress(size) if progress else None)
    if request.to:
        state = values.to_device.place_on_device(state, request.to, progress(size) if progress else None)
        findings.extend(_report_left_behind(state, request.to, {}))
    return Inspection(state, tuple(findings), request.to, weights=weights, distributions=distributions, spectra=spectra)


def _select_findings(
    findings: Iterable[Finding], full_state: ModelState, state: ModelState, request: Request
) -> Iterator[Finding]:
    """Yield the findings about selected tensors and the whole target, and about selected names that have no tensor."""
    selected_names, existing_names = (
        {tensor.fqn for tensor in tensors} for tensors in (state.tensors, full_state.tensors)
    )
    by_section = len(full_state.sections) > 1
    for finding in findings:
        fqn = finding.fqn
        names = glob_names(fqn, finding.section, by_section=by_section) if fqn is not None else ()
        if (
            fqn is None
            or fqn in selected_names
            or (fqn not in existing_names and request.selection.selects_name(names))
        ):
            yield finding


def _report_unregistered(
    state: ModelState, harm: Mapping[str, Harm], weights: Sequence[LogicalWeight]
) -> Iterator[Finding]:
    """Yield findings about unregistered tensors of a class, if the tensors may do harm.

    A tensor of a quantized parameter belongs to the library, unless a move left the tensor behind.
    """
    recomputed = state.recomputed
    parts = {part.fqn for weight in weights for part in weight.parts}
    for tensor in state.tensors:
        is_part = tensor.fqn in parts and tensor.moves is not False
        is_meant = tensor.is_input or tensor.fqn in recomputed or is_part
        if tensor.kind is not Kind.UNREGISTERED or is_meant:
            continue
        tensor_harm = harm.get(tensor.fqn) or Harm(decide_tensor_severity(tensor))
        if tensor_harm.severity in (None, Severity.NOTE):
            continue
        description = _add_remark(registration_rules.describe_unregistered(tensor), tensor_harm)
        consequence = Consequence(tensor_harm.remark) if tensor_harm.is_unknown else None
        yield registration_rules.choose_rule(tensor).finding(
            Wording(description, tensor.fqn, consequence=consequence),
            target=state.target,
            fqn=tensor.fqn,
            section=tensor.section,
            help=tensor.fix,
            severity=tensor_harm.severity,
        )
        yield from _add_section(tensor_harm.findings, tensor)


def _add_remark(description: str, harm: Harm) -> str:
    return f"{description}; {harm.remark}" if harm.remark else description


def _add_section(findings: Iterable[Finding], tensor: TensorInfo) -> Iterator[Finding]:
    return (msgspec.structs.replace(finding, section=tensor.section) for finding in findings)


def _report_left_behind(state: ModelState, to: str, harm: Mapping[str, Harm]) -> Iterator[Finding]:
    recomputed = state.recomputed
    for tensor in state.tensors:
        if tensor.after and tensor.after.followed is not True and not (tensor.fqn in recomputed or tensor.is_input):
            tensor_harm = harm.get(tensor.fqn) or Harm(decide_tensor_severity(tensor))
            if tensor_harm.left_behind is not None:
                yield _report_tensor(tensor, state, to, tensor_harm)
            yield from _add_section(tensor_harm.findings, tensor)


def _report_random_buffers(state: ModelState) -> Iterator[Finding]:
    """Yield a finding for each buffer that neither a checkpoint nor the constructor restores."""
    for tensor in state.tensors:
        if tensor.persistent is False and tensor.rebuilt is False and tensor.kind is Kind.BUFFER:
            yield verify.rules.LOST_BY_SAVING.finding(
                f"{tensor.fqn}: {registration_rules.RANDOM_VALUE_REMARK}",
                target=state.target,
                fqn=tensor.fqn,
                section=tensor.section,
                help=registration_rules.PERSISTENT_HELP,
                origin=tensor.origin or msgspec.UNSET,
            )


def _report_broken_ties(state: ModelState) -> Iterator[Finding]:
    """Yield the findings about ties that a move breaks, limited to the names of selected tensors."""
    names = {tensor.fqn for tensor in state.tensors} | {a for tensor in state.tensors for a in tensor.aliases}
    for finding in move_rules.report_broken_ties(state):
        if finding.fqn in names:
            yield msgspec.structs.replace(finding, section="model")


def _report_tensor(tensor: TensorInfo, state: ModelState, to: str, harm: Harm) -> Finding:
    has_followed = tensor.after.followed if tensor.after else None
    if has_followed is None:
        reason = tensor.note or "not found after the move"
        message = f"{tensor.fqn}: statecli does not know whether the tensor moves to {to}: {reason}"
        return rules.MOVE_UNKNOWN.finding(message, target=state.target, fqn=tensor.fqn, section=tensor.section)
    if not state.traits.is_class:
        message = f"{tensor.fqn}: the bytes on {to} differ from the bytes of the file"
        return rules.BYTES_DIFFER.finding(message, target=state.target, fqn=tensor.fqn, section=tensor.section)
    device = tensor.after.device if tensor.after else tensor.device
    was_there = tensor.device == device and str(device).partition(":")[0] == to.partition(":")[0]
    description = move_rules.KEEPS_MEMORY_REMARK if was_there else f"left on {device} when the model moves to {to}"
    return move_rules.LEFT_BEHIND.finding(
        f"{tensor.fqn}: {_add_remark(description, harm)}",
        target=state.target,
        fqn=tensor.fqn,
        section=tensor.section,
        help=tensor.fix,
        severity=harm.left_behind,
    )
