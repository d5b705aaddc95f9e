"""Write folders in the layout of DeepSpeed, for any stage and number of ranks; a test compares them with DeepSpeed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]


def write(
    folder: Path,
    stage: int,
    groups: list[Tensors],
    *,
    frozen: Tensors | None = None,
    buffers: Tensors | None = None,
    shared: dict[str, str] | None = None,
    ranks: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    tag: str = "global_step2",
    moments: bool = True,
) -> Path:
    """Write a checkpoint and return the folder of `latest`; `groups` are float32 copies of the trained tensors."""
    frozen, buffers = frozen or {}, buffers or {}
    files = folder / tag
    files.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    trained = {name: tensor for group in groups for name, tensor in group.items()}
    weights = {**{name: tensor.to(dtype) for name, tensor in trained.items()}, **frozen}
    for name, owner in (shared or {}).items():
        weights[name] = weights[owner]
    facts = {
        "buffer_names": list(buffers),
        "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in frozen.items()),
        "shared_params": shared or {},
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    for rank in range(ranks):
        if stage == 3:
            parts = {name: _pad_for_ranks(tensor, ranks)[rank] for name, tensor in frozen.items()}
            empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in weights.items()}
            model_states = {"module": OrderedDict({**empty, **buffers}), "frozen_param_fragments": parts, **facts}
            torch.save(model_states, files / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            model_states = {"module": OrderedDict({**weights, **buffers}), "frozen_param_fragments": frozen, **facts}
            torch.save(model_states, files / "mp_rank_00_model_states.pt")
        state = (_build_stage_3 if stage == 3 else _build_stage_2)(groups, ranks, rank, moments)
        document = {"optimizer_state_dict": {"zero_stage": stage, **state}, "ds_version": "0.19.8"}
        torch.save(document, files / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def _pad_for_ranks(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    flat = tensor.flatten()
    each = -(-flat.numel() // ranks)
    return list(torch.cat([flat, flat.new_zeros(each * ranks - flat.numel())]).reshape(ranks, each))


def _build_stage_3(groups: list[Tensors], ranks: int, rank: int, moments: bool) -> dict[str, object]:
    flat = [torch.cat([_pad_for_ranks(tensor, ranks)[rank] for tensor in group.values()]) for group in groups]
    return {
        "partition_count": ranks,
        "optimizer_state_dict": _build_adam_state(flat, moments),
        "fp32_flat_groups": [flat_tensor.clone() for flat_tensor in flat],
    }


def _build_stage_2(groups: list[Tensors], ranks: int, rank: int, moments: bool) -> dict[str, object]:
    flat_groups = [torch.cat([tensor.flatten() for tensor in group.values()]) for group in groups]
    part_sizes = [-(-tensor.numel() // (2 * ranks)) * 2 for tensor in flat_groups]
    flat = [
        torch.cat([tensor, tensor.new_zeros(n * ranks - tensor.numel())])
        for tensor, n in zip(flat_groups, part_sizes, strict=True)
    ]
    flat = [tensor[rank * n : (rank + 1) * n] for tensor, n in zip(flat, part_sizes, strict=True)]
    lengths = [min(max(tensor.numel() - rank * n, 0), n) for tensor, n in zip(flat_groups, part_sizes, strict=True)]
    return {
        "partition_count": [ranks] * len(groups),
        "base_optimizer_state": _build_adam_state(flat, moments),
        "single_partition_of_fp32_groups": [tensor[:n].clone() for tensor, n in zip(flat, lengths, strict=True)],
        "group_paddings": [n - length for n, length in zip(part_sizes, lengths, strict=True)],
    }


def _build_adam_state(flat: list[torch.Tensor], moments: bool) -> dict[str, object]:
    """Return a state of Adam whose moments are a half and a quarter of the weights, so a test can compute them."""
    state = {
        n: {"step": torch.tensor(2.0), "exp_avg": flat_tensor / 2, "exp_avg_sq": flat_tensor / 4}
        for n, flat_tensor in enumerate(flat)
        if moments
    }
    return {"state": state, "param_groups": [{"lr": 0.001, "params": [n]} for n in range(len(flat))]}
