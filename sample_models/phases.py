"""A complex buffer: a cast of the model makes it real.

Try:    statecli inspect sample_models/phases.py:Phases
        statecli verify sample_models/phases.py:Phases --check cast

Shows:  `.to(torch.bfloat16)` casts complex tensors with the others and keeps only the real part of `phases`;
        torch only warns. `.half()` does not cast `phases`.
"""

import torch
from torch import nn


class Phases(nn.Module):
    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(length))
        self.register_buffer("phases", torch.polar(torch.ones(length), torch.linspace(0, 3, length)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain * self.phases).abs()
