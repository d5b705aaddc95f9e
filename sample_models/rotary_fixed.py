"""The model of rotary.py, fixed: the second name is a buffer with a tensor of its own.

Try:    statecli inspect sample_models/rotary_fixed.py:Rotary --to meta
        statecli verify sample_models/rotary_fixed.py:Rotary --check move

Shows:  both tables follow, and the exit code is 0.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("inv_freq", 10_000 ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("original_inv_freq", self.inv_freq.clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * self.inv_freq
        return self.project(x) * torch.cat([angle.cos(), angle.sin()], -1)
