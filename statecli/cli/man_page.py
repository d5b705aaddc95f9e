"""The help of each command as a manual page, in the macros of man(7). `setup.py` puts the pages into the wheel."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator

from statecli.cli.help_table import GROUPS, HelpPage, HelpSection, build_page
from statecli.core.version import __version__
from statecli.requests.options import COMMANDS

#: Longest source line that mandoc -T lint accepts, minus the characters of an escape.
MAX_SOURCE_COLUMNS = 78
#: Escapes for characters that roff reads as an escape (backslash) or prints as typographic characters.
_ROFF = str.maketrans({"\\": r"\e", "-": r"\-", "'": r"\(aq", '"': r"\(dq", "^": r"\(ha", "~": r"\(ti", "`": r"\(ga"})


def write_man_pages(folder: str) -> list[str]:
    """Write the page of statecli and of each command into the folder; return the paths.

    The date of the pages is SOURCE_DATE_EPOCH if it is set (for reproducible builds), or else today.
    """
    os.makedirs(folder, exist_ok=True)
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    date = time.strftime("%Y-%m-%d", time.gmtime(int(seconds) if seconds else None))
    return [_write_page(folder, build_page(name), date) for name in ("", *GROUPS, *COMMANDS)]


def _write_page(folder: str, page: HelpPage, date: str) -> str:
    path = os.path.join(folder, f"{page.name.replace(' ', '-')}.1")
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(format_man_page(page, date))
    return path


def format_man_page(page: HelpPage, date: str) -> str:
    """Return the source of a manual page."""
    name = page.name.replace(" ", "-")
    return "\n".join([*_format_head(page, name, date), *_format_lists(page), *_format_references(name), ""])


def _format_head(page: HelpPage, name: str, date: str) -> Iterator[str]:
    summary = page.summary.partition(". ")[0].removesuffix(".")
    yield f'.TH "{_escape(name.upper())}" 1 "{date}" "statecli {__version__}" "User Commands"'
    yield from (".nh", ".ad l")
    yield from (".SH NAME", *_format_text(f"{name} - {summary}"))
    yield from (".SH SYNOPSIS", f"\\fB{_escape(page.name)}\\fR{_escape(page.usage.removeprefix(page.name))}")
    yield from (".SH DESCRIPTION", *_format_text(page.summary))


def _format_lists(page: HelpPage) -> Iterator[str]:
    if page.operands:
        yield from (f".SH {page.operands.title}", *_format_section(page.operands))
    yield ".SH OPTIONS"
    for section in page.options:
        if section.title != "OPTIONS":
            yield f".SS {_escape(section.title)}"
        yield from _format_section(section)
    if page.examples:
        yield ".SH EXAMPLES"
    for line, purpose in page.examples:
        yield from (".TP", f"\\fB{_escape(line)}\\fR", *_format_text(purpose))
    if page.statuses:
        yield from (".SH EXIT STATUS", *_format_section(HelpSection("", page.statuses)))


def _format_section(section: HelpSection) -> Iterator[str]:
    for term, text in section.lines:
        yield from (".TP", _format_term(term), *_format_text(text))


def _format_term(term: str) -> str:
    """Return a term with its flags in bold and its placeholder in italics."""
    words = term.split(" ")
    flags = [f"\\fB{_escape(word)}\\fR" for word in words if word.startswith("-")]
    placeholders = [f"\\fI{_escape(word)}\\fR" if flags else f"\\fB{_escape(word)}\\fR" for word in words[len(flags) :]]
    return " ".join([*flags, *placeholders])


def _format_references(name: str) -> Iterator[str]:
    names = ["statecli", *(f"statecli-{command.replace(' ', '-')}" for command in (*GROUPS, *COMMANDS))]
    other_names = sorted(command for command in names if command != name)
    yield ".SH SEE ALSO"
    for reference in other_names:
        yield f".BR {_escape(reference)} (1){',' if reference != other_names[-1] else ''}"


def _format_text(text: str) -> Iterator[str]:
    r"""Yield the lines of a paragraph. `\&` before a dot keeps roff from reading the line as a request."""
    for line in textwrap.wrap(_escape(text), MAX_SOURCE_COLUMNS, break_long_words=False, break_on_hyphens=False):
        yield f"\\&{line}" if line.startswith(".") else line


def _escape(text: str) -> str:
    """Escape a text, so that roff prints it unchanged and a copy from the terminal has the same characters."""
    return text.translate(_ROFF)
