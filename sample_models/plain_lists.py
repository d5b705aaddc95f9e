"""Parameters and modules in plain lists and dicts: never trained, never saved, never moved.

Try:    statecli inspect sample_models/plain_lists.py:Lists --to meta

Shows:  `scales[0]`, `blocks[0].weight`, `heads['a'].weight` are unregistered: model.parameters() does not give them to
        the optimizer. The fixes are nn.ParameterList, nn.ModuleList and nn.ModuleDict. Only `out` is registered.
"""

import torch
from torch import nn


class Lists(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(width)) for _ in range(2)]
        self.blocks = []
        for _ in range(2):
            self.blocks.append(nn.Linear(width, width))
        self.heads = {"a": nn.Linear(width, 1), "b": nn.Linear(width, 2)}
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x) * scale
        return self.out(x) + self.heads["a"](x)
