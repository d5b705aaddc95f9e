"""`inspect` of a small safetensors file against an empty Typer command; what heavy packages it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _inputs import safetensors_file
from _measure import ROOT, Row, alternate, environment, seconds, statecli

EMPTY = """
import typer

app = typer.Typer()


@app.command()
def inspect(target: str, output_format: str = typer.Option("table", "-f", "--output-format")) -> None:
    print("{}")


app()
"""
LIMIT = 1.5
HEAVY = ("torch", "numpy")


def rows(folder: Path) -> list[Row]:
    """The start-up row."""
    target = safetensors_file(folder / "small.safetensors", tensors=8)
    script = folder / "empty_typer.py"
    script.write_text(EMPTY)
    ours, peer = alternate(
        statecli("inspect", str(target), "-f", "json"),
        [sys.executable, str(script), str(target), "-f", "json"],
        rounds=21,
    )
    ratio, heavy = ours.wall / peer.wall, imported(target)
    return [
        Row(
            f"`inspect` of a small safetensors, `-f json`; imports {' and '.join(heavy) or 'no torch and no numpy'}",
            seconds(ours),
            f"empty Typer command: {seconds(peer)}",
            f"{ratio:.2f} ×",
            f"≤ {LIMIT} ×, no torch and no numpy",
            ratio <= LIMIT and not heavy,
        )
    ]


def imported(target: Path) -> list[str]:
    """Which heavy packages the command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "statecli", "inspect", str(target), "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment())
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "statecli" in modules, "the import log does not name statecli: it proves nothing"
    return [name for name in HEAVY if name in modules]
