"""The model of tied.py, fixed for safetensors: one tensor, one name.

Try:    statecli inspect sample_models/tied_fixed.py:Tied
        statecli verify sample_models/tied_fixed.py:Tied --check save

Shows:  the head reads the embedding's weight in forward and holds none of its own, so save_file writes the model.
"""

import torch
from torch import nn
from torch.nn.functional import linear


class Tied(nn.Module):
    def __init__(self, words: int = 100, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return linear(self.embed(ids), self.embed.weight)
