"""Four processes that save together: `python dcp_ranks.py FOLDER` writes a folder for each way of saving.

`mixed`: tensors placed in every way, lists and values. `fsdp2`: a model, its AdamW, an epoch. `flat`: the same model
with a flattened optimizer. `apart`: the model, each rank by itself. `shards`: the model as safetensors. `rank0.pt`…:
the file that torch.save writes in each rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch._dynamo  # before the ranks are forked: each would import it otherwise
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS = 4


def build_mixed_state() -> dict[str, object]:
    """Return a state_dict of DTensors, tensors and plain values, the same in each rank."""
    line = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(1)
    return {
        "rows": distribute_tensor(torch.randn(10, 3), line, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(4, 9), line, [Shard(1)]),
        "blocks": distribute_tensor(torch.arange(35.0).reshape(5, 7), square, [Shard(0), Shard(1)]),
        "everywhere": distribute_tensor(torch.randn(2, 3), line, [Replicate()]),
        "fewer than ranks": distribute_tensor(torch.randn(2, 3), line, [Shard(0)]),
        "last": distribute_tensor(torch.randn(2, 3, 6).bfloat16(), line, [Shard(2)]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(3).half(),
        "images": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "phases": torch.randn(3, dtype=torch.complex64),
        "nested": {"list": [torch.ones(2), torch.zeros(3)], "epoch": 3, "words": ["a", "b"], "none": None, "lr": 0.5},
    }


def model() -> nn.Module:
    """Return a model with buffers; no dimension is divisible by the number of ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in shards, and its optimizer after a step."""
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    return net, optimizer


def save(rank: int, folder: str) -> None:
    """Save all checkpoints as rank `rank` of the group."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    state = build_mixed_state()
    dcp.save(state, checkpoint_id=f"{folder}/mixed")
    torch.save({"rows": state["rows"], "scalar": state["scalar"]}, f"{folder}/rank{rank}.pt")
    net, optimizer = train_model()
    weights, moments = get_state_dict(net, optimizer)
    training_state = {
        "model": weights,
        "optimizer": moments,
        "epoch": 4,
        "extra": {"lr": 0.5, "rng": torch.get_rng_state()},
    }
    dcp.save(training_state, checkpoint_id=f"{folder}/fsdp2")
    flat = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": flat[0], "optimizer": flat[1]}, checkpoint_id=f"{folder}/flat")
    dcp.save(weights, checkpoint_id=f"{folder}/apart", use_collectives=False)
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/shards", save_distributed=True)
    dcp.save(weights, storage_writer=writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    mp.start_processes(save, (sys.argv[1],), nprocs=RANKS, start_method="fork")
