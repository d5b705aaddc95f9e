"""Turn an error of Typer into one sentence, which names the mistake and the words to type."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any

from statecli.cli.unknown_word import describe_unknown_option, find_command, join_or, see_help
from statecli.core.errors import option
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import Parameter, parameters_of


def describe_mistake(mistake: Any, words: Sequence[str]) -> str:
    """Return the sentence for an error of Typer's parser. `words`: the command line without the name `statecli`."""
    name = find_command(words)
    describe = _DESCRIPTIONS.get(type(mistake).__name__)
    text = describe(mistake, name, words) if describe is not None and name else ""
    if text:
        return text
    message, question, suggestion = mistake.format_message().rstrip(".").partition(". Did you mean")
    return f"{message}; did you mean{suggestion}" if question else f"{message}; {see_help(name)}"


def _describe_missing_target(mistake: object, name: str, _: Sequence[str]) -> str:
    parameter = _find_parameter(mistake, name)
    help_text = parameter.help.rstrip(".")
    explanation = f": {help_text[:1].lower()}{help_text[1:]}" if help_text else ""
    return f"{name} needs {parameter.metavar}{explanation}; {see_help(name)}"


def _describe_missing_value(mistake: Any, name: str, _: Sequence[str]) -> str:
    flag = mistake.option_name
    parameter = next((each for each in parameters_of(COMMANDS[name]) if flag in each.spellings), None)
    if parameter is None or parameter.is_flag:
        return f"{option(flag)}: takes no value; {see_help(name)}"
    return f"{option(flag)}: needs {_describe_values(parameter)}; {see_help(name)}"


def _describe_wrong_value(mistake: object, name: str, words: Sequence[str]) -> str:
    parameter = _find_parameter(mistake, name)
    flag = next((flag for flag in parameter.spellings if flag in words), None)
    if flag is None:
        return f"{parameter.flags[0] if parameter.flags else parameter.metavar}: must be {_describe_values(parameter)}"
    value = words[words.index(flag) + 1] if flag in words[:-1] else None
    similar_choices = get_close_matches(value or "", parameter.choices, n=1)
    hint = f"did you mean {similar_choices[0]}?" if similar_choices else see_help(name)
    return f"{option(flag, value)}: must be {_describe_values(parameter)}; {hint}"


def _describe_values(parameter: Parameter) -> str:
    """Return the values that an option takes, in words: its choices, or a noun such as `a whole number (N)`."""
    if issubclass(parameter.type, Enum):
        return join_or(parameter.choices)
    noun = {int: "a whole number", float: "a number"}.get(parameter.type, "a value")
    return f"{noun} ({parameter.metavar})" if parameter.metavar not in ("", "NUMBER") else noun


def _find_parameter(mistake: Any, name: str) -> Parameter:
    return next(each for each in parameters_of(COMMANDS[name]) if each.field == mistake.param.name)


def _describe_extra_words(mistake: Any, name: str, words: Sequence[str]) -> str:
    start, _, word_and_end = mistake.message.partition("(s) (")
    if start != "Got unexpected extra argument":
        return ""
    targets = [parameter.metavar for parameter in parameters_of(COMMANDS[name]) if parameter.is_target]
    expected_text = f"takes only {' and '.join(targets)}" if targets else "takes no arguments"
    extra = word_and_end.rstrip(").")
    advice = see_help(name)
    if name == "inspect":
        advice = "to check several checkpoints, run: statecli audit TARGET..."
    elif name == "report" and extra in words:
        is_first = words[0] == name and not words[1].startswith("-")
        pair = shlex.join([words[1] if is_first else "TARGET", extra])
        advice = f"to compare two checkpoints, run: statecli diff {pair} -f html -o diff.html"
    return f"unexpected argument {extra}: {name} {expected_text}; {advice}"


_DESCRIPTIONS: dict[str, Callable[[Any, str, Sequence[str]], str]] = {
    "NoSuchOption": lambda mistake, name, _: describe_unknown_option(mistake.option_name, name),
    "MissingParameter": _describe_missing_target,
    "BadOptionUsage": _describe_missing_value,
    "BadParameter": _describe_wrong_value,
    "UsageError": _describe_extra_words,
}
