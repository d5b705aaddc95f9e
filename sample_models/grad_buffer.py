"""A buffer that requires grad: it collects gradients that no optimizer reads.

Try:    statecli inspect sample_models/grad_buffer.py:Scaled

Shows:  `scale` is a buffer with requires_grad True. backward() fills its .grad, model.parameters() does not list it,
        so it never changes: meant as a parameter, registered as a buffer. grad_buffer_fixed.py is the same model fixed.
"""

import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale
