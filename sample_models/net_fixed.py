"""The model of net.py, fixed: the table is a buffer.

Try:    statecli inspect sample_models/net_fixed.py:Net --to meta

Shows:  nothing is unregistered, everything follows, and the exit code is 0.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.randn(size, size))
        self.register_buffer("mybuffer1", torch.randn(2, 2))
        self.register_buffer("table", torch.randn(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.param @ self.table + self.mybuffer1.sum()
