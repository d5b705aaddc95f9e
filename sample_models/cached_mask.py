"""A mask that the first forward caches: it is on the device of that forward for ever.

Try:    statecli inspect sample_models/cached_mask.py:Causal
        statecli inspect sample_models/cached_mask.py:Causal --input 2x4x8

Shows:  only `project` is there: the mask is created by the first forward, which `--input` calls. Called once on the CPU
        (a test, an export, a warm-up) and moved afterwards, the model mixes devices; `statecli verify --input 2x4x8`
        calls it, moves it and calls it again. cached_mask_fixed.py is the same model fixed.
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
            self.mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        scores = (self.project(x) @ x.mT).masked_fill(self.mask, -torch.inf)
        return scores.softmax(-1) @ x
