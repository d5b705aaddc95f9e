"""Train an instance for some steps, save, build another instance, load, and train on.

The checkpoint has everything saved by a careful script: the `state_dict()` of the model, the optimizer and the
scheduler, and the random generators of torch, Python and numpy. So only state kept by the class itself can be missing.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from statecli.commands.verify import check_builder, inputs as inputs_of, kept_values, save_roundtrip
from statecli.commands.verify.kept_values import CopiedValues, Parts, Slot, Values, list_differing_parts
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.training_loss import compute_loss, find_floating_outputs
from statecli.core.errors import ModelError
from statecli.live.assignment_lines import Origins
from statecli.live.tensors import is_lazy

#: Number of steps before the save. The second step starts from the state after the first.
STEPS_BEFORE = 2
#: Number of steps of the whole training. The second step after the load starts from the state after the first.
STEPS = 4
#: Seeds of the two constructors, because another process may draw other values.
_SEED, _RESUME_SEED = 0, 1
#: Learning rate, and its factor in each step.
_LEARNING_RATE, _DECAY = 0.01, 0.9


@dataclass(frozen=True)
class TrainingCheckpoint:
    """Checkpoint of model, optimizer, scheduler and random generators after `STEPS_BEFORE` steps."""

    model: Any
    optimizer: Any
    scheduler: Any
    random: tuple[Any, ...]


@dataclass
class TrainingRecord:
    """Results of the training steps after the first `STEPS_BEFORE` steps.

    Attributes:
        outputs: Floating-point outputs of each step.
        values: All slots of the model at the end.
        registered: The slots of parameters and buffers.
        optimizer: State of the optimizer at the end.
        random: State of the random generators at the end.
        eval_outputs: Outputs of another call in eval mode; [] if forward raises there.
    """

    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    registered: frozenset[Slot] = frozenset()
    optimizer: Parts = field(default_factory=dict)
    random: Parts = field(default_factory=dict)
    eval_outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class SavedTraining:
    """The uninterrupted training, with the checkpoint that was saved after `STEPS_BEFORE` steps.

    Attributes:
        module: The trained instance.
        checkpoint: State saved in the middle.
        initial: Values of the slots outside of the checkpoint before the first step.
        values: Values of all slots at the save.
        copies: Copies of all slots at the save.
        record: Result of the steps after the save.
        lines: Lines of assignments in the steps.
    """

    module: nn.Module
    checkpoint: TrainingCheckpoint
    initial: Values
    values: Values
    copies: CopiedValues
    record: TrainingRecord
    lines: Origins


def find_effect(first: TrainingRecord, second: TrainingRecord, *, excluded_slots: Collection[Slot] = ()) -> str | None:
    """Describe the first difference between two trainings, or return None. Ignore values in `excluded_slots`."""
    for step, outputs in enumerate(zip(first.outputs, second.outputs, strict=True), STEPS_BEFORE + 1):
        if _have_different_outputs(*outputs):
            return f"the output of step {step} differs"
    for slot in (slot for slot in first.values if slot in first.registered and slot not in excluded_slots):
        if list_differing_parts(first.values[slot], second.values.get(slot)):
            return f"{slot.fqn} differs after step {STEPS}"
    if list_differing_parts(first.optimizer, second.optimizer):
        return f"the state of the optimizer differs after step {STEPS}"
    if list_differing_parts(first.random, second.random):
        return f"the random numbers differ after step {STEPS}"
    if _have_different_outputs(first.eval_outputs, second.eval_outputs):
        return f"the output in eval mode differs after step {STEPS}"
    return None


def _have_different_outputs(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return bool(list_differing_parts(kept_values.read_object(first), kept_values.read_object(second)))


class Trainer:
    """Trains instances of a model on the same inputs."""

    def __init__(self, subject: ModelUnderTest, made_by: type[torch.optim.Optimizer]) -> None:
        assert subject.inputs is not None  # noqa: S101 - prove has looked
        self._subject = subject
        self._made_by = made_by
        self._calls = [subject.inputs.make_call(seed=step) for step in range(STEPS + 1)]
        self._probe = subject.build_fresh()

    def train(self) -> SavedTraining:
        """Train an instance for all steps, with a save in the middle. Raises ModelError if the model's code raises."""
        with self._run():
            module = self._subject.build_fresh(values=True, seed=_SEED)
            with self._subject.user_code("setting the model to train mode"):
                module.train()
            names = frozenset(check_builder.read_state_dict(self._subject, module))
            initial = kept_values.read_values(module, excluded_names=names)
            lines = self._subject.origins.continue_for_instance()
            with lines.record():
                if any(map(is_lazy, module.parameters())):
                    self._subject.call(module, training=True)
                session = self._start(module)
                for step in range(STEPS_BEFORE):
                    self._train_step(session, step)
            checkpoint = self._save(session)
            values, copies = kept_values.read_values(module), kept_values.copy_slots(module)
            return SavedTraining(module, checkpoint, initial, values, copies, self._finish_training(session), lines)

    def resume(self, training: SavedTraining, put_back: Collection[Slot] = ()) -> tuple[Values, TrainingRecord]:
        """Load the checkpoint into a new instance and train on. Return the values after the load, and the record.

        The slots `put_back` get the values of the trained instance. Raises ModelError if the model's code raises.
        """
        with self._run():
            module = self._subject.build_fresh(values=True, seed=_RESUME_SEED)
            with self._subject.user_code("setting the model to train mode"):
                module.train()
            # copy.deepcopy refuses some tensors that torch.save writes, such as sparse CSR tensors
            model_state = save_roundtrip.copy_state_dict(training.checkpoint.model).state
            with self._subject.user_code("load_state_dict(strict=True) with the saved state_dict"):
                module.load_state_dict(model_state, strict=True)
            training.copies.put_into(module, put_back)
            session = self._start(module)
            self._load(session, training.checkpoint)
            values = kept_values.read_values(module)
            inputs_of.set_random_state(training.checkpoint.random)
            return values, self._finish_training(session)

    # --- a training ----------------------------------------------------------------------------------------------

    @contextmanager
    def _run(self) -> Iterator[None]:
        with (
            inputs_of.use_seed(_SEED),
            torch.inference_mode(False),
            torch.enable_grad(),
            kept_values.keep_shared_values(self._probe),
        ):
            yield

    def _start(self, module: nn.Module) -> _Session:
        with self._subject.user_code("reading the parameters of the model"):
            parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
        if not parameters:
            return _Session(module)
        with self._subject.user_code(f"creating {self._made_by.__name__} for the model"):
            optimizer_parameters = inspect.signature(self._made_by).parameters
            options: dict[str, Any] = {"lr": _LEARNING_RATE} if "lr" in optimizer_parameters else {}
            optimizer = self._made_by(parameters, **options)
        return _Session(module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY))

    def _train_step(self, session: _Session, step: int) -> list[torch.Tensor]:
        """Run a step and return copies of the outputs."""
        args, kwargs = self._copy_call(step)
        with self._subject.user_code(f"calling the model in train mode in step {step + 1}"):
            output_tensors = find_floating_outputs(session.module(*args, **kwargs))
        outputs = [
            output_copy for output in output_tensors if (output_copy := check_builder.copy_values(output)) is not None
        ]
        loss = compute_loss(output_tensors)
        if session.optimizer is None or session.scheduler is None:
            return outputs
        session.optimizer.zero_grad()
        if loss.requires_grad:
            with self._subject.user_code(f"backward in step {step + 1}"):
                loss.backward()  # type: ignore[no-untyped-call]
        _drop_infinite_gradients(session.module)
        with self._subject.user_code(f"the step of {self._made_by.__name__}"):
            session.optimizer.step(lambda: float(loss.detach()))
        session.scheduler.step()
        return outputs

    def _copy_call(self, step: int) -> inputs_of.Call:
        args, kwargs = inputs_of.map_tensors(self._calls[step], lambda tensor: tensor.detach().clone())
        return args, kwargs

    def _finish_training(self, session: _Session) -> TrainingRecord:
        record = TrainingRecord([self._train_step(session, step) for step in range(STEPS_BEFORE, STEPS)])
        module = session.module
        record.values = kept_values.read_values(module)
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        names = {name for name, _ in named}
        record.registered = frozenset(
            slot for slot in record.values if slot.owner_kind == "module" and slot.fqn in names
        )
        record.optimizer = kept_values.read_object(session.optimizer.state_dict() if session.optimizer else None)
        record.random = kept_values.read_object(inputs_of.get_random_state())
        try:
            with torch.no_grad(), self._subject.user_code("calling the model in eval mode"):
                args, kwargs = self._copy_call(STEPS)
                output_tensors = find_floating_outputs(module.eval()(*args, **kwargs))
            record.eval_outputs = [
                output_copy
                for output in output_tensors
                if (output_copy := check_builder.copy_values(output)) is not None
            ]
        except ModelError:
            pass
        return record

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, session: _Session) -> TrainingCheckpoint:
        state = check_builder.read_state_dict(self._subject, session.module)
        with self._subject.user_code("saving the state_dict"):
            model = save_roundtrip.copy_state_dict(state).state
        return TrainingCheckpoint(
            model,
            copy.deepcopy(session.optimizer.state_dict()) if session.optimizer else None,
            copy.deepcopy(session.scheduler.state_dict()) if session.scheduler else None,
            inputs_of.get_random_state(),
        )

    def _load(self, session: _Session, checkpoint: TrainingCheckpoint) -> None:
        if session.optimizer is None or session.scheduler is None:
            return
        with self._subject.user_code("loading the state of the optimizer"):
            session.optimizer.load_state_dict(copy.deepcopy(checkpoint.optimizer))
        session.scheduler.load_state_dict(copy.deepcopy(checkpoint.scheduler))


@dataclass(frozen=True)
class _Session:
    """An instance with its optimizer and scheduler, which are None for a model without parameters."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None


def _drop_infinite_gradients(module: nn.Module) -> None:
    """Drop gradients that are not finite, because NaN in all parameters would hide every later difference."""
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided and not bool(torch.isfinite(gradient).all()):
            parameter.grad = None
