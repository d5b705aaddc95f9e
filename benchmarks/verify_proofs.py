"""`verify` of a BERT-base on the CPU, of plain torch layers and of transformers: all proofs, and moves without data.

Beside all proofs stands one forward, backward and optimizer step of the same model with inputs of the same shape, as a
process of its own; what it takes beyond importing and building is the step alone. What is not of statecli is the import
of torch, and for transformers' class that of its package too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _measure import MB, Median, Row, alternate, python, seconds, statecli, with_peak

SOURCE = """
from transformers import BertConfig, BertModel


def make():
    return BertModel(BertConfig())
"""
PLAIN = """
import torch
from torch import nn


class Net(nn.Module):
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


make = Net
"""
INPUT = "int64:8x128<30522"
BUILD = "import sys, torch; sys.path.insert(0, sys.argv[1]); import {0}; model = {0}.make()"
STEP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
found = model.train()(torch.randint(30522, (8, 128)))
found = found if isinstance(found, tuple) else (found.last_hidden_state, found.pooler_output)
sum(one.sum() for one in found).backward()
optimizer.step()
"""
TORCH = [sys.executable, "-c", "import torch"]
PEER = [sys.executable, "-c", "from transformers import BertConfig, BertModel"]
#: float32, 109 million of them.
MODEL = 438 * 1_000_000
STEPS, EXTRA, COPIES = 5, 3.0, 3


def rows(folder: Path) -> list[Row]:
    """All proofs of both, saving alone for its memory, and the two moves."""
    (folder / "bert_base.py").write_text(SOURCE)
    (folder / "bert_plain.py").write_text(PLAIN)
    plain = "`verify`: all proofs of a BERT-base of plain torch layers", "`import torch`"
    theirs = "`verify`: all proofs of transformers' BERT-base", "importing it"
    verify = [f"{folder / 'bert_base.py'}:make", "-f", "json"]
    save, built = alternate(
        statecli("verify", *verify, "--check", "save"), python(BUILD.format("bert_base"), str(folder)), rounds=3
    )
    moves = [statecli("verify", *verify, "--check", "move", "--device", device) for device in ("meta", "fake-cuda")]
    meta, fake, imported = alternate(*moves, PEER, rounds=3)
    return [
        _all(folder, "bert_plain", TORCH, *plain, STEPS),
        _all(folder, "bert_base", PEER, *theirs, None),
        _memory(save, built),
        _move("meta", meta, imported),
        _move("fake-cuda", fake, imported),
    ]


def _all(folder: Path, name: str, imports: list[str], work: str, importing: str, target: int | None) -> Row:
    build = BUILD.format(name)
    ours, step, built, imported = alternate(
        statecli("verify", f"{folder / name}.py:make", "-f", "json", "--input", INPUT),
        python(build + STEP, str(folder)),
        python(build, str(folder)),
        imports,
        rounds=3,
        accept=(0, 1),
    )
    alone = step.wall - built.wall
    steps = (ours.wall - imported.wall) / alone
    return Row(
        f"{work}, `--input '{INPUT}'`",
        with_peak(ours),
        f"import, build and one step: {with_peak(step)}, {alone:.2f} s of it the step; "
        f"{importing}: {seconds(imported)}",
        f"{importing} + {steps:.1f} steps",
        f"{importing} + ≤ {target} steps" if target else "—",
        steps <= target if target else None,
    )


def _memory(ours: Median, built: Median) -> Row:
    copies = (ours.peak - built.peak) / MODEL
    return Row(
        "`--check save` of it: peak memory",
        with_peak(ours),
        f"import and build it: {with_peak(built)}; it is {MODEL / MB:.0f} MB",
        f"+ {copies:.1f} × the model",
        f"+ ≤ {COPIES} × the model",
        copies <= COPIES,
    )


def _move(device: str, ours: Median, imported: Median) -> Row:
    extra = ours.wall - imported.wall
    return Row(
        f"`--check move --device {device}` of it",
        with_peak(ours),
        f"import transformers' BERT: {seconds(imported)}",
        f"+ {extra:.2f} s",
        f"the import + ≤ {EXTRA:.0f} s",
        extra <= EXTRA,
    )
