"""Run two real ranks of DeepSpeed on the CPU: `python deepspeed_run.py OUT STAGE-DTYPE-GROUPS…`.

Each argument gives a folder in OUT. The script also runs the library's tools on the folders, so that the tests need not
import DeepSpeed, which takes 6 s.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict
from pathlib import Path

import deepspeed  # before the ranks are forked: each would import it otherwise, which takes 6 s
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.tensor_fragment import fragment_address
from torch import multiprocessing, nn


class Net(nn.Module):
    """Model with trained, frozen and tied weights, both kinds of buffers, and a size that no rank count divides."""

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


def build_engine_parts(spec: str) -> tuple[dict[str, object], nn.Module, torch.optim.Optimizer]:
    """Return configuration, model and optimizer of a spec like `2-bf16-1`; `3p` leaves small parameters whole."""
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
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    parted = [[tensor for tensor in trained if tensor.dim() > 1], [tensor for tensor in trained if tensor.dim() < 2]]
    parameters = [{"params": tensor} for tensor in parted] if groups == "2" else trained
    return config, net, torch.optim.AdamW(parameters, lr=1e-3)


def run_rank(rank: int, out: str, port: int, specs: list[str]) -> None:
    """Run a rank: for each spec, train two steps and save."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    # Compiling the operator for shared memory takes a minute, waits for any earlier compiler that was killed, and
    # changes no file: without the operator gloo does the work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for spec in specs:
        config, net, optimizer = build_engine_parts(spec)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        for _ in range(2):
            generator = torch.Generator().manual_seed(rank)
            engine.backward(engine(torch.randint(0, 11, (4,), generator=generator)))
            engine.step()
        engine.save_checkpoint(os.path.join(out, spec), client_state={"epoch": 3})
    torch.distributed.destroy_process_group()


def consolidate(folders: list[Path]) -> None:
    """Save the output of zero_to_fp32 for each folder to FOLDER.fp32; stage 0 has nothing to consolidate."""
    for folder in folders:
        if not folder.name.startswith("0"):
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
            torch.save({name: tensor.detach() for name, tensor in weights.items()}, f"{folder}.fp32")


def convert(folders: list[Path]) -> None:
    """Save the output of ds_to_universal for each folder to FOLDER.universal."""
    for folder in folders:
        source = next(path for path in folder.iterdir() if path.is_dir())
        out = f"{folder}.universal/{source.name}_universal"
        options = ["--input_folder", str(source), "--output_folder", out, "--inject_missing_state"]
        sys.argv[1:] = [*options, "--num_extract_workers", "1", "--num_merge_workers", "1"]
        ds_to_universal.main(ds_to_universal.parse_arguments())


def build_companion_objects() -> dict[str, object]:
    """Return loss scalers, ZeRO stages, places of parameters in their shard, and shapes of parts of a parameter."""
    return {
        "loss_scaler": [LossScaler(2), DynamicLossScaler(8, 1, 1, 2, False)],
        "zero_stage": list(ZeroStageEnum),
        "param_slice_mappings": [OrderedDict(w=fragment_address(numel=4, start=8))],
        "universal_checkpoint_info": {"parts": [SubparamShape(["w"], (2, 2), 0)]},
        "single_partition_of_fp32_groups": [torch.zeros(2)],
    }


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(run_rank, (sys.argv[1], port, sys.argv[2:]), nprocs=2, start_method="fork")
    os.environ["DS_ACCELERATOR"] = "cpu"
    out = Path(sys.argv[1])
    folders = sorted(out.iterdir())
    consolidate(folders)
    convert([folder for folder in folders if folder.name in ("1-bf16-1", "2-bf16-2", "3-bf16-2")])
    torch.save(build_companion_objects(), out / "companions.pt")
