"""Choose the checkpoint of a folder: the weight file or index that the folder stands for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import msgspec

from statecli import core
from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Oddity
from statecli.core.quoting import quote_for_shell
from statecli.storage import files as on_disk, json_object
from statecli.storage.byte_source import read_small_file
from statecli.storage.checkpoint_names import CHECKPOINT_SUFFIXES, SETTINGS_FILES, SINGLE, TAR_SUFFIXES
from statecli.storage.store import FolderEntries

#: Maximum number of inner folders that are searched for weights, so that a message can name them.
MAX_INNER_FOLDERS = 200
#: Suffixes of weight files. `.pth.tar` and similar suffixes are included, because training scripts use them for files
#: of torch.save (`model_best.pth.tar`).
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", *TAR_SUFFIXES)
#: Suffixes of weights in any format, whether statecli reads it or not.
_ANY_WEIGHTS = (*WEIGHTS, *CHECKPOINT_SUFFIXES, ".h5", ".onnx", ".npy", ".tflite")
#: Weight files that save_pretrained writes for other frameworks, which statecli does not read.
FOREIGN_WEIGHTS = frozenset(["tf_model.h5", "rust_model.ot"])
#: Files next to weights in a training folder that contain no weights.
COMPANIONS = compile_on_use(
    r"^(?:optimizer|scheduler|scaler|sampler|rng_state|training_args|random_states|trainer_state|custom_checkpoint"
    r"|dl_state_dict)(?:_\w+)?\."
)
#: File with the names of the components of a diffusers pipeline; each component is a folder next to this file.
PIPELINE = "model_index.json"
#: End of an index's name: `model.safetensors.index.json`, with a variant `model.safetensors.index.fp16.json`.
INDEX = compile_on_use(r"\.index(?:\.[\w-]+)?\.json$")
#: Name of a shard of a numbered series.
SERIES = compile_on_use(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>(?!0{5})\d{5})(?P<suffix>(?:\.[\w-]+)+)$")


#: File and key with which transformers 5 selects other weights than the files in SINGLE.
CONFIG, WEIGHTS_KEY = "config.json", "transformers_weights"


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The file that a folder stands for. Names are relative to the folder.

    Attributes:
        name: The weight file or the index.
        others: The other weight files and indexes.
        names: All files of the folder.
        is_own: True if the usual name or `config.json` determines the file.
    """

    name: str
    others: list[str]
    names: list[str]
    is_own: bool


def choose_checkpoint(path: str) -> Choice:
    """Return the weight file or the index of the folder `path`.

    Raises UnreadableError, with a description of the folder, if there is no weight file or the choice is ambiguous.
    """
    names, folders = _list(path)
    weights = [name for name in names if name.endswith(WEIGHTS) and not COMPANIONS.match(name)]
    indexes = [name for name in names if INDEX.search(name)]
    if not weights and not indexes:
        raise _explain_folder(path, names, folders)
    configured = _choose_configured(path, names, (*weights, *indexes))
    chosen = configured or _choose(path, weights, indexes)
    others = [name for name in (*weights, *indexes) if name != chosen]
    return Choice(chosen, others, names, configured is not None or chosen in SINGLE)


def _choose_configured(path: str, names: Collection[str], candidates: Collection[str]) -> str | None:
    """Return the weight file that `config.json` names, if it is one of the candidates; else None.

    Does not read `config.json` if the only safetensors files are one usual file, or a usual index and its shards. The
    reader then fetches `config.json` together with other files, and calls `explain_weights_elsewhere`.
    """
    safe = [name for name in candidates if name.endswith((".safetensors", ".safetensors.index.json"))]
    roots = [name for name in safe if not SERIES.match(name)]
    is_index = len(roots) == 1 and roots[0].removesuffix(".index.json") in SINGLE and roots[0] not in SINGLE
    if not safe or is_index or (safe == roots and len(roots) == 1 and roots[0] in SINGLE):
        return None
    configured_name = _read_configured_name(path, names)
    return configured_name if configured_name in safe else None


def explain_weights_elsewhere(path: str, names: Collection[str]) -> str | None:
    """Return why other weights may be in use: `config.json` names a weight file outside of the folder; else None.

    `names` are the files of the folder. transformers loads the named file, possibly from a hidden folder.
    """
    configured_name = _read_configured_name(path, names)
    if configured_name is None or configured_name in names:
        return None
    file = quoting.quote(configured_name)
    return (
        f"{CONFIG} refers to the weight file {file}, which is not in this folder; transformers would load {file} "
        "instead of the weights in the folder, so statecli does not know which weights are used"
    )


def _read_configured_name(path: str, names: Collection[str]) -> str | None:
    """Return the text of `transformers_weights` in `config.json`; None without this entry."""
    if CONFIG not in names:
        return None
    try:
        raw = read_small_file(on_disk.join(path, CONFIG), SETTINGS_FILES["config"])
        config = json_object.parse_object(raw, CONFIG).document
    except UnreadableError:  # the reader of the settings notes the error
        return None
    configured_name = config.get(WEIGHTS_KEY)
    return configured_name if type(configured_name) is str else None


def find_other_weights(path: str, members: Collection[str]) -> Oddity | None:
    """Return an `Oddity` if the folder has weight files that are not among the files read (`members`); else None."""
    other_weights = [
        name
        for name in list_files(path)
        if (name.endswith(WEIGHTS) and not COMPANIONS.match(name)) or INDEX.search(name)
        if name not in members
    ]
    if not other_weights:
        return None
    return Oddity(
        "other-weights", f"statecli did not read other weights in the same folder: {quoting.names(other_weights)}"
    )


def _choose(path: str, weights: list[str], indexes: list[str]) -> str:
    candidates = {*weights, *indexes}
    for name in SINGLE:
        for candidate in (name, f"{name}.index.json"):
            if candidate in candidates:
                return candidate
    if indexes:
        return min(indexes, key=lambda name: ("safetensors" not in name, len(name), name))
    series = {(m["stem"], m["count"], m["suffix"]) if (m := SERIES.match(name)) else name for name in weights}
    if len(series) == 1:
        return weights[0]
    folder = quoting.quote_for_shell(path)
    raise UnreadableError(
        f"is a folder with {len(weights)} weight files and no index; give one of the files: {quoting.names(weights)}; "
        f"for all files, write statecli audit {folder} or statecli log {folder}"
    )


def list_files(path: str) -> list[str]:
    """Return the sorted names of the files in a folder; an empty list if listing the folder is not permitted."""
    return _list(path).files if on_disk.may_list(path) else []


def list_folders(path: str) -> list[str]:
    """Return the sorted names of the folders in a folder; an empty list if listing the folder is not permitted."""
    return _list(path).folders if on_disk.may_list(path) else []


#: Names of folders of tools. An audit of a folder enters them only if a file in them is named like a checkpoint.
TOOL_FOLDERS = frozenset(
    [
        *(".git", ".hg", ".svn", ".bzr", ".jj", "__pycache__", "node_modules", ".ipynb_checkpoints", ".cache"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".venv"),
    ]
)


class SkipReason(msgspec.Struct, frozen=True):
    """Reason to skip a folder, and a short form of at most three words."""

    reason: str
    short: str


def explain_skipped_folder(path: str) -> SkipReason | None:
    """Return why an audit of the parent folder may skip a folder; None if the audit enters the folder."""
    if on_disk.is_link(path):
        return SkipReason("a link to a folder", "link")
    if not is_of_tool(path):
        return None
    return SkipReason(
        "a folder of a tool, such as .git or .venv, with no checkpoint files except in installed packages",
        "of a tool",
    )


def is_of_tool(path: str) -> bool:
    """Return whether the folder has the name of a tool's folder, such as `.git`."""
    return on_disk.get_name(path.rstrip("/")) in TOOL_FOLDERS


#: File next to a DCP checkpoint in which Lightning saves epoch and hyperparameters.
LIGHTNING_META = "meta.pt"
#: Files in which DeepSpeed and Megatron name the folder to load, and the maximum number of bytes that are read of each.
TRACKERS, MAX_TRACKER_BYTES = ("latest", "latest_universal", "latest_checkpointed_iteration.txt"), 2**20


def decode_tracker(raw: bytes) -> str:
    """Decode a tracker file (a file that names the latest checkpoint) as loaders do: universal newlines, stripped."""
    return raw.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n").strip()


def list_tracked_folders(path: str) -> set[str]:
    """Return the names that tracker files in `path` refer to, such as the folder of the latest checkpoint."""
    tracked = set()
    for name in TRACKERS:
        if name in list_files(path):
            with contextlib.suppress(UnreadableError):  # the reader of the folder reports it
                tracked.add(word := decode_tracker(read_small_file(on_disk.join(path, name), MAX_TRACKER_BYTES)))
                with contextlib.suppress(ValueError):  # not the number of an iteration
                    tracked.add(f"iter_{int(word):07d}")
    return tracked


#: File in which MMEngine names the checkpoint to resume from.
MMENGINE_TRACKER = "last_checkpoint"
_PROTOCOL = compile_on_use(r"[A-Za-z][\w+.-]*:")
#: Maximum length of a path that a system opens, in characters.
MAX_PATH_CHARACTERS = 4096


def find_foreign_checkpoint(path: str, names: Collection[str]) -> str | None:
    """Return the URL or the file outside of the folder to which MMEngine's tracker refers; else None.

    A file that does not exist is ignored, because it is a path of another machine. Raises UnreadableError.
    """
    tracker = on_disk.join(path, MMENGINE_TRACKER)
    if MMENGINE_TRACKER not in names or not on_disk.is_file(tracker):
        return None
    place = decode_tracker(read_small_file(tracker, MAX_TRACKER_BYTES))
    if "\0" in place or (len(place) > MAX_PATH_CHARACTERS and not _PROTOCOL.match(place)):
        return None  # no file has such a path
    if _PROTOCOL.match(place):
        return place
    is_inside = os.path.realpath(place).startswith(os.path.join(os.path.realpath(path), ""))
    return place if os.path.exists(place) and not is_inside else None


#: Files in which sentence-transformers names the folders of its modules (MODULES, ROUTERS) and transformers names those
#: of an exported model (EXPORT). At most MAX_MODULES_BYTES of each file are read.
MODULES, ROUTERS, MAX_MODULES_BYTES = "modules.json", ("router_config.json", "config.json"), 4 << 20
EXPORT = "export.json"


def list_module_folders(path: str, names: Collection[str]) -> list[str]:
    """Return the inner folders that files such as `modules.json` name, because libraries load modules from them.

    `names` are the files of the folder. Hidden folders count too.
    """
    import json

    folders: list[object] = []
    for name in (MODULES, EXPORT, *ROUTERS):
        if name in names:
            with contextlib.suppress(UnreadableError, ValueError, RecursionError):  # the loader fails too
                document = json.loads(read_small_file(on_disk.join(path, name), MAX_MODULES_BYTES))
                if name == MODULES and isinstance(document, list):
                    folders.extend(module.get("path") for module in document if isinstance(module, dict))
                if name == EXPORT and isinstance(document, dict) and isinstance(document.get("components"), dict):
                    programs = [part.get("file") for part in document["components"].values() if isinstance(part, dict)]
                    folders.extend(file.rpartition("/")[0] or "." for file in programs if isinstance(file, str))
                if name in ROUTERS and isinstance(document, dict) and isinstance(document.get("structure"), dict):
                    folders.extend(document["types"] if isinstance(document.get("types"), dict) else ())
    return list(dict.fromkeys(folder for folder in folders if isinstance(folder, str) and folder))


def split_module_folder(folder: str) -> list[str] | None:
    """Return a folder's path and its parents, outermost first; None for an absolute path, a URL or a path with `..`.

    Returns no folder for a path of more than MAX_PATH_CHARACTERS, and at most MAX_FOLDER_DEPTH parents, the limit of a
    walk.
    """
    steps = [step for step in folder.replace("\\", "/").split("/") if step not in ("", ".")]
    if folder.startswith("/") or ".." in steps or ":" in folder:
        return None
    if len(folder) > MAX_PATH_CHARACTERS:
        return []
    return ["/".join(steps[: n + 1]) for n in range(min(len(steps), on_disk.MAX_FOLDER_DEPTH + 1))]


def list_inner_folders(path: str) -> list[str]:
    """Return the first MAX_INNER_FOLDERS inner folders, after a prefetch of their listings."""
    names = list_folders(path)[:MAX_INNER_FOLDERS]
    on_disk.prefetch(on_disk.join(path, name) for name in names)
    return names


def find_configuration(path: str) -> str | None:
    """Return the file that names the model class of a folder without weights; None for any other folder.

    A folder counts as having weights if its `config.json` names weights in another place.
    """
    candidates = (on_disk.join(path, name) for name in (MODULES, CONFIG))
    config = next(filter(on_disk.is_file, candidates), None)
    if config is None:
        return None
    try:
        names, folders = _list(path)
    except UnreadableError:
        return None
    has_weights = any(name.endswith(_ANY_WEIGHTS) or INDEX.search(name) for name in names)
    if has_weights or _read_configured_name(path, names) is not None or _describe_folder(path, names, folders):
        return None
    return config


def _list(path: str) -> FolderEntries:
    try:
        return on_disk.list_entries(path)
    except OSError as error:
        raise UnreadableError(f"cannot be listed: {(error.strerror or 'unknown error').lower()}") from error


def _explain_folder(path: str, names: list[str], folders: list[str]) -> UnreadableError:
    """Return the error for a folder without weights. If there are Python files, the error names their model classes."""
    problem = _describe_folder(path, names, folders)
    if not problem and not on_disk.is_remote(path) and any(name.endswith(".py") for name in names):
        classes = core.target_suggestions.suggest_classes_in(path)
        if classes.choices or classes.advice:
            text = "is a folder without a checkpoint, but with Python files"
            return classes.build_error(
                UnreadableError, problem=text + "; choose a class or function:" * bool(classes.choices)
            )
    return UnreadableError(
        problem
        or "is a folder without a checkpoint: it contains no *.safetensors, *.bin, *.pt, *.gguf or *.index.json file"
        + f", and its {CONFIG} does not name a model class; {advise_class(path)}" * (CONFIG in names)
    )


def advise_class(path: str) -> str:
    """Return the advice to name a model class on the command line, because config.json does not name a class."""
    line = quote_for_shell(f"transformers:BertModel(config={path!r})")
    return f"name the class too, for example {line}"


def _describe_folder(path: str, names: list[str], folders: list[str]) -> str:
    """Describe a folder without weights, for example as a diffusers pipeline; "" if its kind is unknown."""
    if foreign := sorted(FOREIGN_WEIGHTS.intersection(names)):
        content = "only weights of other frameworks, which statecli does not read"
        return f"is a folder with {content}: {quoting.names(foreign)}"
    searched = folders[:MAX_INNER_FOLDERS]
    on_disk.prefetch(on_disk.join(path, name) for name in searched)
    # A link may lead to this folder or one of its parents.
    inner = [name for name in searched if not on_disk.is_link(on_disk.join(path, name))]
    weight_folders = [name for name in inner if _has_weights(on_disk.join(path, name))]
    if weight_folders and PIPELINE in names:
        return f"is a diffusers pipeline, not one model; give one of its components: {quoting.names(weight_folders)}"
    configured = [name for name in searched if on_disk.is_file(on_disk.join(path, name, CONFIG))]
    if configured and PIPELINE in names:
        components = quoting.names([on_disk.join(path, name) for name in configured])
        return f"is a diffusers pipeline without weights; give one of its components as a model class: {components}"
    if not weight_folders:
        return ""
    search_limit = f" (statecli looked into the first {MAX_INNER_FOLDERS} of {len(folders)} folders)" * (
        len(folders) > MAX_INNER_FOLDERS
    )
    return (
        "is a folder without a checkpoint, but with checkpoints in its subfolders; give one of the "
        f"subfolders: {quoting.names(weight_folders)}{search_limit}"
    )


def _has_weights(path: str) -> bool:
    try:
        names = on_disk.list_names(path)
    except (OSError, UnreadableError):  # only for a hint in a message
        return False
    return any(name.endswith((*WEIGHTS, ".distcp")) and not COMPANIONS.match(name) for name in names)
