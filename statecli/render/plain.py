"""`-f plain`, and any table that goes to no terminal: one row a line, columns aligned, nothing cut off or folded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from statecli.core.escaping import escape_line, escape_name, escape_sentence
from statecli.core.finding import Finding
from statecli.core.units import format_fqn, format_number
from statecli.render._ansi import painted
from statecli.report import Cell, Column, Page, Report, Table, first

if TYPE_CHECKING:
    from statecli.render import Look, Sink

#: A cell longer than this does not widen its whole column.
MAX_PADDING = 100


def write(report: Report, sink: Sink, look: Look) -> None:
    def put(text: str, style: str = "") -> None:
        sink.text(painted(escape_line(text), style, look.color) + "\n")

    if report.listing is not None:
        for parts in report.listing():
            sink.text("\t".join(map(escape_line, parts)) + "\n")
        return
    if not look.quiet:
        page = (report.page if report.outline else report.foot or report.page)()
        table = _outline(page) if report.outline else (report.brief or report.table)()
        for number, row in enumerate(aligned(table) if table.rows else ()):
            put(row, "bold" if number == 0 else "")
        sink.text("\n" if table.rows else "")
        for total in page.totals:
            put(escape_sentence(total))
        for note in report.notes:
            put(f"note[{note.name}]: {escape_sentence(note.message)}", "dim")
        for fix in page.fixes:
            for code in fix.text.splitlines():
                put(f"fix: {fix.place}: {code}")
    for finding in first(report.reasons() if look.quiet else report.beside(), report.lines):
        target = f"{escape_name(finding.target)}: " if report.several else ""
        put(target + finding_line(finding), "bold red")
    if look.quiet and (weakening := report.weakening()):
        put(weakening)


#: What stands for a name that is empty, by column.
_NAMELESS = dict.fromkeys(("fqn", "renamed_from"), format_fqn(""))


def finding_line(finding: Finding) -> str:
    """`error[left-behind]: table: stays on cpu …`"""
    return f"{finding.severity.value}[{finding.rule}]: {escape_sentence(finding.message)}"


def _outline(page: Page) -> Table:
    """The page's rows as one table, each group under a row of its own; remarks in the last column, where there are."""
    rows: list[tuple[str, ...]] = []
    remarks = any(line.remark for group in page.groups for line in group.lines)
    columns = (*page.columns, Column("")) if remarks else page.columns
    empty = ("",) * (len(columns) - 2)
    for group in page.groups:
        rows.append((group.heading, group.summary, *empty))
        rows.extend(("  " + line.cells[0], *line.cells[1:], *((line.remark,) * remarks)) for line in group.lines)
    return Table(columns, tuple(rows))


def aligned(table: Table) -> Iterator[str]:
    """The header and each row, padded to the widest cell of its column; the last column is not padded."""
    columns = [n for n, column in enumerate(table.columns) if not column.detail]
    heads = [table.columns[n].name for n in columns]
    nameless = [(n, _NAMELESS.get(table.columns[n].name, "")) for n in columns]
    widths = list(map(len, heads))
    lines: list[str] = []
    for row in table.rows:
        written = _written(row, nameless)
        widths = list(map(max, widths, map(len, written)))
        lines.append("\t".join(written))  # a third of the memory that its cells take; `name` escapes tabs
    right = [table.columns[n].right for n in columns]
    form = "  ".join(f"{{:{'>' if right[c] else '<'}{min(MAX_PADDING, width)}}}" for c, width in enumerate(widths))
    yield form.format(*heads).rstrip()
    for line in lines:
        yield form.format(*line.split("\t")).rstrip()


def _written(row: tuple[Cell, ...], nameless: list[tuple[int, str]]) -> list[str]:
    # Half of all cells are empty, and millions are written.
    return [
        "-"
        if (cell := row[n]) is None
        else (escape_name(cell) if isinstance(cell, str) else format_number(cell)) or empty
        for n, empty in nameless
    ]
