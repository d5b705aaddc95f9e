"""Run the proof `step`: which tensors get a gradient, an update by the optimizer, or a change by forward?"""

from __future__ import annotations

import difflib
import functools
import math
from dataclasses import dataclass, field

import msgspec
import torch
from msgspec.structs import replace

from statecli.commands.verify import (
    check_builder,
    gradient_graph,
    inputs as inputs_of,
    overwritten_by_forward,
    rules,
    training_rounds,
)
from statecli.commands.verify.inputs import Inputs
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.training_record import LeafRecord, Training
from statecli.core.errors import UsageError, option
from statecli.core.finding import Finding, Severity, Wording
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.option_defaults import STEP_OPTIMIZER
from statecli.core.rule import Rule
from statecli.core.units import plural
from statecli.live import measure
from statecli.live.tensors import get_grad_fn_name

_DIGITS = compile_on_use(r"\d+")
#: Start of a reason in a message; the column of gradients omits it.
_NO_GRADIENT_PREFIX = "gets no gradient: "
#: Part of the names of weights that multiply a hidden state, in the recurrent modules of torch.
_HIDDEN_WEIGHT = "weight_hh"
_OTHER_INPUTS_HELP = "give inputs for which the output is finite"
_HIDDEN_STATE_HELP = (
    "no action is needed if training passes the hidden state to the next call; otherwise pass the state"
)
#: Message about a frozen tensor. A teacher that follows its student changes on purpose.
_CHANGED_BY_FORWARD_MESSAGE = "frozen, but forward changes the tensor"
_FREEZE_HELP = "freeze the parameter with requires_grad_(False)"


def find_optimizer_class(name: str | type) -> type[torch.optim.Optimizer]:
    """Return an optimizer class by its name in torch.optim (upper or lower case), or `name` itself if it is a class.

    Raises UsageError for a name that torch.optim does not have.
    """
    if isinstance(name, type):
        return name
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key != "Optimizer"
    }
    if name.lower() in classes:
        return classes[name.lower()]
    similar_names = difflib.get_close_matches(name.lower(), classes, 1)
    hint = f"did you mean {similar_names[0]}?" if similar_names else f"choose one of {', '.join(sorted(classes))}"
    raise UsageError(f"{option('--optimizer', name)}: torch.optim does not have this class; {hint}")


@dataclass
class _StepVerdicts:
    """Verdicts about the tensors of a trained instance."""

    run: Training
    gradient_paths: gradient_graph.GradientPaths | None = None
    overwritten: overwritten_by_forward.OverwrittenParameters = field(
        default_factory=overwritten_by_forward.OverwrittenParameters
    )
    gradient: dict[str, Cell] = field(default_factory=dict)
    updated: dict[str, Cell] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the trained instance, by FQN."""
        return self.run.map_tensors()

    @functools.cached_property
    def reached(self) -> dict[str, list[str]]:
        """Names of tensors with a gradient, grouped by their pattern: the name with `#` for each number."""
        names: dict[str, list[str]] = {}
        for name, leaf in self.run.leaf_records.items():
            if leaf.peak is not None:
                names.setdefault(_DIGITS.sub("#", name), []).append(name)
        return names

    @functools.cached_property
    def reached_at_times(self) -> dict[str, list[str]]:
        """The names in `reached` that got no gradient in some of the rounds."""
        leaves = self.run.leaf_records
        return {key: [name for name in names if None in leaves[name].peaks] for key, names in self.reached.items()}

    @functools.cached_property
    def non_leaves_of_eval_mode(self) -> frozenset[str]:
        """Names of tensors that have an autograd graph after a forward in eval mode."""
        subject = self.run.subject
        if not (subject.created_by_forward or subject.reassigned_by_forward):
            return frozenset()
        module = subject.build_for_call()
        _, error_text = check_builder.run_user_code(
            subject, "calling the model", lambda: subject.call(module, grad=True)
        )
        tensors = {} if error_text else measure.map_tensors(module)
        return frozenset(name for name, tensor in tensors.items() if not tensor.is_leaf)

    def has_zero_state(self, name: str) -> bool:
        """Return True for a hidden-state weight with a zero gradient whose input weight has a gradient.

        Both gradients are products with the same factor, so the other factor, the hidden state, is zero in each call.
        """
        input_weight = self.run.leaf_records.get(name.replace(_HIDDEN_WEIGHT, "weight_ih"))
        return _HIDDEN_WEIGHT in name and input_weight is not None and input_weight.peak is not None

    def fail(self, rule: Rule, fqn: str, reason: str | Wording, help: str, severity: Severity | None = None) -> Cell:
        """Report a failed tensor, and return its cell."""
        wording = reason if isinstance(reason, Wording) else Wording(reason, fqn)
        self.findings.append(
            check_builder.build_finding(self.run.subject, rule, wording, fqn, help=help, severity=severity)
        )
        return Cell(Verdict.FAILED, reason=wording.text.removeprefix(_NO_GRADIENT_PREFIX))


def prove(subject: ModelUnderTest, optimizer: str | type = STEP_OPTIMIZER) -> Check:
    """Train a fresh instance for some rounds in train mode, and compare each tensor before and after.

    `optimizer`: a class, or a name in torch.optim in lower case. Columns: `gradient` and `updated` of tensors that
    require grad, `forward updates` of tensors changed by forward. Raises UsageError for an unknown optimizer,
    ModelError if the model's own code raises.
    """
    optimizer_type = find_optimizer_class(optimizer)
    if subject.inputs is None:
        return subject.skip_without_inputs(Name.STEP)
    if any(row.device == "meta" for row in subject.state.tensors):
        reason = "the model was built on meta and has no values to train; build the model on the cpu: --init-device cpu"
        return Check(Name.STEP, Verdict.SKIPPED, reason=reason)
    if _is_empty_batch(subject.inputs):
        reason = f"the inputs have no elements ({subject.inputs.text}), so no gradient is computed"
        return Check(Name.STEP, Verdict.INCONCLUSIVE, reason=reason)
    run, why_not = training_rounds.train_fresh_instance(subject, optimizer_type)
    if why_not:
        return check_builder.build_check(run.subject, Name.STEP, _describe_training(run), {}, [], [why_not])
    return _judge_training(run)


#: Reason for a parameter that other inputs, chosen by the user, may reach.
_NOT_REACHED_REASON = (
    "forward does not use the parameter with the inputs that statecli chose; give --input or --input-from"
)


def skip_unreached(check: Check) -> Check:
    """Skip a proof that is inconclusive only because statecli's own inputs do not reach some tensors.

    The caller uses it only if the user did not request the proof.
    """
    cells = [cell for column in check.columns for cell in column.cells.values()]
    inconclusive_reasons = {cell.reason for cell in cells if cell.verdict is Verdict.INCONCLUSIVE}
    if check.verdict is Verdict.INCONCLUSIVE and inconclusive_reasons == {_NOT_REACHED_REASON}:
        return replace(check, verdict=Verdict.SKIPPED)
    return check


def _is_empty_batch(inputs: Inputs) -> bool:
    """Return True if the inputs contain tensors and all of them are empty."""
    tensors = [
        tensor for tensor in inputs_of.iter_leaves(inputs.make_call(seed=1)) if issubclass(type(tensor), torch.Tensor)
    ]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _describe_training(run: Training) -> str:
    inputs = run.subject.inputs
    with_inputs = f"on {inputs.text}" if inputs else ""
    if not run.leaf_records:
        return f"forward in train mode {with_inputs}"
    return f"{plural(run.rounds, 'round')} of training (forward, backward, {run.made_by.__name__}) {with_inputs}"


def _judge_training(run: Training) -> Check:
    verdicts = _StepVerdicts(run)
    if any(leaf.is_missing for leaf in run.leaf_records.values()):
        verdicts.gradient_paths = gradient_graph.trace_gradients(run)
    if run.written_names:
        verdicts.overwritten = overwritten_by_forward.find_overwritten(run)
    for name, leaf in run.leaf_records.items():
        verdicts.gradient[name] = _judge_gradient(verdicts, name, leaf)
        verdicts.updated[name] = _judge_updated(verdicts, name, leaf)
    for name in sorted(run.frozen - set(run.leaf_records)):
        verdicts.updated[name] = _judge_frozen(verdicts, name)
    all_columns = {
        "gradient": verdicts.gradient,
        "updated": verdicts.updated,
        "forward updates": _judge_changed_by_forward(verdicts),
    }
    columns = {name: cells for name, cells in all_columns.items() if cells}
    check = check_builder.build_check(run.subject, Name.STEP, _describe_training(run), columns, verdicts.findings, [])
    if run.leaf_records or check.verdict is Verdict.FAILED:
        return check
    return replace(check, verdict=Verdict.SKIPPED, reason="no tensor of the model requires grad")


# --- gradient -----------------------------------------------------------------------------------------------


def _judge_gradient(verdicts: _StepVerdicts, name: str, leaf: LeafRecord) -> Cell:
    if leaf.first_bad_round is not None:
        return _judge_not_finite(verdicts, name, leaf)
    if leaf.peak is not None:
        return Cell(Verdict.PASSED, after=f"{leaf.peak:.3g}")
    if not leaf.trained:
        return check_builder.skip_cell("gets no gradient")
    if any(peak is not None for peak in leaf.peaks):
        return _judge_zero(verdicts, name)
    if verdicts.run.is_up_to_chance(name):
        return _judge_by_chance(verdicts.run, name)
    sibling = _find_chosen_sibling(verdicts, name)
    if sibling:
        return check_builder.build_inconclusive_cell(
            f"forward does not use the parameter, but uses {sibling}: give more inputs"
        )
    inputs, paths = verdicts.run.subject.inputs, verdicts.gradient_paths
    if paths and name not in paths.used and inputs and not inputs.chosen_by_user:
        return check_builder.build_inconclusive_cell(_NOT_REACHED_REASON)
    return _judge_no_gradient(verdicts, name)


def _judge_not_finite(verdicts: _StepVerdicts, name: str, leaf: LeafRecord) -> Cell:
    value_text = "NaN" if any(peak is not None and math.isnan(peak) for peak in leaf.peaks) else "infinite"
    if not verdicts.run.finite:
        return check_builder.build_inconclusive_cell(
            f"the gradient is {value_text}, and the output of forward is not finite either: {_OTHER_INPUTS_HELP}",
        )
    elements = f"{value_text} elements in training round {leaf.first_bad_round}"
    reason = f"the gradient has {elements}, although all outputs are finite"
    help = (
        "look for sqrt, norm or division at zero, also inside torch.where; torch.autograd.set_detect_anomaly"
        " shows the line"
    )
    return verdicts.fail(rules.NON_FINITE_GRADIENT, name, reason, help)


def _judge_zero(verdicts: _StepVerdicts, name: str) -> Cell:
    run = verdicts.run
    if cancelled := run.get_cancelled_gradient(name):
        explanation = (
            f"because a batch norm cancels the effect of the parameter; {cancelled:.3g} with the batch norms in "
            "eval mode"
        )
        return check_builder.skip_cell(f"the gradient is zero in each of {plural(run.rounds, 'round')}, {explanation}")
    if run.is_up_to_chance(name):
        return _judge_by_chance(run, name)
    if reason := _explain_zero(verdicts, name):
        return check_builder.build_inconclusive_cell(reason)
    if verdicts.has_zero_state(name):
        why = "the gradient is zero: the hidden state starts at zero, so one call gives this weight no gradient"
        severity = rules.ZERO_GRADIENT.cases["hidden state of zeros"]
        return verdicts.fail(rules.ZERO_GRADIENT, name, why, _HIDDEN_STATE_HELP, severity)
    why = f"the gradient is all zeros in each of {plural(run.rounds, 'round')}"
    if run.in_eval is not None:
        why += " and in eval mode, without dropout"
    help = "look for a factor of zero, for terms that cancel out, and for a hook that changes the gradient"
    return verdicts.fail(rules.ZERO_GRADIENT, name, why, help)


def _explain_zero(verdicts: _StepVerdicts, name: str) -> str | None:
    """Return why a gradient of zero in each round may not be a fault of the model, or None if no reason is known."""
    run = verdicts.run
    if not run.finite:
        explanation = "NaN and infinite values of the output do not count in the loss"
        return f"the gradient is zero, but {explanation}: {_OTHER_INPUTS_HELP}"
    paths = verdicts.gradient_paths
    sibling = _find_sibling(verdicts, name, always=paths is not None and (paths.reads_values or name in paths.idle))
    if sibling:  # an expert that gets no tokens, in a layer that calls all experts
        return f"the gradient is zero, but {sibling} has a gradient, and forward reads values: give more inputs"
    if run.is_still_growing:
        reason = "more rounds may be needed, because another parameter got its first gradient in the last round"
        return f"the gradient is zero in each of {plural(run.rounds, 'round')}; {reason}"
    if run.in_running and run.in_running.why_not:
        return (
            "the gradient is zero, perhaps because a batch norm cancels the gradient; statecli could not check this: "
            f"{run.in_running.why_not}"
        )
    return None


def _judge_by_chance(run: Training, name: str) -> Cell:
    """Return a cell with the verdict `inconclusive` for a leaf without gradient, if forward draws random numbers."""
    gradients = (
        f"{'zero' if 0 in run.leaf_records[name].peaks else 'no'} gradient in each of {plural(run.rounds, 'round')}"
    )
    if run.in_eval and run.in_eval.peaks.get(name):
        help = "lower the drop rate, or give a larger input"
        return check_builder.build_inconclusive_cell(
            f"{gradients}, but the parameter has a gradient in eval mode: in train mode, dropout may have left the "
            f"parameter out in each round; {help}",
        )
    reason = (run.in_eval and run.in_eval.why_not) or "no gradient in eval mode either"
    return check_builder.build_inconclusive_cell(
        f"{gradients}; forward draws random numbers, and eval mode does not show whether they are the cause: {reason}",
    )


def _judge_no_gradient(verdicts: _StepVerdicts, name: str) -> Cell:
    paths = verdicts.gradient_paths
    if paths and name in paths.late_names:
        rounds = plural(verdicts.run.rounds, "round")
        reason = (
            f"no gradient in {rounds}, but the parameter has a gradient in a later round: forward does not always use "
            "the parameter"
        )
        return check_builder.build_inconclusive_cell(reason)
    cause = _find_cause(paths, name, cut_off=verdicts.run.is_cut_off)
    wording = Wording(_NO_GRADIENT_PREFIX + cause.reason, name, has_no_path=cause.has_no_path)
    return verdicts.fail(rules.NO_GRADIENT, name, wording, cause.help)


class _Cause(msgspec.Struct, frozen=True):
    """Reason why a leaf has no gradient, and the fix. `Wording` explains `has_no_path`."""

    reason: str
    help: str
    has_no_path: bool = False


#: Reason for a missing gradient of a parameter that forward uses, or may use.
_NO_PATH = "no differentiable path leads to the output"


def _find_cause(paths: gradient_graph.GradientPaths | None, name: str, *, cut_off: bool) -> _Cause:
    if cut_off:
        return _Cause(
            "the output of forward does not require grad",
            "look for torch.no_grad(), detach() or a checkpoint with use_reentrant=True in forward",
        )
    if paths is None:
        return _Cause(
            f"not used in forward, or {_NO_PATH}", f"use the parameter in forward, or {_FREEZE_HELP}", has_no_path=True
        )
    if name in paths.reached:
        return _Cause(
            "the output uses the parameter, but grad is None after backward",
            "look for a hook, or for a backward of a torch.autograd.Function, that returns no gradient",
        )
    if name in paths.used:
        return _Cause(
            f"used in forward, but {_NO_PATH}",
            "look for an unused result, detach(), .data, torch.no_grad(), use_reentrant=True or an integer operation; "
            "if this is intended, call requires_grad_(False)",
            has_no_path=True,
        )
    return _Cause(
        "not used in forward", "use the parameter in forward, delete it, or freeze it with requires_grad_(False)"
    )


def _find_chosen_sibling(verdicts: _StepVerdicts, name: str) -> str | None:
    """Return a tensor that forward may choose in place of `name`, such as another expert's weight, or None.

    Forward may choose if it reads values, or if only some rounds gave a gradient to the sibling.
    """
    paths = verdicts.gradient_paths
    reads = paths is not None and paths.reads_values and name not in paths.used
    return _find_sibling(verdicts, name, always=reads)


def _find_sibling(verdicts: _StepVerdicts, name: str, *, always: bool) -> str | None:
    """Return a tensor with a gradient whose name differs only in numbers. If not `always`, some rounds gave none."""
    names_by_pattern = verdicts.reached if always else verdicts.reached_at_times
    return next((other for other in names_by_pattern.get(_DIGITS.sub("#", name), ()) if other != name), None)


# --- updated ------------------------------------------------------------------------------------------------


def _judge_updated(verdicts: _StepVerdicts, name: str, leaf: LeafRecord) -> Cell:
    if not leaf.trained:
        return _judge_left_out(verdicts, name, leaf)
    if leaf.peak is None:
        return check_builder.skip_cell("gets no gradient, so the optimizer does not update it")
    if name in verdicts.overwritten.names:
        why, help = (
            "overwritten by forward, so each update is lost",
            "register the tensor as a buffer, or do not write to it in forward",
        )
        return verdicts.fail(rules.OVERWRITTEN_BY_FORWARD, name, why, help)
    if name in verdicts.run.written_names and verdicts.overwritten.why_not:
        why_not = verdicts.overwritten.why_not
        return check_builder.build_inconclusive_cell(
            f"forward writes to the parameter, and statecli does not know whether an update is kept: {why_not}",
        )
    if leaf.updated:
        return Cell(Verdict.PASSED, after="changed")
    if leaf.updated is None:
        return check_builder.build_inconclusive_cell("the values cannot be compared")
    if leaf.lost_peak is not None:
        dtype = str(leaf.tensor.dtype).removeprefix("torch.")
        update = training_rounds.MIN_LEARNING_RATE
        reason = (
            f"an update of {update} is too small for values of {leaf.lost_peak:.3g} in {dtype}, so rounding removes "
            "the update"
        )
        return check_builder.build_inconclusive_cell(reason)
    why = f"has a gradient, but {verdicts.run.made_by.__name__} does not change the tensor"
    return verdicts.fail(
        rules.NOT_UPDATED, name, why, "look for a hook of the module or the optimizer that undoes the update"
    )


def _judge_left_out(verdicts: _StepVerdicts, name: str, leaf: LeafRecord) -> Cell:
    """Report a leaf that requires grad but is not in `model.parameters()`. Without gradient, the severity is lower."""
    if name in verdicts.run.replaced:
        reason = "forward replaces the tensor, but the optimizer trains the old tensor"
        return verdicts.fail(
            rules.NOT_IN_OPTIMIZER, name, reason, "change the values in place, or give the new tensor another name"
        )
    if leaf.peak is None and verdicts.tensors.get(name) is not leaf.tensor:
        return check_builder.skip_cell("forward replaces the tensor without reading it")
    row = verdicts.run.subject.rows_by_fqn[name]
    severity = rules.NOT_IN_OPTIMIZER.cases["no gradient"] if leaf.peak is None else None
    if row.kind is Kind.PARAMETER and name in verdicts.run.subject.created_by_forward:
        reason = "the first forward creates the parameter, so an optimizer built before does not train it"
        return verdicts.fail(rules.NOT_IN_OPTIMIZER, name, reason, check_builder.REGISTER_EARLIER_HELP, severity)
    reason = {
        Kind.BUFFER: "buffer with requires_grad=True, which no optimizer trains",
        Kind.UNREGISTERED: "requires grad but is not registered, so no optimizer trains it",
    }.get(row.kind, "the class's own parameters() leaves this tensor out, so no optimizer trains it")
    return verdicts.fail(rules.NOT_IN_OPTIMIZER, name, reason, row.fix or _suggest_registration(row), severity)


def _suggest_registration(row: TensorInfo) -> str:
    if row.kind is Kind.BUFFER:
        attribute = row.fqn.rpartition(".")[2]
        return (
            f"write self.{attribute} = nn.Parameter(...) to train the tensor; otherwise register tensor.detach() as a "
            "buffer"
        )
    return "register the tensor as nn.Parameter to train it; otherwise call requires_grad_(False)"


def _judge_frozen(verdicts: _StepVerdicts, name: str) -> Cell:
    causes = verdicts.run.changed_by.get(name)
    if causes is None:
        return check_builder.skip_cell(f"frozen, and unchanged in {plural(verdicts.run.rounds, 'round')}")
    if "step" not in causes:
        return check_builder.skip_cell(_CHANGED_BY_FORWARD_MESSAGE)
    tied_names = verdicts.run.subject.rows_by_fqn[name].tied_to
    shares = f", because it shares memory with {tied_names[0]}" if tied_names else ""
    reason = f"frozen, but the step of the optimizer changes the tensor{shares}"
    return verdicts.fail(rules.FROZEN_UPDATED, name, reason, "clone the frozen tensor, or freeze both tensors")


# --- changed by forward -------------------------------------------------------------------------------------


def _judge_changed_by_forward(verdicts: _StepVerdicts) -> dict[str, Cell]:
    """Decide the verdict of each tensor that forward changes: statistics, counters, caches, clipped weights."""
    changed_names = [name for name, causes in verdicts.run.changed_by.items() if "forward" in causes]
    return {name: _judge_changed(verdicts, name) for name in changed_names}


def _judge_changed(verdicts: _StepVerdicts, name: str) -> Cell:
    run, subject = verdicts.run, verdicts.run.subject
    operation = get_grad_fn_name(verdicts.tensors[name]) if name in verdicts.tensors else None
    is_stored_by_training = operation is not None and name not in run.initial_non_leaves | subject.state.recomputed
    # The check `copy` reports the tensors that a forward in eval mode stores.
    if is_stored_by_training and name not in verdicts.non_leaves_of_eval_mode:
        reason = (
            f"after a forward in train mode, the tensor is computed by autograd ({operation}) and keeps its graph, so "
            "copy.deepcopy of the model raises an error"
        )
        return verdicts.fail(rules.NON_LEAF_ATTRIBUTE, name, reason, "store the tensor with .detach()")
    is_frozen = name in run.frozen - set(run.leaf_records)
    return Cell(Verdict.PASSED, after="changed", reason=_CHANGED_BY_FORWARD_MESSAGE if is_frozen else None)
