"""S3, and what speaks its language: ranges by s3fs' own calls, each answer held to what was asked before it is read.

Credentials are those that the AWS tools find. Where they find none, what is public is read without; so it is wherever
AWS_NO_SIGN_REQUEST says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from statecli.errors import MissingDependency, UnreadableError
from statecli.remote.attempts import Transient
from statecli.remote.filesystems import PerProcess, held, imported, listing_of, span, take_page, unreached
from statecli.remote.settings import settings
from statecli.remote.stores import CHANGED, Known, Listing, Missing

_Found = TypeVar("_Found")

_BUSY = frozenset(
    ["SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "OperationAborted"]
)
#: What may be another answer later, whoever gave it.
_AGAIN = frozenset([408, 429, 500, 502, 503, 504])
_NO_BUCKET = "its bucket is not there"
#: What the codes of S3 mean to whoever asked.
_CODES = {
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": "its bucket's name is none that S3 has",
    "InvalidAccessKeyId": "access is refused: S3 does not know the access key of your AWS credentials; set them again",
    "SignatureDoesNotMatch": "access is refused: the secret key of your AWS credentials is wrong; set them again",
    "AuthorizationHeaderMalformed": "access is refused: it is in another region: set AWS_DEFAULT_REGION",
    "ExpiredToken": "access is refused: your AWS credentials have expired; log in again",
    "InvalidToken": "access is refused: the session token of your AWS credentials is not valid; log in again",
    "TokenRefreshRequired": "access is refused: your AWS credentials have expired; log in again",
    "RequestTimeTooSkewed": "access is refused: the clock of this machine is wrong; set it",
    "InvalidObjectState": "is archived (Glacier): restore it first",
    "PreconditionFailed": CHANGED,
    "412": CHANGED,
    "NoSuchVersion": "is not there in that version",
}
_REFUSED = (
    "access is refused (HTTP 403): your AWS credentials may not read it, or it is not there; if it is public, "
    "AWS_NO_SIGN_REQUEST=yes reads it without them"
)
#: What is said of whatever answers instead of an S3.
_FOREIGN = "no S3 gave this answer ({what}): check AWS_ENDPOINT_URL, and proxies on the way"
_REFUSED_TO_ALL = (
    "access is refused (HTTP 403): no AWS credentials were found, and without them it may not be read; log in, or set "
    "AWS_PROFILE"
)


class S3:
    """All buckets."""

    def __init__(self) -> None:
        self._signed, self._unsigned = PerProcess(_filesystem), PerProcess(lambda: _filesystem(anon=True))
        self._anonymous = os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes", "on")

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`."""
        return self._asked(lambda filesystem: _got(filesystem, url, offset, length, known))

    def listing(self, url: str) -> Listing:
        """As `Store.listing`."""
        return self._asked(lambda filesystem: _listed(filesystem, url))

    def _asked(self, ask: Callable[[Any], Coroutine[Any, Any, _Found]]) -> _Found:
        filesystem = (self._unsigned if self._anonymous else self._signed)()
        try:
            found: _Found = imported().asyn.sync(filesystem.loop, ask, filesystem)
        except (UnreadableError, Transient):
            raise
        except Exception as why:  # noqa: BLE001 - of s3fs, botocore, aiohttp, asyncio
            if type(why).__name__ != "NoCredentialsError" or self._anonymous:
                raise _said(why, anonymous=filesystem.anon) from None
        else:
            return found
        self._anonymous = True
        return self._asked(ask)


def _filesystem(*, anon: bool | None = None) -> Any:
    imported()
    try:
        import s3fs
    except ImportError:
        raise MissingDependency("s3:// needs the package s3fs: pip install 'statecli[remote]'") from None
    # What fsspec's own configuration says (an endpoint, a profile) is kept.
    options = {} if anon is None else {"anon": anon}
    found = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
    patience = settings()
    ours = {
        "connect_timeout": min(10.0, patience.timeout),
        "read_timeout": patience.timeout,
        "max_pool_connections": patience.connections,
        "retries": {"total_max_attempts": 1},
    }
    found.config_kwargs = {**found.config_kwargs, **ours}
    found.retries = 1  # `attempts` asks again
    return found


def _parts(url: str) -> tuple[str, str, dict[str, str]]:
    """Bucket, key, and the version that is asked for."""
    way, _, version = url.partition("://")[2].partition("?versionId=")
    bucket, _, key = way.partition("/")
    if "@" in bucket:
        raise UnreadableError("has credentials in it, which s3:// has no place for: set AWS_PROFILE or log in")
    if not bucket:
        raise UnreadableError("names no bucket: write s3://BUCKET/KEY")
    return bucket, key, {"VersionId": version} if version else {}


async def _got(filesystem: Any, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
    bucket, key, asked = _parts(url)
    if not key:
        raise Missing("is a bucket, and holds nothing")
    asked["Range"] = f"bytes={offset}-{offset + length - 1}"
    if known is not None and known[1] is not None:
        asked["IfMatch"] = known[1]
    try:
        answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **asked)
    except OSError as why:
        if _answer(why)[0] in ("InvalidRange", "416") and offset == 0:
            return b"", (0, None)  # of an empty object no byte can be asked for
        raise
    body = answer["Body"]
    try:
        start, end, size = span(answer.get("ContentRange"), answer.get("ContentLength"), offset, length)
        found = size, answer.get("ETag")
        if known is not None and known != found:
            raise UnreadableError(CHANGED)
        data = held(await body.read(), start, end)
    finally:
        body.close()
    return data[offset - start : offset - start + length], found


async def _listed(filesystem: Any, url: str) -> Listing:
    bucket, key, _ = _parts(url)
    prefix = f"{key.rstrip('/')}/" if key.strip("/") else ""
    folders: dict[str, bool] = {}
    more: dict[str, str] = {}
    while True:
        page = await filesystem._call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
        if "IsTruncated" not in page:  # a page of HTML is a listing of nothing to botocore
            raise UnreadableError(_FOREIGN.format(what="it is no listing"))
        keys = [one["Key"] for one in page.get("Contents", ())]
        take_page(folders, prefix, keys, [one["Prefix"] for one in page.get("CommonPrefixes", ())])
        if not page.get("IsTruncated"):
            return listing_of(folders)
        more = {"ContinuationToken": page["NextContinuationToken"]}


def _answer(why: BaseException) -> tuple[str | None, int]:
    """The code of S3's answer, which s3fs hides behind an error of Python's, and the HTTP status; None, 0 without one.

    Where there was no code in it, botocore says none or the status in its place.
    """
    error: BaseException | None = why
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response["Error"].get("Code") or ""), int(status or 0)
        error = error.__cause__
    return None, 0


def _said(why: Exception, *, anonymous: bool) -> Exception:
    """The error of ours; the text of theirs may hold what must not be shown."""
    code, status = _answer(why)
    if code is not None:
        return _foreign(code, status) or _told(code, status, anonymous=anonymous)
    name = type(why).__name__
    if name == "ProfileNotFound":
        return UnreadableError("AWS_PROFILE names a profile that is not in the AWS configuration")
    if name == "ParamValidationError":
        return UnreadableError(_CODES["InvalidBucketName"])
    if "Credential" in name or "Token" in name or "SSO" in name:
        return UnreadableError(f"your AWS credentials cannot be used ({name}); log in again")
    if name in ("SSLError", "CertificateError"):
        return UnreadableError("the server's certificate is not trusted: set AWS_CA_BUNDLE to the one that signed it")
    return unreached(why)


def _foreign(code: str, status: int) -> Exception | None:
    """The error for an answer that no S3 gave: of a proxy, of a web server."""
    if code in _CODES or (code and not code.isdecimal()):
        return None
    if status in _AGAIN:
        # botocore says 500 of a page that came with 200 too.
        what = "no XML" if status == 500 else f"HTTP {status}"
        return Transient(f"an answer that is none of S3's ({what}; is AWS_ENDPOINT_URL right?)")
    return (Missing if status == 404 else UnreadableError)(_FOREIGN.format(what=f"HTTP {status}"))


def _told(code: str, status: int, *, anonymous: bool) -> Exception:
    """The error for what S3 says."""
    if code in _BUSY or status in _AGAIN:
        return Transient(f"S3 is busy ({code})")
    if code == "NoSuchKey":
        return Missing("is not there")
    if code in ("AccessDenied", "AllAccessDisabled"):
        return UnreadableError(_REFUSED_TO_ALL if anonymous else _REFUSED)
    if code in _CODES:
        return (Missing if code in ("NoSuchBucket", "NoSuchVersion") else UnreadableError)(_CODES[code])
    return UnreadableError(f"cannot be read: S3 says {code}")
