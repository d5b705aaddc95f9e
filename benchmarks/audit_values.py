"""`audit --values`, every rule about values, of 1 GB against `sha256sum` of the same file."""

from __future__ import annotations

import shutil
from pathlib import Path

from _inputs import safetensors_values
from _measure import Median, Row, alternate, seconds, statecli, with_peak

SIZE = 1_000_000_000


def rows(folder: Path) -> list[Row]:
    """One row a dtype; the target is of bfloat16, what models are saved in."""
    return [_row(folder, dtype) for dtype in ("bfloat16", "float32", "float8_e4m3fn")]


def _row(folder: Path, dtype: str) -> Row:
    target = safetensors_values(folder / f"{dtype}.safetensors", dtype, SIZE)
    # coreutils' own SHA-256 is plain C on some systems; openssl has the processor's instructions for it.
    peers = {"sha256sum": ["sha256sum", str(target)]}
    if shutil.which("openssl"):
        peers["openssl dgst -sha256"] = ["openssl", "dgst", "-sha256", str(target)]
    ours, *found = alternate(statecli("audit", str(target), "--values"), *peers.values())
    target.unlink()
    each = list(zip(peers, found, strict=True))
    ratio = found[0].wall / ours.wall
    return Row(
        f"`audit --values` of 1 GB {dtype}, all rules about values",
        f"{with_peak(ours)}, {SIZE / ours.wall / 1e9:.2f} GB/s",
        "; ".join(f"`{name}`: {seconds(one)}, {SIZE / one.wall / 1e9:.2f} GB/s" for name, one in each),
        ", ".join(_ratio(name, one, ours) for name, one in each),
        "≥ 1.0 × `sha256sum`" if dtype == "bfloat16" else "—",
        ratio >= 1.0 if dtype == "bfloat16" else None,
    )


def _ratio(name: str, peer: Median, ours: Median) -> str:
    return f"{peer.wall / ours.wall:.2f} × the speed of `{name}` ({peer.cpu / ours.cpu:.2f} × by CPU)"
