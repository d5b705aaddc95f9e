"""`audit` of metadata: a 400 MB `.pt`, and 1,000 small checkpoints in one run, beside the scanners that are installed.

`SCANNERS` names the folder of their commands (a virtual environment of their own: they pin what others need):
`python -m venv scanners && scanners/bin/pip install picklescan modelscan modelaudit`, and then
`SCANNERS=scanners/bin python benchmarks/run.py audit_peers`. Without it the row says that there is no peer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from _inputs import many_small, torch_file
from _measure import MB, Median, Row, alternate, seconds, statecli, with_peak

#: Their exit codes for a clean file, and for one that they complain about or skip a part of.
ANY = (0, 1, 2, 3, 4)
#: What each is called with, and whether it looks at tensors at all.
PEERS = {
    "picklescan": (("-p",), False),
    "modelscan": (("-p",), False),
    "modelaudit": (("scan",), True),
}
SECONDS, PEAK, FASTER, FILES = 0.25, 60 * MB, 2, 1_000


def rows(folder: Path) -> list[Row]:
    """One file whose bytes are not read, and a thousand."""
    big = torch_file(folder / "big.pt", 200, 500_000)
    small = many_small(folder / "many", FILES)
    return [_metadata(big), _many(small)]


def _peers(path: Path) -> dict[str, list[str]]:
    found = {name: shutil.which(name, path=os.environ.get("SCANNERS")) for name in PEERS}
    return {name: [command, *PEERS[name][0], str(path)] for name, command in found.items() if command}


def _metadata(path: Path) -> Row:
    peers = _peers(path)
    # modelaudit reports each run to its maker and waits for that; told not to, it is measured at its best.
    os.environ["PROMPTFOO_DISABLE_TELEMETRY"] = "1"
    ours, *found = alternate(statecli("audit", str(path)), *peers.values(), rounds=5, accept=ANY)
    listing = [one for name, one in zip(peers, found, strict=True) if PEERS[name][1]]
    fastest = min((one.wall for one in listing), default=None)
    faster = fastest / ours.wall if fastest else None
    return Row(
        "`audit` of a 200-tensor 400 MB `.pt`; imports no torch",
        with_peak(ours),
        _said(list(peers), found),
        f"{faster:.1f} × faster than the one that looks at tensors" if faster else "—",
        f"≤ {SECONDS} s, ≤ {PEAK // MB} MB, ≥ {FASTER} × faster",
        ours.wall <= SECONDS and ours.peak <= PEAK and (faster is None or faster >= FASTER),
    )


def _said(names: Sequence[str], found: Sequence[Median]) -> str:
    told = [f"`{name}`: {with_peak(one)}" for name, one in zip(names, found, strict=True)]
    return "; ".join(told) or "none installed (SCANNERS)"


def _many(folder: Path) -> Row:
    peers = {name: words for name, words in _peers(folder).items() if name != "modelaudit"}  # it takes minutes
    ours, *found = alternate(statecli("audit", str(folder)), *peers.values(), rounds=3, accept=ANY)
    rate = FILES / ours.wall
    told = [f"`{name}`: {seconds(one)}" for name, one in zip(peers, found, strict=True)]
    return Row(
        f"`audit` of {FILES:,} small `.pt` in one run",
        with_peak(ours),
        "; ".join(told) or "none installed (SCANNERS)",
        f"{rate:,.0f} a second",
        "≥ 100 a second",
        rate >= 100,
    )
