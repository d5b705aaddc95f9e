"""The Hugging Face Hub: `hf://[datasets/|spaces/]org/name[@revision]/path`, each revision found once in a command.

The hub says which commit a revision is and what lies in it; bytes are http's. Its endpoint and its token are where
huggingface_hub has them.
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.storage.credentials import place as host_of
from statecli.storage.fsspec_store import listing_of
from statecli.storage.http import Http, Refused, document
from statecli.storage.retry import repeated
from statecli.storage.store import Known, Listing, Missing

_TYPES = frozenset(["datasets", "spaces", "models"])
_REVISION = re.compile(r"(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+)(?:/(?P<path>.*))?", re.DOTALL)
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class Place(NamedTuple):
    """What a URL names: a path in a revision of a repository, `kind` as the hub's API calls it."""

    kind: str
    repo: str
    revision: str
    path: str

    @property
    def shown(self) -> str:
        """The repository, as it is written."""
        return self.repo if self.kind == "models" else f"{self.kind}/{self.repo}"


class _NoRepository(Missing):
    """The hub has none of that name, or says so to those who may not read it."""


class Hub:
    """All repositories of one endpoint."""

    def __init__(self) -> None:
        constants, get_token = _imported()
        if constants.HF_HUB_OFFLINE:
            raise UnreadableError("the hub is not asked: HF_HUB_OFFLINE is set")
        self._endpoint = constants.ENDPOINT
        if not self._endpoint.startswith(("http://", "https://")):
            raise UnreadableError("HF_ENDPOINT is no URL: write https://HOST")
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = Http(self._headers)
        self._commits: dict[tuple[str, str, str], str | UnreadableError] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Hub({self._endpoint})"

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`."""
        place, commit = self._found(url)
        if not place.path:
            raise Missing("is a repository")
        way = place.repo if place.kind == "models" else f"{place.kind}/{place.repo}"
        try:
            where = f"{self._endpoint}/{way}/resolve/{commit}/{quote(place.path)}"
            return self._http.get(where, offset, length, known)
        except Refused as why:
            raise self._refused(why, place) from None

    def listing(self, url: str) -> Listing:
        """As `Store.listing`."""
        place, commit = self._found(url)
        way = f"api/{place.kind}/{place.repo}/tree/{commit}/{quote(place.path.strip('/'))}".rstrip("/")
        folders: dict[str, bool] = {}
        where: str | None = f"{self._endpoint}/{way}"
        seen: set[str] = set()
        while where is not None:
            # The token goes wherever the next page is.
            if where in seen or not where.startswith(f"{self._endpoint}/"):
                raise UnreadableError("the hub's listing goes on in a circle, or on another host")
            seen.add(where)
            page, where = self._told(where, place)
            entries = page if isinstance(page, list) else []
            folders.update((_name(one), one.get("type") == "directory") for one in entries if isinstance(one, dict))
        return listing_of(folders)

    def _found(self, url: str) -> tuple[Place, str]:
        """The place and the commit that its revision is. Raises UnreadableError where there is none."""
        first, *others = _places(url)
        with self._lock:
            try:
                return first, self._commit(first)
            except _NoRepository:
                for place in others:  # `gpt2/config.json` is a file of a repository of one word
                    with suppress(Missing):
                        return place, self._commit(place)
                raise

    def _commit(self, place: Place) -> str:
        key = place[:3]
        if key not in self._commits:
            try:
                self._commits[key] = self._asked(place)
            except UnreadableError as why:
                self._commits[key] = why
        found = self._commits[key]
        if isinstance(found, UnreadableError):
            raise found
        return found

    def _asked(self, place: Place) -> str:
        revision = quote(place.revision, "")
        page, _ = self._told(f"{self._endpoint}/api/{place.kind}/{place.repo}/revision/{revision}", place)
        found = page.get("sha") if isinstance(page, dict) else None
        if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{40,64}", found):
            raise UnreadableError(f"{self._endpoint} is no hub: it names no commit")
        return found

    def _told(self, where: str, place: Place) -> tuple[Any, str | None]:
        try:
            return repeated(lambda: document(where, self._headers), where)
        except Refused as why:
            raise self._refused(why, place) from None
        except UnreadableError as why:
            if type(why) is not UnreadableError:
                raise
            # The URL does not name it.
            raise UnreadableError(f"the hub, {host_of(self._endpoint)}: {why}") from None

    def _refused(self, why: Refused, place: Place) -> UnreadableError:
        """What an answer of the hub means to whoever asked."""
        code, has_token = why.headers.get("X-Error-Code"), bool(self._headers)
        if code == "GatedRepo":
            ask = f"is gated: accept its conditions on {self._endpoint}/{place.shown}"
            return UnreadableError(f"{ask}, with the account of your token" if has_token else f"{ask}, then {_LOG_IN}")
        if code == "RevisionNotFound":
            return Missing(f"{place.shown} has no revision {place.revision}")
        if code == "EntryNotFound":
            return Missing("is not there")
        if why.status == 401 and has_token and code is None:
            return UnreadableError(f"the hub does not take your token (HTTP 401): {_LOG_IN}")
        if code == "RepoNotFound" or why.status in (401, 404):
            what = f"there is no repository {place.shown}, or it is private"
            return _NoRepository(f"{what} and your token may not read it" if has_token else f"{what}: {_LOG_IN}")
        if why.status == 403:
            return UnreadableError(f"access is refused (HTTP 403): your token may not read {place.shown}")
        return why


def _imported() -> tuple[Any, Any]:
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        raise MissingDependency("hf:// needs the package huggingface_hub: pip install 'statecli[hf]'") from None
    return constants, get_token


def _places(url: str) -> list[Place]:
    """What a URL may name, the likeliest first. Raises UnreadableError for what names no repository."""
    way = url.partition("://")[2]
    first, _, rest = way.partition("/")
    kind, way = (first, rest) if first in _TYPES else ("models", way)
    steps = way.split("/")
    if not steps[0] or ".." in steps:
        raise UnreadableError("names no repository: write hf://org/name[@revision]/path")
    lengths = [1] if "@" in steps[0] or len(steps) == 1 or not steps[1] else [2] if "@" in steps[1] else [2, 1]
    return [_place(kind, "/".join(steps[:n]), steps[n:]) for n in lengths]


def _place(kind: str, repo: str, steps: list[str]) -> Place:
    repo, at, revision = repo.partition("@")
    path = "/".join(steps)
    if not at:
        return Place(kind, repo, "main", path)
    found = _REVISION.fullmatch("/".join((revision, *steps)))
    if found is None:
        raise UnreadableError("names no revision after the @: write hf://org/name@revision/path")
    return Place(kind, repo, unquote(found["revision"]), found["path"] or "")


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("path", "")).rpartition("/")[2]
