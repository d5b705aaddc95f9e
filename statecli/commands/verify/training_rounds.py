"""Train an instance for several rounds of forward, backward and optimizer step, and record each tensor's changes.

Later rounds reach further tensors. The A of a LoRA gets its first gradient after B, zero at the start, was updated.
Other inputs choose other experts. A copy of a parameter (EMA) starts equal to the parameter. Rounds go on while each
gives a gradient to a further tensor (a chain of gates that start at zero). Random drops in forward (dropout, drop path)
get more rounds.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from statecli.commands.verify import check_builder, inputs as inputs_of
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.training_loss import (
    compute_loss,
    find_floating_outputs,
    get_strided_values,
    is_floating,
    widen,
)
from statecli.commands.verify.training_record import (
    MAX_GROWING_ROUNDS,
    GradientsInMode,
    LeafRecord,
    Training,
    has_new_gradients,
)
from statecli.commands.verify.value_snapshots import ParameterMark, copy_values
from statecli.core.errors import ModelError
from statecli.live import measure, tensor_bits
from statecli.live.tensors import is_lazy
from statecli.live.walk import walk

#: Largest number of rounds of forward, backward and step.
DEFAULT_ROUNDS = 3
#: Largest number of further rounds if chance may prevent a gradient. A branch dropped half of the time is dropped in
#: all rounds once in 4,096 trainings.
EXTRA_RANDOM_ROUNDS = 9
#: Seed of the first round, far from the seeds of the inputs, so that random drops do not depend on the inputs.
FIRST_ROUND_SEED = 0x5EED
#: Factor between the steps of two rounds. Equal steps of opposite signs would return a gate to zero; with this factor
#: no sum of steps, whatever their signs, is zero.
STEP_GROWTH = 1.25
#: Smallest learning rate; a larger rate of the optimizer is kept. With gradients scaled to 1, each update is visible,
#: and no update derails the model.
MIN_LEARNING_RATE = 0.01


def train_fresh_instance(subject: ModelUnderTest, made_by: type[torch.optim.Optimizer]) -> tuple[Training, str | None]:
    """Train a fresh instance. Return the training, and the reason if it ended early.

    Raises ModelError if the model's code or the optimizer raises. Restores the CPU's random generators and the grad
    mode.
    """
    with _keep_random_state(0):
        run = Training(subject, subject.build_fresh(values=True), made_by)
        with subject.user_code("setting the model to train mode"):
            run.module.train()
        if any(map(is_lazy, measure.map_tensors(run.module).values())):
            subject.call(run.module)
        run.initial_non_leaves = frozenset(name for name, tensor in run.map_tensors().items() if not tensor.is_leaf)
        _start_training(run)
        why_not = None
        while (
            why_not is None
            and run.rounds < (MAX_GROWING_ROUNDS if has_new_gradients(run) else DEFAULT_ROUNDS)
            and not _is_settled(run)
        ):
            why_not = _run_round(run)
        if why_not is None:
            _measure_other_modes(run)
        while (
            why_not is None
            and run.rounds < DEFAULT_ROUNDS + EXTRA_RANDOM_ROUNDS
            and any(map(run.is_up_to_chance, _list_missing(run)))
        ):
            why_not = _run_round(run)
        return run, why_not


@contextmanager
def _keep_random_state(seed: int) -> Iterator[None]:
    with inputs_of.use_seed(seed), torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def start_round(run: Training) -> Iterator[None]:
    """Prepare the next round: set its seed and clear the gradients of the previous round."""
    with _keep_random_state(FIRST_ROUND_SEED + run.rounds):
        for leaf in run.leaf_records.values():
            leaf.tensor.grad = None
        yield


# --- a round ------------------------------------------------------------------------------------------------


def _start_training(run: Training) -> None:
    with run.subject.user_code("reading the parameters of the model"):
        trained = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    run._trained_ids = frozenset(map(id, trained))
    _find_leaves(run)
    if trained:
        with run.subject.user_code(f"creating {run.made_by.__name__} for the model"):
            run.optimizer = run.made_by(trained, **_choose_options(run.made_by))


def _choose_options(made_by: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return optimizer options without weight decay, which would also update tensors that do not affect the loss."""
    parameters = inspect.signature(made_by).parameters
    options: dict[str, Any] = {"weight_decay": 0} if "weight_decay" in parameters else {}
    if "lr" in parameters:
        default_rate = parameters["lr"].default
        options["lr"] = max(MIN_LEARNING_RATE, default_rate) if isinstance(default_rate, float) else MIN_LEARNING_RATE
    return options


def _is_settled(run: Training) -> bool:
    """Return True if another round could show nothing new about any leaf."""
    if not run.rounds:
        return False
    return not (run.rounds == 1 and _needs_second_round(run)) and all(
        leaf.is_settled for leaf in run.leaf_records.values()
    )


def _needs_second_round(run: Training) -> bool:
    """Return True if some effects can show only in a second round, after an optimizer step.

    For example, the instance keeps an autograd graph, or a tensor has the shape of a trained tensor and may follow this
    tensor (EMA, target network).
    """
    shapes = {leaf.tensor.shape for leaf in run.leaf_records.values() if leaf.trained and not leaf.tensor.is_nested}
    tensors = run.map_tensors()
    constant_tensors = [
        tensor for name, tensor in tensors.items() if name not in run.changed_by and not tensor.requires_grad
    ]
    follows = (is_floating(tensor) and not tensor.is_nested and tensor.shape in shapes for tensor in constant_tensors)
    return any(not tensor.is_leaf for tensor in tensors.values()) or any(follows)


def _run_round(run: Training) -> str | None:
    with start_round(run):
        return _train_round(run)


def _train_round(run: Training) -> str | None:
    copies = {
        name: copy_values(tensor) for name, tensor in run.map_tensors().items() if id(tensor) not in run._trained_ids
    }
    marks = {name: ParameterMark(leaf.tensor) for name, leaf in run.leaf_records.items() if leaf.trained}
    outputs = find_floating_outputs(call_forward(run))
    run.rounds += 1
    _note_changes(run, copies, "forward")
    _note_writes(run, marks)
    _find_leaves(run)
    if not run.leaf_records:
        run.rounds = DEFAULT_ROUNDS
        return None
    if not outputs:
        return "forward returns no floating-point tensor, so statecli cannot compute a loss"
    with run.subject.user_code("computing a loss from the output"):  # the tensor may be of a class of the user
        run.finite = run.finite and all(bool(torch.isfinite(widen(output)).all()) for output in outputs)
        loss = compute_loss(outputs)
    run.is_cut_off = not loss.requires_grad
    if loss.requires_grad:
        with run.subject.user_code(f"backward{_format_round(run.rounds)}"):
            loss.backward()  # type: ignore[no-untyped-call]
    _read_gradients(run)
    _run_step(run, loss)
    _note_changes(run, copies, "step")
    return None


def _format_round(number: int) -> str:
    return f" in round {number}" if number > 1 else ""


def call_forward(run: Training, mode: str = "train mode") -> Any:
    """Return the module's output for the inputs of the next round. Raises ModelError."""
    assert run.subject.inputs is not None  # noqa: S101 - prove has looked
    number = run.rounds + 1
    args, kwargs = run.subject.inputs.make_call(seed=number)
    before = _read_generators()
    with run.subject.user_code(f"calling the model in {mode}{_format_round(number) if mode == 'train mode' else ''}"):
        output = run.module(*args, **kwargs)
    run.draws = run.draws or before != _read_generators()
    return output


def _read_generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    _, state, *state_fields = numpy.random.get_state() if numpy else (None, b"")
    return torch.default_generator.get_state().tolist(), random.getstate(), bytes(state), state_fields


def _run_step(run: Training, loss: torch.Tensor) -> None:
    if run.optimizer is None:
        return
    trained = {name: leaf for name, leaf in run.leaf_records.items() if leaf.trained and not leaf.updated}
    trained = {name: leaf for name, leaf in trained.items() if leaf.peaks[-1] and leaf.tensor.grad is not None}
    before = {name: copy_values(leaf.tensor) for name, leaf in trained.items()}
    with run.subject.user_code(f"the step of {run.made_by.__name__}"):
        # LBFGS asks for the loss again, and gets the same loss.
        run.optimizer.step(lambda: float(loss.detach()))
    for name, leaf in trained.items():
        is_unchanged = tensor_bits.is_same(before[name], leaf.tensor)
        leaf.updated = None if is_unchanged is None else not is_unchanged
        leaf.lost_peak = _find_lost_peak(leaf.tensor, run.optimizer) if leaf.updated is False else None


def _find_lost_peak(tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> float | None:
    """Return the largest |value| if the learning rate is too small to change it in this dtype, else None."""
    peak, rate = _find_peak(tensor), float(optimizer.defaults.get("lr", MIN_LEARNING_RATE))
    return peak if peak and rate < peak * torch.finfo(tensor.dtype).eps else None


# --- other modes --------------------------------------------------------------------------------------------


def _list_missing(run: Training) -> list[str]:
    return [name for name, leaf in run.leaf_records.items() if leaf.is_missing]


def _measure_other_modes(run: Training) -> None:
    """Look for the missing gradients in other modes: batch norms in eval mode, and all modules in eval mode."""
    norms = [submodule for submodule in run.module.modules() if _is_batch_norm(submodule)]
    if norms and any(0 in run.leaf_records[name].peaks for name in _list_missing(run)):
        run.in_running = _measure_in_mode(run, "train mode, with its batch norms in eval mode", norms)
    if run.draws and not all(map(run.get_cancelled_gradient, _list_missing(run))):
        run.in_eval = _measure_in_mode(run, "eval mode", None)


def _is_batch_norm(module: nn.Module) -> bool:
    """Return True for a module that normalises by the batch in train mode and by the running mean in eval mode."""
    return module.training and isinstance(getattr(module, "running_mean", None), torch.Tensor)


def _measure_in_mode(run: Training, mode: str, only: list[nn.Module] | None) -> GradientsInMode:
    """Repeat the last round in eval mode: with all modules, or with the modules in `only`. Return the gradients.

    Inputs and seed are those of the last round, so that only the mode differs. The modes are restored, and the
    optimizer makes no step.
    """
    modes = [(module_, module_.training) for module_ in run.module.modules() if hasattr(module_, "training")]
    run.rounds -= 1
    try:
        with start_round(run):
            return GradientsInMode(_measure_peaks(run, mode, only))
    except ModelError as error:
        return GradientsInMode({}, check_builder.get_reason(run.subject, error))
    finally:
        run.rounds += 1
        for module_, training in modes:
            module_.training = training


def _measure_peaks(run: Training, mode: str, only: list[nn.Module] | None) -> dict[str, float | None]:
    with run.subject.user_code(f"setting the model to {mode}"):
        for module_ in [run.module] if only is None else only:
            module_.eval()
    loss = compute_loss(find_floating_outputs(call_forward(run, mode)))
    if loss.requires_grad:
        with run.subject.user_code(f"backward in {mode}"):
            loss.backward()  # type: ignore[no-untyped-call]
    return {name: _scale_gradient(run.leaf_records[name].tensor) for name in _list_missing(run)}


# --- results of a round -------------------------------------------------------------------------------------


def _find_leaves(run: Training) -> None:
    """Record every leaf that requires grad, in the optimizer or not. Forward may create or replace leaves."""
    for entry in walk(run.module).registered:
        if entry.is_parameter and entry.tensor is not None and not entry.tensor.requires_grad:
            run.frozen.add(entry.fqn)
    for name, tensor in run.map_tensors().items():
        if not tensor.requires_grad or not tensor.is_leaf or not tensor.numel():
            continue
        record = run.leaf_records.get(name)
        if record is None or record.tensor is not tensor:
            run.leaf_records[name] = LeafRecord(tensor, id(tensor) in run._trained_ids, record.peaks if record else [])
            run.replaced |= {name} if record else set()


def _read_gradients(run: Training) -> None:
    """Record the peak of each gradient, drop gradients that are not finite, and scale the others for the step."""
    peaks: dict[int, float | None] = {}
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for leaf in run.leaf_records.values():
            key = id(leaf.tensor)
            if key not in peaks:  # a tied tensor has two names and a single gradient
                peaks[key] = _scale_gradient(leaf.tensor, STEP_GROWTH ** (run.rounds - 1))
            leaf.peaks.append(peaks[key])


def _scale_gradient(tensor: torch.Tensor, to: float = 1.0) -> float | None:
    """Scale the gradient so that its largest |value| is `to`. Return the largest |value| before, or None."""
    if tensor.grad is None:
        return None
    peak = _find_peak(tensor.grad)
    if 0 < peak < float("inf"):
        tensor.grad.div_(peak).mul_(to)
    elif peak:
        tensor.grad = None
    return peak


def _find_peak(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor, or NaN if the tensor contains a NaN."""
    values = get_strided_values(tensor.detach())
    return float(torch.linalg.vector_norm(values, float("inf"))) if values.numel() else 0.0


def _note_changes(run: Training, copies: dict[str, torch.Tensor], cause: str) -> None:
    """Record which tensors differ from `copies`, and update `copies`."""
    for name, tensor in run.map_tensors().items():
        if name in copies and tensor_bits.is_same(copies[name], tensor) is False:
            run.changed_by.setdefault(name, set()).add(cause)
            copies[name] = copy_values(tensor)


def _note_writes(run: Training, marks: dict[str, ParameterMark]) -> None:
    for name, mark in marks.items():
        is_written, has_changed = mark.find_changes()
        run.written_names |= {name} if is_written else set()
        if has_changed:
            run.changed_by.setdefault(name, set()).add("forward")
