"""Every place that fsspec knows: `s3://`, `gs://`, `memory://`, …"""

from __future__ import annotations

from typing import Any

from statecli.errors import MissingDependency, UnreadableError
from statecli.remote.stores import Known, Listing, Missing


class Filesystem:
    """The file system of fsspec that a URL names."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as missing:
            raise MissingDependency("URLs need the package fsspec: pip install 'statecli[remote]'") from missing
        self._fs: Any = fsspec.core.url_to_fs(url)[0]

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`."""
        path = self._fs._strip_protocol(url)
        try:
            if known is None:
                found = self._fs.info(path)
                if found["type"] == "directory":
                    raise Missing("is a folder")
                known = (int(found["size"]), found.get("ETag"))
            data = self._fs.cat_file(path, start=offset, end=min(offset + length, known[0]))
        except FileNotFoundError:
            raise Missing("is not there") from None
        if len(data) != max(0, min(length, known[0] - offset)):
            raise UnreadableError("the store answered with another range than was asked")
        return data, known

    def listing(self, url: str) -> Listing:
        """As `Store.listing`."""
        try:
            found = self._fs.ls(self._fs._strip_protocol(url), detail=True)
        except FileNotFoundError:
            raise Missing("is not there") from None
        return Listing({one["name"].rstrip("/").rpartition("/")[2]: one["type"] == "directory" for one in found})
