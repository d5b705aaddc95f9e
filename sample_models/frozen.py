"""A frozen parameter next to a buffer: both are constant, and they are not the same.

Try:    statecli inspect sample_models/frozen.py:Frozen

Shows:  `scale` is a parameter with requires_grad False: model.parameters() lists it, and unfreezing it is one
        assignment away. `offset` is a buffer: no optimizer ever sees it. Both are saved, both move.
"""

import torch
from torch import nn


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale + self.offset
