"""`statecli git`: checkpoints in `git diff`, `git log -p` and `git difftool`.

`setup` writes the driver into a repository: `.gitattributes` says which files are checkpoints, `.git/config` how their
difference is shown. The driver turns a checkpoint into text, one line a tensor, which git compares and caches by the
blob's id and the driver's command line. Whatever a file is, the driver ends 0 and says what is wrong in its text: git
dies of anything else, and caches all else. So what went wrong here, and not in the file, is a text that no other
equals, and says how git is made to forget it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase

from statecli.cli import output_files
from statecli.core.errors import MissingDependency, StateError, UsageError
from statecli.core.escaping import escape
from statecli.core.state import TensorInfo
from statecli.core.units import format_kind, format_shape
from statecli.core.version import __version__
from statecli.pickle_scan.known_names import rename_python2
from statecli.pickles.safe_globals import find_refused_names
from statecli.storage.file_version import refuse_files_that_change
from statecli.storage.source import Source
from statecli.targets import load
from statecli.targets.expand import WEIGHT_BIN_PREFIXES
from statecli.values.require_numpy import require_numpy

#: What the lines are made by: stands in the driver's command line, so that a later version's are not mixed with these.
MADE_BY = f"{__version__}-blake3-128"
#: Hexadecimal digits of a digest that are shown: with half as many, an afternoon finds two tensors of one digest.
DIGITS = 32
#: Where git keeps what the driver made.
_CACHE = "refs/notes/textconv/statecli"
#: What `.gitattributes` gives to the driver.
PATTERNS = ("*.safetensors", "*.pt", "*.pth", "*.ckpt", *(f"{name}*.bin" for name in WEIGHT_BIN_PREFIXES), "*.pt2")
#: A git-lfs pointer, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: at most 1,024 bytes.
_LFS = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v\d+\n(?:.*\n)*?oid (sha256:[0-9a-f]{64})\nsize (\d+)\n?"
)
#: What a DVC pointer knows its data by, https://dvc.org/doc/user-guide/project-structure/dvc-files.
_DVC = re.compile(rb"^outs:\s*\n(?:.*\n)*?[ -]*(md5|etag|checksum): ([0-9a-f]{32}(?:\.dir)?)\s*$", re.MULTILINE)
#: What no text has: a checkpoint of a few hundred bytes may have the words of a pointer in it.
_BINARY = re.compile(rb"[^\t\n\r -~\x80-\xff]")
_POINTER = 4096


def setup(*, everywhere: bool = False) -> list[str]:
    """Write the driver into the repository of the current folder, or for the user `everywhere`; gives what was done.

    What is there already stays, and what is to hold stands last, as git goes by it; what overrides that is told.
    Raises UsageError where git is missing, or this is no repository.
    """
    scope = "--global" if everywhere else "--local"
    top = _git("rev-parse", "--show-toplevel") if not everywhere else ""
    command = _command()
    for key, value in (
        # git appends the path, which in the working tree may be `-o.pt`.
        ("diff.statecli.textconv", f"{command} git textconv --made-by {MADE_BY} --"),
        # The cache is written as a commit: without an identity git diff would end in "Author identity unknown".
        ("diff.statecli.cachetextconv", "true" if _has_identity() else "false"),
        ("diff.statecli.binary", "true"),
        ("difftool.statecli.cmd", f'{command} git difftool -- "$LOCAL" "$REMOTE" "$MERGED"'),
        ("difftool.statecli.trustExitCode", "false"),
    ):
        _git("config", scope, key, value)
    path = _attributes_everywhere() if everywhere else os.path.join(top, ".gitattributes")
    overridden = {} if everywhere else _overridden(top)
    added = _attributes(path, overridden)
    where = "your git configuration" if everywhere else ".git/config"
    lines = [f"diff driver and difftool: {where}"]
    lines.append(f"{_shown(path)}: {', '.join(added) if added else 'nothing to add'}")
    above = "overrides it in .git/info/attributes, or in a folder's own .gitattributes"
    still = {} if everywhere else _overridden(top)
    lines += [f"{pattern}: diff={value} {above}: git diff does not show it" for pattern, value in still.items()]
    return [*lines, "git diff shows tensors now; git difftool -t statecli shows values"]


def _git(*words: str, given: str = "") -> str:
    try:
        done = subprocess.run(  # noqa: S603 - git itself
            ["git", *words],  # noqa: S607
            input=given,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
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
    """Return how git calls statecli: by the name on PATH, else by this interpreter.

    The interpreter leaves the current folder off its path: a json.py of the repository would run in every git diff.
    """
    from shutil import which

    flag = "-P" if sys.version_info >= (3, 11) else "-I"
    return "statecli" if which("statecli") else f'"{sys.executable}" {flag} -m statecli'


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


def _overridden(top: str) -> dict[str, str]:
    """The patterns of which git gives a file to something else than the driver, and to what.

    Asked of the files that git knows, and of a name that each pattern would match.
    """
    names = _git("-C", top, "ls-files", "-z", "--", *PATTERNS).split("\0")
    names = [*(pattern.replace("*", "x") for pattern in PATTERNS), *filter(None, names)]
    cells = _git("-C", top, "check-attr", "--stdin", "-z", "diff", given="\0".join(names) + "\0").split("\0")
    found: dict[str, str] = {}
    for name, value in zip(cells[::3], cells[2::3], strict=False):
        if value != "statecli":
            found |= {pattern: value for pattern in PATTERNS if fnmatchcase(os.path.basename(name), pattern)}
    return found


def _attributes(path: str, overridden: Collection[str]) -> list[str]:
    """Add what is missing, and at the end what the file has and something after it overrides; the patterns of both."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    known = {words[0] for line in lines if (words := line.split()) and "diff=statecli" in words[1:]}
    added = [pattern for pattern in PATTERNS if pattern not in known or pattern in overridden]
    ours = {f"{pattern} diff=statecli": pattern for pattern in added}
    text = "".join(line for line in lines if line.strip() not in ours)
    text += "" if not text or text.endswith("\n") else "\n"
    text += "".join(f"{line}\n" for line in ours)
    if text == "".join(lines):
        return []
    with output_files.replacing(path) as made:
        made.write(text.encode("utf-8", "surrogateescape"))
    return added


def _shown(path: str) -> str:
    return os.path.relpath(path) if not path.startswith(os.path.expanduser("~/.")) else path


# --- the drivers ----------------------------------------------------------------------------------------------------


def textconv(path: str) -> Iterator[str]:
    """A checkpoint as text: sorted lines `fqn dtype shape kind digest`; a line that says what it is of all else.

    Raises `UnreadableError` for a file that changes meanwhile: git would keep the text for the content it had.
    """
    with refuse_files_that_change():
        lines = list(_lines_of(path))
    yield from lines


def _lines_of(path: str) -> Iterator[str]:
    pointer = pointed(path)
    if pointer is not None:
        yield pointer
        return
    try:
        state = load.read_checkpoint(path)
        yield from _lines(state.tensors, several=len(state.sections) > 1)
        for key, value in sorted(state.metadata.values.items()):
            yield f"# {escape(key)} = {escape(repr(value))}"
        names = (".".join(rename_python2(*name.rpartition(".")[::2])) for name, _ in state.globals)
        yield from (f"! imports {escape(name)}" for name in sorted(find_refused_names(names)))
    except StateError as error:
        if not _is_the_files(error):
            raise
        yield f"cannot be read: {escape(str(error).removeprefix(path + ': '))}; its bytes: {_digest(path)}"


def _digest(path: str) -> str:
    """Return the start of a digest of a file's bytes, because two files can be unreadable for the same reason."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()[:DIGITS]


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
    return f"not read at {time.time_ns()} ({escape(said)}); when that is mended: git update-ref -d {_CACHE}"


def _lines(tensors: tuple[TensorInfo, ...], *, several: bool) -> Iterator[str]:
    with require_numpy():
        from statecli.values.algorithm import Algorithm
        from statecli.values.digest import compute_digests

    made = compute_digests(tensors, Algorithm.BLAKE3)
    rows = []
    for tensor, digest in zip(tensors, made, strict=True):
        name = f"{tensor.section}.{tensor.fqn}" if several else tensor.fqn
        cells = (name, tensor.dtype, format_shape(tensor.shape), format_kind(tensor), (digest or "-")[:DIGITS])
        rows.append(" ".join(map(escape, cells)))
    yield from sorted(rows)


def pointed(path: str) -> str | None:
    """What a pointer of git-lfs or DVC stands for; None where the file is none."""
    try:
        with Source(path) as source:
            head, size = source.head[:_POINTER], source.size
    except StateError:  # textconv says what is wrong with it
        return None
    if size > _POINTER or _BINARY.search(head):
        return None
    if match := _LFS.fullmatch(head):
        return f"git-lfs pointer: {match[1].decode()}, {int(match[2]):,} bytes; run: git lfs pull"
    if match := _DVC.search(head):
        return f"DVC pointer: {match[1].decode()}:{match[2].decode()}; run: dvc pull"
    return None


def difftool(before: str, after: str, compare: Callable[[str, str, str], int], name: str = "") -> Iterator[str]:
    """How two checkpoints differ, by `compare`; of two pointers whether they stand for the same, in one line.

    git gives the null device for the side that has no file: what the other holds is listed. `name` is what the file is
    called in the repository. Two folders (`git difftool -d`) are compared file by file.
    """
    if os.path.isdir(before) and os.path.isdir(after):
        yield from _folders(before, after, compare)
        return
    name = name or _shown(after if before == os.devnull else before)
    pointers = pointed(before), pointed(after)
    if os.devnull in (before, after):
        path, done = (after, "added") if before == os.devnull else (before, "deleted")
        yield f"{done}: {escape(name)}"
        yield from textconv(path)
    elif pointers == (None, None):
        yield f"changed: {escape(name)}"
        compare(before, after, name)
    elif pointers[0] == pointers[1]:
        yield f"both are one {pointers[0]}"
    else:
        yield from (one or "a checkpoint" for one in pointers)


def _folders(before: str, after: str, compare: Callable[[str, str, str], int]) -> Iterator[str]:
    """Each file that is called like a checkpoint, with that of the same name in the other folder; the rest is named."""
    others = []
    for name in sorted({*_files(before), *_files(after)}):
        if not any(fnmatchcase(os.path.basename(name), pattern) for pattern in PATTERNS):
            others.append(name)
            continue
        sides = (os.path.join(folder, name) for folder in (before, after))
        one, other = (path if os.path.exists(path) else os.devnull for path in sides)
        try:
            yield from difftool(one, other, compare, name)
        except StateError as error:
            yield escape(str(error))
    if others:
        yield f"not compared, for they are not called like checkpoints: {', '.join(map(escape, others))}"


def _files(folder: str) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in names)
