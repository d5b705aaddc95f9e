"""A real run: a small model trained by torch, saved in the layouts of common libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """A cache folder of the test's own that accepts files of any age."""
    from statecli.commands.log import cache

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(cache, "MIN_AGE_S", -1.0)
    return folder


class Training(NamedTuple):
    """The states of a model during its training, and the optimizer of each state.

    layers.1 is frozen after step 600; layers.2.0.weight has a NaN from step 1000 on; the learning rate is halved before
    step 800.
    """

    steps: list[int]
    states: list[dict]
    optimizers: list[dict]


@pytest.fixture(scope="session")
def training():
    """Train a small model with torch for twelve checkpoints."""
    torch = pytest.importorskip("torch")
    from torch import nn

    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(32, 16),
            "layers": nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4)]),
            "head": nn.Linear(16, 32),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states, optimizers = [], []
    for number in range(1, 13):
        if number == 7:
            model["layers"][1].requires_grad_(False)
        if number == 8:
            optimizer.param_groups[0]["lr"] = 5e-3
        for _ in range(3):
            tokens = torch.randint(0, 32, (8, 6))
            hidden = model["embed"](tokens)
            for layer in model["layers"]:
                hidden = hidden + layer(hidden)
            loss = nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if number >= 10:
            state["layers.2.0.weight"][0, 0] = float("nan")
        states.append(state)
        saved = optimizer.state_dict()
        saved["param_groups"] = [dict(group) for group in saved["param_groups"]]
        optimizers.append(saved)
    return Training([100 * number for number in range(1, 13)], states, optimizers)


def save_plain(training: Training, folder: Path) -> None:
    """Save only the weights as `ckpt-0001.pt` and so on."""
    import torch

    for number, state in enumerate(training.states, 1):
        torch.save(state, folder / f"ckpt-{number:04d}.pt")


def save_safetensors(training: Training, folder: Path) -> None:
    """Save `model_1.safetensors` to `model_12.safetensors`."""
    from safetensors.torch import save_file

    for number, state in enumerate(training.states, 1):
        save_file(state, folder / f"model_{number}.safetensors")


def save_trainer(training: Training, folder: Path) -> None:
    """Save `checkpoint-100/` and so on, with model, optimizer and trainer_state.json, as transformers' Trainer does."""
    import torch
    from safetensors.torch import save_file

    log = []
    for step, state, optimizer in zip(*training, strict=True):
        inner = folder / f"checkpoint-{step}"
        inner.mkdir()
        save_file(state, inner / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer, inner / "optimizer.pt")
        log.append({"step": step, "loss": 1 / step})
        trainer_state = {"global_step": step, "epoch": step / 200, "log_history": log}
        (inner / "trainer_state.json").write_text(json.dumps(trainer_state))


def save_lightning(training: Training, folder: Path) -> None:
    """Save `epoch=0-step=100.ckpt` and so on, and last.ckpt, a copy of the last."""
    import torch

    for step, state, optimizer in zip(*training, strict=True):
        checkpoint = {"state_dict": state, "optimizer_states": [optimizer], "epoch": step // 200, "global_step": step}
        path = folder / f"epoch={step // 200}-step={step}.ckpt"
        torch.save(checkpoint | {"pytorch-lightning_version": "2.1.0"}, path)
    shutil.copy(path, folder / "last.ckpt")


def save_dcp(training: Training, folder: Path) -> None:
    """Save `step_100/` and so on with torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    for step, state in zip(training.steps, training.states, strict=True):
        dcp.save({"model": state, "step": step}, checkpoint_id=folder / f"step_{step}", no_dist=True)


SAVERS = {
    "plain": save_plain,
    "safetensors": save_safetensors,
    "trainer": save_trainer,
    "lightning": save_lightning,
    "dcp": save_dcp,
}


@pytest.fixture(scope="session")
def saved_runs(training, tmp_path_factory):
    """Return the folder of the run in a layout; each layout is written once."""
    folders: dict[str, Path] = {}

    def find(layout: str) -> Path:
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp(layout)
            SAVERS[layout](training, folders[layout])
        return folders[layout]

    return find


@pytest.fixture
def run_folder(saved_runs, tmp_path):
    """Return a copy of the run in a layout, for changes by the test."""

    def copy(layout: str) -> Path:
        return Path(shutil.copytree(saved_runs(layout), tmp_path / layout))

    return copy
