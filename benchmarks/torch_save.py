"""A 200-tensor, 400 MB `.pt` against `torch.load(map_location="meta")` in a fresh process: time and peak memory."""

from __future__ import annotations

from pathlib import Path

from _inputs import torch_file
from _measure import MB, Row, alternate, python, statecli, with_peak

PEER = "import sys, torch; torch.load(sys.argv[1], map_location='meta')"
FASTER = 10
PEAK = 60 * MB


def rows(folder: Path) -> list[Row]:
    """The row of the big `torch.save` file."""
    target = torch_file(folder / "big.pt", tensors=200, elements=500_000)
    ours, peer = alternate(statecli("inspect", str(target), "-f", "json"), python(PEER, str(target)), rounds=7)
    target.unlink()
    faster = peer.wall / ours.wall
    return [
        Row(
            "200-tensor 400 MB `.pt`",
            with_peak(ours),
            f'`torch.load(map_location="meta")`: {with_peak(peer)}',
            f"{faster:.1f} × faster",
            f"≥ {FASTER} × faster, ≤ {PEAK // MB} MB",
            faster >= FASTER and ours.peak <= PEAK,
        )
    ]
