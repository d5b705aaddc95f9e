"""Anchors in a Python list: tensors that no registration sees.

Try:    statecli inspect sample_models/anchors.py:Head --to meta

Shows:  `anchors[0]`, `anchors[1]` and `anchors[2]` are unregistered and left on the CPU, as in some detection
        models. The fix registers one buffer for each.
"""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)
        self.anchors = [torch.tensor([[-s, -s, s, s]]) / 2 for s in (8.0, 16.0, 32.0)]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.conv(x).mean((0, 2, 3)) + a for a in self.anchors]
