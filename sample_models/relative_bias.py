"""A table of indices that stays on the CPU, and a lookup that will not take it.

Try:    statecli inspect sample_models/relative_bias.py:Attention --to meta

Shows:  `distance` is unregistered and left on the CPU. Window attention has such tables. After a move to a GPU the
        weight of the embedding is there and its indices are not; `statecli verify --device fake-cuda` shows that on any
        machine. relative_bias_fixed.py is the same model fixed.
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, length: int = 4) -> None:
        super().__init__()
        position = torch.arange(length)
        self.distance = position[:, None] - position + length - 1
        self.bias = nn.Embedding(2 * length - 1, 1)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores + self.bias(self.distance).squeeze(-1)).softmax(-1)
