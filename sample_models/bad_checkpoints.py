"""Write three checkpoints: one is sound, one has NaN values, and one runs a command when it is loaded.

Try:    python sample_models/bad_checkpoints.py OUTDIR
        statecli audit OUTDIR --values

Shows:  `audit` reports the NaN and the command without loading a file. The command is `true`, which does nothing.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


class RunsCommand:
    """A pickle of an instance is a call of os.system."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def main(folder: str) -> None:
    """Write the three files into a new folder."""
    state = {"encoder.weight": torch.arange(64.0).reshape(8, 8), "encoder.bias": torch.ones(8)}
    state |= {"head.weight": torch.arange(16.0).reshape(2, 8), "head.bias": torch.ones(2)}
    into = Path(folder)
    into.mkdir()
    save_file(state, into / "step-100.safetensors")
    torch.save({"state_dict": state, "callback": RunsCommand()}, into / "downloaded.ckpt")
    damaged = state["head.weight"].index_fill(1, torch.tensor(3), torch.nan)
    torch.save(state | {"head.weight": damaged}, into / "step-200.pt")


def move_one_weight(folder: str) -> None:
    """Move one weight of the sound checkpoint from 1 to the next number of float32."""
    path = Path(folder) / "step-100.safetensors"
    state = load_file(path)
    state["head.bias"][0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    save_file(state, path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
