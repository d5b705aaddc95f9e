"""A training script that saves no scheduler: after a resume, the learning rate starts again.

Try:    statecli resume-check sample_models/train.py::main
Shows:  a checkpoint without the state of the scheduler loads without an error, and training goes on with another
        learning rate.
Fix:    add "scheduler": scheduler.state_dict() to the checkpoint, and load it, as the function `fixed` does.
"""

from __future__ import annotations

import torch
from torch import nn


def main(steps: int, save_every: int, save_to: str, checkpoint: str | None, *, saves_scheduler: bool = False) -> None:
    """Train until `steps` steps are done in all; save each `save_every` steps; start from `checkpoint` if given."""
    torch.manual_seed(0)
    data = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    start = 0
    if checkpoint is not None:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
        if saves_scheduler:
            scheduler.load_state_dict(saved["scheduler"])
    for step in range(start, steps):
        batch = data[step % 8 * 8 :][:8]
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            if saves_scheduler:
                state["scheduler"] = scheduler.state_dict()
            torch.save(state, f"{save_to}/step-{step + 1}.pt")


def fixed(steps: int, save_every: int, save_to: str, checkpoint: str | None) -> None:
    """Train as `main` does, with the scheduler in the checkpoint."""
    main(steps, save_every, save_to, checkpoint, saves_scheduler=True)
