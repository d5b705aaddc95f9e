"""Errors of reading a pickle."""

from __future__ import annotations

from statecli.core.errors import MalformedError


class TruncatedPickle(MalformedError):
    """The bytes end before the pickle does."""


class ComputedName(MalformedError):
    """The name of an import is another import (`posix.__name__`) or the result of a call, which may be any text."""


class OverBudget(MalformedError):
    """Reading the rest of the pickle would take too much time or memory."""
