"""A tensor computed once from a parameter: it never learns, never moves, and breaks copy.deepcopy.

Try:    statecli inspect sample_models/precomputed.py:Normed --to meta
        statecli verify sample_models/precomputed.py:Normed --check copy

Shows:  `direction` is not a leaf: autograd computed it from `weight`. It keeps its value when `weight` is loaded or
        trained, stays on the CPU, and copy.deepcopy refuses the model because of it.
"""

import torch
from torch import nn


class Normed(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.direction = self.weight / self.weight.norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.direction.detach() + x @ self.weight
