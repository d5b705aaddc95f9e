"""A fake S3 for faults that moto lacks: counts requests, refuses and redirects them, and changes its objects.

folder/bucket/key…          served as https://docs.aws.amazon.com/AmazonS3/latest/API/ describes for reads
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from .server import Behaviour, Reply, Request, Server

PAGE = 3  # keys per page of a listing


def refuse_as_s3(status: int, code: str, **headers: str) -> Behaviour:
    """Refuse a request with an error of S3; like the real text, its text repeats the secret authorization header."""

    def refuse(request: Request, reply: Reply) -> None:
        authorization = escape(request.headers.get("authorization", "nothing"))
        text = (
            f"<Code>{code}</Code><Message>no: {authorization}</Message><AWSAccessKeyId>{authorization}</AWSAccessKeyId>"
        )
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply.become(Reply(status, {"Content-Type": "application/xml", **named}, f"<Error>{text}</Error>".encode()))

    return refuse


class S3(Server):
    """Each folder is a bucket; `region` is the region of all buckets, or None to accept any region."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.region: str | None = None

    def answer(self, request: Request) -> Reply:
        bucket, _, key = request.path.partition("/")
        reply = Reply(200)
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/", request.headers.get("authorization", ""))
        if self.region is not None and scope and scope[1] != self.region:
            refuse_as_s3(301, "PermanentRedirect", x_amz_bucket_region=self.region)(request, reply)
        elif not (self.folder / bucket).is_dir():
            refuse_as_s3(404, "NoSuchBucket")(request, reply)
        elif "list-type" in request.query:
            reply = self._listing(request, self.folder / bucket)
        elif not (self.folder / bucket / key).is_file():
            refuse_as_s3(404, "NoSuchKey")(request, reply)
        else:
            reply = super().answer(request)
            if reply.status == 416:
                refuse_as_s3(416, "InvalidRange")(request, reply)
            elif reply.status == 412:
                refuse_as_s3(412, "PreconditionFailed")(request, reply)
        return reply

    def _listing(self, request: Request, root: Path) -> Reply:
        prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
        keys = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        inner = {key[: (key.find("/", len(prefix)) + 1) or None] for key in keys if key.startswith(prefix)}
        next_keys = [key for key in sorted(inner) if key > after]
        entries = "".join(_entry(root, key) for key in next_keys[:PAGE])
        next_token = (
            f"<NextContinuationToken>{escape(next_keys[PAGE - 1])}</NextContinuationToken>" if next_keys[PAGE:] else ""
        )
        text = f"<IsTruncated>{str(bool(next_keys[PAGE:])).lower()}</IsTruncated>{next_token}{entries}"
        return Reply(200, {"Content-Type": "application/xml"}, f"<ListBucketResult>{text}</ListBucketResult>".encode())


def _entry(root: Path, key: str) -> str:
    if key.endswith("/"):
        return f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
    size = (root / key).stat().st_size
    return f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;x&quot;</ETag></Contents>"
