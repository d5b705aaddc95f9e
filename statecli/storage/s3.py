"""S3, and what speaks its language: ranges by s3fs' own calls, each answer held to what was asked before it is read.

Credentials are those that the AWS tools find. Where they find none, what is public is read without; so it is wherever
AWS_NO_SIGN_REQUEST says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.storage.fsspec_store import PerProcess, bucket_listing, held, imported, span, take_page, unreached
from statecli.storage.limits import settings
from statecli.storage.retry import Transient
from statecli.storage.store import CHANGED, Known, Listing, Missing

_Found = TypeVar("_Found")

_BUSY = frozenset(
    ["SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "OperationAborted"]
)
#: What may be another answer later, whoever gave it.
_AGAIN = frozenset([408, 429, 500, 502, 503, 504])
#: What leads elsewhere.
_MOVED = frozenset([301, 302, 303, 307, 308])
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
_REFUSED_UNSIGNED = (
    "access is refused (HTTP 403): AWS_NO_SIGN_REQUEST asks without AWS credentials, and without them it may not be "
    "read; unset it"
)
#: What is at fault, by a part of the name of what in botocore looked for credentials and had none.
_SOURCES = {
    "SSO": "there is no AWS login, or it has expired; log in again: aws sso login",
    "WebIdentity": "AWS gives no credentials for a web identity: check AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN",
    "AssumeRole": "AWS gives no credentials for the role of your profile: check role_arn and source_profile in the AWS "
    "configuration, or log in again",
    "Process": "the program that credential_process in the AWS configuration names gives no credentials: run it",
    "Container": "the container gives no AWS credentials: check AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "EnvProvider": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong together: set both",
    "": "your AWS credentials cannot be used ({name}); log in again",
}
#: The variables that say where S3 is, the one that counts first.
_ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
#: What is at fault where nothing was asked for yet, by a part of the error's name.
_SETTINGS = {
    "ProfileNotFound": "AWS_PROFILE names a profile that is not in the AWS configuration",
    "ConfigParseError": "the AWS configuration is not written as one: mend {path}",
    "InvalidRegion": "no region of AWS is called so: set AWS_DEFAULT_REGION",
    "EndpointResolution": "the endpoint of S3 is no URL: set {endpoint} to http://… or https://…",
    "ValueError": "the endpoint of S3 is no URL: set {endpoint} to http://… or https://…",
    "": "the AWS configuration cannot be used ({name}): check the variables AWS_… and ~/.aws/config",
}


class S3:
    """All buckets."""

    def __init__(self) -> None:
        self._signed, self._unsigned = PerProcess(_filesystem), PerProcess(lambda: _filesystem(anon=True))
        self._anonymous = _is_unsigned()

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


def _is_unsigned() -> bool:
    return os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes", "on")


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
        "http_session_cls": _session(),
    }
    found.config_kwargs = {**found.config_kwargs, **ours}
    found.retries = 1  # `attempts` asks again
    return found


def _session() -> type:
    """How aiobotocore asks, but for redirects: aiohttp would follow them anywhere, and take session tokens along.

    botocore itself follows those to another region.
    """
    from aiobotocore.config import AioConfig  # type: ignore[import-untyped]
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class Session(AIOHTTPSession):  # type: ignore[misc]  # it has no types
        async def _get_session(self, proxy_url: str | None) -> Any:
            return _Direct(await super()._get_session(proxy_url))

    try:
        AioConfig(http_session_cls=Session)
        AIOHTTPSession._get_session  # noqa: B018 - what is not there cannot be told not to follow
    except (AttributeError, TypeError):
        raise MissingDependency("s3:// needs another aiobotocore: pip install -U s3fs aiobotocore") from None
    return Session


class _Direct:
    """A session of aiohttp that follows no redirect, and refuses those that name no region."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *what: Any, **options: Any) -> Any:
        answer = await self._session.request(*what, **options, allow_redirects=False)
        leads_away = "Location" in answer.headers or answer.method == "HEAD"  # by which botocore asks for the region
        if answer.status in _MOVED and leads_away and "x-amz-bucket-region" not in answer.headers:
            answer.close()
            raise UnreadableError(_FOREIGN.format(what=f"HTTP {answer.status}"))
        return answer


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
            return bucket_listing(folders, prefix)
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
    own = _unready(why)
    if own is not None:
        return own
    code, status = _answer(why)
    if code is not None:
        return _foreign(code, status) or _told(code, status, anonymous=anonymous)
    name = type(why).__name__
    if name == "ParamValidationError":
        return UnreadableError(_CODES["InvalidBucketName"])
    if name in ("SSLError", "CertificateError"):
        return UnreadableError("the server's certificate is not trusted: set AWS_CA_BUNDLE to the one that signed it")
    inner = getattr(why, "kwargs", {}).get("error")
    if isinstance(inner, UnreadableError):
        return inner
    if isinstance(inner, (FileNotFoundError, IsADirectoryError, PermissionError)):
        return UnreadableError("AWS_CA_BUNDLE names no file of certificates that can be read")
    if isinstance(inner, ValueError):
        return UnreadableError("your AWS credentials hold what no header may: set them again, without line breaks")
    return unreached(why)


def _unready(why: Exception) -> Exception | None:
    """The error where S3 was not asked, for want of credentials or of a configuration; None where it was."""
    frames = list(_frames(why))
    modules = {frame.f_globals.get("__name__", "").removeprefix("aio") for frame in frames}
    name = type(why).__name__
    if modules & {"botocore.credentials", "botocore.tokens"} and name not in ("ConfigParseError", "ProfileNotFound"):
        error = unreached(why)
        if isinstance(error, Transient):
            return Transient(f"no AWS credentials came: {error}")
        makers = {type(frame.f_locals.get("self")).__name__ for frame in frames}
        told = next(told for part, told in _SOURCES.items() if any(part in maker for maker in makers))
        return UnreadableError(told.format(name=name))
    if "botocore.session" not in modules and name != "EndpointResolutionError":
        return None
    endpoint = next((one for one in _ENDPOINTS if os.environ.get(one)), "endpoint_url in the AWS configuration")
    told = next(told for part, told in _SETTINGS.items() if part in name)
    return UnreadableError(told.format(name=name, endpoint=endpoint, path=getattr(why, "kwargs", {}).get("path")))


def _frames(why: Exception) -> Iterator[FrameType]:
    """Where an error came by, also before s3fs made another of it."""
    error: BaseException | None = why
    while error is not None:
        yield from (frame for frame, _ in walk_tb(error.__traceback__))
        error = error.__cause__


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
        refused = _REFUSED_UNSIGNED if _is_unsigned() else _REFUSED_TO_ALL
        return UnreadableError(refused if anonymous else _REFUSED)
    if code in _CODES:
        return (Missing if code in ("NoSuchBucket", "NoSuchVersion") else UnreadableError)(_CODES[code])
    return UnreadableError(f"cannot be read: S3 says {code}")
