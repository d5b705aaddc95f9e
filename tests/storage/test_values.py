"""Values behind URLs: each byte travels once, in bounded memory, and the results are the same as on disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import save_file

from statecli.core.errors import MalformedError
from statecli.storage import object_cache
from statecli.storage.checksums import Checksums, combine_crc32
from statecli.storage.files import FileVersion, Guard
from statecli.storage.store import Extent

from .server import After, HangUp

MB = 1 << 20
HEAD_BYTES = 64 << 10


def build_weights(seed: int = 0, count: int = 6, elements: int = 2_500_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(elements, generator=generator) for i in range(count)}


def build_many_weights(seed: int = 0, count: int = 1500) -> dict[str, torch.Tensor]:
    return build_weights(seed, count, 10_000)


def write_safetensors(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, folder / "m.safetensors")
    return folder / "m.safetensors"


def write_torch_zip(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save(state, folder / "m.pt")
    return folder / "m.pt"


def write_legacy(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save(state, folder / "m.pt", _use_new_zipfile_serialization=False)
    return folder / "m.pt"


def write_dcp(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(folder / "m", thread_count=2), no_dist=True)
    return folder / "m"


def write_npz(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    np.savez_compressed(folder / "m.npz", **{name: tensor.numpy() for name, tensor in state.items()})
    return folder / "m.npz"


COMMANDS = (("inspect", "--stats"), ("lock", "-o", "-"), ("audit", "--values"), ("diff",))


#: All formats for statistics and a diff; for locks and audits, which plan reads as statistics do, a file and a folder.
CASES = [
    (write, question)
    for write in (write_safetensors, write_torch_zip, write_legacy, write_npz, write_dcp)
    for question in COMMANDS
    if write in (write_torch_zip, write_dcp) or question[0] in ("inspect", "diff")
]


@pytest.mark.parametrize(
    ("write", "question", "build_state"),
    [(*travel, build_weights) for travel in CASES]
    + [
        (write, ("inspect", "--stats"), build_many_weights)
        for write in (write_safetensors, write_torch_zip, write_legacy, write_npz, write_dcp)
    ],
    ids=lambda part: part[0] if isinstance(part, tuple) else part.__name__,
)
def test_each_byte_is_fetched_once(file_server, statecli, tmp_path, write, build_state, question):
    """8 MB in 2 tensors, or 4 MB in 100: at most 2 % more bytes are fetched, and not a request per block."""
    values, other = (
        build_state(seed, *((2, 1_000_000) if build_state is build_weights else (100,))) for seed in (0, 1)
    )
    path = write(file_server.folder, values)
    file_server.listing = "python"
    url = file_server.url(path.name) + "/" * path.is_dir()
    before = [write(tmp_path, other)] if question == ("diff",) else []
    assert statecli(*question, *before, url).code == (1 if before else 0)
    overhead = 300 * len(values) + 3 * HEAD_BYTES
    if write is write_dcp:  # both ends of each archive are fetched to find its tensor, and again with the values
        overhead += 4 * 1024 * len(values)
    if write is write_npz:  # the beginning of each record contains the header of its array
        overhead += 1024 * len(values)
    size = 4 * sum(tensor.numel() for tensor in values.values())
    assert file_server.sent <= 1.02 * size + overhead
    assert len(file_server.requests) <= 60 + 2 * len(values)  # an audit requests each record of an archive


@pytest.mark.parametrize("write", [write_safetensors, write_torch_zip])
def test_small_tensors_are_fetched_together(file_server, statecli, write):
    """1,500 tensors of 40 kB take some tens of requests."""
    path = write(file_server.folder, build_many_weights())
    assert statecli("inspect", "--stats", file_server.url(path.name)).code == 0
    assert len(file_server.requests) <= 40


def test_unselected_tensor_is_not_fetched(file_server, statecli):
    """Only the requested tensor is fetched: one tensor of six is a sixth of the bytes."""
    save_file(build_weights(), file_server.folder / "m.safetensors")
    assert statecli("inspect", "--stats", "-i", "layers.3.*", file_server.url("m.safetensors")).code == 0
    assert file_server.sent == HEAD_BYTES + 10_000_000


def test_transposed_tensor_is_fetched_at_most_twice(file_server, statecli, tmp_path):
    """A non-contiguous tensor gives the same result, and its storage is fetched once more for the checksum."""
    tensor = torch.randn(4, 500_000)
    torch.save({"a": tensor[:, :100_000].t(), "all": tensor}, file_server.folder / "m.pt")
    local_stats, remote_stats = (
        statecli("inspect", "--stats", target, "-i", "a", "-f", "json").rows()["a"]["stats"]
        for target in (file_server.folder / "m.pt", file_server.url("m.pt"))
    )
    assert local_stats == remote_stats
    assert file_server.sent < 2 * 4 * 4 * 500_000 + 4 * HEAD_BYTES


@pytest.mark.parametrize("options", [(), ("--jobs", "1"), ("--jobs", "3"), ("--executor", "processes:2")])
def test_diff_equals_the_diff_on_disk(file_server, statecli, tmp_path, options):
    """Threads, a single thread or processes, and any windows give the same document."""
    first, second = (build_weights(seed, elements=1_000_000) for seed in (0, 1))
    second["layers.3.weight"] = first["layers.3.weight"].clone()
    second["layers.3.weight"][7] = float("nan")
    second["layers.4.weight"] = first["layers.4.weight"]
    before, after = tmp_path / "a.pt", file_server.folder / "b.safetensors"
    torch.save(first, before)
    save_file(second, after)
    shutil.copy(before, file_server.folder / "a.pt")
    local = statecli("diff", before, after, "-f", "json")
    remote = statecli("diff", file_server.url("a.pt"), file_server.url("b.safetensors"), "-f", "json", *options)
    assert (remote.code, remote.err) == (local.code, local.err) == (1, "")
    assert remote.json["changes"] == local.json["changes"]


def test_comparisons_before_a_failure_are_shown(file_server, statecli, tmp_path, monkeypatch):
    """Each unread tensor is reported with the error; the other tensors are compared; the exit status is 2."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    local_path = write_safetensors(tmp_path, build_weights(0, 12))
    write_safetensors(file_server.folder, build_weights(0, 12))
    # One of the two threads has seven of the 13 windows, and a tensor has five windows.
    file_server.behave("*", After(14, HangUp(None)))
    result = statecli("diff", local_path, file_server.url("m.safetensors"), "--jobs", "2", "-f", "plain")
    assert result.code == 2
    url = file_server.url("m.safetensors")
    lines = [line for line in result.out.splitlines() if line.startswith("not compared")]
    assert 0 < len(lines) < 12
    assert all(f"{url}: layers." in line and "the connection was cut" in line for line in lines)
    assert f"; {len(lines)} tensors could not be compared" in result.out
    assert "no difference found in" in result.out
    assert result.err.startswith(f"statecli: {url}: layers.")
    assert result.err.count("\n") == 1


MEASURED_MAIN = """
import sys
from statecli.__main__ import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM")).split()[1], file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: peak memory")
def test_diff_of_large_files_takes_bounded_memory(file_server, tmp_path):
    """A diff of two remote files of 150 MB each takes less than 200 MB of memory."""
    for name in ("a.safetensors", "b.safetensors"):
        head = b'{"w": {"dtype": "F32", "shape": [%d], "data_offsets": [0, %d]}}' % (37_500_000, 150_000_000)
        with (file_server.folder / name).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + 150_000_000)
    urls = [file_server.url(name) for name in ("a.safetensors", "b.safetensors")]
    child = subprocess.run(
        [sys.executable, "-c", MEASURED_MAIN, "diff", *urls], capture_output=True, text=True, check=True
    )
    assert int(child.stderr) < 200 * 1024


# --- the parts


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_combined_checksum_equals_the_checksum_of_the_whole(pieces):
    """The result is the same as zlib's crc32_combine, which Python does not offer."""
    actual, sums, at = 0, Checksums(), 0
    for piece in pieces:
        actual = combine_crc32(actual, zlib.crc32(piece), len(piece))
        sums.add(at, memoryview(piece), [])
        at += len(piece)
    content = b"".join(pieces)
    assert actual == zlib.crc32(content)
    assert sums.combine(0, at, lambda *_: None) == zlib.crc32(content)
    assert sums.combine(0, at + 1, lambda *_: None) is None


class ByteStore:
    """A store of a single object that counts fetched bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.fetched_bytes = data, 0

    def get(self, url, offset, length, expected):
        data = self.data[offset : offset + length]
        self.fetched_bytes += len(data)
        return data, FileVersion(len(self.data), "1")


spans = st.tuples(st.integers(0, 400_000), st.integers(0, 90_000))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["read", "window", "prefetch", "close"]), spans), max_size=25))
def test_cached_reads_give_the_bytes_of_the_object(steps):
    """Reads, windows and prefetches, in any order and overlapping, give the object's bytes."""
    data = bytes(range(251)) * 1700
    remote_file = object_cache.RemoteFile("mem://x", ByteStore(data))
    for what, (offset, length) in steps:
        if what == "read":
            assert remote_file.read(offset, length) == data[offset : offset + length]
        elif what == "window" and offset < len(data):
            window = remote_file.read_window(offset, offset + length + 1)
            assert window == data[offset : offset + len(window)]
            assert 0 < len(window) <= length + 1
        elif what == "prefetch":
            remote_file.prefetch([Extent(start, length) for start in (offset, offset + length // 2)])
        else:
            remote_file.add_reader()
            remote_file.remove_reader()


@given(st.lists(spans, min_size=1, max_size=12))
@example([(70_040, 100), (120_000, 200), (199_900, 300)])
def test_byte_is_read_only_after_its_header_is_confirmed(steps):
    """A record's header is checked before any byte of the record is read; a wrong header blocks all its bytes."""
    data = bytes(range(251)) * 1700
    confirmed, refused_headers = [], []

    def check(start):
        def confirm(header: bytes) -> None:
            assert header == data[start - 40 : start]
            confirmed.append(start)

        return confirm

    def refuse(header: bytes) -> None:
        refused_headers.append(header)
        raise MalformedError("is elsewhere")

    remote_file = object_cache.RemoteFile("mem://x", ByteStore(data))
    guards = [Guard(at - 40, at, at + 50_000, check(at)) for at in (70_040, 120_080, 300_000)]
    remote_file.prefetch_head()
    remote_file.guard([*guards, Guard(200_000, 200_040, 250_000, refuse)])
    for n, (offset, length) in enumerate(steps):
        try:
            if n % 2:
                end = (
                    offset + len(remote_file.read_window(offset, offset + length + 1)) if offset < len(data) else offset
                )
            else:
                end = offset + len(remote_file.read(offset, length))
        except MalformedError:
            assert refused_headers
            assert offset < 250_000
            assert offset + length + 1 > 200_000
            continue
        touched = {guard.start for guard in guards if guard.start < end and offset < guard.stop}
        if end > offset:
            assert touched <= set(confirmed)
            assert offset >= 250_000 or end <= 200_040
