"""Scope of a run: the things that were not checked, and the configuration. Every report shows both."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class NotChecked(msgspec.Struct, frozen=True):
    """Things that a run did not check for a common reason: `count` times `what`, a singular noun.

    `NotChecked("tensor", 12, "values not read: larger than 256 MiB")`
    """

    what: str
    count: int
    why: str


def has_unread_tensors(entries: Iterable[NotChecked]) -> bool:
    """Return True if an entry counts unread tensors. A run may skip files, but unread tensors are unexpected."""
    return any(entry.what == "tensor" for entry in entries)


class Configuration(msgspec.Struct, frozen=True):
    """Configuration of a run: its file (None for the defaults), and the checks that the file weakens.

    `disabled` are the rules switched off by the file, `weakened` its other entries that let more pass, a line each
    (`severity.unsafe-global = note`). `no_config`: the command line disables the configuration file. `plugins` are the
    modules with rules of an organisation, from the file and from the command line.
    """

    file: str | None = None
    disabled: tuple[str, ...] = ()
    weakened: tuple[str, ...] = ()
    no_config: bool = False
    plugins: tuple[str, ...] = ()


def merge_not_checked(entries: Iterable[NotChecked]) -> tuple[NotChecked, ...]:
    """Add up the counts of entries with the same noun and reason. Keep the order of first appearance."""
    counts: dict[tuple[str, str], int] = {}
    for entry in entries:
        counts[entry.what, entry.why] = counts.get((entry.what, entry.why), 0) + entry.count
    return tuple(NotChecked(noun, count, reason) for (noun, reason), count in counts.items())
