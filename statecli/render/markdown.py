"""`-f markdown`: for pull requests and job summaries; the same groups and folds as the table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from statecli.render._escape import name, sentence, visible
from statecli.render.plain import finding_line
from statecli.report import Column, Group, Page, Report

if TYPE_CHECKING:
    from statecli.render import Look, Sink

#: Rows above which the tables of a report that has a verdict are folded away.
MANY = 20


def write(report: Report, sink: Sink, look: Look) -> None:
    page = report.page()
    sink.text(f"### {_code(report.title)}\n\n")
    if page.verdict:
        sink.text(f"**{_text(page.verdict)}**\n\n")
    sink.text(f"{_text(page.subtitle)}\n")
    if not look.quiet:
        # What can be read from its first line alone may have the rest out of the way.
        folded = bool(page.verdict) and sum(len(group.lines) for group in page.groups) > MANY
        for group in page.groups:
            _group(group, page.columns, sink, folded)
        _fixes(page, sink)
    if page.findings:
        sink.text("\n**Findings**\n\n" + "".join(f"- {_text(finding_line(f))}\n" for f in page.findings))
    if report.notes and not look.quiet:
        sink.text("\n**Notes**\n\n" + "".join(f"- {_text(note.message)}\n" for note in report.notes))


def _group(group: Group, columns: tuple[Column, ...], sink: Sink, folded: bool) -> None:
    remarks = any(line.remark for line in group.lines)
    heads = [_text(column.name) for column in columns] + ([""] if remarks else [])
    rules = ["---:" if column.right else "---" for column in columns] + (["---"] if remarks else [])
    if folded:
        heading, summary = html.escape(sentence(group.heading)), html.escape(sentence(group.summary))
        sink.text(f"\n<details><summary><b>{heading}</b>: {summary}</summary>\n\n")
    else:
        sink.text(f"\n**{_text(group.heading)}**: {_text(group.summary)}\n\n")
    sink.text(f"| {' | '.join(heads)} |\n| {' | '.join(rules)} |\n")
    for line in group.lines:
        cells = [_cell(line.cells[0]), *map(_text, line.cells[1:]), *([_text(line.remark)] if remarks else [])]
        sink.text(f"| {' | '.join(cells)} |\n")
    if folded:
        sink.text("\n</details>\n")


def _fixes(page: Page, sink: Sink) -> None:
    if not page.fixes:
        return
    sink.text("\n**Fix**\n\n```python\n")
    for fix in page.fixes:
        lines = "\n".join(map(visible, fix.text.splitlines()))
        sink.text(f"# {visible(fix.place)}\n{lines}\n")
    sink.text("```\n")


def _cell(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + _code(text.lstrip(" ")) if text.strip() else ""


def _code(text: str) -> str:
    """A code span: nothing in it is markup but a run of backticks as long as its fence, and in a table the pipe."""
    shown = name(text).replace("|", "\\|")
    fence = "`"
    while fence in shown:
        fence += "`"
    return f"{fence}{shown}{fence}" if fence == "`" else f"{fence} {shown} {fence}"


def _text(text: str) -> str:
    escaped = sentence(text)
    for char in "\\`*_<>|":
        escaped = escaped.replace(char, "\\" + char)
    return escaped
