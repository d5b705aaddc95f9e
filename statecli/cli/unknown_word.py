"""Find unknown commands and options, the most common mistakes, before the table of options is imported.

The known words are in `known_options.txt`, which `make docs` writes (`help_table`).
"""

from __future__ import annotations

import os
from functools import cache
from itertools import takewhile

from statecli import core
from statecli.cli.help_page import OTHER_COMMAND_NAMES
from statecli.core.early_flags import HELP_FLAGS

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Least similarity of a suggested option, from 0 to 1.
_SIMILARITY = 0.7
#: Commands of other programs, each with the statecli command for the same purpose.
_SIMILAR_COMMANDS = {
    **dict.fromkeys(("check", "scan", "validate", "lint"), "audit"),
    **dict.fromkeys(("cmp", "compare"), "diff"),
    **dict.fromkeys(("cat", "info", "list", "ls", "print", "show", "summary"), "inspect"),
    **dict.fromkeys(("checksum", "digest", "hash"), "lock"),
    "test": "verify",
}


class _Option:
    """Option of a command: listed spellings, other spellings, whether it takes a value, and its choices."""

    def __init__(self, line: str) -> None:
        listed, other_spellings, kind, choices = line.split("\t")
        self.listed = listed.split()
        self.spellings = [*self.listed, *other_spellings.split()]
        self.takes_value = kind == "value"
        self.choices = choices.split()


def find_ambiguous_word(words: Sequence[str]) -> str | None:
    """Return the first word that begins with `-` but is also an existing file, or None if no word is such a file.

    With a file `-o.pt` in the folder, `statecli audit *` would write to `.pt`. After `--`, all words are targets.
    """
    options = takewhile(lambda word: word != "--", words)
    return next((word for word in options if word.startswith("-") and word != "-" and os.path.lexists(word)), None)


def describe_unknown_word(words: Sequence[str]) -> str | None:
    """Return an error for an unknown command or long option, or None if all are known.

    A word after an option that takes a value may be the value.
    """
    if not words or words[0].startswith("-"):
        return None
    commands = _read_commands()
    if words[0] not in (*OTHER_COMMAND_NAMES, *(name.partition(" ")[0] for name in commands)):
        is_only_word = len(words) == 1 or words[1].startswith("-")
        return _describe_target(words[0], is_only_word) or _describe_unknown_command(words[0], commands)
    name = find_command(words)
    typed_words = [*takewhile(lambda word: word != "--", words)]
    if not name or not any(word.startswith("--") for word in typed_words):
        return None
    options = {spelling: option for option in _list_options(commands[name]) for spelling in option.spellings}
    previous = None
    for word in typed_words:
        before, previous = previous, options.get(word)
        flag = word.partition("=")[0]
        is_value = before is not None and before.takes_value
        if flag.startswith("--") and flag not in (*options, *HELP_FLAGS) and not is_value:
            return describe_unknown_option(flag, name)
    return None


def find_command(words: Sequence[str]) -> str:
    """Return the name of the command at the beginning of a command line, or "" if the first words are not a command."""
    commands = _read_commands()
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in commands), "")


def see_help(name: str) -> str:
    """Return the advice to read the help of a command. The name "" means statecli itself."""
    return f"see {' '.join(filter(None, ('statecli', name)))} --help"


def join_or(names: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def describe_unknown_option(flag: str, name: str) -> str:
    """Return the sentence for an option that the command does not have."""
    text = f"{name} has no option {flag}"
    commands = _read_commands()
    other_commands = [
        command for command, lines in commands.items() if any(flag in each.listed for each in _list_options(lines))
    ]
    if other_commands:
        *first_commands, last_command = other_commands
        names = f"{', '.join(first_commands)} and {last_command} have" if first_commands else f"{last_command} has"
        return f"{text}, but {names} this option; {see_help('' if first_commands else last_command)}"
    options = _list_options(commands[name])
    similar_words = _find_similar_flags(flag, options) or _find_similar_choices(flag, options)
    return f"{text}; did you mean {join_or(similar_words)}?" if similar_words else f"{text}; {see_help(name)}"


@cache
def _read_commands() -> dict[str, list[str]]:
    """Return the lines about the options of each command."""
    with open(os.path.join(os.path.dirname(__file__), "known_options.txt"), encoding="utf-8") as file:
        commands = f"\n{file.read()[:-1]}".split("\n# ")[1:]
    return {name: lines for name, *lines in (command.split("\n") for command in commands)}


def _list_options(lines: Iterable[str]) -> list[_Option]:
    return [*map(_Option, lines)]


def _describe_target(word: str, is_only_word: bool) -> str | None:
    """Return an error for a target typed in place of a command, or None for any other word.

    `check a.pt` counts as another program's command, even if a folder `check` exists.
    """
    module, colon, name = word.partition(":")
    is_class = colon and module and name.partition("(")[0].replace(".", "").isidentifier()
    if not (is_class or "://" in word or os.path.lexists(word)) or (word in _SIMILAR_COMMANDS and not is_only_word):
        return None
    return f"No such command {word!r}; did you mean: statecli inspect {core.quoting.quote_for_shell(word)}"


def _describe_unknown_command(word: str, commands: Iterable[str]) -> str:
    from difflib import get_close_matches

    names = [name for name in commands if " " not in name]
    similar_commands = [_SIMILAR_COMMANDS[word]] if word in _SIMILAR_COMMANDS else get_close_matches(word, names)
    similar_commands = [name for name in similar_commands if name.startswith(word)] or similar_commands
    if not similar_commands:
        return f"No such command {word!r}; {see_help('')}"
    return f"No such command {word!r}; did you mean {join_or([repr(name) for name in similar_commands])}?"


def _find_similar_flags(flag: str, options: Sequence[_Option]) -> list[str]:
    """Return up to three flags that are similar to the word: by their beginning, their spelling or their last word.

    Old spellings count too. Dashes are left out, because dashes would make all flags similar. A last word that
    is a choice, as in --config-json, is left to `_find_similar_choices`.
    """
    from difflib import get_close_matches

    flags: dict[str, str] = {}
    choices = _list_choices(options)
    for option in options:
        for spelling in option.spellings if option.listed else ():
            name = spelling.lstrip("-")
            flags[name] = spelling if spelling in option.listed else max(option.listed, key=len)
            last_word = name.rpartition("-")[2]
            if last_word not in choices:
                flags.setdefault(last_word, flags[name])
    word = flag.lstrip("-")
    similar_flags = [name for name in flags if word.startswith(f"{name}-") or (len(word) > 1 and name.startswith(word))]
    similar_flags = similar_flags or get_close_matches(word, flags, n=3, cutoff=_SIMILARITY)
    return list(dict.fromkeys(flags[name] for name in similar_flags))[:3]


def _find_similar_choices(flag: str, options: Sequence[_Option]) -> list[str]:
    """Return a listed option whose value resembles an unknown flag: `-f json` for `--json` or `--josn`."""
    from difflib import get_close_matches

    choices = _list_choices(options)
    return [choices[choice] for choice in get_close_matches(flag.lstrip("-"), choices, n=1, cutoff=_SIMILARITY)]


def _list_choices(options: Iterable[_Option]) -> dict[str, str]:
    """Return each choice of an option with the words to type: `-f json`."""
    return {choice: f"{min(option.listed, key=len)} {choice}" for option in options for choice in option.choices}
