"""Errors that statecli raises on purpose, each with one line for the user.

    StateError                 base class; exit status 2
    ├── UsageError             contradictory or unknown option, argument or name
    │   └── NothingMatched     no tensor left by the globs, the kind or the section
    │       └── FilteredOut    no tensor of one target left by the globs or the kind
    ├── UnreadableError        the file cannot be opened, or its format is not supported
    │   ├── PlaceUnreadable    nothing else in the same place can be read either
    │   ├── BarePickle         a pickle, but not written by torch.save
    │   └── MalformedError     a supported format with contradictory bytes
    │       ├── MissingShard   a file named by an index or by its number is missing
    │       ├── IndexMismatch  an index and its shards disagree about where a tensor is
    │       └── ChecksumMismatch  the bytes do not match the checksum in the container
    ├── OutputError            standard output cannot be written
    ├── ModelError             the user's model class could not be found, imported or built
    ├── EngineError            the engine of --executor does not answer, or its workers have another version
    └── MissingDependency      an optional package (torch, numpy) is not installed

`cli.leave` prints these errors; `api` rewrites option names to Python argument names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from statecli.core.state import Place


class StateError(Exception):
    """One line: the file and tensor, the problem, and how to fix the problem.

    `rule` is the rule of `audit` that reports this error, if any, and `help` the fix that the rule suggests.
    """

    rule: ClassVar[str | None] = None
    help: ClassVar[str | None] = None


class UsageError(StateError):
    """The command line contradicts itself or names something that does not exist."""


class NothingMatched(UsageError):
    """Filters left nothing to check; such a run never exits with status 0."""


class FilteredOut(NothingMatched):
    """Filters left nothing of one target; other targets may have tensors."""


class UnreadableError(StateError):
    """The target cannot be opened, or its format is not supported."""


class PlaceUnreadable(UnreadableError):
    """The whole place (a server, a bucket) cannot be read; report it once, not for every file."""


class BarePickle(UnreadableError):
    """The target is a pickle that torch.save did not write: only its imports can be reported."""


class MalformedError(UnreadableError):
    """The target has a supported format, but its bytes contradict each other."""


class MissingShard(MalformedError):
    """A file of a sharded checkpoint is missing."""

    rule = "missing-shard"
    help = "copy or download the missing file"


class IndexMismatch(MalformedError):
    """The index contradicts the shards about a tensor."""

    rule = "index-mismatch"
    help = "copy or download its files again, or write the index again: save_pretrained does"


class ChecksumMismatch(MalformedError):
    """The bytes of a record do not match their checksum. `place` is set if the record is a tensor's."""

    rule = "checksum-mismatch"
    help = "copy or download the file again"
    place: Place | None = None


class OutputError(StateError):
    """Standard output cannot be written."""


class ModelError(StateError):
    """A model class could not be found, imported, built or walked."""


class EngineError(StateError):
    """The engine of --executor does not answer, or refuses the work."""


class MissingDependency(StateError):
    """An optional package that the command needs is not installed."""
