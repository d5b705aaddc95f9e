"""Object store of the Hugging Face Hub: `hf://[datasets/|spaces/]org/name[@revision]/path`.

The hub's API resolves a revision to a commit, once per command, and lists the files; `http` reads the bytes. Endpoint
and token come from the package huggingface_hub.
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, unquote

from statecli.core.errors import MissingDependency, UnreadableError
from statecli.core.installed_package import install_extra
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage.credentials import parse_server
from statecli.storage.fsspec_store import create_listing
from statecli.storage.http import Http, JsonPage
from statecli.storage.http_refusals import RangeRefused
from statecli.storage.object_store import Listing, Missing, VersionedBytes
from statecli.storage.retry import retry
from statecli.storage.store import FileVersion

_TYPES = frozenset(["datasets", "spaces", "models"])
_REVISION = compile_on_use(r"(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+)(?:/(?P<path>.*))?", re.DOTALL)
_LOGIN_ADVICE = "log in with `hf auth login`, or set HF_TOKEN"


class HubPath(NamedTuple):
    """A path in a revision of a repository. `kind` is "models", "datasets" or "spaces", as in the hub's API."""

    kind: str
    repo: str
    revision: str
    path: str

    @property
    def full_name(self) -> str:
        """Name of the repository as in a URL."""
        return self.repo if self.kind == "models" else f"{self.kind}/{self.repo}"


class _NoRepository(Missing):
    """Error: the repository does not exist on the hub, or the token gives no access to the repository."""


class Hub:
    """`ObjectStore` for all repositories of one endpoint."""

    def __init__(self) -> None:
        try:
            from huggingface_hub import constants, get_token
        except ImportError:
            raise MissingDependency(f"hf:// needs the package huggingface_hub: {install_extra('hf')}") from None
        if constants.HF_HUB_OFFLINE:
            raise UnreadableError(
                "statecli sent no request to the hub, because HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE"
            )
        self._endpoint = constants.ENDPOINT
        if not self._endpoint.startswith(("http://", "https://")):
            raise UnreadableError("HF_ENDPOINT is not a URL: write https://HOST")
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self._has_token = bool(token)
        self._http = Http({"Authorization": f"Bearer {token}"} if token else {})
        self._commits: dict[tuple[str, str, str], str | UnreadableError] = {}
        self._lock = threading.Lock()

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        place, commit = self._resolve(url)
        if not place.path:
            raise Missing("is a repository")
        try:
            link = f"{self._endpoint}/{place.full_name}/resolve/{commit}/{quote(place.path)}"
            return self._http.get(link, offset, length, expected)
        except RangeRefused as why:
            raise self._explain_refusal(why, place) from None

    def listing(self, url: str) -> Listing:
        place, commit = self._resolve(url)
        path = f"api/{place.kind}/{place.repo}/tree/{commit}/{quote(place.path.strip('/'))}".rstrip("/")
        folders: set[tuple[str, bool]] = set()
        link: str | None = f"{self._endpoint}/{path}"
        visited_links: set[str] = set()
        while link is not None:
            # Refuse other servers, because the token is sent to the server of the next page.
            if link in visited_links or not link.startswith(f"{self._endpoint}/"):
                raise UnreadableError("the file listing of the hub repeats a page or continues on another host")
            visited_links.add(link)
            page, link = self._fetch(link, place)
            if not isinstance(page, list) or not all(isinstance(entry, dict) for entry in page):
                raise UnreadableError("the hub's listing is not a list of files")
            for entry in page:
                folders.add((str(entry.get("path", "")).rpartition("/")[2], entry.get("type") == "directory"))
        if len(dict(folders)) < len(folders):
            raise UnreadableError(
                "the hub lists one name both as a file and as a folder; give the URLs of the files instead of the URL "
                "of the folder"
            )
        return create_listing(dict(sorted(folders)))

    def _resolve(self, url: str) -> tuple[HubPath, str]:
        """Return the path that a URL names, and the commit of its revision. Raises UnreadableError if not found."""
        first, *others = _parse_places(url)
        with self._lock:
            try:
                return first, self._find_commit(first)
            except _NoRepository:
                for place in others:  # in `gpt2/config.json` the repository has only one name
                    with suppress(Missing):
                        return place, self._find_commit(place)
                raise

    def _find_commit(self, place: HubPath) -> str:
        key = place[:3]
        if key not in self._commits:
            try:
                self._commits[key] = self._request_commit(place)
            except UnreadableError as why:
                self._commits[key] = why
        commit = self._commits[key]
        if isinstance(commit, UnreadableError):
            raise commit
        return commit

    def _request_commit(self, place: HubPath) -> str:
        revision = quote(place.revision, "")
        page = self._fetch(f"{self._endpoint}/api/{place.kind}/{place.repo}/revision/{revision}", place).document
        commit = page.get("sha") if isinstance(page, dict) else None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise UnreadableError(
                f"{self._endpoint} is not a Hugging Face hub: its answer has no commit; check HF_ENDPOINT"
            )
        return commit

    def _fetch(self, link: str, place: HubPath) -> JsonPage:
        try:
            return retry(lambda: self._http.document(link), link)
        except RangeRefused as why:
            raise self._explain_refusal(why, place) from None
        except UnreadableError as why:
            if type(why) is not UnreadableError:
                raise
            # Name the hub, because the URL that the user typed does not name it.
            raise UnreadableError(f"the hub, {parse_server(self._endpoint)}: {why}") from None

    def _explain_refusal(self, why: RangeRefused, place: HubPath) -> UnreadableError:
        code, has_token = why.headers.get("X-Error-Code"), self._has_token
        if code == "GatedRepo":
            message = f"is gated: accept its conditions on {self._endpoint}/{place.full_name}"
            return UnreadableError(
                f"{message}, with the account of your token" if has_token else f"{message}, then {_LOGIN_ADVICE}"
            )
        if code == "RevisionNotFound":
            return Missing(f"{place.full_name} has no revision {place.revision}")
        if code == "EntryNotFound":
            return Missing("does not exist")
        if why.status == 401 and has_token and code is None:
            return UnreadableError(f"the hub does not accept your token (HTTP 401): {_LOGIN_ADVICE}")
        if code == "RepoNotFound" or why.status in (401, 404):
            other_cause = "your token does not give access to it" if has_token else f"is private: {_LOGIN_ADVICE}"
            return _NoRepository(f"the repository {place.full_name} does not exist, or {other_cause}")
        if why.status == 403:
            return UnreadableError(
                f"access is refused (HTTP 403): your token does not give access to {place.full_name}"
            )
        return why


def _parse_places(url: str) -> list[HubPath]:
    """Return the repository paths that a URL may mean, the likeliest first. Raises UnreadableError if it names none."""
    path = url.partition("://")[2]
    first_step, _, remaining_path = path.partition("/")
    kind, path = (first_step, remaining_path) if first_step in _TYPES else ("models", path)
    steps = path.split("/")
    if not steps[0] or ".." in steps:
        raise UnreadableError("does not contain a repository: write hf://org/name[@revision]/path")
    lengths = [1] if "@" in steps[0] or len(steps) == 1 or not steps[1] else [2] if "@" in steps[1] else [2, 1]
    return [_parse_place(kind, "/".join(steps[:n]), steps[n:]) for n in lengths]


def _parse_place(kind: str, repo: str, steps: list[str]) -> HubPath:
    repo, at, revision = repo.partition("@")
    path = "/".join(steps)
    if not at:
        return HubPath(kind, repo, "main", path)
    match = _REVISION.fullmatch("/".join((revision, *steps)))
    if match is None:
        raise UnreadableError("has no revision after the @: write hf://org/name@revision/path")
    return HubPath(kind, repo, unquote(match["revision"]), match["path"] or "")
