"""A `torch.distributed.checkpoint` folder of 10,000 tensors to JSON, whole and in 8 chunks; `diff` of one of 1 GB."""

from __future__ import annotations

import shutil
from pathlib import Path

from _inputs import NAMES
from _measure import MB, Median, Row, alternate, faster, python, run, statecli, with_peak

TENSORS = 10_000
SECONDS = 1.0
#: The archives of a chunk are all the same few bytes; the metadata is what counts.
MAKE = """
import io, os, pickle, sys, torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import *
folder, tensors, chunks, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
os.makedirs(folder)
raw = io.BytesIO()
torch.save(torch.randn(1, 4), raw)
raw, size = raw.getvalue(), torch.Size
held, where = {}, {}
for rank in range(chunks):
    with open(os.path.join(folder, f"__{rank}_0.distcp"), "wb") as file:
        file.write(raw * tensors)
for i in range(tensors):
    fqn = f"model.layers.{i // len(names)}.{names[i % len(names)]}.weight"
    cut = [ChunkStorageMetadata(size([rank, 0]), size([1, 4])) for rank in range(chunks)]
    held[fqn] = TensorStorageMetadata(TensorProperties(torch.float32), size([chunks, 4]), cut)
    for rank in range(chunks):
        where[MetadataIndex(fqn, [rank, 0], rank)] = _StorageInfo(f"__{rank}_0.distcp", i * len(raw), len(raw))
whole = Metadata(held, {fqn: (fqn,) for fqn in held}, where, StorageMeta(folder, "0"), "1.0.0")
with open(os.path.join(folder, ".metadata"), "wb") as file:
    pickle.dump(whole, file)
"""
PEER = """
import sys
from torch.distributed.checkpoint import FileSystemReader
FileSystemReader(sys.argv[1]).read_metadata()
"""
WEIGHTS = """
import sys, torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
weights = {f"layers.{i}.weight": torch.randn(2048, 1024) for i in range(128)}
dcp.save(weights, checkpoint_id=sys.argv[1], no_dist=True)
save_file(weights, sys.argv[2])
torch.save(weights, sys.argv[3])
"""


def rows(folder: Path) -> list[Row]:
    """One row a way to cut the tensors, and one for values."""
    return [_listed(folder, 1), _listed(folder, 8), _compared(folder)]


def _listed(folder: Path, chunks: int) -> Row:
    made = folder / f"chunks-{chunks}"
    run(python(MAKE, str(made), str(TENSORS), str(chunks), *NAMES))
    ours, peer = alternate(statecli("inspect", str(made), "-f", "json"), python(PEER, str(made)), rounds=3)
    shutil.rmtree(made)
    target, met = (f"≤ {SECONDS:.0f} s", ours.wall <= SECONDS) if chunks == 1 else ("—", None)
    work = f"10,000 tensors of a distributed checkpoint, {chunks} chunk{'s' * (chunks > 1)} each"
    return Row(work, with_peak(ours), f"`read_metadata`: {with_peak(peer)}", faster(peer, ours), target, met)


def _compared(folder: Path) -> Row:
    one, two, three = folder / "dcp", folder / "a.safetensors", folder / "a.pt"
    run(python(WEIGHTS, *map(str, (one, two, three))))
    commands = [statecli("diff", str(two), str(other), "-f", "json") for other in (one, three)]
    ours, peer = alternate(*commands, rounds=3)
    shutil.rmtree(one)
    return Row(
        "`diff` of 1 GB of safetensors and a distributed checkpoint",
        with_peak(ours),
        f"the same and a `.pt`: {with_peak(peer)}",
        faster(peer, ours),
        "≤ 1.5 × the time",
        _is_near(ours, peer),
    )


def _is_near(ours: Median, peer: Median) -> bool:
    return ours.wall <= 1.5 * peer.wall and ours.peak <= peer.peak + 50 * MB
