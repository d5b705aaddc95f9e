"""Object store of S3 and compatible servers: range requests by s3fs, with each answer checked before its body is read.

Credentials come from the places that the AWS tools search. Without credentials, and with AWS_NO_SIGN_REQUEST, requests
are not signed, so that public buckets can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.core.installed_package import install_extra, install_packages
from statecli.storage.fsspec_store import (
    BucketAnswer,
    PerProcess,
    add_page,
    create_bucket_listing,
    import_fsspec,
    translate_network_error,
)
from statecli.storage.limits import settings
from statecli.storage.object_store import REDIRECTS, Listing, Missing, VersionedBytes
from statecli.storage.retry import Transient
from statecli.storage.store import CHANGED_TRY_AGAIN, FileVersion

_Result = TypeVar("_Result")

_BUSY_CODES = frozenset(
    ["SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "OperationAborted"]
)
#: Statuses after which the same request may succeed.
_TRANSIENT_STATUSES = frozenset([408, 429, 500, 502, 503, 504])
#: Messages for error codes of S3.
_CODE_MESSAGES = {
    "NoSuchBucket": "its bucket does not exist",
    "InvalidBucketName": "S3 does not allow this bucket name",
    "InvalidAccessKeyId": "access is refused: S3 does not know the access key of your AWS credentials; set them again",
    "SignatureDoesNotMatch": "access is refused: the secret key of your AWS credentials is wrong; set them again",
    "AuthorizationHeaderMalformed": "access is refused: the bucket is in another region: set AWS_DEFAULT_REGION",
    "ExpiredToken": "access is refused: your AWS credentials have expired; log in again",
    "InvalidToken": "access is refused: the session token of your AWS credentials is not valid; log in again",
    "TokenRefreshRequired": "access is refused: your AWS credentials have expired; log in again",
    "RequestTimeTooSkewed": "access is refused: the clock of this machine is wrong; correct the clock",
    "InvalidObjectState": "is archived (Glacier): restore it first",
    "PreconditionFailed": CHANGED_TRY_AGAIN,
    "412": CHANGED_TRY_AGAIN,
    "NoSuchVersion": "does not have this version",
}
_REFUSED = (
    "access is refused (HTTP 403): your AWS credentials do not give access to this object, or the object does not "
    "exist; for a public object, set AWS_NO_SIGN_REQUEST=yes"
)
#: Message for an answer from a server that is not S3.
_FOREIGN_ANSWER = "the answer did not come from S3 ({what}); check AWS_ENDPOINT_URL and any proxy"
_REFUSED_TO_ALL = (
    "access is refused (HTTP 403): no AWS credentials were found, and this object is not public, or does not "
    "exist; log in, or set AWS_PROFILE"
)
_REFUSED_UNSIGNED = (
    "access is refused (HTTP 403): AWS_NO_SIGN_REQUEST disables your AWS credentials, and this object is not "
    "public, or does not exist; unset AWS_NO_SIGN_REQUEST"
)
_UNUSABLE_CREDENTIALS = "your AWS credentials cannot be used ({name}); check ~/.aws/config, or log in again"
_UNUSABLE_SETTINGS = "the AWS configuration cannot be used ({name}): check the variables AWS_… and ~/.aws/config"


class S3:
    """`ObjectStore` for all S3 buckets."""

    def __init__(self) -> None:
        self._signed, self._unsigned = PerProcess(_create_filesystem), PerProcess(lambda: _create_filesystem(anon=True))
        self._anonymous = _is_unsigned()

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        return self._call(lambda filesystem: _get_range(filesystem, url, offset, length, expected))

    def listing(self, url: str) -> Listing:
        return self._call(lambda filesystem: _list_folder(filesystem, url))

    def _call(self, request: Callable[[Any], Coroutine[Any, Any, _Result]]) -> _Result:
        filesystem = (self._unsigned if self._anonymous else self._signed)()
        try:
            result: _Result = import_fsspec().asyn.sync(filesystem.loop, request, filesystem)
        except (UnreadableError, Transient):
            raise
        except Exception as why:  # noqa: BLE001 - of s3fs, botocore, aiohttp, asyncio
            if type(why).__name__ != "NoCredentialsError" or self._anonymous:
                raise _translate_error(why, anonymous=filesystem.anon) from None
        else:
            return result
        self._anonymous = True
        return self._call(request)


def _is_unsigned() -> bool:
    return os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes", "on")


def _create_filesystem(*, anon: bool | None = None) -> Any:
    import_fsspec()
    try:
        import s3fs
    except ImportError:
        raise MissingDependency(f"s3:// needs the package s3fs: {install_extra('remote')}") from None
    # Add to fsspec's settings, such as an endpoint or a profile, without replacing them.
    options = {} if anon is None else {"anon": anon}
    filesystem = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
    limits = settings()
    own_options = {
        "connect_timeout": min(10.0, limits.timeout),
        "read_timeout": limits.timeout,
        "max_pool_connections": limits.connections,
        "retries": {"total_max_attempts": 1},
        "http_session_cls": _create_session_class(),
    }
    filesystem.config_kwargs = {**filesystem.config_kwargs, **own_options}
    filesystem.retries = 1  # `retry` repeats requests
    return filesystem


def _create_session_class() -> type:
    """Return an aiobotocore session class without redirects, because aiohttp would send session tokens to any server.

    botocore itself follows redirects to another region.
    """
    from aiobotocore.config import AioConfig  # type: ignore[import-untyped]
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class Session(AIOHTTPSession):  # type: ignore[misc]  # it has no types
        async def _get_session(self, proxy_url: str | None) -> Any:
            return _SessionWithoutRedirects(await super()._get_session(proxy_url))

    try:
        AioConfig(http_session_cls=Session)
        AIOHTTPSession._get_session  # noqa: B018 - without this method redirects cannot be refused
    except (AttributeError, TypeError):
        advice = install_packages("s3fs", "aiobotocore", upgrade=True)
        raise MissingDependency(f"s3:// needs another version of aiobotocore: {advice}") from None
    return Session


class _SessionWithoutRedirects:
    """aiohttp session that does not follow redirects. Raises UnreadableError for a redirect that names no S3 region."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *arguments: Any, **options: Any) -> Any:
        answer = await self._session.request(*arguments, **options, allow_redirects=False)
        leads_away = "Location" in answer.headers or answer.method == "HEAD"  # botocore requests the region with HEAD
        if answer.status in REDIRECTS and leads_away and "x-amz-bucket-region" not in answer.headers:
            answer.close()
            raise UnreadableError(_FOREIGN_ANSWER.format(what=f"HTTP {answer.status}"))
        return answer


def _parse_key(url: str) -> tuple[str, str, dict[str, str]]:
    """Return bucket, key, and the options that select the requested version."""
    path, _, version = url.partition("://")[2].partition("?versionId=")
    bucket, _, key = path.partition("/")
    if "@" in bucket:
        raise UnreadableError("contains credentials, which an s3:// URL cannot have: set AWS_PROFILE or log in")
    if not bucket:
        raise UnreadableError("does not contain a bucket: write s3://BUCKET/KEY")
    return bucket, key, {"VersionId": version} if version else {}


async def _get_range(
    filesystem: Any, url: str, offset: int, length: int, expected: FileVersion | None
) -> VersionedBytes:
    bucket, key, options = _parse_key(url)
    if not key:
        raise Missing("is an empty bucket")
    options["Range"] = f"bytes={offset}-{offset + length - 1}"
    if expected is not None and expected.marker is not None:
        options["IfMatch"] = expected.marker
    try:
        answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **options)
    except OSError as why:
        if _find_answer(why)[0] in ("InvalidRange", "416") and offset == 0:
            return VersionedBytes(b"", FileVersion(0, None))  # an empty object has no valid range
        raise
    with closing(answer["Body"]) as body:
        head = BucketAnswer(answer.get("ContentRange"), answer.get("ContentLength"), answer.get("ETag"), body)
        return await head.read(offset, length, expected)


async def _list_folder(filesystem: Any, url: str) -> Listing:
    bucket, key, _ = _parse_key(url)
    prefix = f"{key.rstrip('/')}/" if key.strip("/") else ""
    folders: dict[str, bool] = {}
    continuation: dict[str, str] = {}
    while True:
        page = await filesystem._call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **continuation)
        if "IsTruncated" not in page:  # botocore parses an HTML page as an empty listing
            raise UnreadableError(_FOREIGN_ANSWER.format(what="the answer is not a file listing"))
        keys = [entry["Key"] for entry in page.get("Contents", ())]
        add_page(folders, prefix, keys, [entry["Prefix"] for entry in page.get("CommonPrefixes", ())])
        if not page.get("IsTruncated"):
            return create_bucket_listing(folders, prefix)
        continuation = {"ContinuationToken": page["NextContinuationToken"]}


def _find_answer(why: BaseException) -> tuple[str | None, int]:
    """Return S3's error code and the HTTP status from an error of s3fs or its causes; None and 0 if unknown.

    For an answer without a code, botocore has no code or uses the status as the code.
    """
    error: BaseException | None = why
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response["Error"].get("Code") or ""), int(status or 0)
        error = error.__cause__
    return None, 0


def _translate_error(why: Exception, *, anonymous: bool) -> Exception:
    """Convert a library's error to an error of statecli, because the library's text may contain secrets."""
    setup_error = _explain_setup_error(why)
    if setup_error is not None:
        return setup_error
    code, status = _find_answer(why)
    if code is not None:
        return _explain_foreign_answer(code, status) or _explain_code(code, status, anonymous=anonymous)
    name = type(why).__name__
    if name == "ParamValidationError":
        return UnreadableError(_CODE_MESSAGES["InvalidBucketName"])
    if name in ("SSLError", "CertificateError"):
        return UnreadableError(
            "the server's certificate is not trusted: set AWS_CA_BUNDLE to the file of its CA certificate"
        )
    cause = getattr(why, "kwargs", {}).get("error")
    if isinstance(cause, UnreadableError):
        return cause
    if isinstance(cause, (FileNotFoundError, IsADirectoryError, PermissionError)):
        return UnreadableError("AWS_CA_BUNDLE is not the path of a readable file of certificates")
    if isinstance(cause, ValueError):
        return UnreadableError(
            "your AWS credentials contain characters that an HTTP header cannot have: set them again, without line "
            "breaks"
        )
    return translate_network_error(why)


def _explain_setup_error(why: Exception) -> Exception | None:
    """Return the error for credentials or a configuration that prevented a request; None if a request was sent."""
    modules = {frame.f_globals.get("__name__", "").removeprefix("aio") for frame in _walk_frames(why)}
    name = type(why).__name__
    if modules & {"botocore.credentials", "botocore.tokens"} and name not in ("ConfigParseError", "ProfileNotFound"):
        error = translate_network_error(why)
        if isinstance(error, Transient):
            return Transient(f"AWS credentials could not be obtained: {error}")
        return UnreadableError(_UNUSABLE_CREDENTIALS.format(name=name))
    if "botocore.session" not in modules and name != "EndpointResolutionError":
        return None
    return UnreadableError(_UNUSABLE_SETTINGS.format(name=name))


def _walk_frames(why: Exception) -> Iterator[FrameType]:
    """Yield the frames of an error and of its causes: s3fs raises a Python error whose cause is the real error."""
    error: BaseException | None = why
    while error is not None:
        yield from (frame for frame, _ in walk_tb(error.__traceback__))
        error = error.__cause__


def _explain_foreign_answer(code: str, status: int) -> Exception | None:
    """Return the error for an answer from a proxy or a web server; None for an answer from S3."""
    if code in _CODE_MESSAGES or (code and not code.isdecimal()):
        return None
    if status in _TRANSIENT_STATUSES:
        # botocore also reports status 500 for an HTML page with status 200.
        status_text = "not XML" if status == 500 else f"HTTP {status}"
        return Transient(_FOREIGN_ANSWER.format(what=status_text))
    return (Missing if status == 404 else UnreadableError)(_FOREIGN_ANSWER.format(what=f"HTTP {status}"))


def _explain_code(code: str, status: int, *, anonymous: bool) -> Exception:
    if code in _BUSY_CODES or status in _TRANSIENT_STATUSES:
        return Transient(f"S3 is busy ({code})")
    if code == "NoSuchKey":
        return Missing("does not exist")
    if code in ("AccessDenied", "AllAccessDisabled"):
        refused = _REFUSED_UNSIGNED if _is_unsigned() else _REFUSED_TO_ALL
        return UnreadableError(refused if anonymous else _REFUSED)
    if code in _CODE_MESSAGES:
        return (Missing if code in ("NoSuchBucket", "NoSuchVersion") else UnreadableError)(_CODE_MESSAGES[code])
    return UnreadableError(f"cannot be read: S3 reports {code}")
