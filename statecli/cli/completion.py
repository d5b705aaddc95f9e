"""Complete command lines, for the scripts of `statecli completion SHELL`.

A script calls `statecli __complete SHELL =CURRENT WORD...`. CURRENT is the word at the cursor, after an equals sign
because some shells drop empty words. Each WORD is a word between the program and CURRENT. The first line of the answer
is the kind (`CandidateKind`). The second is the number of characters before a file name (9 for `--output=`). A line for
each candidate follows: the word, a tab and its help. Commands, options and values come from the table of options. Each
press of Tab runs the completion. So the completion does not import torch, and runs no code of a `.py` file or
a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from statecli import core
from statecli.cli.help_table import GROUPS, HELP_OPTION, VERSION_OPTION, list_commands
from statecli.cli.parser import find_command
from statecli.core.lazy_pattern import compile_on_use
from statecli.requests.options import COMMANDS, NamedKind, Shell
from statecli.requests.parameters import Parameter, parameters_of

#: Seconds after which a completion that reads a file stops.
TIMEOUT_S = 3.0
#: Names of sections that need no quotes in any shell. Other names come from files and are not offered.
_SAFE_NAME = compile_on_use(r"[\w.:+,@/-]+\Z")

Candidates = Iterable[tuple[str, str]]


class CandidateKind(str, Enum):
    """Action of the shell's completion script: insert a candidate with or without a space, or complete file names."""

    WORDS = "words"
    STEMS = "stems"
    FILES = "files"


class Completion(NamedTuple):
    """Candidates for the word at the cursor, each with its help."""

    kind: CandidateKind = CandidateKind.WORDS
    candidates: tuple[tuple[str, str], ...] = ()
    file_start: int = 0


def answer(arguments: Sequence[str]) -> None:
    """Print the answer for a shell's script. Print nothing on an error, because it would disturb the user's prompt."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        shell, current, *words = arguments
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        sys.stdout.write(_format_answer(shell, current.removeprefix("="), words))
        sys.stdout.flush()


def _format_answer(shell: str, current: str, words: Sequence[str]) -> str:
    if shell == Shell.BASH.value:
        return _format_bash_answer(current, words)
    completion = complete([_unquote(word) for word in words], _unquote(current))
    return _join_lines(completion, completion.candidates)


def _format_bash_answer(fragment: str, words: Sequence[str]) -> str:
    """Return the answer for Bash, which splits words at `:` and `=`. A candidate continues the piece `fragment`."""
    *words, current = _join_words([*words, fragment])
    start = fragment if fragment.strip(":=") else ""
    typed_word = _unquote(current)
    completion = complete([_unquote(word) for word in words], typed_word)
    if completion.kind is CandidateKind.FILES and start != current:
        # List the files here, because Bash would look for a file `1` for the word `epoch=1`.
        completion = _list_files(typed_word, completion.file_start) or completion
    return _join_lines(
        completion, ((f"{start}{word[len(typed_word) :]}", text) for word, text in completion.candidates)
    )


def _list_files(typed_word: str, start: int) -> Completion | None:
    """Return the files whose names begin with the typed text and need no quotes. Return None if no file matches."""
    folder, name = os.path.split(typed_word[start:])
    if not name.strip(":="):
        return None
    with os.scandir(folder or os.curdir) as entries:
        names = [entry.name + "/" * entry.is_dir() for entry in entries if entry.name.startswith(name)]
    files = [
        f"{typed_word[: len(typed_word) - len(name)]}{each}"
        for each in names
        if _SAFE_NAME.match(each.replace("=", ""))
    ]
    is_stem = all(file.endswith("/") for file in files)
    return (
        Completion(CandidateKind.STEMS if is_stem else CandidateKind.WORDS, tuple((file, "") for file in files))
        if files
        else None
    )


def _join_lines(completion: Completion, candidates: Iterable[tuple[str, str]]) -> str:
    lines = (f"{word}\t{text}\n" for word, text in candidates)
    return f"{completion.kind.value}\n{completion.file_start}\n" + "".join(lines)


def _join_words(words: Sequence[str]) -> list[str]:
    """Join pieces that Bash split at `:` and `=`: `net.py`, `:`, `Net` become one word. Empty words stay separate."""
    joined_words: list[str] = []
    is_open = False
    for word in words:
        is_break = bool(word) and not word.strip(":=")
        if joined_words and (is_break or is_open) and word:
            joined_words[-1] += word
        else:
            joined_words.append(word)
        is_open = is_break
    return joined_words


def _unquote(word: str) -> str:
    """Return a word of a shell without quotes and backslashes. The last quote may be unclosed."""
    return re.sub(r"\\(.)|[\"']", lambda match: match[1] or "", word) if os.sep == "/" else word.strip("\"'")


def complete(words: Sequence[str], current: str) -> Completion:
    """Return the candidates for the word `current` after `words`. The caller has removed quotes from all words."""
    completion = _find_candidates(words, current)
    matching = (candidate for candidate in completion.candidates if candidate[0].startswith(current))
    return completion._replace(candidates=tuple(dict.fromkeys(matching)))


def _find_candidates(words: Sequence[str], current: str) -> Completion:
    if words[:1] == ["help"]:
        return _complete_command(words[1:])
    if name := find_command(words):
        return _complete_argument(name, words[name.count(" ") + 1 :], current)
    if not words and current.startswith("-"):
        return Completion(candidates=tuple((term.split(", ")[1], text) for term, text in (VERSION_OPTION, HELP_OPTION)))
    return _complete_command(words)


def _complete_command(words: Sequence[str]) -> Completion:
    group = " ".join(words)
    return Completion(candidates=tuple(list_commands(group)) if group in ("", *GROUPS) else ())


def _complete_argument(command: str, words: Sequence[str], current: str) -> Completion:
    """Complete an option, the value of an option, or a target."""
    parameters = parameters_of(COMMANDS[command])
    by_flag = {flag: parameter for parameter in parameters for flag in parameter.spellings}
    only_targets = "--" in words
    previous = by_flag.get(words[-1]) if words and not only_targets else None
    if previous is not None and not previous.is_flag:
        return _complete_value(command, previous, current)
    flag, equals, value = current.partition("=")
    if equals and not only_targets and flag.startswith("--") and flag in by_flag:
        completion = _complete_value(command, by_flag[flag], value)
        return completion._replace(
            candidates=tuple((f"{flag}={word}", text) for word, text in completion.candidates),
            file_start=len(f"{flag}=") + completion.file_start,
        )
    if current.startswith("-") and not only_targets:
        return Completion(candidates=tuple(_list_options(parameters, words)))
    targets = [parameter for parameter in parameters if parameter.is_target]
    count = len([*_drop_options(words, by_flag)])
    target = targets[count] if count < len(targets) else targets[-1] if targets and targets[-1].repeatable else None
    return _complete_value(command, target, current) if target else Completion()


def _list_options(parameters: Iterable[Parameter], words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the full spelling and the help of each option that may follow `words`."""
    for parameter in parameters:
        is_given = not parameter.repeatable and any(spelling in words for spelling in parameter.spellings)
        if not (parameter.is_target or parameter.hidden or is_given):
            yield parameter.flags[0], parameter.help
    yield HELP_OPTION[0].split(", ")[1], HELP_OPTION[1]


def _drop_options(words: Sequence[str], by_flag: dict[str, Parameter]) -> Iterator[str]:
    """Yield the targets among the words."""
    remaining_words = iter(words)
    for word in remaining_words:
        if word == "--":
            yield from remaining_words
        elif word in by_flag and not by_flag[word].is_flag:
            next(remaining_words, None)
        elif not word.startswith("-"):
            yield word


# --- values -----------------------------------------------------------------------------------------------------------


def _complete_value(command: str, parameter: Parameter, current: str) -> Completion:
    """Complete the value of an option, or a target."""
    if parameter.choices:
        return Completion(candidates=tuple((choice, "") for choice in parameter.choices))
    candidates = [(suggestion, "") for suggestion in parameter.suggestions]
    candidates += _list_rules(command) if parameter.names is NamedKind.RULE else ()
    candidates += _LISTERS[parameter.names](current) if parameter.names in _LISTERS else ()
    matching = tuple(candidate for candidate in candidates if candidate[0].startswith(current))
    if (parameter.reads_file or parameter.names is NamedKind.OUTPUT) and not (current and matching):
        return Completion(CandidateKind.FILES)
    form, equals, _ = current.partition("=")
    if equals and f"{form}=" in parameter.suggestions:
        return Completion(CandidateKind.FILES, file_start=len(f"{form}="))
    is_stem = bool(matching) and all(word.endswith(("=", ":")) for word, _ in matching)
    return Completion(CandidateKind.STEMS if is_stem else CandidateKind.WORDS, matching)


def _list_rules(command: str) -> Iterator[tuple[str, str]]:
    """Yield the rules and rule groups of a command. For the command `rules`, yield the rules of all commands."""
    from statecli.rules.dictionary import DICTIONARY, RULES

    if command == "rules":
        yield from ((rule.name, rule.summary) for rule in DICTIONARY.values())
        return
    rules = [rule for rule in DICTIONARY.values() if command in rule.commands] if command != "audit" else RULES
    yield from ((rule.name, rule.summary) for rule in rules)
    yield from ((rule.group, f"All rules of the group {rule.group}.") for rule in rules)


def _list_schema_commands(_: str) -> Candidates:
    from statecli.report.documents.schema_texts import read_schemas

    return ((name, "") for name in read_schemas())


def _list_parts_of_target(current: str) -> Candidates:
    """Return candidates for the class after `net.py:` or the section after `train.ckpt#`, or () for other words."""
    path, hash_sign, _ = current.rpartition("#")
    if hash_sign and os.path.exists(path):
        return ((f"{path}#{name}", "") for name in _list_sections(path))
    return _list_names_in_file(current, want_classes=True)


def _list_functions(current: str) -> Candidates:
    return _list_names_in_file(current, want_classes=False)


def _list_names_in_file(current: str, *, want_classes: bool) -> Iterator[tuple[str, str]]:
    """Yield targets such as `net.py:Net` for the names that a file defines, without importing the file."""
    path = current.partition(":")[0]
    file = path if path.endswith(".py") else f"{path.replace('.', os.sep)}.py"
    if (":" in current or path.endswith(".py")) and os.path.isfile(file):
        models = [model.name for model in core.python_names.list_model_classes(file)] if want_classes else ()
        names = models or (
            core.python_names.list_classes(file) if want_classes else core.python_names.list_factories(file)
        )
        yield from ((f"{path}:{name}", "") for name in names)


def _list_sections(path: str) -> Iterator[str]:
    """Yield the sections of a checkpoint and their parent sections, except for names that need quotes."""
    from statecli.targets import load

    for section in load.read_whole_checkpoint(path).sections:
        steps = section.split(".")
        for length in range(1, len(steps) + 1):
            name = ".".join(steps[:length])
            if _SAFE_NAME.match(name):
                yield name


#: Functions that list the candidates for a value, by the kind of thing it names. They take the word at the cursor.
_LISTERS: dict[NamedKind | None, Callable[[str], Candidates]] = {
    NamedKind.TARGET: _list_parts_of_target,
    NamedKind.FUNCTION: _list_functions,
    NamedKind.SCHEMA: _list_schema_commands,
}
