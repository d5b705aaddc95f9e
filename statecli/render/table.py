"""`-f table` on a terminal: grouped, folded, coloured, laid out for its width. Names are never cut to fit a column."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statecli.core.escaping import escape_line, escape_name, escape_sentence
from statecli.render._ansi import painted
from statecli.report import Line, Page, Report

if TYPE_CHECKING:
    from statecli.render import Look, Sink

INDENT = 2
GAP = 2
#: With less room than this beside the columns, names stand above them.
MIN_NAME = 12
MOODS = {"good": "green", "info": "cyan", "bad": "red", "warn": "yellow", "dim": "dim", "strong": "bold", "": ""}


def write(report: Report, sink: Sink, look: Look) -> None:
    page = _Page(report, look)
    if not look.quiet:
        page.head()
        page.groups()
        page.done()
        page.fixes()
        page.notes()
        page.verdict()
    page.findings()
    if look.quiet:
        page.weakening()
    sink.text(page.text())


class _Layout:
    """Which columns stand where: all beside the name, or below it in as many rows as the width needs."""

    def __init__(self, page: Page, width: int) -> None:
        from rich.cells import cell_len

        self.page = page
        self.width = width
        self.gap = GAP
        self.cell_len = cell_len
        self.lines = [line for group in page.groups for line in group.lines]
        self.columns = list(range(1, len(page.columns)))
        self.said: list[str] = []
        self.widths = [self._widest(c) for c in range(len(page.columns))]
        #: The values of the groups in order -> the columns of which they are said above the table.
        self.by_group: dict[tuple[str, ...], list[str]] = {}
        while self._room() < self.widths[0] and (self._hoist() or self._hoist_by_group()):
            pass
        needed = min(MIN_NAME, self.widths[0])
        if self._room() < needed:
            self.gap = 1  # closer columns are easier to read than rows that are broken in two
        beside = self._room() >= needed
        self.gap = self.gap if beside else GAP
        self.name = max(0, min(self.widths[0], self._room())) if beside else 0
        self.rows = [self.columns] if beside else self._split()

    def _widest(self, column: int) -> int:
        cells = (line.cells[column] for line in self.lines)
        return max(self.cell_len(escape_name(text)) for text in (self.page.columns[column].name, *cells))

    def _room(self) -> int:
        """What is left for the name when every column stands beside it."""
        return self.width - INDENT - sum(self.widths[c] + self.gap for c in self.columns)

    def _hoist(self) -> bool:
        """Say a value that all rows share once, above the table, rather than in a column."""
        for c in reversed(self.columns):
            values = {line.cells[c] for line in self.lines}
            shared = self.page.columns[c].shared
            if shared and len(values) == 1:
                self.said.append(shared.format(values.pop()))
                self.columns.remove(c)
                return True
        return False

    def _hoist_by_group(self) -> bool:
        """The same of a column in which every group has one value, and none that a reader looks for."""
        for c in reversed(self.columns):
            values = [{line.cells[c] for line in group.lines} for group in self.page.groups]
            column = self.page.columns[c]
            if all(len(own) == 1 and own <= column.calm for own in values):
                self.by_group.setdefault(tuple(own.pop() for own in values), []).insert(0, column.name)
                self.columns.remove(c)
                return True
        return False

    def said_by_group(self) -> Iterator[str]:
        """`saved, restored: ✓ parameters and buffers, – unregistered`"""
        for values, names in self.by_group.items():
            groups: dict[str, list[str]] = {}
            for value, group in zip(values, self.page.groups, strict=True):
                groups.setdefault(value, []).append(group.heading)
            yield f"{', '.join(names)}: {', '.join(f'{one} ' + ' and '.join(of) for one, of in groups.items())}"

    def _split(self) -> list[list[int]]:
        rows: list[list[int]] = [[]]
        for c in self.columns:
            taken = sum(self.widths[other] + self.gap for other in rows[-1])
            if rows[-1] and INDENT * 2 + taken + self.widths[c] > self.width:
                rows.append([])
            rows[-1].append(c)
        return rows

    def laid(self, cells: tuple[str, ...]) -> list[str]:
        """The lines of one row of the table. A name too long for its column has the first of them to itself."""
        first = cells[0]
        lines: list[str] = []
        if self.name == 0 or self.cell_len(first) > self.name:
            lines.extend(" " * INDENT + part for part in self._both(first, self.width - INDENT))
            first = ""
        if self.name:
            start = " " * INDENT + self._padded(first, self.name) + " " * self.gap
            row = (start + self._row(self.columns, cells)).rstrip()
            return [*lines, row] if row or not lines else lines
        below = [(" " * INDENT * 2 + self._row(row, cells)).rstrip() for row in self.rows]
        return [*lines, *(part for line in below if line for part in self.broken(line, self.width))]

    def _both(self, text: str, room: int) -> list[str]:
        """A name; two that are too long for one line each have their own, `R before` and `→ after`."""
        before, arrow, after = text.rpartition(" → ")
        if not arrow or self.cell_len(text) <= room:
            return self.hung(text, room)
        return [*self.hung(before, room), *self.hung("→ " + after, room)]

    def hung(self, text: str, room: int) -> list[str]:
        """`broken`, all lines but the first further in: none of them begins a row."""
        first = self.broken(text, room)[0]
        rest = text[len(first) :]
        return [first.rstrip(), *(" " * INDENT + part.rstrip() for part in self.broken(rest, room - INDENT) if rest)]

    def broken(self, text: str, room: int) -> list[str]:
        """What is wider than the terminal, in pieces: of words, else of the parts of a name, else of any."""
        pieces = []
        while len(text) > room:
            ends = (text.rfind(mark, room // 2, room) + 1 for mark in " .")
            end = next(filter(None, ends), room)
            pieces.append(text[:end])
            text = text[end:]
        return [*pieces, text]

    def _row(self, columns: list[int], cells: tuple[str, ...]) -> str:
        return (" " * self.gap).join(
            self._padded(cells[c], self.widths[c], right=self.page.columns[c].right) for c in columns
        )

    def _padded(self, text: str, width: int, *, right: bool = False) -> str:
        padding = " " * max(0, width - self.cell_len(text))
        return padding + text if right else text + padding


class _Page:
    """One report on one width."""

    def __init__(self, report: Report, look: Look) -> None:
        self.report = report
        self.page = report.page()
        self.width = max(look.width, 20)
        self.look = look
        self.color = look.color
        self.out = io.StringIO()
        self.layout = _Layout(self.page, self.width)

    def text(self) -> str:
        return self.out.getvalue()

    def put(self, *parts: tuple[str, str]) -> None:
        self.out.write("".join(painted(escape_line(text), style, self.color) for text, style in parts) + "\n")

    def wrapped(self, text: str, style: str, indent: str, first: str | None = None) -> None:
        lines = textwrap.wrap(
            escape_sentence(text),
            self.width,
            initial_indent=first if first is not None else indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        for line in lines:
            self.put((line, style))

    def head(self) -> None:
        for part in self.layout.broken(escape_name(self.report.title), self.width):
            self.put((part, "bold"))
        self.wrapped(", ".join([self.page.subtitle, *reversed(self.layout.said)]), "dim", "")
        for said in self.layout.said_by_group():
            self.wrapped(said, "dim", " " * INDENT, "")

    def groups(self) -> None:
        heads = tuple(column.name for column in self.page.columns)
        for number, group in enumerate(self.page.groups):
            self.put(("", ""))
            self.wrapped_heading(escape_name(group.heading), escape_sentence(group.summary))
            for line in self.layout.laid(heads) if number == 0 and len(heads) > 1 else ():
                self.put((line, "dim"))
            for row in group.lines:
                self.line(row)

    def done(self) -> None:
        group = self.page.done
        if group is None or not group.lines:
            return
        self.put(("", ""))
        self.wrapped_heading(escape_name(group.heading), escape_sentence(group.summary))
        widths = [self.layout.cell_len(escape_name(row.cells[0])) for row in group.lines]
        beside = INDENT + max([0, *(width for width in widths if width <= self.width // 2)]) + GAP
        for row, width in zip(group.lines, widths, strict=True):
            first = escape_name(row.cells[0])
            if INDENT + width + GAP <= beside:
                first = " " * INDENT + first + " " * (beside - INDENT - width)
                self.wrapped(row.remark, MOODS[row.mood], " " * beside, first)
                continue
            for part in self.layout.hung(first, self.width - INDENT):
                self.put((" " * INDENT + part, MOODS[row.mood]))
            self.wrapped(row.remark, MOODS[row.mood], " " * max(beside, INDENT * 2))

    def wrapped_heading(self, heading: str, summary: str) -> None:
        if self.layout.cell_len(heading) + GAP + self.layout.cell_len(summary) <= self.width:
            self.put((heading, "bold"), (" " * GAP + summary, ""))
            return
        for part in self.layout.broken(heading, self.width):
            self.put((part, "bold"))
        self.wrapped(summary, "", " " * INDENT)

    def line(self, line: Line) -> None:
        style = MOODS[line.mood]
        *above, last = self.layout.laid(tuple(map(escape_name, line.cells)))
        remark = escape_sentence(line.remark)
        for text in above:
            self.put((text, style))
        beside = self.remark_column(line) if self.layout.name else 0
        gap = " " * (beside - self.layout.cell_len(last))
        if remark and len(gap) >= GAP and beside + self.layout.cell_len(remark) <= self.width:
            self.put((last + gap, style), (remark, style or "dim"))
            return
        self.put((last, style))
        if remark:
            self.wrapped(remark, style or "dim", " " * (INDENT + 4), " " * (INDENT + 2) + "↳ ")

    def remark_column(self, line: Line) -> int:
        """Behind the columns; in their place where a row has nothing in them."""
        used = any(line.cells[c] for c in self.layout.columns)
        widths = [self.layout.widths[c] for c in self.layout.columns] if used else []
        return INDENT + self.layout.name + sum(width + self.layout.gap for width in widths) + GAP

    def fixes(self) -> None:
        if not self.page.fixes:
            return
        self.put(("", ""))
        self.put(("fix", "bold"))
        for fix in self.page.fixes:
            self.put((" " * INDENT + fix.place, "cyan"))
            for line in fix.text.splitlines():
                self.put((" " * (INDENT + 2) + line, ""))

    def notes(self) -> None:
        if self.report.notes:
            self.put(("", ""))
        for note in self.report.notes:
            self.wrapped(note.message, "dim", " " * 6, "note: ")

    def verdict(self) -> None:
        if self.page.verdict:
            self.put(("", ""))
            self.wrapped(self.page.verdict, "bold", "")

    def weakening(self) -> None:
        if text := self.report.weakening():
            self.wrapped(text, "bold", "")

    def findings(self) -> None:
        findings = self.page.told(quiet=self.look.quiet)
        if findings and not self.look.quiet:
            self.put(("", ""))
        for finding in findings:
            style = "bold red" if finding.severity.value == "error" else "yellow"
            self.wrapped(f"{finding.severity.value}[{finding.rule}]: {finding.message}", style, "    ", "")
