"""`-f plain`, the default outside of a terminal: a line for each row. Nothing is cut off, and layers are not joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import cast

from msgspec import UNSET
from msgspec.structs import replace

from statecli.core.escaping import are_safe_names, escape_line, escape_lines, escape_name, escape_sentence
from statecli.core.finding import Finding
from statecli.core.units import format_fqn, format_number, format_origin
from statecli.render import RenderOptions, Sink
from statecli.render._ansi import get_patch_style, paint
from statecli.report import Cell, Page, Problem, Report, ReportColumn, Table, build_problem, limit_findings
from statecli.report.problems import format_result

#: Largest width of a padded column; longer cells exceed the column.
MAX_PADDING = 100


def write(report: Report, sink: Sink, options: RenderOptions) -> None:
    def write_line(text: str, style: str = "") -> None:
        sink.text(paint(escape_line(text), style, options.color) + "\n")

    if report.listing is not None:
        for parts in report.listing():
            sink.text("\t".join(map(escape_line, parts)) + "\n")
        return
    page, result = None, ""
    if not options.quiet:
        for line in report.patch:
            sink.text(paint(_escape_patch_line(line), get_patch_style(line), options.color) + "\n")
        sink.text("\n" if report.patch else "")
        page = (report.page if report.outline else report.page_without_rows or report.page)()
        table = _build_outline_table(page) if report.outline else (report.short_table or report.table)()
        rows = align_rows(table) if table.rows else iter(())
        for heads in next(rows, ()):
            write_line(heads, "bold")
        for lines in rows:
            sink.text(escape_lines(lines))
        sink.text("\n" if table.rows else "")
        if page.verdict and options.exit_status is not None:
            result = format_result(report, page, options.exit_status)
        for total in page.totals:
            if total != page.verdict or not result.startswith(total):  # otherwise the last line repeats the verdict
                write_line(escape_sentence(total))
        for note in report.notes:
            write_line(f"note[{note.name}]: {escape_sentence(note.message)}", "dim")
    problems = list(_list_problems(report, page, quiet=options.quiet))
    for problem in problems:
        target = f"{escape_name(problem.target)}: " if report.has_several_targets else ""
        if target:  # with -q the message names the target too
            problem = replace(problem, message=problem.message.removeprefix(f"{problem.target}: "))
        location = f" [{format_origin(problem.origin)}]" if problem.origin is not UNSET else ""
        write_line(target + format_problem(problem) + location, "bold red")
        for effect in () if options.quiet else problem.effects:
            write_line(f"  {escape_sentence(effect)}")
        label = f"{problem.label_help()}: "
        for n, code in enumerate(() if options.quiet else (problem.help or "").splitlines()):
            write_line(f"  {' ' * len(label) if n else label}{code}")
    if options.quiet and (scope := report.describe_scope()):
        write_line(scope)
    if result:
        write_line(escape_sentence(result))


def _escape_patch_line(line: str) -> str:
    """Return the line for `git apply`, which needs the tabs and the carriage return of a Windows line end."""
    end = "\r" * line.endswith("\r")
    return "\t".join(map(escape_line, line.removesuffix("\r").split("\t"))) + end


def _list_problems(report: Report, page: Page | None, *, quiet: bool) -> Iterator[Problem]:
    """Yield the problems that the rows do not show. If the command does not group findings, each finding is a problem.

    `page` is the page if it is built already, else None.
    """
    if report.problems is None:
        findings = report.describe_failing_findings() if quiet else report.describe_findings_without_row()
        yield from map(build_problem, limit_findings(findings, report.max_findings))
        return
    for problem in report.select_problems(page or (report.page_without_rows or report.page)(), quiet=quiet):
        if quiet or not all(finding.rule in report.rules_in_rows for finding in problem.findings):
            yield problem


#: Text of an empty name in each column of names.
_EMPTY_NAMES = dict.fromkeys(("fqn", "renamed_from"), format_fqn(""))


def format_problem(problem: Problem | Finding) -> str:
    """Format the first line of a problem: `error[unregistered-module]: blocks: 3 modules are kept in a list …`."""
    return f"{problem.severity.value}[{problem.rule}]: {escape_sentence(problem.message)}"


def _build_outline_table(page: Page) -> Table:
    """Return the page's rows as a single table. A heading row begins each group; remarks are the last column."""
    rows: list[tuple[str, ...]] = []
    remarks = any(line.remark for group in page.groups for line in group.lines)
    columns = (*page.columns, ReportColumn("")) if remarks else page.columns
    empty = ("",) * (len(columns) - 2)
    for group in page.groups:
        rows.append((group.heading, group.summary, *empty))
        rows.extend(("  " + line.cells[0], *line.cells[1:], *((line.remark,) * remarks)) for line in group.lines)
    return Table(columns, tuple(rows))


#: Number of rows that are aligned and written at once.
_ROWS_AT_ONCE = 4096


def align_rows(table: Table) -> Iterator[list[str]]:
    """Yield a list with the header, then lists of rows. Cells are padded to the widest cell of their column."""
    columns = [n for n, column in enumerate(table.columns) if not column.detail]
    heads = [table.columns[n].name for n in columns]
    widths = list(map(len, heads))
    batches: list[tuple[int, list[str]]] = []
    for cells in table.iter_batches(_ROWS_AT_ONCE):
        texts = [_format_column(cells[n], _EMPTY_NAMES.get(table.columns[n].name, "")) for n in columns]
        widths = [max(width, max(map(len, column))) for width, column in zip(widths, texts, strict=True)]
        batches.append((len(cells[0]), list(map(_pack_column, texts))))
    pads = [str.rjust if table.columns[n].right else str.ljust for n in columns]
    widths = [min(MAX_PADDING, width) for width in widths]
    yield ["  ".join(pad(head, width) for pad, head, width in zip(pads, heads, widths, strict=True)).rstrip()]
    for count, packed in batches:
        padded_columns = [
            map(pad, column.split("\t"), repeat(width)) if "\t" in column else repeat(pad(column, width), count)
            for pad, column, width in zip(pads, packed, widths, strict=True)
        ]
        yield list(map(str.rstrip, map("  ".join, zip(*padded_columns, strict=False))))


def _format_column(cells: Sequence[Cell], empty_text: str) -> Sequence[str]:
    """Return the texts of a column's cells. There may be millions of cells, most of them equal or empty."""
    types = set(map(type, cells))
    if types <= {str} or types <= {int} or types <= {type(None)}:  # 0.0 equals -0.0
        if cells.count(cells[0]) == len(cells):
            return [_format_cell(cells[0], empty_text)] * len(cells)
        if types == {int}:
            return list(map(str, cells))
    texts = cast("Sequence[str]", cells)
    if types == {str} and all(texts) and are_safe_names(texts):
        return texts
    return [_format_cell(cell, empty_text) for cell in cells]


def _format_cell(cell: Cell, empty_text: str) -> str:
    if cell is None:
        return "-"
    return (escape_name(cell) if isinstance(cell, str) else format_number(cell)) or empty_text


def _pack_column(texts: Sequence[str]) -> str:
    """Join the texts of some rows with tabs, or return one text if all are equal. This saves two thirds of memory."""
    # No text contains a tab, so the joined texts can be split.
    return texts[0] if texts.count(texts[0]) == len(texts) else "\t".join(texts)
