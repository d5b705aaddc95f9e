"""What the user typed -> the targets there are: folders are walked, globs expanded, in natural order, each once.

A folder that holds a model is one target, its shards with it; every other checkpoint in it, an optimizer's too, is a
target of its own. What is no checkpoint is a target that was skipped, with the reason: nothing is left out unsaid.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from statecli.auditing.result import Status, Target
from statecli.errors import UnreadableError
from statecli.formats import FORMATS, _folder, _foreign, sharded
from statecli.formats._source import Source

#: Files of these names are meant to be checkpoints: one that cannot be read has failed, whatever it is.
NAMED = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl", ".pickle", ".distcp", ".pt2", ".gguf", ".mar")
#: Folders that belong to tools.
TOOLS = frozenset(["__pycache__", "node_modules"])

_MAGIC = re.compile(r"[*?[]")


def expand(texts: Sequence[str]) -> Iterator[str | Target]:
    """Each target's text, or a target that failed or was skipped already."""
    seen: set[str] = set()
    for text in texts:
        for one in _named(text):
            key = one if isinstance(one, str) else one.target
            key = os.path.realpath(key) if os.path.lexists(key) else key
            if key not in seen:
                seen.add(key)
                yield one


def _named(text: str) -> Iterator[str | Target]:
    if os.path.isdir(text):
        yield from _in_folder(text)
    elif os.path.lexists(text) or not _MAGIC.search(text) or "(" in text:
        yield text
    else:
        found = sorted(glob.glob(text, recursive=True), key=natural)
        for path in found:
            yield from _in_folder(path) if os.path.isdir(path) else _file(path)
        if not found:
            yield Target(text, Status.FAILED, f"{text}: matches no file")


def natural(text: str) -> list[tuple[int, int | str]]:
    """By which `step-2` comes before `step-10`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text)]


def _in_folder(path: str) -> Iterator[str | Target]:
    try:
        names = sorted(os.listdir(path), key=natural)
    except OSError as error:
        yield Target(path, Status.FAILED, f"{path}: cannot be listed: {(error.strerror or 'unknown error').lower()}")
        return
    own = _members(path)
    if own:
        yield path
    for name in names:
        inner = os.path.join(path, name)
        if os.path.isdir(inner):
            yield from _inner(inner, name)
        elif name not in own:
            yield from _file(inner)


def _members(path: str) -> frozenset[str]:
    """The files that the folder's own model is in; none where it has no one model."""
    try:
        return frozenset(sharded.members(path))
    except UnreadableError as error:
        # One whose index or shards contradict each other is the folder's own fault, and is told as that.
        return frozenset(_index(path) if error.rule is None else _parts(path))


def _parts(path: str) -> list[str]:
    """Its index, or what is there of a numbered series without one."""
    return list(_index(path)) or [name for name in os.listdir(path) if _folder.SERIES.match(name)]


def _index(path: str) -> Iterable[str]:
    return (name for name in os.listdir(path) if _folder.INDEX.search(name))


def _inner(path: str, name: str) -> Iterator[str | Target]:
    if name.startswith(".") or name in TOOLS:
        yield Target(path, Status.SKIPPED, "a hidden folder, or a tool's")
    elif os.path.islink(path):
        yield Target(path, Status.SKIPPED, "a link to a folder")
    else:
        yield from _in_folder(path)


def _file(path: str) -> Iterator[str | Target]:
    """The file, unless neither its name nor its content is a checkpoint's."""
    if path.lower().endswith(NAMED):
        yield path
        return
    try:
        with Source(path) as source:
            head, size = source.head, source.size
    except UnreadableError as error:
        yield Target(path, Status.SKIPPED, str(error))
        return
    if any(format.sniff(path, head) for format in FORMATS) or _is_pickle(head):
        yield path
    else:
        yield Target(path, Status.SKIPPED, f"is {_foreign.name(path, head, size)}")


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] <= b"\x05" and len(head) > 2
