"""Write a training run of eight checkpoints: a layer stops halfway, and a tensor has NaN near the end.

Try:    python sample_models/training_checkpoints.py OUTDIR
        statecli log OUTDIR/run

Shows:  `log` has a line for each checkpoint, `bisect` finds the first checkpoint with NaN.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, WIDTH = 4, 32
STEPS = range(100, 801, 100)


def build_weights(generator):
    """Return the weights of a small decoder."""
    state = {"embed.weight": torch.randn(64, WIDTH, generator=generator)}
    for n in range(LAYERS):
        for name in ("attn.qkv", "mlp.up", "mlp.down"):
            state[f"layers.{n}.{name}.weight"] = 0.2 * torch.randn(WIDTH, WIDTH, generator=generator)
    return state


def train(state, step, generator):
    """Return the weights after 100 more steps; layer 1 is frozen after step 400, and step 700 has a NaN."""
    trained = {}
    for name, tensor in state.items():
        update = torch.randn(tensor.shape, generator=generator)
        is_frozen = step > 400 and name.startswith("layers.1.")
        trained[name] = tensor if is_frozen else tensor + 2.0 / step * 0.3 * update
    if step >= 700:
        trained["layers.3.mlp.up.weight"][0, 0] = float("nan")
    return trained


def main(folder="."):
    """Write the checkpoints into the folder `run`, as the Trainer of transformers does."""
    generator = torch.Generator().manual_seed(0)
    state = build_weights(generator)
    for step in STEPS:
        path = Path(folder) / "run" / f"checkpoint-{step}"
        path.mkdir(parents=True, exist_ok=True)
        state = train(state, step, generator)
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        settings = {"global_step": step, "epoch": step / 200, "train_batch_size": 8 if step < 500 else 16}
        (path / "trainer_state.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
