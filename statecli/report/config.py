"""The report of `statecli config`: each key, what is in force, and where that comes from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statecli.report import Cell, Column, Group, Line, Page, Report, Table, documents

#: A key as it stands in the file, its value, and the file that says so, or `default`.
Setting = tuple[str, object, str]


def of_config(settings: Sequence[Setting], path: str | None) -> Report:
    """The configuration, for any output."""
    columns = (Column("key"), Column("value"), Column("from"))
    rows = tuple((key, written(value), source) for key, value, source in settings)
    plain = tuple((key, _cell(value), source) for key, value, source in settings)
    title = path or "no configuration: neither statecli.toml nor [tool.statecli] in a pyproject.toml, here or above"
    lines = tuple(Line(row, mood="" if row[2] != "default" else "dim") for row in rows)
    return Report(
        title=title,
        document=lambda: documents.of_config(settings, path),
        table=lambda: Table(columns, plain, told=False),
        page=lambda: Page("what is in force", columns, (Group("settings", f"{len(rows)} keys", lines),), ()),
    )


def _cell(value: object) -> Cell:
    """A text as it is, a number as one; what is neither as it would stand in the file."""
    plain = msgspec.to_builtins(value)
    is_cell = plain is None or (isinstance(plain, (str, int, float)) and not isinstance(plain, bool))
    return plain if is_cell else written(plain)


def written(value: object) -> str:
    """As it would stand in the file; `-` for what is not set."""
    if value is None:
        return "-"
    return msgspec.json.encode(value).decode()
