"""What a model's first forward makes of its state: tensors that appear, get their shape, change, or go.

Caches by device, attention maps, lazy parameters: nothing of them is there when the constructor returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from statecli.commands.verify import inputs as given
from statecli.commands.verify import live_model, model_under_test, tensor_bits
from statecli.commands.verify.model_under_test import Subject
from statecli.core.errors import ModelError
from statecli.core.state import ModelState, Oddity, TensorInfo
from statecli.live import measure
from statecli.live.origin import Origins
from statecli.live.tensors import is_lazy
from statecli.live.walk import walk

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.inputs import Call, Inputs
    from statecli.live.build import Built

#: What is said of a tensor that was not there before the model was first called.
APPEARED = "appears with the first forward"
#: Of a lazy parameter or buffer, which was there.
SHAPED = "gets its shape with the first forward"
CHANGED = "changed by forward"
CHANGED_IN_TRAINING = "changed by forward in training mode"


@dataclass(frozen=True)
class Ran:
    """A model after its first forward, in eval mode and without gradients: `built` is an instance that has run.

    `before` is the state without it; `changed` says of a tensor that was there how forward changed its value or shape;
    `text` is what forward was called with. `oddities` are what could not be measured.
    """

    built: Built
    before: ModelState
    changed: dict[str, str]
    text: str
    oddities: tuple[Oddity, ...] = ()

    def marked(self, state: ModelState) -> ModelState:
        """`state`, read from `built`, with what forward did to each tensor."""
        rows = marked(state.tensors, self.before.tensors)
        noted = tuple(_noted(row, self.changed.get(row.fqn)) for row in rows)
        oddities = (*state.oddities, *_gone(self.before, state), *self.oddities)
        return structs.replace(state, tensors=noted, oddities=oddities)


def run(built: Built, target: str, input: Sequence[str], inputs: str | None, handed: Any = None) -> Ran:
    """Call one instance of the model; the module of `built` is spoiled. `handed`: inputs as Python has them.

    Raises UsageError where the inputs cannot be read, ModelError where forward or the inputs' function raises.
    """
    if handed is None:
        called_with, why_not = given.find(input, inputs, built)
    else:
        called_with, why_not = live_model.inputs_of(handed, built)
    if called_with is None:
        raise ModelError(f"{target}: {why_not}")
    called_with = _on(called_with, built.init_device)
    subject = dataclasses.replace(model_under_test.of_built(built, target), inputs=called_with)
    in_training, oddities = _in_training(subject)  # first: its instance is gone when the one that stays is built
    module, origins, in_eval = _first(subject)
    changed = {**dict.fromkeys(in_training, CHANGED_IN_TRAINING), **dict.fromkeys(in_eval, CHANGED)}
    used = dataclasses.replace(built, module=module, original=None, origins=origins, _make=_again(subject))
    return Ran(used, subject.state, changed, called_with.text, oddities)


def _first(subject: Subject) -> tuple[nn.Module, Origins, list[str]]:
    """An instance that has run, the lines of what forward assigned, and the names of what it changed."""
    module = subject.fresh(values=True)
    before = _Snapshot(module)
    origins = called(subject, module)
    return module, origins, before.changed(module)


def called(subject: Subject, module: nn.Module) -> Origins:
    """Call `module` once; gives the lines that assigned what it holds now. Raises ModelError where forward raises."""
    origins = subject.origins.continued()
    with nullcontext() if _is_compiled(module) else origins.recording():
        subject.call(module)
    return origins


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` traces it or a part of it, which gives up at methods that are wrapped."""
    return any(
        type(one).__module__.startswith("torch._dynamo.")
        or one._compiled_call_impl is not None
        or hasattr(getattr_static(type(one), "forward", None), "_torchdynamo_orig_callable")
        for one in module.modules()
    )


def marked(rows: Iterable[TensorInfo], before: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """The rows of an instance that has run, with a note on each that was not in `before`, or had no shape there."""
    known = {row.fqn: row for row in before}
    others = {alias for row in before for alias in row.aliases}
    return tuple(_marked(row, known.get(row.fqn), row.fqn in others) for row in rows)


def _marked(row: TensorInfo, known: TensorInfo | None, was_alias: bool) -> TensorInfo:
    if known is None and was_alias:
        return structs.replace(row, fix=None)  # the constructor's tensor is another, and has its own row
    if known is None:
        # What would register it in the constructor says nothing of a tensor that forward makes.
        return structs.replace(_noted(row, APPEARED), fix=None, appeared=True)
    fix = known.fix if row.moves is False else None
    row = structs.replace(row, origin=known.origin or row.origin, fix=fix)
    return _noted(row, SHAPED) if known.shape is None and row.shape is not None else row


def _noted(row: TensorInfo, note: str | None) -> TensorInfo:
    said = "; ".join(filter(None, [note, row.note])) or None
    return row if said == row.note else structs.replace(row, note=said)


def _gone(before: ModelState, state: ModelState) -> list[Oddity]:
    left = {row.fqn for row in state.tensors} | {alias for row in state.tensors for alias in row.aliases}
    gone = [row.fqn for row in before.tensors if row.fqn not in left]
    return [Oddity("gone-after-forward", f"{fqn} is gone after the first forward", fqn) for fqn in gone]


def _on(inputs: Inputs, device: str) -> Inputs:
    """The same inputs for a model that is built on `device`."""
    if device == "cpu":
        return inputs

    def make(seed: int = 0) -> Call:
        moved: Call = given.mapped(inputs.make(seed=seed), lambda tensor: tensor.to(device))
        return moved

    return dataclasses.replace(inputs, make=make)


def _again(subject: Subject) -> Callable[[bool, int], nn.Module]:
    """One more instance that has run, as `Built` has it made."""

    def make(values: bool, seed: int) -> nn.Module:
        module = subject.fresh(values=values, seed=seed)
        subject.call(module)
        return module

    return make


# --- what forward changes -----------------------------------------------------------------------------------


class _Snapshot:
    """The tensors of a module by name, with their values where there are any, else how often they were written to."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = {name: (tensor, _copy(tensor), _writes(tensor)) for name, tensor in _tensors(module).items()}

    def changed(self, module: nn.Module) -> list[str]:
        """The names whose tensors in `module` are others now, bit by bit; not what got a shape."""
        now = _tensors(module)
        return [name for name in self._kept if name in now and self._is_changed(name, now[name])]

    def _is_changed(self, name: str, now: torch.Tensor) -> bool:
        tensor, values, writes = self._kept[name]
        if values is None or (same := tensor_bits.same(values, now)) is None:
            return writes is not None and tensor is now and _writes(now) != writes
        return not same


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: tensor for name, tensor in measure.names(walk(module)) if not is_lazy(tensor)}


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        try:
            return None if tensor.is_meta else tensor.detach().clone()
        except (RuntimeError, NotImplementedError):
            return None


def _writes(tensor: torch.Tensor) -> int | None:
    """torch's own count of writes to it, which it keeps without values too; not of inference tensors."""
    return None if tensor.is_inference() else tensor._version


def _in_training(subject: Subject) -> tuple[list[str], tuple[Oddity, ...]]:
    """What a forward in training mode changes, of an instance that its constructor leaves in it."""
    module = subject.fresh(values=True)
    if not any(one.training for one in module.modules()):
        return [], ()
    before = _Snapshot(module)
    try:
        subject.call(module, training=True)
    except ModelError as error:
        why = str(error).removeprefix(f"{subject.target}: ")
        return [], (Oddity("not-tried-in-training", f"cannot tell what forward changes in training mode: {why}"),)
    return before.changed(module), ()
