"""What a chain lies in is read with all that holds for it alone: timeouts, ranges, versions, credentials, proxies."""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage import object_store as stores

from .proxy import Proxy
from .s3 import S3
from .server import After, Basic, Cut, Gzip, Headers, OtherRange, Refuse, Server, Stall, ignore_range, login_page

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("begun")

CACHES = ["simplecache", "filecache", "blockcache"]
WEIGHTS = {name: torch.randn(64, 1024) for name in "abcdefgh"}


@pytest.fixture
def local(served) -> Path:
    """A checkpoint of 2 MiB, as a file and in archives of each kind, behind a web server."""
    path = served.folder / "m.safetensors"
    save_file(WEIGHTS, path)
    for name, kind in (("a.zip", zipfile.ZIP_STORED), ("d.zip", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(served.folder / name, "w", kind) as file:
            file.writestr("before.bin", os.urandom(1 << 20))
            file.write(path, "in/m.safetensors")
            file.writestr("behind.bin", os.urandom(1 << 20))
    for name in ("a.tar", "a.tar.gz", "a.tgz"):
        with tarfile.open(served.folder / name, "w:gz" if name.endswith("gz") else "w") as file:
            file.addfile(tarfile.TarInfo("empty"), io.BytesIO())
            file.add(path, "in/m.safetensors")
    return path


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setenv("STATECLI_TIMEOUT", "1")
    monkeypatch.setenv("STATECLI_RETRIES", "0")


def chains(server: Server) -> list[str]:
    archives = {"zip": ("a.zip", "d.zip"), "tar": ("a.tar", "a.tar.gz", "a.tgz")}
    inner = [f"{kind}://in/m.safetensors::{server.url(name)}" for kind, names in archives.items() for name in names]
    return [*inner, *(f"{cache}::{server.url('m.safetensors')}" for cache in CACHES)]


def test_chains_have_what_the_file_has(served, local, statecli):
    """Archives, packed and not, and caches; all of the values are compared."""
    for url in chains(served):
        found = statecli("diff", url, str(local), "-f", "json")
        assert (found.code, found.err) == (0, ""), url
    assert statecli("diff", f"simplecache::zip://in/m.safetensors::{served.url('d.zip')}", str(local)).code == 0


@pytest.mark.parametrize(
    ("behaviour", "line"),
    [
        (Stall(10), "stalls: nothing came in 1 s"),
        (Stall(None), "stalls|no answer|nothing came"),
        (Cut(10), "the connection was cut"),
        (Refuse(503), "busy (HTTP 503)"),
        (Refuse(401), "a user and a password are needed (HTTP 401)"),
        (Refuse(403), "access is refused (HTTP 403)"),
        (Refuse(404), "is not there (HTTP 404)"),
        (login_page, "is an HTML page, perhaps a login or an error page"),
        (Gzip(always=True), "is sent compressed (gzip)"),
        (OtherRange(4096), "the server answered with bytes"),
    ],
)
def test_what_is_wrong_with_the_object_behind_a_chain(behaviour, line, served, local, impatient, statecli):
    """Is said as it is of the object alone, in one line, and ends 2."""
    served.behave("*", behaviour)
    for url in chains(served):
        found = statecli("inspect", url)
        assert (found.code, found.out, found.err.count("\n")) == (2, "", 1), found
        assert any(one in found.err for one in line.split("|")), found.err
        assert re.match(r"statecli: \w+:", found.err)


def test_an_archive_that_is_not_there_is_not_taken_for_its_member(served, local, statecli):
    """Which of the two is missing is said."""
    found = statecli("inspect", f"zip://in/m.safetensors::{served.url('none.zip')}")
    assert found.err.endswith("none.zip: the object behind its `::` is not there (HTTP 404)\n")
    assert [one.path for one in served.requests] == ["none.zip"]
    found = statecli("inspect", f"zip://in/none.pt::{served.url('a.zip')}")
    assert found.err.endswith("a.zip: is not there\n")


def test_a_server_without_ranges(served, local, statecli):
    """Sends an archive that is small whole, once."""
    served.behave("*", ignore_range)
    assert statecli("diff", f"zip://in/m.safetensors::{served.url('a.zip')}", str(local)).code == 0
    assert len(served.requests) == 1


@pytest.mark.parametrize("name", ["a.zip", "d.zip", "a.tar", "a.tar.gz"])
def test_another_archive_in_the_middle_is_noticed(name, served, local, statecli):
    """Wherever it begins: nothing of it is compared with the rest of the first one."""
    url = f"{'tar' if 'tar' in name else 'zip'}://in/m.safetensors::{served.url(name)}"
    assert statecli("lock", url, "-o", "-").code == 0
    count = len(served.requests)
    assert count > 2
    for n in range(1, count):
        files.forget_command()
        served.behave(name, After(n, Headers(ETag='"other"')))
        found = statecli("diff", url, str(local), "--name-status")
        assert (found.code, found.out) == (2, ""), n
        assert "changed while it was read: try again" in found.err


def test_another_archive_for_another_process_is_noticed(served, local, monkeypatch):
    """Which gets no more than what is known of the member: that holds what is known of the archive."""
    url = f"zip://in/m.safetensors::{served.url('a.zip')}"
    _, known = stores.open_store(url).get(url, 0, 8, None)
    files.forget_command()
    assert stores.open_store(url).get(url, 8, 8, known)[1] == known
    files.forget_command()
    served.behave("*", Headers(ETag='"other"'))
    with pytest.raises(UnreadableError, match="changed while it was read"):
        stores.open_store(url).get(url, 8, 8, known)


def test_the_next_command_reads_the_archive_anew(served, local, statecli):
    """Nothing of a chain outlives what was asked."""
    url = f"zip://in/m.safetensors::{served.url('a.zip')}"
    assert statecli("diff", url, str(local)).code == 0
    save_file({**WEIGHTS, "a": WEIGHTS["a"] + 1}, local.parent / "n.safetensors")
    with zipfile.ZipFile(served.folder / "a.zip", "w") as file:
        file.write(local.parent / "n.safetensors", "in/m.safetensors")
    assert statecli("diff", url, str(local), "--name-status").out == "M\ta\n"


def test_other_processes_read_chains(served, local, statecli):
    """A user and a password go with them."""
    served.behave("*", Basic("me", "pw-of-mine"))
    url = f"zip://in/m.safetensors::{served.url('d.zip').replace('://', '://me:pw-of-mine@')}"
    found = statecli("diff", url, str(local), "--executor", "processes:2")
    assert found.code == 0, found
    assert "pw-of-mine" not in found.out + found.err


def test_netrc_and_proxies_are_those_of_plain_urls(served, local, tmp_path, statecli, monkeypatch):
    """Both are asked for the object that a chain lies in."""
    url = f"zip://in/m.safetensors::{served.url('a.zip')}"
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pw-of-mine\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    served.behave("*", Basic("me", "pw-of-mine"))
    assert statecli("inspect", url).code == 0
    with Proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert statecli("inspect", url).code == 0
        assert proxy.asked


def test_s3_behind_a_chain_is_ours(tmp_path, statecli, monkeypatch):
    """Its objects are held to their version, and what it says is told."""
    pytest.importorskip("s3fs")
    (tmp_path / "bucket").mkdir()
    save_file(WEIGHTS, tmp_path / "bucket" / "m.safetensors")
    with zipfile.ZipFile(tmp_path / "bucket" / "a.zip", "w") as file:
        file.write(tmp_path / "bucket" / "m.safetensors", "m.safetensors")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody")
    with S3(tmp_path) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url().rstrip("/"))
        for chain in ("zip://m.safetensors::s3://bucket/a.zip", "simplecache::s3://bucket/m.safetensors"):
            s3.forget()
            assert statecli("inspect", chain).code == 0
            assert all(one.headers.get("if-match") for one in s3.requests[1:])
            assert {one.method for one in s3.requests} == {"GET"}
        found = statecli("inspect", "zip://m.safetensors::s3://none/a.zip")
        assert found.err.endswith("a.zip: its bucket is not there\n")


def test_a_member_that_is_not_packed_is_a_range(served, local, statecli):
    """A listing fetches its header; values are fetched once."""
    url = f"zip://in/m.safetensors::{served.url('a.zip')}"
    assert statecli("inspect", url).code == 0
    assert served.sent < 300_000
    served.forget()
    assert statecli("inspect", url, "--stats").code == 0
    assert served.sent < local.stat().st_size + 300_000


def test_a_packed_member_is_unpacked_once(served, local, statecli):
    """Whoever reads on goes on where another was."""
    url = f"zip://in/m.safetensors::{served.url('d.zip')}"
    assert statecli("inspect", url).code == 0
    assert served.sent < 600_000
    served.forget()
    assert statecli("inspect", url, "--stats").code == 0
    assert served.sent < 1.5 * local.stat().st_size


@pytest.mark.parametrize("name", ["a.zip", "d.zip", "a.tar.gz"])
def test_many_read_one_member(name, served, local):
    """From wherever they like."""
    url = f"{'tar' if 'tar' in name else 'zip'}://in/m.safetensors::{served.url(name)}"
    store, data = stores.open_store(url), local.read_bytes()
    places = [n * 70_001 % (len(data) - 1000) for n in range(60)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda n: store.get(url, n, 1000, None)[0], places))
    assert found == [data[n : n + 1000] for n in places]


def test_a_member_whose_bytes_are_damaged(served, local, statecli):
    """A packed one is an error of the archive, and no other bytes."""
    path = served.folder / "d.zip"
    data = bytearray(path.read_bytes())
    data[(1 << 20) + 1000 : (1 << 20) + 1100] = bytes(100)
    path.write_bytes(data)
    found = statecli("inspect", f"zip://in/m.safetensors::{served.url('d.zip')}", "--stats")
    assert found.code == 2
    assert "damaged" in found.err


def test_a_cut_leaves_no_half_of_a_file_in_a_cache(served, local, tmp_path, impatient, statecli, monkeypatch):
    """Which the next command would take for all of it."""
    monkeypatch.setitem(fsspec.config.conf, "simplecache", {"cache_storage": str(tmp_path / "kept")})
    url = f"simplecache::{served.url('m.safetensors')}"
    served.behave("m.safetensors", After(2, Cut(1000)))
    assert statecli("inspect", url).code == 2
    assert list((tmp_path / "kept").iterdir()) == []
    served.behave("m.safetensors")
    assert statecli("diff", url, str(local)).code == 0
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_folder_behind_a_cache(tmp_path, statecli):
    """Is listed as it is without."""
    (tmp_path / "run").mkdir()
    save_file(WEIGHTS, tmp_path / "run" / "m.safetensors")
    with Server(tmp_path, "python") as server:
        targets = statecli("audit", f"simplecache::{server.url('run/')}", "-f", "json").json["targets"]
        assert [one["target"] for one in targets] == [f"simplecache::{server.url('run/m.safetensors')}"]


def test_an_address_of_ipv6_is_no_link(statecli, impatient):
    """Its `::` leads to nothing."""
    found = statecli("inspect", "zip://m.pt::http://[::1]:9/a.zip")
    assert "the server cannot be reached" in found.err
