"""The scope of a run: what was not checked, and which configuration was used. Every output of a report shows both."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class NotChecked(msgspec.Struct, frozen=True):
    """Things that a run did not check: `count` of `what`, a noun in the singular, and the reason they share.

    `NotChecked("tensor", 12, "values not read: larger than 256 MiB")`
    """

    what: str
    count: int
    why: str


class Configuration(msgspec.Struct, frozen=True):
    """The configuration that a run used: its file, None where it used the defaults, and what it weakens.

    `disabled` are the rules that it switches off; `weakened` its other entries that let more pass, a line each
    (`severity.unsafe-global = note`). `no_config`: the command line says that no file is to be used.
    """

    file: str | None = None
    disabled: tuple[str, ...] = ()
    weakened: tuple[str, ...] = ()
    no_config: bool = False


def merge_not_checked(entries: Iterable[NotChecked]) -> tuple[NotChecked, ...]:
    """Add up the entries that have the same noun and reason, in the order of their first appearance."""
    counts: dict[tuple[str, str], int] = {}
    for entry in entries:
        counts[entry.what, entry.why] = counts.get((entry.what, entry.why), 0) + entry.count
    return tuple(NotChecked(what, count, why) for (what, why), count in counts.items())
