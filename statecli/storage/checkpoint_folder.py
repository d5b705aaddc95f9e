"""A folder: which of its files is the checkpoint that the folder's name stands for."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.state import Oddity
from statecli.storage import files as on_disk
from statecli.storage import json_object
from statecli.storage.checkpoint_names import SINGLE
from statecli.storage.source import small

#: Folders in a folder that are searched for weights, to say where they are.
MAX_INNER = 200
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack")
#: The same weights, as save_pretrained wrote them for frameworks whose files are not read.
FOREIGN = frozenset(["tf_model.h5", "rust_model.ot"])
#: Companions of weights in a training folder that are no weights themselves.
COMPANIONS = re.compile(
    r"^(?:optimizer|scheduler|scaler|sampler|rng_state|training_args|random_states|trainer_state|custom_checkpoint"
    r"|dl_state_dict)(?:_\w+)?\."
)
#: The file that names the components of a pipeline of diffusers, which are folders next to it.
PIPELINE = "model_index.json"
#: `model.safetensors.index.json`, and with a variant `model.safetensors.index.fp16.json`.
INDEX = re.compile(r"\.index(?:\.[\w-]+)?\.json$")
#: One of a numbered series of shards.
SERIES = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>(?!0{5})\d{5})(?P<suffix>(?:\.[\w-]+)+)$")


#: The file, and the key in it, by which transformers 5 takes other weights than those of SINGLE; its largest size.
CONFIG, WEIGHTS_KEY, MAX_CONFIG = "config.json", "transformers_weights", 4 << 20


class Choice(NamedTuple):
    """The chosen file's name, the other weight files and indexes, and all `names` of files; each without the folder.

    `is_own`: the folder itself says which file it is, by its name or in `config.json`.
    """

    name: str
    others: list[str]
    names: list[str]
    is_own: bool


def choose(path: str) -> Choice:
    """The weight file or the index in the folder `path`.

    Raises UnreadableError where there is none, or several and nothing tells which; it says what the folder is instead.
    """
    names, folders = _listed(path)
    weights = [name for name in names if name.endswith(WEIGHTS) and not COMPANIONS.match(name)]
    indexes = [name for name in names if INDEX.search(name)]
    if not weights and not indexes:
        raise UnreadableError(_instead(path, names, folders))
    configured = _configured(path, weights, indexes) if CONFIG in names else None
    chosen = configured or _choose(weights, indexes)
    others = [name for name in (*weights, *indexes) if name != chosen]
    return Choice(chosen, others, names, configured is not None or chosen in SINGLE)


def _configured(path: str, weights: list[str], indexes: list[str]) -> str | None:
    """Return the file that `config.json` names as the weights; None where it names none that is here.

    The file is read only where there is another candidate than the usual names and numbered shards.
    """
    usual = {*SINGLE, *(f"{name}.index.json" for name in SINGLE)}
    safe = [name for name in (*weights, *indexes) if name.endswith((".safetensors", ".safetensors.index.json"))]
    if all(name in usual or SERIES.match(name) for name in safe):
        return None
    try:
        config, _ = json_object.object_of(small(on_disk.join(path, CONFIG), MAX_CONFIG), CONFIG)
    except UnreadableError:  # what is wrong with it is noted where its settings are read
        return None
    named = config.get(WEIGHTS_KEY)
    return named if type(named) is str and named in safe else None


def other_weights(path: str, members: Collection[str]) -> Oddity | None:
    """Return what is said of a folder that holds weights which are not among the `members` that were read."""
    beside = [
        name
        for name in files(path)
        if (name.endswith(WEIGHTS) and not COMPANIONS.match(name)) or INDEX.search(name)
        if name not in members
    ]
    return Oddity("other-weights", f"beside what was read, and not read: {quoting.names(beside)}") if beside else None


def _choose(weights: list[str], indexes: list[str]) -> str:
    """The index or the weight file that the folder's name stands for."""
    known = {*weights, *indexes}
    for name in SINGLE:
        for candidate in (name, f"{name}.index.json"):
            if candidate in known:
                return candidate
    if indexes:
        return min(indexes, key=lambda name: ("safetensors" not in name, len(name), name))
    series = {(m["stem"], m["count"], m["suffix"]) if (m := SERIES.match(name)) else name for name in weights}
    if len(series) == 1:
        return weights[0]
    raise UnreadableError(
        f"is a folder with {len(weights)} weight files and no index; name one of them: {quoting.names(weights)}"
    )


def files(path: str) -> list[str]:
    """The names of all files in the folder, sorted; none where it may be entered and not listed."""
    return _listed(path)[0] if on_disk.may_list(path) else []


def folders(path: str) -> list[str]:
    """The names of all folders in the folder, sorted; none where it may be entered and not listed."""
    return _listed(path)[1] if on_disk.may_list(path) else []


def inner(path: str) -> list[str]:
    """The first MAX_INNER of `folders`, whose names are about to be asked for."""
    found = folders(path)[:MAX_INNER]
    on_disk.ahead(on_disk.join(path, name) for name in found)
    return found


def _listed(path: str) -> tuple[list[str], list[str]]:
    """The names of all files in the folder and of all folders, both sorted."""
    files: list[str] = []
    folders: list[str] = []
    try:
        for name in sorted(on_disk.names(path)):
            (folders if on_disk.isdir(on_disk.join(path, name)) else files).append(name)
    except OSError as error:
        raise UnreadableError(f"cannot be listed: {(error.strerror or 'unknown error').lower()}") from error
    return files, folders


def _instead(path: str, names: list[str], folders: list[str]) -> str:
    """What a folder without weights is instead."""
    if foreign := sorted(FOREIGN.intersection(names)):
        what = "weights of another framework alone, which statecli does not read"
        return f"is a folder with {what}: {quoting.names(foreign)}"
    around = [name for name in folders if name.endswith(WEIGHTS) and _is_around(on_disk.join(path, name), path)]
    on_disk.ahead(on_disk.join(path, name) for name in folders[:MAX_INNER])
    inner = [name for name in folders[:MAX_INNER] if name not in around and _holds_weights(on_disk.join(path, name))]
    if inner and PIPELINE in names:
        return f"is a pipeline of diffusers: name one of its components: {quoting.names(inner)}"
    if inner:
        looked = f" (of the first {MAX_INNER} of {len(folders)} folders)" if len(folders) > MAX_INNER else ""
        return f"is a folder without a checkpoint of its own; folders in it hold some: {quoting.names(inner)}{looked}"
    if around:
        links = f"{quoting.name(around[0])} is a link to a folder around it, and no file of weights"
        return f"is a folder without a checkpoint: {links}"
    return "is a folder without a checkpoint: no *.safetensors, *.bin, *.pt, *.gguf and no *.index.json in it"


def _is_around(inner: str, path: str) -> bool:
    """Whether a link in a folder leads back to it, or above it."""
    return on_disk.islink(inner) and on_disk.join(on_disk.real(path), "").startswith(
        on_disk.join(on_disk.real(inner), "")
    )


def _holds_weights(path: str) -> bool:
    try:
        return any(name.endswith((*WEIGHTS, ".distcp")) and not COMPANIONS.match(name) for name in on_disk.names(path))
    except (OSError, UnreadableError):  # Not ours to list: it is only asked in order to give a hint.
        return False
