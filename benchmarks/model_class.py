"""A BERT-base-sized class of plain torch layers against `import torch`, and against building that class."""

from __future__ import annotations

import sys
from pathlib import Path

from _measure import Median, Row, alternate, python, seconds, statecli

SOURCE = '''
import torch
from torch import nn


class Net(nn.Module):
    """The sizes of BERT-base: 12 layers, 768 wide, 30,522 words, 109 million parameters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30522, 768)
        self.positions = nn.Embedding(512, 768)
        self.types = nn.Embedding(2, 768)
        self.norm = nn.LayerNorm(768)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True) for _ in range(12)
        )
        self.pooler = nn.Linear(768, 768)
        self.register_buffer("position_ids", torch.arange(512), persistent=False)
'''
BUILD = "import sys, torch; sys.path.insert(0, sys.argv[1]); import bert_sized; bert_sized.Net()"
EXTRA = 0.5


def rows(folder: Path) -> list[Row]:
    """The row of the model class as it is built by default, and one with `--init-device meta`."""
    (folder / "bert_sized.py").write_text(SOURCE)
    spec = f"{folder / 'bert_sized.py'}:Net"
    ours, on_meta, peer, built = alternate(
        statecli("inspect", spec, "-f", "json"),
        statecli("inspect", spec, "-f", "json", "--init-device", "meta"),
        [sys.executable, "-c", "import torch"],
        python(BUILD, str(folder)),
        rounds=7,
        accept=(0, 1),
    )
    return [
        _row("a BERT-base-sized class", ours, peer, f"import torch and build it: {seconds(built)}; "),
        _row("the same, `--init-device meta`", on_meta, peer, ""),
    ]


def _row(work: str, ours: Median, peer: Median, also: str) -> Row:
    extra = ours.wall - peer.wall
    return Row(
        work,
        seconds(ours),
        f"{also}`import torch`: {seconds(peer)}",
        f"+ {extra:.2f} s",
        f"`import torch` + ≤ {EXTRA} s",
        extra <= EXTRA,
    )
