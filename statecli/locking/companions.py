"""What a lock holds next to the tensors: settings of the checkpoint, and files of its folder that change the model.

A changed `rms_norm_eps`, tokenizer or `modeling_*.py` changes what the same weights compute. Settings are kept one by
one, so that a finding can name the key and both values; every other file of the folder is kept as a digest. What only
counts the training (`trainer_state.json`), the optimizer and documentation are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from statecli import files
from statecli.comparison.result import ScalarChange, Status
from statecli.comparison.scalars import changed_scalars, format_bookkeeping, settings_of_section
from statecli.errors import UnreadableError
from statecli.formats import _folder
from statecli.formats._settings import rename
from statecli.scope import NotChecked
from statecli.state import ModelState, Settings, StateDict
from statecli.target import split

if TYPE_CHECKING:
    from statecli.locking.file import Algorithm, LockedSettings, LockedTarget

#: Endings of files that a loader reads to build the model, the tokenizer or the preprocessing.
SUFFIXES = (
    *(".json", ".py", ".txt", ".model", ".jinja", ".yaml", ".yml", ".toml"),
    *(".vocab", ".bpe", ".tiktoken", ".spm", ".proto"),
)
#: Files with such an ending that change nothing which the model computes.
BOOKKEEPING = frozenset(["trainer_state.json", "all_results.json", "train_results.json", "eval_results.json"])
#: Documents that people put next to weights.
DOCUMENTS = ("license", "readme", "notice", "requirements", "changelog")
#: Where checkpoints keep the settings of a training: none of them changes what the model computes.
TRAINING = (
    *("trainer_state", "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "scheduler"),
    *("lr_scheduler", "lr_schedulers", "scheduler_state_dict", "scaler", "callbacks", "loops"),
)
#: Files of one folder and levels of subfolders that are read: a folder with more is not a model's.
MAX_FILES = 2_000
MAX_DEPTH = 4
#: Bytes that are hashed at a time.
_PIECE = 8 << 20


class FileChange(msgspec.Struct, frozen=True):
    """A file of the folder that differs from the lock: both digests, None on the side that does not have the file."""

    name: str
    locked: str | None
    found: str | None


class CompanionChanges(msgspec.Struct, frozen=True):
    """The settings and files of a target that differ from the lock, and what the lock could not be compared with."""

    settings: tuple[ScalarChange, ...] = ()
    files: tuple[FileChange, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()


def lockable_settings(state: ModelState, section: str | None) -> Settings:
    """Return the settings that belong to the model: without those of the training and of the container."""
    own = format_bookkeeping(state)
    settings = settings_of_section(state, section)

    training = (*TRAINING, *(facts.section for facts in state.optimizers if facts.section))

    def keep(key: str) -> tuple[str, str] | None:
        is_of_training = key in training or key.startswith(tuple(f"{name}." for name in training))
        return None if key in own or is_of_training else ("", "")

    return replace(rename(settings, keep), beside=settings.beside - set(training))


def companion_digests(text: str, algorithm: Algorithm) -> dict[str, str] | None:
    """Return the digest of each file of the target's folder that changes the model, by its path in the folder.

    Returns None for a target that is not a folder, or whose folder cannot be listed. Raises UnreadableError for a file
    that cannot be read, and for a folder with more than `MAX_FILES`.
    """
    folder, _ = split(text)
    if not files.isdir(folder) or files.unlisted(folder):
        return None
    return {name: _digest(files.join(folder, name), algorithm) for name in sorted(companion_files(folder))}


def companion_files(folder: str) -> list[str]:
    """Return the files of the folder that change the model, also in subfolders that hold no weights of their own."""
    found: list[str] = []
    pending = [("", 0)]
    while pending:
        inner, depth = pending.pop()
        names = files.names(files.join(folder, inner) if inner else folder)
        if inner and _holds_weights(names):
            continue
        for name in names:
            path = f"{inner}/{name}" if inner else name
            if name.startswith("."):
                continue
            if files.isdir(files.join(folder, path)):
                pending += [(path, depth + 1)] if depth < MAX_DEPTH else []
            elif _changes_model(name):
                found.append(path)
        if len(found) > MAX_FILES:
            raise UnreadableError(f"{folder}: has more than {MAX_FILES:,} files next to its weights: lock subfolders")
    return found


def _changes_model(name: str) -> bool:
    lower = name.lower()
    if lower in BOOKKEEPING or lower.startswith(DOCUMENTS) or _folder.INDEX.search(name):
        return False
    return lower.endswith(SUFFIXES)


def _holds_weights(names: list[str]) -> bool:
    from statecli.auditing.targets import is_called_weights

    return any(map(is_called_weights, names))


def _digest(path: str, algorithm: Algorithm) -> str:
    from statecli.values.digest import hasher

    digest = hasher(algorithm)()
    file = files.opened(path)
    try:
        for start in range(0, file.size, _PIECE):
            digest.update(file.read(start, min(_PIECE, file.size - start)))
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {(error.strerror or 'unknown error').lower()}") from error
    finally:
        file.close()
    return str(digest.hexdigest())


def compare_companions(state: ModelState, target: LockedTarget, algorithm: Algorithm) -> CompanionChanges:
    """Compare the settings and files of `state`, which is not filtered, with those that the lock has for it."""
    if state.format == "module":
        return CompanionChanges()
    if target.settings is None:
        why = "the lock holds weights only: run `statecli lock` again to lock settings and files"
        return CompanionChanges(not_checked=(NotChecked("target", 1, f"settings not compared: {why}"),))
    settings, uncompared = _compare_settings(state, target.settings)
    changes, missing = _compare_files(state.target, target.files, algorithm)
    # The settings of these files were compared one by one: another order or indentation changes nothing.
    read = {f"{name}.json" for name in state.metadata.beside & frozenset(target.settings.beside)}
    changes = tuple(change for change in changes if change.name not in read)
    return CompanionChanges(settings, changes, (*uncompared, *missing))


def _compare_settings(
    state: ModelState, locked: LockedSettings
) -> tuple[tuple[ScalarChange, ...], tuple[NotChecked, ...]]:
    """The settings that differ. One that only one side has counts where both sides have the same format or file."""
    section = split(state.target)[1]
    current = replace(state, metadata=lockable_settings(state, section))
    found, _, _ = changed_scalars(state_of_lock(locked), current, (None, None))
    files_of_both = frozenset(locked.beside) & current.metadata.beside
    kept = tuple(change for change in found if _is_comparable(change, state, locked, files_of_both))
    beside = tuple(f"{name}." for name in frozenset(locked.beside) - files_of_both)
    left = len(found) - len(kept) + sum(bool(beside) and key.startswith(beside) for key in locked.values)
    why = "not compared with the lock, which was made of another format or of a folder"
    return kept, (NotChecked("setting", left, why),) if left else ()


def _is_comparable(change: ScalarChange, state: ModelState, locked: LockedSettings, both: frozenset[str]) -> bool:
    if change.status is Status.CHANGED or locked.format == state.format:
        return True
    return change.key.partition(".")[0] in both


def _compare_files(
    text: str, locked: Mapping[str, str] | None, algorithm: Algorithm
) -> tuple[tuple[FileChange, ...], tuple[NotChecked, ...]]:
    found = companion_digests(text, algorithm)
    if found is None or locked is None:
        count = len(found if locked is None and found else locked or ())
        why = "not compared: " + (
            "the lock has no files" if found else "the lock is of a folder, the target is one file"
        )
        return (), (NotChecked("file", count, why),) if count else ()
    return tuple(_differences(found, locked)), ()


def _differences(found: Mapping[str, str], locked: Mapping[str, str]) -> Iterator[FileChange]:
    for name in sorted({*found, *locked}):
        if found.get(name) != locked.get(name):
            yield FileChange(name, locked.get(name), found.get(name))


def lock_settings(state: ModelState) -> LockedSettings:
    """Return the lines of a lock for the settings of a checkpoint; without a format where there are none."""
    from statecli.locking.file import LockedSettings

    settings = lockable_settings(state, split(state.target)[1])
    if not settings.values and not settings.beside:
        return LockedSettings()
    modules = tuple(one.section for one in state.state_dicts if one.is_module)
    return LockedSettings(
        state.format,
        dict(sorted(settings.values.items())),
        dict(sorted(settings.types.items())),
        dict(sorted(settings.kinds.items())),
        tuple(sorted(settings.beside)),
        modules,
    )


def state_of_lock(locked: LockedSettings) -> ModelState:
    """Return locked settings as a state, so that they are compared as those of two checkpoints are."""
    settings = Settings(locked.values, locked.types, locked.kinds, frozenset(locked.beside))
    modules = tuple(StateDict(section, is_module=True) for section in locked.modules)
    sections = locked.modules or ("model",)
    return ModelState("", locked.format or "lock", (), sections, settings, state_dicts=modules)
