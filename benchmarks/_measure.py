"""Whole processes, measured in turn: A B A B, the median of several, CPU time beside wall time, peak memory each.

This process must stay small: on Linux a child's peak resident size starts from that of the process that made it, so
whatever needs torch or big arrays, the making of the inputs included, happens in children too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
MB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One run of one process: seconds of wall clock, seconds of CPU (children included), peak resident bytes."""

    wall: float
    cpu: float
    peak: int


@dataclass(frozen=True)
class Median:
    """The medians of several samples of the same command."""

    wall: float
    cpu: float
    peak: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Median:
        """Each figure's own median."""
        return cls(
            median(sample.wall for sample in samples),
            median(sample.cpu for sample in samples),
            int(median(sample.peak for sample in samples)),
        )


@dataclass(frozen=True)
class Row:
    """One line of the table. `met` None: a figure without a target."""

    work: str
    ours: str
    peer: str
    ratio: str
    target: str
    met: bool | None


@dataclass
class Failed(Exception):
    """A measured command did not do its work; its figures would mean nothing."""

    command: Sequence[str]
    status: int
    said: str = field(default="")

    def __str__(self) -> str:
        return f"exit {self.status}: {' '.join(self.command)}\n{self.said}"


def statecli(*arguments: str) -> list[str]:
    """The command line of this checkout's statecli."""
    return [sys.executable, "-m", "statecli", *arguments]


def python(code: str, *arguments: str) -> list[str]:
    """A Python process that runs `code`."""
    return [sys.executable, "-c", code, *arguments]


def run(command: Sequence[str], accept: Sequence[int] = (0,)) -> Sample:
    """Runs one command to its end. Raises `Failed` for an exit status that is not accepted."""
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, cwd=ROOT, env=environment())
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in accept:
            said.seek(0)
            raise Failed(command, child.returncode, said.read().decode(errors="replace")[-2000:])
    scale = 1 if sys.platform == "darwin" else 1024
    return Sample(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * scale)


def environment() -> dict[str, str]:
    """This checkout first on the path, no colour, no progress."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTHONHASHSEED": "0"}


def alternate(*commands: Sequence[str], rounds: int = 5, accept: Sequence[int] = (0,)) -> list[Median]:
    """Runs the commands in turn, `rounds` times after one round to warm up, and gives each its medians."""
    for command in commands:
        run(command, accept)
    samples: list[list[Sample]] = [[] for _ in commands]
    for _ in range(rounds):
        for command, gathered in zip(commands, samples, strict=True):
            gathered.append(run(command, accept))
    return [Median.of(gathered) for gathered in samples]


def seconds(found: Median) -> str:
    """Wall and CPU time for the table."""
    if found.wall < 1:
        return f"{found.wall * 1e3:.0f} ms ({found.cpu * 1e3:.0f} CPU)"
    return f"{found.wall:.2f} s ({found.cpu:.2f} CPU)"


def with_peak(found: Median) -> str:
    """Wall and CPU time and peak memory for the table."""
    return f"{seconds(found)}, {found.peak / MB:.0f} MB"


def faster(peer: Median, ours: Median) -> str:
    """How the wall times compare, in words."""
    ratio = peer.wall / ours.wall
    return f"{ratio:.1f} × faster" if ratio >= 1 else f"{1 / ratio:.1f} × slower"
