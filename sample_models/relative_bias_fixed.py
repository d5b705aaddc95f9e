"""The model of relative_bias.py, fixed: the table of indices is a buffer.

Try:    statecli inspect sample_models/relative_bias_fixed.py:Attention --to meta

Shows:  `distance` follows, and is not saved: the constructor computes it again.
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, length: int = 4) -> None:
        super().__init__()
        position = torch.arange(length)
        self.register_buffer("distance", position[:, None] - position + length - 1, persistent=False)
        self.bias = nn.Embedding(2 * length - 1, 1)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores + self.bias(self.distance).squeeze(-1)).softmax(-1)
