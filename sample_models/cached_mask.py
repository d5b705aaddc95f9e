"""A mask that the first forward caches: it is on the device of that forward for ever.

Try:    statecli inspect sample_models/cached_mask.py:Causal

Shows:  only `project` is there: the mask appears with the first forward. Called once on the CPU (a test, an export, a
        warm-up) and moved afterwards, the model mixes devices; `statecli verify --input 2x4x8` calls it, moves it and
        calls it again. cached_mask_fixed.py is the same model fixed.
"""

import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.mask = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.full((x.shape[-2], x.shape[-2]), -1e9, device=x.device).triu(1)
        scores = self.project(x) @ x.mT + self.mask
        return scores.softmax(-1) @ x
