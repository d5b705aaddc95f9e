"""Help of each command as data, built from the table of options and from the examples in `manuals`.

`make docs` writes the pages to a file, from which `help_page` prints them. `man_page` writes the same pages for man.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum

import msgspec

from statecli.cli import manuals
from statecli.cli.help_page import OTHER_COMMAND_NAMES
from statecli.core.early_flags import HELP_FLAGS, VERSION_FLAGS
from statecli.requests.options import COMMANDS, OptionGroup
from statecli.requests.parameters import Parameter, parameters_of

SUMMARY = "Inspect, verify and audit the state of PyTorch models and checkpoints."
#: Commands with subcommands.
GROUPS = {"git": "Show checkpoints in git diff, git log -p and git difftool."}
#: Commands that are not in the table of options.
OTHER_COMMANDS = dict(
    zip(OTHER_COMMAND_NAMES, ("Show the help of statecli, or of a command.", "Print the version."), strict=True)
)
VERSION_OPTION = (
    ", ".join(VERSION_FLAGS),
    "Print the version and exit; with -v, also the versions of Python and packages.",
)
HELP_OPTION = (", ".join(HELP_FLAGS), "Show this help and exit.")


class HelpSection(msgspec.Struct, frozen=True):
    """A titled list: a term and its text in each line."""

    title: str
    lines: tuple[tuple[str, str], ...]


class HelpPage(msgspec.Struct, frozen=True):
    """The help of a command, of a group of commands, or of statecli.

    Attributes:
        name: The command as typed: "statecli diff".
        usage: The command with its targets: "statecli diff [OPTIONS] BEFORE AFTER".
        summary: Purpose of the command.
        operands: The targets of a command, or the commands of a group; None without them.
        options: The options by group.
        examples: Command lines, each with its purpose.
        statuses: Each exit status and its meaning.
        hint: The last line; "" for none.
    """

    name: str
    usage: str
    summary: str
    operands: HelpSection | None
    options: tuple[HelpSection, ...]
    examples: tuple[tuple[str, str], ...]
    statuses: tuple[tuple[str, str], ...]
    hint: str = ""


def build_page(name: str) -> HelpPage:
    """Return the help of a command or of a group of commands. For "", return the help of statecli itself."""
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
        operands=HelpSection("COMMANDS", tuple(commands)),
        options=(HelpSection("OPTIONS", options),),
        examples=tuple(manual.examples.items()),
        statuses=manual.list_statuses(),
        hint=f"Run {program} COMMAND --help for the options of a command.",
    )


def list_commands(group: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a group with its summary. For "", yield the groups, and the commands outside of groups."""
    help_by_command = {}
    for name, options in COMMANDS.items():
        parent, _, last = name.rpartition(" ")
        if parent == group:
            help_by_command[last] = summarize(options)
        elif not group:
            help_by_command[parent] = GROUPS[parent]
    yield from (help_by_command if group else help_by_command | OTHER_COMMANDS).items()


def summarize(options: object) -> str:
    """Return the first sentence of a command's description, for lists of commands."""
    return re.split(r"(?<=\.)\s", _describe(options), maxsplit=1)[0]


def _describe(options: object) -> str:
    return " ".join((options.__doc__ or "").split())


def _build_command_page(name: str) -> HelpPage:
    parameters = [parameter for parameter in parameters_of(COMMANDS[name]) if not parameter.hidden]
    targets = [parameter for parameter in parameters if parameter.is_target]
    manual = manuals.MANUALS[name]
    described_targets = tuple((target.metavar, target.help) for target in targets if target.help)
    return HelpPage(
        name=f"statecli {name}",
        usage=" ".join([f"statecli {name} [OPTIONS]", *map(format_operand, targets)]),
        summary=_describe(COMMANDS[name]),
        operands=HelpSection("ARGUMENTS", described_targets) if described_targets else None,
        options=tuple(_group_options(parameter for parameter in parameters if not parameter.is_target)),
        examples=tuple(manual.examples.items()),
        statuses=manual.list_statuses(),
    )


def _group_options(options: Iterable[Parameter]) -> Iterator[HelpSection]:
    """Yield each group of options; --help is the last option of its group."""
    lines: dict[OptionGroup, list[tuple[str, str]]] = {group: [] for group in OptionGroup}
    for option in options:
        lines[option.group].append((format_term(option), format_text(option)))
    lines[OptionGroup.PROCESS].append(HELP_OPTION)
    return (HelpSection(group.value, tuple(members)) for group, members in lines.items() if members)


def format_operand(target: Parameter) -> str:
    """Return a target as the usage line shows it: `TARGET...`, `[RULE]`."""
    metavar = target.metavar.strip("[]") + ("..." if target.repeatable else "")
    return metavar if target.is_required else f"[{metavar}]"


def format_term(option: Parameter) -> str:
    """Return the flags of an option, short flags first, with its placeholder: `-o, --output FILE`."""
    flags = ", ".join(sorted(option.flags, key=len))
    return f"{flags} {format_placeholder(option)}".rstrip()


def format_placeholder(option: Parameter) -> str:
    """Return the placeholder of an option's value: its metavar, its choices or NUMBER, or "" for a flag."""
    if option.is_flag:
        return ""
    return option.metavar or "|".join(option.choices) or "NUMBER"


def format_text(option: Parameter) -> str:
    """Return the help of an option with its default, and with its choices unless the placeholder lists them."""
    text = option.help
    if option.metavar and option.choices:
        text += f" [values: {', '.join(option.choices)}]"
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if option.is_flag or default is None or default in ((), ""):
        return text
    return f"{text} [default: {default:g}]" if isinstance(default, float) else f"{text} [default: {default}]"


# --- files ------------------------------------------------------------------------------------------------------------


def encode_pages() -> str:
    """Return the content of `help_pages.txt`: the name and the page of statecli, of each group and each command."""
    return "".join(f"# {name}\n{encode_page(build_page(name))}" for name in ("", *GROUPS, *COMMANDS))


def encode_page(page: HelpPage) -> str:
    """Return a page as lines: usage, summary, hint, and sections. A tab separates each term from its text."""
    sections = [
        *filter(None, (page.operands, *page.options)),
        HelpSection("EXAMPLES", page.examples),
        HelpSection("EXIT STATUS", page.statuses),
    ]
    lines = [page.usage, page.summary, page.hint]
    for section in sections if page.statuses else sections[:-1]:
        lines += [f"## {section.title}", *map("\t".join, section.lines)]
    return "".join(f"{line}\n" for line in lines)
