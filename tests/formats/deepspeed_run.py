"""Two real ranks of DeepSpeed on the CPU: `python deepspeed_run.py OUT STAGE-DTYPE-GROUPS…` saves one folder each."""

from __future__ import annotations

import os
import socket
import sys

import deepspeed  # before the ranks are forked: each would import it otherwise, which takes 6 s
import torch
from torch import multiprocessing, nn


class Net(nn.Module):
    """Trained and frozen parameters, a tied one, buffers of both kinds, a size that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 5).requires_grad_(False)
        self.proj = nn.Linear(8, 16)
        self.back = nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("gone", torch.arange(3.0), persistent=False)

    def forward(self, x):
        h = self.embed(x) + self.table.to(self.scale.dtype)
        h = self.back(torch.tanh(self.proj(h))) * self.scale
        return self.head(h).float().square().mean() + self.frozen(h).float().mean()


def configured(spec: str) -> tuple[dict[str, object], nn.Module, torch.optim.Optimizer]:
    """The configuration, the model and the optimizer that `2-bf16-1` stands for; `3p` leaves small parameters whole."""
    stage, dtype, groups = spec.split("-")
    torch.manual_seed(3)
    net = Net()
    zero: dict[str, object] = {"stage": int(stage[0])}
    if stage == "3":
        zero["stage3_param_persistence_threshold"] = 0
    if stage == "3s":
        zero.update(stage3_param_persistence_threshold=0, sub_group_size=100)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config["zero_force_ds_cpu_optimizer"] = False
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})}
    trained = [one for one in net.parameters() if one.requires_grad]
    parted = [[one for one in trained if one.dim() > 1], [one for one in trained if one.dim() < 2]]
    given = [{"params": one} for one in parted] if groups == "2" else trained
    return config, net, torch.optim.AdamW(given, lr=1e-3)


def work(rank: int, out: str, port: int, specs: list[str]) -> None:
    """One rank: two steps and a save of each."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    # Compiling its operator for shared memory takes a minute, waits for any earlier compiler that was killed, and
    # changes no file: without the operator gloo does the work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for spec in specs:
        config, net, optimizer = configured(spec)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        for _ in range(2):
            made = torch.Generator().manual_seed(rank)
            engine.backward(engine(torch.randint(0, 11, (4,), generator=made)))
            engine.step()
        engine.save_checkpoint(os.path.join(out, spec), client_state={"epoch": 3})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(work, (sys.argv[1], port, sys.argv[2:]), nprocs=2, start_method="fork")
