"""Servers for the tests of this folder: real servers on loopback, without the user's own accounts."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from statecli.storage import files, masked_url as names, redact, retry

from .gcs import CloudStorage
from .hub import Hub
from .server import Server

SECRET = "wJalrXUtnFEMI-that-no-output-may-have"  # noqa: S105 - it opens nothing


@pytest.fixture(autouse=True)
def environment_without_accounts(tmp_path_factory, monkeypatch) -> None:
    """An environment without credentials, configuration or proxies, except for the settings of the test itself."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith(
            ("AWS_", "HF_", "GOOGLE_", "GCS", "FSSPEC_", "HUGGING", "STORAGE_")
        ) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, file in {
        "AWS_CONFIG_FILE": "aws-config",
        "AWS_SHARED_CREDENTIALS_FILE": "aws-credentials",
        "NETRC": "netrc",
    }.items():
        (home / file).touch()
        monkeypatch.setenv(name, str(home / file))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session", autouse=True)
def _cached_aws_models() -> Iterator[None]:
    """Cache botocore's service models for the session, because each command creates a new client.

    Without the cache, each client parses a megabyte of JSON, lists 400 folders and inspects the names and signatures of
    the same 130 handlers.
    """
    if importlib.util.find_spec("botocore") is None:
        yield
        return
    from botocore import hooks
    from botocore.loaders import JSONFileLoader, Loader

    load = JSONFileLoader.load_file
    cached = functools.cache(lambda path: load(JSONFileLoader(), path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: cached(path))
        services = functools.cache(Loader().list_available_services)
        patch.setattr(Loader, "list_available_services", lambda _, type_name: services(type_name))
        alias = hooks.EventAliaser(hooks.BaseEventHooks())._alias_event_name  # with a separate cache
        patch.setattr(hooks.EventAliaser, "_alias_event_name", lambda _, name: alias(name))
        accepts = functools.cache(hooks.accepts_kwargs)
        patch.setattr(hooks, "accepts_kwargs", lambda handler: accepts(getattr(handler, "__func__", handler)))
        yield


@pytest.fixture
def file_server(tmp_path) -> Iterator[Server]:
    """A server of the empty folder `file_server.folder`."""
    folder = tmp_path / "served"
    folder.mkdir()
    with Server(folder) as server:
        yield server


@dataclass
class Bucket:
    """A bucket behind a real S3 API, and the endpoint of the API."""

    name: str
    endpoint: str
    _client: object

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    def upload(self, folder: Path) -> None:
        """Upload every file of the folder under its path in the folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._client.upload_file(str(path), self.name, path.relative_to(folder).as_posix())


@pytest.fixture(scope="session")
def _moto():
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(_moto, monkeypatch) -> Iterator[Bucket]:
    """An empty bucket of moto's S3, in an environment that leads s3fs and boto3 to moto."""
    import boto3
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", _moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    yield Bucket("models", _moto, client)
    for entry in client.list_objects_v2(Bucket="models").get("Contents", []):
        client.delete_object(Bucket="models", Key=entry["Key"])
    client.delete_bucket(Bucket="models")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub of the repositories in `hub.folder`, for this process and its child processes."""
    constants = pytest.importorskip("huggingface_hub.constants")
    from huggingface_hub import HfFileSystem

    folder = tmp_path / "hub"
    folder.mkdir()
    with Hub(folder) as server:
        endpoint = server.url().rstrip("/")
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        # The library reads its environment once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        HfFileSystem.clear_instance_cache()
        yield server
    HfFileSystem.clear_instance_cache()


@pytest.fixture
def cloud_storage(tmp_path, monkeypatch) -> Iterator[CloudStorage]:
    """Google Cloud Storage with the buckets in `cloud_storage.folder`."""
    folder = tmp_path / "gcs"
    folder.mkdir()
    monkeypatch.setenv(
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
    )  # otherwise gcsfs asks Google about an emulator's bucket
    gcsfs = pytest.importorskip("gcsfs")
    with CloudStorage(folder) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url().rstrip("/"))
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield server
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def _fresh_connections(monkeypatch) -> Iterator[None]:
    """Forget the servers and URLs of other tests, and do not wait between two attempts."""
    for name in [
        name for name in os.environ if name.startswith(("STATECLI_", "SSL_CERT_")) or name.endswith("_CA_BUNDLE")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.0)
    names.typed_urls().clear()
    vars(redact.secrets()).update(vars(redact.Secrets()))
    files.forget_command()
    yield
    files.forget_command()
