"""Write small checkpoints of the sample models, each in each format.

Try:    python sample_models/make_checkpoints.py OUTDIR
        statecli inspect OUTDIR/tied/model.safetensors

For each model a folder with
    model.safetensors   safetensors (tied weights once, the other name in its metadata)
    state_dict.pt       torch.save of the state_dict: a zip
    module.pt           torch.save of the whole module, unregistered tensors and all
    legacy.pt           the state_dict in the stream torch wrote before 1.6
    train.ckpt          a nested training checkpoint: model, optimizer, ema, epoch
    sharded/            two safetensors shards and model.safetensors.index.json
    sharded_bin/        two torch.save shards and pytorch_model.bin.index.json
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file, save_model
from torch import nn

MODELS = {
    "net": "Net",
    "net_fixed": "Net",
    "frozen": "Frozen",
    "batchnorm": "Block",
    "positions": "Positions",
    "anchors": "Head",
    "anchors_fixed": "Head",
    "plain_lists": "Lists",
    "plain_lists_fixed": "Lists",
    "relative_bias": "Attention",
    "relative_bias_fixed": "Attention",
    "cached_mask": "Causal",
    "cached_mask_fixed": "Causal",
    "rotary": "Rotary",
    "rotary_fixed": "Rotary",
    "precomputed": "Normed",
    "precomputed_fixed": "Normed",
    "phases": "Phases",
    "phases_fixed": "Phases",
    "tied": "Tied",
    "tied_fixed": "Tied",
    "none_parameter": "Optional",
    "grad_buffer": "Scaled",
    "grad_buffer_fixed": "Scaled",
    "finetune": "Net",
    "unused": "Net",
    "unused_fixed": "Net",
    "detached": "Net",
    "detached_fixed": "Net",
}


def build(name: str) -> nn.Module:
    """The sample model of that file, with the same values every time."""
    torch.manual_seed(0)
    return getattr(importlib.import_module(name), MODELS[name])()


def distinct(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with one name a storage, which is all that safetensors can write."""
    kept: dict[int, str] = {}
    return {k: v for k, v in state.items() if kept.setdefault(v.untyped_storage()._cdata, k) == k}


def halves(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """`state` as two shards, as one where there is a single entry."""
    names = list(state)
    middle = -(-len(names) // 2)
    return [{name: state[name] for name in part} for part in (names[:middle], names[middle:]) if part]


def write_sharded(folder: Path, stem: str, suffix: str, state: dict[str, torch.Tensor]) -> None:
    """The shards and the index that transformers writes next to them."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    shards = halves(state)
    for number, part in enumerate(shards, 1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.{suffix}"
        weight_map |= dict.fromkeys(part, file)
        if suffix == "safetensors":
            save_file(part, folder / file, metadata={"format": "pt"})
        else:
            torch.save(part, folder / file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An Adam with the state of one step, taken on gradients of zero so that the values stay as they are."""
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def write(name: str, folder: Path) -> None:
    """Every format of one model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build(name)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    save_model(model, str(folder / "model.safetensors"))
    torch.save(model.state_dict(), folder / "state_dict.pt")
    torch.save(model, folder / "module.pt")
    torch.save(model.state_dict(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    ema = {key: value.clone() for key, value in state.items()}
    train = {"model": model.state_dict(), "optimizer": trained(model).state_dict(), "ema": ema, "epoch": 3}
    torch.save(train, folder / "train.ckpt")
    write_sharded(folder / "sharded", "model", "safetensors", distinct(state))
    write_sharded(folder / "sharded_bin", "pytorch_model", "bin", state)


def main() -> None:
    """Write the folders of all models under the folder named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python sample_models/make_checkpoints.py OUTDIR")
    sys.path.insert(0, str(Path(__file__).parent))
    for name in MODELS:
        write(name, Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
