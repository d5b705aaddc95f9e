"""A plain tensor attribute next to a registered buffer and a parameter.

Try:    statecli inspect sample_models/net.py:Net --to meta

Shows:  `param` and `mybuffer1` are registered, so they are saved and follow the move. `table` is a tensor that Python
        holds and PyTorch does not know: it is missing from state_dict() and left on the CPU after `.cuda()`. The
        finding has the line that assigned it and the line that fixes it. net_fixed.py is the same model fixed.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.randn(size, size))
        self.register_buffer("mybuffer1", torch.randn(2, 2))
        self.table = torch.randn(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.param @ self.table + self.mybuffer1.sum()
