"""The model of precomputed.py, fixed: the direction is a property, computed when it is read.

Try:    statecli inspect sample_models/precomputed_fixed.py:Normed --to meta
        statecli verify sample_models/precomputed_fixed.py:Normed --check copy

Shows:  only `weight` is held. It follows, is saved, and copies; the exit code is 0.
"""

import torch
from torch import nn


class Normed(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    @property
    def direction(self) -> torch.Tensor:
        return self.weight / self.weight.norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.direction.detach() + x @ self.weight
