"""The model of grad_buffer.py, fixed: the scale is a parameter.

Try:    statecli inspect sample_models/grad_buffer_fixed.py:Scaled
        statecli verify sample_models/grad_buffer_fixed.py:Scaled --input 2x4 --check step

Shows:  `scale` is listed by model.parameters() and trained; the exit code is 0.
"""

import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale
