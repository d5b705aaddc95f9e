"""The model of anchors.py, fixed: each anchor is a buffer.

Try:    statecli inspect sample_models/anchors_fixed.py:Head --to meta

Shows:  `anchors_0`, `anchors_1` and `anchors_2` follow the move. They are not saved, because the constructor computes
        them again.
"""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)
        for i, tensor in enumerate([torch.tensor([[-s, -s, s, s]]) / 2 for s in (8.0, 16.0, 32.0)]):
            self.register_buffer(f"anchors_{i}", tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.conv(x).mean((0, 2, 3)) + getattr(self, f"anchors_{i}") for i in range(3)]
