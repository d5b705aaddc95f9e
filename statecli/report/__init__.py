"""The second waist: what a command has to say, ready for any output.

A `Report` carries the same content at the three grains that outputs need: a `document` (typed, for JSON), a flat
`table` (one row a tensor, for plain, CSV, Markdown) and `groups` of rows for people. `failed()` is the only source of
exit 1. One module a command makes its report: `inspecting.py`.
"""

from __future__ import annotations

import msgspec

from statecli.finding import Finding
from statecli.state import Oddity


class Column(msgspec.Struct, frozen=True):
    """`name` heads the column; `right` aligns numbers; a column may be the one that people's tables elide last."""

    name: str
    right: bool = False


class Table(msgspec.Struct, frozen=True):
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


class Line(msgspec.Struct, frozen=True):
    """One row for people: its cells, what else there is to say of it, and how it is meant ("", "bad", "dim")."""

    cells: tuple[str, ...]
    remark: str = ""
    mood: str = ""


class Group(msgspec.Struct, frozen=True):
    heading: str
    summary: str
    lines: tuple[Line, ...]


class Fix(msgspec.Struct, frozen=True):
    """Lines to paste, and where: `place` is `net.py:9`."""

    place: str
    text: str


class Report(msgspec.Struct, frozen=True):
    title: str
    subtitle: str
    document: msgspec.Struct
    table: Table
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    totals: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
    fixes: tuple[Fix, ...] = ()
    #: What is hidden from people's tables, and how to see it.
    hint: str | None = None

    def failed(self) -> bool:
        """Whether the command ends 1."""
        return bool(self.findings)


class View(msgspec.Struct, frozen=True):
    """How people want to see it: `unfold` repeated layers, as a `tree` of modules, `verbose`."""

    unfold: bool = False
    tree: bool = False
    verbose: bool = False
    quiet: bool = False
