"""An encoder that is used and never trained: detach() stands one line too early.

Try:    statecli inspect sample_models/detached.py:Net
        statecli verify sample_models/detached.py:Net --input 4x8 --check step

Shows:  `encoder.weight` and `encoder.bias` get no gradient although forward uses them: detach() cuts their result off
        from the output. Only the running mean needs detach(): it is a buffer that forward updates.
        detached_fixed.py is the same model fixed.
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
        code = self.encoder(x).detach()
        if self.training:
            self.center.lerp_(code.mean(0), 0.1)
        return self.head(code - self.center)
