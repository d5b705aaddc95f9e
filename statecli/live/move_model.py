"""Move a model to a device, to the fake GPU (`fake_gpu.DEVICE`) or to a dtype."""

from __future__ import annotations

import torch
from torch import nn


def move_model(module: nn.Module, destination: torch.device | torch.dtype | str) -> nn.Module:
    """Call `.to(destination)`, which a class may override, and return the moved model."""
    return get_moved_model(module, module.to(destination))


def get_moved_model(module: nn.Module, result_of_to: object) -> nn.Module:
    """Return the result of `model.to(...)` if the result is a module, otherwise `module`."""
    return result_of_to if isinstance(result_of_to, nn.Module) else module
