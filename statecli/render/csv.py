"""`-f csv`: the flat table for spreadsheets and data frames; what was found stands in the row it is about.

Numbers have every digit, what is not known is an empty cell. A text that a spreadsheet would take for a formula (it
begins with `=`, `+`, `-` or `@`, and is no number) stands behind a `'`, as OWASP's "CSV injection" has it, and so does
one that begins with `::`, a command to a workflow's runner; tabs and line breaks, which would do the same, are written
as escapes in every output.
"""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

from statecli.core.escaping import escape
from statecli.report import Cell, Report, scope_notes

if TYPE_CHECKING:
    from statecli.render import Look, Sink

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", re.ASCII)


class _Lines:
    """A file for `csv.writer` that hands each line on."""

    def __init__(self, sink: Sink) -> None:
        self.write = sink.text


def write(report: Report, sink: Sink, look: Look) -> None:  # noqa: ARG001  # every output has the same signature
    table = report.table()
    out = csv.writer(_Lines(sink), lineterminator="\n")
    names = [column.name for column in table.columns]
    at = names.index("fqn") if "fqn" in names else 0
    if not table.told:
        out.writerow(names)
        out.writerows(map(_written, row) for row in table.rows)
        for finding in scope_notes(report):
            cells = {"severity": finding.severity.value, "rule": finding.rule, "message": finding.message}
            out.writerow(_written(cells.get(name)) for name in names)
        return
    out.writerow([*names, "finding"])
    section = names.index("section") if "section" in names else None
    by_fqn: dict[tuple[Cell, Cell], list[str]] = {}
    for finding in report.beside():
        about = (finding.section or None) if section is not None else None
        by_fqn.setdefault((about, finding.fqn), []).append(f"{finding.rule}: {finding.message}")
    for row in table.rows:
        where = row[section] if section is not None else None
        found = by_fqn.pop((where, row[at]), []) + by_fqn.pop((None, row[at]), [])
        out.writerow(map(_written, (*row, "; ".join(found))))
    for (_, fqn), found in by_fqn.items():
        rest = [fqn if n == at else None for n in range(len(names))]
        out.writerow(map(_written, (*rest, "; ".join(found))))


def _written(cell: Cell) -> str:
    if not isinstance(cell, str):
        return "" if cell is None else repr(cell)
    shown = escape(cell)
    is_live = shown.startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(shown)
    return f"'{shown}" if is_live or shown.lstrip().startswith("::") else shown
