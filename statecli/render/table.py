"""`-f table` on a terminal: grouped, folded, coloured, laid out for its width. Names are never cut to fit a column."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from statecli.render._escape import elided, name, visible
from statecli.report import Line, Report

if TYPE_CHECKING:
    from rich.console import Console

    from statecli.render import Look, Sink

INDENT = 2
GAP = 2
#: Of an absurdly narrow terminal, what a name gets at the least.
MIN_NAME = 16
MOODS = {"bad": "red", "warn": "yellow", "dim": "dim", "strong": "bold", "": ""}


def write(report: Report, sink: Sink, look: Look) -> None:
    page = _Page(report, look)
    if not look.quiet:
        page.head()
        page.groups()
        page.fixes()
        page.notes()
    page.findings()
    sink.text(page.text())


def _console(look: Look) -> Console:
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=100_000,
        force_terminal=look.color,
        no_color=not look.color,
        color_system="standard" if look.color else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


class _Page:
    """One report on one width."""

    def __init__(self, report: Report, look: Look) -> None:
        from rich.cells import cell_len

        self.report = report
        self.page = report.page()
        self.width = max(look.width, 20)
        self.console = _console(look)
        self.cell_len = cell_len
        self.shown = list(range(len(self.page.columns)))
        self.said: list[str] = []
        self.measure()
        while self.crowded() and self.hoist():
            self.measure()
        others = sum(self.widths[1:]) + GAP * len(self.widths[1:])
        self.widths[0] = max(MIN_NAME, min(self.widths[0], self.width - INDENT - others))

    def measure(self) -> None:
        rows = [line.cells for group in self.page.groups for line in group.lines]
        heads = tuple(column.name for column in self.page.columns)
        cell_len = self.cell_len
        self.widths = [max(cell_len(visible(row[c])) for row in [heads, *rows]) for c in self.shown]

    def crowded(self) -> bool:
        return INDENT + sum(self.widths) + GAP * (len(self.widths) - 1) > self.width

    def hoist(self) -> bool:
        """Say a value that all rows share once, above the table, rather than in a column."""
        lines = [line for group in self.page.groups for line in group.lines]
        for c in reversed(self.shown):
            column = self.page.columns[c]
            values = {line.cells[c] for line in lines}
            if column.shared and len(values) == 1:
                self.said.append(column.shared.format(values.pop()))
                self.shown.remove(c)
                return True
        return False

    def text(self) -> str:
        file = self.console.file
        assert isinstance(file, io.StringIO)  # noqa: S101  # made so by _console
        return file.getvalue()

    def put(self, *parts: tuple[str, str]) -> None:
        from rich.text import Text

        self.console.print(Text.assemble(*parts, overflow="ignore", no_wrap=True), soft_wrap=True)

    def wrapped(self, text: str, style: str, indent: str, first: str | None = None) -> None:
        lines = textwrap.wrap(
            visible(text),
            self.width,
            initial_indent=first if first is not None else indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        for line in lines:
            self.put((line, style))

    def head(self) -> None:
        self.put((name(self.report.title), "bold"))
        self.wrapped(", ".join([self.page.subtitle, *reversed(self.said)]), "dim", "")

    def groups(self) -> None:
        heads = self.cells(tuple(column.name for column in self.page.columns))
        for number, group in enumerate(self.page.groups):
            self.put(("", ""))
            self.put((visible(group.heading), "bold"), (f"  {visible(group.summary)}", ""))
            if number == 0:
                self.put((" " * INDENT + heads.rstrip(), "dim"))
            for line in group.lines:
                self.line(line)

    def cells(self, cells: tuple[str, ...]) -> str:
        shown = []
        for width, c in zip(self.widths, self.shown, strict=True):
            text, column = cells[c], self.page.columns[c]
            padding = " " * max(0, width - self.cell_len(text))
            shown.append(padding + text if column.right else text + padding)
        return (" " * GAP).join(shown)

    def line(self, line: Line) -> None:
        style = MOODS[line.mood]
        first, *rest = map(visible, line.cells)
        if self.cell_len(first) > self.widths[0]:
            self.put((" " * INDENT + elided(first, self.width - INDENT), style))
            first = ""
        row = " " * INDENT + self.cells((first, *rest))
        remark = visible(line.remark)
        if remark and self.cell_len(row) + GAP + self.cell_len(remark) <= self.width:
            self.put((row + " " * GAP, style), (remark, style or "dim"))
            return
        self.put((row.rstrip(), style))
        if remark:
            self.wrapped(remark, style or "dim", " " * (INDENT + 4), " " * (INDENT + 2) + "↳ ")

    def fixes(self) -> None:
        if not self.page.fixes:
            return
        self.put(("", ""))
        self.put(("fix", "bold"))
        for fix in self.page.fixes:
            self.put((" " * INDENT + visible(fix.place), "cyan"))
            for line in fix.text.splitlines():
                self.put((" " * (INDENT + 2) + visible(line), ""))

    def notes(self) -> None:
        if self.report.notes:
            self.put(("", ""))
        for note in self.report.notes:
            self.wrapped(note.message, "dim", " " * 6, "note: ")

    def findings(self) -> None:
        if self.page.findings:
            self.put(("", ""))
        for finding in self.page.findings:
            style = "bold red" if finding.severity.value == "error" else "yellow"
            self.wrapped(f"{finding.severity.value}[{finding.rule}]: {finding.message}", style, "    ", "")
