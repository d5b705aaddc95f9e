"""Parse command lines into the options of a command.

The parser is derived from the table of options (`requests.options`). Options and targets may be in any order; after
`--`, each word is a target. Short options may share a dash (`-qv`, `-qf json`). `mistakes` describes a wrong line. A
request for help is answered by `help_page`, before the table of options is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from statecli import cli
from statecli.cli.help_page import find_ambiguous_word
from statecli.core.early_flags import HELP_FLAGS
from statecli.core.errors import UsageError, option
from statecli.requests.options import COMMANDS, Options
from statecli.requests.parameters import Parameter, parameters_of


class HelpRequested(Exception):
    """Request for the help of a command among short options, as in `-qh`."""

    def __init__(self, command: str) -> None:
        super().__init__(command)
        self.command = command


def find_command(words: Sequence[str]) -> str:
    """Return the name of the command at the beginning of a command line, or "" if the first words are not a command."""
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), "")


def parse(words: Sequence[str]) -> Options:
    """Return the options of a command line. Raises UsageError for a mistake, and HelpRequested for `-qh`."""
    word = find_ambiguous_word(words)
    if word is not None:
        raise UsageError(f"{word}: a file has the name of this option; write ./{word}, or -- before the targets")
    name = find_command(words)
    if not name:
        raise UsageError(cli.mistakes.describe_unknown_command(words))
    values_by_field = _LineReader(name).read(words[name.count(" ") + 1 :])
    for parameter in parameters_of(COMMANDS[name]):
        if parameter.is_required and parameter.field not in values_by_field:
            raise UsageError(cli.mistakes.describe_missing_target(parameter, name))
    return COMMANDS[name](**values_by_field)


class _LineReader:
    """Reader of the words that follow the command on a command line."""

    def __init__(self, name: str) -> None:
        parameters = parameters_of(COMMANDS[name])
        self._name = name
        self._targets = iter([parameter for parameter in parameters if parameter.is_target])
        self._by_flag = {flag: parameter for parameter in parameters for flag in parameter.spellings}
        self._target: Parameter | None = None
        self._values_by_field: dict[str, Any] = {}

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the value of each given field. Raises UsageError for a mistake."""
        remaining_words = iter(words)
        for word in remaining_words:
            if word == "--":
                for target in remaining_words:
                    self._take_target(target)
            elif word.startswith("--"):
                flag, equals, value = word.partition("=")
                self._take_option(flag, value if equals else None, remaining_words)
            elif word.startswith("-") and word != "-" and not word.startswith("-#"):
                self._take_short_options(word[1:], remaining_words)
            else:
                self._take_target(word)
        return self._values_by_field

    def _take_target(self, word: str) -> None:
        if self._target is None or not self._target.repeatable:
            self._target = next(self._targets, None)
        if self._target is None:
            first = next(iter(self._values_by_field.values()), None)
            raise UsageError(cli.mistakes.describe_extra_word(word, self._name, first))
        self._store(self._target, word, self._target.metavar)

    def _take_short_options(self, letters: str, remaining_words: Iterator[str]) -> None:
        """Take `-q`, `-qv`, `-fjson` or `-qf json`."""
        while letters:
            flag, letters = f"-{letters[0]}", letters[1:]
            if flag in HELP_FLAGS:
                raise HelpRequested(self._name)
            parameter = self._by_flag.get(flag)
            if parameter is not None and not parameter.is_flag:
                self._take_option(flag, letters or None, remaining_words)
                return
            self._take_option(flag, None, remaining_words)

    def _take_option(self, flag: str, value: str | None, remaining_words: Iterator[str]) -> None:
        """Take `--tree`, `--to meta` or `--to=meta`; `value` is the text after the equals sign."""
        parameter = self._by_flag.get(flag)
        if parameter is None:
            raise UsageError(cli.mistakes.describe_unknown_option(flag, self._name))
        if parameter.is_flag:
            if value is not None:
                raise UsageError(f"{option(flag)}: takes no value; {cli.mistakes.see_help(self._name)}")
            self._values_by_field[parameter.field] = True
            return
        value = next(remaining_words, None) if value is None else value
        if value is None:
            raise UsageError(cli.mistakes.describe_missing_value(parameter, flag, self._name))
        self._store(parameter, value, option(flag, value))

    def _store(self, parameter: Parameter, word: str, option_text: str) -> None:
        """Store the value of a word. `option_text` names the option or the target in the error for a wrong value."""
        try:
            value = parameter.type(word)
        except ValueError as error:
            problem = cli.mistakes.describe_wrong_value(parameter, word, self._name)
            raise UsageError(f"{option_text}: {problem}") from error
        if parameter.repeatable:
            value = (*self._values_by_field.get(parameter.field, ()), value)
        self._values_by_field[parameter.field] = value
