"""The part of Google Cloud Storage's JSON API needed to read objects: buckets, listings, metadata, bytes.

Each folder in the served folder is a bucket.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path

from .server import Reply, Request, Server, file_reply


class CloudStorage(Server):
    """A server for STORAGE_EMULATOR_HOST; anonymous callers may not read the buckets in `private`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.private: set[str] = set()

    def answer(self, request: Request) -> Reply:
        media = request.path.startswith("download/") or request.query.get("alt") == "media"
        match request.path.removeprefix("download/").split("/", 5):
            case ["storage", "v1", "b", bucket, *rest]:
                pass
            case _:
                return _error(404, "Not Found")
        if not (self.folder / bucket).is_dir():
            return _error(404, "The specified bucket does not exist.")
        if bucket in self.private and "authorization" not in request.headers:
            who = "Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object."
            return _error(401, who)
        if not rest:
            return _json({"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "US"})
        if rest == ["o"]:
            return self._listing(request, bucket)
        return self._object(request, bucket, rest[1], media)

    def _object(self, request: Request, bucket: str, name: str, media: bool) -> Reply:
        path = self.folder / bucket / name
        if not path.is_file():
            return _error(404, f"No such object: {bucket}/{name}")
        return file_reply(request, path) if media else _json(_resource(self.folder / bucket, path))

    def _listing(self, request: Request, bucket: str) -> Reply:
        root, prefix = self.folder / bucket, request.query.get("prefix", "")
        objects = sorted(path for path in root.rglob("*") if path.is_file())
        names = {path.relative_to(root).as_posix(): path for path in objects}
        items, prefixes = [], set()
        for name, path in names.items():
            if name.startswith(prefix):
                head, slash, _ = name[len(prefix) :].partition("/")
                if slash and request.query.get("delimiter") == "/":
                    prefixes.add(f"{prefix}{head}/")
                else:
                    items.append(_resource(root, path))
        return _json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})


def _resource(root: Path, path: Path) -> dict[str, object]:
    status, data = path.stat(), path.read_bytes()
    date = datetime.fromtimestamp(status.st_mtime, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    named = {
        "kind": "storage#object",
        "bucket": root.name,
        "name": path.relative_to(root).as_posix(),
        "md5Hash": digest,
    }
    generation = str(status.st_mtime_ns // 1000)
    return named | {"size": str(status.st_size), "updated": date, "timeCreated": date, "generation": generation}


def _json(document: object, status: int = 200) -> Reply:
    return Reply(status, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(document).encode())


def _error(status: int, message: str) -> Reply:
    return _json({"error": {"code": status, "message": message, "errors": [{"message": message}]}}, status)
