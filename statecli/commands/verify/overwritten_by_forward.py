"""Find parameters that each forward overwrites, so that every update by the optimizer is lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from statecli.commands.verify import check_builder, training_rounds, value_snapshots
from statecli.commands.verify.training_record import Training
from statecli.core.errors import ModelError
from statecli.live import tensor_bits


@dataclass(frozen=True)
class OverwrittenParameters:
    """Names of parameters that every forward overwrites. If the names are unknown, `why_not` is the reason."""

    names: frozenset[str] = frozenset()
    why_not: str | None = None


def find_overwritten(run: Training) -> OverwrittenParameters:
    """Find the parameters to which forward gives the same values, whatever the optimizer wrote to them.

    If forward only projects parameters (to a norm, to a range), at least one of two opposite updates survives in part.
    Updates are as large as the values, so that rounding does not hide them. The values are restored afterwards.
    """
    parameters = {name: run.leaf_records[name].tensor for name in sorted(run.written_names) if name in run.leaf_records}
    parameters = {name: values for name, values in parameters.items() if value_snapshots.is_strided(values)}
    start = {name: value_snapshots.copy_values(values) for name, values in parameters.items()}
    try:
        with training_rounds.start_round(run):
            updates = {name: _draw_update(values) for name, values in start.items()}
        values_unchanged, values_up, values_down = (
            _read_values_after(run, parameters, start, updates, sign) for sign in (0, 1, -1)
        )
        return OverwrittenParameters(
            frozenset(
                name for name in parameters if _are_all_same(values_unchanged[name], values_up[name], values_down[name])
            )
        )
    except ModelError as error:
        return OverwrittenParameters(why_not=check_builder.get_reason(run.subject, error))
    finally:
        _write_values(parameters, start)


Tensors = dict[str, torch.Tensor]


def _draw_update(values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.randn_like(values) * (1 + values.abs())


def _read_values_after(run: Training, parameters: Tensors, start: Tensors, updates: Tensors, sign: int) -> Tensors:
    """Write start + sign * updates to the parameters, call forward, and return the parameters' values afterwards."""
    _write_values(
        parameters, {name: values_ + sign * updates[name] for name, values_ in start.items()} if sign else start
    )
    with training_rounds.start_round(run):
        training_rounds.call_forward(run)
    return {name: value_snapshots.copy_values(values_) for name, values_ in parameters.items()}


def _write_values(parameters: Tensors, values: Tensors) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def _are_all_same(values: torch.Tensor, *others: torch.Tensor) -> bool:
    return all(tensor_bits.is_same(values, other) is True for other in others)
