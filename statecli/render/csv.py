"""`-f csv`: the flat table for spreadsheets and data frames; a finding is in the row of its tensor.

Numbers have every digit; an unknown value is an empty cell. A text that a spreadsheet would take for a formula
(beginning with `=`, `+`, `-` or `@`, but not a number) gets a leading `'`, as OWASP's "CSV injection" advises. So does
a text that begins with `::`, a command for a workflow's runner. Tabs and line breaks are escaped in every output,
because a text after them could be such a formula or command.
"""

from __future__ import annotations

import csv
import re

from statecli.core.escaping import escape
from statecli.core.lazy_pattern import compile_on_use
from statecli.render import RenderOptions, Sink
from statecli.report import Cell, Report, build_scope_notes

_NUMBER = compile_on_use(r"[-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", re.ASCII)


class _LineWriter:
    """A file for `csv.writer` that passes each line to the sink."""

    def __init__(self, sink: Sink) -> None:
        self.write = sink.text


def write(report: Report, sink: Sink, options: RenderOptions) -> None:  # noqa: ARG001  # every output has the same signature
    table = report.table()
    writer = csv.writer(_LineWriter(sink), lineterminator="\n")
    names = [column.name for column in table.columns]
    fqn_column = names.index("fqn") if "fqn" in names else 0
    if not table.has_findings:
        writer.writerow(names)
        writer.writerows(map(_format_cell, row) for row in table.rows)
        for finding in build_scope_notes(report):
            cells = {"severity": finding.severity.value, "rule": finding.rule, "message": finding.message}
            writer.writerow(_format_cell(cells.get(name)) for name in names)
        return
    writer.writerow([*names, "finding"])
    section_column = names.index("section") if "section" in names else None
    by_fqn: dict[tuple[Cell, Cell], list[str]] = {}
    for finding in report.describe_findings_without_row():
        finding_section = (finding.section or None) if section_column is not None else None
        by_fqn.setdefault((finding_section, finding.fqn), []).append(f"{finding.rule}: {finding.message}")
    for row in table.rows:
        row_section = row[section_column] if section_column is not None else None
        texts = by_fqn.pop((row_section, row[fqn_column]), []) + by_fqn.pop((None, row[fqn_column]), [])
        writer.writerow(map(_format_cell, (*row, "; ".join(texts))))
    for (_, fqn), texts in by_fqn.items():
        finding_row = [fqn if n == fqn_column else None for n in range(len(names))]
        writer.writerow(map(_format_cell, (*finding_row, "; ".join(texts))))


def _format_cell(cell: Cell) -> str:
    if not isinstance(cell, str):
        return "" if cell is None else repr(cell)
    escaped_text = escape(cell)
    is_live = escaped_text.startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(escaped_text)
    return f"'{escaped_text}" if is_live or escaped_text.lstrip().startswith("::") else escaped_text
