"""A model with two mistakes: blocks in a plain list, and a tensor as a plain attribute."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)

    def forward(self, x):
        return self.q(x) + self.k(x)


class Net(nn.Module):
    def __init__(self, d=8, layers=12):
        super().__init__()
        self.blocks = [Attention(d) for _ in range(layers)]
        self.table = torch.randn(5, 5)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)
