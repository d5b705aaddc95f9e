"""A small fake of the Hugging Face Hub that answers HfFileSystem and hf_hub_url as the real hub does.

folder/org/name/…           the files of a repository at `main`
folder/org/name@v1/…        another revision of the repository
folder/datasets/org/name/…  a repository of data
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from .server import Reply, Request, Server, file_reply, page

SIGNATURE = "c2lnbmVkIGJ5IHRoZSBodWI"  # in each URL of the "CDN"; no output may contain it
LARGE = (".safetensors", ".bin", ".pt", ".gguf")  # kept in LFS, and so behind a redirect


class _Cdn(Server):
    """The other host, which serves only requests with a signature and without a token."""

    def answer(self, request: Request) -> Reply:
        if request.query.get("Signature") != SIGNATURE or "authorization" in request.headers:
            return page(403, "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        reply = super().answer(request)
        reply.headers["ETag"] = f'"{_sha256(self.folder / request.path)}"'
        return reply


class Hub(Server):
    """`private` and `gated` map a repository to the token that opens the repository; anybody may list a gated
    repository.

    Files in LFS are behind a redirect to `cdn`, a separate server.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.private: dict[str, str] = {}
        self.gated: dict[str, str] = {}
        self.cdn = _Cdn(self.folder)

    def __enter__(self) -> Hub:
        self.cdn.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.cdn.__exit__(*error)
        super().__exit__(*error)

    def commit(self, repo: str, revision: str = "main") -> str:
        """Return the hash of the revision's commit, which names the revision too."""
        return hashlib.sha1(f"{repo}@{revision}".encode(), usedforsecurity=False).hexdigest()

    def answer(self, request: Request) -> Reply:
        parts = request.path.split("/")
        match parts:
            case ["api", "models", org, name, *rest]:
                return self._refused(request, f"{org}/{name}", gate=False) or self._describe(
                    request, f"{org}/{name}", rest
                )
            case ["api", "datasets" as kind, org, name, *rest]:
                repo = f"{kind}/{org}/{name}"
                return self._refused(request, repo, gate=False) or self._describe(request, repo, rest)
            case ["datasets" as kind, org, name, "resolve", revision, *path]:
                repo = f"{kind}/{org}/{name}"
                return self._refused(request, repo, gate=True) or self._resolved(
                    request, repo, revision, "/".join(path)
                )
            case [org, name, "resolve", revision, *path]:
                refused = self._refused(request, f"{org}/{name}", gate=True)
                return refused or self._resolved(request, f"{org}/{name}", revision, "/".join(path))
        return page(404, "<h1>404</h1>")

    def _revision(self, repo: str, name: str) -> str | None:
        revisions = [
            "main",
            *(path.name.partition("@")[2] for path in (self.folder / repo).parent.glob(f"{Path(repo).name}@*")),
        ]
        return next((revision for revision in revisions if name in (revision, self.commit(repo, revision))), None)

    def _tree(self, repo: str, revision: str) -> Path:
        return self.folder / (repo if revision == "main" else f"{repo}@{revision}")

    def _refused(self, request: Request, repo: str, gate: bool) -> Reply | None:
        """Return the hub's refusal of a request without the right token for the repository, or None."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        hidden = self.private.get(repo, token) != token or not (self.folder / repo).is_dir()
        if hidden and not token:
            return _error(401, "Invalid username or password.", "RepoNotFound")
        if hidden:
            return _error(404, "Repository not found", "RepoNotFound")
        if gate and self.gated.get(repo, token) != token:
            text = f"Access to model {repo} is restricted and you are not in the authorized list."
            return _error(403 if token else 401, text, "GatedRepo")
        return None

    def _describe(self, request: Request, repo: str, rest: list[str]) -> Reply:
        what, name, *path = (*rest, "revision", "main")[:2] if len(rest) < 2 else rest
        revision = self._revision(repo, unquote(name))
        if revision is None:
            return _error(404, f"Invalid rev id: {name}", "RevisionNotFound")
        tree = self._tree(repo, revision)
        if what == "revision":
            model = {"id": repo, "sha": self.commit(repo, revision), "private": repo in self.private, "siblings": []}
            return _json(model | {"_id": "0", "modelId": repo, "gated": "manual" if repo in self.gated else False})
        if what == "paths-info":
            files = _paths(request)
            return _json([_entry(tree, tree / file) for file in files if (tree / file).exists()])
        folder = tree / "/".join(path)
        if what != "tree" or not folder.is_dir():
            return _error(404, f"{'/'.join(path)} does not exist on {name!r}", "EntryNotFound")
        deep = request.query.get("recursive", "").lower() == "true"
        return _json([_entry(tree, entry) for entry in sorted(folder.rglob("*") if deep else folder.iterdir())])

    def _resolved(self, request: Request, repo: str, name: str, path: str) -> Reply:
        revision = self._revision(repo, unquote(name))
        if revision is None:
            return _error(404, f"Invalid rev id: {name}", "RevisionNotFound")
        file = self._tree(repo, revision) / path
        if not file.is_file():
            return _error(404, "Entry not found", "EntryNotFound")
        commit = {"X-Repo-Commit": self.commit(repo, revision)}
        if not path.endswith(LARGE):
            reply = file_reply(request, file)
            reply.headers |= commit | {"ETag": f'"{_git_hash(file)}"'}
            return reply
        linked = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": f'"{_sha256(file)}"'}
        where = f"{self.cdn.url(file.relative_to(self.folder).as_posix())}?Expires=1&Signature={SIGNATURE}"
        return Reply(302, commit | linked | {"Location": where, "Accept-Ranges": "bytes"})


def _json(document: object) -> Reply:
    return Reply(200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(document).encode())


def _error(status: int, message: str, code: str) -> Reply:
    headers = {"Content-Type": "application/json", "X-Error-Code": code, "X-Error-Message": message}
    return Reply(status, headers, json.dumps({"error": message}).encode())


def _paths(request: Request) -> list[str]:
    if request.headers.get("content-type", "").startswith("application/json"):
        return json.loads(request.body)["paths"]
    return [value for name, value in parse_qsl(request.body.decode()) if name == "paths"]


def _entry(tree: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(tree).as_posix()
    if path.is_dir():
        return {
            "type": "directory",
            "oid": hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(),
            "path": name,
        }
    entry = {"type": "file", "oid": _git_hash(path), "size": path.stat().st_size, "path": name}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _sha256(path), "size": path.stat().st_size, "pointerSize": 134}
    return entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git_hash(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
