"""Every measurement as one Markdown table: `python benchmarks/run.py [NAME-GLOB ...]`. Progress goes to stderr."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import shutil
import sys
import tempfile
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import executors
from _inputs import make
from _measure import MB, Failed, Figures, alternate, count_instructions
from _server import Served
from rows import CPU, INSTRUCTIONS, PEAK, ROWS, WALL, Aim, Row

HERE = Path(__file__).parent
DELAY_S = 0.03
#: A command may find something, complain or be interrupted by what it finds: 0 and 1; scanners have more.
ACCEPTED, ACCEPTED_BY_SCANNERS = (0, 1), (0, 1, 2, 3, 4)
#: What a mistyped option ends with.
MISTAKES = {"mistake": (0, 2)}


def main(globs: list[str]) -> int:
    """Run the chosen rows, all by default. Returns 1 if an aim was missed, 2 if something did not run."""
    chosen = [row for row in ROWS if not globs or any(fnmatchcase(row.name, glob) for glob in globs)]
    if not chosen and globs != ["executors"]:
        print(f"no such row; there are {', '.join(row.name for row in ROWS)} and executors", file=sys.stderr)
        return 2
    lines, failed, missed = [], False, False
    with tempfile.TemporaryDirectory(prefix="statecli-bench-") as name, Served(Path(name), DELAY_S) as served:
        last_use = {item: n for n, row in enumerate(chosen) for item in row.inputs}
        for n, row in enumerate(chosen):
            print(f"{row.name} …", file=sys.stderr, flush=True)
            try:
                line, met = measure(row, Path(name), served.url().rstrip("/"))
                lines.append(line)
                missed |= not met
            except (Failed, FileNotFoundError) as error:
                failed = True
                print(f"{row.name}: not measured: {error}", file=sys.stderr)
            for item in row.inputs:
                if last_use[item] == n:
                    _remove(Path(name, item))
    if not globs or "executors" in globs:
        with ExitStack() as stack:
            lines += executors.lines(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    print(f"{datetime.date.today().isoformat()}, {machine()}, {versions()}.\n")
    print("| work | statecli | peer, same run | ratio | aim | met |\n|---|---|---|---|---|---|")
    print("\n".join(lines))
    return 2 if failed else int(missed)


def measure(row: Row, folder: Path, url: str) -> tuple[str, bool]:
    """Return the line of the table, and whether all aims were met. Raises Failed."""
    for item in row.inputs:
        if not (folder / item).exists():
            make(item, folder)
    scanners = os.environ.get("SCANNERS", "")
    places = {"d": str(folder), "url": url, "scanners": scanners}
    peers = {
        name: words
        for name, text in row.peers.items()
        if shutil.which((words := split_command(text, places))[0]) is not None
    }
    ours = split_command(row.ours, places)
    accept = MISTAKES.get(row.name, ACCEPTED_BY_SCANNERS if "scanners" in "".join(row.peers.values()) else ACCEPTED)
    found, *others = alternate(ours, *peers.values(), rounds=row.rounds, accept=accept)
    if any(aim.figure is INSTRUCTIONS for aim in row.aims):
        commands = (ours, *peers.values())
        counts = [count_instructions(command, accept) for command in commands]
        found, *others = (
            Figures(one.wall, one.cpu, one.peak, count) for one, count in zip((found, *others), counts, strict=True)
        )
    verdicts = [check(aim, found, others[0] if others else None) for aim in row.aims]
    met = all(is_met for _, is_met in verdicts)
    said = "; ".join(f"{name}: {describe(one, row)}" for name, one in zip(peers, others, strict=True))
    ratio = describe_ratio(found, others[0]) if others else "—"
    aims = ", ".join(text for text, _ in verdicts) or "—"
    word = ("yes" if met else "**no**") if verdicts else "—"
    return f"| {row.work} | {describe(found, row)} | {said or '—'} | {ratio} | {aims} | {word} |", met


def split_command(text: str, places: dict[str, str]) -> list[str]:
    """Return the words of a command of `rows.py`."""
    words = [word.format(**places) if "{" in word else word for word in shlex.split(text)]
    if words[0] == "statecli":
        return [sys.executable, "-m", *words]
    if words[0] == "peer":
        return [sys.executable, str(HERE / "_peers.py"), *words[1:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def read_figure(figure: str, found: Figures) -> float:
    """Return a figure in the units of `rows.py`."""
    return {
        INSTRUCTIONS: found.instructions / 1e6,
        WALL: found.wall,
        CPU: found.cpu,
        PEAK: found.peak / MB,
    }[figure]


def check(aim: Aim, found: Figures, peer: Figures | None) -> tuple[str, bool]:
    """Describe an aim, and return whether it is met."""
    value = read_figure(aim.figure, found)
    if not aim.of_peer:
        return f"≤ {aim.limit:g} {aim.figure}", value <= aim.limit
    assert peer is not None
    unit = {WALL: "the time", CPU: "the CPU", PEAK: "the memory"}[aim.figure]
    return f"≤ {aim.limit:g} × {unit}", value <= aim.limit * read_figure(aim.figure, peer)


def describe(found: Figures, row: Row) -> str:
    """Wall and CPU time, peak memory, and what else the row counts."""
    time = f"{found.wall * 1e3:.0f} ms ({found.cpu * 1e3:.0f} CPU)"
    time = time if found.wall < 1 else f"{found.wall:.2f} s ({found.cpu:.2f} CPU)"
    parts = [time, f"{found.peak / MB:.0f} MB"]
    parts += [f"{row.size / found.wall / 1e9:.2f} GB/s"] if row.size else []
    parts += [f"{found.instructions / 1e6:.0f} M instructions"] if found.instructions else []
    return ", ".join(parts)


def describe_ratio(found: Figures, peer: Figures) -> str:
    """Return how the times compare, in words."""
    ratio, cpu = peer.wall / found.wall, found.cpu / peer.cpu
    return (f"{ratio:.1f} × faster" if ratio >= 1 else f"{1 / ratio:.1f} × slower") + f", {cpu:.2f} × the CPU"


def machine() -> str:
    """Cores and architecture, and how busy they are; not the host's name."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{load}"


def versions() -> str:
    """What the figures depend on."""
    names = ("torch", "numpy", "msgspec", "safetensors")
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
