"""What lies behind http, with 30 ms to the first byte: 128 shards listed, a `.pt` listed, a `diff` of 1 GB."""

from __future__ import annotations

from pathlib import Path

from _inputs import changed_values, safetensors_values, torch_file
from _measure import Failed, Median, Row, alternate, faster, python, run, statecli, with_peak
from _server import Counts, Served
from shards import SHARDS, TENSORS, _sharded

DELAY = 0.03
#: A second of work, and round trips: the list of names, the index, and 128 shards 64 at a time.
SECONDS, ROUNDS = 1.0, 4
#: As huggingface_hub's `parse_safetensors_file_metadata` does it: a request for each header, 16 at a time.
HEADERS = """
import json, sys, urllib3
from concurrent.futures import ThreadPoolExecutor
pool = urllib3.PoolManager(maxsize=16)
def get(name, headers={}):
    return pool.request("GET", sys.argv[1] + name, headers=headers).data
def header(name):
    raw = get(name, {"Range": "bytes=0-100000"})
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:8 + length] if length + 8 <= len(raw) else get(name, {"Range": f"bytes=8-{length + 7}"}))
shards = sorted(set(json.loads(get("model.safetensors.index.json"))["weight_map"].values()))
with ThreadPoolExecutor(16) as threads:
    found = list(threads.map(header, shards))
"""
#: The usual way to a `.pt` that is elsewhere.
DOWNLOAD = """
import shutil, sys, tempfile, torch, urllib3
with tempfile.NamedTemporaryFile() as file:
    shutil.copyfileobj(urllib3.PoolManager().request("GET", sys.argv[1], preload_content=False), file, 1 << 20)
    file.flush()
    torch.load(file.name, map_location="meta")
"""


def rows(folder: Path) -> list[Row]:
    """One row a question."""
    _sharded(folder / "model")
    torch_file(folder / "m.pt", 200, 500_000)
    before = safetensors_values(folder / "a.safetensors", "bfloat16", 1 << 30)
    changed_values(before, folder / "b.safetensors")
    with Served(folder, DELAY) as served:
        return [_shards(folder, served), _archive(folder, served), _values(folder, served)]


def _shards(folder: Path, served: Served) -> Row:
    ours = statecli("inspect", served.url("model/"), "-f", "json")
    counts = _counted(served, ours, most=SHARDS + 3, sent=(SHARDS << 16) + (4 << 20))
    local = statecli("inspect", str(folder / "model"), "-f", "json")
    found, near, peer = alternate(ours, local, python(HEADERS, served.url("model/")), rounds=3)
    target = SECONDS + ROUNDS * DELAY
    work = f"{SHARDS} shards, {SHARDS * TENSORS:,} tensors over http, 30 ms to the first byte, `-f json`"
    said = f"headers alone, 16 at a time as huggingface_hub: {with_peak(peer)}; on disk: {with_peak(near)}"
    return Row(work, _told(found, counts), said, faster(peer, found), f"≤ {target:.2f} s", found.wall <= target)


def _archive(folder: Path, served: Served) -> Row:
    ours = statecli("inspect", served.url("m.pt"), "-f", "json")
    counts = _counted(served, ours, most=3, sent=1 << 20)
    found, peer = alternate(ours, python(DOWNLOAD, served.url("m.pt")), rounds=3)
    said = f'download and `torch.load(map_location="meta")`: {with_peak(peer)}'
    target = f"{counts.sent / (folder / 'm.pt').stat().st_size:.2%} of the file"
    return Row("400 MB `.pt` over http, `-f json`", _told(found, counts), said, faster(peer, found), target, None)


def _values(folder: Path, served: Served) -> Row:
    names = [str(folder / "a.safetensors"), str(folder / "b.safetensors")]
    size = (folder / "b.safetensors").stat().st_size
    ours = statecli("diff", names[0], served.url("b.safetensors"), "-f", "json")
    counts = _counted(served, ours, most=2 * (size >> 21), sent=int(1.02 * size), accept=(1,))
    found, near = alternate(ours, statecli("diff", *names, "-f", "json"), rounds=3, accept=(1,))
    said = f"both on disk: {with_peak(near)}"
    return Row("`diff` of 1 GB on disk with 1 GB over http", _told(found, counts), said, faster(near, found), "—", None)


def _counted(served: Served, command: list[str], most: int, sent: int, accept: tuple[int, ...] = (0,)) -> Counts:
    """What one run asks for. Raises Failed where that is more requests or bytes than allowed."""
    served.counts()
    run(command, accept)
    found = served.counts()
    if found.requests > most or found.sent > sent:
        raise Failed(command, 0, f"{found.requests} requests and {found.sent:,} bytes: at most {most} and {sent:,}")
    return found


def _told(found: Median, counts: Counts) -> str:
    way = f"{counts.requests} requests, {counts.sent / 1e6:,.1f} MB, {counts.most} at a time"
    return f"{with_peak(found)}; {way}; the server {counts.cpu:.2f} s CPU"
