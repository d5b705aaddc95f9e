"""BatchNorm's running statistics: state that no gradient ever touches and that evaluation depends on.

Try:    statecli inspect sample_models/batchnorm.py:Block

Shows:  `norm.weight` and `norm.bias` are parameters; `norm.running_mean`, `norm.running_var` and the integer
        `norm.num_batches_tracked` are persistent buffers: without them in a checkpoint, eval() gives other results.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))
