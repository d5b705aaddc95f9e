"""`statecli git`: checkpoints in `git diff`, `git log -p` and `git difftool`.

`git_setup.py` writes the drivers into a repository: `.gitattributes` lists checkpoints, `.git/config` the commands.
`git diff` calls the external diff driver with the two files; `git log -p` and `git diff --no-ext-diff` compare texts.
A driver turns a checkpoint into text, a line a tensor; git compares this text and caches it by the id of the blob and
the command line of the driver. Drivers always exit with 0 and describe an error in the text, because git aborts for any
other status. Git caches the text of an error too: an error outside of the file has a unique text with the command to
drop it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

from statecli.cli.git_setup import PATTERNS, run_git, shorten_path
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import MissingDependency, StateError, UsageError
from statecli.core.escaping import escape
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, Stats, TensorInfo
from statecli.core.terminal_width import is_terminal
from statecli.core.units import format_kind, format_number, format_shape
from statecli.pickles.python2_names import rename_python2
from statecli.pickles.safe_globals import find_refused_names
from statecli.storage.byte_source import Source
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load
from statecli.values.require_numpy import require_numpy

#: Hexadecimal digits of a digest in the text. With half as many, an afternoon finds two tensors with equal digests.
DIGEST_DIGITS = 32
#: Significant digits of a norm in the text.
NORM_DIGITS = 6
#: Git's cache of the texts of the driver.
_CACHE = "refs/notes/textconv/statecli"
#: A git-lfs pointer, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: at most 1,024 bytes.
_LFS = compile_on_use(
    rb"version https://git-lfs\.github\.com/spec/v\d+\n(?:.*\n)*?oid (sha256:[0-9a-f]{64})\nsize (\d+)\n?"
)
#: The digest in a DVC pointer, https://dvc.org/doc/user-guide/project-structure/dvc-files.
_DVC = compile_on_use(rb"^outs:\s*\n(?:.*\n)*?[ -]*(md5|etag|checksum): ([0-9a-f]{32}(?:\.dir)?)\s*$", re.MULTILINE)
#: What git-annex leaves for an unlocked file without its content, with the key of the content.
_ANNEX = compile_on_use(rb"/annex/objects/([\w.%&+=-]+)\s")
#: Bytes that no pointer has; a checkpoint of a few hundred bytes may contain the words of a pointer.
_BINARY = compile_on_use(rb"[^\t\n\r -~\x80-\xff]")
_MAX_POINTER_BYTES = 4096


def convert_to_text(path: str) -> Iterator[str]:
    """Yield a checkpoint as text: sorted lines `fqn dtype shape kind norm digest`; for another file a line about it.

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
    return (
        f"cannot be read (attempt {time.time_ns()}): {escape(message)}; fix the error, then delete git's "
        f"cache: git update-ref -d {_CACHE}"
    )


def _describe_tensors(tensors: tuple[TensorInfo, ...], *, by_section: bool) -> Iterator[str]:
    with require_numpy():
        from statecli.values.digest import compute_digests

    digests = compute_digests(tensors, Algorithm.BLAKE3)
    rows = []
    for tensor, digest, norm in zip(tensors, digests, _format_norms(tensors), strict=True):
        name = f"{tensor.section}.{tensor.fqn}" if by_section else tensor.fqn
        facts = (tensor.dtype, format_shape(tensor.shape), format_kind(tensor))
        cells = (name, *facts, norm, (digest or "-")[:DIGEST_DIGITS])
        rows.append(" ".join(map(escape, cells)))
    yield from sorted(rows)


def _format_norms(tensors: tuple[TensorInfo, ...]) -> list[str]:
    """Return the L2 norm of the finite values of each tensor in text, with the number of all others; `-` if unknown."""
    from statecli.values.norm import sum_squares
    from statecli.values.stats import fill_stats

    try:
        filled = fill_stats(ModelState("", "", tensors)).tensors
    except StateError:  # a checksum that does not fit: the digests are of the bytes as they are
        return ["norm -"] * len(tensors)
    texts = []
    for tensor in filled:
        stats = tensor.stats or Stats()
        squares = sum_squares(stats, tensor.elements)
        counts = [f"{word} {count}" for word, count in (("NaN", stats.nan), ("Inf", stats.inf)) if count]
        norm = "-" if isinstance(squares, str) else format_number(math.sqrt(squares), NORM_DIGITS)
        texts.append(" ".join((f"norm {norm}", *counts)))
    return texts


class LfsPointer(msgspec.Struct, frozen=True):
    """A git-lfs pointer: the SHA-256 and the size of its file."""

    digest: str
    size: int


def read_lfs_pointer(path: str) -> LfsPointer | None:
    """Return the git-lfs pointer in a file; None for any other file."""
    match = _LFS.fullmatch(_read_small_text(path))
    return LfsPointer(match[1].decode().removeprefix("sha256:"), int(match[2])) if match else None


def _read_small_text(path: str) -> bytes:
    """Return the bytes of a file that may be a pointer; b"" for any other file."""
    try:
        with Source(path) as source:
            head, size = source.head[:_MAX_POINTER_BYTES], source.size
    except StateError:  # `convert_to_text` describes the error
        return b""
    return b"" if size > _MAX_POINTER_BYTES or _BINARY.search(head) else head


def describe_pointer(path: str) -> str | None:
    """Return the target of a pointer of git-lfs, DVC or git-annex in words; None for any other file."""
    pointer = read_lfs_pointer(path)
    if pointer is not None:
        return f"git-lfs pointer: sha256:{pointer.digest}, {pointer.size:,} bytes; run: git lfs pull"
    text = _read_small_text(path)
    if match := _DVC.search(text):
        return f"DVC pointer: {match[1].decode()}:{match[2].decode()}; run: dvc pull"
    if match := _ANNEX.match(text):
        return f"git-annex pointer: {match[1].decode()}; run: git annex get"
    return None


def compare_files(before: str, after: str, compare: Callable[[str, str, str], int], name: str = "") -> Iterator[str]:
    """Yield lines about two files, and compare two checkpoints by `compare`; of two pointers, say if they are equal.

    Git passes the null device for a missing file: the other file is listed then. `name`: the path in the repository.
    Two folders (`git difftool -d`) are compared file by file.
    """
    if os.path.isdir(before) and os.path.isdir(after):
        yield from _compare_folders(before, after, compare)
        return
    name = name or shorten_path(after if before == os.devnull else before)
    pointers = describe_pointer(before), describe_pointer(after)
    if os.devnull in (before, after):
        path, done = (after, "added") if before == os.devnull else (before, "deleted")
        yield f"{done}: {escape(name)}"
        yield from convert_to_text(path)
    elif pointers == (None, None):
        yield f"changed: {escape(name)}"
        compare(before, after, name)
    elif pointers[0] == pointers[1]:
        yield f"both versions are equal: {pointers[0]}"
    else:
        yield f"changed: {escape(name)}"
        yield from (f"{side}: {pointer or 'a checkpoint'}" for side, pointer in zip("ab", pointers, strict=True))


def compare_for_git(arguments: Sequence[str], compare: Callable[[str, str, str], int]) -> Iterator[str]:
    """Yield lines about one file of `git diff`, from the arguments that git gives an external diff driver.

    These are the path, then file, id and mode of the old version and of the new version; for a renamed file also its
    new path and a text; for a file with a merge conflict the path alone. Equal ids are equal contents. Raises
    UsageError for another number of arguments.
    """
    if len(arguments) == 1:
        yield f"unmerged: {escape(arguments[0])}"
        return
    if len(arguments) not in (7, 9):
        raise UsageError(
            f"git external-diff: expected 1, 7 or 9 arguments from git, but got {len(arguments)}; run git diff instead"
        )
    path, before, after = arguments[0], arguments[1], arguments[4]
    if len(arguments) == 9 and arguments[7] != path:
        yield f"renamed: {escape(path)} to {escape(arguments[7])}"
        path = arguments[7]
    if before != os.devnull and after != os.devnull and arguments[3] != arguments[6]:
        yield f"mode: {arguments[3]} to {arguments[6]}"
    ids = {arguments[2], arguments[5]}
    if len(ids) == 1 and set(*ids) - {"0", "."}:  # zeros: a file of the working tree without an id
        return
    yield from compare_files(before, after, compare, path)


def use_color_of_git() -> bool:
    """Return whether git shows colours: its configuration, for a terminal or git's own pager."""
    is_terminal_output = os.environ.get("GIT_PAGER_IN_USE") in ("1", "true") or is_terminal(1)
    try:
        return run_git("config", "--get-colorbool", "color.diff", str(is_terminal_output).lower()) == "true"
    except UsageError:  # git answers "false" with status 1
        return False


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
        yield (
            f"files without the name of a checkpoint, such as *.pt, were not compared: {', '.join(map(escape, others))}"
        )


def _list_files(folder: str) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in names)
