"""Google Cloud Storage: ranges by gcsfs' session, each answer held to what was asked before it is read."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.storage.fsspec_store import PerProcess, bucket_listing, held, imported, span, take_page, unreached
from statecli.storage.limits import settings
from statecli.storage.retry import Transient
from statecli.storage.store import CHANGED, Known, Listing, Missing

_REFUSED = "access is refused (HTTP {status}): your Google credentials may not read it, or it is not there"
_REFUSED_TO_ALL = (
    "access is refused (HTTP {status}): no Google credentials were found; "
    "`gcloud auth application-default login` makes some, GOOGLE_APPLICATION_CREDENTIALS names a file of them"
)


class CloudStorage:
    """All buckets."""

    def __init__(self) -> None:
        self._filesystem = PerProcess(_filesystem)

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`."""
        return self._asked(_got, url, offset, length, known)  # type: ignore[no-any-return]

    def listing(self, url: str) -> Listing:
        """As `Store.listing`."""
        return self._asked(_listed, url)  # type: ignore[no-any-return]

    def _asked(self, ask: Any, *arguments: Any) -> Any:
        try:
            filesystem = self._filesystem()
            return imported().asyn.sync(filesystem.loop, ask, filesystem, *arguments)
        except (UnreadableError, MissingDependency, Transient):
            raise
        except Exception as why:  # noqa: BLE001 - of gcsfs, google.auth, aiohttp, asyncio
            if type(why).__module__.startswith("google.auth"):
                told = f"your Google credentials cannot be used ({type(why).__name__})"
                raise UnreadableError(f"{told}; log in again: gcloud auth application-default login") from None
            raise unreached(why) from None


def _filesystem() -> Any:
    try:
        imported()
        import gcsfs
    except (ImportError, MissingDependency):
        raise MissingDependency("gs:// needs the package gcsfs: pip install 'statecli[gs]'") from None
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    try:
        found = gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
    except (IsADirectoryError, PermissionError):
        found = None
    # gcsfs takes others, or none, in their place.
    if found is None or (named and not found.credentials.token and found.credentials.method != "google_default"):
        what = "a file that holds no Google credentials" if os.path.isfile(named or "") else "no file"
        raise UnreadableError(f"GOOGLE_APPLICATION_CREDENTIALS names {what}: name one, or unset it")
    return found


def _parts(url: str) -> tuple[str, str, dict[str, str]]:
    """Bucket, name, and the generation that is asked for."""
    way, _, generation = url.partition("://")[2].partition("?generation=")
    bucket, _, name = way.partition("/")
    if not bucket:
        raise UnreadableError("names no bucket: write gs://BUCKET/NAME")
    return bucket, name, {"generation": generation} if generation else {}


async def _got(filesystem: Any, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
    bucket, name, asked = _parts(url)
    if not name:
        raise Missing("is a bucket, and holds nothing")
    where = f"{filesystem._location}/download/storage/v1/b/{quote(bucket, '')}/o/{quote(name, '')}"
    # Whoever accepts gzip is sent what is stored, ranges and all; to others it is unpacked on the way, whole.
    headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "gzip"}
    async with await _request(filesystem, where, {"alt": "media", **asked}, headers) as answer:
        if answer.status == 416 and offset == 0:
            return b"", (0, None)
        _refuse(answer.status, filesystem)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise UnreadableError("is stored compressed (Content-Encoding: gzip): download it first")
        start, end, size = span(answer.headers.get("Content-Range"), answer.content_length, offset, length)
        found = size, answer.headers.get("X-Goog-Generation") or answer.headers.get("ETag")
        if known is not None and known != found:
            raise UnreadableError(CHANGED)
        data = held(await answer.read(), start, end)
    return data[offset - start : offset - start + length], found


async def _listed(filesystem: Any, url: str) -> Listing:
    bucket, name, _ = _parts(url)
    prefix = f"{name.rstrip('/')}/" if name.strip("/") else ""
    where = f"{filesystem._location}/storage/v1/b/{quote(bucket, '')}/o"
    asked = {"prefix": prefix, "delimiter": "/", "fields": "items(name),prefixes,nextPageToken"}
    folders: dict[str, bool] = {}
    while True:
        async with await _request(filesystem, where, asked, {}) as answer:
            _refuse(answer.status, filesystem)
            page = await answer.json()
        take_page(folders, prefix, [one["name"] for one in page.get("items", ())], page.get("prefixes", ()))
        if not page.get("nextPageToken"):
            return bucket_listing(folders, prefix)
        asked["pageToken"] = page["nextPageToken"]


async def _request(filesystem: Any, where: str, asked: dict[str, str], headers: dict[str, str]) -> Any:
    import aiohttp
    from yarl import URL

    await filesystem._set_session()
    seconds = settings().timeout
    query = "&".join(f"{key}={quote(value, '')}" for key, value in filesystem._get_params(asked).items())
    return await filesystem.session.get(
        URL(f"{where}?{query}", encoded=True),
        headers=filesystem._get_headers(headers),
        timeout=aiohttp.ClientTimeout(sock_connect=min(10.0, seconds), sock_read=seconds),
    )


def _refuse(status: int, filesystem: Any) -> None:
    """Raises for an answer that has not what was asked for."""
    if status in (408, 429) or status >= 500:
        raise Transient(f"Google Cloud Storage is busy (HTTP {status})")
    if status == 404:
        raise Missing("is not there, or its bucket is not (HTTP 404)")
    if status in (401, 403):
        text = _REFUSED_TO_ALL if filesystem.credentials.credentials is None else _REFUSED
        raise UnreadableError(text.format(status=status))
    if status not in (200, 206):
        raise UnreadableError(f"cannot be read (HTTP {status})")
