"""Call a model under test once: what a first forward adds, shapes and assigns belongs to its state."""

from __future__ import annotations

from dataclasses import replace

import torch
from msgspec import structs
from torch import nn

from statecli import live
from statecli.commands.verify import forward_effects
from statecli.commands.verify.inputs import Inputs
from statecli.commands.verify.model_under_test import Subject
from statecli.core.errors import ModelError
from statecli.live import measure
from statecli.live.build import Built
from statecli.live.origin import Origins
from statecli.live.spec import Spec
from statecli.live.walk import walk


def with_inputs(subject: Subject, inputs: Inputs | None, why_not: str) -> Subject:
    """The subject with inputs, and with the rows of what a first forward made appear; as it was where that raises."""
    subject = replace(subject, inputs=inputs, no_inputs=why_not or subject.no_inputs)
    if inputs is None:
        return subject
    try:
        module, origins, there = _called(subject)
    except ModelError as error:  # the proofs that need a forward say so
        return replace(subject, raises=str(error).removeprefix(f"{subject.target}: "))
    name = subject.target
    subject = replace(subject, assigned=_assigned(module, there))
    known = subject.rows()
    shapeless = {fqn for fqn, row in known.items() if row.shape is None}
    if not shapeless and _tensors(module).keys() <= there.keys():
        return subject
    after = live.read(Built(Spec(name, "", False, name), module, origins, "cpu", True, lambda _, __: module), name)
    rows = forward_effects.marked(after.tensors, subject.state.tensors)
    new = [row for row in rows if row.fqn not in known or (row.fqn in shapeless and row.shape is not None)]
    new = [row for row in new if row.fqn in shapeless or row.fqn not in there]
    appeared = frozenset(row.fqn for row in new)
    kept = [row for row in subject.state.tensors if row.fqn not in appeared]
    state = structs.replace(subject.state, tensors=(*kept, *new))
    return replace(subject, state=state, appeared=appeared)


def _called(subject: Subject) -> tuple[nn.Module, Origins, dict[str, torch.Tensor]]:
    """An instance after one forward, and the tensors that it had before. Raises ModelError where forward raises.

    Without initial values where forward does not need them.
    """

    def once(*, values: bool) -> tuple[nn.Module, Origins, dict[str, torch.Tensor]]:
        module = subject.fresh(values=values)
        there = _tensors(module)
        return module, forward_effects.called(subject, module), there

    try:
        return once(values=False)
    except ModelError:
        return once(values=True)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(measure.names(walk(module)))


def _assigned(module: nn.Module, there: dict[str, torch.Tensor]) -> frozenset[str]:
    """The names under which forward has put another tensor than was there."""
    return frozenset(name for name, one in _tensors(module).items() if there.get(name, one) is not one)
