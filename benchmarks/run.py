"""Every measurement as one Markdown table: `python benchmarks/run.py [name ...]`. Progress goes to stderr."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from _measure import Failed, Row

SCRIPTS = (
    "startup",
    "torch_save",
    "many_tensors",
    "shards",
    "model_class",
    "statistics_of_values",
    "diff_values",
    "diff_types",
    "diff_many",
    "verify_proofs",
    "audit_peers",
    "audit_values",
    "lock_file",
    "dcp",
    "remote",
    "executors",
)


def main(chosen: list[str]) -> int:
    """Runs the chosen scripts, all by default. Returns 1 if a target was missed, 2 if something did not run."""
    unknown = set(chosen) - set(SCRIPTS)
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    failed = False
    for name in chosen or SCRIPTS:
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="statecli-bench-") as folder:
            try:
                rows += importlib.import_module(name).rows(Path(folder))
            except Failed as why:
                failed = True
                print(f"{name}: not measured: {why}", file=sys.stderr)
    print(table(rows))
    return 2 if failed else int(any(row.met is False for row in rows))


def table(rows: list[Row]) -> str:
    """The Markdown table, below a line that says what it was measured on."""
    lines = [
        f"{datetime.date.today().isoformat()}, {machine()}, {versions()}.",
        "",
        "| work | statecli | peer, same run | ratio | at least | met |",
        "|---|---|---|---|---|---|",
    ]
    words = {True: "yes", False: "**no**", None: "—"}
    lines += [
        f"| {row.work} | {row.ours} | {row.peer} | {row.ratio} | {row.target} | {words[row.met]} |" for row in rows
    ]
    return "\n".join(lines)


def machine() -> str:
    """Cores and architecture, and how busy they are; not the host's name."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{load}"


def versions() -> str:
    """What the figures depend on."""
    return f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {_version(name)}" for name in ("torch", "typer", "numpy", "safetensors")
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
