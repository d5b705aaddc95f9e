"""Errors raised by statecli on purpose, each with one line for the user.

    StateError                 base class; exit status 2
    ├── UsageError             contradictory or unknown option, argument or name
    │   └── NothingMatched     no tensor left by the globs, the kind or the section
    │       └── FilteredOut    no tensor of one target left by the globs or the kind
    ├── UnreadableError        the file cannot be opened, or its format is not supported
    │   ├── PlaceUnreadable    nothing else in the same place can be read either
    │   ├── BarePickle         a pickle, but not written by torch.save
    │   └── MalformedError     a supported format with contradictory bytes
    │       ├── MissingShard   a file named by an index or by its number is missing
    │       ├── IndexMismatch  an index and its shards disagree about the place of a tensor
    │       └── ChecksumMismatch  the bytes do not match the checksum in the container
    ├── OutputError            standard output cannot be written
    ├── ModelError             the user's model class could not be found, imported or built
    ├── EngineError            the engine of --executor does not answer, or its workers have another version
    └── MissingDependency      an optional package (torch, numpy) is not installed

`cli.command_runner` prints these errors; `api` raises them with Python arguments in place of options (`option`).
"""

from __future__ import annotations

from statecli import core
from statecli.core.lazy_pattern import compile_on_use

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence
    from typing import ClassVar

    from statecli.core.model_state import Place


class StateError(Exception):
    """Error with a message of one line: the file and tensor, the problem, and how to fix the problem.

    `rule` is the rule of `audit` that reports this error, or None; `help` is the fix that the rule suggests. `choices`
    are words to type, mentioned at the end of the message; on the command line each has its own line. `advice` follows
    the choices.
    """

    rule: ClassVar[str | None] = None
    help: ClassVar[str | None] = None

    def __init__(self, message: str = "", *, choices: Sequence[str] = (), advice: str | None = None) -> None:
        super().__init__(message)
        self.choices = tuple(choices)
        self.advice = advice

    def __str__(self) -> str:
        message = self._format_with_choices()
        advice = self.advice and spell_options(self.advice)
        return (" " if message.endswith(("?", ":")) else "; ").join(filter(None, [message, advice]))

    def _format_with_choices(self) -> str:
        further_count = len(self.choices) - MAX_CHOICES_IN_SENTENCE
        choices_text = ", ".join(self.choices[:MAX_CHOICES_IN_SENTENCE]) + (
            f" or one of {further_count} more" if further_count > 0 else ""
        )
        return f"{self.describe()} {choices_text}" if self.choices else self.describe()

    @property
    def message(self) -> str:
        """The message without the list of choices and the advice. Options in the message are marked (see `option`)."""
        return super().__str__()

    def describe(self) -> str:
        """Return the message without choices and advice, and spell its options for the command line or for Python."""
        return spell_options(self.message)

    def use_arguments(self, arguments: Mapping[str, str]) -> None:
        """Spell the message's options as Python arguments. `arguments` maps flags to argument names."""
        self.args = (spell_options(self.message, arguments),)
        self.advice = self.advice and spell_options(self.advice, arguments)

    def list_lines(self) -> list[str]:
        """Return the lines to print: the message, one line for each of several choices, and the advice."""
        if len(self.choices) < 2:
            return [str(self)]
        further_count = len(self.choices) - MAX_CHOICES_IN_LIST
        further_lines = [f"or one of {further_count} more"] if further_count > 0 else []
        choice_lines = [f"  {choice}" for choice in (*self.choices[:MAX_CHOICES_IN_LIST], *further_lines)]
        return [self.describe(), *choice_lines, *([spell_options(self.advice)] if self.advice else [])]


#: Beginning of a message about a truncated file.
TRUNCATED = "file is truncated"


def strip_copy_advice(message: str) -> str:
    """Return an error's message without the advice to copy the file again, which the finding's help repeats."""
    return message.removesuffix("; copy or download the file again")


#: Largest number of choices in a sentence, and in a list.
MAX_CHOICES_IN_SENTENCE = 5
MAX_CHOICES_IN_LIST = 20
#: Marks around an option in the message of an error: its flag, its value on the command line, its value in Python. They
#: are noncharacters of Unicode, which no readable text contains.
_BEGIN, _SEPARATOR, _END = _MARKS = "\ufdd0", "\ufdd1", "\ufdd2"
_OPTION = compile_on_use("([^%s]*)".join([_BEGIN, _SEPARATOR, _SEPARATOR, _END]) % (("".join(_MARKS),) * 3))
_ESCAPED_MARKS = {ord(mark): ascii(mark)[1:-1] for mark in _MARKS}


def option(flag: str, value: object = None, *, quoted: bool = False) -> str:
    """Mark an option in a message, so that a `StateError` can spell the option for the command line or for Python.

    The error writes the option as `--device gpu` for the command line and as `device='gpu'` for Python.

    Args:
        flag: A spelling of the command line: "--device", "-i".
        value: A text or a number; None to name the option alone.
        quoted: True to put a text in quotes on the command line too.
    """
    if value is None:
        on_line = in_python = ""
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value).translate(_ESCAPED_MARKS)
        literal = repr(value) if isinstance(value, str) else text
        on_line, in_python = f" {literal if quoted else text}", f"={literal}"
    return f"{_BEGIN}{flag}{_SEPARATOR}{on_line}{_SEPARATOR}{in_python}{_END}"


def spell_options(text: str, arguments: Mapping[str, str] | None = None) -> str:
    """Return a text with its marked options spelled for Python or for the command line.

    `arguments` maps flags to Python arguments; None takes those of the running Python function. Other options are
    spelled for the command line.
    """
    if _BEGIN not in text:
        return text
    names = core.python_arguments.PYTHON_ARGUMENTS.get() if arguments is None else arguments

    def spell(match: re.Match[str]) -> str:
        flag, on_line, in_python = match.groups()
        return names[flag] + in_python if flag in names else flag + on_line

    return _OPTION.sub(spell, text)


class UsageError(StateError):
    """The command line contradicts itself or names something nonexistent."""


class NothingMatched(UsageError):
    """Filters left nothing to check; the run never exits with status 0."""


class FilteredOut(NothingMatched):
    """The filters removed all tensors of one target; other targets may still have tensors."""


class UnreadableError(StateError):
    """The target cannot be opened, or its format is not supported."""


class PlaceUnreadable(UnreadableError):
    """The whole server or bucket cannot be read, so that one report of this error is enough for all its files."""


class BarePickle(UnreadableError):
    """The target is a pickle that torch.save did not write, so only its imports can be reported."""


class MalformedError(UnreadableError):
    """The target has a supported format, but its bytes contradict each other."""


class MissingShard(MalformedError):
    """A file of a sharded checkpoint is missing."""

    rule = "missing-shard"
    help = "copy or download the missing file"


class IndexMismatch(MalformedError):
    """The index and the shards disagree about a tensor."""

    rule = "index-mismatch"
    help = "copy or download the files again, or rewrite the index with save_pretrained"


class ChecksumMismatch(MalformedError):
    """The bytes of a record do not match their checksum; `difference` has both checksums.

    `place` is set if the record belongs to a tensor.
    """

    rule = "checksum-mismatch"
    help = "copy or download the file again"

    def __init__(self, message: str = "", *, difference: str = "", place: Place | None = None) -> None:
        super().__init__(message)
        self.difference, self.place = difference, place


class OutputError(StateError):
    """Standard output cannot be written."""


class ModelError(StateError):
    """A model class could not be found, imported or built, or its tensors could not be listed."""


class EngineError(StateError):
    """The engine of --executor does not answer, or refuses the work."""


class MissingDependency(StateError):
    """An optional package needed by the command is not installed."""
