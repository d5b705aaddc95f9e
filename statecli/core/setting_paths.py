"""Rename, select and join settings by their dotted paths, and format a path.

Needs no reader of a format, so that a diff of settings imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Scalar, Settings

#: Path of the digest of all settings, if not all are listed.
MORE = "(and more)"

_INT = compile_on_use("0|-?[1-9][0-9]*")


def add_file(settings: Settings, name: str, file_settings: Settings) -> Settings:
    """Return the settings with those of a companion file added under the prefix `name.` (`name` has no dot)."""
    combined = join((settings, put_below(file_settings, f"{name}.")))
    return replace(combined, companion_names=settings.companion_names | {name})


def rename(settings: Settings, renaming: Callable[[str], tuple[str, str] | None]) -> Settings:
    """Return the settings with new path prefixes. `renaming(path)` is (old prefix, new prefix); None drops the path."""
    prefixes_by_key = {
        key: prefixes for key in (*settings.values, *settings.kinds) if (prefixes := renaming(key)) is not None
    }
    # The path of a container has no dot at its end.
    names = {
        key: new + key[len(old) :] if key else new.removesuffix(".") for key, (old, new) in prefixes_by_key.items()
    }
    types = {
        names[key]: read(prefixes_by_key[key][1]) + letters[len(prefixes_by_key[key][0]) :]
        for key, letters in settings.types.items()
        if key in names
    }
    return Settings(
        {names[key]: value for key, value in settings.values.items() if key in names},
        {key: letters for key, letters in types.items() if letters != read(key)},
        {names[key]: kind for key, kind in settings.kinds.items() if key in names},
        settings.companion_names,
    )


def put_below(settings: Settings, prefix: str) -> Settings:
    """Return the settings with a prefix before each path. The prefix ends with a dot or is empty."""
    return rename(settings, lambda _: ("", prefix))


def select(settings: Settings, is_wanted: Callable[[str], object]) -> Settings:
    """Return the settings whose paths satisfy `is_wanted`."""
    return rename(settings, lambda key: ("", "") if is_wanted(key) else None)


def join(parts: Iterable[Settings]) -> Settings:
    """Join several settings objects. If a path occurs twice, the later value counts."""
    values: dict[str, Scalar] = {}
    types: dict[str, str] = {}
    kinds: dict[str, str] = {}
    companion_files: frozenset[str] = frozenset()
    for settings in parts:
        types = {key: letters for key, letters in types.items() if key not in settings.values}
        values.update(settings.values)
        types.update(settings.types)
        kinds.update(settings.kinds)
        companion_files |= settings.companion_names
    return Settings(values, types, kinds, companion_files)


def is_same_setting(key: str, side: Settings, other: Settings) -> bool:
    """Return True if the path has the same value, key types and container type in both settings."""
    if (key in side.values) is not (key in other.values):
        return False
    first, second = side.values.get(key), other.values.get(key)
    is_same_value = type(first) is type(second) and first == second
    return is_same_value and side.types.get(key) == other.types.get(key) and side.kinds.get(key) == other.kinds.get(key)


def read(path: str) -> str:
    """Guess the key types of a path from its spelling, as letters of `Settings.types`."""
    return ".".join(_choose_letter(step) * len(step) for step in path.split("."))


def _choose_letter(step: str) -> str:
    if step in ("True", "False"):
        return "b"
    if step.startswith("["):
        return "k"
    return "i" if _INT.fullmatch(step) else "n" if step == "None" else "t"


def format_path(path: str, types: str) -> str:
    """Format a path. A text key that looks like another type is shown in brackets and quotes."""
    steps, at = [], 0
    for letters in types.split("."):
        step = path[at : at + len(letters)]
        at += len(letters) + 1
        steps.append(f"[{step!r}]" if letters.startswith("t") and read(step) != letters else step)
    return ".".join(steps)
