"""`diff` of gigabytes against `cmp` and against the loop that one would write with torch; how much memory it takes."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from _inputs import changed_values, safetensors_values, sparse_pair
from _measure import MB, ROOT, Median, Row, alternate, environment, python, seconds, statecli

SIZE = 2 << 30
NAIVE = """
import sys, torch
from safetensors.torch import load_file

before, after = load_file(sys.argv[1]), load_file(sys.argv[2])
for name in before:
    a, b = before[name].float().flatten(), after[name].float().flatten()
    d = b - a
    (a != b).sum(), d.abs().max(), d.abs().mean(), d.norm(), d.norm() / a.norm(), a @ b / (a.norm() * b.norm())
    a.isnan().sum(), b.isnan().sum(), a.isinf().sum(), b.isinf().sum()
"""
ANONYMOUS = 250 * MB


def rows(folder: Path) -> list[Row]:
    """Identical files, every element changed in three types, and peak memory."""
    found: list[Row] = []
    for dtype in ("bfloat16", "float16", "float32"):
        found += _of_dtype(folder, dtype)
    return [*found, _memory(folder)]


def _of_dtype(folder: Path, dtype: str) -> list[Row]:
    before = safetensors_values(folder / "before.safetensors", dtype, SIZE)
    same, changed = folder / "same.safetensors", folder / "changed.safetensors"
    shutil.copyfile(before, same)
    changed_values(before, changed)
    equal, every, cmp = alternate(
        statecli("diff", str(before), str(same), "-f", "json"),
        statecli("diff", str(before), str(changed), "-f", "json"),
        ["cmp", str(before), str(same)],
        rounds=7,
        accept=(0, 1),
    )
    # A minute a run: twice is enough for a ratio of more than ten.
    (naive,) = alternate(python(NAIVE, str(before), str(changed)), rounds=1)
    for path in (before, same, changed):
        path.unlink()
    return [
        Row(
            f"`diff` of identical 2 GiB {dtype} files",
            _speed(equal),
            f"`cmp`: {_speed(cmp)}",
            f"{cmp.wall / equal.wall:.2f} × the speed of `cmp`",
            "≥ 1.0 ×",
            cmp.wall / equal.wall >= 1.0,
        ),
        Row(
            f"the same, every element changed, all statistics ({dtype})",
            _speed(every),
            f"`cmp` on identical files: {_speed(cmp)}; torch loop: {_speed(naive)}",
            f"{cmp.wall / every.wall:.2f} × `cmp`, {naive.wall / every.wall:.1f} × the torch loop",
            "≥ 0.5 × `cmp`, ≥ 8 × the torch loop",
            cmp.wall / every.wall >= 0.5 and naive.wall / every.wall >= 8,
        ),
    ]


def _speed(found: Median) -> str:
    return f"{seconds(found)}, {SIZE / found.wall / 1e9:.2f} GB/s"


def _memory(folder: Path) -> Row:
    peaks = []
    for size in (1 << 30, 10 << 30):
        before, after = sparse_pair(folder, size)
        # Sampled: a short run may pass between two looks at its worst moment.
        peaks.append(max(_peak_anonymous(statecli("diff", str(before), str(after), "-f", "json")) for _ in range(3)))
        before.unlink()
        after.unlink()
    small, large = (peak / MB for peak in peaks)
    return Row(
        "anonymous memory of `diff`, all its processes, 1 GiB and 10 GiB",
        f"{small:.0f} MB and {large:.0f} MB",
        "—",
        f"{large / small:.2f} × for 10 ×",
        "≤ 250 MB, the same at both sizes",
        max(peaks) <= ANONYMOUS and large <= 1.1 * small,
    )


def _peak_anonymous(command: list[str]) -> int:
    """The most that the process and its children had at once, sampled; pages they share are counted once."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment())
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(map(_anonymous, _family(child.pid))))
        time.sleep(0.01)
    assert child.returncode == 1, f"the pair differs, and diff ended {child.returncode}"
    return peak


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in _family(int(child)))]


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
