"""Formats: disk -> ModelState, one module each.

A format has NAME, `sniff(path, head)` and `read(path, section)`; it is listed in FORMATS and nowhere else. It raises
`UnreadableError` or `MalformedError` only if it cannot read; what is odd but readable is an `Oddity` of the state.
"""

from __future__ import annotations

import os
from types import ModuleType

from statecli import ties
from statecli.errors import UnreadableError
from statecli.formats import _foreign, safetensors, sharded, torch_legacy, torch_zip
from statecli.formats._pickle import without_gc
from statecli.formats._source import Source
from statecli.state import ModelState

#: In the order they are asked. A completeness test holds the folder against this tuple.
FORMATS: tuple[ModuleType, ...] = (safetensors, torch_zip, torch_legacy, sharded)


def read(path: str, section: str | None = None) -> ModelState:
    """The state that `path`, a file or a folder, holds, told by content and not by its name.

    The container at the dotted path `section` is a section of the state, or some below it are, if there is one.

    Raises `UnreadableError` (with `MalformedError` below it); each message starts with the path.
    """
    with without_gc():
        return ties.tied(_named(path, section))


def _named(path: str, section: str | None = None) -> ModelState:
    try:
        return _read(path, section)
    except UnreadableError as error:
        # A shard's error has been here before, with the shard's path. Its text cannot tell: a folder `model` and
        # a tensor `model.norm` begin alike.
        if isinstance(error.__cause__, UnreadableError):
            raise
        raise type(error)(f"{path}: {error}") from error


def _read(path: str, section: str | None) -> ModelState:
    if os.path.isdir(path):
        return sharded.read(path, lambda file: _named(file, section))
    with Source(path) as source:
        head, size = source.head, source.size
    for format in FORMATS:
        if format.sniff(path, head):
            state: ModelState = sharded.read(path, _named) if format is sharded else format.read(path, section)
            return state
    raise UnreadableError(f"is {_foreign.name(path, head, size)}")
