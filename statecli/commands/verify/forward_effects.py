"""Effects of a model's first forward on its state: tensors that appear, get their shape, change, or disappear.

Examples are caches for a device, attention maps and lazy parameters, which do not exist when the constructor returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import getattr_static
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from statecli.commands.verify import inputs as given, live_model, model_under_test
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.errors import ModelError
from statecli.core.model_state import ModelState, Oddity, TensorInfo
from statecli.live import measure, tensor_bits
from statecli.live.assignment_lines import Origins
from statecli.live.tensors import is_lazy

if TYPE_CHECKING:
    from torch import nn

    from statecli.live.built_model import BuiltModel

#: Note on a tensor that did not exist before the first call of the model.
CREATED_BY_FORWARD = "created by the first forward"
#: Note on a lazy parameter or buffer, which existed without a shape before the first call.
SHAPED_BY_FORWARD = "gets its shape in the first forward"
CHANGED_BY_FORWARD = "changed by forward"
CHANGED_BY_FORWARD_IN_TRAINING = "changed by forward in training mode"


@dataclass(frozen=True)
class CalledModel:
    """A model after its first forward, in eval mode and without gradients.

    Attributes:
        built_model: A called instance.
        before: The state before forward.
        change_by_name: How forward changed the value or shape of each earlier tensor.
        subject: The model before forward, for proofs.
        inputs: The arguments of forward.
        oddities: Unmeasured effects.
    """

    built_model: BuiltModel
    before: ModelState
    change_by_name: dict[str, str]
    subject: ModelUnderTest
    inputs: given.Inputs
    oddities: tuple[Oddity, ...] = ()

    def mark_state(self, state: ModelState) -> ModelState:
        """Return `state` with a note on each tensor that forward changed. `state` was read from `built_model`."""
        rows = mark_rows(state.tensors, self.before.tensors)
        noted_rows = tuple(_add_note(row, self.change_by_name.get(row.fqn)) for row in rows)
        oddities = (*state.oddities, *_find_gone(self.before, state), *self.oddities)
        return structs.replace(state, tensors=noted_rows, oddities=oddities)


def call_built_model(
    built_model: BuiltModel, target: str, input: Sequence[str], inputs: str | None, python_inputs: object = None
) -> CalledModel:
    """Call an instance of the model. The call may change the module of `built_model`.

    `python_inputs` are inputs from the Python API.

    Raises UsageError if the inputs cannot be parsed, ModelError if forward or the inputs' function raises.
    """
    if python_inputs is None:
        inputs_found, why_not = given.find_inputs(input, inputs, built_model)
    else:
        inputs_found, why_not = live_model.find_live_inputs(python_inputs, built_model)
    if inputs_found is None:
        raise ModelError(f"{target}: {why_not}")
    subject = model_under_test.prepare_built_model(built_model, target)
    subject = dataclasses.replace(subject, inputs=inputs_found.move(subject.find_home()))
    # First, because this needs an instance of its own, which is freed before the lasting instance is built.
    in_training, oddities = _find_changed_in_training(subject)
    module = subject.build_fresh(values=True)
    before = _Snapshot(module)
    origins = call_and_record(subject, module)
    change_by_name = {
        **dict.fromkeys(in_training, CHANGED_BY_FORWARD_IN_TRAINING),
        **dict.fromkeys(before.find_changed(module), CHANGED_BY_FORWARD),
    }

    def build_instance(values: bool, seed: int) -> nn.Module:
        instance = subject.build_fresh(values=values, seed=seed)
        subject.call(instance)
        return instance

    called_model = dataclasses.replace(
        built_model, module=module, original=None, origins=origins, make_instance=build_instance
    )
    return CalledModel(called_model, subject.state, change_by_name, subject, inputs_found, oddities)


def call_and_record(subject: ModelUnderTest, module: nn.Module) -> Origins:
    """Call `module` once. Return the source lines that assigned its tensors. Raises ModelError if forward raises."""
    origins = subject.origins.continue_for_instance()
    with nullcontext() if is_compiled(module) else origins.record():
        subject.call(module)
    return origins


def is_compiled(module: nn.Module) -> bool:
    """Return True if `torch.compile` compiles a part of the module. Methods of such a module must not be wrapped."""
    return any(
        type(part).__module__.startswith("torch._dynamo.")
        or part._compiled_call_impl is not None
        or hasattr(getattr_static(type(part), "forward", None), "_torchdynamo_orig_callable")
        for part in module.modules()
    )


def mark_rows(rows: Iterable[TensorInfo], before: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Return the tensor descriptions after a call, with notes on tensors that forward created or gave a shape."""
    rows_before = {row.fqn: row for row in before}
    aliases = {alias for row in before for alias in row.aliases}
    return tuple(_mark_row(row, rows_before.get(row.fqn), row.fqn in aliases) for row in rows)


def _mark_row(row: TensorInfo, row_before: TensorInfo | None, was_alias: bool) -> TensorInfo:
    if row_before is None and was_alias:
        return structs.replace(row, fix=None)  # the tensor of the constructor is another tensor, with its own row
    if row_before is None:
        # No fix, because code for the constructor would not register the tensor created by forward.
        return structs.replace(_add_note(row, CREATED_BY_FORWARD), fix=None, appeared=True)
    fix = row_before.fix if row.moves is False else None
    row = structs.replace(row, origin=row_before.origin or row.origin, fix=fix)
    return _add_note(row, SHAPED_BY_FORWARD) if row_before.shape is None and row.shape is not None else row


def _add_note(row: TensorInfo, note: str | None) -> TensorInfo:
    return structs.replace(row, note=f"{note}; {row.note}" if row.note else note) if note else row


def _find_gone(before: ModelState, state: ModelState) -> list[Oddity]:
    names_left = {row.fqn for row in state.tensors} | {alias for row in state.tensors for alias in row.aliases}
    gone_names = [row.fqn for row in before.tensors if row.fqn not in names_left]
    return [Oddity("gone-after-forward", f"the first forward removes {fqn}", fqn) for fqn in gone_names]


# --- changes by forward -------------------------------------------------------------------------------------


class _Snapshot:
    """Tensors of a module by name, with copies of their values or only with torch's version counters."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors_before = {
            name: (tensor, _copy_values(tensor), _count_writes(tensor)) for name, tensor in _map_tensors(module).items()
        }

    def find_changed(self, module: nn.Module) -> list[str]:
        """Return the names of tensors whose bits changed. A lazy tensor that got its shape is left out."""
        current_tensors = _map_tensors(module)
        return [
            name
            for name in self._tensors_before
            if name in current_tensors and self._is_changed(name, current_tensors[name])
        ]

    def _is_changed(self, name: str, current_tensor: torch.Tensor) -> bool:
        tensor, values, writes = self._tensors_before[name]
        if values is None or (has_same_bits := tensor_bits.is_same(values, current_tensor)) is None:
            return writes is not None and tensor is current_tensor and _count_writes(current_tensor) != writes
        return not has_same_bits


def _map_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: tensor for name, tensor in measure.map_tensors(module).items() if not is_lazy(tensor)}


def _copy_values(tensor: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        try:
            return None if tensor.is_meta else tensor.detach().clone()
        except (RuntimeError, NotImplementedError):
            return None


def _count_writes(tensor: torch.Tensor) -> int | None:
    """Return torch's version counter of the tensor, or None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def _find_changed_in_training(subject: ModelUnderTest) -> tuple[list[str], tuple[Oddity, ...]]:
    """Return the tensors that forward changes in train mode, or an empty list if the constructor sets eval mode."""
    module = subject.build_fresh(values=True)
    if not any(part.training for part in module.modules()):
        return [], ()
    before = _Snapshot(module)
    try:
        subject.call(module, training=True)
    except ModelError as error:
        reason = str(error).removeprefix(f"{subject.target}: ")
        return [], (
            Oddity("not-tried-in-training", f"cannot list the tensors that forward changes in training mode: {reason}"),
        )
    return before.find_changed(module), ()
