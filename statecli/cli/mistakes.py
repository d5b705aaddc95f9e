"""Describe mistakes on the command line: each in one sentence, which names the mistake and the words to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from enum import Enum

from statecli.core.early_flags import VERSION_FLAGS
from statecli.core.errors import option
from statecli.core.quoting import quote_for_shell
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import Parameter, parameters_of

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


def see_help(name: str) -> str:
    """Return the advice to read the help of a command. The name "" means statecli itself."""
    return f"see {' '.join(filter(None, ('statecli', name)))} --help"


def _join_or(names: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# --- commands ---------------------------------------------------------------------------------------------------------


def describe_unknown_command(words: Sequence[str]) -> str:
    """Return the sentence for a line that does not begin with a command, or that names an unknown command of a group.

    A target typed in place of a command gets the command inspect. `check a.pt` counts as another program's command,
    even if a folder `check` exists.
    """
    words = words[1:] if words[0] == "help" else words
    names = [name for name in COMMANDS if " " not in name]
    members = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if members and len(words) > 1:
        words, names = words[1:], members
    word = words[0]
    if word in (*VERSION_FLAGS, "version"):
        return f"{word} takes no argument but -v; {see_help('')}"
    if word.startswith("-"):
        return f"No such option: {word}; {see_help('')}"
    is_foreign = word in _SIMILAR_COMMANDS and len(words) > 1 and not words[1].startswith("-")
    if _is_target(word) and not is_foreign:
        return f"No such command {word!r}; did you mean: statecli inspect {quote_for_shell(word)}"
    similar = [_SIMILAR_COMMANDS[word]] if word in _SIMILAR_COMMANDS else get_close_matches(word, names)
    similar = [name for name in similar if name.startswith(word)] or similar
    hint = f"did you mean {_join_or([repr(name) for name in similar])}?" if similar else see_help("")
    return f"No such command {word!r}; {hint}"


def _is_target(word: str) -> bool:
    """Return whether a word is an existing path, a URL or the spelling of a class."""
    module, colon, name = word.partition(":")
    is_class = bool(colon and module) and name.partition("(")[0].replace(".", "").isidentifier()
    return is_class or "://" in word or os.path.lexists(word)


# --- targets and values -----------------------------------------------------------------------------------------------


def describe_missing_target(parameter: Parameter, name: str) -> str:
    """Return the sentence for a command without a required target."""
    help_text = parameter.help.rstrip(".")
    explanation = f": {help_text[:1].lower()}{help_text[1:]}" if help_text else ""
    return f"{name} needs {parameter.metavar}{explanation}; {see_help(name)}"


def describe_extra_word(word: str, name: str, first: object) -> str:
    """Return the sentence for a target too many. `first` is the value of the first target."""
    targets = [parameter.metavar for parameter in parameters_of(COMMANDS[name]) if parameter.is_target]
    expected_text = f"takes only {' and '.join(targets)}" if targets else "takes no arguments"
    advice = see_help(name)
    if name == "inspect":
        advice = "to check several checkpoints, run: statecli audit TARGET..."
    elif name == "report":
        advice = f"to compare two checkpoints, run: statecli diff {shlex.join([str(first), word])} -f html -o diff.html"
    return f"unexpected argument {word}: {name} {expected_text}; {advice}"


def describe_missing_value(parameter: Parameter, flag: str, name: str) -> str:
    """Return the sentence for an option at the end of the line that needs a value."""
    return f"{option(flag)}: needs {_describe_values(parameter)}; {see_help(name)}"


def describe_wrong_value(parameter: Parameter, value: str, name: str) -> str:
    """Return the sentence, after the option and its value, for a value of another type."""
    similar_choices = get_close_matches(value, parameter.choices, n=1)
    hint = f"did you mean {similar_choices[0]}?" if similar_choices else see_help(name)
    return f"must be {_describe_values(parameter)}; {hint}"


def _describe_values(parameter: Parameter) -> str:
    """Return the values that an option takes, in words: its choices, or a noun such as `a whole number (N)`."""
    if issubclass(parameter.type, Enum):
        return _join_or(parameter.choices)
    noun = {int: "a whole number", float: "a number"}.get(parameter.type, "a value")
    return f"{noun} ({parameter.metavar})" if parameter.metavar not in ("", "NUMBER") else noun


# --- options ----------------------------------------------------------------------------------------------------------


def describe_unknown_option(flag: str, name: str) -> str:
    """Return the sentence for an option that the command does not have."""
    text = f"{name} has no option {flag}"
    other_commands = [command for command in COMMANDS if any(flag in option.flags for option in _list_options(command))]
    if other_commands:
        *first_commands, last_command = other_commands
        names = f"{', '.join(first_commands)} and {last_command} have" if first_commands else f"{last_command} has"
        return f"{text}, but {names} this option; {see_help('' if first_commands else last_command)}"
    options = _list_options(name)
    similar_words = _find_similar_flags(flag, options) or _find_similar_choices(flag, options)
    return f"{text}; did you mean {_join_or(similar_words)}?" if similar_words else f"{text}; {see_help(name)}"


def _list_options(name: str) -> list[Parameter]:
    return [each for each in parameters_of(COMMANDS[name]) if not (each.is_target or each.hidden)]


def _find_similar_flags(flag: str, options: Sequence[Parameter]) -> list[str]:
    """Return up to three flags that are similar to the word: by their beginning, their spelling or their last word.

    Dashes are left out, because dashes would make all flags similar. A last word that is a choice, as in
    --config-json, is left to `_find_similar_choices`.
    """
    flags: dict[str, str] = {}
    choices = _list_choices(options)
    for known_flag in (known_flag for parameter in options for known_flag in parameter.flags):
        name = known_flag.lstrip("-")
        flags[name] = known_flag
        last_word = name.rpartition("-")[2]
        if last_word not in choices:
            flags.setdefault(last_word, known_flag)
    word = flag.lstrip("-")
    similar_flags = [name for name in flags if word.startswith(f"{name}-") or (len(word) > 1 and name.startswith(word))]
    similar_flags = similar_flags or get_close_matches(word, flags, n=3, cutoff=_SIMILARITY)
    return list(dict.fromkeys(flags[name] for name in similar_flags))[:3]


def _find_similar_choices(flag: str, options: Sequence[Parameter]) -> list[str]:
    """Return a listed option whose value resembles an unknown flag: `-f json` for `--json` or `--josn`."""
    choices = _list_choices(options)
    return [choices[choice] for choice in get_close_matches(flag.lstrip("-"), choices, n=1, cutoff=_SIMILARITY)]


def _list_choices(options: Iterable[Parameter]) -> dict[str, str]:
    """Return each choice of an option with the words to type: `-f json`."""
    return {choice: f"{min(option.flags, key=len)} {choice}" for option in options for choice in option.choices}
