"""The everyday command lines, parsed without Typer.

Typer 0.29 imports pydantic on every run: 100 ms, twice what listing a checkpoint takes. A line that is nothing but one
target and options in their full spelling is read here; whatever else it is (help, a mistake, `-qv`, an abbreviation)
is left to Typer, which alone explains and complains. Tests hold the two to the same result for every option there is.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from statecli.options import Color, InspectOptions
from statecli.render import Output
from statecli.state import Kind

FLAGS = {
    **{f"--{name.replace('_', '-')}": name for name in ("cuda", "stats", "all", "tree", "no_progress", "debug")},
    "--quiet": "quiet",
    "-q": "quiet",
    "--verbose": "verbose",
    "-v": "verbose",
}
VALUES: dict[str, tuple[str, type[Enum] | None]] = {
    "--to": ("to", None),
    "--model": ("model", None),
    "--init-device": ("init_device", None),
    "--output-format": ("output_format", Output),
    "-f": ("output_format", Output),
    "--output": ("output", None),
    "-o": ("output", None),
    "--color": ("color", Color),
}
REPEATABLE: dict[str, tuple[str, type[Enum] | None]] = {
    "--include": ("include", None),
    "-i": ("include", None),
    "--exclude": ("exclude", None),
    "-x": ("exclude", None),
    "--kind": ("kind", Kind),
}


def parse(words: list[str]) -> InspectOptions | None:
    """The options of an `inspect` line; None where Typer must look at it."""
    if not words or words[0] != "inspect":
        return None
    found: dict[str, Any] = {}
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            if "target" in found:
                return None
            found["target"] = word
        elif word in FLAGS:
            found[FLAGS[word]] = True
        elif not _take(word, rest, found):
            return None
    return InspectOptions(**found) if "target" in found else None


def _take(word: str, rest: Any, found: dict[str, Any]) -> bool:
    """One option that has a value, `--to meta` or `--to=meta`; False where it is not plainly that."""
    name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
    field, choices = VALUES.get(name) or REPEATABLE.get(name) or (None, None)
    if not equals:
        value = next(rest, "-")
    taken: str | Enum = value
    if field is None or (value.startswith("-") and not equals):
        return False
    if choices is not None:
        if value not in {member.value for member in choices}:
            return False
        taken = choices(value)
    if name in REPEATABLE:
        found[field] = (*found.get(field, ()), taken)
    elif field in found:
        return False
    else:
        found[field] = taken
    return True
