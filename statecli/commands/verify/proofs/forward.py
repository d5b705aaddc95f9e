"""Run the proof `forward`: call the moved model with moved inputs, and watch the devices of each operator.

On CUDA the call is real, under the same watch as on a fake GPU. A fake GPU is tried without data first, then with data
if the first try is inconclusive. If both tries are inconclusive, the proof is inconclusive. An instance is called in
eval mode, another instance in train mode.

A fake GPU knows shapes and devices, and little of dtypes, indices and values. So a model that raises in a plain call on
the CPU is inconclusive, unless the error is about the CPU.

An operator with tensors of several devices raises as on CUDA. A mismatch not caught by the model is reported with the
line of the operator. Another run lets this mismatch pass, so that the next mismatch is found too.

After a passed train mode without data, another instance is called with a graph, and backward runs from its outputs.
This call covers hooks and the backward of a `torch.autograd.Function`. An error of backward other than a mismatch
proves nothing.

A passed forward does not clear a tensor left on the CPU. Forward may have copied the tensor, or may not have read it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from statecli.commands.verify import check_builder, read_by_forward
from statecli.commands.verify.forward_run import SAME_DEVICE_ERROR, ForwardRun, ForwardTrial, run_until_not_refused
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proofs import move
from statecli.commands.verify.result import WORST_FIRST, Cell, Check, Name, Verdict
from statecli.commands.verify.rules import DEVICE_MISMATCH
from statecli.core.errors import ModelError
from statecli.core.finding import Consequence, Finding, Wording
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Origin, TensorInfo
from statecli.core.units import format_origin
from statecli.live import fake_gpu, fake_gpu_values, tensor_sources
from statecli.live.attribute_source import locate_variable
from statecli.live.device_rules import DeviceWatch
from statecli.live.installed_code import is_installed_file
from statecli.live.source_line import SourceLine
from statecli.live.tensor_sources import Fault, How, Mismatch, TensorSource

#: Errors of a plain call on the CPU, or half on a GPU. They say nothing about the moved model.
_CPU_ERROR = compile_on_use(
    rf"\bCUDA\b|NVIDIA|\bGPU\b|not implemented for '|from the 'CPU' backend|{SAME_DEVICE_ERROR.pattern}"
)
#: Error that a CUDA kernel raises as an assertion, after which the process cannot use the GPU any more.
_INDEX_ERROR = compile_on_use(r"^calling the model raised IndexError\b")
_ADVICE = {
    How.MADE: "create the tensor with device=x.device, or copy it with .to(x.device)",
    How.DRAWN: "copy the random values with .to(x.device), or pass device=x.device and a generator on this device",
    How.BROUGHT: "copy the tensor to next(self.parameters()).device, not to a stored device",
    How.COMPUTED: "copy the tensor with .to(x.device)",
}

_REPLACED_REASON = "forward replaces the tensor without reading the old value"


def prove(subject: ModelUnderTest, device: str) -> Check:
    """Call an instance moved to `device`, such as "fake-cuda" or "cuda:1". On meta the check is skipped.

    Raises UsageError for a missing device, ModelError if the plain call raises too.
    """
    if subject.inputs is None:
        return subject.skip_without_inputs(Name.FORWARD)
    if device == move.FAKE_CUDA:
        return _prove_on_fake_gpu(subject)
    requested_device = move.parse_device(device)
    if requested_device.type == "meta":
        reason = (
            "forward on meta finds no device errors, because torch combines meta tensors with tensors on any device; "
            "use --device fake-cuda"
        )
        return Check(Name.FORWARD, Verdict.SKIPPED, reason=reason)
    if requested_device.type == "cpu":
        return _prove_on_cpu(subject)
    if subject.forward_error and _INDEX_ERROR.match(subject.forward_error):
        raise ModelError(subject.forward_error)
    return _prove_both_modes(
        subject,
        [
            ForwardTrial(
                requested_device, str(requested_device), "called on the moved model", fake_gpu.use_real_gpu, values=True
            )
        ],
    )


def _prove_on_cpu(subject: ModelUnderTest) -> Check:
    subject.call(subject.build_used(values=True))
    reason = (
        "the model was not moved, so device errors cannot appear; use --device fake-cuda to find them"
        if not subject.created_by_forward
        else None
    )
    return Check(Name.FORWARD, Verdict.PASSED, "called on the cpu in eval mode", reason)


def _prove_on_fake_gpu(subject: ModelUnderTest) -> Check:
    trials = [
        ForwardTrial(
            fake_gpu.DEVICE,
            fake_gpu.DISPLAY_NAME,
            "called on a fake CUDA device, shapes only",
            fake_gpu.use_fake_gpu,
            values=False,
        )
    ]
    if not any(row.device == "meta" for row in subject.state.tensors):
        if subject.forward_error and not _CPU_ERROR.search(subject.forward_error):
            raise ModelError(subject.forward_error)
        how = "called on a fake CUDA device, with data on the cpu"
        trials.append(
            ForwardTrial(
                fake_gpu.DEVICE, fake_gpu.DISPLAY_NAME, how, fake_gpu_values.use_fake_gpu_with_values, values=True
            )
        )
    return _prove_both_modes(subject, trials)


def _prove_both_modes(subject: ModelUnderTest, trials: list[ForwardTrial]) -> Check:
    """Call forward in eval mode, then in train mode. Raises ModelError if eval mode fails on the CPU too."""
    runs = _run_trials(subject, trials)
    if runs[0].error_text is not None:
        subject.call(subject.build_used(values=True))
    train = _run_trials(subject, [replace(trial, training=True) for trial in trials], runs[0].watch)
    if train[0].error_text is not None:
        try:
            subject.call(subject.build_used(values=True).train(), training=True)
        except ModelError:
            return _build_answer(subject, runs, [], None)
    return _build_answer(subject, runs, train, _run_backward(subject, train[0]))


def _run_backward(subject: ModelUnderTest, train: ForwardRun) -> ForwardRun | None:
    """Run backward if train mode passed on a fake GPU without data. Otherwise return None.

    Runs with data do not support autograd, and a copy of a live model lacks the graph of its non-leaf tensors.
    """
    if not train.has_proved or train.trial.values or subject.non_leaves:
        return None
    if subject.original is not None and any(map(fake_gpu.has_hooks, subject.original.parameters())):
        return None  # a copy of a live model lacks these hooks
    return run_until_not_refused(subject, replace(train.trial, backward=True), train.watch)


def _run_trials(
    subject: ModelUnderTest, trials: list[ForwardTrial], earlier_watch: DeviceWatch | None = None
) -> list[ForwardRun]:
    """Run the trials until the first one that completes. Return the runs, the last run first.

    `earlier_watch` has recorded the runs in another mode.
    """
    runs: list[ForwardRun] = []
    for trial in trials:
        runs.insert(0, run_until_not_refused(subject, trial, earlier_watch))
        if runs[0].error_text is None:
            break
    return runs


# --- the answer ------------------------------------------------------------------------------------------------------


def _build_answer(
    subject: ModelUnderTest, runs: list[ForwardRun], train: list[ForwardRun], backward: ForwardRun | None
) -> Check:
    reported_runs = [
        run_or_mismatch
        for mode in (runs, train)
        for run_or_mismatch in (mode if mode and mode[0].error_text is not None else mode[:1])
    ]
    mismatches = _remove_duplicates(
        [
            (run_or_mismatch, run)
            for run in (*reported_runs, *((backward,) if backward is not None else ()))
            for run_or_mismatch in run.watch.mismatches
            if run is not backward or not _is_of_graph(run_or_mismatch)
        ]
    )
    findings = [_build_mismatch_finding(subject, run_or_mismatch, run) for run_or_mismatch, run in mismatches]
    blamed = {
        run_or_mismatch.source.fqn: finding for (run_or_mismatch, _), finding in zip(mismatches, findings, strict=True)
    }
    last = [mode[0] for mode in (runs, train) if mode]
    cells = {
        row.fqn: _find_worst([_build_cell(subject, row, run, blamed) for run in last]) for row in subject.state.tensors
    }
    for fqn, finding in blamed.items():
        if fqn is not None and fqn not in cells:
            cells[fqn] = _build_failed_cell(last[0], fqn, finding)
    reasons = list(dict.fromkeys(run.error_text for run in reported_runs if run.error_text is not None))
    reasons += dict.fromkeys(
        _describe_cuda_check(_format_place(subject, place)) for run in reported_runs for place in run.cuda_checks
    )
    empty_check = check_builder.check_empty_model(subject, Name.FORWARD)
    if empty_check is not None and not findings and not reasons:
        return empty_check
    return check_builder.build_check(
        subject, Name.FORWARD, _describe_runs(last, backward), {"forward": cells}, findings, reasons
    )


def _is_of_graph(mismatch: Mismatch) -> bool:
    """Return True if a mismatch in backward is caused by the fake GPU, not by the model.

    torch's own checks of devices may fail only on the fake device. Without code of the model, backward mixes devices
    only if forward mixed them and the mismatch was ignored. Then the gradient of the copy is on the device, but the
    graph that the constructor recorded is not.
    """
    if mismatch.fault is Fault.UNTOLD:
        return True
    source = mismatch.source
    has_source = source.fqn is not None or source.file_variable is not None or source.place is not None
    return mismatch.fault is Fault.MIXED and mismatch.place is None and not has_source


def _describe_cuda_check(place: str = "") -> str:
    return (
        f"torch.cuda.is_available(){place} returns False on this machine, so code that the model runs only with CUDA "
        "was not checked"
    )


def _find_worst(cells: list[Cell]) -> Cell:
    return min(cells, key=lambda cell: WORST_FIRST.index(cell.verdict))


def _describe_runs(last: list[ForwardRun], backward: ForwardRun | None) -> str:
    """Describe how the model was called and in which modes. Backward is named only if it completed."""
    how, has_backward = last[0].trial.how, backward is not None and backward.error_text is None
    if len(last) == 1:
        return f"{how}, in eval mode (train mode raises an error on the cpu too)"
    if how == last[1].trial.how:
        modes = "eval mode, train mode, backward"
        return how.replace("called", modes, 1) if has_backward else f"{how}, in eval and train mode"
    return f"{how}, in eval mode; {last[1].trial.how}, in train mode{' with backward' if has_backward else ''}"


def _remove_duplicates(mismatches: list[tuple[Mismatch, ForwardRun]]) -> list[tuple[Mismatch, ForwardRun]]:
    first: dict[Any, tuple[Mismatch, ForwardRun]] = {}
    for mismatch, run in mismatches:
        first.setdefault(mismatch.source.fqn or (mismatch.source, mismatch.place), (mismatch, run))
    # Calls in one line of forward are one mistake, whatever the other tensor of each call is.
    others: dict[tuple[str, SourceLine | None], set[str]] = {}
    for mismatch, _ in first.values():
        if mismatch.fault is Fault.MIXED:
            others.setdefault((mismatch.operator, mismatch.place), set()).add(mismatch.other)
    return [
        (replace(mismatch, other=""), run)
        if mismatch.fault is Fault.MIXED and len(others[mismatch.operator, mismatch.place]) > 1
        else (mismatch, run)
        for mismatch, run in first.values()
    ]


def _build_cell(subject: ModelUnderTest, row: TensorInfo, run: ForwardRun, blamed: dict[str | None, Finding]) -> Cell:
    if row.fqn in blamed:
        return _build_failed_cell(run, row.fqn, blamed[row.fqn])
    device = run.devices.get(row.fqn)
    if not run.has_proved:
        reason = "the call did not finish" if run.error_text is not None else _describe_cuda_check()
        return check_builder.build_inconclusive_cell(reason, after=device)
    if device is None or device == run.trial.device_name:
        return Cell(Verdict.PASSED, after=device)
    if row.fqn in run.watch.copied_by_forward:
        place = _format_place(subject, run.watch.copied_by_forward[row.fqn])
        return Cell(
            Verdict.PASSED, after=device, reason=f"left on {device}; forward copies the tensor at each call{place}"
        )
    if row.fqn in run.watch.read_elsewhere:
        return Cell(Verdict.PASSED, after=device, reason=f"left on {device}{_describe_harmless(subject, row.fqn, run)}")
    if row.fqn in run.replaced:
        return check_builder.skip_cell(f"left on {device}; {_REPLACED_REASON}", after=device)
    return check_builder.skip_cell(f"left on {device}; this forward does not read the tensor", after=device)


def _build_failed_cell(run: ForwardRun, fqn: str, finding: Finding) -> Cell:
    return Cell(Verdict.FAILED, after=run.devices.get(fqn), reason=finding.message.removeprefix(f"{fqn}: "))


def _describe_harmless(subject: ModelUnderTest, fqn: str, run: ForwardRun) -> str:
    """Return the reason why it is harmless that forward reads the tensor `fqn` on another device."""
    caught_mismatch = next((mismatch for mismatch in run.watch.raised if mismatch.source.fqn == fqn), None)
    if caught_mismatch is not None:
        place_text = _format_place(subject, caught_mismatch.place)
        return f"; forward catches the device error of {caught_mismatch.operator}{place_text}"
    if fqn in run.watch.taken_from_elsewhere:
        operator, place = run.watch.taken_from_elsewhere[fqn]
        place_text = _format_place(subject, place)
        return f"; harmless in forward, because this CUDA operator accepts a tensor on the cpu: {operator}{place_text}"
    return "; forward does not combine the tensor with tensors on other devices"


def _build_mismatch_finding(subject: ModelUnderTest, mismatch: Mismatch, run: ForwardRun) -> Finding:
    trial, is_in_backward = run.trial, run.trial.backward and mismatch not in run.mismatches_of_forward
    device = trial.device_name.removesuffix(" (fake)")
    mode = ", in backward" if is_in_backward else ", in train mode" if trial.training else ""
    if mismatch.fault is Fault.MIXED:
        text, help = _describe_mixed(subject, mismatch, device, is_in_backward=is_in_backward)
    elif mismatch.fault is Fault.GENERATOR:
        text = f"a torch.Generator on {mismatch.device} draws values for {device}"
        help = "create the generator on the device of the values: torch.Generator(x.device)"
    elif mismatch.fault is Fault.NOT_ON_CPU:
        text = f"the argument {mismatch.other!r} must be on the cpu, but is on {device}"
        help = "copy the argument with .cpu() first"
    elif mismatch.fault is Fault.NUMPY:
        text = f"a tensor on {device} is read as a numpy array"
        help = "copy the tensor to the cpu first: x.cpu().numpy()"
    else:
        text = "forward combines tensors on several devices"
        help = "call .to(x.device) on the tensors that are on the cpu"
    consequence = _build_consequence(subject, mismatch, text, mode)
    name = mismatch.source.fqn if mismatch.fault is Fault.MIXED else None
    row = subject.rows_by_fqn.get(name or "")
    assigned_at = format_origin(row.origin) if row is not None and row.origin is not None else None
    variable = mismatch.source.file_variable if mismatch.fault is Fault.MIXED else None
    wording = Wording(
        consequence.message,
        name,
        consequence=consequence,
        assigned_at=assigned_at,
        file_variable=variable and variable.name,
    )
    return check_builder.build_finding(subject, DEVICE_MISMATCH, wording, mismatch.source.fqn, help=help)


def _build_consequence(subject: ModelUnderTest, mismatch: Mismatch, text: str, mode: str) -> Consequence:
    operators = (mismatch.operator,) if mismatch.fault in (Fault.MIXED, Fault.GENERATOR) else ()
    consequence = Consequence(text, operators)
    if mismatch.place is not None:
        path, line = mismatch.place
        consequence = Consequence(text, operators, tensor_sources.format_file(path, subject.target), (line,))
    return Consequence(consequence.message + mode) if mode else consequence


def _describe_mixed(
    subject: ModelUnderTest, mismatch: Mismatch, device: str, *, is_in_backward: bool
) -> tuple[str, check_builder.Help]:
    # Backward may read a tensor that forward created.
    actor, in_forward = ("the model", "") if is_in_backward else ("forward", " in forward")
    source_text, help = _describe_source(subject, mismatch.source, mismatch.device, in_forward)
    other_operand = f"`{mismatch.other}`" if mismatch.other else "the other operands"
    if mismatch.source.fqn is not None and mismatch.source.derived:
        source_text = f"{actor} computes a tensor on {mismatch.device} from {mismatch.source.fqn}"
        return f"{source_text}, and combines this tensor with {other_operand} on {device}", help
    return f"{source_text} while {other_operand} {'is' if mismatch.other else 'are'} on {device}", help


def _describe_source(
    subject: ModelUnderTest, source: TensorSource, device: str, in_forward: str
) -> tuple[str, check_builder.Help]:
    """Describe a tensor left on `device`, and return its fix. None means the fix recorded for the tensor.

    `in_forward` says when a tensor without a name was created.
    """
    is_on = f"{'a tensor computed from this variable is ' if source.derived else ''}on {device}"
    if source.fqn is not None:
        is_created = source.fqn in subject.created_by_forward
        help = read_by_forward.suggest_recreation(subject, source.fqn, "device") if is_created else None
        return f"on {device}", help
    if source.file_variable is not None:
        name, filename = source.file_variable
        file, line = tensor_sources.format_file(filename, subject.target), locate_variable(filename, name)
        help = f"register the tensor as a buffer, or use {name}.to(x.device) in forward"
        placed_help = check_builder.PlacedHelp(help, Origin(file, line) if line is not None else None)
        return f"{name} of {file}: {is_on}", placed_help
    place, help = _format_place(subject, source.place), _ADVICE[source.how]
    if source.place is not None and is_installed_file(source.place.file):
        help = f"report the problem to the authors of the package, with this fix: {help}"
    if source.place is None:
        return f"a tensor of unknown origin is on {device}", _ADVICE[How.COMPUTED]
    if source.how is How.BROUGHT:
        return f"a tensor is on {device}, because forward copies the tensor to {device}{place}", help
    if source.how is How.COMPUTED:
        return f"a tensor that forward computes{place} is on {device}", help
    origin = Origin(tensor_sources.format_file(source.place.file, subject.target), source.place.line)
    return f"a tensor created{in_forward}{place} is on {device}", check_builder.PlacedHelp(help, origin)


def _format_place(subject: ModelUnderTest, place: SourceLine | None) -> str:
    return "" if place is None else f" at {tensor_sources.format_file(place.file, subject.target)}:{place.line}"
