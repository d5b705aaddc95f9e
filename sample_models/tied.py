"""Tied embeddings: one tensor, two names.

Try:    statecli inspect sample_models/tied.py:Tied

Shows:  `embed.weight` and `head.weight` name one storage: each row names the other, and the sizes count it once.
        safetensors refuses to write both names; torch.save keeps the tie.
"""

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, words: int = 100, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))
