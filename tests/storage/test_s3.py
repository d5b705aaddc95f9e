"""S3: the requests and their credentials, and the messages after a refusal, a change or a broken connection."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.storage import files, object_store as stores
from statecli.storage.s3 import _list_folder

from .conftest import SECRET
from .s3 import S3, refuse_as_s3
from .server import After, HangUp, Headers, OtherRange, Redirect, Reply, Server, Stall, Times, ignore_range

pytest.importorskip("s3fs")
KEY = "AKIAIOSFODNN7EXAMPLE"


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """The S3 server that counts requests, without credentials."""
    (tmp_path / "s3" / "models").mkdir(parents=True)
    with S3(tmp_path / "s3") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url().rstrip("/"))
        yield server


@pytest.fixture
def aws_credentials(monkeypatch):
    """Set credentials in the environment variables of the AWS tools."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def write_checkpoint(folder: Path, name: str = "m.safetensors", size: int = 4) -> Path:
    """Write a checkpoint of a single tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.arange(size, dtype=torch.float32)}, folder / name)
    return folder / name


def list_requests(s3: S3) -> list[tuple[str, str, str | None]]:
    return [(request.method, request.path, request.range) for request in s3.requests]


# --- requests and bytes


def test_small_file_takes_a_single_request(s3, aws_credentials, statecli):
    """There is no HEAD request: the size comes with the first bytes; the request is signed."""
    write_checkpoint(s3.folder / "models" / "run")
    assert statecli("inspect", "s3://models/run/m.safetensors").code == 0
    assert list_requests(s3) == [("GET", "models/run/m.safetensors", "bytes=0-65535")]
    assert s3.requests[0].headers["authorization"].startswith("AWS4-HMAC-SHA256")


def test_folder_takes_its_listing_and_its_files(s3, aws_credentials, statecli):
    """All pages of the listing are read; they say which names are files or folders, so no name is requested again."""
    folder = s3.folder / "models" / "run"
    write_checkpoint(folder)
    for n in range(4):
        (folder / f"step-{n}").mkdir()
        (folder / f"step-{n}" / "log.txt").write_text("x")
    assert statecli("inspect", "s3://models/run/").code == 0
    paths = [request.path for request in s3.requests if "run/step-" not in request.query.get("prefix", "")]
    assert paths == ["models", "models", "models/run/m.safetensors"]
    assert len(s3.requests) == len(paths) + 4  # a look into each folder for files of DeepSpeed


def test_64_threads_read_at_once(s3, aws_credentials):
    """Each thread gets its own bytes, through the same client."""
    data = bytes(range(256)) * 4096
    (s3.folder / "models" / "big.bin").write_bytes(data)
    store, url = stores.open_store("s3://models/big.bin"), "s3://models/big.bin"
    with ThreadPoolExecutor(64) as threads:
        actual = list(threads.map(lambda n: store.get(url, n * 1000, 1000, None)[0], range(128)))
    assert b"".join(actual) == data[: 128 * 1000]


def _read_in_worker(url: str) -> bytes:
    return stores.open_store(url).get(url, 8, 4, None)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: forked workers")
def test_forked_process_can_read(s3, aws_credentials):
    """fsspec's thread stays with the parent process: each forked process has its own thread."""
    path = write_checkpoint(s3.folder / "models")
    assert _read_in_worker("s3://models/m.safetensors") == path.read_bytes()[8:12]
    with multiprocessing.get_context("fork").Pool(2) as processes:
        actual = processes.map_async(_read_in_worker, ["s3://models/m.safetensors"] * 4).get(60)
    assert actual == [path.read_bytes()[8:12]] * 4


# --- names


def test_listing_distinguishes_keys_from_folders():
    """A folder with the name of a key gets a slash; `folder//key` has no name and is left out."""

    class Answers:
        anon = False

    pages = [
        {"Contents": [{"Key": "run/a"}, {"Key": "run/"}], "IsTruncated": True, "NextContinuationToken": "x"},
        {"CommonPrefixes": [{"Prefix": "run/a/"}, {"Prefix": "run//"}, {"Prefix": "run/b/"}], "IsTruncated": False},
    ]

    async def answer(*_, **parameters):
        assert parameters["Prefix"] == "run/"
        return pages.pop(0)

    Answers._call_s3 = staticmethod(answer)
    assert asyncio.run(_list_folder(Answers, "s3://models/run")).folders == {"a": False, "a/": True, "b": True}


UNUSUAL_NAMES = ["a b", "a+b", "a%20b", "a%b", "ä€ 模型", "a=b&c", "a;b", "a[1]", "a'b", "a:b", "a..b", "a~b"]


def test_key_needs_no_quoting(bucket, tmp_path, statecli):
    """No character of a key is decoded or needs quoting; a walk and a glob find the key under the same name."""
    for name in UNUSUAL_NAMES:
        write_checkpoint(tmp_path / "up" / "odd", f"{name}.safetensors")
    bucket.upload(tmp_path / "up")
    urls = [bucket.url(f"odd/{name}.safetensors") for name in UNUSUAL_NAMES]
    for url in urls:
        assert statecli("inspect", url, "-f", "json").json["target"] == url
    for ways in (urls, [bucket.url("odd")], [bucket.url("odd/*")]):
        result = statecli("audit", *ways, "-f", "json")
        assert (result.code, sorted(target["target"] for target in result.json["targets"])) == (0, sorted(urls))


def test_typed_key_with_a_hash_needs_a_section(bucket, tmp_path, statecli):
    """A walk finds a key with a `#` as a file; a user who types the key adds a section."""
    write_checkpoint(tmp_path / "up" / "odd", "a#b.safetensors")
    bucket.upload(tmp_path / "up")
    url = bucket.url("odd/a#b.safetensors")
    for spelling in ("odd", "odd/", "odd/*", "o*/"):
        files.forget_command()
        result = statecli("audit", bucket.url(spelling), "-f", "json")
        assert (result.code, [target["target"] for target in result.json["targets"]]) == (0, [url])
    files.forget_command()
    assert statecli("lock", bucket.url("odd"), "-o", tmp_path / "one.lock").code == 0
    assert statecli("audit", bucket.url("odd"), "--lock", tmp_path / "one.lock").code == 0
    assert statecli("inspect", f"{url}#model").code == 0
    text = (
        "statecli read #b.safetensors as the name of a section; if # belongs to the file name, add a section such as "
        "#model after the name: #b.safetensors#model"
    )
    assert statecli("inspect", url).err == f"statecli: {bucket.url('odd/a')}: does not exist; {text}\n"


def test_question_mark_belongs_to_the_key(bucket, tmp_path, statecli):
    """`?` neither begins a query nor is a wildcard; listed keys can be read, even with a `#`."""
    for name in ("a#b?c.safetensors", "p#q/model.safetensors", "d?d/model.safetensors", "dxd/model.safetensors"):
        path = tmp_path / "up" / "odd" / name
        write_checkpoint(path.parent, path.name)
    bucket.upload(tmp_path / "up")
    for spelling, count in {
        "odd/": 4,
        "odd": 4,
        "odd/*": 4,
        "odd/*/": 3,
        "odd/d?d": 1,
        "odd/d?*": 1,
        "odd/d?d/*": 1,
    }.items():
        files.forget_command()
        result = statecli("audit", bucket.url(spelling), "-f", "json")
        assert (result.code, len(result.json["targets"]), result.err) == (0, count, ""), spelling
    files.forget_command()
    for spelling in ("odd/d?d", "odd/d?d/", "odd/d?d/model.safetensors"):
        assert statecli("inspect", bucket.url(spelling)).code == 0


def test_missing_folder_is_reported(bucket, statecli):
    """A folder is missing with a slash as without; a folder created without files is empty."""
    for url in (bucket.url("nope"), bucket.url("nope/")):
        for command in ("inspect", "audit"):
            assert f"{url}: does not exist\n" in statecli(command, url).err
    bucket._client.put_object(Bucket=bucket.name, Key="made/", Body=b"")
    assert statecli("inspect", bucket.url("made/")).err == f"statecli: {bucket.url('made/')}: is an empty folder\n"


def test_walk_lists_a_folder_once(s3, aws_credentials, statecli):
    """No request is repeated, even for folders with a slash at the end."""
    write_checkpoint(s3.folder / "models" / "run-1")
    write_checkpoint(s3.folder / "models" / "run-2")
    for urls in (["s3://models/run-1/"], ["s3://models/run-1/", "s3://models/run-2/"]):
        s3.forget()
        files.forget_command()
        assert statecli("audit", *urls).code == 0
        requests = [(request.path, request.query.get("prefix")) for request in s3.requests]
        assert len(requests) == len(set(requests)) == 2 * len(urls)


def test_percent_escape_of_a_key_is_not_decoded(bucket, tmp_path, statecli):
    """`a%20b` is not `a b`."""
    write_checkpoint(tmp_path / "up", "a b.safetensors")
    bucket.upload(tmp_path / "up")
    assert statecli("inspect", bucket.url("a%20b.safetensors")).err.endswith(": does not exist\n")


@pytest.mark.parametrize("slash", ["", "/"])
def test_bucket_is_read_as_a_folder(bucket, tmp_path, statecli, slash):
    """A bucket is a folder, with or without a slash; an empty bucket and a missing bucket have different messages."""
    url = f"s3://{bucket.name}{slash}"
    assert statecli("inspect", url).err == f"statecli: {url}: is an empty folder\n"
    write_checkpoint(tmp_path / "up", "model.safetensors")
    bucket.upload(tmp_path / "up")
    files.forget_command()
    for command in ("inspect", "audit"):
        assert statecli(command, url).code == 0
    missing_bucket = f"s3://nobody{slash}"
    assert statecli("inspect", missing_bucket).err == f"statecli: {missing_bucket}: its bucket does not exist\n"


def test_folder_with_a_slash_is_not_requested_as_a_file(s3, aws_credentials, statecli):
    """A name without a slash may be a key or a folder, and the key is requested first."""
    write_checkpoint(s3.folder / "models" / "run")
    assert statecli("inspect", "s3://models/run").code == 0
    assert [request.status for request in s3.requests] == [404, 200, 206]
    s3.forget()
    assert statecli("inspect", "s3://models/run/").code == 0
    assert [request.status for request in s3.requests] == [200, 206]


def test_empty_object_is_reported_as_an_empty_file(s3, aws_credentials, statecli):
    """S3 answers every range of an empty object with 416."""
    (s3.folder / "models" / "m.pt").write_bytes(b"")
    assert statecli("inspect", "s3://models/m.pt").err == "statecli: s3://models/m.pt: is an empty file\n"


def test_version_is_read_by_its_id(bucket, tmp_path, statecli):
    """`?versionId=` is shown, and selects the older version."""
    bucket._client.put_bucket_versioning(Bucket="models", VersioningConfiguration={"Status": "Enabled"})
    path = write_checkpoint(tmp_path, size=4)
    first = bucket._client.put_object(Bucket="models", Key="m.safetensors", Body=path.read_bytes())["VersionId"]
    write_checkpoint(tmp_path, size=6)
    bucket._client.put_object(Bucket="models", Key="m.safetensors", Body=path.read_bytes())
    url = f"s3://models/m.safetensors?versionId={first}"
    assert statecli("inspect", url, "-f", "json").rows()["w"]["shape"] == [4]
    assert statecli("inspect", url, "-f", "json").json["target"] == url
    assert statecli("inspect", "s3://models/m.safetensors", "-f", "json").rows()["w"]["shape"] == [6]
    missing_version = statecli("inspect", "s3://models/m.safetensors?versionId=00000000-0000-0000-0000-000000000000")
    assert (missing_version.code, missing_version.err.count("\n")) == (2, 1)
    for version in bucket._client.list_object_versions(Bucket="models")["Versions"]:
        bucket._client.delete_object(Bucket="models", Key=version["Key"], VersionId=version["VersionId"])


def test_bucket_of_another_region_is_found(s3, aws_credentials, statecli, monkeypatch):
    """S3 names the right region, and later requests go there; the region is requested once, not for each file."""
    s3.region = "eu-central-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    write_checkpoint(s3.folder / "models")
    write_checkpoint(s3.folder / "models", "n.safetensors")
    assert statecli("diff", "s3://models/m.safetensors", "s3://models/n.safetensors").code == 0
    assert [request.status for request in s3.requests].count(301) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_to_another_server_is_not_followed(s3, aws_credentials, statecli, monkeypatch, status):
    """The other server receives no session token, and its bytes are not accepted."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hidden-token-4")
    write_checkpoint(s3.folder / "models")
    with Server(s3.folder) as other:
        s3.behave("*", Redirect(other.url("models/m.safetensors").replace("127.0.0.1", "localhost"), status=status))
        for url in ("s3://models/m.safetensors", "s3://models/"):
            result = statecli("inspect", url)
            text = f"statecli: {url}: the answer did not come from S3 (HTTP {status}); check AWS_ENDPOINT_URL"
            assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
            assert result.err.startswith(text)
        assert other.requests == []


# --- credentials


def test_public_object_needs_no_credentials(s3, statecli):
    """Public objects need no configuration, and the request is not signed."""
    write_checkpoint(s3.folder / "models")
    assert statecli("inspect", "s3://models/m.safetensors").code == 0
    assert "authorization" not in s3.requests[-1].headers


def test_message_reports_missing_credentials(s3, statecli):
    """The message says that no credentials were found, and names AWS_PROFILE."""
    write_checkpoint(s3.folder / "models")
    s3.behave("*", refuse_as_s3(403, "AccessDenied"))
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "no AWS credentials were found" in result.err
    assert "AWS_PROFILE" in result.err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "your AWS credentials do not give access to this object, or the object does not exist"),
        (403, "InvalidAccessKeyId", "S3 does not know the access key"),
        (403, "SignatureDoesNotMatch", "the secret key of your AWS credentials is wrong"),
        (400, "ExpiredToken", "have expired; log in again"),
        (400, "InvalidToken", "is not valid; log in again"),
        (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
        (403, "InvalidObjectState", "is archived (Glacier): restore it first"),
        (404, "NoSuchBucket", "its bucket does not exist"),
        (404, "NoSuchKey", "does not exist"),
        (409, "SomethingNew", "S3 reports SomethingNew"),
    ],
)
def test_refusal_of_s3_gives_a_single_line(s3, aws_credentials, statecli, status, code, words):
    """The message names the URL and a remedy once, and contains no credentials, even with --debug."""
    write_checkpoint(s3.folder / "models")
    s3.behave("*", refuse_as_s3(status, code))
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("statecli: s3://models/m.safetensors: ")
    assert words in result.err
    err = statecli("inspect", "s3://models/m.safetensors", "--debug").err
    for secret in (SECRET, KEY, "Signature="):
        assert secret not in result.err + err


def test_unlisted_folder_is_not_reported_as_missing(s3, aws_credentials, statecli):
    """No object has this name, and the existence of a folder is unknown."""
    write_checkpoint(s3.folder / "models" / "run")
    s3.behave("models", refuse_as_s3(403, "AccessDenied"))
    for url in ("s3://models/run", "s3://models/run/", "s3://models"):
        for command in ("inspect", "audit", "lock"):
            result = statecli(command, url)
            assert (result.code, result.err.count("\n")) == (2, 1)
            assert (
                f"{url}: access is refused (HTTP 403): your AWS credentials do not give access to this object"
                in result.err
            )


def test_readable_shards_without_a_listing_are_read(s3, aws_credentials, statecli):
    """S3 then answers 403 for missing objects too: an index and its shards are read; a folder fails with one line."""
    folder = s3.folder / "models" / "run"
    for n in (1, 2):
        save_file({f"w{n}": torch.zeros(2)}, write_checkpoint(folder, f"model-{n}.safetensors"))
    index = {"metadata": {}, "weight_map": {f"w{n}": f"model-{n}.safetensors" for n in (1, 2)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def refuse_missing_keys(request, reply):
        if request.path == "models" or reply.status == 404:
            refuse_as_s3(403, "AccessDenied")(request, reply)

    s3.behave("*", refuse_missing_keys)
    result = statecli("inspect", "s3://models/run/model.safetensors.index.json", "-f", "json")
    assert (result.code, set(result.rows()), result.err) == (0, {"w1", "w2"}, "")
    assert statecli("audit", "s3://models/run/model.safetensors.index.json").code == 0
    for url in ("s3://models/run", "s3://models/run/", "s3://models/run/*/", "s3://models/run/none.pt"):
        result = statecli("inspect" if "*" not in url else "audit", url)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert (
            "access is refused (HTTP 403): your AWS credentials do not give access to this object, or the object does "
            "not exist" in result.err
        )


@pytest.fixture
def reader_keys(bucket, tmp_path):
    """moto with checks of signatures; credentials of a user who may read a single file and list nothing."""
    from moto import settings as moto
    from moto.core.responses import ActionAuthenticatorMixin

    write_checkpoint(tmp_path / "up" / "run")
    bucket.upload(tmp_path / "up")
    boto3 = pytest.importorskip("boto3")
    iam = boto3.client("iam")
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    allowed = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::models/run/m.safetensors"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
    before = moto.INITIAL_NO_AUTH_ACTION_COUNT, ActionAuthenticatorMixin.request_count
    moto.INITIAL_NO_AUTH_ACTION_COUNT, ActionAuthenticatorMixin.request_count = 0, 0
    yield key["AccessKeyId"], key["SecretAccessKey"]
    moto.INITIAL_NO_AUTH_ACTION_COUNT, ActionAuthenticatorMixin.request_count = before
    iam.delete_access_key(UserName="reader", AccessKeyId=key["AccessKeyId"])
    iam.delete_user_policy(UserName="reader", PolicyName="read")
    iam.delete_user(UserName="reader")


def test_only_the_right_keys_read_the_file(reader_keys, statecli, monkeypatch):
    """The right keys read the file; a wrong secret key and an unknown access key give a line each, without the keys."""
    key, secret = reader_keys
    url = "s3://models/run/m.safetensors"

    def list_requests(key: str, secret: str, url: str = url):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        result = statecli("inspect", url)
        debug = statecli("inspect", url, "--debug").err
        assert not [
            secret_text for secret_text in (key, secret, "Signature=") if secret_text in result.out + result.err + debug
        ]
        return result

    assert list_requests(key, secret).code == 0
    lines = {
        "the secret key of your AWS credentials is wrong": list_requests(key, "not-the-one-that-belongs-to-it"),
        "S3 does not know the access key of your AWS credentials": list_requests("AKIANOBODYHASTHISONE", secret),
        "access is refused (HTTP 403)": list_requests(key, secret, "s3://models/run/"),
    }
    for words, result in lines.items():
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert words in result.err


def test_credentials_in_the_url_are_refused(s3, statecli):
    """Such a URL is refused, and its secret is not shown."""
    result = statecli("inspect", f"s3://{KEY}:{SECRET}@models/m.safetensors")
    assert result.code == 2
    assert "set AWS_PROFILE or log in" in result.err
    assert SECRET not in result.err
    assert s3.requests == []


CREDENTIALS, SETTINGS = "your AWS credentials cannot be used", "the AWS configuration cannot be used"
ROLE = "role_arn=arn:aws:iam::123456789012:role/x\n"
SSO = "sso_start_url=https://nobody.example\nsso_region=us-east-1\nsso_account_id=1\nsso_role_name=r\n"


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (SSO, CREDENTIALS),
        ("credential_process=echo hidden-5\n", CREDENTIALS),
        (f"{ROLE}source_profile=b\n[profile b]\naws_access_key_id=A\naws_secret_access_key=B\n", CREDENTIALS),
        (f"{ROLE}web_identity_token_file=/nobody/has/hidden-5\n", CREDENTIALS),
        ("no equals sign", SETTINGS),
        ("region=us east\n", SETTINGS),
        ("retry_mode=none\n", SETTINGS),
        ("endpoint_url=127.0.0.1:80\n", SETTINGS),
    ],
)
def test_configuration_without_credentials_is_reported(s3, statecli, monkeypatch, tmp_path, profile, words):
    """The message does not blame access to the object."""
    (tmp_path / "config").write_text(f"[profile p]\n{profile}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "p")
    if "endpoint_url" in profile:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
    if not profile.startswith(("sso", "role")):  # all other profiles get a region
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    if profile.startswith("region"):
        monkeypatch.delenv("AWS_DEFAULT_REGION")
    s3.behave("*", refuse_as_s3(403, "AccessDenied"))
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err
    assert "hidden-5" not in result.err
    assert not [request for request in s3.requests if request.path.startswith("models")]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:5555", SETTINGS),
        ("AWS_ENDPOINT_URL_S3", "ftp://127.0.0.1", SETTINGS),
        ("AWS_DEFAULT_REGION", "us east/1", SETTINGS),
        ("AWS_SESSION_TOKEN", "hidden-6\n7", "set them again, without line breaks"),
        ("AWS_SECRET_ACCESS_KEY", "", CREDENTIALS),
    ],
)
def test_invalid_variable_is_reported(s3, aws_credentials, statecli, monkeypatch, name, value, words):
    """The error is a single line without the value."""
    monkeypatch.setenv(name, value)
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err
    assert "hidden-6" not in result.err


def test_missing_certificate_file_is_reported(s3, aws_credentials, statecli, monkeypatch):
    """The message names the variable."""
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nobody/has/this.pem")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    assert "AWS_CA_BUNDLE is not the path of a readable file" in statecli("inspect", "s3://models/m.safetensors").err


def test_no_sign_request_sends_no_credentials(s3, aws_credentials, statecli, monkeypatch):
    """With AWS_NO_SIGN_REQUEST, credentials are not sent, and a refusal names the variable."""
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "yes")
    write_checkpoint(s3.folder / "models")
    assert statecli("inspect", "s3://models/m.safetensors").code == 0
    assert "authorization" not in s3.requests[-1].headers
    files.forget_command()
    s3.behave("*", refuse_as_s3(403, "AccessDenied"))
    err = statecli("inspect", "s3://models/m.safetensors").err
    assert "AWS_NO_SIGN_REQUEST disables your AWS credentials" in err
    assert "were found" not in err


def test_new_credentials_count_for_the_next_call(s3, monkeypatch):
    """After a refusal in a notebook, a user who logs in and calls again is not refused for the old credentials."""
    import statecli

    write_checkpoint(s3.folder / "models")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "old")

    def refuse_old_key(request, reply):
        if "AKIANEW" not in request.headers.get("authorization", ""):
            refuse_as_s3(403, "InvalidAccessKeyId")(request, reply)

    s3.behave("*", refuse_old_key)
    with pytest.raises(statecli.UnreadableError, match="does not know the access key"):
        statecli.inspect("s3://models/m.safetensors")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEW")
    assert len(statecli.inspect("s3://models/m.safetensors").state.tensors) == 1


# --- faults of the server and the connection


def test_changed_object_is_reported(s3, aws_credentials, statecli):
    """The request for values is for the version of the header."""
    path = write_checkpoint(s3.folder / "models", size=1 << 18)
    s3.behave("models/m.safetensors", After(1, Headers(ETag='"another"')))
    result = statecli("inspect", "s3://models/m.safetensors", "--stats")
    assert result.code == 2
    assert "changed while statecli read it; try again" in result.err
    assert ["if-match" in request.headers for request in s3.requests][:2] == [False, True]
    assert path.stat().st_size > 1 << 20


def test_replaced_object_is_refused_by_s3(s3, aws_credentials, statecli):
    """S3 answers If-Match with 412, so no byte of the other version travels."""
    write_checkpoint(s3.folder / "models", size=1 << 18)
    s3.behave("models/m.safetensors", After(1, refuse_as_s3(412, "PreconditionFailed")))
    result = statecli("inspect", "s3://models/m.safetensors", "--stats")
    assert result.code == 2
    assert "changed while statecli read it; try again" in result.err
    assert all("if-match" in request.headers for request in s3.requests[1:])


PAGE = b"<html><body>please log in<br></body></html>"


def reply_with_page(status: int, body: bytes = PAGE):
    """Answer as a proxy or another web server would, not as S3."""
    return lambda request, reply: reply.become(Reply(status, {"Content-Type": "text/html"}, body))


@pytest.mark.parametrize(
    ("status", "body"),
    [*((status, PAGE) for status in (400, 401, 403, 404, 405, 407))]
    + [(status, body) for status in (403, 404) for body in (PAGE.replace(b"<br>", b""), b"")],
)
def test_answer_of_another_server_is_reported_with_its_status(s3, aws_credentials, statecli, status, body):
    """The message blames neither credentials nor a missing object, but suggests checking the endpoint."""
    write_checkpoint(s3.folder / "models" / "run")
    s3.behave("*", reply_with_page(status, body))
    for url in ("s3://models/run/m.safetensors", "s3://models/run", "s3://models/run/", "s3://models"):
        text = f"{url}: the answer did not come from S3 (HTTP {status}); check AWS_ENDPOINT_URL and any proxy"
        result = statecli("inspect", url)
        assert (result.code, result.out, result.err) == (2, "", f"statecli: {text}\n")


@pytest.mark.parametrize("body", [PAGE, PAGE.replace(b"<br>", b"")], ids=["html", "xhtml"])
def test_html_page_is_not_an_empty_folder(s3, aws_credentials, statecli, body):
    """botocore takes a login page with status 200 for an empty listing."""
    write_checkpoint(s3.folder / "models" / "run")
    s3.behave("*", reply_with_page(200, body))
    for command in ("inspect", "audit", "lock"):
        result = statecli(command, "s3://models/run/")
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert "AWS_ENDPOINT_URL" in result.err
    assert "is an HTML page" in statecli("inspect", "s3://models/run/m.safetensors").err


def test_busy_server_is_requested_again(s3, aws_credentials, statecli):
    """S3 answers 503 SlowDown, then 500 InternalError, a proxy 429 and 502; then S3 sends the file."""
    write_checkpoint(s3.folder / "models")
    busy = [
        refuse_as_s3(503, "SlowDown"),
        refuse_as_s3(500, "InternalError"),
        reply_with_page(429),
        reply_with_page(502),
    ]
    s3.behave("*", *(Times(n, busy[n - 1]) for n in (4, 3, 2, 1)))
    assert statecli("inspect", "s3://models/m.safetensors").code == 0
    assert [request.status for request in s3.requests] == [503, 500, 429, 502, 206]


def test_server_that_stays_busy_gives_a_single_line(s3, aws_credentials, statecli, monkeypatch):
    """statecli makes as many attempts as STATECLI_RETRIES allows; botocore adds no attempts."""
    monkeypatch.setenv("STATECLI_RETRIES", "2")
    s3.behave("*", refuse_as_s3(503, "SlowDown"))
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.err) == (
        2,
        "statecli: s3://models/m.safetensors: S3 is busy (SlowDown), in each of 3 attempts; try again later\n",
    )


def test_cut_answer_is_requested_again(s3, aws_credentials, statecli):
    """The missing range is requested again."""
    write_checkpoint(s3.folder / "models")
    s3.behave("models/m.safetensors", Times(1, HangUp(after=20)))
    assert statecli("inspect", "s3://models/m.safetensors").code == 0
    assert len(s3.requests) == 2


def test_stall_gives_a_single_line(s3, aws_credentials, statecli, monkeypatch):
    """The command fails after STATECLI_TIMEOUT seconds. If STATECLI_RETRIES is 0, botocore sends no other request."""
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.2")
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    write_checkpoint(s3.folder / "models")
    s3.behave("models/m.safetensors", Stall(after=10))
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.err) == (
        2,
        "statecli: s3://models/m.safetensors: no answer in 0.2 s; try again later\n",
    )
    assert len(s3.requests) == 1


def test_wrong_range_is_refused(s3, aws_credentials, statecli):
    """The bytes of the wrong range are never used."""
    write_checkpoint(s3.folder / "models", size=1 << 16)
    s3.behave("models/m.safetensors", OtherRange(4))
    result = statecli("inspect", "s3://models/m.safetensors")
    assert result.code == 2
    assert "did not send the byte range that statecli requested" in result.err


def test_large_object_without_range_support_is_not_read_whole(s3, aws_credentials, statecli):
    """A small object is read whole; of a large object only the head is read."""
    path = write_checkpoint(s3.folder / "models")
    s3.behave("*", ignore_range)
    assert statecli("inspect", "s3://models/m.safetensors").code == 0
    with path.open("r+b") as file:
        file.truncate(256 << 20)
    s3.forget()
    files.forget_command()
    result = statecli("inspect", "s3://models/m.safetensors")
    assert result.code == 2
    assert "ignores range requests" in result.err
    assert s3.sent < 32 << 20


def test_unreachable_endpoint_gives_a_single_line(statecli, monkeypatch, aws_credentials):
    """The port refuses the connection."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("STATECLI_RETRIES", "1")
    result = statecli("inspect", "s3://models/m.safetensors")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "in each of 2 attempts; try again later" in result.err


def test_missing_package_is_named(monkeypatch, statecli):
    """Without s3fs, the message names the package."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    result = statecli("inspect", "s3://models/m.safetensors")
    assert (result.code, result.err) == (
        2,
        "statecli: s3:// needs the package s3fs: pip install 'torch-statecli[remote]'\n",
    )


def test_file_functions_support_s3(s3, aws_credentials):
    """files.get_size, is_folder, is_file and exists work for S3."""
    path = write_checkpoint(s3.folder / "models" / "run")
    assert files.get_size("s3://models/run/m.safetensors") == path.stat().st_size
    assert files.is_folder("s3://models/run")
    assert files.is_file("s3://models/run/m.safetensors")
    assert not files.exists("s3://models/run/n.safetensors")
