"""What a user would run instead, as functions: `python benchmarks/_peers.py NAME ARGUMENT ...`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path


def load_on_meta(path: str) -> None:
    """The usual way to list a `.pt`."""
    import torch

    torch.load(path, map_location="meta")


def list_safetensors(*paths: str) -> None:
    """Dtype and shape of each tensor, with the Rust crate."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  # the file is no dict
                piece = file.get_slice(name)
                piece.get_dtype(), piece.get_shape()


def list_shards(folder: str) -> None:
    """The index, and then each shard."""
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
    list_safetensors(*(str(Path(folder) / name) for name in sorted(set(index["weight_map"].values()))))


def read_dcp(folder: str) -> None:
    """The metadata of a distributed checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    FileSystemReader(folder).read_metadata()


def hash_blake3(path: str) -> None:
    """`b3sum`, on a machine without it: the same Rust crate, with the file mapped, on all cores."""
    from blake3 import blake3

    blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def loop_with_torch(before: str, after: str) -> None:
    """What people write to compare two files."""
    from safetensors.torch import load_file

    left, right = load_file(before), load_file(after)
    for name, tensor in left.items():
        delta = right[name].double() - tensor.double()
        delta.abs().max(), delta.abs().mean(), delta.norm() / tensor.double().norm(), (delta != 0).sum()


def list_statistics(path: str) -> None:
    """The same figures as `--stats`."""
    from safetensors.torch import load_file

    for tensor in load_file(path).values():
        values = tensor.double()
        (
            values.min(),
            values.max(),
            values.mean(),
            values.std(),
            values.norm(),
            values.isnan().sum(),
            (values == 0).sum(),
        )


def build(folder: str, name: str) -> None:
    """Import and build a class."""
    sys.path.insert(0, folder)
    import net

    getattr(net, name)()


def train(folder: str, name: str, steps: str) -> None:
    """Import and build a class, and train it for so many steps."""
    sys.path.insert(0, folder)
    import net

    net.step(name, float(steps))


def list_headers(url: str) -> None:
    """As huggingface_hub's `parse_safetensors_file_metadata`: a request for each header, 16 at a time."""
    from concurrent.futures import ThreadPoolExecutor

    import urllib3

    pool = urllib3.PoolManager(maxsize=16)

    def read_header(name: str) -> object:
        raw = pool.request("GET", url + name, headers={"Range": "bytes=0-100000"}).data
        length = int.from_bytes(raw[:8], "little")
        if length + 8 > len(raw):
            raw = raw[:8] + pool.request("GET", url + name, headers={"Range": f"bytes=8-{length + 7}"}).data
        return json.loads(raw[8 : 8 + length])

    index = json.loads(pool.request("GET", url + "model.safetensors.index.json").data)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(read_header, sorted(set(index["weight_map"].values()))))


def download_and_load(url: str) -> None:
    """The usual way to a `.pt` that is elsewhere."""
    import torch
    import urllib3

    with tempfile.NamedTemporaryFile() as file:
        shutil.copyfileobj(urllib3.PoolManager().request("GET", url, preload_content=False), file, 1 << 20)
        file.flush()
        torch.load(file.name, map_location="meta")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
