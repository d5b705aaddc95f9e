"""Folders that nobody lists: what is in one of the names that checkpoints usually have, asked for all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from statecli import files
from statecli.errors import UnreadableError
from statecli.remote.objects import Object
from statecli.remote.stores import Listing, Missing, Unsure

_TRAINING = "optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth training_args.bin random_states_0.pkl"
_TOOLS = ".metadata latest latest_checkpointed_iteration.txt zero_to_fp32.py model_index.json trainer_state.json"


@cache
def usual() -> tuple[str, ...]:
    """The names, likeliest first."""
    from statecli.formats import _configs, _folder

    weights = [one for name in _folder.SINGLE for one in (name, f"{name}.index.json")]
    settings = [f"{stem}.json" for stem in _configs.FILES]
    return tuple(dict.fromkeys((*weights, *settings, *_TOOLS.split(), *_TRAINING.split())))


def tried(
    path: str, why: Unsure, ahead: Callable[[Sequence[str]], None], object_of: Callable[[str], Object]
) -> Listing | UnreadableError:
    """What of the usual names is in the folder, which cannot be listed; `why`, if nothing is."""
    inner = {name: files.join(path, name) for name in usual()}
    ahead(list(inner.values()))
    found = {}
    for name, where in inner.items():
        error = _error(object_of(where))
        if error is None:
            found[name] = False
        elif not isinstance(error, (Missing, Unsure)):  # whether it is there is not known
            return error
    if found:
        return Listing(found, f"it cannot be listed ({why}), and was asked for the names {', '.join(usual())} alone")
    none = f"none of the {len(inner)} usual names of a checkpoint's files is in it: name a file"
    return type_of(why)(f"cannot be listed as a folder: it {why}; {none}")


def type_of(why: Unsure) -> type[UnreadableError]:
    """Missing stays Missing."""
    return Missing if isinstance(why, Missing) else UnreadableError


def _error(one: Object) -> UnreadableError | None:
    try:
        one.prime()
    except UnreadableError as error:
        return error
    return None
