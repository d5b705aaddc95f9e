"""Call a model once, and add to its state the tensors that this first forward creates or changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from msgspec import structs
from torch import nn

from statecli import live
from statecli.commands.verify import check_builder, forward_effects
from statecli.commands.verify.inputs import Inputs, MissingInput
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.read_by_forward import ReadRecorder
from statecli.core.errors import ModelError
from statecli.live import measure
from statecli.live.assignment_lines import Origins
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec
from statecli.live.tensors import identify_storage, is_lazy


def add_inputs(subject: ModelUnderTest, inputs: Inputs | None, why_not: MissingInput | None) -> ModelUnderTest:
    """Return the model under test with `inputs` set, and with the tensors that its first forward creates."""
    home = subject.find_home()
    if inputs is not None and home != "meta":
        inputs = inputs.move(home)
    subject = replace(subject, inputs=inputs, why_no_inputs=why_not or subject.why_no_inputs)
    if inputs is None:
        return subject
    try:
        call = _call_once(subject, inputs)
    except ModelError as error:
        reason = str(error).removeprefix(f"{subject.target}: ")
        if inputs.requested:  # then the proofs that need a forward report the error
            return replace(subject, forward_error=reason)
        remark = f"; forward does not accept {inputs.text}: {reason}"
        return replace(subject, inputs=None, why_no_inputs=MissingInput(remark=remark))
    name = subject.target
    tensors_before, after = call.tensors_before, measure.map_tensors(call.module)
    reassigned = (name for name, tensor in after.items() if tensors_before.get(name, tensor) is not tensor)
    subject = replace(
        subject, reassigned_by_forward=frozenset(reassigned), read_original=min(call.read_names, default=None)
    )
    rows_before = subject.rows_by_fqn
    shapeless = {fqn for fqn, row in rows_before.items() if row.shape is None}
    if not shapeless and after.keys() <= tensors_before.keys():
        return subject
    state_after = live.model_reader.read(
        BuiltModel(ModelSpec(name, "", False, name), call.module, call.origins, "cpu", True, lambda _, __: call.module),
        name,
    )
    rows = forward_effects.mark_rows(state_after.tensors, subject.state.tensors)
    new = [row for row in rows if row.fqn not in rows_before or (row.fqn in shapeless and row.shape is not None)]
    new = [row for row in new if row.fqn in shapeless or row.fqn not in tensors_before]
    created = frozenset(row.fqn for row in new)
    kept_rows = [row for row in subject.state.tensors if row.fqn not in created]
    state = structs.replace(subject.state, tensors=(*kept_rows, *new))
    return replace(subject, state=state, created_by_forward=created)


@dataclass(frozen=True)
class _FirstCall:
    """Instance after its first forward. `read_names`: tensors that forward read from the live model, not its copy."""

    module: nn.Module
    origins: Origins
    tensors_before: dict[str, torch.Tensor]
    read_names: set[str]


def _call_once(subject: ModelUnderTest, inputs: Inputs) -> _FirstCall:
    """Build an instance and call it once. Raises ModelError if forward raises.

    Initial values are drawn only if forward fails without them.
    """

    def build_and_call(*, values: bool) -> _FirstCall:
        module = subject.build_for_call(values=values)
        tensors_before = measure.map_tensors(module)
        read_names: set[str] = set()
        # The inputs may be tensors of the original, so they are copied before the recording.
        call = inputs.make_call()
        called_subject = replace(subject, inputs=replace(inputs, make_call=lambda **_: call))
        with _record_reads_of_original(subject, tensors_before, read_names):
            origins = forward_effects.call_and_record(called_subject, module)
        return _FirstCall(module, origins, tensors_before, read_names)

    try:
        return build_and_call(values=False)
    except ModelError:
        return build_and_call(values=True)


def _record_reads_of_original(
    subject: ModelUnderTest, copied_tensors: dict[str, torch.Tensor], read_names: set[str]
) -> AbstractContextManager[object]:
    """Record which tensors forward reads from the live original instead of the copy. Compiled models are skipped."""
    if subject.original is None or forward_effects.is_compiled(subject.original):
        return nullcontext()
    copied_keys = check_builder.list_storage_keys(copied_tensors.values())
    original_tensors = {
        name: tensor
        for name, tensor in measure.map_tensors(subject.original).items()
        if not is_lazy(tensor) and tensor.numel() and identify_storage(tensor) not in copied_keys
    }
    return ReadRecorder(original_tensors, read_names)
