"""Object store of Google Cloud Storage: range requests by gcsfs; each answer is checked before its body is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.core.installed_package import install_extra
from statecli.storage.fsspec_store import (
    BucketAnswer,
    PerProcess,
    add_page,
    create_bucket_listing,
    import_fsspec,
    translate_network_error,
)
from statecli.storage.limits import settings
from statecli.storage.object_store import Listing, Missing, VersionedBytes
from statecli.storage.retry import Transient
from statecli.storage.store import FileVersion

_Result = TypeVar("_Result")
_REFUSED = (
    "access is refused (HTTP {status}): your Google credentials do not give access to this object, "
    "or the object does not exist"
)
_REFUSED_TO_ALL = (
    "access is refused (HTTP {status}): no Google credentials were found; "
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials"
)


class CloudStorage:
    """`ObjectStore` for all buckets of Google Cloud Storage."""

    def __init__(self) -> None:
        self._create_filesystem = PerProcess(_create_filesystem)

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        return self._call(lambda filesystem: _get_range(filesystem, url, offset, length, expected))

    def listing(self, url: str) -> Listing:
        return self._call(lambda filesystem: _list_folder(filesystem, url))

    def _call(self, request: Callable[[Any], Coroutine[Any, Any, _Result]]) -> _Result:
        try:
            filesystem = self._create_filesystem()
            result: _Result = import_fsspec().asyn.sync(filesystem.loop, request, filesystem)
        except (UnreadableError, MissingDependency, Transient):
            raise
        except Exception as why:  # noqa: BLE001 - of gcsfs, google.auth, aiohttp, asyncio
            if type(why).__module__.startswith("google.auth"):
                text = f"your Google credentials cannot be used ({type(why).__name__})"
                raise UnreadableError(f"{text}; log in again: gcloud auth application-default login") from None
            raise translate_network_error(why) from None
        return result


def _create_filesystem() -> Any:
    try:
        import_fsspec()
        import gcsfs
    except (ImportError, MissingDependency):
        raise MissingDependency(f"gs:// needs the package gcsfs: {install_extra('gs')}") from None
    path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    try:
        filesystem = gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
    except (IsADirectoryError, PermissionError):
        filesystem = None
    # gcsfs silently uses other credentials, or none, if it cannot read the file.
    credentials = None if filesystem is None else filesystem.credentials
    if credentials is None or (path and not credentials.token and credentials.method != "google_default"):
        target = "a file without Google credentials" if os.path.isfile(path or "") else "a file that does not exist"
        raise UnreadableError(
            f"GOOGLE_APPLICATION_CREDENTIALS points to {target}: set it to a file of credentials, or unset it"
        )
    return filesystem


def _parse_name(url: str) -> tuple[str, str, dict[str, str]]:
    """Return the bucket, the object name, and the query that selects the requested generation."""
    path, _, generation = url.partition("://")[2].partition("?generation=")
    bucket, _, name = path.partition("/")
    if not bucket:
        raise UnreadableError("does not contain a bucket: write gs://BUCKET/NAME")
    return bucket, name, {"generation": generation} if generation else {}


async def _get_range(
    filesystem: Any, url: str, offset: int, length: int, expected: FileVersion | None
) -> VersionedBytes:
    bucket, name, options = _parse_name(url)
    if not name:
        raise Missing("is an empty bucket")
    link = f"{filesystem._location}/download/storage/v1/b/{quote(bucket, '')}/o/{quote(name, '')}"
    # Accept gzip, because the server then sends ranges of the stored bytes; otherwise it unpacks the whole file.
    headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "gzip"}
    async with await _request(filesystem, link, {"alt": "media", **options}, headers) as answer:
        if answer.status == 416 and offset == 0:
            return VersionedBytes(b"", FileVersion(0, None))
        _check_status(answer.status, filesystem)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise UnreadableError("is stored compressed (Content-Encoding: gzip); download the file first")
        marker = answer.headers.get("X-Goog-Generation") or answer.headers.get("ETag")
        head = BucketAnswer(answer.headers.get("Content-Range"), answer.content_length, marker, answer.content)
        return await head.read(offset, length, expected)


async def _list_folder(filesystem: Any, url: str) -> Listing:
    bucket, name, _ = _parse_name(url)
    prefix = f"{name.rstrip('/')}/" if name.strip("/") else ""
    link = f"{filesystem._location}/storage/v1/b/{quote(bucket, '')}/o"
    query = {"prefix": prefix, "delimiter": "/", "fields": "items(name),prefixes,nextPageToken"}
    folders: dict[str, bool] = {}
    while True:
        async with await _request(filesystem, link, query, {}) as answer:
            _check_status(answer.status, filesystem)
            page = await answer.json()
        add_page(folders, prefix, [entry["name"] for entry in page.get("items", ())], page.get("prefixes", ()))
        if not page.get("nextPageToken"):
            return create_bucket_listing(folders, prefix)
        query["pageToken"] = page["nextPageToken"]


async def _request(filesystem: Any, link: str, options: dict[str, str], headers: dict[str, str]) -> Any:
    import aiohttp
    from yarl import URL

    await filesystem._set_session()
    seconds = settings().timeout
    query = "&".join(f"{key}={quote(value, '')}" for key, value in filesystem._get_params(options).items())
    return await filesystem.session.get(
        URL(f"{link}?{query}", encoded=True),
        headers=filesystem._get_headers(headers),
        timeout=aiohttp.ClientTimeout(sock_connect=min(10.0, seconds), sock_read=seconds),
    )


def _check_status(status: int, filesystem: Any) -> None:
    if status in (408, 429) or status >= 500:
        raise Transient(f"Google Cloud Storage is busy (HTTP {status})")
    if status == 404:
        raise Missing("does not exist, or its bucket does not exist (HTTP 404)")
    if status in (401, 403):
        text = _REFUSED_TO_ALL if filesystem.credentials.credentials is None else _REFUSED
        raise UnreadableError(text.format(status=status))
    if status not in (200, 206):
        raise UnreadableError(f"cannot be read (HTTP {status})")
