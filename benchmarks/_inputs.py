"""The files that are measured, each made in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

from _measure import python, run

NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")

TORCH_SAVE = """
import sys, torch
path, tensors, elements, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
state = {
    f"model.layers.{i // len(names)}.{names[i % len(names)]}.weight": torch.randn(elements).reshape(2, -1)
    for i in range(tensors)
}
torch.save(state, path)
"""

SAFETENSORS = """
import sys, torch
from safetensors.torch import save_file
path, dtype, size = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
count = size // 20 // dtype.itemsize
save_file({f"layers.{i}.weight": (torch.randn(count) / 50).to(dtype) for i in range(20)}, path)
"""


CHANGED = """
import sys
from safetensors.torch import load_file, save_file
save_file({name: (t.float() * 1.01).to(t.dtype) for name, t in load_file(sys.argv[1]).items()}, sys.argv[2])
"""


def changed_values(before: Path, after: Path) -> Path:
    """The same tensors with nearly every element changed."""
    run(python(CHANGED, str(before), str(after)))
    return after


def sparse_pair(folder: Path, size: int) -> tuple[Path, Path]:
    """Two files of bfloat16 zeros that take no room on the disk; one element of the second is another."""
    header = {
        f"layers.{i}": {"dtype": "BF16", "shape": [size // 16], "data_offsets": _slice(i, size)} for i in range(8)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    paths = folder / "zeros.safetensors", folder / "nearly_zeros.safetensors"
    for path in paths:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
    with paths[1].open("r+b") as file:
        file.seek(8 + len(text) + size // 2)
        file.write(b"\x80\x3f")
    return paths


def _slice(i: int, size: int) -> list[int]:
    return [i * size // 8, (i + 1) * size // 8]


def torch_file(path: Path, tensors: int, elements: int) -> Path:
    """A state_dict of float32 tensors, written by torch.save."""
    run(python(TORCH_SAVE, str(path), str(tensors), str(elements), *NAMES))
    return path


MANY = """
import os, sys, torch
folder, count = sys.argv[1], int(sys.argv[2])
os.makedirs(folder)
for i in range(count):
    torch.save({f"layers.{j}.weight": torch.randn(8) for j in range(10)}, os.path.join(folder, f"step-{i}.pt"))
"""


def many_small(folder: Path, count: int) -> Path:
    """So many state_dicts of ten small tensors each, written by torch.save."""
    run(python(MANY, str(folder), str(count)))
    return folder


def safetensors_values(path: Path, dtype: str, size: int) -> Path:
    """Twenty tensors of normally distributed weights, `size` bytes in all."""
    run(python(SAFETENSORS, str(path), dtype, str(size)))
    return path


def safetensors_file(path: Path, tensors: int) -> Path:
    """Tensors of four float32 zeros each; the header is what counts."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for i in range(tensors):
        name = f"model.layers.{i // len(NAMES)}.{NAMES[i % len(NAMES)]}.weight"
        header[name] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16 * tensors))
    return path
