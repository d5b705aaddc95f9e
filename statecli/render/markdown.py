"""`-f markdown`: Markdown for pull requests and job summaries. As in the table, repeated layers share a row.

Words that could be markup, a link, a mention or an issue become code spans, because files and users choose names. The
output fits a pull-request comment and counts the omitted lines.
"""

from __future__ import annotations

import html
import math
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from msgspec import UNSET

from statecli.core.escaping import escape, escape_line, escape_name, escape_sentence
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import format_origin, plural
from statecli.render import RenderOptions, Sink
from statecli.report import Group, Page, Problem, Report, ReportColumn

#: Largest number of rows for which the tables of a report with a verdict are not collapsed.
MAX_OPEN_ROWS = 20
#: Largest number of characters of a comment on GitHub.
MAX_COMMENT_CHARACTERS = 65_536
#: Number of characters of the comment that are reserved for the last line.
RESERVED_CHARACTERS = 200

#: Text that GitHub may read as markup: emphasis, links, mentions, issues, formulas, emoji. At the start of a line,
#: lists and `::` (a command in the log of a step) count too. A `_` inside a word is plain text.
_MARKUP = compile_on_use(
    r"[\\`*~<>\[\]#@&$|]|(?<!\w)_|_(?!\w)|://|\bwww\.|\bGH-\d|:\w+:|^\s*(?:[-+=]+|\d+[.)])\s|^\s*::", re.IGNORECASE
)


class _CharacterBudget:
    """Number of characters left for lines. If a line does not fit, this line and all later lines are only counted."""

    def __init__(self, characters: float) -> None:
        self.characters_left = characters
        self.dropped_lines = 0

    def fit_lines(self, lines: Iterable[str]) -> str:
        """Return as many of the lines as fit."""
        fitting_lines = []
        for line in lines:
            self.characters_left -= len(line)
            if self.characters_left >= 0:
                fitting_lines.append(line)
            else:
                self.characters_left = min(self.characters_left, 0) - 1
                self.dropped_lines += 1
        return "".join(fitting_lines)


def write(report: Report, sink: Sink, options: RenderOptions) -> None:
    if options.quiet and report.has_passed() and not report.describe_scope():
        return
    page = report.page()
    limit = math.inf if report.show_all else MAX_COMMENT_CHARACTERS - RESERVED_CHARACTERS
    head = "".join(_format_head(report, page, quiet=options.quiet))
    outcome_budget = _CharacterBudget((limit - len(head)) / 3)
    head += _format_outcomes(page, outcome_budget)
    row_count = 0 if options.quiet else sum(len(group.lines) + len(group.problems) for group in page.groups)
    # Failures and rows get half of the space each.
    below_budget = _CharacterBudget((limit - len(head)) / (2 if row_count else 1))
    if not options.quiet and report.patch:
        patch_budget = _CharacterBudget((limit - len(head)) / 2)
        first, *lines, last = _format_block((line.removesuffix("\r") for line in report.patch), "diff")
        head += f"\n{first}\n{patch_budget.fit_lines(f'{line}{chr(10)}' for line in lines)}{last}\n"
        below_budget.dropped_lines += patch_budget.dropped_lines
    problems = _format_problem_lines(report.select_problems(page, quiet=options.quiet), quiet=options.quiet)
    closing_text = _format_list("Problems", problems, below_budget)
    if not options.quiet:
        notes = [f"- {_escape_text(note.message)}\n" for note in report.notes]
        closing_text += _format_list("Notes", notes, below_budget)
    row_budget = _CharacterBudget(limit - len(head) - len(closing_text))
    sink.text(head)
    # With a verdict in its first line, a report can be read without the tables.
    is_folded = bool(page.verdict) and row_count > MAX_OPEN_ROWS
    for group in page.groups if row_count else ():
        sink.text(_format_group(group, page.columns, row_budget, is_folded))
    sink.text(closing_text)
    dropped_count = outcome_budget.dropped_lines + row_budget.dropped_lines + below_budget.dropped_lines
    if dropped_count:
        reason = f"because a comment has at most {MAX_COMMENT_CHARACTERS:,} characters"
        sink.text(f"\n… and {plural(dropped_count, 'more line')}, {reason}; `-f json` or `--all` shows all lines\n")


def _format_head(report: Report, page: Page, *, quiet: bool) -> Iterable[str]:
    yield f"### {_escape_text(report.title) if report.has_several_targets else _format_code(report.title)}\n\n"
    if page.verdict:
        yield f"**{_escape_text(page.verdict)}**\n\n"
    for sentence in page.unusual:
        yield f"**{_escape_text(sentence.text)}**\n\n"
    if page.subtitle and not quiet:
        yield f"{_escape_text(page.subtitle)}\n"


def _format_outcomes(page: Page, budget: _CharacterBudget) -> str:
    if page.outcomes is None:
        return ""
    lines = (
        f"- {_format_name(line.cells[0].strip())}{_escape_text(': ' + line.remark) if line.remark else ''}\n"
        for line in page.outcomes.lines
    )
    return f"\n**{_escape_text(page.outcomes.heading)}**: {_escape_text(page.outcomes.summary)}\n\n" + budget.fit_lines(
        lines
    )


def _format_problem_lines(problems: Sequence[Problem], *, quiet: bool) -> list[str]:
    lines = []
    for problem in problems:
        location = f" ({format_origin(problem.origin)})" if problem.origin is not UNSET else ""
        message = escape_sentence(problem.message)
        lines.append(f"- {_format_code(f'{problem.severity.value}[{problem.rule}]: {message}{location}')}\n")
        if quiet:
            continue
        lines += [f"  - {_format_code(escape_sentence(text))}\n" for text in (problem.source, *problem.effects) if text]
        if problem.help:
            lines += _format_help(problem.label_help(), problem.help.splitlines())
    return lines


def _format_help(label: str, help_lines: Sequence[str]) -> list[str]:
    """Return list items of help. A fix of several lines becomes one block, which is kept or dropped as a whole."""
    if label == "fix" and len(help_lines) > 1:
        block = "".join(f"    {line}\n" for line in _format_block(help_lines))
        return [f"  - {label}:\n\n{block}"]
    return [f"  - {label}: {_format_code(text)}\n" for text in help_lines]


def _format_list(heading: str, lines: list[str], budget: _CharacterBudget) -> str:
    return (f"\n**{heading}**\n\n" + budget.fit_lines(lines)) if lines else ""


def _format_group(group: Group, columns: tuple[ReportColumn, ...], budget: _CharacterBudget, is_folded: bool) -> str:
    if group.problems:
        start = f"\n**{_escape_text(group.heading)}**: {_escape_text(group.summary)}\n\n"
        lines = _format_problem_lines(group.problems, quiet=False)
        lines += [f"- {_escape_text(line.cells[0])}\n" for line in group.lines]
        budget.characters_left -= len(start)
        return start + budget.fit_lines(lines)
    remarks = any(line.remark for line in group.lines)
    names = group.heads or [column.name for column in columns]
    heads = [escape(name).replace("|", "\\|") for name in names] + ([""] if remarks else [])
    rules = ["---:" if column.right else "---" for column in columns] + (["---"] if remarks else [])
    table = f"| {' | '.join(heads)} |\n| {' | '.join(rules)} |\n"
    if is_folded:
        heading, summary = _escape_html(group.heading), _escape_html(group.summary)
        start, end = f"\n<details><summary><b>{heading}</b>: {summary}</summary>\n\n{table}", "\n</details>\n"
    else:
        start, end = f"\n**{_escape_text(group.heading)}**: {_escape_text(group.summary)}\n\n{table}", ""
    budget.characters_left -= len(start) + len(end)
    rows = budget.fit_lines(_format_row(line.cells, line.remark if remarks else None) for line in group.lines)
    return start + rows + end if rows else ""


def _format_row(cells: tuple[str, ...], remark: str | None) -> str:
    texts = [_format_name(cells[0]), *map(_escape_text, cells[1:]), *([] if remark is None else [_escape_text(remark)])]
    return f"| {' | '.join(texts)} |\n"


def _format_block(lines: Iterable[str], language: str = "python") -> list[str]:
    """Return the lines of code between fences. The fences are longer than any run of backticks in the code."""
    escaped_lines = [escape_line(line) for line in lines]
    fence = "`" * max(3, *(1 + len(run) for line in escaped_lines for run in re.findall("`+", line)), 3)
    return [f"{fence}{language}", *escaped_lines, fence]


def _format_name(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + _format_code(escape_name(text.lstrip(" "))) if text.strip() else ""


def _escape_text(text: str) -> str:
    """Return the text; words that could be markup become code spans."""
    words = escape_sentence(text).split(" ")
    first = next((position for position, word in enumerate(words) if word), 0)
    # Some markup counts only at the start of a line.
    is_markup = [bool(_MARKUP.search(f"{word} " if position == first else word)) for position, word in enumerate(words)]
    for start, stop in _find_brackets(words):
        is_markup[start:stop] = [True] * (stop - start)
    runs = groupby(zip(is_markup, words, strict=True), key=itemgetter(0))
    texts = ((is_code, " ".join(word for _, word in run)) for is_code, run in runs)
    return " ".join(_format_words_as_code(words) if is_code else words for is_code, words in texts)


def _find_brackets(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the word positions (start, end) of each text in brackets, such as `[q_proj; k_proj; v_proj]`."""
    start = None
    for position, word in enumerate(words):
        start = position if word.startswith("[") else start
        if start is not None and word.rstrip(".,;:").endswith("]"):
            yield start, position + 1
            start = None


def _format_words_as_code(words: str) -> str:
    """Return a code span, with the final punctuation after the span."""
    text = words.rstrip(".,;:") or words
    return _format_code(text) + words[len(text) :]


def _escape_html(text: str) -> str:
    """Escape a text for the inside of an HTML element, where GitHub still reads mentions, but not Markdown."""
    return _encode_entities(escape_sentence(text)) if _MARKUP.search(text) else html.escape(escape_sentence(text))


def _format_code(text: str) -> str:
    """Return a Markdown code span. A text with backticks, pipes or outer spaces becomes a `<code>` element."""
    escaped_text = escape(text)
    return (
        _encode_entities(escaped_text)
        if "`" in escaped_text or "|" in escaped_text or escaped_text != escaped_text.strip()
        else f"`{escaped_text}`"
        if escaped_text
        else ""
    )


_ENTITIES = str.maketrans({char: f"&#{ord(char)};" for char in string.punctuation})


def _encode_entities(text: str) -> str:
    return f"<code>{text.translate(_ENTITIES)}</code>"
