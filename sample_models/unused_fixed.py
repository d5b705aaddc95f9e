"""The model of unused.py, fixed: forward uses the layer.

Try:    statecli inspect sample_models/unused_fixed.py:Net
        statecli verify sample_models/unused_fixed.py:Net --input 4x8 --check step

Shows:  every parameter gets a gradient and is updated, and the exit code is 0.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.skip = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)) + self.skip(x))
