"""The model of detached.py, fixed: only the running mean is taken without a gradient.

Try:    statecli inspect sample_models/detached_fixed.py:Net
        statecli verify sample_models/detached_fixed.py:Net --input 4x8 --check step

Shows:  every parameter gets a gradient and is updated, `center` is updated by forward, and the exit code is 0.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.register_buffer("center", torch.zeros(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.encoder(x)
        if self.training:
            self.center.lerp_(code.detach().mean(0), 0.1)
        return self.head(code - self.center.clone())
