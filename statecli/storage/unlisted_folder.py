"""Folders that nobody lists: what is in one of the names that checkpoints usually have, asked for all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage.checkpoint_names import METADATA, SETTINGS_FILES, SINGLE
from statecli.storage.object_cache import Object
from statecli.storage.store import Listing, Missing, Unsure

_TRAINING = "optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth training_args.bin random_states_0.pkl"
_TOOLS = ".metadata latest latest_checkpointed_iteration.txt zero_to_fp32.py model_index.json trainer_state.json"


@cache
def usual() -> tuple[str, ...]:
    """The names, likeliest first."""
    weights = [one for name in SINGLE for one in (name, f"{name}.index.json")]
    settings = [f"{stem}.json" for stem in SETTINGS_FILES]
    return tuple(dict.fromkeys((*weights, *settings, *_TOOLS.split(), *_TRAINING.split())))


def tried(
    path: str, why: Unsure, ahead: Callable[[Sequence[str]], None], object_of: Callable[[str], Object]
) -> Listing | UnreadableError:
    """What of the usual names is in the folder, which cannot be listed; `why`, if nothing is."""
    inner = {name: files.join(path, name) for name in usual()}
    ahead(list(inner.values()))
    errors = {name: _error(object_of(where)) for name, where in inner.items()}
    for name, error in _untold(errors):
        return UnreadableError(f"{name} may be in it: {error}") if isinstance(error, Unsure) else error
    found = {name: False for name, error in errors.items() if error is None}
    if found:
        return Listing(found, f"it cannot be listed ({why}), and was asked for the names {', '.join(usual())} alone")
    none = f"none of the {len(inner)} usual names of a checkpoint's files is in it: name a file"
    text = f"cannot be listed ({why}), and {none}"
    return Missing(text) if isinstance(why, Missing) else UnreadableError(text)


def _untold(errors: dict[str, UnreadableError | None]) -> Iterator[tuple[str, UnreadableError]]:
    """Of which names it is not known whether they are there.

    A server may answer what is missing with a refusal, or with a page; then it answers most of these names so. Many
    refuse whatever begins with a dot.
    """
    kinds = Counter(_kind(error) for error in errors.values() if error is not None)
    usual = max(kinds, key=kinds.__getitem__, default=None)
    for name, error in errors.items():
        if error is None or isinstance(error, Missing):
            continue
        if not isinstance(error, Unsure) or (_kind(error) != usual and not name.startswith(".")):
            yield name, error


def _kind(error: UnreadableError) -> Hashable:
    """What answers have in common that mean the same."""
    return Missing if isinstance(error, Missing) else (type(error), getattr(error, "status", 0))


def with_hidden(found: Listing, path: str, object_of: Callable[[str], Object]) -> Listing:
    """The same, with the `.metadata` that belongs to such files: web servers list nothing that begins with a dot."""
    if METADATA in found.folders or not any(name.endswith(".distcp") for name in found.folders):
        return found
    return _checked(found, _error(object_of(files.join(path, METADATA))))


def _checked(found: Listing, error: UnreadableError | None) -> Listing:
    # What cannot be asked for counts as there, and opening it says why.
    return found if isinstance(error, Missing) else found._replace(folders={**found.folders, METADATA: False})


def _error(one: Object) -> UnreadableError | None:
    try:
        one.prime()
    except UnreadableError as error:
        return error
    return None
