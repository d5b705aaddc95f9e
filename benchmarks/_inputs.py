"""The files that are measured. `python benchmarks/_inputs.py NAME FOLDER` makes one, in a process of its own."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measure import run

NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
#: Shards and tensors of each, and the shape of a tensor.
SHARDS, TENSORS, SHAPE = 128, 288, (4096, 1024)

MAKERS: dict[str, Callable[[Path], None]] = {}


def make(name: str, folder: Path) -> None:
    """Make one input. The process ends with it, and so do torch and its arrays."""
    run([sys.executable, __file__, name, str(folder)])


def _maker(name: str, *args: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        MAKERS[name] = lambda folder: function(folder / name, *args)
        return function

    return register


def name_tensor(i: int) -> str:
    """As in a transformer: six weights a layer."""
    return f"model.layers.{i // len(NAMES)}.{NAMES[i % len(NAMES)]}.weight"


@_maker("small.safetensors", 8)
@_maker("small2.safetensors", 8, b"\1")
@_maker("2k.safetensors", 2_000)
@_maker("100k.safetensors", 100_000)
@_maker("100k2.safetensors", 100_000, b"\1")
@_maker("800k.safetensors", 800_000)
def write_header(path: Path, tensors: int, byte: bytes = b"\0") -> None:
    """Tensors of four float32 each; the header is what counts."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for i in range(tensors):
        header[name_tensor(i)] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]}
    _write_safetensors(path, header, 16 * tensors, byte * (16 * tensors))


def _write_safetensors(path: Path, header: dict[str, object], size: int, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + size)


@_maker("model")
def write_shards(path: Path) -> None:
    """Sparse shards as `save_pretrained` lays them out; no byte of a tensor is written."""
    path.mkdir()
    size, weight_map = 2 * SHAPE[0] * SHAPE[1], {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for n in range(TENSORS):
            name = name_tensor(shard * TENSORS + n)
            header[name] = {"dtype": "BF16", "shape": SHAPE, "data_offsets": [n * size, (n + 1) * size]}
            weight_map[name] = file
        _write_safetensors(path / file, header, TENSORS * size)
    index = {"metadata": {"total_size": SHARDS * TENSORS * size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


@_maker("zeros", 1 << 30)
@_maker("more_zeros", 10 << 30)
def write_sparse_pair(path: Path, size: int) -> None:
    """Two files of bfloat16 zeros that take no room on the disk; one element of the second is another."""
    path.mkdir()
    pieces = [[i * size // 8, (i + 1) * size // 8] for i in range(8)]
    header = {
        f"layers.{i}": {"dtype": "BF16", "shape": [size // 16], "data_offsets": at} for i, at in enumerate(pieces)
    }
    for name in ("a.safetensors", "b.safetensors"):
        _write_safetensors(path / name, dict(header), size)
    with (path / "b.safetensors").open("r+b") as file:
        file.seek(-(size // 2) - size % 2, 2)
        file.write(b"\x80\x3f")


@_maker("400MB.pt", 200, 500_000)
@_maker("1GB.pt", 200, 1_250_000)
@_maker("100k.pt", 100_000, 8)
def write_torch(path: Path, tensors: int, elements: int) -> None:
    """A state_dict of float32 tensors, written by torch.save."""
    import torch

    torch.save({name_tensor(i): torch.randn(elements).reshape(2, -1) for i in range(tensors)}, path)


@_maker("many", 1_000)
def write_many(path: Path, count: int) -> None:
    """So many state_dicts of ten small tensors each, written by torch.save."""
    import torch

    path.mkdir()
    for i in range(count):
        torch.save({f"layers.{j}.weight": torch.randn(8) for j in range(10)}, path / f"step-{i}.pt")


@_maker("1GB.safetensors", "bfloat16", 1_000_000_000)
@_maker("1GB.float32.safetensors", "float32", 1_000_000_000)
@_maker("1GB.float8.safetensors", "float8_e4m3fn", 1_000_000_000)
def write_weights(path: Path, dtype: str, size: int) -> None:
    """Twenty tensors of normally distributed weights, `size` bytes in all."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    count = size // 20 // kind.itemsize
    save_file({f"layers.{i}.weight": (torch.randn(count) / 50).to(kind) for i in range(20)}, path)


@_maker("far", "bfloat16", 256 << 20)
@_maker("pair.bfloat16", "bfloat16", 1 << 30)
@_maker("pair.float16", "float16", 1 << 30)
@_maker("pair.float32", "float32", 1 << 30)
def write_changed_pair(path: Path, dtype: str, size: int) -> None:
    """Twenty tensors, the same again, and with nearly every element changed."""
    from safetensors.torch import load_file, save_file

    path.mkdir()
    write_weights(path / "a.safetensors", dtype, size)
    shutil.copy(path / "a.safetensors", path / "same.safetensors")
    change_values(path / "a.safetensors", path / "b.safetensors", load_file, save_file)


def change_values(before: Path, after: Path, load: Any, save: Any) -> None:
    """The same tensors with nearly every element changed."""
    save({name: (tensor.float() * 1.01).to(tensor.dtype) for name, tensor in load(before).items()}, after)


def write_type_pair(path: Path, dtype: str) -> None:
    """One tensor of 256 MiB, of which every element changes."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    kind = getattr(torch, dtype)
    count = (256 << 20) // kind.itemsize
    numbers = torch.randn(min(count, 1 << 24), generator=torch.Generator().manual_seed(1))
    numbers = numbers.repeat(count // numbers.numel())
    if kind is torch.bool:
        before, after = numbers > 0, numbers <= 0
    elif kind.is_floating_point:
        before, after = numbers.to(kind), (numbers * 1.2).to(kind)
    elif kind.is_complex:
        before, after = numbers.to(kind), (numbers * 1.2).to(kind) + 1j
    else:
        before = (numbers * 20).to(kind)
        after = before + 1
    save_file({"weight": before}, path / "a.safetensors")
    save_file({"weight": after}, path / "b.safetensors")


TYPES = ("int8", "int16", "int32", "int64", "bool", "float8_e4m3fn", "float64", "complex64", "bfloat16")
for _name in TYPES:
    _maker(f"type.{_name}", _name)(write_type_pair)


@_maker("chunks-1", 10_000, 1)
@_maker("chunks-8", 10_000, 8)
def write_chunks(path: Path, tensors: int, chunks: int) -> None:
    """A distributed checkpoint. The archives of a chunk are all the same few bytes; the metadata is what counts."""
    import torch
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    path.mkdir()
    data = io.BytesIO()
    torch.save(torch.randn(1, 4), data)
    raw, size = data.getvalue(), torch.Size
    for rank in range(chunks):
        (path / f"__{rank}_0.distcp").write_bytes(raw * tensors)
    state, places = {}, {}
    for i in range(tensors):
        cut = [meta.ChunkStorageMetadata(size([rank, 0]), size([1, 4])) for rank in range(chunks)]
        properties = meta.TensorProperties(torch.float32)
        state[name_tensor(i)] = meta.TensorStorageMetadata(properties, size([chunks, 4]), cut)
        for rank in range(chunks):
            index = meta.MetadataIndex(name_tensor(i), [rank, 0], rank)
            places[index] = _StorageInfo(f"__{rank}_0.distcp", i * len(raw), len(raw))
    names = {fqn: (fqn,) for fqn in state}
    whole = meta.Metadata(state, names, places, meta.StorageMeta(str(path), "0"), "1.0.0")  # type: ignore[arg-type]
    (path / ".metadata").write_bytes(pickle.dumps(whole))


@_maker("classes")
def write_classes(path: Path) -> None:
    """A tiny class, a BERT-base of plain torch layers, and transformers' BERT-base."""
    path.mkdir()
    source = Path(__file__).with_name("_classes.py")
    shutil.copy(source, path / "net.py")


def safetensors_values(path: Path, dtype: str, size: int) -> Path:
    """Twenty tensors of weights, in a process of its own."""
    run([sys.executable, __file__, "--call", "write_weights", str(path), dtype, str(size)])
    return path


def changed_values(before: Path, after: Path) -> Path:
    """The same tensors with nearly every element changed, in a process of its own."""
    run([sys.executable, __file__, "--call", "change", str(before), str(after)])
    return after


def many_small(folder: Path, count: int) -> Path:
    """So many state_dicts of ten small tensors each, in a process of its own."""
    run([sys.executable, __file__, "--call", "write_many", str(folder), str(count)])
    return folder


def _call(name: str, path: str, *args: str) -> None:
    if name == "change":
        from safetensors.torch import load_file, save_file

        change_values(Path(path), Path(args[0]), load_file, save_file)
    elif name == "write_many":
        write_many(Path(path), int(args[0]))
    else:
        write_weights(Path(path), args[0], int(args[1]))


if __name__ == "__main__":
    if sys.argv[1] == "--call":
        _call(*sys.argv[2:])
    else:
        MAKERS[sys.argv[1]](Path(sys.argv[2]))
