"""Readers that turn files into a `ModelState`: one module for each file format.

A module has NAME, TRAITS, `sniff(path, head)` and `read`; `registry` lists the format in FILES or in FOLDERS. A module
of FILES reads a single file: `read(path, section)`. A module of FOLDERS reads several files through a function,
`read(path, read_file)`, and lists the folder's own files: `members(path)`. Both raise `UnreadableError` or
`MalformedError` only for unreadable content; odd but readable content is an `Oddity` of the state.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from statecli.core import tied_tensors
from statecli.core.denormals import with_denormals
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits, combine_traits
from statecli.core.garbage_collector import pause_gc
from statecli.core.model_state import ModelState, Oddity
from statecli.formats.registry import FILES, FOLDERS, FORMATS, Format, find_format, is_recognised_folder
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource

__all__ = [
    "FILES",
    "FOLDERS",
    "FORMATS",
    "container_of",
    "describe_text",
    "find_format",
    "is_in_container",
    "is_recognised_folder",
    "members",
    "read",
    "read_traits",
    "traits_of",
]

#: Prefix of `ModelState.format` for a checkpoint in several files.
_SHARDED_PREFIX = "sharded "


@with_denormals
def read(path: str, section: str | None = None) -> ModelState:
    """Read the file or folder `path`. The format is recognised by content, not by name.

    If the dotted path `section` leads to a container, this container (or containers below) becomes a section of the
    state.

    Raises `UnreadableError` (with `MalformedError` below); each message starts with the path.
    """
    with pause_gc():
        return tied_tensors.fill_tied_to(_read_with_path(path, section))


def read_traits(path: str) -> FormatTraits:
    """Recognise the format of a file or folder, and return the traits (`FormatTraits`) of this format.

    An unknown format has the default traits. Raises UnreadableError for a file that cannot be opened.
    """
    format, _, _ = _recognize(path)
    return format.traits if format is not None else FormatTraits()


def _recognize(path: str) -> tuple[Format | None, bytes, int]:
    """Return the format of a file or folder. For a file, also return the first bytes and the size in bytes."""
    if files.is_folder(path):
        return find_format(path, b"", is_folder=True), b"", 0
    with ByteSource(path) as source:
        head, size = source.head, source.size
    return find_format(path, head), head, size


def _read_with_path(path: str, section: str | None) -> ModelState:
    try:
        return _read(path, section)
    except UnreadableError as error:
        # The error of a shard was already formatted in an inner call and starts with the shard's path. Its text cannot
        # show this, because a folder `model` and a tensor `model.norm` begin alike.
        if isinstance(error.__cause__, UnreadableError):
            raise
        explanation = files.explain_missing_names(path) or files.suggest_escaped_hash(path, section, error)
        raise type(error)(f"{path}: {error}{f'; {explanation}' if explanation else ''}") from error


def _read(path: str, section: str | None) -> ModelState:
    format, head, size = _recognize(path)
    if format is None:
        from statecli.formats import unsupported

        raise unsupported.explain_refusal(path, head, size)
    state = _read_format(format, path, section)
    explanation = files.explain_missing_names(path)
    oddities = _find_other_weights(format, path)
    if explanation:
        oddities += (Oddity("unlisted-folder", f"statecli may not have found all files of this folder: {explanation}"),)
    return replace(state, oddities=(*state.oddities, *oddities)) if oddities else state


def _find_other_weights(format: Format, path: str) -> tuple[Oddity, ...]:
    """Report weight files next to a checkpoint stored in pieces, because other loaders load these files instead."""
    if not format.traits.is_in_pieces or not files.is_folder(path):
        return ()
    try:
        own_members = (*format.reader.members(path), checkpoint_folder.LIGHTNING_META)
        oddity = checkpoint_folder.find_other_weights(path, own_members)
    except UnreadableError:  # the folder's own files are unknown
        return ()
    return (oddity,) if oddity else ()


def _read_format(format: Format, path: str, section: str | None) -> ModelState:
    """Read a file or folder. If data is damaged, check unread archive headers, because they may explain the damage."""
    try:
        state = format.reader.read(path, partial(_read_with_path, section=section) if format in FOLDERS else section)
    except MalformedError:
        files.confirm_guards(path)
        raise
    if any(tensor.damage for tensor in state.tensors):
        files.confirm_guards(path)
    return state


def members(path: str) -> tuple[str, ...]:
    """Return the paths of the checkpoint's files, relative to the folder, or () if no format recognises the folder.

    Raises UnreadableError for a folder without a checkpoint, with several, or with a missing file.
    """
    # Without `files.is_folder`, because a server may not know the folder of a file.
    format = find_format(path, b"", is_folder=True)
    return format.reader.members(path) if format is not None else ()


def traits_of(format: str) -> FormatTraits:
    """Return the traits (`FormatTraits`) of the format with this name. An unknown format has the default traits.

    For several formats (`sharded safetensors+torch-zip`), the result combines the traits of each.
    """
    by_name = {entry.name: entry for entry in FORMATS}
    traits = [by_name[name].traits for name in format.replace("+", " ").split() if name in by_name]
    return traits[0] if len(traits) == 1 else combine_traits(traits)


def describe_text(text: str) -> str:
    """Format a text for the list of settings. A long text becomes its beginning and a digest."""
    from statecli.formats.torch import settings

    return settings.describe_text(text)


def is_in_container(state: ModelState, container: str | None) -> bool:
    """Return whether the state was read from files of the format `container`, from one file or from several shards."""
    return container_of(state.format) == container


def container_of(format: str) -> str:
    """Return the format of the shards: `safetensors` for `sharded safetensors`. Return other names unchanged."""
    return format.removeprefix(_SHARDED_PREFIX)
