"""Describe a mistake on the command line in a sentence: the mistake, and the words to type instead."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any

from statecli.core.errors import UsageError, option
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import Parameter, parameters_of

#: Least similarity of a suggested option, from 0 to 1.
_SIMILARITY = 0.7
#: Commands of other programs -> the command that does this here.
_SIMILAR_COMMANDS = {
    **dict.fromkeys(("check", "scan", "validate", "lint"), "audit"),
    **dict.fromkeys(("cmp", "compare"), "diff"),
    **dict.fromkeys(("cat", "info", "list", "ls", "print", "show", "summary"), "inspect"),
    **dict.fromkeys(("checksum", "digest", "hash"), "lock"),
    "test": "verify",
}


#: Words in place of a command that Typer answers: the hidden commands, and groups of commands.
_OTHER_FIRST_WORDS = frozenset(["help", "version", *(name.partition(" ")[0] for name in COMMANDS)])


def refuse_unknown_word(words: Sequence[str]) -> None:
    """Raise UsageError for an unknown command or long option, without Typer.

    A word behind an option that takes a value may be the value.
    """
    if not words or words[0].startswith("-"):
        return
    if words[0] not in _OTHER_FIRST_WORDS:
        raise UsageError(_describe_unknown_command(words[0]))
    name = _find_command(words)
    parameters = {flag: each for each in parameters_of(COMMANDS[name]) for flag in each.spellings} if name else {}
    previous = None
    for word in itertools.takewhile(lambda word: word != "--", words):
        before, previous = previous, parameters.get(word)
        flag = word.partition("=")[0]
        is_value = before is not None and not before.is_flag
        if name and flag.startswith("--") and flag not in (*parameters, "--help") and not is_value:
            raise UsageError(_describe_unknown_option(flag, name))


def _find_command(words: Sequence[str]) -> str:
    """Return the name of the command at the beginning of a command line; "" without one."""
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), "")


def _describe_unknown_command(word: str) -> str:
    names = [name for name in COMMANDS if " " not in name]
    near = [_SIMILAR_COMMANDS[word]] if word in _SIMILAR_COMMANDS else get_close_matches(word, names)
    near = [name for name in near if name.startswith(word)] or near
    if not near:
        return f"No such command {word!r}; {_see_help('')}"
    return f"No such command {word!r}; did you mean {_join_or([repr(name) for name in near])}?"


def describe_mistake(mistake: Any, words: Sequence[str]) -> str:
    """Return the sentence for an error of Typer's parser; `words` is the command line without the program."""
    name = _find_command(words)
    describe = _DESCRIPTIONS.get(type(mistake).__name__)
    text = describe(mistake, name, words) if describe is not None and name else ""
    if text:
        return text
    message, question, suggestion = mistake.format_message().rstrip(".").partition(". Did you mean")
    return f"{message}; did you mean{suggestion}" if question else f"{message}; {_see_help(name)}"


def _join_or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _see_help(name: str) -> str:
    return f"see {' '.join(filter(None, ('statecli', name)))} --help"


def _describe_unknown_option(flag: str, name: str) -> str:
    text = f"{name} has no option {flag}"
    others = [other for other, options in COMMANDS.items() if flag in _list_flags(options)]
    if others:
        have = "has" if len(others) == 1 else "have"
        return f"{text}, but {', '.join(others)} {have}; {_see_help(others[0] if len(others) == 1 else '')}"
    near = _find_similar_flags(flag, COMMANDS[name]) or _find_similar_choices(flag, COMMANDS[name])
    return f"{text}; did you mean {_join_or(near)}?" if near else f"{text}; {_see_help(name)}"


def _find_similar_flags(flag: str, options: Any) -> list[str]:
    """Return up to three flags that begin with the word, or are similar in whole or in their last word.

    Old spellings count too. Compared without the dashes, because these would make all flags similar. A last word that
    is a choice, as in --config-json, is left to `_find_similar_choices`.
    """
    flags: dict[str, str] = {}
    choices = _list_choices(options)
    for parameter in parameters_of(options):
        for spelling in parameter.spellings if not parameter.hidden else ():
            name = spelling.lstrip("-")
            flags[name] = spelling if spelling in parameter.flags else max(parameter.flags, key=len)
            last_word = name.rpartition("-")[2]
            if last_word not in choices:
                flags.setdefault(last_word, flags[name])
    word = flag.lstrip("-")
    near = [name for name in flags if word.startswith(f"{name}-") or (len(word) > 1 and name.startswith(word))]
    near = near or get_close_matches(word, flags, n=3, cutoff=_SIMILARITY)
    return list(dict.fromkeys(flags[name] for name in near))[:3]


def _find_similar_choices(flag: str, options: Any) -> list[str]:
    """Return `-f json` for `--json` or `--josn`: the option that takes the word as a value."""
    choices = _list_choices(options)
    return [choices[choice] for choice in get_close_matches(flag.lstrip("-"), choices, n=1, cutoff=_SIMILARITY)]


def _list_choices(options: Any) -> dict[str, str]:
    """Return each choice of an option with the words to type: `-f json`."""
    return {
        choice: f"{min(parameter.flags, key=len)} {choice}"
        for parameter in parameters_of(options)
        if parameter.flags and not parameter.hidden and issubclass(parameter.type, Enum)
        for choice in parameter.choices
    }


def _list_flags(options: Any) -> list[str]:
    """Return the spellings listed in the help."""
    return [flag for parameter in parameters_of(options) if not parameter.hidden for flag in parameter.flags]


def _describe_missing_target(mistake: Any, name: str, _: Sequence[str]) -> str:
    parameter = _find_parameter(mistake, name)
    help_text = (parameter.help or "").rstrip(".")
    explained = f": {help_text[:1].lower()}{help_text[1:]}" if help_text else ""
    return f"{name} needs {parameter.metavar}{explained}; {_see_help(name)}"


def _describe_missing_value(mistake: Any, name: str, _: Sequence[str]) -> str:
    flag = mistake.option_name
    parameter = next((each for each in parameters_of(COMMANDS[name]) if flag in each.spellings), None)
    if parameter is None or parameter.is_flag:
        return f"{option(flag)}: takes no value; {_see_help(name)}"
    return f"{option(flag)}: needs {_describe_values(parameter)}; {_see_help(name)}"


def _describe_wrong_value(mistake: Any, name: str, words: Sequence[str]) -> str:
    parameter = _find_parameter(mistake, name)
    flag = next((flag for flag in parameter.spellings if flag in words), None)
    if flag is None:
        return f"{parameter.flags[0] if parameter.flags else parameter.metavar}: must be {_describe_values(parameter)}"
    value = words[words.index(flag) + 1] if flag in words[:-1] else None
    near = get_close_matches(value or "", parameter.choices, n=1)
    hint = f"did you mean {near[0]}?" if near else _see_help(name)
    return f"{option(flag, value)}: must be {_describe_values(parameter)}; {hint}"


def _describe_values(parameter: Parameter) -> str:
    """Return `a whole number (N)`, the choices, or the placeholder of the help."""
    if issubclass(parameter.type, Enum):
        return _join_or(parameter.choices)
    noun = {int: "a whole number", float: "a number"}.get(parameter.type, "a value")
    return f"{noun} ({parameter.metavar})" if parameter.metavar not in (None, "NUMBER") else noun


def _find_parameter(mistake: Any, name: str) -> Parameter:
    return next(each for each in parameters_of(COMMANDS[name]) if each.field == mistake.param.name)


def _describe_extra_words(mistake: Any, name: str, words: Sequence[str]) -> str:
    start, _, rest = mistake.message.partition("(s) (")
    if start != "Got unexpected extra argument":
        return ""
    targets = [parameter.metavar or "" for parameter in parameters_of(COMMANDS[name]) if parameter.is_target]
    takes = f"takes only {' and '.join(targets)}" if targets else "takes no arguments"
    extra = rest.rstrip(").")
    advice = _see_help(name)
    if name == "inspect":
        advice = "to check several checkpoints, run: statecli audit TARGET..."
    elif name == "report" and extra in words:
        is_first = words[0] == name and not words[1].startswith("-")
        pair = shlex.join([words[1] if is_first else "TARGET", extra])
        advice = f"to compare two checkpoints, run: statecli diff {pair} -f html -o diff.html"
    return f"unexpected argument {extra}: {name} {takes}; {advice}"


_DESCRIPTIONS: dict[str, Callable[[Any, str, Sequence[str]], str]] = {
    "NoSuchOption": lambda mistake, name, _: _describe_unknown_option(mistake.option_name, name),
    "MissingParameter": _describe_missing_target,
    "BadOptionUsage": _describe_missing_value,
    "BadParameter": _describe_wrong_value,
    "UsageError": _describe_extra_words,
}
