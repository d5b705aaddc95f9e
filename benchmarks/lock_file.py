"""`lock` of a gigabyte, and `audit --lock` of it, beside `sha256sum` of the same file."""

from __future__ import annotations

from pathlib import Path

from _inputs import safetensors_values, torch_file
from _measure import Median, Row, alternate, seconds, statecli, with_peak

SIZE = 1_000_000_000


def rows(folder: Path) -> list[Row]:
    """One row a container; that of `.pt` verifies the zip's checksums as well."""
    return [
        *_rows(safetensors_values(folder / "a.safetensors", "bfloat16", SIZE), "safetensors", audit=True),
        *_rows(torch_file(folder / "a.pt", tensors=200, elements=SIZE // 200 // 4), "`.pt`", audit=False),
    ]


def _rows(target: Path, container: str, *, audit: bool) -> list[Row]:
    lock = target.with_suffix(".json")
    held = ["audit", str(target), "--lock", str(lock), "--select", "lock-mismatch", "-f", "json"]
    commands = [statecli("lock", str(target), "-o", str(lock)), ["sha256sum", str(target)]]
    made, peer, *again = alternate(*commands, *([statecli(*held)] if audit else []), rounds=3)
    target.unlink()
    found = [_row(f"`lock` of 1 GB of {container}", made, peer)]
    return found + [_row(f"`audit --lock` of 1 GB of {container}", one, peer) for one in again]


def _row(work: str, ours: Median, peer: Median) -> Row:
    return Row(
        work,
        f"{with_peak(ours)}, {SIZE / ours.wall / 1e9:.2f} GB/s",
        f"`sha256sum`: {seconds(peer)}, {SIZE / peer.wall / 1e9:.2f} GB/s",
        f"{peer.wall / ours.wall:.1f} × faster, {peer.cpu / ours.cpu:.1f} × less CPU",
        "≥ 2 ×",
        peer.wall / ours.wall >= 2,
    )
