"""Whether an update outlives the next forward, of the parameters that forward itself writes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from statecli.commands.verify import judging, tensor_bits, training_rounds
from statecli.commands.verify.training_rounds import Training
from statecli.core.errors import ModelError


@dataclass(frozen=True)
class Overwritten:
    """The parameters whose values after forward are the same whatever they were before; or `why_not`, and none."""

    names: frozenset[str] = frozenset()
    why_not: str | None = None


def overwritten(run: Training) -> Overwritten:
    """Call forward once as the parameters are, and twice with others in those that it writes to.

    An update that is projected (to a norm, to a range) goes on in part, at least one of two opposite ones. They are as
    large as the values, so that rounding does not swallow them. The values are as before afterwards.
    """
    found = {name: run.seen[name].tensor for name in sorted(run.written) if name in run.seen}
    found = {name: one for name, one in found.items() if training_rounds.is_strided(one)}
    start = {name: training_rounds.copy(one) for name, one in found.items()}
    try:
        with training_rounds.round_of(run):
            updates = {name: _update(one) for name, one in start.items()}
        still, up, down = (_after(run, found, start, updates, sign) for sign in (0, 1, -1))
        return Overwritten(frozenset(name for name in found if _same(still[name], up[name], down[name])))
    except ModelError as error:
        return Overwritten(why_not=judging.reason_of(run.subject, error))
    finally:
        _put(found, start)


Tensors = dict[str, torch.Tensor]


def _update(values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.randn_like(values) * (1 + values.abs())


def _after(run: Training, found: Tensors, start: Tensors, updates: Tensors, sign: int) -> Tensors:
    """The values after one more forward, of the same inputs each time."""
    _put(found, {name: one + sign * updates[name] for name, one in start.items()} if sign else start)
    with training_rounds.round_of(run):
        training_rounds.forward(run)
    return {name: training_rounds.copy(one) for name, one in found.items()}


def _put(found: Tensors, values: Tensors) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for name, one in found.items():
            one.copy_(values[name])


def _same(values: torch.Tensor, *others: torch.Tensor) -> bool:
    return all(tensor_bits.same(values, one) is True for one in others)
