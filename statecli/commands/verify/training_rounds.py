"""Rounds of forward, backward and optimizer step on one instance, and what they showed of each tensor.

The loss is each floating-point output times a random tensor of its shape, summed. A plain sum would be constant behind
a softmax or a normalisation, and everything before it would get no gradient.

Later rounds are for what the first did not reach: the A of a LoRA, whose B starts at zero, has its first gradient once
B has been updated; other inputs choose other experts; a copy that follows a parameter (EMA) starts equal to it. As long
as each round gives a gradient to what had none (a chain of gates that start at zero), there is another; and what
forward drops by chance (dropout, drop path) has more.
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

from statecli.commands.verify import inputs as inputs_of
from statecli.commands.verify import judging, tensor_bits
from statecli.commands.verify.model_under_test import Subject
from statecli.core.errors import ModelError
from statecli.live.tensors import storage
from statecli.live.walk import walk

#: Rounds of forward, backward and step at most.
ROUNDS = 3
#: Rounds at most while each gives something its first gradient.
GROWING = 8
#: As many more at most where chance may be what keeps a gradient away: a branch that is dropped every other time is
#: dropped in all rounds once in 4,096.
MORE = 9
#: The first round's seed, far from those of the inputs: what is dropped must not depend on what is given.
SEED = 0x5EED
#: Each round's step is that much larger than the last. Equal ones of opposite signs would put a gate back to zero; no
#: sum of these, whatever their signs, is zero.
FASTER = 1.25
#: Values of a parameter that are compared first to see whether it was updated.
SAMPLE = 4096
#: The learning rate where the optimizer's own is not larger. With gradients scaled to 1 each update shows, and none
#: throws the model off.
RATE = 0.01


@dataclass
class Seen:
    """What the rounds showed of one leaf that requires grad.

    `trained`: the optimizer has it. `peaks` is the largest |gradient| of each round, None where it got none. `updated`
    is None until there was a step on a gradient, and where that cannot be told; `lost` the largest |value| where a step
    of the learning rate is less than its rounding. `idle` counts the rounds in which a module that holds it was called
    and gave tensors without elements alone, as an expert does that no token chose.
    """

    tensor: torch.Tensor
    trained: bool
    peaks: list[float | None] = field(default_factory=list)
    updated: bool | None = None
    lost: float | None = None
    idle: int = 0

    @property
    def peak(self) -> float | None:
        """The largest finite |gradient|, None where every round gave none or zero."""
        return max(filter(_is_usable, self.peaks), default=None)  # type: ignore[type-var]

    @property
    def is_new(self) -> bool:
        """Whether the last round gave it its first finite gradient that is not zero."""
        return any(map(_is_usable, self.peaks[-1:])) and not any(map(_is_usable, self.peaks[:-1]))

    @property
    def broken(self) -> int | None:
        """The first round whose gradient had a NaN or an infinity."""
        bad = (n for n, peak in enumerate(self.peaks, 1) if peak is not None and not peak < float("inf"))
        return next(bad, None)

    @property
    def missing(self) -> bool:
        """Whether the optimizer waits for a gradient that none of the rounds gave."""
        return self.trained and self.peak is None and self.broken is None

    @property
    def settled(self) -> bool:
        """Whether another round could tell no more."""
        return self.broken is not None or (self.peak is not None and (self.updated is True or not self.trained))


def _is_usable(peak: float | None) -> bool:
    return bool(peak) and peak < float("inf")  # type: ignore[operator]


@dataclass(frozen=True)
class Asked:
    """The largest |gradient| in another mode, by FQN, of what had none; or `why_not`, and no peaks."""

    peaks: dict[str, float | None]
    why_not: str | None = None


@dataclass
class Training:
    """One instance in training. `seen` has the leaves that require grad, by FQN, `frozen` the other parameters.

    `changed_by` says what changed the values of a tensor: "forward", or of one that is not trained "step". `written`
    has the trained parameters that forward wrote to, whether or not their values changed by that. `cut_off`: no output
    required grad. `finite`: every output was. `draws`: forward drew random numbers. `in_eval` and `in_running` are what
    was asked of the last round again, in eval mode where forward draws, with the batch norms alone in eval mode where
    there are any.
    """

    subject: Subject
    module: nn.Module
    made_by: type[torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer | None = None
    seen: dict[str, Seen] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    changed_by: dict[str, set[str]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    rounds: int = 0
    cut_off: bool = False
    finite: bool = True
    draws: bool = False
    in_eval: Asked | None = None
    in_running: Asked | None = None
    _held: frozenset[int] = frozenset()

    def is_up_to_chance(self, name: str) -> bool:
        """Whether what has no gradient may have one in another round: eval mode gives it one, or does not say."""
        if self.in_eval is None or self.cancelled(name):
            return False
        in_eval = self.in_eval.peaks.get(name)
        return in_eval != 0 if 0 in self.seen[name].peaks else bool(in_eval)

    def cancelled(self, name: str) -> float | None:
        """The gradient of what batch statistics alone make zero, such as a bias in front of a BatchNorm."""
        return self.in_running.peaks.get(name) if self.in_running and 0 in self.seen[name].peaks else None

    @property
    def growing(self) -> bool:
        """Whether even the last of many rounds gave something its first gradient."""
        return self.rounds >= GROWING and _grew(self)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are rows of the subject and have a shape, by FQN."""
        rows = self.subject.rows()
        found = judging.tensors(self.module).items()
        return {name: tensor for name, tensor in found if name in rows and not judging.lazy(tensor)}


def train(subject: Subject, made_by: type[torch.optim.Optimizer]) -> tuple[Training, str | None]:
    """Train a fresh instance; what was seen, and why no more could be, if so.

    Raises ModelError where the model's code or the optimizer raises. The CPU's random generators and the grad mode are
    as before afterwards.
    """
    with _as_it_was(0):
        run = Training(subject, subject.fresh(values=True), made_by)
        with subject.user_code("setting it to train mode"):
            run.module.train()
        if any(map(judging.lazy, judging.tensors(run.module).values())):
            subject.call(run.module)
        _start(run)
        why_not = None
        while why_not is None and run.rounds < (GROWING if _grew(run) else ROUNDS) and not _settled(run):
            why_not = _round(run)
        if why_not is None:
            _ask(run)
        while why_not is None and run.rounds < ROUNDS + MORE and any(map(run.is_up_to_chance, _missing(run))):
            why_not = _round(run)
        return run, why_not


@contextmanager
def _as_it_was(seed: int) -> Iterator[None]:
    with inputs_of.seeded(seed), torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def round_of(run: Training) -> Iterator[None]:
    """Around what is done in the next round: its seed, no gradients left from the last."""
    with _as_it_was(SEED + run.rounds):
        _clear(run)
        yield


def _clear(run: Training) -> None:
    for seen in run.seen.values():
        seen.tensor.grad = None


# --- a round ------------------------------------------------------------------------------------------------


def _start(run: Training) -> None:
    with run.subject.user_code("listing its parameters"):
        trained = [one for one in run.module.parameters() if one.requires_grad]
    run._held = frozenset(map(id, trained))
    _find_leaves(run)
    if trained:
        with run.subject.user_code(f"making {run.made_by.__name__} for it"):
            run.optimizer = run.made_by(trained, **_options(run.made_by))


def _options(made_by: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """No weight decay: it updates what has no effect on the loss."""
    known = inspect.signature(made_by).parameters
    options: dict[str, Any] = {"weight_decay": 0} if "weight_decay" in known else {}
    if "lr" in known:
        own = known["lr"].default
        options["lr"] = max(RATE, own) if isinstance(own, float) else RATE
    return options


def _settled(run: Training) -> bool:
    """Whether another round could tell no more."""
    if not run.rounds:
        return False
    return not (run.rounds == 1 and _shows_later(run)) and all(seen.settled for seen in run.seen.values())


def _grew(run: Training) -> bool:
    return any(seen.is_new for seen in run.seen.values())


def _shows_later(run: Training) -> bool:
    """Whether there is what shows only when it is called again after a step.

    It keeps its graph; or it has the shape of a trained tensor, which it may follow (an EMA, a target network): it
    starts equal to that, and so is unchanged.
    """
    shapes = {seen.tensor.shape for seen in run.seen.values() if seen.trained and not seen.tensor.is_nested}
    found = run.tensors()
    still = [one for name, one in found.items() if name not in run.changed_by and not one.requires_grad]
    follows = (_is_floating(one) and not one.is_nested and one.shape in shapes for one in still)
    return any(not one.is_leaf for one in found.values()) or any(follows)


def _round(run: Training) -> str | None:
    with round_of(run):
        return _trained(run)


def _trained(run: Training) -> str | None:
    kept = _copies(run.tensors(), run._held)
    marks = {name: _Mark(seen.tensor) for name, seen in run.seen.items() if seen.trained}
    with _calls() as gave:
        found = floating(forward(run))
    run.rounds += 1
    _note_changes(run, kept, "forward")
    _note_writes(run, marks)
    _find_leaves(run)
    _note_idle(run, gave)
    if not run.seen:
        run.rounds = ROUNDS
        return None
    if not found:
        return "forward gives no floating-point tensor, so there is no loss to train with"
    run.finite = run.finite and all(bool(torch.isfinite(_wide(one)).all()) for one in found)
    loss = loss_of(found)
    run.cut_off = not loss.requires_grad
    if loss.requires_grad:
        with run.subject.user_code(f"backward{_again(run.rounds)}"):
            loss.backward()  # type: ignore[no-untyped-call]
    _read_gradients(run)
    _step(run, loss)
    _note_changes(run, kept, "step")
    return None


def _again(number: int) -> str:
    return f" in round {number}" if number > 1 else ""


def forward(run: Training, mode: str = "train mode") -> Any:
    """What the module gives for the next round's inputs. Raises ModelError."""
    assert run.subject.inputs is not None  # noqa: S101 - prove has looked
    number = run.rounds + 1
    args, kwargs = run.subject.inputs.make(seed=number)
    before = _generators()
    with run.subject.user_code(f"calling it in {mode}{_again(number) if mode == 'train mode' else ''}"):
        output = run.module(*args, **kwargs)
    run.draws = run.draws or before != _generators()
    return output


def _generators() -> tuple[Any, ...]:
    """The states of the generators that forward may draw from."""
    numpy: Any = sys.modules.get("numpy")
    _, state, *rest = numpy.random.get_state() if numpy else (None, b"")
    return torch.default_generator.get_state().tolist(), random.getstate(), bytes(state), rest


def floating(output: Any) -> list[torch.Tensor]:
    """The floating-point and complex tensors in an output.

    What is no container (a distribution) is opened only where there is nothing else: nobody trains on a cache of keys.
    """
    leaves = list(inputs_of.leaves(output))
    found = [one for one in leaves if _is_floating(one)]
    if not found:
        inside = [list(vars(one).values()) for one in leaves if hasattr(one, "__dict__")]
        found = [one for one in inputs_of.leaves(inside) if _is_floating(one)]
    return found


def _is_floating(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and (value.is_floating_point() or value.is_complex())


def loss_of(found: list[torch.Tensor]) -> torch.Tensor:
    """The sum of each output times random weights; what is not finite (a mask of -inf) counts for nothing."""
    total = torch.zeros(())
    for values in map(_wide, found):
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        total = total + (values * torch.randn_like(values)).sum().to(total.device)
    return total


def _wide(output: torch.Tensor) -> torch.Tensor:
    """All its values, as real numbers of 32 bits or more."""
    values = _strided(output)
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _step(run: Training, loss: torch.Tensor) -> None:
    if run.optimizer is None:
        return
    trained = {name: seen for name, seen in run.seen.items() if seen.trained and not seen.updated}
    trained = {name: seen for name, seen in trained.items() if seen.peaks[-1] and seen.tensor.grad is not None}
    before = {name: _Before(seen.tensor, sample=run.rounds == 1) for name, seen in trained.items()}
    with run.subject.user_code(f"the step of {run.made_by.__name__}"):
        # LBFGS asks for the loss again, and is told the same.
        run.optimizer.step(lambda: float(loss.detach()))
    for name, seen in trained.items():
        seen.updated = before[name].updated()
        seen.lost = _lost(seen.tensor, run.optimizer) if seen.updated is False else None


def is_strided(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether it is one dense block of values."""
    return tensor is not None and tensor.layout is torch.strided and not tensor.is_nested


class _Before:
    """A tensor's values before the step: of a large one a sample is enough to show that it was updated."""

    def __init__(self, tensor: torch.Tensor, *, sample: bool) -> None:
        self._tensor, self._stride = tensor, 1
        if sample and type(tensor) is nn.Parameter and tensor.is_contiguous() and is_strided(grad := tensor.grad):
            stride = tensor.numel() // SAMPLE or 1
            if bool(grad.reshape(-1)[::stride].any()):
                self._stride = stride
        self._values = copy(self._now())

    def _now(self) -> torch.Tensor:
        return self._tensor if self._stride == 1 else self._tensor.detach().reshape(-1)[:: self._stride]

    def updated(self) -> bool | None:
        """None where it cannot be told: the next round, which looks at all values, tells."""
        same = tensor_bits.same(self._values, self._now())
        return None if same is None or (same and self._stride > 1) else not same


def _lost(tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> float | None:
    """The largest |value| where a step of the learning rate is less than its rounding."""
    peak, rate = _peak(tensor), float(optimizer.defaults.get("lr", RATE))
    return peak if peak and rate < peak * torch.finfo(tensor.dtype).eps else None


# --- other modes --------------------------------------------------------------------------------------------


def _missing(run: Training) -> list[str]:
    return [name for name, seen in run.seen.items() if seen.missing]


def _ask(run: Training) -> None:
    """Ask in other modes what has no gradient in train mode: what batch statistics cancel, and what chance drops."""
    norms = [one for one in run.module.modules() if _is_batch_norm(one)]
    if norms and any(0 in run.seen[name].peaks for name in _missing(run)):
        run.in_running = _asked(run, "train mode, with its batch norms in eval mode", norms)
    if run.draws and not all(map(run.cancelled, _missing(run))):
        run.in_eval = _asked(run, "eval mode", None)


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether it normalises by what it is given now, and in eval mode by the mean of what it was given."""
    return module.training and isinstance(getattr(module, "running_mean", None), torch.Tensor)


def _asked(run: Training, mode: str, only: list[nn.Module] | None) -> Asked:
    """The gradients of what has none, with `only` or all modules in eval mode; no step, and the modes as before.

    It is the last round once more, inputs and chance and all, so that nothing differs but the mode.
    """
    modes = [(one, one.training) for one in run.module.modules() if hasattr(one, "training")]
    run.rounds -= 1
    try:
        with round_of(run):
            return Asked(_peaks_in(run, mode, only))
    except ModelError as error:
        return Asked({}, judging.reason_of(run.subject, error))
    finally:
        run.rounds += 1
        for one, training in modes:
            one.training = training


def _peaks_in(run: Training, mode: str, only: list[nn.Module] | None) -> dict[str, float | None]:
    with run.subject.user_code(f"setting it to {mode}"):
        for one in [run.module] if only is None else only:
            one.eval()
    loss = loss_of(floating(forward(run, mode)))
    if loss.requires_grad:
        with run.subject.user_code(f"backward in {mode}"):
            loss.backward()  # type: ignore[no-untyped-call]
    return {name: _scaled(run.seen[name].tensor) for name in _missing(run)}


# --- what a round showed ------------------------------------------------------------------------------------


def _find_leaves(run: Training) -> None:
    """Every leaf that requires grad, in the optimizer or not. Forward makes some, and replaces others."""
    for entry in walk(run.module).registered:
        if entry.is_parameter and entry.tensor is not None and not entry.tensor.requires_grad:
            run.frozen.add(entry.fqn)
    for name, tensor in run.tensors().items():
        if not tensor.requires_grad or not tensor.is_leaf or not tensor.numel():
            continue
        known = run.seen.get(name)
        if known is None or known.tensor is not tensor:
            run.seen[name] = Seen(tensor, id(tensor) in run._held, known.peaks if known else [])
            run.replaced |= {name} if known else set()


@contextmanager
def _calls() -> Iterator[dict[int, bool]]:
    """Of each module that is called meanwhile, by its id, whether some call gave more than tensors without elements."""
    gave: dict[int, bool] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            gave[id(module)] = gave.get(id(module), False) or not _is_empty(output)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield gave
    finally:
        handle.remove()


def _is_empty(output: Any) -> bool:
    found = [one for one in (output if type(output) in (tuple, list) else (output,)) if isinstance(one, torch.Tensor)]
    return bool(found) and not any(one.numel() for one in found)


def _note_idle(run: Training, gave: dict[int, bool]) -> None:
    """Count the round for each leaf of a module that was called, and each time with nothing to do."""
    if all(gave.values()):
        return
    named = run.module.named_modules(remove_duplicate=False)
    idle = tuple(f"{name}." for name, one in named if name and not gave.get(id(one), True))
    for name, seen in run.seen.items():
        seen.idle += name.startswith(idle)


def _read_gradients(run: Training) -> None:
    """Note each gradient's size and give it the round's, so that the step shows; one that is not finite is dropped."""
    peaks: dict[int, float | None] = {}
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for seen in run.seen.values():
            key = id(seen.tensor)
            if key not in peaks:  # a tied tensor has two names and one gradient
                peaks[key] = _scaled(seen.tensor, FASTER ** (run.rounds - 1))
            seen.peaks.append(peaks[key])


def _scaled(tensor: torch.Tensor, to: float = 1.0) -> float | None:
    """The largest |gradient|, which is `to` since."""
    if tensor.grad is None:
        return None
    peak = _peak(tensor.grad)
    if 0 < peak < float("inf"):
        tensor.grad.div_(peak).mul_(to)
    elif peak:
        tensor.grad = None
    return peak


def _peak(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN where there is a NaN."""
    values = _strided(tensor.detach())
    return float(torch.linalg.vector_norm(values, float("inf"))) if values.numel() else 0.0


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """All that a nested or sparse tensor holds, in one that is neither."""
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _note_changes(run: Training, kept: dict[str, torch.Tensor], cause: str) -> None:
    """Which of the tensors that were kept have other values now; those are kept from here on."""
    for name, tensor in run.tensors().items():
        if name in kept and tensor_bits.same(kept[name], tensor) is False:
            run.changed_by.setdefault(name, set()).add(cause)
            kept[name] = copy(tensor)


class _Mark:
    """What a trained parameter was before forward: where it lies, how often it was written to, some of its values.

    What is written by way of `.data` is not counted as written to, and shows in the values alone.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place, self._sample = self._now()

    def _now(self) -> tuple[Any, torch.Tensor | None]:
        tensor = self._tensor
        place = storage(tensor)[0], None if tensor.is_inference() else tensor._version
        if type(tensor) is not nn.Parameter or not is_strided(tensor):
            return place, None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return place, tensor.detach().reshape(-1)[:: tensor.numel() // SAMPLE or 1].clone()

    def told(self) -> tuple[bool, bool]:
        """Whether it was written to since, and whether its values are others."""
        place, sample = self._now()
        both = self._sample is not None and sample is not None
        changed = both and tensor_bits.same(self._sample, sample) is False  # type: ignore[arg-type]
        return changed or place != self._place, changed


def _note_writes(run: Training, marks: dict[str, _Mark]) -> None:
    for name, mark in marks.items():
        written, changed = mark.told()
        run.written |= {name} if written else set()
        if changed:
            run.changed_by.setdefault(name, set()).add("forward")


def _copies(of: dict[str, torch.Tensor], without: frozenset[int]) -> dict[str, torch.Tensor]:
    return {name: copy(tensor) for name, tensor in of.items() if id(tensor) not in without}


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its values, in no graph."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().clone()
