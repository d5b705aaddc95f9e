"""Parse command lines. This module parses common lines without Typer, and leaves all others and mistakes to Typer.

Both parsers are derived from the table of options (`requests.options`). Typer 0.29 imports pydantic on every run: 100
ms, twice the time to list a checkpoint. So `parse` reads lines of targets and fully spelled options, and leaves
everything else (a mistake, `-qv`, an abbreviation) to Typer. Tests compare both parsers for every option. A request for
help is answered by `help_page`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from statecli.cli.unknown_word import find_ambiguous_word, find_command
from statecli.requests.options import COMMANDS, Options
from statecli.requests.parameters import Parameter, parameters_of


def parse(words: Sequence[str]) -> Options | None:
    """Return the options of a command line, or None if Typer has to parse the line."""
    name = find_command(words)
    if not name or find_ambiguous_word(words) is not None:
        return None
    parameters = parameters_of(COMMANDS[name])
    values_by_field = _LineReader(parameters).read(words[name.count(" ") + 1 :])
    if values_by_field is None or any(each.is_required and each.field not in values_by_field for each in parameters):
        return None
    return COMMANDS[name](**values_by_field)


class _LineReader:
    """Reader of the words that follow the command on a command line."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._targets = iter([parameter for parameter in parameters if parameter.is_target])
        self._by_flag = {flag: parameter for parameter in parameters for flag in parameter.spellings}
        self._target: Parameter | None = None
        self._values_by_field: dict[str, Any] = {}

    def read(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Return the value of each given field, or None if a word is not clearly a target or an option."""
        remaining_words = iter(words)
        only_targets = False
        for word in remaining_words:
            if word == "--" and not only_targets:
                only_targets = True
            elif only_targets or not word.startswith("-") or word == "-" or word.startswith("-#"):
                if not self._take_target(word):
                    return None
            elif not self._take_option(word, remaining_words):
                return None
        return self._values_by_field

    def _take_target(self, word: str) -> bool:
        if self._target is None or not self._target.repeatable:
            self._target = next(self._targets, None)
        return self._target is not None and self._store(self._target, word)

    def _take_option(self, word: str, remaining_words: Iterator[str]) -> bool:
        """Take `--tree`, `--to meta` or `--to=meta`; return False for anything else."""
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        parameter = self._by_flag.get(flag)
        if parameter is None or (parameter.is_flag and equals):
            return False
        if parameter.is_flag:
            self._values_by_field[parameter.field] = True
            return True
        if not equals:
            value = next(remaining_words, "--")
        return (bool(equals) or value == "-" or not value.startswith("-")) and self._store(parameter, value)

    def _store(self, parameter: Parameter, word: str) -> bool:
        """Store the value of a word. Return False if its type is wrong, or if the value was already given."""
        try:
            value = parameter.type(word)
        except ValueError:
            return False
        if parameter.repeatable:
            self._values_by_field[parameter.field] = (*self._values_by_field.get(parameter.field, ()), value)
            return True
        return self._values_by_field.setdefault(parameter.field, value) is value
