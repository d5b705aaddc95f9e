"""Fixtures that save two real files and compare them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Change, Diff, Status
from statecli.commands.diff.run import compare_targets

#: Writes an object, gives the path: `save({"w": t}, "a.pt")`.
Save = Callable[[Any, str], str]


def map_changes(diff: Diff) -> dict[str, Change]:
    """Return the changes that are not identical, by tensor name."""
    return {change.fqn: change for change in diff.changes if change.status is not Status.IDENTICAL}


def list_findings(diff: Diff) -> list[tuple[str, str | None]]:
    """Rule and tensor of each finding."""
    return [(finding.rule, finding.fqn) for finding in diff.findings]


def list_notes(diff: Diff) -> list[str]:
    """The names of the notes."""
    return [note.name for note in diff.notes]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves a file in a separate folder; the end of the name selects the format."""

    def write(checkpoint: Any, name: str) -> str:
        path = tmp_path / name
        if name.endswith(".safetensors"):
            save_file({key: tensor.clone().contiguous() for key, tensor in checkpoint.items()}, path)
        else:
            torch.save(checkpoint, path, _use_new_zipfile_serialization=".legacy." not in name)
        return str(path)

    return write


@pytest.fixture
def diff(save: Save) -> Callable[..., Diff]:
    """Return a function that saves two objects (as `.pt`, or under the given names) and compares the files."""

    def run(before: Any, after: Any, *, names: tuple[str, str] = ("a.pt", "b.pt"), **options: Any) -> Diff:
        return compare_targets(Request(save(before, names[0]), save(after, names[1]), jobs=1, **options))

    return run


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a class `Net` with the given lines in `__init__` and returns its target."""

    def write(lines: str, name: str = "net.py") -> str:
        body = "\n".join(f"        {line.strip()}" for line in lines.strip().splitlines())
        head = "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        (tmp_path / name).write_text(f"{head}        super().__init__()\n{body}\n")
        return f"{tmp_path / name}:Net"

    return write
