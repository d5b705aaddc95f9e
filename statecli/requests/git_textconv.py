"""Run `statecli git textconv`: convert a checkpoint to sorted lines of text, which git compares.

Git caches the text by the id of the blob and the command line of the driver.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator

import msgspec

from statecli import values
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import MissingDependency, StateError, UsageError
from statecli.core.escaping import escape
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, Stats, TensorInfo
from statecli.core.units import format_kind, format_number, format_shape
from statecli.pickles.python2_names import rename_python2
from statecli.pickles.safe_globals import find_refused_names
from statecli.requests.git_failures import describe_failure, end_with_failure
from statecli.requests.options import GitTextconvOptions
from statecli.requests.outcome import Caller, Outcome
from statecli.storage.byte_source import ByteSource
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load
from statecli.values.norm import compute_norm

#: Number of hexadecimal digits of a digest in the text. With half as many digits, two tensors with equal digests can
#: be found in an afternoon.
DIGEST_DIGITS = 32
#: Number of significant digits of a norm in the text.
NORM_DIGITS = 6
#: Reference under which git caches the texts of the driver.
_CACHE = "refs/notes/textconv/statecli"
#: git-lfs pointer, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: at most 1,024 bytes.
_LFS_POINTER = compile_on_use(
    rb"version https://git-lfs\.github\.com/spec/v\d+\n(?:.*\n)*?oid (sha256:[0-9a-f]{64})\nsize (\d+)\n?"
)
#: Digest in a DVC pointer, https://dvc.org/doc/user-guide/project-structure/dvc-files.
_DVC_POINTER = compile_on_use(
    rb"^outs:\s*\n(?:.*\n)*?[ -]*(md5|etag|checksum): ([0-9a-f]{32}(?:\.dir)?)\s*$", re.MULTILINE
)
#: git-annex pointer of an unlocked file without its content, with the key of the content.
_ANNEX_POINTER = compile_on_use(rb"/annex/objects/([\w.%&+=-]+)\s")
#: Bytes that no pointer contains. A checkpoint of a few hundred bytes may contain the words of a pointer.
_NON_POINTER_BYTE = compile_on_use(rb"[^\t\n\r -~\x80-\xff]")
_MAX_POINTER_BYTES = 4096


def run(options: GitTextconvOptions, caller: Caller) -> Outcome[list[str]]:  # noqa: ARG001 - every command has the same signature
    """Convert the file to text; an error becomes a line of the text."""
    lines = list(end_with_failure(_convert(options.path), _describe_outer_failure))
    return Outcome(lines, content=(f"{line}\n".encode() for line in lines))


def _convert(path: str) -> Iterator[str]:
    """Yield the lines of the file. Raises StateError if the cause of an error is not the file's content."""
    if not path:
        raise UsageError("FILE: is empty; give a value")
    yield from convert_to_text(path)


def _describe_outer_failure(error: Exception) -> str:
    """Describe an error that the file's content does not cause, and add the command that deletes git's cache.

    The text is unique, because git caches texts and shows no difference if two of them are equal.
    """
    return (
        f"cannot be read (attempt {time.time_ns()}): {describe_failure(error)}; fix the error, then delete git's "
        f"cache: git update-ref -d {_CACHE}"
    )


def convert_to_text(path: str) -> list[str]:
    """Return a checkpoint as sorted lines `fqn dtype shape kind norm digest`, or one line about any other file.

    Raises `UnreadableError` for a file that changes meanwhile, because git would cache the text for the old content.
    """
    with refuse_files_that_change():
        return list(_describe_file(path))


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
        reason = escape(str(error).removeprefix(path + ": "))
        yield f"cannot be read: {reason}; SHA-256 of the file: {_compute_digest(path)}"


def _compute_digest(path: str) -> str:
    """Return the first digits of the file's SHA-256, so that two files with the same error have different texts."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()[:DIGEST_DIGITS]


def _is_fault_of_file(error: BaseException | None) -> bool:
    """Return True if the file's content causes the error. Return False for a missing package or a system error."""
    if isinstance(error, MissingDependency):
        return False
    while error is not None and not isinstance(error, (OSError, ImportError, MemoryError)):
        error = error.__cause__
    return error is None


def _describe_tensors(tensors: tuple[TensorInfo, ...], *, by_section: bool) -> Iterator[str]:
    digests = values.digest.compute_digests(tensors, Algorithm.BLAKE3)
    rows = []
    for tensor, digest, norm in zip(tensors, digests, _format_norms(tensors), strict=True):
        name = f"{tensor.section}.{tensor.fqn}" if by_section else tensor.fqn
        facts = (tensor.dtype, format_shape(tensor.shape), format_kind(tensor))
        cells = (name, *facts, norm, (digest or "-")[:DIGEST_DIGITS])
        rows.append(" ".join(map(escape, cells)))
    yield from sorted(rows)


def _format_norms(tensors: tuple[TensorInfo, ...]) -> list[str]:
    """Return a text for each tensor: L2 norm of the finite values and counts of NaN and Inf, or `-` if unknown."""
    try:
        filled = values.stats.fill_stats(ModelState("", "", tensors)).tensors
    except StateError:  # a wrong checksum; the digests cover the stored bytes anyway
        return ["norm -"] * len(tensors)
    texts = []
    for tensor in filled:
        stats = tensor.stats or Stats()
        counts = [f"{word} {count}" for word, count in (("NaN", stats.nan), ("Inf", stats.inf)) if count]
        norm = compute_norm(stats, tensor.elements)
        text = "-" if isinstance(norm, str) else format_number(norm, NORM_DIGITS)
        texts.append(" ".join((f"norm {text}", *counts)))
    return texts


class LfsPointer(msgspec.Struct, frozen=True):
    """A git-lfs pointer: the SHA-256 and the size in bytes of the file that the pointer replaces."""

    digest: str
    size: int


def read_lfs_pointer(path: str) -> LfsPointer | None:
    """Return the git-lfs pointer in a file, or None for any other file."""
    match = _LFS_POINTER.fullmatch(_read_small_text(path))
    return LfsPointer(match[1].decode().removeprefix("sha256:"), int(match[2])) if match else None


def _read_small_text(path: str) -> bytes:
    """Return the bytes of a file that may be a pointer, or b"" for any other file."""
    try:
        with ByteSource(path) as source:
            head, size = source.head[:_MAX_POINTER_BYTES], source.size
    except StateError:  # `convert_to_text` describes the error
        return b""
    return b"" if size > _MAX_POINTER_BYTES or _NON_POINTER_BYTE.search(head) else head


def describe_pointer(path: str) -> str | None:
    """Return a text that describes a pointer of git-lfs, DVC or git-annex, or None for any other file."""
    pointer = read_lfs_pointer(path)
    if pointer is not None:
        return f"git-lfs pointer: sha256:{pointer.digest}, {pointer.size:,} bytes; run: git lfs pull"
    text = _read_small_text(path)
    if match := _DVC_POINTER.search(text):
        return f"DVC pointer: {match[1].decode()}:{match[2].decode()}; run: dvc pull"
    if match := _ANNEX_POINTER.match(text):
        return f"git-annex pointer: {match[1].decode()}; run: git annex get"
    return None
