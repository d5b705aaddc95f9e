"""A layer that forward forgot: registered, saved, moved, and never trained.

Try:    statecli inspect sample_models/unused.py:Net
        statecli verify sample_models/unused.py:Net --input 4x8 --check step

Shows:  `skip.weight` and `skip.bias` get no gradient, as forward does not use them. There is no error: an
        optimizer skips a parameter without a gradient. unused_fixed.py is the same model fixed.
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
        return self.head(torch.tanh(self.body(x)) + x)
