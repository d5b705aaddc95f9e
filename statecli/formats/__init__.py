"""Formats: disk -> ModelState, one module each.

A format has NAME, `sniff(path, head)` and `read`; `registry` lists it in FILES or in FOLDERS. One of FILES
reads one file: `read(path, section)`. One of FOLDERS reads what lies in several, each through a function that it is
given, `read(path, read_file)`, and says which files of a folder are its own: `members(path)`. Both raise
`UnreadableError` or `MalformedError` only if they cannot read; what is odd but readable is an `Oddity` of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from msgspec.structs import replace

from statecli.core import tied_tensors
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.state import ModelState, Oddity
from statecli.formats import dcp, dcp_safetensors, deepspeed, gguf, megatron, safetensors, unsupported
from statecli.formats.registry import FILES, FOLDERS, FORMATS
from statecli.pickles.machine import without_gc
from statecli.storage import checkpoint_folder, files
from statecli.storage.source import Source

__all__ = ["FILES", "FOLDERS", "FORMATS", "is_quick_to_read", "members", "read"]


@with_denormals
def read(path: str, section: str | None = None) -> ModelState:
    """The state that `path`, a file or a folder, holds, told by content and not by its name.

    The container at the dotted path `section` is a section of the state, or some below it are, if there is one.

    Raises `UnreadableError` (with `MalformedError` below it); each message starts with the path.
    """
    with without_gc():
        return tied_tensors.tied(_named(path, section))


def is_quick_to_read(path: str) -> bool:
    """Return whether reading the local file means to decode one header: quicker than to hand its rows to a process.

    Raises UnreadableError for a file that cannot be opened.
    """
    with Source(path) as source:
        return safetensors.sniff(path, source.head) and not gguf.sniff(path, source.head)


def _named(path: str, section: str | None = None) -> ModelState:
    try:
        return _read(path, section)
    except UnreadableError as error:
        # A shard's error has been here before, with the shard's path. Its text cannot tell: a folder `model` and
        # a tensor `model.norm` begin alike.
        if isinstance(error.__cause__, UnreadableError):
            raise
        beside = files.unlisted(path) or files.cut_short(path, section, error)
        raise type(error)(f"{path}: {error}{f'; {beside}' if beside else ''}") from error


def _read(path: str, section: str | None) -> ModelState:
    head, size = b"", 0
    if not files.isdir(path):
        with Source(path) as source:
            head, size = source.head, source.size
    for format in FOLDERS if files.isdir(path) else FORMATS:
        if format.sniff(path, head):
            state = _of_format(format, path, section)
            beside = files.unlisted(path)
            odd = _other_weights(format, path)
            if beside:
                odd += (Oddity("unlisted-folder", f"the folder's other files are not known: {beside}"),)
            return replace(state, oddities=(*state.oddities, *odd)) if odd else state
    raise unsupported.refusal(path, head, size)


def _other_weights(format: ModuleType, path: str) -> tuple[Oddity, ...]:
    """What lies next to a checkpoint of ranks or pieces, and is what another loader takes."""
    if format not in (dcp, dcp_safetensors, deepspeed, megatron) or not files.isdir(path):
        return ()
    try:
        odd = checkpoint_folder.other_weights(path, (*format.members(path), dcp.BESIDE))
    except UnreadableError:  # which files are its own is not known
        return ()
    return (odd,) if odd else ()


def _of_format(format: ModuleType, path: str, section: str | None) -> ModelState:
    """Where something is wrong, that may be what was put off as well: then the same is said as of a file on disk."""
    try:
        state: ModelState = format.read(path, _reader(section) if format in FOLDERS else section)
    except MalformedError:
        files.confirm(path)
        raise
    if any(tensor.damage for tensor in state.tensors):
        files.confirm(path)
    return state


def _reader(section: str | None) -> Callable[[str], ModelState]:
    return lambda file: _named(file, section)


def members(path: str) -> tuple[str, ...]:
    """The files, by their ways from the folder `path`, that its own checkpoint is in; none where it has no one.

    Raises UnreadableError where it holds none, or several, or one that lacks a file.
    """
    # Above a URL there may be no folder that a server knows of.
    format = next((one for one in FOLDERS if one.sniff(path, b"")), None)
    found: tuple[str, ...] = format.members(path) if format is not None else ()
    return found
