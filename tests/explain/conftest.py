"""A model file, its checkpoints, and the run of the printed lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

NET = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)


class Net(nn.Module):
    def __init__(self, num_classes=10, width=8, layers=3):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.encoder = nn.ModuleList(Block(width) for _ in range(layers))
        self.bn = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, num_classes)


class Normed(nn.Module):
    def __init__(self, new=True):
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm if new else torch.nn.utils.weight_norm
        self.conv, self.out = norm(nn.Conv1d(4, 8, 3)), nn.Linear(8, 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.lm_head.weight = self.embed.weight


class Hooked(Net):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        raise RuntimeError("version 1 is too old")
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with net.py, as the current folder."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_module(desk):
    """Return a function that writes a file and returns its names, imported apart from all other modules."""

    def write(file: str, source: str) -> dict[str, Any]:
        (desk / file).write_text(source)
        names: dict[str, Any] = {"__name__": file.removesuffix(".py")}
        exec(compile(source, file, "exec"), names)  # noqa: S102 - the test's own file
        torch.manual_seed(0)
        return names

    return write


@pytest.fixture
def net(write_module):
    """The module net.py, imported apart from all other modules."""
    return write_module("net.py", NET)


@pytest.fixture
def explain(statecli):
    """Run `explain`, and return the JSON document with the exit status in `code`."""

    def run(model, checkpoint, *options):
        result = statecli("explain", model, checkpoint, *options, "-f", "json")
        assert result.code == (0 if result.json["loads"] else 1), result.err
        return result.json | {"code": result.code}

    return run


@pytest.fixture
def run_lines(desk, forked_python):
    """Run printed lines in another process; return the resulting state_dict of `model`."""

    def run(code) -> dict[str, torch.Tensor]:
        lines = [*code, "torch = __import__('torch')", "torch.save(model.state_dict(), 'loaded.pt')"]
        process = forked_python("\n".join(lines), cwd=desk)
        assert process.returncode == 0, process.stderr
        loaded: dict[str, torch.Tensor] = torch.load(Path(desk) / "loaded.pt", weights_only=True)
        return loaded

    return run
