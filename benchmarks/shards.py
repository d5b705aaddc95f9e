"""36,864 tensors in 128 shards, sparse files, inspected by their folder: to JSON and to a table."""

from __future__ import annotations

import json
from pathlib import Path

from _inputs import NAMES
from _measure import Row, alternate, faster, python, statecli, with_peak

SHARDS, TENSORS = 128, 288
SHAPE = (4096, 1024)
SECONDS = 1.5
PEER = """
import json, os, sys
from safetensors import safe_open
folder = sys.argv[1]
with open(os.path.join(folder, "model.safetensors.index.json")) as file:
    shards = sorted(set(json.load(file)["weight_map"].values()))
for shard in shards:
    with safe_open(os.path.join(folder, shard), "np") as file:
        for name in file.keys():
            piece = file.get_slice(name); piece.get_dtype(), piece.get_shape()
"""


def rows(folder: Path) -> list[Row]:
    """One row an output."""
    model = _sharded(folder / "model")
    outputs = ("json", "table")
    commands = [statecli("inspect", str(model), "-f", output) for output in outputs]
    *ours, peer = alternate(*commands, python(PEER, str(model)), rounds=3)
    return [
        Row(
            f"{SHARDS} shards, {SHARDS * TENSORS:,} tensors, `-f {output}`",
            with_peak(found),
            f"`json`, then `safe_open` of each: {with_peak(peer)}",
            faster(peer, found),
            f"≤ {SECONDS} s",
            found.wall <= SECONDS,
        )
        for output, found in zip(outputs, ours, strict=True)
    ]


def _sharded(folder: Path) -> Path:
    """As `save_pretrained` lays it out; no byte of a tensor is written."""
    folder.mkdir()
    size = 2 * SHAPE[0] * SHAPE[1]
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for n in range(TENSORS):
            layer, which = divmod(shard * TENSORS + n, len(NAMES))
            name = f"model.layers.{layer}.{NAMES[which]}.weight"
            header[name] = {"dtype": "BF16", "shape": SHAPE, "data_offsets": [n * size, (n + 1) * size]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + TENSORS * size)
    index = {"metadata": {"total_size": SHARDS * TENSORS * size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder
