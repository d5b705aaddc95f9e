"""Parse command lines: everyday ones without Typer, all others, mistakes and help with it.

Both parsers are made from the one table of options (`requests.options`). Typer 0.29 imports pydantic on every run:
100 ms, twice what listing a checkpoint takes. So `parse` reads a line that is nothing but a command's targets and its
options in full spelling, and leaves whatever else there is (help, a mistake, `-qv`, an abbreviation) to Typer, which
alone explains and complains. Tests compare the two for every option.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from statecli.requests.options import COMMANDS, Options
from statecli.requests.parameters import Parameter, parameters_of


def parse(words: Sequence[str]) -> Options | None:
    """Return the options of a command line; None if Typer has to parse the line."""
    name, rest = _split_command(words)
    if name is None or ambiguous_word(words) is not None:
        return None
    parameters = parameters_of(COMMANDS[name])
    given = _Words(parameters).read(rest)
    if given is None or any(_is_missing(parameter, given) for parameter in parameters):
        return None
    return COMMANDS[name](**given)


def ambiguous_word(words: Sequence[str]) -> str | None:
    """Return the first word that reads as an option and is a file here: a glob of the shell puts both on a line.

    Behind `--` there are no options. A file `-o.pt` next to others would have the audit of them written to `.pt`.
    """
    options = itertools.takewhile(lambda word: word != "--", words)
    return next((word for word in options if word.startswith("-") and word != "-" and os.path.lexists(word)), None)


def _split_command(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    for length in (1, 2):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    return None, words


def _is_missing(parameter: Parameter, given: Mapping[str, Any]) -> bool:
    return parameter.default is msgspec.NODEFAULT and parameter.field not in given


class _Words:
    """The words of one line, taken one after the other."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._targets = iter([parameter for parameter in parameters if parameter.is_target])
        self._by_flag = {flag: parameter for parameter in parameters for flag in parameter.flags}
        self._target: Parameter | None = None
        self._given: dict[str, Any] = {}

    def read(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Return the value of each field that is given; None for a word that is not plainly a target or an option."""
        rest = iter(words)
        only_targets = False
        for word in rest:
            if word == "--" and not only_targets:
                only_targets = True
            elif only_targets or not word.startswith("-"):
                if not self._take_target(word):
                    return None
            elif not self._take_option(word, rest):
                return None
        return self._given

    def _take_target(self, word: str) -> bool:
        if self._target is None or not self._target.repeatable:
            self._target = next(self._targets, None)
        return self._target is not None and self._keep(self._target, word)

    def _take_option(self, word: str, rest: Iterator[str]) -> bool:
        """Take `--tree`, `--to meta` or `--to=meta`; return False for anything else."""
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        parameter = self._by_flag.get(flag)
        if parameter is None or (parameter.is_flag and equals):
            return False
        if parameter.is_flag:
            self._given[parameter.field] = True
            return True
        if not equals:
            value = next(rest, "-")
        return (bool(equals) or not value.startswith("-")) and self._keep(parameter, value)

    def _keep(self, parameter: Parameter, word: str) -> bool:
        """Keep the value of a word; return False for a word that stands for none, or a second value."""
        try:
            value = parameter.convert(word)
        except ValueError:
            return False
        if parameter.repeatable:
            self._given[parameter.field] = (*self._given.get(parameter.field, ()), value)
            return True
        return self._given.setdefault(parameter.field, value) is value
