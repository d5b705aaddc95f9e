"""The model of cached_mask.py, fixed: the cache has an entry for each device.

Try:    statecli inspect sample_models/cached_mask_fixed.py:Causal
        statecli verify sample_models/cached_mask_fixed.py:Causal --input 2x4x8

Shows:  only `project` is there. The first forward on a device adds that device's mask: the one of another device stays
        where it is and is not read.
"""

import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.masks = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks.get(str(x.device))
        if mask is None:
            mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
            self.masks[str(x.device)] = mask
        scores = (self.project(x) @ x.mT).masked_fill(mask, -torch.inf)
        return scores.softmax(-1) @ x
