"""The servers of the other tests: each server is checked with the library for the real service."""

from __future__ import annotations

import os
import re

import pytest

from .conftest import SECRET
from .hub import SIGNATURE

urllib3 = pytest.importorskip("urllib3")
DATA = bytes(range(256)) * 4


@pytest.fixture
def server(file_server):
    (file_server.folder / "m.bin").write_bytes(DATA)
    (file_server.folder / "sub dir").mkdir()
    (file_server.folder / "sub dir" / "ü&.bin").write_bytes(b"x")
    return file_server


@pytest.fixture
def pool():
    with urllib3.PoolManager(retries=False, timeout=20) as manager:
        yield manager


def send_request(pool, url, span=None, method="GET", **options):
    headers = {"Range": f"bytes={span}"} if span else {}
    return pool.request(method, url, headers=headers | options.pop("headers", {}), **options)


@pytest.mark.parametrize(
    ("span", "expected", "sent_span"),
    [("0-9", DATA[:10], "0-9"), ("1000-", DATA[1000:], "1000-1023"), ("-5", DATA[-5:], "1019-1023")],
)
def test_range_is_answered_exactly(server, pool, span, expected, sent_span):
    """206, Content-Range, and only the requested bytes; both ends, an open end, a suffix."""
    reply = send_request(pool, server.url("m.bin"), span)
    assert (reply.status, reply.data, reply.headers["Content-Range"]) == (206, expected, f"bytes {sent_span}/1024")
    assert reply.headers["ETag"]
    assert reply.headers["Last-Modified"].endswith("GMT")
    [request] = server.requests
    assert (request.method, request.path, request.range) == ("GET", "m.bin", f"bytes={span}")
    assert (request.status, request.sent) == (206, len(expected))


def test_head_has_the_headers_and_no_bytes(server, pool):
    """HEAD gives the size and sends no bytes; a missing file is 404, a range beyond the end 416, a changed file 412."""
    reply = send_request(pool, server.url("m.bin"), method="HEAD")
    assert (reply.headers["Content-Length"], reply.headers["Accept-Ranges"], reply.data) == ("1024", "bytes", b"")
    assert send_request(pool, server.url("no.bin")).status == 404
    assert send_request(pool, server.url("../server.py")).status == 404
    beyond = send_request(pool, server.url("m.bin"), "1024-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, "bytes */1024")
    assert send_request(pool, server.url("m.bin"), headers={"If-Match": '"another"'}).status == 412
    assert [request.method for request in server.requests] == ["HEAD"] + ["GET"] * 4


def test_python_listing_equals_the_page_of_http_server(server, pool):
    """The page is the same as http.server's page, byte for byte."""
    import functools
    import threading
    from http.server import HTTPServer, SimpleHTTPRequestHandler

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server.listing = "python"
    with HTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=server.folder)) as real:
        thread = threading.Thread(target=real.handle_request)
        thread.start()
        expected = send_request(pool, f"http://127.0.0.1:{real.server_port}/").data.decode()
        thread.join()
    # Newer releases of Python write the style and the colour scheme too.
    expected = re.sub(r"<style.*?</style>\n|<meta name=.*?>\n", "", expected, flags=re.DOTALL)
    assert send_request(pool, server.url()).data.decode() == expected


# --- the S3 API


def test_s3fs_reads_a_bucket_with_environment_settings(bucket, tmp_path):
    """AWS_ENDPOINT_URL and the keys lead s3fs to the bucket: listing, size, a range, and missing files."""
    s3fs = pytest.importorskip("s3fs")
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "sub" / "a.bin").write_bytes(DATA)
    bucket.upload(tmp_path / "m")
    system = s3fs.S3FileSystem()
    assert system.ls(bucket.url("sub"), detail=False) == ["models/sub/a.bin"]
    assert system.isdir(bucket.url("sub"))
    assert system.info(bucket.url("sub/a.bin"))["size"] == 1024
    assert system.cat_file(bucket.url("sub/a.bin"), start=100, end=110) == DATA[100:110]
    for missing in (bucket.url("no.bin"), "s3://no-such-bucket/a.bin"):
        with pytest.raises(FileNotFoundError):
            system.cat_file(missing, start=0, end=10)


# --- the Hugging Face Hub


@pytest.fixture
def repo(hub):
    for name, data in {"org/net": DATA, "org/net@v1": DATA[::-1]}.items():
        folder = hub.folder / name
        (folder / "sub").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(data)
        (folder / "sub" / "config.json").write_text("{}")
    return "org/net"


def test_hub_lists_and_serves_a_repository(hub, repo):
    """HfFileSystem lists and reads a repository at a branch, another revision and a commit."""
    system = pytest.importorskip("huggingface_hub").HfFileSystem(skip_instance_cache=True)
    assert system.ls(repo, detail=False) == [f"{repo}/model.safetensors", f"{repo}/sub"]
    assert system.find(repo) == [f"{repo}/model.safetensors", f"{repo}/sub/config.json"]
    assert system.isdir(f"{repo}/sub")
    assert system.info(f"{repo}/model.safetensors")["size"] == 1024
    assert system.cat_file(f"{repo}/model.safetensors", start=100, end=110) == DATA[100:110]
    assert system.cat_file(f"{repo}@v1/model.safetensors", start=0, end=4) == DATA[::-1][:4]
    commit = hub.commit(repo)
    assert system.cat_file(f"{repo}@{commit}/sub/config.json", start=0, end=2) == b"{}"
    assert [request.query["Signature"] for request in hub.cdn.requests] == [SIGNATURE] * 2


def test_hub_reports_commit_and_size_of_a_url(hub, repo):
    """The answer to HEAD has the commit, the size and the ETag before the redirect to a signed URL."""
    library = pytest.importorskip("huggingface_hub")
    hf_file_metadata = library.get_hf_file_metadata(library.hf_hub_url(repo, "model.safetensors"))
    assert (hf_file_metadata.commit_hash, hf_file_metadata.size) == (hub.commit(repo), 1024)
    assert SIGNATURE in hf_file_metadata.location
    small = library.get_hf_file_metadata(library.hf_hub_url(repo, "sub/config.json", revision="v1"))
    assert small.commit_hash == hub.commit(repo, "v1")
    assert library.HfApi().repo_info(repo, revision="v1").sha == hub.commit(repo, "v1")


def test_refusals_of_the_hub_are_recognised_by_the_library(hub, repo):
    """Missing, private, gated, no such revision, no such file: the library recognises each refusal by its header."""
    library = pytest.importorskip("huggingface_hub")
    errors = library.errors

    def metadata(name="model.safetensors", repo=repo, token=None, **options):
        return library.get_hf_file_metadata(library.hf_hub_url(repo, name, **options), token=token)

    hub.private[repo] = SECRET
    for token in (False, "hf_wrong"):
        with pytest.raises(errors.RepositoryNotFoundError):
            metadata(token=token)
    with pytest.raises(FileNotFoundError, match="repository not found"):
        library.HfFileSystem(token=False, skip_instance_cache=True).ls(repo)
    assert library.HfFileSystem(token=SECRET, skip_instance_cache=True).cat_file(
        f"{repo}/model.safetensors", start=0, end=2
    )
    hub.private.clear()
    hub.gated[repo] = SECRET
    assert library.HfFileSystem(token=False, skip_instance_cache=True).ls(repo)
    for token in (False, "hf_wrong"):
        with pytest.raises(errors.GatedRepoError):
            metadata(token=token)
    assert metadata(token=SECRET).size == 1024
    hub.gated.clear()
    with pytest.raises(errors.RevisionNotFoundError):
        metadata(revision="v2")
    with pytest.raises(errors.EntryNotFoundError):
        metadata("other.safetensors")
    with pytest.raises(errors.RepositoryNotFoundError):
        metadata(repo="org/none")


# --- Google Cloud Storage


def test_gcsfs_reads_a_bucket_with_environment_settings(cloud_storage):
    """STORAGE_EMULATOR_HOST leads gcsfs to the bucket: listing, size, a range, and missing or forbidden files."""
    gcsfs = pytest.importorskip("gcsfs.core")
    folder = cloud_storage.folder / "models" / "sub"
    folder.mkdir(parents=True)
    (folder / "a b.bin").write_bytes(DATA)
    system = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True)  # noqa: S106 - it is no secret
    assert system.ls("models/sub", detail=False) == ["models/sub/a b.bin"]
    assert system.isdir("models/sub")
    assert system.info("models/sub/a b.bin")["size"] == 1024
    assert system.cat_file("models/sub/a b.bin", start=100, end=110) == DATA[100:110]
    for missing in ("models/no.bin", "no-such-bucket/a.bin"):
        with pytest.raises(FileNotFoundError):
            system.cat_file(missing, start=0, end=10)
    cloud_storage.private.add("models")
    with pytest.raises(pytest.importorskip("gcsfs.retry").HttpError, match="Anonymous caller"):
        system.cat_file("models/sub/a b.bin", start=0, end=10)


def test_tests_see_no_account_of_the_user():
    """The tests do not see any key, token, proxy or configuration of the user who runs them."""
    names = {
        name for name in os.environ if name.startswith(("AWS_", "HF_", "GOOGLE_")) or name.lower().endswith("proxy")
    }
    assert names == {
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_EC2_METADATA_DISABLED",
        "HF_HOME",
        "HF_HUB_DISABLE_TELEMETRY",
    }
