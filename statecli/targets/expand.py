"""What the user typed -> the targets there are: folders are walked, globs expanded, in natural order, each once.

A model's folder is one target, with its shards and what a training keeps beside it; every other checkpoint in it is a
target of its own. What is no checkpoint is a target that was skipped, with the reason: nothing is left out
unsaid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from statecli import formats
from statecli.core.errors import UnreadableError
from statecli.core.scope import NotChecked
from statecli.formats import FORMATS, torch_tar, unsupported
from statecli.storage import checkpoint_folder, files
from statecli.storage.source import Source
from statecli.targets.outcome import Status, Target

#: Pickles, which may be of anything.
PICKLES = (".pkl", ".pickle", ".joblib", ".dill")
#: Files of these names are meant to be checkpoints: one that cannot be read has failed, whatever it is. Of the `.bin`
#: those of WEIGHTS are, and pointers.
NAMED = (
    *PICKLES,
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".distcp",
    ".pt2",
    ".gguf",
    ".mar",
    ".npz",
    ".msgpack",
)
#: How the names begin of what is saved as a `.bin`, weights and what is beside them, by those who write them.
BINS = (
    "pytorch_model",
    "diffusion_pytorch_model",
    "adapter_model",
    "consolidated",
    "optimizer",
    "scheduler",
    "scaler",
    "training_args",
    "rng_state",
    "random_states",
)
WEIGHTS = re.compile(rf"(?i)^(?:{'|'.join(BINS)})[^/]*\.bin$")
#: Why a name is skipped whose file is audited under another.
SAME = "is the same file as"
#: Folders that belong to tools.
TOOLS = frozenset(["__pycache__", "node_modules"])

#: The file without which torch.package loads no folder.
TORCH_PACKAGE = (".data", "extern_modules")

#: How far above a file the folder may be whose model it is a part of.
DEPTH = 3
#: How many files behind URLs are fetched together.
AHEAD = 256


class _Model(NamedTuple):
    """A folder that is a target, and the files that its model is in."""

    path: str
    members: frozenset[str]


_Found: TypeAlias = str | _Model | Target


class Homes:
    """The model folders around files, each read once. `is_locked` says whether a lock names a path.

    With `as_found` a file is what a walk over its folder makes of it.
    """

    def __init__(self, *, as_found: bool = False, is_locked: Callable[[str], bool] | None = None) -> None:
        self.as_found, self.is_locked = as_found, is_locked
        self._members = cache(members)

    def around(self, path: str) -> Iterator[_Model]:
        """Those that it lies in, the nearest first, whether or not it is a part of their models."""
        above = islice(files.iter_parents(path), DEPTH)
        yield from (_Model(folder, own) for folder in above if (own := self._members(folder)))

    def of(self, path: str) -> Iterator[_Model]:
        """Those whose models it is a part of."""
        return (one for one in self.around(path) if files.make_relative(path, one.path) in one.members)

    def instead(self, path: str) -> _Found | None:
        """What stands for a file: the model that the lock has in its place, or that is in several files."""
        if not files.is_file(path) or not (self.as_found or self.is_locked):
            return None
        models = [] if self.is_locked and self.is_locked(path) else list(self.of(path))
        for model in models if self.is_locked else ():
            indexes = (files.join(model.path, way) for way in model.members if checkpoint_folder.INDEX.search(way))
            candidates: list[_Found] = [model, *indexes]
            for one in candidates:
                if self.is_locked and self.is_locked(_path(one)):
                    return one
        return next((model for model in models if len(model.members) > 1), None) if self.as_found else None


def expand(texts: Sequence[str], *, allow_empty: bool = False, homes: Homes | None = None) -> Iterator[str | Target]:
    """Each target's text, or a target that failed or was skipped already.

    A file that has several names is audited in the model folder that holds it, else under its own name, else under a
    link's; the other names are skipped. A glob that matches nothing has failed, unless with `allow_empty`.
    """
    found: dict[str, _Found] = {}
    for text in _ahead(texts):
        for one in _named(text, Status.SKIPPED if allow_empty else Status.FAILED, homes or Homes()):
            found.setdefault(_key(_path(one)), one)
    names = _names(found.values())
    ahead = _ahead("" if isinstance(one, Target) else _path(one) for one in found.values())
    for key, one in found.items():
        next(ahead)
        path = _path(one)
        if isinstance(one, Target):
            yield one
        elif _key(name := names[files.resolve_links(path)]) == key:
            yield path
        else:
            yield Target(path, Status.SKIPPED, f"{SAME} {name}")


def is_reached(path: str, texts: Sequence[str]) -> bool:
    """Whether a walk over one of the folders, or over what a glob matches, comes to this path; it need not exist."""
    parts = _parts(path)
    return any(glob_covers(_parts(text), parts) for text in texts if files.is_folder(text) or files.is_glob(text))


def _parts(path: str) -> list[str]:
    if files.is_remote(path):
        scheme, way, rest = files.split_url(path)
        return [scheme, rest, *way.strip("/").split("/")]
    return os.path.abspath(path).strip(os.sep).split(os.sep)


def glob_covers(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the path of these parts matches what is wanted, or lies in a folder that does."""
    if not wanted or wanted == [""]:
        return True
    first, rest = wanted[0], wanted[1:]
    if first == "**":
        return any(glob_covers(rest, parts[n:]) for n in range(len(parts) + 1))
    return bool(parts) and (first == parts[0] or fnmatchcase(parts[0], first)) and glob_covers(rest, parts[1:])


def _path(one: _Found) -> str:
    return one if isinstance(one, str) else one.path if isinstance(one, _Model) else one.target


def _key(text: str) -> str:
    """What is no path, a class or a section, is known by its text. In buckets a file and a folder may have one name."""
    if not files.exists(text):
        return text
    return f"{files.make_absolute(text)}/" if files.is_folder(text) else files.make_absolute(text)


def _names(found: Collection[_Found]) -> dict[str, str]:
    """The path under which each file and model folder is audited, by its real path."""
    names: dict[str, str] = {}
    for model in found:
        if isinstance(model, _Model):
            paths = (files.join(model.path, member) for member in model.members)
            names.update((files.resolve_links(path), path) for path in paths)
    typed = [_path(one) for one in found if not isinstance(one, Target)]
    for path in sorted(typed, key=files.is_link):
        names.setdefault(files.resolve_links(path), path)
    return names


def _named(text: str, nothing: Status, homes: Homes) -> Iterator[_Found]:
    """What is there of what was typed; `nothing` is what a glob that matches no file is."""
    if files.is_folder(text):
        yield from _folder_of(text)
    elif (model := homes.instead(text)) is not None:
        yield model
    elif homes.as_found and files.is_file(text):
        yield from _file(text)
    elif files.exists(text) or not files.is_glob(text) or "(" in text:
        yield text
    else:
        try:
            found = sorted(files.match_glob(text), key=natural)
        except UnreadableError as error:
            yield Target(text, Status.FAILED, str(error))
            return
        names_hidden = files.get_name(text).startswith(".")
        hidden = [] if names_hidden else [path for path in found if _is_hidden(path) and files.is_folder(path)]
        yield from (_hidden_folder(path) for path in hidden)
        for path in (path for path in found if path not in hidden):
            model = homes.instead(path)
            yield from _folder_of(path) if files.is_folder(path) else _file(path) if model is None else (model,)
        if len(found) == len(hidden):
            yield Target(text, nothing, f"{text}: matches no file")


def _folder_of(path: str) -> Iterator[_Found]:
    found = list(_in_folder(path))
    yield from found or [Target(path, Status.SKIPPED, "a folder that holds no file")]


def natural(text: str) -> list[int | str]:
    """By which `step-2` comes before `step-10`. Texts and numbers alternate in it, so that like meets like."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def _in_folder(path: str, taken: frozenset[str] = frozenset(), depth: int = 0) -> Iterator[_Found]:
    """What is in a folder, `depth` below what was named, but for the files that are `taken`: those of a model whose
    folder is around it.
    """
    if depth > files.MAX_FOLDER_DEPTH:
        yield Target(
            path, Status.FAILED, f"{path}: lies in more than {files.MAX_FOLDER_DEPTH} folders: name one further in"
        )
        return
    try:
        names = sorted(files.list_names(path), key=natural)
    except OSError as error:
        yield Target(path, Status.FAILED, f"{path}: cannot be listed: {(error.strerror or 'unknown error').lower()}")
        return
    except UnreadableError as error:
        yield Target(path, Status.FAILED, f"{path}: {error}")
        return
    # As one types it from here.
    here = "" if path in (os.curdir, files.join(os.curdir, "")) else path
    own = members(path)
    held = frozenset(files.join(here, way) for way in own)
    if TORCH_PACKAGE[0] in names and files.is_file(files.join(path, *TORCH_PACKAGE)):
        reason = f"{path}: is an unpacked torch.package, whose loader runs its Python files: audit it in one file"
        yield Target(path, Status.FAILED, reason)
    # What one model has taken is no other's.
    if not held <= taken:
        yield _Model(path, own)
    ahead = _ahead(files.join(here, name) for name in names)
    for inner in ahead:
        if files.is_folder(inner):
            skipped = unwalked(inner)
            yield from _in_folder(inner, taken | held, depth + 1) if skipped is None else (skipped,)
        elif inner not in taken | held:
            yield from _file(inner)
    if (why := files.explain_missing_names(path)) is not None:
        # What was not looked at has not passed.
        reason = f"{path}: what else is in it is not known: {why}: name its files"
        yield Target(files.join(here, "*"), Status.FAILED, reason)


def _ahead(paths: Iterable[str]) -> Iterator[str]:
    """The same paths, what lies behind URLs being fetched for the next AHEAD of them together."""
    paths = iter(paths)
    while some := list(islice(paths, AHEAD)):
        files.prefetch(one for one in some if "#" not in one and not files.is_glob(one))
        yield from some


def members(path: str) -> frozenset[str]:
    """The files that the folder's own model is in, by which a walk takes it for a target; none where it has no one."""
    try:
        return frozenset(formats.members(path))
    except UnreadableError:
        # What is wrong with an index is the folder's own fault, and is told as that.
        return frozenset(name for name in files.list_names(path) if checkpoint_folder.INDEX.search(name))


def unwalked(path: str) -> Target | None:
    """Return the skipped target of a folder in a folder that a walk does not look into; None for any other."""
    if _is_hidden(path) or files.get_name(path) in TOOLS:
        return _hidden_folder(path)
    return skipped_folder(path, "a link to a folder", "link") if files.is_link(path) else None


def _file(path: str) -> Iterator[str | Target]:
    """The file, unless neither its name nor its content is a checkpoint's."""
    is_named = files.get_name(path).lower().endswith(NAMED)
    if is_named and not _is_anybodys(path):
        yield path
        return
    try:
        with Source(path) as source:
            what = (
                None if _is_checkpoint(path, source) else unsupported.describe_content(path, source.head, source.size)
            )
    except UnreadableError as error:
        yield _unread(path, error)
        return
    if what is None or (is_named and "pointer" in what):
        yield path
    else:
        yield skipped_file(path, what)


def skipped_file(path: str, what: str) -> Target:
    """Return the target of a file that no rule looks at; `what` says what it is (`a 7z archive: unpack it first`)."""
    noun = re.split(r"[,;:(]", what.removeprefix("a ").removeprefix("an "), maxsplit=1)[0].strip()
    return Target(path, Status.SKIPPED, f"is {what}", not_checked=(NotChecked("file", 1, noun),))


def _hidden_folder(path: str) -> Target:
    return skipped_folder(path, "a hidden folder, or a tool's", "hidden or a tool's")


def _is_hidden(path: str) -> bool:
    return files.get_name(path.rstrip("/")).startswith(".")


def skipped_folder(path: str, reason: str, why: str) -> Target:
    """Return the target of a folder that no rule looks into; `why` is the short form of the reason."""
    return Target(path, Status.SKIPPED, reason, not_checked=(NotChecked("folder", 1, why),))


def _unread(path: str, error: UnreadableError) -> Target:
    """Return the target of a file that cannot be opened: failed, unless nothing can be loaded from it now."""
    with suppress(UnreadableError, OSError):
        if not files.is_remote(path) and not os.path.isfile(path):
            return skipped_file(path, "a broken link" if os.path.islink(path) else "a pipe, a socket or a device")
        if not files.get_size(path):
            return Target(path, Status.SKIPPED, str(error))
    return Target(path, Status.FAILED, f"{path}: {error}")


def is_called_weights(path: str) -> bool:
    """Whether its name says that a checkpoint is meant; a pickle may be of anything."""
    name = files.get_name(path).lower()
    return name.endswith(NAMED) and not name.endswith(PICKLES) and not _is_anybodys(path)


def _is_anybodys(path: str) -> bool:
    """Firmware and game data are called `.bin` too: but for the names that weights have, the content tells."""
    name = files.get_name(path)
    return name.lower().endswith(".bin") and not WEIGHTS.search(name)


def _is_checkpoint(path: str, source: Source) -> bool:
    if any(format.sniff(path, source.head) for format in FORMATS):
        return True
    if not source.head.startswith(b"PK\3\4") and torch_tar.has_pickles(source):
        return True
    # Every command imports this module; only a walk over a folder wants that one.
    from statecli.pickle_scan.one_pickle import begins_as_pickle

    return begins_as_pickle(source)
