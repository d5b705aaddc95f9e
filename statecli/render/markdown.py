"""`-f markdown`: for pull requests and job summaries; the same groups and folds as the table.

What a file or a user may have named is no markup: text in which anything could be taken for some, for a link, a
mention or an issue stands in a code span. The whole fits a pull-request comment, and says how many lines do not.
"""

from __future__ import annotations

import html
import math
import re
import string
from collections.abc import Iterable
from typing import TYPE_CHECKING

from statecli.core.escaping import escape, escape_line, escape_name, escape_sentence
from statecli.render.plain import finding_line
from statecli.report import Column, Group, Page, Report

if TYPE_CHECKING:
    from statecli.render import Look, Sink

#: Rows above which the tables of a report that has a verdict are folded away.
MANY = 20
#: Characters of a comment, as GitHub has it.
LIMIT = 65_536
#: Of these, those kept for the last line.
RESERVED = 200

#: What GitHub would make something of: emphasis, links, mentions, issues, formulas, emoji; a list, where a line begins;
#: there `::` too, which is a command in the log of a step.
_LIVE = re.compile(r"[\\`*_~<>\[\]#@&$|]|://|\bwww\.|\bGH-\d|:\w+:|^\s*(?:[-+=]+|\d+[.)])\s|^\s*::", re.IGNORECASE)


class _Room:
    """How many characters are left, and how many lines had no room; after the first of them none has."""

    def __init__(self, left: float) -> None:
        self.left = left
        self.more = 0

    def kept(self, lines: Iterable[str]) -> str:
        """As many of the lines as there is room for."""
        fit = []
        for line in lines:
            self.left -= len(line)
            if self.left >= 0:
                fit.append(line)
            else:
                self.left = min(self.left, 0) - 1
                self.more += 1
        return "".join(fit)


def write(report: Report, sink: Sink, look: Look) -> None:
    if look.quiet and report.passed() and not report.weakening():
        return
    page = report.page()
    limit = math.inf if report.whole else LIMIT - RESERVED
    head = "".join(_head(report, page))
    done = _Room((limit - len(head)) / 3)
    head += _done(page, done)
    beside = 0 if look.quiet else sum(len(group.lines) for group in page.groups)
    # What makes it fail is never crowded out by rows, nor the other way round.
    below = _Room((limit - len(head)) / (2 if beside else 1))
    last = _findings(page, below, quiet=look.quiet) + (
        "" if look.quiet else _fixes(page, below) + _notes(report, below)
    )
    above = _Room(limit - len(head) - len(last))
    sink.text(head)
    # What can be read from its first line alone may have the rest out of the way.
    folded = bool(page.verdict) and beside > MANY
    for group in page.groups if beside else ():
        sink.text(_group(group, page.columns, above, folded))
    sink.text(last)
    more = done.more + above.more + below.more
    if more:
        why = f"beyond the {LIMIT:,} characters of a comment"
        sink.text(f"\n… and {more:,} more, {why}; all with `-f json` or `--all`\n")


def _head(report: Report, page: Page) -> Iterable[str]:
    yield f"### {_text(report.title) if report.several else _code(report.title)}\n\n"
    if page.verdict:
        yield f"**{_text(page.verdict)}**\n\n"
    yield f"{_text(page.subtitle)}\n"


def _done(page: Page, room: _Room) -> str:
    if page.done is None:
        return ""
    lines = (f"- {_cell(line.cells[0])}: {_text(line.remark)}\n" for line in page.done.lines)
    return f"\n**{_text(page.done.heading)}**: {_text(page.done.summary)}\n\n" + room.kept(lines)


def _findings(page: Page, room: _Room, *, quiet: bool) -> str:
    told = page.told(quiet=quiet)
    return _listed("Findings", [f"- {_code(finding_line(one))}\n" for one in told], room)


def _notes(report: Report, room: _Room) -> str:
    return _listed("Notes", [f"- {_text(note.message)}\n" for note in report.notes], room)


def _listed(heading: str, lines: list[str], room: _Room) -> str:
    return (f"\n**{heading}**\n\n" + room.kept(lines)) if lines else ""


def _group(group: Group, columns: tuple[Column, ...], room: _Room, folded: bool) -> str:
    remarks = any(line.remark for line in group.lines)
    heads = [escape(column.name).replace("|", "\\|") for column in columns] + ([""] if remarks else [])
    rules = ["---:" if column.right else "---" for column in columns] + (["---"] if remarks else [])
    table = f"| {' | '.join(heads)} |\n| {' | '.join(rules)} |\n"
    if folded:
        heading, summary = _in_html(group.heading), _in_html(group.summary)
        start, end = f"\n<details><summary><b>{heading}</b>: {summary}</summary>\n\n{table}", "\n</details>\n"
    else:
        start, end = f"\n**{_text(group.heading)}**: {_text(group.summary)}\n\n{table}", ""
    room.left -= len(start) + len(end)
    rows = room.kept(_row(line.cells, line.remark if remarks else None) for line in group.lines)
    return start + rows + end if rows else ""


def _row(cells: tuple[str, ...], remark: str | None) -> str:
    shown = [_cell(cells[0]), *map(_text, cells[1:]), *([] if remark is None else [_text(remark)])]
    return f"| {' | '.join(shown)} |\n"


def _fixes(page: Page, room: _Room) -> str:
    if not page.fixes:
        return ""
    lines = [escape_line(line) for fix in page.fixes for line in (f"# {fix.place}", *fix.text.splitlines())]
    fence = "`" * max(3, *(1 + len(run) for line in lines for run in re.findall("`+", line)), 3)
    return f"\n**Fix**\n\n{fence}python\n" + room.kept(f"{line}\n" for line in lines) + f"{fence}\n"


def _cell(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + _code(escape_name(text.lstrip(" "))) if text.strip() else ""


def _text(text: str) -> str:
    """Words as they are, unless there is anything in them that could be markup."""
    return _code(escape_sentence(text)) if _LIVE.search(text) else escape_sentence(text)


def _in_html(text: str) -> str:
    """The same inside a tag, where Markdown is not read and mentions are."""
    return _entities(escape_sentence(text)) if _LIVE.search(text) else html.escape(escape_sentence(text))


def _code(text: str) -> str:
    """Code, in which nothing is markup; by entities where a backtick, or a table's pipe, would end it."""
    shown = escape(text)
    return _entities(shown) if "`" in shown or "|" in shown or shown != shown.strip() else f"`{shown}`" if shown else ""


_ENTITIES = str.maketrans({char: f"&#{ord(char)};" for char in string.punctuation})


def _entities(shown: str) -> str:
    return f"<code>{shown.translate(_ENTITIES)}</code>"
