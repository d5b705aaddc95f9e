"""`--stats` against the loop that one would write with torch, on 400 MB of bfloat16 and of float32."""

from __future__ import annotations

from pathlib import Path

from _inputs import safetensors_values
from _measure import Row, alternate, python, seconds, statecli

PEER = """
import sys, torch
from safetensors import safe_open

with safe_open(sys.argv[1], "pt") as file:
    for name in file.keys():
        x = file.get_tensor(name).double()
        finite = x[x.isfinite()]
        finite.min(), finite.max(), finite.mean(), finite.std()
        (x == 0).sum(), x.isnan().sum(), x.isinf().sum()
"""
SIZE = 400_000_000


def rows(folder: Path) -> list[Row]:
    """One row a dtype. No target: the figure says what `--stats` costs."""
    return [_row(folder, dtype) for dtype in ("bfloat16", "float32")]


def _row(folder: Path, dtype: str) -> Row:
    target = safetensors_values(folder / f"{dtype}.safetensors", dtype, SIZE)
    ours, peer = alternate(
        statecli("inspect", str(target), "--stats", "-f", "json"), python(PEER, str(target)), rounds=3
    )
    target.unlink()
    return Row(
        f"`--stats` of 400 MB {dtype}",
        f"{seconds(ours)}, {SIZE / ours.wall / 1e9:.2f} GB/s",
        f"torch loop: {seconds(peer)}, {SIZE / peer.wall / 1e9:.2f} GB/s",
        f"{peer.wall / ours.wall:.1f} × faster, {peer.cpu / ours.cpu:.1f} × less CPU",
        "—",
        None,
    )
