"""Write a checkpoint, others made from it, and an adapter.

They are a cast with a stale tensor, more words, fewer layers, fused projections, and a merge that left out one layer.

Try:    python sample_models/transformed_checkpoints.py OUTDIR
        statecli diff OUTDIR/master.safetensors OUTDIR/export.safetensors --cast

Shows:  `diff` says what was done, and names the one tensor or row for which it does not hold.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, WIDTH, VOCABULARY = 4, 64, 320
ALPHA = 8


def build_weights():
    """Return the weights of a small decoder with the names of a Llama."""
    generator = torch.Generator().manual_seed(0)

    def weights(*shape):
        return 0.02 * torch.randn(shape, generator=generator)

    state = {"model.embed_tokens.weight": weights(VOCABULARY, WIDTH)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for name, rows in (("q_proj", WIDTH), ("k_proj", WIDTH // 2), ("v_proj", WIDTH // 2), ("o_proj", WIDTH)):
            state[f"{layer}.self_attn.{name}.weight"] = weights(rows, WIDTH)
        for name in ("gate_proj", "up_proj"):
            state[f"{layer}.mlp.{name}.weight"] = weights(2 * WIDTH, WIDTH)
        state[f"{layer}.mlp.down_proj.weight"] = weights(WIDTH, 2 * WIDTH)
        state[f"{layer}.input_layernorm.weight"] = 1 + weights(WIDTH)
    return state


def export(state):
    """Return the weights in bfloat16; one tensor is of an older step."""
    exported = {name: tensor.bfloat16() for name, tensor in state.items()}
    stale = "model.layers.2.mlp.up_proj.weight"
    exported[stale] = (state[stale] + 0.1 * state[stale].roll(1)).bfloat16()
    return exported


def grow(state):
    """Return the weights with 32 more words; row 7 of the old ones was overwritten."""
    words = torch.cat([state["model.embed_tokens.weight"], torch.zeros(32, WIDTH)])
    words[7] = 0
    return {**state, "model.embed_tokens.weight": words}


def prune(state):
    """Return the weights without layer 1; the layers after it have the numbers that are free."""
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("model.layers.1.")}
    return {name.replace(".2.", ".1.").replace(".3.", ".2."): tensor for name, tensor in kept.items()}


def fuse(state):
    """Return the weights with one tensor for queries, keys and values; a key of layer 2 is wrong."""
    fused = dict(state)
    for n in range(LAYERS):
        layer = f"model.layers.{n}.self_attn"
        fused[f"{layer}.qkv_proj.weight"] = torch.cat([fused.pop(f"{layer}.{part}_proj.weight") for part in "qkv"])
    fused["model.layers.2.self_attn.qkv_proj.weight"][WIDTH + 6] = 0
    return fused


def adapt(state):
    """Return a LoRA adapter of the queries and values of rank 4, with the names of peft."""
    generator = torch.Generator().manual_seed(1)
    adapter = {}
    for n in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            module = f"model.layers.{n}.self_attn.{name}"
            rows = len(state[f"{module}.weight"])
            for side, shape in (("A", (4, WIDTH)), ("B", (rows, 4))):
                factor = 0.02 * torch.randn(shape, generator=generator)
                adapter[f"base_model.model.{module}.lora_{side}.weight"] = factor
    return adapter


def merge(state, adapter):
    """Return the weights with the adapter merged into them, except for the values of layer 2."""
    merged = dict(state)
    for name, b in adapter.items():
        weight = name.removeprefix("base_model.model.").replace("lora_B.", "")
        if weight in state and ".2.self_attn.v_proj" not in weight:
            merged[weight] = state[weight] + ALPHA / 4 * (b @ adapter[name.replace("lora_B", "lora_A")])
    return merged


def main(folder="."):
    """Write the checkpoints into the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    state = build_weights()
    adapter = adapt(state)
    made = {
        "master": state,
        "export": export(state),
        "grown": grow(state),
        "pruned": prune(state),
        "fused": fuse(state),
        "merged": merge(state, adapter),
    }
    for name, tensors in made.items():
        save_file(tensors, path / f"{name}.safetensors")
    (path / "adapter").mkdir(exist_ok=True)
    save_file(adapter, path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
