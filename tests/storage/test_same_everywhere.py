"""A checkpoint has the same results on disk, on a web server, in S3, in Google's storage and on the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from statecli.storage import files

from ..formats.test_format_equality import WRITERS, dcp, npz_deflated, safetensors, torch_zip

STORES = ("http", "s3", "gs", "hub")
#: Each format is read from a web server. All places serve ranges in the same way, so that elsewhere four kinds of
#: reads are enough: a header and values, an archive, a listed folder, compressed records.
CASES = [
    *(("http", write) for write in (safetensors, *WRITERS)),
    *((place, write) for place in STORES[1:] for write in (safetensors, torch_zip, dcp, npz_deflated)),
]
COMMANDS = (
    ("inspect", "-f", "json"),
    ("inspect", "--stats", "-f", "json"),
    ("audit", "--no-values", "-f", "json"),
    ("audit", "--values", "-f", "json"),
    ("lock", "-o", "-"),
)


@pytest.fixture(params=STORES)
def upload(request) -> Callable[[Path], str]:
    """Return a function that puts a folder's files behind a URL and returns the URL."""

    def http(folder: Path) -> str:
        file_server = request.getfixturevalue("file_server")
        file_server.listing = "python"
        shutil.copytree(folder, file_server.folder / "made")
        return file_server.url("made")

    def s3(folder: Path) -> str:
        bucket = request.getfixturevalue("bucket")
        bucket.upload(folder)
        return "s3://models"

    def gs(folder: Path) -> str:
        shutil.copytree(folder, request.getfixturevalue("cloud_storage").folder / "bucket")
        return "gs://bucket"

    def hub(folder: Path) -> str:
        shutil.copytree(folder, request.getfixturevalue("hub").folder / "org" / "net")
        return "hf://org/net"

    files.forget_command()
    return {"http": http, "s3": s3, "gs": gs, "hub": hub}[request.param]


@pytest.mark.parametrize(
    ("upload", "write"), CASES, ids=lambda part: part if isinstance(part, str) else part.__name__, indirect=["upload"]
)
def test_every_store_gives_the_results_of_the_disk(write, upload, tmp_path, statecli):
    """Each command gives the same JSON and lock except for the name; a diff with the disk is empty; the lock holds."""
    local_folder = tmp_path / "made"
    (local_folder / "net").mkdir(parents=True)
    path = write(local_folder / "net")
    folder_url = upload(local_folder)
    url = folder_url + str(path).removeprefix(str(local_folder))
    for question in COMMANDS:
        local, remote = statecli(*question, path), statecli(*question, url)
        assert (remote.code, remote.err.replace(folder_url, str(local_folder))) == (local.code, local.err)
        assert remote.out.replace(folder_url, str(local_folder)) == local.out
    diff = statecli("diff", path, url, "-f", "json")
    assert (diff.code, diff.err, diff.json["changes"]) == (0, "", [])
    lock = tmp_path / "made.lock"
    assert statecli("lock", path, "-o", lock).code == 0
    result, remote_result = (
        statecli("audit", target, "--lock", lock, "--select", "lock-mismatch") for target in (path, url)
    )
    assert (remote_result.code, remote_result.out.replace(folder_url, str(local_folder))) == (result.code, result.out)
    assert result.code == 0


def test_lock_of_the_disk_finds_a_change_in_a_store(upload, tmp_path, statecli):
    """A lock of the file on disk finds a single changed element of the file behind the URL, and so does a diff."""
    import torch
    from safetensors.torch import load_file, save_file

    local_folder = tmp_path / "made"
    local_folder.mkdir()
    path = safetensors(local_folder)
    lock = tmp_path / "made.lock"
    assert statecli("lock", path, "-o", lock).code == 0
    file = load_file(path)
    file["steps"][1, 1] += 1
    (tmp_path / "other").mkdir()
    save_file(file, tmp_path / "other" / path.name)
    assert torch.equal(file["scale"], torch.tensor(3.5))
    url = f"{upload(tmp_path / 'other')}/{path.name}"
    findings = statecli("audit", url, "--lock", lock, "--select", "lock-mismatch", "-f", "json").json["findings"]
    assert [(tensor["rule"], tensor["fqn"], tensor["target"]) for tensor in findings] == [
        ("lock-mismatch", "steps", url)
    ]
    differ = statecli("diff", path, url, "-f", "json").json["changes"]
    assert [(tensor["fqn"], tensor["values"]["changed"]) for tensor in differ] == [("steps", 1)]
