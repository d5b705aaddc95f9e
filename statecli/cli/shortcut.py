"""The everyday command lines, parsed without Typer.

Typer 0.29 imports pydantic on every run: 100 ms, twice what listing a checkpoint takes. A line that is nothing but its
command's targets and options in their full spelling is read here; whatever else it is (help, a mistake, `-qv`, an
abbreviation) is left to Typer, which alone explains and complains. Tests hold the two to the same result for every
option there is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from statecli.commands.diff.result import Field
from statecli.commands.verify.result import Name
from statecli.core.finding import Severity
from statecli.core.state import Kind
from statecli.render import Output
from statecli.requests.options import (
    AuditOptions,
    Color,
    DiffOptions,
    InspectOptions,
    LockOptions,
    MergeOptions,
    VerifyOptions,
)
from statecli.values.algorithm import Algorithm

#: What a line asks for, whichever command it is.
Options = InspectOptions | DiffOptions | VerifyOptions | AuditOptions | LockOptions | MergeOptions

#: An option's spelling -> its field, and what makes a value of the word; ValueError where it is none.
Takes = Mapping[str, tuple[str, Callable[[str], object]]]


class Command(msgspec.Struct, frozen=True):
    """One command's grammar: the fields of its targets in order, and its options by spelling."""

    options: type[Options]
    targets: tuple[str, ...]
    flags: Mapping[str, str]
    values: Takes
    repeatable: Takes
    #: Whether the last target may come more than once; its field is a tuple.
    several: bool = False


def _flags(*fields: str) -> dict[str, str]:
    return {f"--{field.replace('_', '-')}": field for field in fields}


FLAGS = {
    **_flags("all", "quiet", "verbose", "no_progress", "debug"),
    "-q": "quiet",
    "-v": "verbose",
}
VALUES: Takes = {
    "--init-device": ("init_device", str),
    "--output-format": ("output_format", Output),
    "-f": ("output_format", Output),
    "--output": ("output", str),
    "-o": ("output", str),
    "--color": ("color", Color),
    "--timeout": ("timeout", float),
}
REPEATABLE: Takes = {
    "--include": ("include", str),
    "-i": ("include", str),
    "--exclude": ("exclude", str),
    "-x": ("exclude", str),
    "--kind": ("kind", Kind),
}
#: Of those that read values.
EXECUTOR: Takes = {"--executor": ("executor", str), "--shard": ("shard", str)}
#: Of the commands that have outputs.
REPORTED: Takes = {**REPEATABLE, "--report": ("report", str)}

COMMANDS = {
    "inspect": Command(
        InspectOptions,
        ("target",),
        {**FLAGS, **_flags("cuda", "stats", "tree")},
        {**VALUES, "--to": ("to", str), "--model": ("model", str), "--inputs": ("inputs", str), **EXECUTOR},
        {**REPORTED, "--input": ("input", str)},
    ),
    "diff": Command(
        DiffOptions,
        ("before", "after"),
        {**FLAGS, **_flags("tree", "bitwise", "metadata_only", "no_renames", "name_only", "name_status")},
        {
            **VALUES,
            "--atol": ("atol", float),
            "--rtol": ("rtol", float),
            "--lines": ("lines", int),
            "-n": ("lines", int),
            "--device": ("device", str),
            "--jobs": ("jobs", int),
            "-j": ("jobs", int),
            **EXECUTOR,
        },
        {
            **REPORTED,
            "--map": ("map", str),
            "--ignore": ("ignore", Field),
            "--only": ("only", str),
            "--frozen": ("frozen", str),
            "--changed": ("changed", str),
        },
    ),
    "verify": Command(
        VerifyOptions,
        ("target",),
        FLAGS,
        {
            **VALUES,
            "--device": ("device", str),
            "--dtype": ("dtype", str),
            "--optimizer": ("optimizer", str),
            "--inputs": ("inputs", str),
        },
        {**REPORTED, "--check": ("check", Name), "--input": ("input", str)},
    ),
    "audit": Command(
        AuditOptions,
        ("targets",),
        {
            **FLAGS,
            **_flags("values", "no_values", "frozen_only", "weights_only", "allow_empty", "as_found", "no_config"),
        },
        {
            **VALUES,
            "--model": ("model", str),
            "--fail-on": ("fail_on", Severity),
            "--lock": ("lock", str),
            "--against": ("against", str),
            "--baseline": ("baseline", str),
            "--write-baseline": ("write_baseline", str),
            "--reason": ("reason", str),
            "--config": ("config", str),
            "--jobs": ("jobs", int),
            "-j": ("jobs", int),
            **EXECUTOR,
        },
        {**REPORTED, "--select": ("select", str), "--ignore": ("ignore", str)},
        several=True,
    ),
    "lock": Command(
        LockOptions,
        ("targets",),
        {**_flags("weights_only", "quiet", "no_progress", "debug"), "-q": "quiet"},
        {
            "--digest": ("digest", Algorithm),
            "--jobs": ("jobs", int),
            "-j": ("jobs", int),
            **EXECUTOR,
            "--init-device": ("init_device", str),
            "--output": ("output", str),
            "-o": ("output", str),
            "--color": ("color", Color),
            "--timeout": ("timeout", float),
        },
        REPEATABLE,
        several=True,
    ),
    "merge": Command(
        MergeOptions,
        ("parts",),
        {**FLAGS, **_flags("tree", "name_only", "name_status", "copies")},
        {
            **{name: one for name, one in VALUES.items() if name != "--init-device"},
            "--lines": ("lines", int),
            "-n": ("lines", int),
            "--jobs": ("jobs", int),
            "-j": ("jobs", int),
            "--executor": ("executor", str),
        },
        {"--code": ("code", str), "--url": ("url", str), "--report": ("report", str)},
        several=True,
    ),
}


def parse(words: list[str]) -> Options | None:
    """The options of a line; None where Typer must look at it."""
    command = COMMANDS.get(words[0]) if words else None
    if command is None or ambiguous(words) is not None:
        return None
    found: dict[str, Any] = {}
    targets = iter(command.targets)
    rest = iter(words[1:])
    field = None
    ended = False
    for word in rest:
        if word == "--" and not ended:
            ended = True
        elif ended or not word.startswith("-"):
            field = next(targets, field if command.several else None)
            if field is None:
                return None
            found[field] = (*found.get(field, ()), word) if command.several else word
        elif word in command.flags:
            found[command.flags[word]] = True
        elif not _take(word, rest, command, found):
            return None
    return command.options(**found) if next(targets, None) is None else None


def ambiguous(words: Sequence[str]) -> str | None:
    """The first word that reads as an option and is a file here: a glob of the shell's puts both on a line.

    Behind `--` there are no options. A file `-o.pt` beside others would have the audit of them written to `.pt`.
    """
    options = itertools.takewhile(lambda word: word != "--", words)
    return next((word for word in options if word.startswith("-") and word != "-" and os.path.lexists(word)), None)


def _take(word: str, rest: Iterator[str], command: Command, found: dict[str, Any]) -> bool:
    """One option that has a value, `--to meta` or `--to=meta`; False where it is not plainly that."""
    name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
    known = command.values.get(name) or command.repeatable.get(name)
    if not equals:
        value = next(rest, "-")
    if known is None or (value.startswith("-") and not equals):
        return False
    field, made_of = known
    try:
        taken = made_of(value)
    except ValueError:
        return False
    if name in command.repeatable:
        found[field] = (*found.get(field, ()), taken)
    elif field in found:
        return False
    else:
        found[field] = taken
    return True
