"""`diff` of two 100,000-tensor checkpoints by their metadata, and of two small files from a cold start."""

from __future__ import annotations

import sys
from pathlib import Path

from _inputs import safetensors_file, torch_file
from _measure import Row, alternate, seconds, statecli, with_peak
from startup import EMPTY

TENSORS = 100_000
LIMIT = 3.0
START = 1.6


def rows(folder: Path) -> list[Row]:
    """Metadata alone, in both formats, and the start-up."""
    return [*(_many(folder, suffix) for suffix in ("safetensors", "pt")), _start(folder)]


def _many(folder: Path, suffix: str) -> Row:
    make = safetensors_file if suffix == "safetensors" else lambda path, tensors: torch_file(path, tensors, 4)
    one, two = (make(folder / f"{name}.{suffix}", TENSORS) for name in ("one", "two"))
    (ours,) = alternate(statecli("diff", str(one), str(two), "--metadata-only", "-f", "json"), rounds=5)
    one.unlink()
    two.unlink()
    return Row(
        f"`diff --metadata-only` of two 100,000-tensor `.{suffix}`",
        with_peak(ours),
        "—",
        "—",
        f"≤ {LIMIT:.0f} s",
        ours.wall <= LIMIT,
    )


def _start(folder: Path) -> Row:
    one, two = (safetensors_file(folder / f"{name}.safetensors", tensors=8) for name in ("one", "two"))
    script = folder / "empty_typer.py"
    script.write_text("import numpy\n" + EMPTY)
    ours, peer = alternate(
        statecli("diff", str(one), str(two), "-f", "json"), [sys.executable, str(script), str(one)], rounds=21
    )
    ratio = ours.wall / peer.wall
    return Row(
        "`diff` of two small safetensors, `-f json`",
        seconds(ours),
        f"empty Typer command and `import numpy`: {seconds(peer)}",
        f"{ratio:.2f} ×",
        f"≤ {START} ×",
        ratio <= START,
    )
