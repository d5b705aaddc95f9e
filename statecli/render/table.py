"""`-f table`, the default on a terminal: rows in groups, in colours, fitted to the width. Repeated layers share a row.

Names are never cut to fit a column.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache

from msgspec import UNSET

from statecli.core.escaping import escape_line, escape_name, escape_sentence
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.core.units import format_origin
from statecli.render import RenderOptions, Sink
from statecli.render._ansi import get_patch_style, paint
from statecli.report import Line, Page, Problem, Report, count_shown_effects, is_code
from statecli.report.problems import format_result

INDENT = 2
GAP = 2
#: Smallest width of the column of names. If less room is left, names are above the other columns.
MIN_NAME_WIDTH = 12
_NO_BREAK_SPACE = "\xa0"
#: Character before each wide character of a text that is being wrapped, so that its length is its width in columns.
#: `escape` replaces this noncharacter in names and messages.
_FILLER = "\ufdd0"
STYLES = {"good": "green", "info": "cyan", "bad": "red", "warn": "yellow", "dim": "dim", "strong": "bold", "": ""}


def write(report: Report, sink: Sink, options: RenderOptions) -> None:
    page = _PageWriter(report, options)
    if not options.quiet:
        page.write_head()
        page.write_patch()
        page.write_groups()
        page.write_outcomes()
        page.write_notes()
    page.write_problems()
    if not options.quiet:
        page.write_result()
    else:
        page.write_scope()
    sink.text(page.out.getvalue())


def _has_cells_or_remark(line: Line) -> bool:
    """Return False for a line such as `… and 4 more`, whose width does not count because it is not a row."""
    return len(line.cells) == 1 or any(line.cells[1:]) or bool(line.remark)


@lru_cache(maxsize=1024)
def _escape_cells(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_escape_cell, cells))


def _escape_cell(text: str) -> str:
    """Return the escaped cell. `escape_line` escapes commands of CI runners here, so that columns have their width."""
    return escape_line(escape_name(text))


class _Layout:
    """Layout of the page's columns: next to the name if they fit, or else below the name in several lines."""

    def __init__(self, page: Page, width: int) -> None:
        from rich.cells import cell_len

        self.page = page
        self.width = width
        self.gap = GAP
        self.cell_len = cell_len
        self.group_lines = [list(filter(_has_cells_or_remark, group.lines)) for group in page.groups]
        self.lines = [line for lines in self.group_lines for line in lines]
        self.columns = list(range(1, len(page.columns)))
        self.shared_texts: list[str] = []
        self.widths = [self._measure_column(c) for c in range(len(page.columns))]
        #: Values shared by all rows of a group, which are shown in the heading of the group.
        self.group_texts: list[list[str]] = [[] for _ in page.groups]
        while self._measure_name_width() < self.widths[0] and (
            self._hoist_shared_column() or self._hoist_column_of_each_group()
        ):
            pass
        self._drop_optional_columns()
        needed_width = min(MIN_NAME_WIDTH, self.widths[0])
        if self._measure_name_width() < needed_width:
            self.gap = 1  # narrow gaps are easier to read than rows of two lines
        has_room = self._measure_name_width() >= needed_width
        self.gap = self.gap if has_room else GAP
        self.name_width = max(0, min(self.widths[0], self._measure_name_width())) if has_room else 0
        self.rows = [self.columns] if has_room else self._split_columns()
        #: Formats the cells after the name. Cached, because neighbouring rows often have equal cells.
        self._format_tail = lru_cache(maxsize=1024)(lambda cells: self._format_cells(self.columns, ("", *cells)))

    def _measure_column(self, column: int) -> int:
        heads = {group.heads[column] for group in self.page.groups if group.heads}
        texts = {self.page.columns[column].name, *heads, *(line.cells[column] for line in self.lines)}
        return max(self.cell_len(_escape_cell(text)) for text in texts)

    def _measure_name_width(self) -> int:
        """Return the width left for the name if all columns are next to the name."""
        return self.width - INDENT - sum(self.widths[c] + self.gap for c in self.columns)

    def _hoist_shared_column(self) -> bool:
        """Replace a column with the same value in all rows by a text on top. Return False if no column qualifies."""
        for c in reversed(self.columns):
            values = {line.cells[c] for line in self.lines}
            shared_format = self.page.columns[c].shared_format
            if shared_format and len(values) == 1:
                self.shared_texts.append(shared_format.format(values.pop()))
                self.columns.remove(c)
                return True
        return False

    def _hoist_column_of_each_group(self) -> bool:
        """Replace a column with one value per group by texts in the headings. Return False if no column qualifies."""
        for c in reversed(self.columns):
            values = [{line.cells[c] for line in lines} for lines in self.group_lines]
            shared_format = self.page.columns[c].shared_format
            if shared_format and all(len(group_values) == 1 for group_values in values):
                for texts, group_values in zip(self.group_texts, values, strict=True):
                    texts.insert(0, shared_format.format(group_values.pop()))
                self.columns.remove(c)
                return True
        return False

    def _drop_optional_columns(self) -> None:
        """Leave out optional columns if each name then fits next to the other columns."""
        optional = [c for c in self.columns if self.page.columns[c].optional]
        freed_cells = sum(self.widths[c] + self.gap for c in optional)
        if self._measure_name_width() < self.widths[0] <= self._measure_name_width() + freed_cells:
            self.columns = [c for c in self.columns if c not in optional]

    def format_shared_texts(self) -> Iterator[str]:
        """Yield the texts that replace columns: `moves, copied: all ✓`. Lines do not break at the spaces of a value."""
        names_by_value: dict[str, list[str]] = {}
        for text in reversed(self.shared_texts):
            name, separator, value = text.rpartition(": ")
            names_by_value.setdefault(separator + value, []).append(name)
        for value, names in names_by_value.items():
            yield ", ".join(names) + value.replace(" ", _NO_BREAK_SPACE)

    def _split_columns(self) -> list[list[int]]:
        rows: list[list[int]] = [[]]
        for c in self.columns:
            used_width = sum(self.widths[column] + self.gap for column in rows[-1])
            if rows[-1] and INDENT * 2 + used_width + self.widths[c] > self.width:
                rows.append([])
            rows[-1].append(c)
        return rows

    def format_heads(self, heads: tuple[str, ...]) -> list[str]:
        """Return the lines with the column headings of a group or of the table, or [] for a table of names only."""
        names = heads or tuple(column.name for column in self.page.columns)
        return self.format_row(names) if len(names) > 1 else []

    def format_row(self, cells: tuple[str, ...]) -> list[str]:
        """Return the lines of a row of the table. A name too long for its column has its own first line."""
        name = cells[0]
        lines: list[str] = []
        if self.name_width == 0 or self.cell_len(name) > self.name_width:
            lines.extend(" " * INDENT + part for part in self._format_name(name, self.width - INDENT))
            name = ""
        if self.name_width:
            start = " " * INDENT + self._pad(name, self.name_width) + " " * self.gap
            row = (start + self._format_tail(cells[1:])).rstrip()
            return [*lines, row] if row or not lines else lines
        extra_rows = [(" " * INDENT * 2 + self._format_cells(row, cells)).rstrip() for row in self.rows]
        return [*lines, *(part for line in extra_rows if line for part in self.split_text(line, self.width))]

    def _format_name(self, text: str, width: int) -> list[str]:
        """Return the lines of a name. A long rename takes a line for `R before` and a line for `→ after`."""
        before, arrow, after = text.rpartition(" → ")
        if not arrow or self.cell_len(text) <= width:
            return self.wrap_hanging(text, width)
        return [*self.wrap_hanging(before, width), *self.wrap_hanging("→ " + after, width)]

    def wrap_hanging(self, text: str, width: int) -> list[str]:
        """Return the lines of a text. Lines after the first are indented, because they do not begin a row."""
        first = self.split_text(text, width)[0]
        remaining_text = text[len(first) :]
        return [
            first.rstrip(),
            *(
                " " * INDENT + part.rstrip()
                for part in self.split_text(remaining_text, width - INDENT)
                if remaining_text
            ),
        ]

    def split_text(self, text: str, width: int) -> list[str]:
        """Split a text at `width`: after a space, or else after a dot in a name, or else anywhere."""
        pieces = []
        text = self.fill_wide(text)
        while len(text) > width:
            ends = (text.rfind(mark, width // 2, width) + 1 for mark in " .")
            end = next(filter(None, ends), width)
            end -= end > 1 and text[end - 1] == _FILLER
            pieces.append(text[:end])
            text = text[end:]
        return [piece.replace(_FILLER, "") for piece in (*pieces, text)]

    def wrap(
        self, text: str, width: int, *, first_indent: str = "", indent: str = "", break_on_hyphens: bool = False
    ) -> list[str]:
        """Return the lines of a text, wrapped at spaces to `width` columns."""
        filled_text = self.fill_wide(text)
        lines = textwrap.wrap(
            filled_text,
            width - (_FILLER in filled_text),  # a line may end between a filler and its character
            initial_indent=self.fill_wide(first_indent),
            subsequent_indent=indent,
            break_on_hyphens=break_on_hyphens,
        )
        return [line.replace(_FILLER, "").replace(_NO_BREAK_SPACE, " ") for line in lines]

    def fill_wide(self, text: str) -> str:
        """Return the text with `_FILLER` before each character that takes two columns."""
        if text.isascii():
            return text
        return "".join(_FILLER + char if self.cell_len(char) > 1 else char for char in text)

    def _format_cells(self, columns: list[int], cells: tuple[str, ...]) -> str:
        return (" " * self.gap).join(
            self._pad(cells[c], self.widths[c], right=self.page.columns[c].right) for c in columns
        )

    def _pad(self, text: str, width: int, *, right: bool = False) -> str:
        padding = " " * max(0, width - self.cell_len(text))
        return padding + text if right else text + padding


class _PageWriter:
    """Write a report for a given width."""

    def __init__(self, report: Report, options: RenderOptions) -> None:
        self.report = report
        self.page = report.page()
        self.width = max(options.width, 20)
        self.options = options
        self.color = options.color
        self.out = io.StringIO()
        self.layout = _Layout(self.page, self.width)

    def write_line(self, *parts: tuple[str, str]) -> None:
        self.out.write("".join(paint(escape_line(text), style, self.color) for text, style in parts) + "\n")

    def write_wrapped(
        self, text: str, style: str, indent: str, first_indent: str | None = None, *, only_signs: bool = False
    ) -> None:
        """Write a text, wrapped to the width. With `only_signs`, colour only the signs of the first line."""
        first_indent = indent if first_indent is None else first_indent
        lines = self.layout.wrap(escape_sentence(text), self.width, first_indent=first_indent, indent=indent)
        for n, line in enumerate(lines):
            if only_signs and style != "dim":
                self.write_line(*(_color_signs(line, style) if n == 0 else ((line, ""),)))
            else:
                self.write_line((line, style))

    def write_head(self) -> None:
        for part in self.layout.split_text(escape_name(self.report.title), self.width):
            self.write_line((part, "bold"))
        if self.page.verdict:
            self.write_wrapped(self.page.verdict, "bold", "")
        for sentence in self.page.unusual:
            self.write_wrapped(sentence.text, "bold", "")
        shared_texts = (("; " if ":" in text else ", ") + text for text in self.layout.format_shared_texts())
        if self.page.subtitle:
            self.write_wrapped("".join([self.page.subtitle, *shared_texts]), "dim", "")

    def write_groups(self) -> None:
        first = next((number for number, group in enumerate(self.page.groups) if group.lines), None)
        for number, group in enumerate(self.page.groups):
            self.write_line(("", ""))
            summary = "; ".join(filter(None, [group.summary, ", ".join(self.layout.group_texts[number])]))
            self.write_heading(escape_name(group.heading), escape_sentence(summary))
            for line in self.layout.format_heads(group.heads) if number == first or group.heads else ():
                self.write_line((line, "dim"))
            self.write_problem_blocks(group.problems)
            column = self.measure_remark_column_of_names(group.lines)
            for row in group.lines:
                self.write_row(row, column)

    def write_patch(self) -> None:
        """Write the lines of a unified diff without wrapping, because a wrapped line would be a different diff."""
        if self.report.patch:
            self.write_line(("", ""))
        for line in self.report.patch:
            self.write_line((line.removesuffix("\r").expandtabs(), get_patch_style(line)))

    def write_outcomes(self) -> None:
        group = self.page.outcomes
        if group is None or not group.lines:
            return
        self.write_line(("", ""))
        self.write_heading(escape_name(group.heading), escape_sentence(group.summary))
        widths = [self.layout.cell_len(escape_name(row.cells[0])) for row in group.lines]
        remark_column = INDENT + max([0, *(width for width in widths if width <= self.width // 2)]) + GAP
        for row, width in zip(group.lines, widths, strict=True):
            name = escape_name(row.cells[0])
            if INDENT + width + GAP <= remark_column:
                name = " " * INDENT + name + " " * (remark_column - INDENT - width)
                self.write_wrapped(row.remark, STYLES[row.mood], " " * remark_column, name, only_signs=True)
                continue
            for part in self.layout.wrap_hanging(name, self.width - INDENT):
                self.write_line(*_color_signs(" " * INDENT + part, STYLES[row.mood]))
            style = STYLES[row.mood] if row.mood == "dim" else ""
            self.write_wrapped(row.remark, style, " " * max(remark_column, INDENT * 2))

    def write_heading(self, heading: str, summary: str) -> None:
        if self.layout.cell_len(heading) + GAP + self.layout.cell_len(summary) <= self.width:
            self.write_line((heading, "bold"), (" " * GAP + summary, ""))
            return
        for part in self.layout.split_text(heading, self.width):
            self.write_line((part, "bold"))
        self.write_wrapped(summary, "", " " * INDENT)

    def write_row(self, line: Line, names_end: int) -> None:
        """Write a row. Only its signs are coloured, or its name if the row has no sign.

        `names_end` is the column of remarks in rows without other cells.
        """
        style = STYLES[line.mood]
        cells = (_escape_cell(line.cells[0]), *_escape_cells(line.cells[1:]))
        *upper_lines, last_line = self.layout.format_row(cells)
        for text in upper_lines:
            self.write_line(*_color_signs(text, style))
        if not line.remark:
            self.write_line(*_color_signs(last_line, style))
            return
        remark = escape_sentence(line.remark)
        remark_column = self.measure_remark_column(line) if self.layout.name_width else 0
        length = self.layout.cell_len(last_line)
        if not any(line.cells[1:]):
            remark_column = max(remark_column, names_end, length + GAP)
            if remark_column + self.layout.cell_len(remark) > self.width:
                remark_column = length + GAP
        gap = " " * (remark_column - length)
        if len(gap) >= GAP and remark_column + self.layout.cell_len(remark) <= self.width:
            self.write_line(*_color_signs(last_line + gap, style), (remark, "dim"))
            return
        self.write_line(*_color_signs(last_line, style))
        self.write_wrapped(remark, "dim", " " * (INDENT + 4), " " * (INDENT + 2) + "↳ ")

    def measure_remark_column_of_names(self, lines: Sequence[Line]) -> int:
        """Return the column for remarks of rows with only a name: after the longest name that leaves room."""
        ends = [0]
        for line in lines:
            if line.remark and not any(line.cells[1:]):
                end = INDENT + self.layout.cell_len(escape_name(line.cells[0])) + GAP
                ends.append(end if end + self.layout.cell_len(escape_sentence(line.remark)) <= self.width else 0)
        return max(ends)

    def measure_remark_column(self, line: Line) -> int:
        """Return the column of the remark: after the other columns, or after the name if their cells are empty."""
        has_cells = any(line.cells[c] for c in self.layout.columns)
        widths = [self.layout.widths[c] for c in self.layout.columns] if has_cells else []
        return INDENT + self.layout.name_width + sum(width + self.layout.gap for width in widths) + GAP

    def write_notes(self) -> None:
        if self.report.notes:
            self.write_line(("", ""))
        for note in self.report.notes:
            self.write_wrapped(note.message, "dim", " " * 6, "note: ")

    def _name_rule(self, name: str) -> str:
        """Return the arguments of `statecli rules` for a rule."""
        rules = self.report.rules() if self.report.configuration.plugins else ()
        plugin = next((rule.plugin for rule in rules if rule.name == name), None)
        return name if plugin is None else f"{name} --plugin {quote_for_shell(plugin)}"

    def write_result(self) -> None:
        """Write the number of problems (or else the verdict) and the exit status, unless the page has no verdict."""
        status = self.options.exit_status
        if not self.page.verdict or status is None:
            return
        result = format_result(self.report, self.page, status)
        self.write_line(("", ""))
        if self.page.problems:
            self.write_wrapped(
                f"explain a rule: statecli rules {self._name_rule(self.page.problems[0].rule)}", "dim", ""
            )
        if self.report.fix_command:  # a wrapped line cannot be pasted
            self.write_line((f"write the fixes: {self.report.fix_command}", "dim"))
        self.write_wrapped(result, "bold", "")

    def write_scope(self) -> None:
        if text := self.report.describe_scope():
            self.write_wrapped(text, "bold", "")

    def write_problems(self) -> None:
        """Write the problems after the rows, or with `-q` in place of the rows."""
        problems = self.report.select_problems(self.page, quiet=self.options.quiet)
        if problems and not self.options.quiet:
            self.write_line(("", ""))
        self.write_problem_blocks(problems)

    def write_problem_blocks(self, problems: Sequence[Problem]) -> None:
        """Write each problem with its source line, consequences and fix. With `-q`, write only its first line."""
        previous_is_block = False
        for n, problem in enumerate(problems):
            is_block = not self.options.quiet and bool(problem.source or problem.effects or problem.help)
            if n and not self.options.quiet and (is_block or previous_is_block):
                self.write_line(("", ""))
            previous_is_block = is_block
            self.write_problem_head(problem)
            if is_block:
                self.write_problem_body(problem)

    def write_problem_head(self, problem: Problem) -> None:
        """Write severity, rule and message. The source location is at the right margin, or below if it is too long."""
        style = {"error": "bold red", "warning": "yellow"}.get(problem.severity.value, "dim")
        head = f"{problem.severity.value}[{problem.rule}]: {problem.message}"
        location = format_origin(problem.origin) if problem.origin is not UNSET else ""
        room = self.width - self.layout.cell_len(escape_sentence(head)) - self.layout.cell_len(location)
        if location and room >= GAP:
            self.write_line((escape_sentence(head), style), (" " * room + location, "cyan"))
            return
        self.write_wrapped(_keep_parentheses(head), style, "    ", "")
        if location:
            self.write_line((f"  --> {location}", "cyan"))

    def write_problem_body(self, problem: Problem) -> None:
        """Write the source line, the consequences and the fix."""
        number = str(problem.origin.line) if problem.origin is not UNSET else ""
        margin = " " * max(len(number), 3) + " | "
        if problem.source:
            for part in self.layout.wrap_hanging(problem.source, self.width - len(margin)):
                self.write_line((number.rjust(len(margin) - 3) + " | ", "dim"), (part, ""))
                number = ""
        for line in _pack_effects(problem, self.width - len(margin), show_all=self.report.show_all):
            self.write_wrapped(line, "", margin + "  ", margin)
        label = f"  {problem.label_help()}  "
        for line in (problem.help or "").splitlines():
            if is_code(line):  # a wrapped line cannot be pasted
                self.write_line((label, "bold"), (line, ""))
                label = " " * len(label)
                continue
            indent = "# " if line.startswith("#") else ""
            line = _keep_parentheses(escape_sentence(line))
            for part in self.layout.wrap(line, self.width - len(label), indent=indent, break_on_hyphens=True) or [""]:
                self.write_line((label, "bold"), (part, ""))
                label = " " * len(label)


#: A text in parentheses that is not broken: `(float32 [16])`, `(144 parameters)`, `(state, strict=False)`.
_PARENTHESIS = compile_on_use(r"\([^()]{1,24}\)")


def _keep_parentheses(text: str) -> str:
    return _PARENTHESIS.sub(lambda match: match[0].replace(" ", _NO_BREAK_SPACE), text)


def _color_signs(text: str, style: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a row with their styles. Colour only the signs, or only the name of a row without signs."""
    if style in ("dim", "bold"):
        yield text, style
        return
    at = 0
    for sign in _SIGN_PATTERN.finditer(text):
        yield text[at : sign.start()], ""
        yield sign[0], _SIGN_STYLES[sign[0]]
        at = sign.end()
    if not at and style:
        at = len(text) - len(text.lstrip())
        at = text.find(" " * GAP, at) if " " * GAP in text[at:] else len(text)
        yield text[:at], style
    yield text[at:], ""


_SIGN_STYLES = {"✓": "green", "✗": "red", "A": "green", "D": "red", "M": "yellow", "R": "cyan", "?": "yellow"}
#: Verdicts anywhere in a row, and the status letter before a name.
_SIGN_PATTERN = compile_on_use(rf"[✓✗]|(?<=^{' ' * INDENT})[ADMR?](?= )")


def _pack_effects(problem: Problem, width: int, *, show_all: bool) -> Iterator[str]:
    """Yield lines with the consequences of a problem. Short ones share a line; the last line counts hidden findings.

    An example has its own line, because another cause would read as a part of the example.
    """
    effects = problem.effects
    line, count = "", len(effects) if show_all else count_shown_effects(effects)
    for effect in effects[:count]:
        joined_line = f"{line} · {effect}" if line else effect
        if line and (len(joined_line) > width or line.startswith("example: ")):
            yield line
            joined_line = effect
        line = joined_line
    if line:
        yield line
    if len(effects) > count:
        yield f"… and {problem.count_effects_after(count):,} more (--all)"
