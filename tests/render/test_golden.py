"""Output of a terminal with 80 and with 100 columns, compared with whole files in tests/data/golden.

`GOLDEN=write pytest tests/render/test_golden.py` writes the files again; check each file before you commit it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from statecli.commands.verify import forward_run

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
COMMANDS = {
    "inspect-class": ("inspect", "mynet.py:Net"),
    "inspect-checkpoint": ("inspect", "epoch2.pt"),
    "diff": ("diff", "epoch1.pt", "epoch2.pt"),
    "verify": ("verify", "mynet.py:Net", "--input", "2x8"),
    "audit-class": ("audit", "mynet.py:Net"),
    "audit-checkpoint": ("audit", "epoch1.pt", "epoch2.pt"),
}
#: Numbers that each new rule changes.
_RULE_COUNTS = re.compile(r"\d\d rules ran, \d\d skipped")
#: Maximum number of lines for the class with two mistakes; its twelve blocks are one mistake.
MAX_LINES_OF_CLASS = 45


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a folder with a model and two epochs of a training: a layer grows, one value becomes NaN."""
    folder = tmp_path_factory.mktemp("golden")
    shutil.copy(GOLDEN / "mynet.py", folder)
    before = {f"layers.{n}.{name}": _values(6, 6, n) for n in range(12) for name in ("weight", "scale")}
    before |= {"embed.weight": _values(32, 6, 1), "norm.running_mean": torch.zeros(6)}
    after = {name: tensor * 1.001 for name, tensor in before.items()}
    after["embed.weight"] = torch.cat([before["embed.weight"], torch.zeros(4, 6)])
    after["layers.3.weight"][0, 0] = float("nan")
    after["layers.7.scale"] = before["layers.7.scale"]
    torch.save({"model": before, "epoch": 1}, folder / "epoch1.pt")
    moments = {n: {"step": torch.tensor(1.0), "exp_avg": tensor * 0.1} for n, tensor in enumerate(after.values())}
    torch.save({"model": after, "optimizer": {"state": moments, "param_groups": []}, "epoch": 2}, folder / "epoch2.pt")
    return folder


def _values(rows, columns, n):
    """Return values that differ in each place, and are the same with every version of torch."""
    return (torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) + n + 1) / 64


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", COMMANDS)
def test_output_on_a_terminal_equals_the_golden_file(statecli, folder, monkeypatch, name, width):
    """A changed file of tests/data/golden changes the output for users."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))
    # The model catches no error, so one run reports all 24 mismatches, as 24 separate runs would.
    monkeypatch.setattr(forward_run, "_CAREFUL_RUNS_S", 0.0)
    text = _RULE_COUNTS.sub("## rules ran, ## skipped", statecli(*COMMANDS[name], "-f", "table").out)
    path = GOLDEN / f"{name}-{width}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("name", ["inspect-class", "verify", "audit-class"])
def test_two_mistakes_are_two_errors(name):
    """Twelve modules in a plain list are one error in every command, and the output fits a screen."""
    lines = (GOLDEN / f"{name}-100.txt").read_text("utf-8").splitlines()
    assert len(lines) <= MAX_LINES_OF_CLASS
    assert any("2 errors" in line for line in lines[-2:])
