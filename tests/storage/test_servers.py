"""The servers of the other tests: each server is checked with the library for the real service."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import SECRET
from .hub import SIGNATURE
from .server import (
    After,
    Basic,
    Bearer,
    Cut,
    Delay,
    Gzip,
    Headers,
    OtherRange,
    Redirect,
    Refuse,
    Server,
    Signed,
    Stall,
    Times,
    WrongTotal,
    ignore_range,
    login_page,
    reply_chunked,
)

urllib3 = pytest.importorskip("urllib3")
DATA = bytes(range(256)) * 4


@pytest.fixture
def server(served):
    (served.folder / "m.bin").write_bytes(DATA)
    (served.folder / "sub dir").mkdir()
    (served.folder / "sub dir" / "ü&.bin").write_bytes(b"x")
    return served


@pytest.fixture
def pool():
    with urllib3.PoolManager(retries=False, timeout=20) as manager:
        yield manager


def ask(pool, url, span=None, method="GET", **options):
    headers = {"Range": f"bytes={span}"} if span else {}
    return pool.request(method, url, headers=headers | options.pop("headers", {}), **options)


@pytest.mark.parametrize(
    ("span", "expected", "said"),
    [("0-9", DATA[:10], "0-9"), ("1000-", DATA[1000:], "1000-1023"), ("-5", DATA[-5:], "1019-1023")],
)
def test_a_range_is_answered_exactly(server, pool, span, expected, said):
    """206, Content-Range, and only the requested bytes; both ends, an open end, a suffix."""
    reply = ask(pool, server.url("m.bin"), span)
    assert (reply.status, reply.data, reply.headers["Content-Range"]) == (206, expected, f"bytes {said}/1024")
    assert reply.headers["ETag"]
    assert reply.headers["Last-Modified"].endswith("GMT")
    [request] = server.requests
    assert (request.method, request.path, request.range) == ("GET", "m.bin", f"bytes={span}")
    assert (request.status, request.sent) == (206, len(expected))


def test_head_has_the_headers_and_no_bytes(server, pool):
    """HEAD gives the size and sends no bytes; a missing file is 404, a range beyond the end 416, a changed file 412."""
    reply = ask(pool, server.url("m.bin"), method="HEAD")
    assert (reply.headers["Content-Length"], reply.headers["Accept-Ranges"], reply.data) == ("1024", "bytes", b"")
    assert ask(pool, server.url("no.bin")).status == 404
    assert ask(pool, server.url("../server.py")).status == 404
    beyond = ask(pool, server.url("m.bin"), "1024-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, "bytes */1024")
    assert ask(pool, server.url("m.bin"), headers={"If-Match": '"another"'}).status == 412
    assert [request.method for request in server.requests] == ["HEAD"] + ["GET"] * 4


def test_one_connection_serves_many_requests(server, pool):
    """Connections stay open, so that round trips can be counted; 64 connections work at once."""
    for _ in range(3):
        ask(pool, server.url("m.bin"), "0-0")
    assert pool.connection_from_url(server.url()).num_connections == 1
    server.behave("*", Delay(0.001))
    with ThreadPoolExecutor(64) as many, urllib3.PoolManager(maxsize=64, retries=False) as wide:
        replies = many.map(lambda at: ask(wide, server.url("m.bin"), f"{at}-{at}").data, range(200))
        assert b"".join(replies) == DATA[:200]
    assert len(server.requests) == 203
    assert server.sent == 203


@pytest.mark.parametrize("style", ["python", "nginx"])
def test_a_folder_is_listed_as_other_servers_list_it(server, pool, style):
    """The page's links lead to the files; a folder without its slash is redirected to the URL with a slash."""
    server.listing = style
    names = re.findall(r'href="([^"]+)"', ask(pool, server.url()).data.decode())
    assert [name for name in names if name != "../"] == (
        ["m.bin", "sub%20dir/"] if style == "python" else ["sub%20dir/", "m.bin"]
    )
    inner = ask(pool, server.url("sub dir"), redirect=True, retries=3)
    assert inner.status == 200
    assert "%C3%BC%26.bin" in inner.data.decode()
    assert "ü&amp;.bin" in inner.data.decode()


def test_pythons_listing_is_pythons(server, pool):
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
        expected = ask(pool, f"http://127.0.0.1:{real.server_port}/").data.decode()
        thread.join()
    # Newer releases of Python write the style and the colour scheme too.
    expected = re.sub(r"<style.*?</style>\n|<meta name=.*?>\n", "", expected, flags=re.DOTALL)
    assert ask(pool, server.url()).data.decode() == expected


def test_a_server_that_ignores_ranges_counts_what_was_taken(server, pool):
    """200 and the whole file; the server knows how much of 64 MB a client took before it hung up."""
    with (server.folder / "big.bin").open("wb") as file:
        file.truncate(64 << 20)
    server.behave("*", ignore_range)
    assert ask(pool, server.url("m.bin"), "0-9").data == DATA
    reply = ask(pool, server.url("big.bin"), "0-9", preload_content=False)
    assert (reply.status, "Accept-Ranges" in reply.headers) == (200, False)
    reply.read(10)
    reply.close()
    assert server.requests[-1].status == 200
    assert 10 <= server.requests[-1].sent < 16 << 20


def test_redirects_lead_elsewhere_or_nowhere(server, pool, tmp_path):
    """A redirect leads to a path, to another server, or in a circle."""
    server.behave("a", Redirect("m.bin", 307))
    assert ask(pool, server.url("a"), "0-1", retries=3).data == DATA[:2]
    with Server(server.folder) as other:
        server.behave("b", Redirect(other.url("m.bin")))
        assert ask(pool, server.url("b"), retries=3).data == DATA
        assert [request.path for request in other.requests] == ["m.bin"]
    server.behave("c", Redirect("c"))
    with pytest.raises(urllib3.exceptions.MaxRetryError, match="too many redirects"):
        ask(pool, server.url("c"), retries=3)


@pytest.mark.parametrize("after", [None, 0, 100])
def test_a_stalled_answer_waits_until_it_is_released(server, pool, after):
    """The server sends nothing, only headers, or some bytes, and sends the rest when the test releases the answer."""
    stall = Stall(after)
    server.behave("m.bin", stall)
    with pytest.raises((urllib3.exceptions.ReadTimeoutError, urllib3.exceptions.ProtocolError)):
        ask(pool, server.url("m.bin"), timeout=0.1)
    assert server.requests[0].sent == (after or 0)
    stall.release.set()
    assert ask(pool, server.url("m.bin")).data == DATA


def test_a_stalled_answer_does_not_keep_the_server(tmp_path):
    """The end of `with` ends stalled answers and open connections."""
    (tmp_path / "m.bin").write_bytes(DATA)
    with Server(tmp_path) as server, urllib3.PoolManager(retries=False, timeout=20) as pool:
        ask(pool, server.url("m.bin"))
        server.behave("m.bin", Stall(100))
        with ThreadPoolExecutor(1) as thread_pool_executor:
            waiting = thread_pool_executor.submit(ask, pool, server.url("m.bin"))
            while len(server.requests) < 2:
                pass
            server.close()
            with pytest.raises(urllib3.exceptions.HTTPError):
                waiting.result()
        with pytest.raises(urllib3.exceptions.HTTPError):
            ask(pool, server.url("m.bin"))


def test_a_connection_is_cut(server, pool):
    """The connection ends after so many bytes, or before the headers; twice, and then no more."""
    server.behave("m.bin", Times(2, Cut(100)))
    for _ in range(2):
        with pytest.raises(urllib3.exceptions.ProtocolError):
            ask(pool, server.url("m.bin"))
    assert ask(pool, server.url("m.bin")).data == DATA
    assert [request.sent for request in server.requests] == [100, 100, 1024]
    server.behave("m.bin", Cut(None))
    with pytest.raises(urllib3.exceptions.ProtocolError):
        ask(pool, server.url("m.bin"))


def test_a_range_is_answered_with_another(server, pool):
    """Another range with an honest Content-Range, another range with a false one, and a wrong total."""
    server.behave("m.bin", OtherRange(7))
    reply = ask(pool, server.url("m.bin"), "0-9")
    assert (reply.data, reply.headers["Content-Range"]) == (DATA[7:17], "bytes 7-16/1024")
    server.behave("m.bin", OtherRange(7, said=False))
    reply = ask(pool, server.url("m.bin"), "0-9")
    assert (reply.data, reply.headers["Content-Range"]) == (DATA[7:17], "bytes 0-9/1024")
    server.behave("m.bin", WrongTotal("*"))
    assert ask(pool, server.url("m.bin"), "0-9").headers["Content-Range"] == "bytes 0-9/*"


def test_refusals_and_login_pages(server, pool):
    """A refusal has any status and headers, n times; a login page has status 200, also after a redirect."""
    server.behave("m.bin", Times(1, Refuse(503, Retry_After="1")))
    reply = ask(pool, server.url("m.bin"))
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert ask(pool, server.url("m.bin")).status == 200
    server.behave("m.bin", Redirect("login"))
    server.behave("login", login_page)
    reply = ask(pool, server.url("m.bin"), "0-7", retries=3)
    assert (reply.status, reply.headers["Content-Type"].partition(";")[0]) == (200, "text/html")


def test_credentials_are_asked_for(server, pool):
    """A name and password, a token, a signature in the query: without them 401 or 403, with them the file."""
    server.behave("m.bin", Basic("me", SECRET))
    reply = ask(pool, server.url("m.bin"))
    assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, 'Basic realm="models"')
    assert ask(pool, server.url("m.bin"), headers=urllib3.make_headers(basic_auth=f"me:{SECRET}")).data == DATA
    server.behave("m.bin", Bearer(SECRET))
    assert ask(pool, server.url("m.bin")).status == 401
    assert ask(pool, server.url("m.bin"), headers={"Authorization": f"Bearer {SECRET}"}).data == DATA
    server.behave("m.bin", Signed("X-Amz-Signature", SECRET))
    assert ask(pool, server.url("m.bin") + "?X-Amz-Signature=other").status == 403
    assert ask(pool, server.url("m.bin") + f"?X-Amz-Signature={SECRET}", "0-3").data == DATA[:4]


def test_bodies_are_encoded(server, pool):
    """gzip for clients that accept gzip, or for all; chunks without a length."""
    server.behave("m.bin", Gzip())
    assert "Content-Encoding" not in ask(pool, server.url("m.bin")).headers
    reply = ask(pool, server.url("m.bin"), headers={"Accept-Encoding": "gzip"})
    assert (reply.headers["Content-Encoding"], reply.data) == ("gzip", DATA)
    server.behave("m.bin", Gzip(always=True))
    assert ask(pool, server.url("m.bin"), decode_content=False).data != DATA
    server.behave("m.bin", reply_chunked)
    reply = ask(pool, server.url("m.bin"))
    assert ("Content-Length" in reply.headers, reply.headers["Transfer-Encoding"], reply.data) == (
        False,
        "chunked",
        DATA,
    )


def test_a_file_changes_between_two_requests(server, pool):
    """From the second request on, the file has another ETag."""
    server.behave("m.bin", After(1, Headers(ETag='"other"', Last_Modified=None)))
    first, second = (ask(pool, server.url("m.bin"), "0-1") for _ in range(2))
    assert first.headers["ETag"] != second.headers["ETag"] == '"other"'
    assert "Last-Modified" not in second.headers


def test_a_client_that_comes_and_goes_is_no_error(server):
    """A client sends half a request or nothing, and the server continues."""
    for sent in (b"", b"GET /m.b", b"GET /m.bin HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", int(server.address.split(":")[1]))) as connection:
            connection.sendall(sent)
    with urllib.request.urlopen(server.url("m.bin")) as reply:  # noqa: S310 - the test's own server
        assert reply.read() == DATA


# --- the S3 API


def test_s3fs_reads_a_bucket_by_the_environment_alone(bucket, tmp_path):
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


def test_s3_without_credentials_is_refused(bucket, monkeypatch):
    """The tests do not see the account of the user who runs them."""
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Exception, match="Unable to locate credentials"):
        s3fs.S3FileSystem(skip_instance_cache=True).cat_file(bucket.url("a.bin"), start=0, end=10)


# --- the Hugging Face Hub


@pytest.fixture
def repo(hub):
    for name, data in {"org/net": DATA, "org/net@v1": DATA[::-1]}.items():
        folder = hub.folder / name
        (folder / "sub").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(data)
        (folder / "sub" / "config.json").write_text("{}")
    return "org/net"


def test_the_hub_lists_and_serves_a_repository(hub, repo):
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


def test_the_hub_says_what_a_url_is_of(hub, repo):
    """The answer to HEAD has the commit, the size and the ETag before the redirect to a signed URL."""
    library = pytest.importorskip("huggingface_hub")
    hf_file_metadata = library.get_hf_file_metadata(library.hf_hub_url(repo, "model.safetensors"))
    assert (hf_file_metadata.commit_hash, hf_file_metadata.size) == (hub.commit(repo), 1024)
    assert SIGNATURE in hf_file_metadata.location
    small = library.get_hf_file_metadata(library.hf_hub_url(repo, "sub/config.json", revision="v1"))
    assert small.commit_hash == hub.commit(repo, "v1")
    assert library.HfApi().repo_info(repo, revision="v1").sha == hub.commit(repo, "v1")


def test_the_hub_refuses_as_the_real_one(hub, repo):
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


def test_gcsfs_reads_a_bucket_by_the_environment_alone(cloud_storage):
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


def test_nothing_of_the_users_accounts_is_there():
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
