"""Whole processes, measured in turn: A B A B, the median of several, CPU time beside wall time, peak memory each.

This process must stay small: on Linux a child's peak resident size starts from that of the process that made it, so
whatever needs torch or big arrays, the making of the inputs included, happens in children too.
"""

from __future__ import annotations

import os
import re
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
_COUNTED = re.compile(r"I +refs: +([\d,]+)")


@dataclass(frozen=True)
class Figures:
    """One process, or the medians of several: seconds of wall clock and of CPU (children included), peak resident
    bytes, and the instructions that cachegrind counts; 0 if they were not counted."""

    wall: float
    cpu: float
    peak: int
    instructions: int = 0


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


def environment() -> dict[str, str]:
    """This checkout first on the path, no colour, no progress, bytecode that is kept."""
    unset = ("PYTHONDONTWRITEBYTECODE",)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTHONHASHSEED": "0", "PROMPTFOO_DISABLE_TELEMETRY": "1"}


def run(command: Sequence[str], accept: Sequence[int] = (0,)) -> Figures:
    """Run one command to its end. Raises `Failed` for an exit status that is not accepted."""
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
    return Figures(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * scale)


def count_instructions(command: Sequence[str], accept: Sequence[int] = (0,)) -> int:
    """Count the instructions of a process, not of its children, with cachegrind: the same on a busy machine.

    The command runs once before, for its bytecode. Raises FileNotFoundError without valgrind, `Failed` as `run` does.
    """
    run(command, accept)
    traced = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", *command]
    done = subprocess.run(traced, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
    found = _COUNTED.search(done.stderr)
    if done.returncode not in accept or found is None:
        raise Failed(traced, done.returncode, done.stderr[-2000:])
    return int(found[1].replace(",", ""))


def alternate(*commands: Sequence[str], rounds: int = 5, accept: Sequence[int] = (0,)) -> list[Figures]:
    """Run the commands in turn, `rounds` times after one round to warm up; return the medians of each."""
    for command in commands:
        run(command, accept)
    samples: list[list[Figures]] = [[] for _ in commands]
    for _ in range(rounds):
        for command, gathered in zip(commands, samples, strict=True):
            gathered.append(run(command, accept))
    return [
        Figures(
            median(one.wall for one in all_), median(one.cpu for one in all_), int(median(one.peak for one in all_))
        )
        for all_ in samples
    ]
