"""Folders that cannot be listed: request all usual names of checkpoint files together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache

from statecli.core.errors import UnreadableError
from statecli.storage.checkpoint_names import METADATA, SETTINGS_FILES, SINGLE
from statecli.storage.object_cache import RemoteFile
from statecli.storage.object_store import Listing, Missing, Unsure
from statecli.storage.url import join

_TRAINING_FILES = (
    "optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth training_args.bin random_states_0.pkl"
)
_TOOL_FILES = ".metadata latest latest_checkpointed_iteration.txt zero_to_fp32.py model_index.json trainer_state.json"


@cache
def list_usual_names() -> tuple[str, ...]:
    """Return the usual names of checkpoint files, the likeliest first."""
    weights = [file for name in SINGLE for file in (name, f"{name}.index.json")]
    settings = [f"{stem}.json" for stem in SETTINGS_FILES]
    return tuple(dict.fromkeys((*weights, *settings, *_TOOL_FILES.split(), *_TRAINING_FILES.split())))


def try_usual_names(
    folder: str, why: Unsure, prefetch: Callable[[Sequence[str]], None], open_file: Callable[[str], RemoteFile]
) -> Listing | UnreadableError:
    """Request all usual names in a folder; return the names that exist, or an error. `why`: error of the listing."""
    paths = {name: join(folder, name) for name in list_usual_names()}
    prefetch(list(paths.values()))
    errors = {name: _find_error(open_file(path)) for name, path in paths.items()}
    for name, error in _find_inconclusive(errors):
        doubt = UnreadableError(f"cannot check whether the folder contains {name}: {error}")
        return doubt if isinstance(error, Unsure) else error
    existing_names = {name: False for name, error in errors.items() if error is None}
    if existing_names:
        names = ", ".join(list_usual_names())
        return Listing(
            existing_names, f"the folder cannot be listed ({why}), so statecli tried only these names: {names}"
        )
    no_file_text = (
        f"this folder has no file with one of the {len(paths)} usual checkpoint names; give the path of a file"
    )
    text = f"cannot be listed ({why}), and {no_file_text}"
    return Missing(text) if isinstance(why, Missing) else UnreadableError(text)


def _find_inconclusive(errors: dict[str, UnreadableError | None]) -> Iterator[tuple[str, UnreadableError]]:
    """Yield each name for which it is unknown whether the file exists, with the error of the request.

    A server may answer every request for a missing file with the same refusal or page, so the most frequent answer
    counts as missing. Refusals of names with a leading dot count as missing too, because many servers refuse them.
    """
    kinds = Counter(_classify(error) for error in errors.values() if error is not None)
    most_frequent_kind = max(kinds, key=kinds.__getitem__, default=None)
    for name, error in errors.items():
        if error is None or isinstance(error, Missing):
            continue
        if not isinstance(error, Unsure) or (_classify(error) != most_frequent_kind and not name.startswith(".")):
            yield name, error


def _classify(error: UnreadableError) -> Hashable:
    """Return a key by which errors are grouped: the class and the HTTP status."""
    return Missing if isinstance(error, Missing) else (type(error), getattr(error, "status", 0))


def add_hidden_names(listing: Listing, folder: str, open_file: Callable[[str], RemoteFile]) -> Listing:
    """Add `.metadata`, if it exists, to a listing with `.distcp` files, because web servers do not list dot files."""
    if METADATA in listing.folders or not any(name.endswith(".distcp") for name in listing.folders):
        return listing
    if isinstance(_find_error(open_file(join(folder, METADATA))), Missing):
        return listing
    # A file that cannot be requested counts as present; opening it raises the error.
    return listing._replace(folders={**listing.folders, METADATA: False})


def _find_error(file: RemoteFile) -> UnreadableError | None:
    try:
        file.prefetch_head()
    except UnreadableError as error:
        return error
    return None
