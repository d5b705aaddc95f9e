"""Up to three rounds of forward, backward and optimizer step on one instance, and what they showed of each tensor.

The loss is each floating-point output times a random tensor of its shape, summed. A plain sum would be constant behind
a softmax or a normalisation, and everything before it would get no gradient.

Later rounds are for what the first did not reach: the A of a LoRA, whose B starts at zero, has its first gradient once
B has been updated; other inputs choose other experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from statecli.errors import ModelError
from statecli.modules.tensors import storage
from statecli.modules.walk import walk
from statecli.proofs import bits, judging
from statecli.proofs import inputs as inputs_of
from statecli.proofs.subject import Subject

#: Rounds of forward, backward and step at most.
ROUNDS = 3
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
    of the learning rate is less than its rounding.
    """

    tensor: torch.Tensor
    trained: bool
    peaks: list[float | None] = field(default_factory=list)
    updated: bool | None = None
    lost: float | None = None

    @property
    def peak(self) -> float | None:
        """The largest finite |gradient|, None where every round gave none or zero."""
        return max((peak for peak in self.peaks if peak and peak < float("inf")), default=None)

    @property
    def broken(self) -> int | None:
        """The first round whose gradient had a NaN or an infinity."""
        bad = (n for n, peak in enumerate(self.peaks, 1) if peak is not None and not peak < float("inf"))
        return next(bad, None)

    @property
    def settled(self) -> bool:
        """Whether another round could tell no more."""
        return self.broken is not None or (self.peak is not None and (self.updated is True or not self.trained))


@dataclass
class Training:
    """One instance in training. `seen` has the leaves that require grad, by FQN, `frozen` the other parameters.

    `changed_by` says of other tensors than those trained what changed their values: "forward" or "step".
    `cut_off`: no output required grad. `finite`: every output was.
    """

    subject: Subject
    module: nn.Module
    made_by: type[torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer | None = None
    seen: dict[str, Seen] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    changed_by: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    cut_off: bool = False
    finite: bool = True
    _held: frozenset[int] = frozenset()

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
    with _as_it_was():
        run = Training(subject, subject.fresh(values=True), made_by)
        with subject.user_code("setting it to train mode"):
            run.module.train()
        if any(map(judging.lazy, judging.tensors(run.module).values())):
            subject.call(run.module)
        _start(run)
        why_not = None
        while run.rounds < ROUNDS and why_not is None and not _settled(run):
            why_not = _round(run)
        return run, why_not


@contextmanager
def _as_it_was() -> Iterator[None]:
    with inputs_of.seeded(0), torch.inference_mode(False), torch.enable_grad():
        yield


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
    """Whether another round could tell no more. What keeps its graph shows only when it is called again."""
    if not run.rounds:
        return False
    keeps_graph = run.rounds == 1 and any(not one.is_leaf for one in run.tensors().values())
    return not keeps_graph and all(seen.settled for seen in run.seen.values())


def _round(run: Training) -> str | None:
    kept = _copies(run.tensors(), run._held)
    for seen in run.seen.values():
        seen.tensor.grad = None
    found = floating(_forward(run))
    run.rounds += 1
    _note_changes(run, kept, "forward")
    _find_leaves(run)
    if not run.seen:
        run.rounds = ROUNDS
        return None
    if not found:
        return "forward gives no floating-point tensor, so there is no loss to train with"
    loss = _loss(run, found)
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


def _forward(run: Training) -> Any:
    assert run.subject.inputs is not None  # noqa: S101 - prove has looked
    number = run.rounds + 1
    args, kwargs = run.subject.inputs.make(seed=number)
    with run.subject.user_code(f"calling it in train mode{_again(number)}"):
        return run.module(*args, **kwargs)


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


def _loss(run: Training, found: list[torch.Tensor]) -> torch.Tensor:
    """The sum of each output times random weights; what is not finite (a mask of -inf) counts for nothing."""
    total = torch.zeros(())
    for output in found:
        values = _strided(output)
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        run.finite = run.finite and bool(torch.isfinite(values).all())
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        total = total + (values * torch.randn_like(values)).sum().to(total.device)
    return total


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


def _is_strided(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return tensor is not None and tensor.layout is torch.strided and not tensor.is_nested


class _Before:
    """A tensor's values before the step: of a large one a sample is enough to show that it was updated."""

    def __init__(self, tensor: torch.Tensor, *, sample: bool) -> None:
        self._tensor, self._stride = tensor, 1
        if sample and type(tensor) is nn.Parameter and tensor.is_contiguous() and _is_strided(grad := tensor.grad):
            stride = tensor.numel() // SAMPLE or 1
            if bool(grad.reshape(-1)[::stride].any()):
                self._stride = stride
        self._values = _copy(self._now())

    def _now(self) -> torch.Tensor:
        return self._tensor if self._stride == 1 else self._tensor.detach().reshape(-1)[:: self._stride]

    def updated(self) -> bool | None:
        """None where it cannot be told: the next round, which looks at all values, tells."""
        same = bits.same(self._values, self._now())
        return None if same is None or (same and self._stride > 1) else not same


def _lost(tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> float | None:
    """The largest |value| where a step of the learning rate is less than its rounding."""
    peak, rate = _peak(tensor), float(optimizer.defaults.get("lr", RATE))
    return peak if peak and rate < peak * torch.finfo(tensor.dtype).eps else None


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


def _read_gradients(run: Training) -> None:
    """Note each gradient's size and divide it by that, so that the step shows; one that is not finite is dropped."""
    peaks: dict[int, float | None] = {}
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for seen in run.seen.values():
            key = id(seen.tensor)
            if key not in peaks:  # a tied tensor has two names and one gradient
                peaks[key] = _scaled(seen.tensor)
            seen.peaks.append(peaks[key])


def _scaled(tensor: torch.Tensor) -> float | None:
    """The largest |gradient|, by which it has been divided since."""
    if tensor.grad is None:
        return None
    peak = _peak(tensor.grad)
    if 0 < peak < float("inf"):
        tensor.grad.div_(peak)
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
        if name in kept and bits.same(kept[name], tensor) is False:
            run.changed_by.setdefault(name, cause)
            kept[name] = _copy(tensor)


def _copies(of: dict[str, torch.Tensor], without: frozenset[int]) -> dict[str, torch.Tensor]:
    return {name: _copy(tensor) for name, tensor in of.items() if id(tensor) not in without}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().clone()


# --- who is used --------------------------------------------------------------------------------------------


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storage of each tensor that an operator is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int | str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in inputs_of.leaves((args, kwargs or {})):
            if issubclass(type(one), torch.Tensor):
                self.storages.add(storage(one)[0])
        return func(*args, **(kwargs or {}))


def used_in_forward(run: Training) -> frozenset[str] | None:
    """The names among `run.seen` that some operator of one more forward reads; None where it cannot be watched."""
    uses = _Uses()
    try:
        with _as_it_was(), uses:
            _forward(run)
    except ModelError:  # what it does under a dispatch mode says nothing of the model
        return None
    return frozenset(name for name, seen in run.seen.items() if storage(seen.tensor)[0] in uses.storages)
