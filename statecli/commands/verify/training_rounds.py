"""Train an instance for several rounds of forward, backward and optimizer step, and record each tensor's changes.

The loss is the sum of floating-point outputs, each times a random tensor of its shape. A plain sum would be constant
after a softmax or a normalisation, and give no gradient to anything before.

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
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from statecli.commands.verify import check_builder, inputs as inputs_of
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.errors import ModelError
from statecli.live import measure, tensor_bits
from statecli.live.tensors import identify_storage, is_lazy
from statecli.live.walk import walk

#: Largest number of rounds of forward, backward and step.
DEFAULT_ROUNDS = 3
#: Largest number of rounds while each round gives a first gradient to a further tensor.
MAX_GROWING_ROUNDS = 8
#: Largest number of further rounds if chance may prevent a gradient. A branch dropped half of the time is dropped in
#: all rounds once in 4,096 trainings.
EXTRA_RANDOM_ROUNDS = 9
#: Seed of the first round, far from the seeds of the inputs, so that random drops do not depend on the inputs.
FIRST_ROUND_SEED = 0x5EED
#: Factor between the steps of two rounds. Equal steps of opposite signs would return a gate to zero; with this factor
#: no sum of steps, whatever their signs, is zero.
STEP_GROWTH = 1.25
#: Number of values of a parameter that are compared first to see whether a step updated it.
SAMPLED_VALUES = 4096
#: Smallest learning rate; a larger rate of the optimizer is kept. With gradients scaled to 1, each update is visible,
#: and no update derails the model.
MIN_LEARNING_RATE = 0.01


@dataclass
class LeafRecord:
    """Record of a leaf that requires grad, over all rounds.

    `trained`: the optimizer has the leaf. `peaks`: the largest |gradient| of each round, None without a gradient.
    `updated`: whether a step changed the leaf; None if unknown. `lost_peak`: the largest |value|, if a step of the
    learning rate is too small to change it. `idle`: the number of rounds in which a module with the leaf was called
    but returned only empty tensors, like an expert without tokens.
    """

    tensor: torch.Tensor
    trained: bool
    peaks: list[float | None] = field(default_factory=list)
    updated: bool | None = None
    lost_peak: float | None = None
    idle: int = 0

    @property
    def peak(self) -> float | None:
        """Largest finite |gradient| of all rounds, or None if no round gave a gradient other than zero."""
        return max(filter(_is_usable, self.peaks), default=None)  # type: ignore[type-var]

    @property
    def is_new(self) -> bool:
        """Return True if the leaf got its first finite gradient other than zero in the last round."""
        return any(map(_is_usable, self.peaks[-1:])) and not any(map(_is_usable, self.peaks[:-1]))

    @property
    def first_bad_round(self) -> int | None:
        """First round whose gradient had a NaN or an infinity."""
        bad_rounds = (n for n, peak in enumerate(self.peaks, 1) if peak is not None and not peak < float("inf"))
        return next(bad_rounds, None)

    @property
    def is_missing(self) -> bool:
        """Return True if the optimizer trains the leaf, but no round gave a gradient other than zero."""
        return self.trained and self.peak is None and self.first_bad_round is None

    @property
    def is_settled(self) -> bool:
        """True if another round could show nothing new about the leaf."""
        return self.first_bad_round is not None or (
            self.peak is not None and (self.updated is True or not self.trained)
        )


def _is_usable(peak: float | None) -> bool:
    return bool(peak) and peak < float("inf")  # type: ignore[operator]


@dataclass(frozen=True)
class GradientsInMode:
    """Largest |gradient| of each leaf when modules are in eval mode, by FQN. `why_not` is the reason for a failure."""

    peaks: dict[str, float | None]
    why_not: str | None = None


@dataclass
class Training:
    """An instance in training. Leaves that require grad are in `leaf_records`, other parameters in `frozen`.

    `changed_by` maps the FQN of each changed tensor to the causes: "forward" or, for tensors that are not trained,
    "step". `written_names`: trained parameters that forward writes, with or without a change. `is_cut_off`: no output
    required grad. `initial_non_leaves`: names of tensors that the constructor computed from parameters. `finite`: every
    output was finite. `draws`: forward drew random numbers. `in_eval`: the last round repeated in eval mode, if forward
    draws. `in_running`: the last round repeated with only batch norms in eval mode, if the model has batch norms.
    """

    subject: ModelUnderTest
    module: nn.Module
    made_by: type[torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer | None = None
    leaf_records: dict[str, LeafRecord] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    initial_non_leaves: frozenset[str] = frozenset()
    changed_by: dict[str, set[str]] = field(default_factory=dict)
    written_names: set[str] = field(default_factory=set)
    rounds: int = 0
    is_cut_off: bool = False
    finite: bool = True
    draws: bool = False
    in_eval: GradientsInMode | None = None
    in_running: GradientsInMode | None = None
    _trained_ids: frozenset[int] = frozenset()

    def is_up_to_chance(self, name: str) -> bool:
        """Return True if a leaf may get a first gradient in another round, because forward in train mode is random."""
        if self.in_eval is None or self.get_cancelled_gradient(name):
            return False
        in_eval = self.in_eval.peaks.get(name)
        return in_eval != 0 if 0 in self.leaf_records[name].peaks else bool(in_eval)

    def get_cancelled_gradient(self, name: str) -> float | None:
        """Return the leaf's peak gradient with batch norms in eval mode, if batch statistics made the gradient zero."""
        return self.in_running.peaks.get(name) if self.in_running and 0 in self.leaf_records[name].peaks else None

    @property
    def is_still_growing(self) -> bool:
        """True if a tensor got its first gradient only in the last of many rounds."""
        return self.rounds >= MAX_GROWING_ROUNDS and _has_new_gradients(self)

    def map_tensors(self) -> dict[str, torch.Tensor]:
        """Map the FQN of each tensor with a known shape to the tensor."""
        rows = self.subject.rows_by_fqn
        tensors = measure.map_tensors(self.module).items()
        return {name: tensor for name, tensor in tensors if name in rows and not is_lazy(tensor)}


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
            and run.rounds < (MAX_GROWING_ROUNDS if _has_new_gradients(run) else DEFAULT_ROUNDS)
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


def _has_new_gradients(run: Training) -> bool:
    return any(leaf.is_new for leaf in run.leaf_records.values())


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
    follows = (_is_floating(tensor) and not tensor.is_nested and tensor.shape in shapes for tensor in constant_tensors)
    return any(not tensor.is_leaf for tensor in tensors.values()) or any(follows)


def _run_round(run: Training) -> str | None:
    with start_round(run):
        return _train_round(run)


def _train_round(run: Training) -> str | None:
    copies = {
        name: copy_values(tensor) for name, tensor in run.map_tensors().items() if id(tensor) not in run._trained_ids
    }
    marks = {name: _ParameterMark(leaf.tensor) for name, leaf in run.leaf_records.items() if leaf.trained}
    with _record_calls() as gave:
        outputs = find_floating_outputs(call_forward(run))
    run.rounds += 1
    _note_changes(run, copies, "forward")
    _note_writes(run, marks)
    _find_leaves(run)
    _note_idle(run, gave)
    if not run.leaf_records:
        run.rounds = DEFAULT_ROUNDS
        return None
    if not outputs:
        return "forward returns no floating-point tensor, so statecli cannot compute a loss"
    with run.subject.user_code("computing a loss from the output"):  # the tensor may be of a class of the user
        run.finite = run.finite and all(bool(torch.isfinite(_widen(output)).all()) for output in outputs)
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


def find_floating_outputs(output: object) -> list[torch.Tensor]:
    """Return the floating-point and complex tensors in an output.

    Objects other than containers (a distribution) are searched only if the output has no other tensor, because no loss
    uses a cache of keys.
    """
    leaves = list(inputs_of.iter_leaves(output))
    tensors = [leaf for leaf in leaves if _is_floating(leaf)]
    if not tensors:
        inside = [list(vars(leaf).values()) for leaf in leaves if hasattr(leaf, "__dict__")]
        tensors = [leaf for leaf in inputs_of.iter_leaves(inside) if _is_floating(leaf)]
    return tensors


def _is_floating(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and (value.is_floating_point() or value.is_complex())


def compute_loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the outputs weighted with random numbers. NaN and infinite values count as 0."""
    total = torch.zeros(())
    for values in map(_widen, outputs):
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        total = total + (values * torch.randn_like(values)).sum().to(total.device)
    return total


def _widen(output: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as real numbers of at least 32 bits."""
    values = _get_strided_values(output)
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _run_step(run: Training, loss: torch.Tensor) -> None:
    if run.optimizer is None:
        return
    trained = {name: leaf for name, leaf in run.leaf_records.items() if leaf.trained and not leaf.updated}
    trained = {name: leaf for name, leaf in trained.items() if leaf.peaks[-1] and leaf.tensor.grad is not None}
    before = {name: _ValuesBefore(leaf.tensor, sample=run.rounds == 1) for name, leaf in trained.items()}
    with run.subject.user_code(f"the step of {run.made_by.__name__}"):
        # LBFGS asks for the loss again, and gets the same loss.
        run.optimizer.step(lambda: float(loss.detach()))
    for name, leaf in trained.items():
        leaf.updated = before[name].was_updated()
        leaf.lost_peak = _find_lost_peak(leaf.tensor, run.optimizer) if leaf.updated is False else None


def is_strided(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor with strided layout that is not nested."""
    return tensor is not None and tensor.layout is torch.strided and not tensor.is_nested


class _ValuesBefore:
    """Values of a tensor before the optimizer step, or only a sample if the tensor is large."""

    def __init__(self, tensor: torch.Tensor, *, sample: bool) -> None:
        self._tensor, self._stride = tensor, 1
        if sample and type(tensor) is nn.Parameter and tensor.is_contiguous() and is_strided(grad := tensor.grad):
            stride = tensor.numel() // SAMPLED_VALUES or 1
            if bool(grad.reshape(-1)[::stride].any()):
                self._stride = stride
        self._values = copy_values(self._read_values())

    def _read_values(self) -> torch.Tensor:
        return self._tensor if self._stride == 1 else self._tensor.detach().reshape(-1)[:: self._stride]

    def was_updated(self) -> bool | None:
        """Return True if the values changed. Return None if unknown, for example if only a sample is equal."""
        is_unchanged = tensor_bits.is_same(self._values, self._read_values())
        return None if is_unchanged is None or (is_unchanged and self._stride > 1) else not is_unchanged


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
    """Repeat the last round with all modules, or only the modules `only`, in eval mode. Return the gradients.

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


@contextmanager
def _record_calls() -> Iterator[dict[int, bool]]:
    """Record for each called module (by `id`) whether one of its calls returned a tensor with elements."""
    gave: dict[int, bool] = {}

    def note(module: nn.Module, _: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            gave[id(module)] = gave.get(id(module), False) or not _is_empty_output(output)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield gave
    finally:
        handle.remove()


def _is_empty_output(output: Any) -> bool:
    outputs = output if type(output) in (tuple, list) else (output,)
    tensors = [tensor for tensor in outputs if isinstance(tensor, torch.Tensor)]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _note_idle(run: Training, gave: dict[int, bool]) -> None:
    """Count a round as idle for each leaf tensor inside a module whose calls returned only empty tensors."""
    if all(gave.values()):
        return
    named_modules = run.module.named_modules(remove_duplicate=False)
    idle = tuple(f"{name}." for name, submodule in named_modules if name and not gave.get(id(submodule), True))
    for name, leaf in run.leaf_records.items():
        leaf.idle += name.startswith(idle)


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
    values = _get_strided_values(tensor.detach())
    return float(torch.linalg.vector_norm(values, float("inf"))) if values.numel() else 0.0


def _get_strided_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a nested or sparse tensor as a strided tensor."""
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _note_changes(run: Training, copies: dict[str, torch.Tensor], cause: str) -> None:
    """Record which tensors differ from `copies`, and update `copies`."""
    for name, tensor in run.map_tensors().items():
        if name in copies and tensor_bits.is_same(copies[name], tensor) is False:
            run.changed_by.setdefault(name, set()).add(cause)
            copies[name] = copy_values(tensor)


class _ParameterMark:
    """Snapshot of a trained parameter before forward: storage address, version counter, and sampled values.

    A write through `.data` does not raise the version counter, and shows only in the values.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place, self._sample = self._read_mark()

    def _read_mark(self) -> tuple[Any, torch.Tensor | None]:
        tensor = self._tensor
        place = identify_storage(tensor), None if tensor.is_inference() else tensor._version
        if type(tensor) is not nn.Parameter or not is_strided(tensor):
            return place, None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return place, tensor.detach().reshape(-1)[:: tensor.numel() // SAMPLED_VALUES or 1].clone()

    def find_changes(self) -> tuple[bool, bool]:
        """Return two bools: whether the parameter was written to since the snapshot, and whether its values differ."""
        place, sample = self._read_mark()
        has_samples = self._sample is not None and sample is not None
        has_changed = has_samples and tensor_bits.is_same(self._sample, sample) is False  # type: ignore[arg-type]
        return has_changed or place != self._place, has_changed


def _note_writes(run: Training, marks: dict[str, _ParameterMark]) -> None:
    for name, mark in marks.items():
        is_written, has_changed = mark.find_changes()
        run.written_names |= {name} if is_written else set()
        if has_changed:
            run.changed_by.setdefault(name, set()).add("forward")


def copy_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor without its autograd graph."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().clone()
