"""A non-persistent position table: moved, not saved.

Try:    statecli inspect sample_models/positions.py:Positions --to meta

Shows:  `positions` is a buffer with persistent=False: it follows the model to another device and is left out of
        state_dict(), because the constructor computes it again. After to_empty() nothing brings it back.
"""

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, length: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(width) / width)
        self.register_buffer("positions", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) + self.positions[: ids.shape[-1]]
