"""Malicious files that each scanner names, and honest files that it complains about: a table of the documents.

    python -m venv scanners && scanners/bin/pip install picklescan modelscan modelaudit
    SCANNERS=scanners/bin python benchmarks/detection.py > benchmarks/detection.md
    SCANNERS=scanners/bin python benchmarks/detection.py honest    # one row

The corpus is what the tests use: published advisories, files on which scanners and Python's unpickler disagree, and
ordinary checkpoints that real libraries wrote. Every tool runs with its default settings and is judged by its report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from _measure import environment, python, statecli

#: Write each group of the corpus into a folder of its own, in a child process, because the builders need torch.
WRITE = """
import sys
import tempfile
from pathlib import Path
import torch
from tests.formats import test_frames, test_torch_tar
from tests.rules import test_allocations, test_bypasses, test_ordinary_pickles

out = Path(sys.argv[1])

def write(group, contents):
    (out / group).mkdir()
    for number, data in enumerate(contents):
        (out / group / f"{number:03}.pt").write_bytes(data)

def written(save):
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        return (Path(folder) / "model.pt").read_bytes()

write("published", test_bypasses.ALL.values())
frames = map(written, test_frames.FILES.values())
evil = test_torch_tar.system(Path("PWNED"))
write("loader", [*frames, *(make(evil) for make in test_torch_tar.POLYGLOTS.values())])
# Keys of one hash cost time, not memory, and those of the tests are few enough to be harmless.
bombs = [body for body, harm in test_allocations.BOMBS.values() if not harm.startswith("compares each of")]
bombs += [body for body, _ in test_allocations.UNWRITTEN.values()]
write("bomb", [test_allocations.wrap_value(body) for body in bombs])
honest = [
    written(lambda folder: torch.save(build(), folder / "model.pt", **options))
    for build in test_ordinary_pickles.ORDINARY.values()
    for options in test_ordinary_pickles.WRITERS.values()
]
write("honest", honest)
"""
GROUPS = {
    "published": "published bypasses and gadgets",
    "loader": "files that CPython or torch reads as something else",
    "bomb": "files that exhaust the memory when they are loaded",
    "honest": "honest checkpoints (each complaint is a false alarm)",
}
#: Seconds that one scanner may take for one group.
GROUP_TIMEOUT_S = 900
#: Seconds that it may take for one file of a group that it did not end in time. The files are a few kilobytes.
FILE_TIMEOUT_S = 30


class Outcome(NamedTuple):
    """How many files a tool named as dangerous, could not scan, and passed."""

    named: int
    unscanned: int
    passed: int


class Tool(NamedTuple):
    """A scanner: its name, its version, and what it finds in a folder."""

    name: str
    version: str
    scan: Callable[[Path], Outcome]


def main() -> int:
    """Print the table. Returns 2 if the corpus could not be made."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder)
        made = subprocess.run([*python(WRITE), str(corpus)], env=environment(), check=False)
        if made.returncode:
            return 2
        tools = [Tool("statecli", version("statecli"), scan_with_statecli), *installed_peers()]
        counts = {group: len(list((corpus / group).iterdir())) for group in GROUPS}
        print("| files | " + " | ".join(f"{tool.name} {tool.version}" for tool in tools) + " |")
        print("| --- |" + " --- |" * len(tools))
        for group, title in GROUPS.items():
            if sys.argv[1:] and group not in sys.argv[1:]:
                continue
            cells = [describe(tool.scan(corpus / group), counts[group]) for tool in tools]
            print(f"| {counts[group]} {title} | " + " | ".join(cells) + " |", flush=True)
    return 0


def describe(outcome: Outcome, files: int) -> str:
    """The cell of the table, whose three figures add up to all files of the group."""
    assert sum(outcome) == files, (outcome, files)
    return f"{outcome.named} named, {outcome.unscanned} not scanned, {outcome.passed} passed"


def installed_peers() -> list[Tool]:
    """The scanners in the folder that SCANNERS names."""
    folder = os.environ.get("SCANNERS")
    found = {name: shutil.which(name, path=folder) for name in PEERS} if folder else {}
    return [
        Tool(name, _version(Path(command)), lambda files, name=name, command=command: PEERS[name](command, files))
        for name, command in found.items()
        if command
    ]


def _version(command: Path) -> str:
    shown = subprocess.run(
        [str(command.parent / "pip"), "show", command.name], capture_output=True, text=True, check=True
    )
    return next(line.split()[1] for line in shown.stdout.splitlines() if line.startswith("Version:"))


def scan_with_statecli(folder: Path) -> Outcome:
    """Audit all files: an error of the rules about pickles names one, except `unscanned-pickle`.

    Its warnings accuse nobody: `needs-weights-only-false` says that `torch.load` refuses the file, which is so.
    """
    done = _run([*statecli("audit", "--no-config", "--select", "pickles", "-f", "json"), str(folder)])
    report = json.loads(done.stdout)
    errors = [one for one in report["findings"] if one["severity"] == "error"]
    named = {Path(one["target"]).name for one in errors if one["rule"] != "unscanned-pickle"}
    refused = {Path(one["target"]).name for one in (*errors, *report["targets"]) if one.get("status") != "audited"}
    return _count(folder, named, refused)


def _scan_with_picklescan(command: str, folder: Path) -> Outcome:
    """One run a file, because one file that breaks it ends the run of a folder: 0 clean, 1 dangerous, 2 not scanned."""
    codes = {path.name: _run([command, "-p", str(path)]).returncode for path in folder.iterdir()}
    named = {name for name, code in codes.items() if code == 1}
    return _count(folder, named, {name for name, code in codes.items() if code > 1})


def _scan_with_modelscan(command: str, folder: Path) -> Outcome:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        _run([command, "-p", str(folder), "-r", "json", "-o", file.name])
        report = json.loads(Path(file.name).read_text("utf-8"))
    named = {one["source"].partition(":")[0] for one in report["issues"]}
    return _count(folder, named, {one.get("source", "").partition(":")[0] for one in report["errors"]})


def _scan_with_modelaudit(command: str, folder: Path) -> Outcome:
    try:
        named, unscanned = _named_by_modelaudit(command, folder, GROUP_TIMEOUT_S), set[str]()
    except subprocess.TimeoutExpired:
        named, unscanned = _scan_each_with_modelaudit(command, folder)
    return _count(folder, named, unscanned)


def _scan_each_with_modelaudit(command: str, folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the files that it names as dangerous, and of those that it does not end with in time."""
    named: set[str] = set()
    unscanned: set[str] = set()
    for path in folder.iterdir():
        try:
            named |= _named_by_modelaudit(command, path, FILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            unscanned.add(path.name)
    return named, unscanned


def _named_by_modelaudit(command: str, target: Path, timeout: float) -> set[str]:
    done = _run([command, "scan", str(target), "--format", "json"], timeout)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    severe = [issue for issue in report["issues"] if issue["severity"] in ("critical", "warning")]
    names = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    return {name for name in names for issue in severe if name in (issue["location"] or "")}


PEERS: dict[str, Callable[[str, Path], Outcome]] = {
    "picklescan": _scan_with_picklescan,
    "modelscan": _scan_with_modelscan,
    "modelaudit": _scan_with_modelaudit,
}


def _count(folder: Path, named: set[str], refused: set[str]) -> Outcome:
    names = {path.name for path in folder.iterdir()}
    left = names - named
    return Outcome(len(names & named), len(left & refused), len(left - refused))


def _run(command: list[str], timeout: float = GROUP_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    # modelaudit reports each run to its maker and waits for that, unless it is told not to.
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={**environment(), "PROMPTFOO_DISABLE_TELEMETRY": "1"},
    )


if __name__ == "__main__":
    sys.exit(main())
