"""Find requests for help, and format the help of a command for a terminal.

The pages are in `help_pages.txt`, which `make docs` writes (`help_table`), because importing the table of options takes
as long as the rest of the help.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise, takewhile

from statecli.cli import streams
from statecli.core.early_flags import COLOR_FLAG, HELP_FLAGS
from statecli.core.output import Color
from statecli.core.terminal_width import get_requested_width, get_terminal_width

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Commands that are not in the table of options.
OTHER_COMMAND_NAMES = ("help", "version")
#: Largest width of the left column of a list.
MAX_TERM_COLUMNS = 30


def find_help_request(words: Sequence[str]) -> str | None:
    """Return the command whose help is requested ("" means statecli itself), or None if no help is requested.

    Returns None also for a nonexistent command, which the parser reports later.
    """
    before_targets = [*takewhile(lambda word: word != "--", words)]
    if words[:1] == ["help"]:
        before_targets = before_targets[1:]
    elif not set(before_targets) & set(HELP_FLAGS):
        return None
    start = [*takewhile(lambda word: not word.startswith("-"), before_targets)]
    pages = _read_pages()
    commands = pages.keys() - {name.partition(" ")[0] for name in pages if " " in name} - {""}
    # A command has one word, or two for a group. Words after a command are targets; the word after a group must be a
    # command.
    possible = (" ".join(start[:length]) for length in (2, 1))
    name = next((name for name in possible if name in commands), " ".join(start))
    name = "" if name in OTHER_COMMAND_NAMES else name
    return name if name in pages else None


def find_ambiguous_word(words: Sequence[str]) -> str | None:
    """Return the first word that begins with `-` but is also an existing file, or None if no word is such a file.

    With a file `-o.pt` in the folder, `statecli audit *` would write to `.pt`. After `--`, all words are targets.
    """
    options = takewhile(lambda word: word != "--", words)
    return next((word for word in options if word.startswith("-") and word != "-" and os.path.lexists(word)), None)


def find_color(words: Sequence[str]) -> str:
    """Return the value of --color for the help: auto, always or never. Works for invalid command lines too."""
    values = [value for flag, value in pairwise([*words, ""]) if flag == COLOR_FLAG]
    values += [word.removeprefix(f"{COLOR_FLAG}=") for word in words if word.startswith(f"{COLOR_FLAG}=")]
    return next((color.value for color in Color if color.value in values), Color.AUTO.value)


def show_help(command: str, words: Sequence[str]) -> int:
    """Write the help of a command ("" means statecli itself); return exit code 0. `words` may contain --color."""
    streams.reserve_stdout()
    page = read_page(command)
    streams.write_help(lambda width, color: format_help(page, width, color=color), find_color(words))
    return 0


def show_missing_command(words: Sequence[str]) -> int:
    """Write the help of statecli or of a group on stderr, for a line without a command; return exit code 2."""
    page = format_help(read_page(" ".join(words)), get_requested_width() or get_terminal_width(1))
    sys.stderr.write(page)
    return 2


def lacks_command(words: Sequence[str]) -> bool:
    """Return whether the line is empty or has only the name of a group of commands."""
    pages = _read_pages()
    return not words or (len(words) == 1 and any(name.startswith(f"{words[0]} ") for name in pages))


def read_page(name: str) -> str:
    """Return the help page of a command or group ("" means statecli itself), in the form that `format_help` takes."""
    return _read_pages()[name]


def _read_pages() -> dict[str, str]:
    with open(os.path.join(os.path.dirname(__file__), "help_pages.txt"), encoding="utf-8") as file:
        pages = f"\n{file.read()}".split("\n# ")[1:]
    return dict(page.split("\n", 1) for page in pages)


def format_help(page: str, width: int, *, color: bool = False) -> str:
    """Return the page as text. A line has at most `width` columns, unless a single word is longer."""
    head, *sections = page.rstrip("\n").split("\n## ")
    usage, summary, hint = head.split("\n")
    style = _Style(width, color=color)
    blocks = [style.format_paragraph(f"{style.format_bold('Usage:')} {usage}"), style.format_paragraph(summary)]
    for section in sections:
        title, *lines = section.split("\n")
        blocks.append(style.format_section(title, [line.partition("\t")[::2] for line in lines]))
    return "\n".join(filter(None, [*blocks, style.format_paragraph(hint)]))


class _Style:
    """Layout of a page: width in columns, and whether the page has colours."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width = width
        self.color = color

    def format_bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.color else text

    def format_term(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.color else text

    def wrap(self, text: str, indent: int) -> list[str]:
        """Return the lines of a text, as `textwrap.wrap` does without breaking words or hyphens."""
        width = max(self.width - indent, 20)
        if len(text) <= width:
            return [text] if text else []
        lines = []
        line, *words = text.split(" ")
        for word in words:
            if len(line) + len(word) < width:
                line = f"{line} {word}"
            else:
                lines.append(line)
                line = word
        return [*lines, line]

    def format_paragraph(self, text: str) -> str:
        return "".join(f"{line}\n" for line in self.wrap(text, 0))

    def format_section(self, title: str, lines: Sequence[tuple[str, str]]) -> str:
        if title == "EXAMPLES":
            body = self._format_examples(lines)
        else:
            widths = [len(term) for term, _ in lines if len(term) <= MAX_TERM_COLUMNS]
            column = max(widths, default=4) + 4 if self.width >= 2 * MAX_TERM_COLUMNS else 8
            body = self._format_lines(lines, column)
        return f"{self.format_bold(title)}\n" + "".join(body)

    def _format_lines(self, lines: Iterable[tuple[str, str]], column: int) -> Iterator[str]:
        """Yield the lines of each term and its text. The text starts at `column`, on a new line after a long term."""
        for term, text in lines:
            wrapped_lines = self.wrap(text, column)
            gap = column - 2 - len(term)
            start = f"  {self.format_term(term)}"
            yield f"{start}{' ' * gap}{wrapped_lines.pop(0)}\n" if gap >= 2 else f"{start}\n"
            yield from (f"{' ' * column}{line}\n" for line in wrapped_lines)

    def _format_examples(self, examples: Iterable[tuple[str, str]]) -> Iterator[str]:
        for line, purpose in examples:
            yield f"  {self.format_term(line)}\n" + "".join(f"      {part}\n" for part in self.wrap(purpose, 6))
