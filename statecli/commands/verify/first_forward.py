"""Call a model under test once and add the tensors created, shaped or assigned by a first forward to its state."""

from __future__ import annotations

from dataclasses import replace

import torch
from msgspec import structs
from torch import nn

from statecli import live
from statecli.commands.verify import forward_effects
from statecli.commands.verify.inputs import Inputs, MissingInput
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.errors import ModelError
from statecli.live import measure
from statecli.live.assignment_lines import Origins
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec


def add_inputs(subject: ModelUnderTest, inputs: Inputs | None, why_not: MissingInput | None) -> ModelUnderTest:
    """Add inputs and the rows of tensors created by a first forward; no rows if forward raises."""
    home = subject.find_home()
    if inputs is not None and home != "meta":
        inputs = inputs.move(home)
    subject = replace(subject, inputs=inputs, why_no_inputs=why_not or subject.why_no_inputs)
    if inputs is None:
        return subject
    try:
        module, origins, tensors_before = _call_once(subject)
    except ModelError as error:
        reason = str(error).removeprefix(f"{subject.target}: ")
        if inputs.requested:  # then the proofs that need a forward report the error
            return replace(subject, forward_error=reason)
        remark = f"; forward does not accept {inputs.text}: {reason}"
        return replace(subject, inputs=None, why_no_inputs=MissingInput(remark=remark))
    name = subject.target
    after = measure.map_tensors(module)
    reassigned = (name for name, tensor in after.items() if tensors_before.get(name, tensor) is not tensor)
    subject = replace(subject, reassigned_by_forward=frozenset(reassigned))
    rows_before = subject.rows_by_fqn
    shapeless = {fqn for fqn, row in rows_before.items() if row.shape is None}
    if not shapeless and after.keys() <= tensors_before.keys():
        return subject
    state_after = live.model_reader.read(
        BuiltModel(ModelSpec(name, "", False, name), module, origins, "cpu", True, lambda _, __: module), name
    )
    rows = forward_effects.mark_rows(state_after.tensors, subject.state.tensors)
    new = [row for row in rows if row.fqn not in rows_before or (row.fqn in shapeless and row.shape is not None)]
    new = [row for row in new if row.fqn in shapeless or row.fqn not in tensors_before]
    created = frozenset(row.fqn for row in new)
    kept_rows = [row for row in subject.state.tensors if row.fqn not in created]
    state = structs.replace(subject.state, tensors=(*kept_rows, *new))
    return replace(subject, state=state, created_by_forward=created)


def _call_once(subject: ModelUnderTest) -> tuple[nn.Module, Origins, dict[str, torch.Tensor]]:
    """Return an instance after a forward, and its tensors before. Raises ModelError if forward raises.

    Initial values are drawn only if forward fails without them.
    """

    def build_and_call(*, values: bool) -> tuple[nn.Module, Origins, dict[str, torch.Tensor]]:
        module = subject.build_fresh(values=values)
        tensors_before = measure.map_tensors(module)
        return module, forward_effects.call_and_record(subject, module), tensors_before

    try:
        return build_and_call(values=False)
    except ModelError:
        return build_and_call(values=True)
