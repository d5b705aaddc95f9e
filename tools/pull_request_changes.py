"""Compare the checkpoints that a pull request changes with those of its base branch, and write the result as Markdown.

    python tools/pull_request_changes.py BASE > CHANGES.md

The action runs this in the checkout of a pull request, with the commit of the base branch. A pointer of git-lfs is
replaced by its file if the checkout has the files of git-lfs (`lfs: true`); otherwise the result names the pointer. A
checkpoint that cannot be compared gets a line, and the exit status stays 0: the audit decides whether the run passes.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from statecli.core.escaping import escape
from statecli.requests.git_setup import PATTERNS
from statecli.requests.git_textconv import describe_pointer, read_lfs_pointer

#: Largest number of checkpoints that are compared, in the order of their names.
MAX_FILES = 20
TIMEOUT_S = 600
#: Runs a module as `python -m` does, without modules of the current folder.
OUTSIDE = (
    'import sys; del sys.path[0], sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], None, "__main__", True)'
)
#: Modes of git for regular files; symbolic links and submodules have other modes.
FILE_MODES = ("100644", "100755")


class Change(NamedTuple):
    """A file that differs: its path, and the id of its content on each side; "" on a side without the file."""

    path: str
    before: str
    after: str


def main() -> int:
    """Write the Markdown; return 0."""
    try:
        commit = find_commit(sys.argv[1])
        changes = list_changes(commit)
        with tempfile.TemporaryDirectory() as folder:
            for text in describe_changes(changes, Path(folder)):
                sys.stdout.write(text)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"::warning title=statecli::the checkpoints were not compared ({describe_error(error)})\n")
    return 0


def describe_error(error: Exception) -> str:
    """Return the first line that git wrote, or the error."""
    lines = getattr(error, "stderr", b"") or b""
    return escape(lines.decode("utf-8", "replace").strip().partition("\n")[0]) or type(error).__name__


def run_git(*words: str) -> bytes:
    """Return the output of git. Raises CalledProcessError."""
    return subprocess.run(["git", *words], check=True, capture_output=True).stdout


def find_commit(base: str) -> str:
    """Return the commit at which the pull request left its base branch; the base if the history was not fetched."""
    found = subprocess.run(["git", "merge-base", base, "HEAD"], check=False, capture_output=True)
    return found.stdout.decode().strip() if found.returncode == 0 else base


def list_changes(commit: str) -> list[Change]:
    """Return the checkpoints that differ between the commit and HEAD, by name."""
    fields = run_git("diff-tree", "-r", "-z", "--no-renames", commit, "HEAD").split(b"\0")
    changes = []
    for facts, name in zip(fields[::2], fields[1::2], strict=False):
        before_mode, after_mode, before_id, after_id = facts.decode().lstrip(":").split(" ")[:4]
        path = os.fsdecode(name)
        is_checkpoint = any(fnmatchcase(os.path.basename(path), pattern) for pattern in PATTERNS)
        if not is_checkpoint or os.path.isabs(path) or ".." in path.split("/"):
            continue
        before = before_id if before_mode in FILE_MODES else ""
        after = after_id if after_mode in FILE_MODES else ""
        if before or after:
            changes.append(Change(path, before, after))
    return changes


def describe_changes(changes: list[Change], folder: Path) -> Iterator[str]:
    """Yield the Markdown: a section for each checkpoint, its verdict first."""
    if not changes:
        return
    yield "\n## Changed checkpoints\n\n"
    for number, change in enumerate(changes[:MAX_FILES]):
        yield from describe_change(change, folder / str(number))
    if len(changes) > MAX_FILES:
        yield f"- and {len(changes) - MAX_FILES:,} more, which were not compared\n"


def describe_change(change: Change, folder: Path) -> Iterator[str]:
    """Yield the comparison of one checkpoint."""
    path = escape(change.path)
    name = "`" + path.replace("`", "'") + "`"
    if not (change.before and change.after):
        yield f"- {'deleted' if change.before else 'added'}: {name}\n"
        return
    try:
        sides = [write_side(change.path, *side, folder) for side in (("base", change.before), ("head", change.after))]
    except (OSError, subprocess.SubprocessError) as error:
        yield f"- {name}: not read ({describe_error(error)})\n"
        return
    pointers = [describe_pointer(str(folder / side)) for side in sides]
    if any(pointers):
        texts = [f"{side}: {text or 'a file'}" for side, text in zip(("base", "head"), pointers, strict=True)]
        yield f"- {name}: not compared; {escape('; '.join(texts))}\n"
    else:
        yield from compare(path, name, sides, folder)
    shutil.rmtree(folder, ignore_errors=True)


def write_side(path: str, side: str, identity: str, folder: Path) -> str:
    """Write a version of the file below the folder, with the file in place of a git-lfs pointer; return its path."""
    target = folder / side / path
    target.parent.mkdir(parents=True)
    with open(target, "wb") as file:
        subprocess.run(["git", "cat-file", "blob", identity], check=True, stdout=file, stderr=subprocess.PIPE)
    pointer = read_lfs_pointer(str(target))
    if pointer is not None:
        replace_pointer(target, pointer.digest, pointer.size)
    return f"{side}/{path}"


def replace_pointer(target: Path, digest: str, size: int) -> None:
    """Replace a git-lfs pointer by its file, if the checkout has fetched files of git-lfs; else leave it."""
    store = Path(os.fsdecode(run_git("rev-parse", "--git-common-dir")).rstrip("\n")) / "lfs" / "objects"
    if not store.is_dir():
        return
    found = store / digest[:2] / digest[2:4] / digest
    if not found.is_file():
        with open(target, "rb") as pointer:  # git-lfs fetches the file
            subprocess.run(["git", "lfs", "smudge"], stdin=pointer, check=False, capture_output=True, timeout=TIMEOUT_S)
    if found.is_file() and found.stat().st_size == size and compute_digest(found) == digest:
        target.unlink()
        target.symlink_to(found.resolve())


def compute_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def compare(path: str, name: str, sides: list[str], folder: Path) -> Iterator[str]:
    """Yield the Markdown of `statecli diff`, folded, with the verdict as its heading."""
    words = ["statecli", "diff", *sides, "-f", "markdown", "--no-progress"]
    command = [sys.executable, "-E", "-c", OUTSIDE, *words]
    try:
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield f"- {name}: not compared within {TIMEOUT_S} seconds\n"
        return
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode not in (0, 1):
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2].removeprefix("statecli: ")
        yield f"- {name}: {escape(reason) or 'not compared'}\n"
    if not text.strip():
        return
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    verdict = next((part.strip("*\n") for part in paragraphs if part.startswith("**")), "compared")
    body = "\n\n".join(part for part in paragraphs if not part.startswith("### ") and part.strip("*\n") != verdict)
    # The element `summary` takes HTML, but not Markdown.
    heading = f"<code>{html.escape(path)}</code>: {html.escape(remove_markdown(verdict))}"
    yield f"<details>\n<summary>{heading}</summary>\n\n{body.strip()}\n\n</details>\n\n"


def remove_markdown(text: str) -> str:
    """Return escaped Markdown as plain text."""
    return re.sub(r"\\([^\w\s])", r"\1", html.unescape(text))


if __name__ == "__main__":
    raise SystemExit(main())
