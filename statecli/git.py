"""`statecli git`: checkpoints in `git diff`, `git log -p` and `git difftool`.

`setup` writes the driver into a repository: `.gitattributes` says which files are checkpoints, `.git/config` how their
difference is shown. The driver turns a checkpoint into text, one line a tensor, which git compares and caches by the
blob's id and the driver's command line. Whatever a file is, the driver ends 0 and says what is wrong in its text: git
dies of anything else, and caches all else. So what went wrong here, and not in the file, is a text that no other
equals, and says how git is made to forget it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from statecli import __version__, target
from statecli.errors import MissingDependency, StateError, UsageError
from statecli.formats._source import Source
from statecli.inspection import numpy_needed
from statecli.render._escape import visible
from statecli.report.text import kind_text, shape_text
from statecli.state import TensorInfo

#: What the lines are made by: stands in the driver's command line, so that a later version's are not mixed with these.
MADE_BY = f"{__version__}-blake3"
#: Where git keeps what the driver made.
_CACHE = "refs/notes/textconv/statecli"
#: What `.gitattributes` gives to the driver.
PATTERNS = ("*.safetensors", "*.pt", "*.pth", "*.ckpt", "pytorch_model*.bin", "*.pt2")
#: A git-lfs pointer, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: at most 1,024 bytes.
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v\d+\n(?:.*\n)*?oid (sha256:[0-9a-f]{64})\nsize (\d+)\n")
#: What a DVC pointer knows its data by, https://dvc.org/doc/user-guide/project-structure/dvc-files.
_DVC = re.compile(rb"\b(md5|etag|checksum):\s*([0-9a-f]{32}(?:\.dir)?)")
_POINTER = 4096


def setup(*, everywhere: bool = False) -> list[str]:
    """Write the driver into the repository of the current folder, or for the user `everywhere`; gives what was done.

    What is there already stays. Raises UsageError where git is missing, or this is no repository.
    """
    scope = "--global" if everywhere else "--local"
    top = _git("rev-parse", "--show-toplevel") if not everywhere else ""
    command = _command()
    for key, value in (
        ("diff.statecli.textconv", f"{command} git textconv --made-by {MADE_BY}"),
        # The cache is written as a commit: without an identity git diff would end in "Author identity unknown".
        ("diff.statecli.cachetextconv", "true" if _has_identity() else "false"),
        ("diff.statecli.binary", "true"),
        ("difftool.statecli.cmd", f'{command} git difftool "$LOCAL" "$REMOTE"'),
        ("difftool.statecli.trustExitCode", "false"),
    ):
        _git("config", scope, key, value)
    path = _attributes_everywhere() if everywhere else os.path.join(top, ".gitattributes")
    added = _attributes(path)
    where = "your git configuration" if everywhere else ".git/config"
    lines = [f"diff driver and difftool: {where}"]
    lines.append(f"{_shown(path)}: {', '.join(added) if added else 'nothing to add'}")
    return [*lines, "git diff shows tensors now; git difftool -t statecli shows values"]


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)  # noqa: S603, S607 - git itself
    except FileNotFoundError as error:
        raise UsageError("git is not installed, or not on PATH") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"git {words[0]} failed"
        raise UsageError(f"git {' '.join(words[:2])}: {said.removeprefix('fatal: ')}")
    return done.stdout.strip()


def _has_identity() -> bool:
    try:
        return bool(_git("var", "GIT_COMMITTER_IDENT"))
    except UsageError:
        return False


def _command() -> str:
    """How git is to call statecli: by the name on PATH, else by this interpreter."""
    from shutil import which

    return "statecli" if which("statecli") else f'"{sys.executable}" -m statecli'


def _attributes_everywhere() -> str:
    known = subprocess.run(
        ["git", "config", "--global", "core.attributesFile"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
    path = os.path.expanduser(known or os.path.join(home, "git", "attributes"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _attributes(path: str) -> list[str]:
    """Add what is missing; the patterns that were."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        text = ""
    known = {words[0] for line in text.splitlines() if (words := line.split()) and "diff=statecli" in words[1:]}
    added = [pattern for pattern in PATTERNS if pattern not in known]
    if added:
        start = text if not text or text.endswith("\n") else f"{text}\n"
        with open(path, "w", encoding="utf-8") as file:
            file.write(start + "".join(f"{pattern} diff=statecli\n" for pattern in added))
    return added


def _shown(path: str) -> str:
    return os.path.relpath(path) if not path.startswith(os.path.expanduser("~/.")) else path


# --- the drivers ----------------------------------------------------------------------------------------------------


def textconv(path: str) -> Iterator[str]:
    """A checkpoint as text: sorted lines `fqn dtype shape kind digest`; a line that says what it is of all else."""
    pointer = pointed(path)
    if pointer is not None:
        yield pointer
        return
    try:
        state = target.checkpoint(path)
        yield from _lines(state.tensors, several=len(state.sections) > 1)
        yield from (f"# {visible(key)} = {visible(str(value))}" for key, value in sorted(state.metadata.items()))
    except StateError as error:
        if not _is_the_files(error):
            raise
        yield f"cannot be read: {visible(str(error).removeprefix(path + ': '))}"


def _is_the_files(error: BaseException | None) -> bool:
    """Whether the same file fails the same way anywhere: no package is missing, and the system let us read it."""
    if isinstance(error, MissingDependency):
        return False
    while error is not None and not isinstance(error, (OSError, ImportError, MemoryError)):
        error = error.__cause__
    return error is None


def failed(error: BaseException) -> str:
    """The driver's text where the fault is not the file's: no two are equal, since git would show no difference."""
    said = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
    return f"not read at {time.time_ns()} ({visible(said)}); when that is mended: git update-ref -d {_CACHE}"


def _lines(tensors: tuple[TensorInfo, ...], *, several: bool) -> Iterator[str]:
    with numpy_needed():
        from statecli.locking.file import Algorithm
        from statecli.values.digest import digests

    made = digests(tensors, Algorithm.BLAKE3)
    rows = []
    for tensor, digest in zip(tensors, made, strict=True):
        name = f"{tensor.section}.{tensor.fqn}" if several else tensor.fqn
        cells = (name, tensor.dtype, shape_text(tensor.shape), kind_text(tensor), (digest or "-")[:16])
        rows.append(" ".join(map(visible, cells)))
    yield from sorted(rows)


def pointed(path: str) -> str | None:
    """What a pointer of git-lfs or DVC stands for; None where the file is none."""
    try:
        with Source(path) as source:
            head, size = source.head[:_POINTER], source.size
    except StateError:  # textconv says what is wrong with it
        return None
    if size > _POINTER:
        return None
    if match := _LFS.match(head):
        return f"git-lfs pointer: {match[1].decode()}, {int(match[2]):,} bytes; run: git lfs pull"
    if (match := _DVC.search(head)) and b"outs:" in head:
        return f"DVC pointer: {match[1].decode()}:{match[2].decode()}; run: dvc pull"
    return None


def difftool(before: str, after: str, compare: Callable[[str, str], int]) -> str | None:
    """Show how two checkpoints differ with `compare`; of two pointers whether they stand for the same, in one line.

    git gives the null device for the side that has no file: what the other holds is listed.
    """
    pointers = pointed(before), pointed(after)
    if os.devnull in (before, after):
        path, done = (after, "added") if before == os.devnull else (before, "deleted")
        return "\n".join([f"{done}: {_shown(path)}", *textconv(path)])
    if pointers == (None, None):
        compare(before, after)
        return None
    if pointers[0] == pointers[1]:
        return f"both are one {pointers[0]}"
    return f"{pointers[0] or 'a checkpoint'}\n{pointers[1] or 'a checkpoint'}"
