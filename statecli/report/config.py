"""The report of `statecli config`: each key, its value, and its source."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statecli.commands.audit.config import Setting
from statecli.report import Cell, Group, Line, Page, Report, ReportColumn, Table
from statecli.report.documents.config import build_config_document


def build_config_report(settings: Sequence[Setting], path: str | None) -> Report:
    """Return the report of the configuration."""
    columns = (ReportColumn("key"), ReportColumn("value"), ReportColumn("from"))
    plain_rows = tuple((setting.key, _make_cell(setting.value), setting.source) for setting in settings)
    title = (
        path or "no configuration: no statecli.toml and no [tool.statecli] in a pyproject.toml, in this folder or above"
    )
    lines = tuple(
        Line(
            (setting.key, format_value(setting.value), setting.source),
            mood="" if setting.source != "default" else "dim",
        )
        for setting in settings
    )
    return Report(
        title=title,
        document=lambda: build_config_document(settings, path),
        table=lambda: Table(columns, plain_rows, has_findings=False),
        page=lambda: Page("configuration", columns, (Group("settings", f"{len(lines)} keys", lines),), ()),
    )


def _make_cell(value: object) -> Cell:
    """Return a text or a number as a cell. Return any other value as it is written in the file."""
    builtin = msgspec.to_builtins(value)
    is_cell = builtin is None or (isinstance(builtin, (str, int, float)) and not isinstance(builtin, bool))
    return builtin if is_cell else format_value(builtin)


def format_value(value: object) -> str:
    """Format a value as in the configuration file, or as `-` for None."""
    if value is None:
        return "-"
    return msgspec.json.encode(value).decode()
