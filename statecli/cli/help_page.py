"""The help of a command as data, from the table of options and `manuals`; and as text for a terminal.

`man_page` writes the same pages for man.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from statecli.cli import manuals
from statecli.cli.manuals import Example
from statecli.requests.options import COMMANDS, Color, Group
from statecli.requests.parameters import Parameter, parameters_of

SUMMARY = "Inspect, verify and audit the state of PyTorch models and checkpoints."
#: Commands with subcommands.
GROUPS = {"git": "Show checkpoints in git diff, git log -p and git difftool."}
#: Words of the command line that are not in the table of options.
OTHER_COMMANDS = {"help": "Show the help of statecli, or of a command.", "version": "Print the version."}
VERSION_OPTION = ("-V, --version", "Print the version and exit; with -v, also the versions of Python and packages.")
HELP_OPTION = ("-h, --help", "Show this help and exit.")
HELP_FLAGS = ("-h", "--help")

#: Most columns of the left column of a list.
MAX_TERM_COLUMNS = 30


class Section(NamedTuple):
    """A titled list: a term and its text in each line."""

    title: str
    lines: tuple[tuple[str, str], ...]


class HelpPage(NamedTuple):
    """The help of a command, of a group of commands, or of statecli.

    Attributes:
        name: The command as typed: "statecli diff".
        usage: The command with its targets: "statecli diff [OPTIONS] BEFORE AFTER".
        summary: Purpose of the command.
        operands: Its targets or its commands; None without operands.
        options: Its options by group.
        examples: Command lines.
        statuses: Each exit status and its meaning.
        hint: The last line; "" for none.
    """

    name: str
    usage: str
    summary: str
    operands: Section | None
    options: tuple[Section, ...]
    examples: tuple[Example, ...]
    statuses: tuple[tuple[str, str], ...]
    hint: str = ""


def find_help_request(words: Sequence[str]) -> str | None:
    """Return the command whose help a command line requests, "" for statecli itself; None without a request for help.

    Also None for a nonexistent command, reported later as a mistake.
    """
    before_targets = [*takewhile(lambda word: word != "--", words)]
    if words[:1] == ["help"]:
        name = _find_command(before_targets[1:])
    elif set(before_targets) & set(HELP_FLAGS):
        name = _find_command(before_targets)
    else:
        return None
    name = "" if name in OTHER_COMMANDS else name
    return name if name in ("", *COMMANDS, *GROUPS) else None


def _find_command(words: Sequence[str]) -> str:
    """Return the command at the start of the words; the words themselves up to an option if there is none."""
    start = [*takewhile(lambda word: not word.startswith("-"), words)]
    names = (" ".join(start[:length]) for length in (2, 1))
    return next((name for name in names if name in COMMANDS), " ".join(start))


def find_color(words: Sequence[str]) -> Color:
    """Return when to use colours in the help, from a command line that need not be correct."""
    values = [value for flag, value in pairwise([*words, ""]) if flag == "--color"]
    values += [word.removeprefix("--color=") for word in words if word.startswith("--color=")]
    return next((color for color in Color if color.value in values), Color.AUTO)


def build_page(name: str) -> HelpPage:
    """Return the help of a command or a group of commands; of statecli for ""."""
    if name in COMMANDS:
        return _build_command_page(name)
    program = f"statecli {name}".rstrip()
    commands = list_commands(name)
    options = (HELP_OPTION,) if name else (VERSION_OPTION, HELP_OPTION)
    manual = manuals.GROUPS[name] if name else manuals.ROOT
    return HelpPage(
        name=program,
        usage=f"{program} [OPTIONS] COMMAND [ARGS]...",
        summary=GROUPS[name] if name else SUMMARY,
        operands=Section("COMMANDS", tuple(commands)),
        options=(Section("OPTIONS", options),),
        examples=manual.examples,
        statuses=manual.list_statuses(),
        hint=f"Run {program} COMMAND --help for the options of a command.",
    )


def list_commands(group: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a group with its summary; for "", statecli's own commands and the groups themselves."""
    listed = {}
    for name, options in COMMANDS.items():
        parent, _, last = name.rpartition(" ")
        if parent == group:
            listed[last] = summarize(options)
        elif not group:
            listed[parent] = GROUPS[parent]
    yield from (listed if group else listed | OTHER_COMMANDS).items()


def summarize(options: Any) -> str:
    """Return the first sentence about a command, for lists."""
    return re.split(r"(?<=\.)\s", _describe(options), maxsplit=1)[0]


def _describe(options: Any) -> str:
    return " ".join((options.__doc__ or "").split())


def _build_command_page(name: str) -> HelpPage:
    parameters = [parameter for parameter in parameters_of(COMMANDS[name]) if not parameter.hidden]
    targets = [parameter for parameter in parameters if parameter.is_target]
    manual = manuals.MANUALS[name]
    described = tuple((target.metavar or "", target.help) for target in targets if target.help)
    return HelpPage(
        name=f"statecli {name}",
        usage=" ".join([f"statecli {name} [OPTIONS]", *map(format_operand, targets)]),
        summary=_describe(COMMANDS[name]),
        operands=Section("ARGUMENTS", described) if described else None,
        options=tuple(_group_options(parameter for parameter in parameters if not parameter.is_target)),
        examples=manual.examples,
        statuses=manual.list_statuses(),
    )


def _group_options(options: Iterable[Parameter]) -> Iterator[Section]:
    """Yield each group of options; the option of the help is the last of its group."""
    lines: dict[Group, list[tuple[str, str]]] = {group: [] for group in Group}
    for option in options:
        lines[option.group].append((format_term(option), format_text(option)))
    lines[Group.PROCESS].append(HELP_OPTION)
    return (Section(group.value, tuple(members)) for group, members in lines.items() if members)


def format_operand(target: Parameter) -> str:
    """Return a target as in the usage: `TARGET...`, `[RULE]`."""
    metavar = (target.metavar or "").strip("[]") + ("..." if target.repeatable else "")
    return metavar if target.is_required else f"[{metavar}]"


def format_term(option: Parameter) -> str:
    """Return the flags of an option, short ones first, with its placeholder: `-o, --output FILE`."""
    flags = ", ".join(sorted(option.flags, key=len))
    return f"{flags} {format_placeholder(option)}".rstrip()


def format_placeholder(option: Parameter) -> str:
    """Return the placeholder of the value; the choices if there are few, "" for a flag."""
    if option.is_flag:
        return ""
    return option.metavar or "|".join(option.choices) or "NUMBER"


def format_text(option: Parameter) -> str:
    """Return the help of an option, with its choices if the placeholder does not have them, and its default."""
    text = option.help or ""
    if option.metavar and option.choices:
        text += f" [values: {', '.join(option.choices)}]"
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if option.is_flag or default is None or default in ((), ""):
        return text
    return f"{text} [default: {default:g}]" if isinstance(default, float) else f"{text} [default: {default}]"


# --- text for a terminal ----------------------------------------------------------------------------------------------


def format_help(page: HelpPage, width: int, *, color: bool = False) -> str:
    """Return the page as text of so many columns; only longer words make longer lines."""
    style = _Style(width, color)
    blocks = [
        style.format_paragraph(f"{style.bold('Usage:')} {page.usage}"),
        style.format_paragraph(page.summary),
        *(style.format_section(section) for section in (page.operands, *page.options) if section),
        style.format_examples(page.examples),
        style.format_section(Section("EXIT STATUS", page.statuses)) if page.statuses else "",
        style.format_paragraph(page.hint),
    ]
    return "\n".join(filter(None, blocks))


class _Style(NamedTuple):
    """Layout of a page: width in columns, and whether the page has colours."""

    width: int
    color: bool

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.color else text

    def term(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.color else text

    def wrap(self, text: str, indent: int) -> list[str]:
        width = max(self.width - indent, 20)
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def format_paragraph(self, text: str) -> str:
        return "".join(f"{line}\n" for line in self.wrap(text, 0))

    def format_title(self, title: str) -> str:
        return f"{self.bold(title)}\n"

    def format_section(self, section: Section) -> str:
        widths = [len(term) for term, _ in section.lines if len(term) <= MAX_TERM_COLUMNS]
        column = max(widths, default=4) + 4 if self.width >= 2 * MAX_TERM_COLUMNS else 8
        return self.format_title(section.title) + "".join(self._format_lines(section.lines, column))

    def _format_lines(self, lines: Iterable[tuple[str, str]], column: int) -> Iterator[str]:
        """Yield each term with its text from `column` on; a text starts on the next line if its term is longer."""
        for term, text in lines:
            wrapped = self.wrap(text, column)
            gap = column - 2 - len(term)
            start = f"  {self.term(term)}"
            yield f"{start}{' ' * gap}{wrapped.pop(0)}\n" if gap >= 2 else f"{start}\n"
            yield from (f"{' ' * column}{line}\n" for line in wrapped)

    def format_examples(self, examples: Iterable[Example]) -> str:
        lines = [
            f"  {self.term(example.line)}\n" + "".join(f"      {line}\n" for line in self.wrap(example.purpose, 6))
            for example in examples
        ]
        return self.format_title("EXAMPLES") + "".join(lines) if lines else ""
