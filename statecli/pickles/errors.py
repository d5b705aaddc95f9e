"""Errors of reading a pickle."""

from __future__ import annotations

from statecli.core.errors import MalformedError


class TruncatedPickle(MalformedError):
    """The bytes end before the pickle does."""


class TruncatedFrame(TruncatedPickle):
    """A frame ends after the last byte: CPython's C unpickler refuses the pickle, the Python unpickler does not."""


class MisframedPickle(MalformedError):
    """An opcode crosses the end of its frame, a frame begins inside another, or STOP comes before the frame's end.

    Unpicklers read different opcodes from these bytes. No pickler writes these bytes.
    """


class ComputedName(MalformedError):
    """The name of an import is another import (`posix.__name__`) or the result of a call, which may be any text."""


class OverBudget(MalformedError):
    """Reading the rest of the pickle would take too much time or memory."""
