"""`-f csv`: the flat table for spreadsheets and data frames; what was found stands in the row it is about."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from statecli.render._escape import visible
from statecli.report import Report

if TYPE_CHECKING:
    from statecli.render import Look, Sink


class _Lines:
    """A file for `csv.writer` that hands each line on."""

    def __init__(self, sink: Sink) -> None:
        self.write = sink.text


def write(report: Report, sink: Sink, look: Look) -> None:  # noqa: ARG001  # every output has the same signature
    table = report.table()
    out = csv.writer(_Lines(sink), lineterminator="\n")
    names = [column.name for column in table.columns]
    at = names.index("fqn")
    out.writerow([*names, "finding"])
    section = names.index("section") if "section" in names else None
    by_fqn: dict[tuple[str | None, str | None], list[str]] = {}
    for finding in report.beside():
        where = finding.section if section is not None else None
        by_fqn.setdefault((where, finding.fqn), []).append(f"{finding.rule}: {finding.message}")
    for row in table.rows:
        where = row[section] if section is not None else None
        said = by_fqn.pop((where, row[at]), []) + by_fqn.pop((None, row[at]), [])
        out.writerow([*map(visible, row), visible("; ".join(said))])
    for (_, fqn), said in by_fqn.items():
        rest = [visible(fqn or "") if n == at else "" for n in range(len(names))]
        out.writerow([*rest, visible("; ".join(said))])
