"""The model of phases.py, fixed: real and imaginary parts are the last dimension of a real buffer.

Try:    statecli inspect sample_models/phases_fixed.py:Phases
        statecli verify sample_models/phases_fixed.py:Phases --check cast

Shows:  a cast keeps both parts, and the exit code is 0.
"""

import torch
from torch import nn


class Phases(nn.Module):
    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(length))
        phases = torch.polar(torch.ones(length), torch.linspace(0, 3, length))
        self.register_buffer("phases", torch.view_as_real(phases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain * torch.view_as_complex(self.phases.float())).abs()
