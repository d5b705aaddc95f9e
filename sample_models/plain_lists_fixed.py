"""The model of plain_lists.py, fixed: each container is one of torch's own.

Try:    statecli inspect sample_models/plain_lists_fixed.py:Lists --to meta

Shows:  `scales.0`, `blocks.0.weight` and `heads.a.weight` are parameters: trained, saved and moved.
"""

import torch
from torch import nn


class Lists(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(nn.Linear(width, width))
        self.heads = nn.ModuleDict({"a": nn.Linear(width, 1)})
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x) * scale
        return self.out(x) + self.heads["a"](x)
