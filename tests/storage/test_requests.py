"""The number of requests and of bytes for a listing, counted by a server, for every format."""

from __future__ import annotations

import json
import shutil
import struct
import threading
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.zip_archive import Archive

from ..formats.msgpacks import Extension, pack
from .server import BEFORE_HEADERS, After

HEAD_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def fresh_command():
    """Forget earlier requests, so that each test acts as a separate command."""
    files.forget_command()


class Crowd:
    """Delays requests until so many run together, and counts how many run at the same time."""

    def __init__(self, size: int) -> None:
        self._all_here = threading.Barrier(size, timeout=30)
        self._lock, self._left = threading.Lock(), size
        self.now = self.most = 0

    def __call__(self, request, reply) -> None:
        reply.at.append((BEFORE_HEADERS, self._wait))
        reply.at.append((len(reply.body), self._leave))

    def _wait(self, server) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self._left -= 1
            waits = self._left >= 0
        if waits:
            self._all_here.wait()

    def _leave(self, server) -> None:
        with self._lock:
            self.now -= 1


def list_ranges(file_server) -> list[tuple[str, str]]:
    """Return the path and range of each request for bytes, without requests for a list of names."""
    return [(request.path, request.range) for request in file_server.requests if request.status == 206]


def count_listings(file_server) -> int:
    return sum(request.status != 206 for request in file_server.requests)


# --- safetensors


def test_short_header_takes_a_single_request(file_server, statecli):
    """Of a file of 40 MB, only the first 64 KiB are fetched."""
    save_file({"a": torch.zeros(10_000_000)}, file_server.folder / "m.safetensors")
    assert statecli("inspect", file_server.url("m.safetensors")).code == 0
    assert list_ranges(file_server) == [("m.safetensors", "bytes=0-65535")]
    assert file_server.sent == HEAD_BYTES


def test_long_header_takes_two_requests(file_server, statecli):
    """The second request is exactly for the missing part of the header."""
    path = file_server.folder / "m.safetensors"
    save_file({f"a.rather.long.name.of.tensor.{i}": torch.zeros(1000) for i in range(2000)}, path)
    end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert end > HEAD_BYTES
    assert statecli("inspect", file_server.url(path.name)).code == 0
    assert [span for _, span in list_ranges(file_server)] == ["bytes=0-65535", f"bytes={HEAD_BYTES}-{end - 1}"]
    assert file_server.sent == end


def write_shards(folder: Path, count: int) -> Path:
    """Write shards and their index as save_pretrained does."""
    folder.mkdir()
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    for n, name in enumerate(names):
        save_file({f"layers.{n}.weight": torch.zeros(4)}, folder / name)
    index = {"metadata": {}, "weight_map": {f"layers.{n}.weight": name for n, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_each_shard_takes_a_single_request_64_at_a_time(file_server, statecli):
    """An index takes one request, and its 128 shards take 128 requests; never more than 64 of them run together."""
    write_shards(file_server.folder / "net", 128)
    file_server.listing = "python"
    crowd = Crowd(64)
    file_server.behave("*.safetensors", crowd)
    result = statecli("inspect", file_server.url("net/model.safetensors.index.json"), "-f", "json")
    assert (result.code, len(result.json["tensors"])) == (0, 128)
    assert Counter(path for path, _ in list_ranges(file_server)).most_common(1)[0][1] == 1
    assert len(list_ranges(file_server)) == 129
    assert crowd.most == 64


def test_companion_files_are_requested_with_the_index(file_server, statecli):
    """A folder takes its list of names; then the index and all JSON next to it at once; then the shards at once."""
    folder = write_shards(file_server.folder / "net", 3)
    for name in ("config.json", "trainer_state.json", "adapter_config.json"):
        (folder / name).write_text("{}")
    file_server.listing = "python"
    json_files, shards = Crowd(4), Crowd(3)
    file_server.behave("*.json", json_files)
    file_server.behave("*.safetensors", shards)
    assert statecli("inspect", file_server.url("net/")).code == 0
    assert (json_files.most, shards.most) == (4, 3)
    assert (len(list_ranges(file_server)), count_listings(file_server)) == (7, 1)


# --- zip archives


def write_archive(path: Path, tensors: int, elements: int) -> Path:
    torch.save({f"layers.{i}.weight": torch.full((elements,), float(i)) for i in range(tensors)}, path)
    return path


@pytest.mark.parametrize(("tensors", "elements", "requests"), [(10, 500_000, 2), (400, 20_000, 2), (5_000, 2_000, 4)])
def test_torch_save_needs_only_its_central_directory_and_pickle(file_server, statecli, tensors, elements, requests):
    """No local header of a storage is fetched: the central directory is enough to compute torch's offsets."""
    path = write_archive(file_server.folder / "m.pt", tensors, elements)
    assert statecli("inspect", file_server.url("m.pt")).code == 0
    assert len(list_ranges(file_server)) == requests
    with zipfile.ZipFile(path) as zip_file:
        pickle, directory = zip_file.getinfo("m/data.pkl").file_size, path.stat().st_size - zip_file.start_dir
    assert file_server.sent <= max(pickle, HEAD_BYTES) + max(directory, HEAD_BYTES) + 8192


@pytest.mark.parametrize("name", ["m", "a-folder-name-that-is-a-good-deal-longer-than-the-others"])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4096])
def test_central_directory_gives_the_offsets_of_torch_records(tmp_path, file_server, size, name):
    """Offsets computed from the central directory are the same as offsets from each local header."""
    path = file_server.folder / f"{name}.pt"
    torch.save([torch.zeros(size, dtype=torch.uint8), torch.ones(100_000), torch.zeros(3)], path)
    with ByteSource(str(path)) as local, ByteSource(file_server.url(path.name)) as remote:
        ours = {name: record.data_offset for name, record in Archive(local).records.items()}
        theirs = {name: record.data_offset for name, record in Archive(remote).records.items()}
    assert theirs == ours
    assert len(list_ranges(file_server)) == 2


def move_record(path: Path, name: str, by: int) -> None:
    """Change the record's local header so that its bytes seem to begin later, or earlier, than written."""
    with zipfile.ZipFile(path) as zip_file:
        at = zip_file.getinfo(name).header_offset
    raw = bytearray(path.read_bytes())
    (extra,) = struct.unpack_from("<H", raw, at + 28)
    struct.pack_into("<H", raw, at + 28, extra + by)
    path.write_bytes(raw)


VALUE_COMMANDS = (("inspect", "--stats"), ("lock", "-o", "-"))


@pytest.mark.parametrize("by", [8, -4])
@pytest.mark.parametrize("question", [*VALUE_COMMANDS, ("inspect", "--executor", "processes:2", "--stats")])
def test_storage_at_another_place_than_torchs_is_not_read(file_server, statecli, question, by):
    """The local header of a remote record is read with its values; torch aligns each record."""
    path = write_archive(file_server.folder / "m.pt", 30, 30_000)
    move_record(path, "m/data/15", by)
    result = statecli(*question, file_server.url("m.pt"))
    assert (result.code, result.out) == (2, "")
    assert "'m/data/15': its data begins at byte" in result.err
    assert "where torch puts it; download the file to read it" in result.err


@pytest.mark.parametrize("question", VALUE_COMMANDS)
def test_overlapping_record_is_not_read(file_server, statecli, question):
    """By its local header, the record ends after the beginning of the next record."""
    path = write_archive(file_server.folder / "m.pt", 30, 30_000)
    move_record(path, "m/data/15", 64)
    result = statecli(*question, file_server.url("m.pt"))
    assert (result.code, result.out) == (2, "")
    assert "the zip archive is damaged: the records 'm/data/15' and 'm/data/16' overlap" in result.err


def test_wrong_record_affects_only_its_tensor(file_server, statecli, tmp_path):
    """The other tensors are compared, whichever window contains them."""
    local_path = write_archive(tmp_path / "m.pt", 30, 30_000)
    shutil.copy(local_path, file_server.folder / "m.pt")
    rename_record(file_server.folder / "m.pt", "m/data/15")
    result = statecli("diff", local_path, file_server.url("m.pt"), "-f", "json")
    assert result.code == 2
    assert result.json["summary"]["identical"] == 29
    (line,) = result.err.splitlines()
    assert "layers.15.weight" in line
    assert "own header contradicts" in line


@pytest.mark.parametrize(("place", "change"), [(7, b"O"), (10 - 46, b"\10")])
def test_wrong_central_directory_is_reported_as_on_disk(file_server, statecli, place, change):
    """If a storage is missing or marked as compressed, all local headers are fetched, so that the error is as precise
    as on disk.
    """
    path = write_archive(file_server.folder / "m.pt", 30, 30_000)
    raw = path.read_bytes()
    at = raw.rindex(b"m/data/15") + place
    path.write_bytes(raw[:at] + change + raw[at + len(change) :])
    local, remote = (statecli("inspect", target, "-f", "json") for target in (path, file_server.url("m.pt")))
    assert (remote.code, remote.out) == (local.code, local.out) == (2, "")
    assert remote.err.replace(file_server.url("m.pt"), str(path)) == local.err


def rename_record(path: Path, name: str, by: int = 0) -> None:
    """Change the name in the record's local header."""
    with zipfile.ZipFile(path) as zip_file:
        at = zip_file.getinfo(name).header_offset + 30
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + b"M" + raw[at + 1 :])


@pytest.mark.parametrize(
    ("spoilt", "code", "expected_message"),
    [(move_record, 2, "checksum-mismatch"), (rename_record, 2, "header contradicts")],
)
def test_audit_checks_every_local_header(file_server, statecli, spoilt, code, expected_message):
    """An audit checks the file itself, so a contradicting header gives the same findings as on disk."""
    path = write_archive(file_server.folder / "m.pt", 30, 30_000)
    spoilt(path, "m/data/15", 8)
    local, remote = (statecli("audit", "--values", "-f", "json", target) for target in (path, file_server.url("m.pt")))
    assert remote.code == local.code == code
    assert remote.out.replace(file_server.url("m.pt"), str(path)) == local.out
    assert remote.err.replace(file_server.url("m.pt"), str(path)) == local.err
    assert expected_message in local.out + local.err


def test_archive_of_another_program_is_read_as_on_disk(file_server, statecli):
    """Without torch's padding no offset is guessed: the values are the same as on disk."""
    torch_archive = write_archive(file_server.folder / "torch.pt", 5, 30_000)
    with zipfile.ZipFile(torch_archive) as zip_file, zipfile.ZipFile(file_server.folder / "m.pt", "w") as packed:
        for name in zip_file.namelist():
            packed.writestr(name, zip_file.read(name))
    local = statecli("inspect", file_server.folder / "m.pt", "--stats", "-f", "json")
    remote = statecli("inspect", file_server.url("m.pt"), "--stats", "-f", "json")
    assert remote.code == local.code == 0
    assert remote.json["tensors"] == local.json["tensors"]


def test_record_with_another_name_is_not_read(file_server, statecli):
    """The pickle's own local header is checked too, because the reader has its bytes already."""
    path = write_archive(file_server.folder / "m.pt", 3, 1000)
    path.write_bytes(path.read_bytes().replace(b"m/data.pkl", b"m/dota.pkl", 1))
    result = statecli("inspect", file_server.url("m.pt"))
    assert (result.code, "own header contradicts" in result.err) == (2, True)


@pytest.mark.parametrize("question", [("lock", "-o", "-"), ("audit",), ("inspect",)], ids=lambda question: question[0])
def test_name_with_a_section_is_not_tried_as_a_folder(file_server, statecli, question):
    """Neither a file nor a folder is called `m.ckpt#model`: the name is requested once, and then its file is read."""
    torch.save({"model": {"w": torch.zeros(30_000)}, "optimizer": {"state": {}}}, file_server.folder / "m.ckpt")
    asked_first, *others = question
    assert statecli(asked_first, f"{file_server.url()}m.ckpt#model", *others).code == 0
    assert {request.path for request in file_server.requests} <= {"m.ckpt#model", "m.ckpt"}
    assert len(file_server.requests) <= 3


def write_arrays(path: Path) -> Path:
    """Write stored (not deflated) arrays: large arrays, and between them small arrays fetched with their neighbours."""
    random = np.random.default_rng(0)
    sizes = [1_500_000, 1000, 3, 40_000, 1_500_000, 1000]
    np.savez(path / "m.npz", **{f"a{i}": random.normal(size=size) for i, size in enumerate(sizes)})
    return path / "m.npz"


@pytest.mark.parametrize("question", [*VALUE_COMMANDS, ("audit", "--values")], ids=lambda question: question[0])
def test_checksum_of_an_array_fetches_no_bytes_again(file_server, statecli, question):
    """The checksum covers the array's header too, whose bytes were fetched to list the array."""
    path = write_arrays(file_server.folder)
    assert statecli(*question, file_server.url("m.npz")).code == 0
    assert file_server.sent <= path.stat().st_size + (16 << 10)


@pytest.mark.parametrize("question", VALUE_COMMANDS)
@pytest.mark.parametrize("place", [-20, 100, 11_000_000])
def test_damaged_array_is_found_by_its_checksum(file_server, statecli, question, place):
    """Damage in the array's header, near its beginning or in its middle; on disk the checksum is verified before
    listing.
    """
    path = write_arrays(file_server.folder)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"\x93NUMPY", len(raw) // 2) + 128 + place
    assert (raw[at] == ord(" ")) == (place < 0)
    raw[at] ^= ord(" ") ^ ord("\t")
    path.write_bytes(raw)
    local, remote = (statecli(*question, target) for target in (path, file_server.url("m.npz")))
    assert (remote.code, remote.out, local.code) == (2, "", 2)
    for result, where in ((remote, file_server.url("m.npz")), (local, path)):
        assert result.err.startswith(f"statecli: {where}: a")
        assert "checksum wrong: " in result.err


# --- all other formats: number of requests, and percentage of the bytes


def write_legacy(path: Path) -> Path:
    state = {f"layers.{i}.weight": torch.zeros(30_000) for i in range(200)}
    torch.save(state, path / "m.pt", _use_new_zipfile_serialization=False)
    return path / "m.pt"


def write_gguf(path: Path) -> Path:
    writer = pytest.importorskip("gguf").GGUFWriter(path / "m.gguf", "llama")
    writer.add_token_list([f"token {i:06d} {'x' * 20}" for i in range(30_000)])
    for i in range(20):
        writer.add_tensor(f"blk.{i}.weight", np.zeros((1250, 2000), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "m.gguf"


def write_npz(path: Path) -> Path:
    np.savez(path / "m.npz", **{f"a{i}": np.zeros(50_000) for i in range(50)})
    return path / "m.npz"


def write_deflated_npz(path: Path) -> Path:
    random = np.random.default_rng(0)
    np.savez_compressed(path / "m.npz", **{f"a{i}": random.normal(size=50_000) for i in range(50)})
    return path / "m.npz"


def write_flax(path: Path) -> Path:
    body = pack([[300_000], "float32", bytes(1_200_000)])
    tree = {f"layers_{i}": {"kernel": Extension(1, body)} for i in range(50)}
    (path / "m.msgpack").write_bytes(pack({"params": tree}))
    return path / "m.msgpack"


def write_torchscript(path: Path) -> Path:
    layers = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(30)))
    torch.jit.save(torch.jit.script(layers), path / "m.pt")
    return path / "m.pt"


def write_torch_export(path: Path) -> Path:
    layers = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(30)))
    torch.export.save(torch.export.export(layers, (torch.zeros(1, 400),)), path / "m.pt2")
    return path / "m.pt2"


def write_dcp_of_many_files(path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    state = {f"layers.{i}.weight": torch.zeros(30_000) for i in range(100)} | {f"note{i}": f"{i}" for i in range(20)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path / "m", single_file_per_rank=False), no_dist=True)
    return path / "m"


@pytest.mark.parametrize(
    ("write", "requests", "percent"),
    [
        (write_legacy, 3, 1),
        (write_gguf, 6, 2.5),
        (write_npz, 2 + 50, 2),
        (write_deflated_npz, 2 + 50, 2),
        (write_flax, 1 + 50, 2),
        (write_torchscript, 4, 2),
        (write_torch_export, 5, 2),
        (write_dcp_of_many_files, 1 + 120, 10),
    ],
)
def test_listing_of_any_format_fetches_few_bytes(file_server, statecli, write, requests, percent):
    """The listing is the same as on disk and takes at most this number of requests and this percentage of the bytes."""
    path = write(file_server.folder)
    file_server.listing = "python"
    url = file_server.url(path.name) + "/" * path.is_dir()
    remote, local = (statecli("inspect", target, "-f", "json") for target in (url, path))
    assert remote.code == local.code == 0
    assert remote.json["tensors"] == local.json["tensors"]
    size = sum(target.stat().st_size for target in ([path] if path.is_file() else path.iterdir()))
    assert len(list_ranges(file_server)) <= requests
    assert sum(request.sent for request in file_server.requests if request.status == 206) <= size * percent / 100


def write_dcp_of_a_single_file(path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    state = {f"layers.{i}.weight": torch.randn(30_000) for i in range(60)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path / "m"), no_dist=True)
    return path / "m"


def write_torch_save(path: Path) -> Path:
    return write_archive(path / "m.pt", 60, 30_000)


@pytest.mark.parametrize(
    ("write", "percent"), [(write_deflated_npz, 2), (write_dcp_of_a_single_file, 6), (write_torch_save, 3)]
)
def test_audit_requests_each_record_once_and_in_parallel(file_server, statecli, write, percent):
    """The search for pickles takes at most a request per record, 40 of them at the same time."""
    path = write(file_server.folder)
    file_server.listing = "python"
    crowd = Crowd(40)
    file_server.behave("m*[tzp]", After(2, crowd))
    assert statecli("audit", file_server.url(path.name) + "/" * path.is_dir()).code == 0
    assert crowd.most >= 40
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    assert len(list_ranges(file_server)) <= 60 + 6
    assert file_server.sent <= size * percent / 100


def test_files_of_many_ranks_are_requested_in_parallel(file_server, statecli):
    """The files of a distributed checkpoint are requested together, not in a chain of requests."""
    write_dcp_of_many_files(file_server.folder)
    file_server.listing = "python"
    crowd = Crowd(50)
    file_server.behave("*.distcp", crowd)
    assert statecli("inspect", file_server.url("m/")).code == 0
    assert crowd.most >= 50


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_empty_file_is_reported_as_on_disk(file_server, statecli, name):
    """An audit of a folder with an empty file reports the same as on disk, including the list of rules that ran."""
    path = write_dcp_of_a_single_file(file_server.folder)
    (path / name).write_bytes(b"")
    file_server.listing = "python"
    local, remote = (statecli("audit", "--no-values", "-f", "json", target) for target in (path, file_server.url("m")))
    assert remote.code == local.code == 2
    assert remote.out.replace(file_server.url("m"), str(path)) == local.out
    assert remote.err.replace(file_server.url("m"), str(path)) == local.err
