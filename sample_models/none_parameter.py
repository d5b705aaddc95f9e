"""register_parameter(name, None): a name that is reserved and holds nothing.

Try:    statecli inspect sample_models/none_parameter.py:Optional

Shows:  `bias` is registered as None, so it is in no state_dict(); with Optional(bias=True) it is a parameter like any
        other. A checkpoint of the one does not load into the other with strict=True.
"""

import torch
from torch import nn


class Optional(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_parameter("bias", nn.Parameter(torch.zeros(4)) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + (0 if self.bias is None else self.bias)
