"""Loss for any output of a model: the sum of floating-point outputs, each times a random tensor of its shape.

A plain sum would be constant after a softmax or a normalisation, and give no gradient to anything before.
"""

from __future__ import annotations

from typing import Any

import torch

from statecli.commands.verify import inputs as inputs_of


def find_floating_outputs(output: object) -> list[torch.Tensor]:
    """Return the floating-point and complex tensors in an output.

    Objects other than containers (a distribution) are searched only if the output has no other tensor, because no loss
    uses a cache of keys.
    """
    leaves = list(inputs_of.iter_leaves(output))
    tensors = [leaf for leaf in leaves if is_floating(leaf)]
    if not tensors:
        inside = [list(vars(leaf).values()) for leaf in leaves if hasattr(leaf, "__dict__")]
        tensors = [leaf for leaf in inputs_of.iter_leaves(inside) if is_floating(leaf)]
    return tensors


def is_floating(value: Any) -> bool:
    """Return True for a tensor with a floating-point or complex dtype."""
    return issubclass(type(value), torch.Tensor) and (value.is_floating_point() or value.is_complex())


def compute_loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the outputs weighted with random numbers. NaN and infinite values count as 0."""
    total = torch.zeros(())
    for values in map(widen, outputs):
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        total = total + (values * torch.randn_like(values)).sum().to(total.device)
    return total


def widen(output: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as real numbers of at least 32 bits."""
    values = get_strided_values(output)
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def get_strided_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a nested or sparse tensor as a strided tensor."""
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
