"""A second name of a buffer: after a move it still points at the old storage.

Try:    statecli inspect sample_models/rotary.py:Rotary --to meta
        statecli verify sample_models/rotary.py:Rotary --check move

Shows:  a move gives `inv_freq` a new tensor and rebinds the registered name only. `original_inv_freq` keeps the old
        one, on the old device: forward fails when it rescales, long after the move. Many rotary models held one.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("inv_freq", 10_000 ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.original_inv_freq = self.inv_freq

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * self.inv_freq
        return self.project(x) * torch.cat([angle.cos(), angle.sin()], -1)
