"""What can go wrong, each with the one line that a person reads.

    StateError                 exit 2; the base of all that statecli raises on purpose
    ├── UsageError             the command line asks for something that makes no sense
    │   └── NothingMatched     the globs, the kind or the section left no tensor
    │       └── FilteredOut    the globs or the kind left none of one target
    ├── UnreadableError        the file cannot be opened, or is not a checkpoint that statecli reads
    │   ├── PlaceUnreadable    nor can anything beside it
    │   ├── BarePickle         it is a pickle, and none that torch.save wrote
    │   └── MalformedError     it is one, and its bytes contradict themselves
    │       ├── MissingShard   a file that an index or its number names is not there
    │       ├── IndexMismatch  an index and its shards disagree on which tensor is where
    │       └── ChecksumMismatch  bytes are not those that the container recorded a checksum of
    ├── OutputError            standard output cannot be written
    ├── ModelError             the user's model class could not be found, imported or built
    ├── EngineError            the engine of --executor does not answer, or its workers are of another statecli
    └── MissingDependency      an optional package (torch, numpy) is needed and not installed

`cli.leave` is the only place that turns one into text, and `retold` puts it into the words of Python's arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from statecli.core.state import Place


class StateError(Exception):
    """One line that says what is wrong with which file and tensor, and what to do.

    `rule` is the rule of `audit` that this error breaks, where there is one, and `help` what it says to do.
    """

    rule: ClassVar[str | None] = None
    help: ClassVar[str | None] = None


class UsageError(StateError):
    """The command line contradicts itself or names something that does not exist."""


class NothingMatched(UsageError):
    """Filters left nothing to look at. "Nothing was checked" never ends 0."""


class FilteredOut(NothingMatched):
    """Filters left nothing of one target, of which there may be others."""


class UnreadableError(StateError):
    """The target cannot be opened or is not a format statecli reads."""


class PlaceUnreadable(UnreadableError):
    """Nor can anything else be read that lies in the same place: one line is enough for all of it."""


class BarePickle(UnreadableError):
    """The target is a pickle, and none that torch.save wrote: what loading it would run is all that can be told."""


class MalformedError(UnreadableError):
    """The target is of a known format, and says two things that cannot both be true."""


class MissingShard(MalformedError):
    """Of a checkpoint in several files not all are there."""

    rule = "missing-shard"
    help = "copy or download the missing file"


class IndexMismatch(MalformedError):
    """The index says of a tensor what the shards deny."""

    rule = "index-mismatch"
    help = "copy or download its files again, or write the index again: save_pretrained does"


class ChecksumMismatch(MalformedError):
    """The bytes of a record are not those that were written. `place` are these, where they are a tensor's."""

    rule = "checksum-mismatch"
    help = "copy or download the file again"
    place: Place | None = None


class OutputError(StateError):
    """Standard output cannot be written."""


class ModelError(StateError):
    """A model class could not be found, imported, built or walked."""


class EngineError(StateError):
    """What was to do the work does not answer, or refuses it."""


class MissingDependency(StateError):
    """A package that this one command needs is not installed."""
