"""25,000, 50,000 and 100,000 small tensors to JSON, from safetensors and from `.pt`: time, memory, growth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from _inputs import safetensors_file, torch_file
from _measure import MB, Median, Row, alternate, faster, python, statecli, with_peak

COUNTS = (25_000, 50_000, 100_000)
SECONDS = 2.0
PEAK = 300 * MB
#: Four times the tensors may take this many times as long: linear, and something for noise.
GROWTH = 4.6
PEERS = {
    "safetensors": (
        "`safe_open`, dtype and shape of each",
        "import sys; from safetensors import safe_open\n"
        "with safe_open(sys.argv[1], 'np') as file:\n"
        "    for name in file.keys():\n"
        "        piece = file.get_slice(name); piece.get_dtype(), piece.get_shape()\n",
    ),
    "pt": ('`torch.load(map_location="meta")`', "import sys, torch; torch.load(sys.argv[1], map_location='meta')"),
}


def rows(folder: Path) -> list[Row]:
    """Two rows a format: the biggest count, and how time grows up to it."""
    return [
        *_format_rows(folder, "safetensors", lambda path, count: safetensors_file(path, tensors=count)),
        *_format_rows(folder, "pt", lambda path, count: torch_file(path, tensors=count, elements=4)),
    ]


def _format_rows(folder: Path, suffix: str, make: Callable[[Path, int], Path]) -> list[Row]:
    files = [make(folder / f"many-{count}.{suffix}", count) for count in COUNTS]
    label, code = PEERS[suffix]
    commands = [statecli("inspect", str(file), "-f", "json") for file in files]
    *ours, peer = alternate(*commands, python(code, str(files[-1])), rounds=3)
    for file in files:
        file.unlink()
    return [_size_row(suffix, ours[-1], label, peer), _growth_row(suffix, ours)]


def _size_row(suffix: str, ours: Median, label: str, peer: Median) -> Row:
    return Row(
        f"100,000 tensors, `.{suffix}`",
        with_peak(ours),
        f"{label}: {with_peak(peer)}",
        faster(peer, ours),
        f"≤ {SECONDS:.0f} s, ≤ {PEAK // MB} MB",
        ours.wall <= SECONDS and ours.peak <= PEAK,
    )


def _growth_row(suffix: str, ours: list[Median]) -> Row:
    growth = ours[-1].wall / ours[0].wall
    times = ", ".join(f"{count // 1000}k {found.wall:.2f} s" for count, found in zip(COUNTS, ours, strict=True))
    return Row(f"the same, growing, `.{suffix}`", times, "—", f"{growth:.2f} × for 4 ×", "linear", growth <= GROWTH)
