"""Classes that are verified: a tiny one, a BERT-base of plain torch layers, and transformers' own."""

import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = torch.ones(4)

    def forward(self, x):
        return self.layer(x) + self.table.to(x.device)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(30522, 768), nn.Embedding(512, 768), nn.Embedding(2, 768)
        self.norm, self.pooler = nn.LayerNorm(768), nn.Linear(768, 768)
        layers = (nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True) for _ in range(12))
        self.layers = nn.ModuleList(layers)
        self.register_buffer("position_ids", torch.arange(512), persistent=False)

    def forward(self, words):
        positions = self.position_ids[: words.shape[1]]
        found = self.norm(self.words(words) + self.positions(positions) + self.types(torch.zeros_like(words)))
        for layer in self.layers:
            found = layer(found)
        return found, self.pooler(found[:, 0]).tanh()


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def step(name: str, steps: float) -> None:
    """Build a class and train it for so many steps; half a step has half of the batch."""
    model = globals()[name]().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while steps > 0:
        found = model(torch.randint(30522, (8 if steps >= 1 else 4, 128)))
        found = found if isinstance(found, tuple) else (found.last_hidden_state, found.pooler_output)
        sum(one.sum() for one in found).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps -= 1
