"""Lock the settings of a checkpoint, and the files of its folder that change the model.

A changed `rms_norm_eps`, tokenizer or `modeling_*.py` changes the results of the same weights. Each setting
is locked separately, so that a finding can name the key and both values. Of every other file, a digest is locked.
Files about the course of the training (`trainer_state.json`), the optimizer and documentation are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from statecli import formats, pickle_scan
from statecli.commands.diff.result import ScalarChange, Status
from statecli.commands.diff.settings import compare_settings, list_format_keys, select_section_settings
from statecli.commands.lock.lock_file import LockedSettings, LockedTarget
from statecli.core.digest_algorithm import Algorithm, load_hasher
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, Settings, StateDict
from statecli.core.run_scope import NotChecked
from statecli.core.setting_paths import rename
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource, read_small_file
from statecli.storage.checkpoint_names import CHECKPOINT_SUFFIXES, SETTINGS_FILES
from statecli.storage.zip_archive import Archive
from statecli.targets.expand import is_named_as_checkpoint, is_reached, list_members, skip_subfolder
from statecli.targets.section_of_target import split_section

#: Files that do not change the results of a model: records of the training, and documents.
BOOKKEEPING_FILES = frozenset(["trainer_state.json", "all_results.json", "train_results.json", "eval_results.json"])
DOCUMENT_NAME = compile_on_use(
    r"(?i)(?:.*\.(?:md|rst|log|png|jpe?g|gif|svg|pdf)|(?:licen[sc]e|readme|notice|requirements|changelog)(?:\.txt)?"
    r"|events\.out\.tfevents\..*)\Z"
)
#: Hidden files that a loader reads if another file names them: `"tokenizer_file": ".tokenizer.json"`.
HIDDEN_FILE_NAME = compile_on_use(r"(?i)\..*\.(?:json|jsonl|ya?ml|jinja|py|txt|model|vocab|bpe|tiktoken|so|npy)")
#: Keys of the settings of a training in checkpoints, which do not change the results of the model.
TRAINING_KEYS = (
    *("trainer_state", "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "scheduler"),
    *("lr_scheduler", "lr_schedulers", "scheduler_state_dict", "scaler", "callbacks", "loops"),
)
#: Largest number of files and subfolders of a folder, and of their levels, because the folder of a model has fewer.
MAX_FILES = 2_000
MAX_FOLDERS = 5_000
MAX_DEPTH = 16
#: Number of levels above a model where its pipeline may be: `pipeline/unet/diffusion_pytorch_model.safetensors`.
PIPELINE_DEPTH = 2
#: Largest size in bytes of a file behind a URL that is downloaded to be locked.
MAX_REMOTE_BYTES = 64 << 20
#: Largest size in bytes of a program in an archive.
MAX_PROGRAM_BYTES = 128 << 20
#: Number of bytes that are hashed at a time.
_PIECE_BYTES = 8 << 20


class FileChange(msgspec.Struct, frozen=True):
    """File of the folder that differs from the lock. The digest is None on the side that lacks the file."""

    name: str
    locked: str | None
    actual: str | None


class CompanionChanges(msgspec.Struct, frozen=True):
    """Settings and files of a target that differ from the lock, and settings and files that were not compared.

    `compared` are the paths of the files that both the lock and the folder have.
    """

    settings: tuple[ScalarChange, ...] = ()
    files: tuple[FileChange, ...] = ()
    compared: tuple[str, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()


def select_lockable_settings(state: ModelState, section: str | None) -> Settings:
    """Return the settings of the model, without the settings of the training and of the file format."""
    format_keys = list_format_keys(state)
    settings = select_section_settings(state, section)

    training = (*TRAINING_KEYS, *(facts.section for facts in state.optimizers if facts.section))

    def keep(key: str) -> tuple[str, str] | None:
        is_of_training = key in training or key.startswith(tuple(f"{name}." for name in training))
        return None if key in format_keys or is_of_training else ("", "")

    return replace(rename(settings, keep), companion_names=settings.companion_names - set(training))


def compute_companion_digests(text: str, algorithm: Algorithm, lock_file: str | None = None) -> dict[str, str] | None:
    """Return the digest of each companion file that changes the model, by its path in the folder or archive.

    The companions in a folder are its other files except `lock_file`; in a file, its programs (TorchScript,
    torch.export). Return None without companions. Raises UnreadableError for an unreadable file, and for a folder with
    more than `MAX_FILES` or `MAX_DEPTH` levels.
    """
    path, _ = split_section(text)
    if not files.is_folder(path):
        return _compute_program_digests(path, algorithm) or None
    if files.explain_missing_names(path):
        return None
    file_paths = {name: files.join(path, name) for name in sorted(find_companion_files(path))}
    return {
        name: _compute_settings_digest(file_path, algorithm) or _hash_file(file_path, algorithm)
        for name, file_path in file_paths.items()
        if lock_file is None or not _is_same_lock(file_path, lock_file)
    }


def _is_same_lock(path: str, lock_file: str) -> bool:
    """Return True if `path` is the file `lock_file` and already contains a lock."""
    if files.resolve_links(path) != files.resolve_links(lock_file):
        return False
    with ByteSource(path) as source:
        return b'"statecli.lock/' in source.head[:200]


def find_companion_files(folder: str) -> list[str]:
    """Return the files that change the model, in the folder and in subfolders that are not targets."""
    companions: list[str] = []
    of_model = {files.join(folder, path) for path in list_members(folder)}
    visited_folders: set[str] = set()
    modules: set[str] = set()
    pending = [("", 0, False)]
    while pending:
        inner, depth, is_walked = pending.pop()
        if depth > MAX_DEPTH:
            raise UnreadableError(
                f"{folder}: {inner} is more than {MAX_DEPTH} folders deep; lock this subfolder separately"
            )
        current_folder = files.join(folder, inner) if inner else folder
        if files.resolve_links(current_folder) in visited_folders:  # a link to a folder that was already read
            continue
        visited_folders.add(files.resolve_links(current_folder))
        if is_walked and not of_model.issuperset(
            files.join(current_folder, path) for path in list_members(current_folder)
        ):
            continue
        names = files.list_names(current_folder)
        prefix = f"{inner}/" if inner else ""
        for module in checkpoint_folder.list_module_folders(current_folder, names):
            modules.update(prefix + name for name in checkpoint_folder.split_module_folder(module) or ())
        for name in names:
            path = prefix + name
            # Hidden files of tools change often, so only hidden code and configurations count, which other files may
            # name.
            if name.startswith(".") and path not in modules and not HIDDEN_FILE_NAME.fullmatch(name):
                continue
            inner_path = files.join(folder, path)
            if files.is_folder(inner_path):
                is_entered = skip_subfolder(inner_path) is None or (path in modules and not files.is_link(inner_path))
                pending.append((path, depth + 1, is_entered and (is_walked or not inner)))
            elif _changes_model(inner_path, name):
                companions.append(path)
        if len(visited_folders) > MAX_FOLDERS:
            raise UnreadableError(f"{folder}: has more than {MAX_FOLDERS:,} folders; lock its subfolders separately")
        if len(companions) > MAX_FILES:
            raise UnreadableError(
                f"{folder}: has more than {MAX_FILES:,} files next to its weights; lock its subfolders separately"
            )
    return companions


def find_pipeline_folders(targets: Iterable[str], texts: Sequence[str]) -> list[str]:
    """Return the folders of diffusers pipelines around `targets`, limited to folders and globs that the user typed.

    A pipeline has no weights of its own. Its own files, its scheduler and its tokenizers change its results.
    """
    parent_folders = (
        folder for text in targets for folder in islice(files.iter_parents(split_section(text)[0]), PIPELINE_DEPTH)
    )
    return [
        folder
        for folder in dict.fromkeys(parent_folders)
        if is_reached(folder, texts) and files.is_file(files.join(folder, checkpoint_folder.PIPELINE))
    ]


def _changes_model(path: str, name: str) -> bool:
    if (
        name in BOOKKEEPING_FILES
        or checkpoint_folder.INDEX.search(name)
        or DOCUMENT_NAME.match(name)
        or _is_weights(name)
    ):
        return False
    return not files.reads_are_requests(path) or files.get_size(path) <= MAX_REMOTE_BYTES


def _is_weights(name: str) -> bool:
    """Return True for the name of a checkpoint, or of a training-state file that the folder's reader reads."""
    # `scheduler.py` is code of the model; `scheduler_config.json` has its settings.
    is_state = checkpoint_folder.COMPANIONS.match(name) is not None and name.lower().endswith(CHECKPOINT_SUFFIXES)
    return is_state or is_named_as_checkpoint(name)


def _compute_program_digests(path: str, algorithm: Algorithm) -> dict[str, str]:
    """Return the digest of each program in an archive: a record that torch compiles or interprets."""
    Use = pickle_scan.archive_records.LoaderUse
    programs = (Use.PROGRAM, Use.SCRIPT, Use.BYTECODE, Use.OLD_SCRIPT, Use.COMPILED)
    with ByteSource(path) as source:
        if not source.head.startswith(b"PK"):
            return {}
        archive = Archive(source)
        use_of = pickle_scan.archive_records.classify_records(archive).use_of
        records = [record for record in archive.records.values() if use_of(record) in programs]
        # Without the top folder, whose name is the name under which the archive was first saved.
        return {
            record.name.removeprefix(f"{archive.folder}/"): _hash_bytes(
                archive.read(record, MAX_PROGRAM_BYTES), algorithm
            )
            for record in records
        }


def _compute_settings_digest(path: str, algorithm: Algorithm) -> str | None:
    """Return the digest of a JSON settings file, independent of order and indentation, or None for any other file."""
    import json

    stem, suffix = os.path.splitext(files.get_name(path))
    if suffix != ".json" or stem not in SETTINGS_FILES:
        return None
    try:
        document = json.loads(read_small_file(path, SETTINGS_FILES[stem]), object_pairs_hook=_sort_pairs)
        text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    except (UnreadableError, ValueError, RecursionError):
        return None
    return _hash_bytes(text.encode(), algorithm)


def _sort_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Sort the pairs of a JSON object by key. Repeated keys stay, because programs differ in which value they use."""
    return {"": [list(pair) for pair in sorted(pairs, key=lambda pair: pair[0])]}


def _hash_bytes(data: bytes, algorithm: Algorithm) -> str:
    digest = load_hasher(algorithm)()
    digest.update(data)
    return str(digest.hexdigest())


def _hash_file(path: str, algorithm: Algorithm) -> str:
    digest = load_hasher(algorithm)()
    file = files.open_file(path)
    try:
        for start in range(0, file.size, _PIECE_BYTES):
            digest.update(file.read(start, min(_PIECE_BYTES, file.size - start)))
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {(error.strerror or 'unknown error').lower()}") from error
    finally:
        file.close()
    return str(digest.hexdigest())


def compare_companions(
    state: ModelState, target: LockedTarget, algorithm: Algorithm, lock_file: str | None = None
) -> CompanionChanges:
    """Compare the settings and files of `state`, which must be unfiltered, with the lock."""
    if state.traits.is_class:
        return CompanionChanges()
    if target.settings is None:
        reason = "the lock has only tensors; run `statecli lock` again to lock settings and files"
        return CompanionChanges(not_checked=(NotChecked("target", 1, f"settings not compared: {reason}"),))
    settings, uncompared = _compare_settings(state, target.settings)
    folder = compare_files(state.target, target.files, algorithm, lock_file)
    # Omit the file of a changed key, because the key says more than the digest of the file.
    named = {f"{change.key.partition('.')[0]}.json" for change in settings}
    changes = (change for change in folder.files if change.name not in named or None in (change.locked, change.actual))
    return CompanionChanges(settings, tuple(changes), folder.compared, (*uncompared, *folder.not_checked))


def _compare_settings(
    state: ModelState, locked: LockedSettings
) -> tuple[tuple[ScalarChange, ...], tuple[NotChecked, ...]]:
    """Return the settings that differ. An added or removed setting counts only if both sides could record it."""
    section = split_section(state.target)[1]
    current = replace(state, metadata=select_lockable_settings(state, section))
    # A lock without settings does not say its format, so the present format decides which settings it could have.
    before = to_state(locked) if locked.format else replace(to_state(locked), traits=state.traits)
    changes = compare_settings(before, current, (None, None)).changes
    files_of_both = frozenset(locked.beside) & current.metadata.companion_names
    is_same_format = formats.is_in_container(state, locked.format)
    counted_changes = tuple(
        change
        for change in changes
        if is_same_format or change.status is Status.CHANGED or change.key.partition(".")[0] in files_of_both
    )
    companion_prefixes = tuple(f"{name}." for name in frozenset(locked.beside) - files_of_both)
    uncompared_count = (
        len(changes)
        - len(counted_changes)
        + sum(bool(companion_prefixes) and key.startswith(companion_prefixes) for key in locked.values)
    )
    origin = "was created from another format or from a folder" if locked.format else "has no settings"
    return counted_changes, (
        NotChecked("setting", uncompared_count, f"not compared, because the lock {origin}"),
    ) if uncompared_count else ()


def compare_files(
    text: str, locked: Mapping[str, str] | None, algorithm: Algorithm, lock_file: str | None = None
) -> CompanionChanges:
    """Compare the files of a folder with the lock, except the lock file itself. The result has no settings."""
    digests = compute_companion_digests(text, algorithm, lock_file)
    folder = split_section(text)[0]
    is_file = not files.is_folder(folder)
    if digests is None and is_file and locked:
        count, reason = len(locked), "not compared: the lock has these files, but the target is a single file"
        return CompanionChanges(not_checked=(NotChecked("file", count, reason),))
    if locked is None:
        reason = "not compared: the lock does not record these files; run `statecli lock` again"
        return CompanionChanges(not_checked=(NotChecked("file", len(digests), reason),) if digests else ())
    digests = digests or {}
    compared = () if is_file else tuple(files.join(folder, name) for name in digests if name in locked)
    changes = (FileChange(name, locked.get(name), digests.get(name)) for name in sorted({*digests, *locked}))
    return CompanionChanges(files=tuple(item for item in changes if item.locked != item.actual), compared=compared)


def lock_settings(state: ModelState) -> LockedSettings:
    """Return the locked settings of a checkpoint. `format` is empty if the checkpoint has no settings."""
    settings = select_lockable_settings(state, split_section(state.target)[1])
    if not settings.values and not settings.companion_names:
        return LockedSettings()
    modules = tuple(state_dict.section for state_dict in state.state_dicts if state_dict.is_module)
    return LockedSettings(
        formats.container_of(state.format),
        dict(sorted(settings.values.items())),
        dict(sorted(settings.types.items())),
        dict(sorted(settings.kinds.items())),
        tuple(sorted(settings.companion_names)),
        modules,
    )


def to_state(locked: LockedSettings) -> ModelState:
    """Convert locked settings to a state, because `compare_settings` compares two states."""
    settings = Settings(locked.values, locked.types, locked.kinds, frozenset(locked.beside))
    modules = tuple(StateDict(section, is_module=True) for section in locked.modules)
    sections = locked.modules or ("model",)
    traits = formats.traits_of(locked.format or "")
    return ModelState("", locked.format or "lock", (), sections, settings, state_dicts=modules, traits=traits)
