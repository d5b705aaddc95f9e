"""`statecli git`: checkpoints in `git diff`, `git log -p` and `git difftool`.

`set_up` writes the driver into a repository: `.gitattributes` lists checkpoints, `.git/config` the commands. The driver
turns a checkpoint into text, a line a tensor; git compares this text and caches it by the id of the blob and the
command line of the driver. The driver always exits with 0 and describes an error in the text, because git aborts for
any other status. Git caches the text of an error too: an error outside of the file has a unique text with the command
to drop it.
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
from statecli.core.model_state import TensorInfo
from statecli.core.units import format_kind, format_shape
from statecli.core.version import __version__
from statecli.pickle_scan.known_names import rename_python2
from statecli.pickles.safe_globals import find_refused_names
from statecli.storage.byte_source import Source
from statecli.storage.checkpoint_names import WEIGHT_BIN_PREFIXES
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load
from statecli.values.require_numpy import require_numpy

#: Version of the text, part of the driver's command line, so that git does not compare texts of two versions.
DRIVER_VERSION = f"{__version__}-blake3-128"
#: Hexadecimal digits of a digest in the text. With half as many, an afternoon finds two tensors with equal digests.
DIGEST_DIGITS = 32
#: Git's cache of the texts of the driver.
_CACHE = "refs/notes/textconv/statecli"
#: Patterns of checkpoints in `.gitattributes`.
PATTERNS = ("*.safetensors", "*.pt", "*.pth", "*.ckpt", *(f"{name}*.bin" for name in WEIGHT_BIN_PREFIXES), "*.pt2")
#: A git-lfs pointer, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: at most 1,024 bytes.
_LFS = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v\d+\n(?:.*\n)*?oid (sha256:[0-9a-f]{64})\nsize (\d+)\n?"
)
#: The digest in a DVC pointer, https://dvc.org/doc/user-guide/project-structure/dvc-files.
_DVC = re.compile(rb"^outs:\s*\n(?:.*\n)*?[ -]*(md5|etag|checksum): ([0-9a-f]{32}(?:\.dir)?)\s*$", re.MULTILINE)
#: Bytes that no pointer has; a checkpoint of a few hundred bytes may contain the words of a pointer.
_BINARY = re.compile(rb"[^\t\n\r -~\x80-\xff]")
_MAX_POINTER_BYTES = 4096


def set_up(*, everywhere: bool = False) -> list[str]:
    """Write the driver into the repository of the current folder, or into the user's configuration if `everywhere`.

    Returns lines about the changes, and about attributes that override the driver. Existing attributes stay; new ones
    are added at the end, because the last match counts for git. Raises UsageError without git or a repository.
    """
    scope = "--global" if everywhere else "--local"
    top = _run_git("rev-parse", "--show-toplevel") if not everywhere else ""
    command = _build_command()
    for key, value in (
        # git appends the path, which in the working tree may be `-o.pt`.
        ("diff.statecli.textconv", f"{command} git textconv --made-by {DRIVER_VERSION} --"),
        # The cache is written as a commit: without an identity git diff would end in "Author identity unknown".
        ("diff.statecli.cachetextconv", "true" if _has_identity() else "false"),
        ("diff.statecli.binary", "true"),
        ("difftool.statecli.cmd", f'{command} git difftool -- "$LOCAL" "$REMOTE" "$MERGED"'),
        ("difftool.statecli.trustExitCode", "false"),
    ):
        _run_git("config", scope, key, value)
    path = _find_global_attributes() if everywhere else os.path.join(top, ".gitattributes")
    overridden = {} if everywhere else _find_overrides(top)
    added = _add_patterns(path, overridden)
    where = "your git configuration" if everywhere else ".git/config"
    lines = [f"diff driver and difftool: {where}"]
    lines.append(f"{_shorten_path(path)}: {', '.join(added) if added else 'nothing to add'}")
    above = "in .git/info/attributes or in a folder's own .gitattributes has priority"
    still = {} if everywhere else _find_overrides(top)
    lines += [
        f"{pattern}: diff={value} {above}, so git diff does not show these tensors" for pattern, value in still.items()
    ]
    return [*lines, "git diff shows tensors now; git difftool -t statecli shows values"]


def _run_git(*words: str, stdin: str = "") -> str:
    try:
        done = subprocess.run(  # noqa: S603 - git itself
            ["git", *words],  # noqa: S607
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError as error:
        raise UsageError("git is not installed, or not on PATH") from error
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"git {words[0]} failed"
        raise UsageError(f"git {' '.join(words[:2])}: {message.removeprefix('fatal: ')}")
    return done.stdout.strip()


def _has_identity() -> bool:
    try:
        return bool(_run_git("var", "GIT_COMMITTER_IDENT"))
    except UsageError:
        return False


def _build_command() -> str:
    """Return the command by which git calls statecli: the name on PATH, else this interpreter.

    The flag keeps the current folder off the interpreter's path, or a json.py of the repository would run.
    """
    from shutil import which

    flag = "-P" if sys.version_info >= (3, 11) else "-I"
    return "statecli" if which("statecli") else f'"{sys.executable}" {flag} -m statecli'


def _find_global_attributes() -> str:
    configured = subprocess.run(
        ["git", "config", "--global", "core.attributesFile"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
    path = os.path.expanduser(configured or os.path.join(home, "git", "attributes"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _find_overrides(top: str) -> dict[str, str]:
    """Return patterns of files given to another driver by attributes, with its name.

    Checks the files in git, and an example name for each pattern.
    """
    names = _run_git("-C", top, "ls-files", "-z", "--", *PATTERNS).split("\0")
    names = [*(pattern.replace("*", "x") for pattern in PATTERNS), *filter(None, names)]
    cells = _run_git("-C", top, "check-attr", "--stdin", "-z", "diff", stdin="\0".join(names) + "\0").split("\0")
    overrides: dict[str, str] = {}
    for name, value in zip(cells[::3], cells[2::3], strict=False):
        if value != "statecli":
            overrides |= {pattern: value for pattern in PATTERNS if fnmatchcase(os.path.basename(name), pattern)}
    return overrides


def _add_patterns(path: str, overridden: Collection[str]) -> list[str]:
    """Add missing patterns to the file, and move overridden patterns to the end; return both."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    existing = {words[0] for line in lines if (words := line.split()) and "diff=statecli" in words[1:]}
    added = [pattern for pattern in PATTERNS if pattern not in existing or pattern in overridden]
    ours = {f"{pattern} diff=statecli": pattern for pattern in added}
    text = "".join(line for line in lines if line.strip() not in ours)
    text += "" if not text or text.endswith("\n") else "\n"
    text += "".join(f"{line}\n" for line in ours)
    if text == "".join(lines):
        return []
    with output_files.replace_file(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    return added


def _shorten_path(path: str) -> str:
    return os.path.relpath(path) if not path.startswith(os.path.expanduser("~/.")) else path


# --- the drivers ----------------------------------------------------------------------------------------------------


def convert_to_text(path: str) -> Iterator[str]:
    """Yield a checkpoint as text: sorted lines `fqn dtype shape kind digest`; for any other file a line about the file.

    Raises `UnreadableError` for a file that changes meanwhile, because git would cache the text for the old content.
    """
    with refuse_files_that_change():
        lines = list(_describe_file(path))
    yield from lines


def _describe_file(path: str) -> Iterator[str]:
    pointer = describe_pointer(path)
    if pointer is not None:
        yield pointer
        return
    try:
        state = load.read_checkpoint(path)
        yield from _describe_tensors(state.tensors, by_section=len(state.sections) > 1)
        for key, value in sorted(state.metadata.values.items()):
            yield f"# {escape(key)} = {escape(repr(value))}"
        names = (".".join(rename_python2(*name.rpartition(".")[::2])) for name, _ in state.globals)
        yield from (f"! imports {escape(name)}" for name in sorted(find_refused_names(names)))
    except StateError as error:
        if not _is_fault_of_file(error):
            raise
        yield f"cannot be read: {escape(str(error).removeprefix(path + ': '))}; SHA-256 of the file: {_digest(path)}"


def _digest(path: str) -> str:
    """Return the start of a digest of a file's bytes, because two files can be unreadable for the same reason."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()[:DIGEST_DIGITS]


def _is_fault_of_file(error: BaseException | None) -> bool:
    """Return True if the file fails everywhere alike: no package is missing, and the system allowed the read."""
    if isinstance(error, MissingDependency):
        return False
    while error is not None and not isinstance(error, (OSError, ImportError, MemoryError)):
        error = error.__cause__
    return error is None


def describe_failure(error: BaseException) -> str:
    """Return the text for an error outside of the file; unique, because git shows no difference of equal texts."""
    message = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
    return f"not read at {time.time_ns()}: {escape(message)}; correct this, then run: git update-ref -d {_CACHE}"


def _describe_tensors(tensors: tuple[TensorInfo, ...], *, by_section: bool) -> Iterator[str]:
    with require_numpy():
        from statecli.values.digest import compute_digests
        from statecli.values.digest_algorithm import Algorithm

    digests = compute_digests(tensors, Algorithm.BLAKE3)
    rows = []
    for tensor, digest in zip(tensors, digests, strict=True):
        name = f"{tensor.section}.{tensor.fqn}" if by_section else tensor.fqn
        cells = (name, tensor.dtype, format_shape(tensor.shape), format_kind(tensor), (digest or "-")[:DIGEST_DIGITS])
        rows.append(" ".join(map(escape, cells)))
    yield from sorted(rows)


def describe_pointer(path: str) -> str | None:
    """Return the target of a pointer of git-lfs or DVC in words; None for any other file."""
    try:
        with Source(path) as source:
            head, size = source.head[:_MAX_POINTER_BYTES], source.size
    except StateError:  # `convert_to_text` describes the error
        return None
    if size > _MAX_POINTER_BYTES or _BINARY.search(head):
        return None
    if match := _LFS.fullmatch(head):
        return f"git-lfs pointer: {match[1].decode()}, {int(match[2]):,} bytes; run: git lfs pull"
    if match := _DVC.search(head):
        return f"DVC pointer: {match[1].decode()}:{match[2].decode()}; run: dvc pull"
    return None


def compare_files(before: str, after: str, compare: Callable[[str, str, str], int], name: str = "") -> Iterator[str]:
    """Yield lines about two files, and compare two checkpoints by `compare`; of two pointers, say if they are equal.

    Git passes the null device for a missing file: the other file is listed then. `name`: the path in the repository.
    Two folders (`git difftool -d`) are compared file by file.
    """
    if os.path.isdir(before) and os.path.isdir(after):
        yield from _compare_folders(before, after, compare)
        return
    name = name or _shorten_path(after if before == os.devnull else before)
    pointers = describe_pointer(before), describe_pointer(after)
    if os.devnull in (before, after):
        path, done = (after, "added") if before == os.devnull else (before, "deleted")
        yield f"{done}: {escape(name)}"
        yield from convert_to_text(path)
    elif pointers == (None, None):
        yield f"changed: {escape(name)}"
        compare(before, after, name)
    elif pointers[0] == pointers[1]:
        yield f"both versions are the same {pointers[0]}"
    else:
        yield from (pointer or "a checkpoint" for pointer in pointers)


def _compare_folders(before: str, after: str, compare: Callable[[str, str, str], int]) -> Iterator[str]:
    """Compare files with names of checkpoints with the files of the same name; list the names of all other files."""
    others = []
    for name in sorted({*_list_files(before), *_list_files(after)}):
        if not any(fnmatchcase(os.path.basename(name), pattern) for pattern in PATTERNS):
            others.append(name)
            continue
        sides = (os.path.join(folder, name) for folder in (before, after))
        old, new = (path if os.path.exists(path) else os.devnull for path in sides)
        try:
            yield from compare_files(old, new, compare, name)
        except StateError as error:
            yield escape(str(error))
    if others:
        yield f"not compared, because the names are not names of checkpoints: {', '.join(map(escape, others))}"


def _list_files(folder: str) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in names)
