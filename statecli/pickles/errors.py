"""Errors of reading a pickle."""

from __future__ import annotations

from statecli.core.errors import MalformedError


class TruncatedPickle(MalformedError):
    """Error for bytes that end before the end of the pickle; `needed_bytes` is the length that the pickle states."""

    needed_bytes = 0


class ComputedName(MalformedError):
    """Error for an import with a computed name: another import (`posix.__name__`) or a call computes the name."""


class OverBudget(MalformedError):
    """Error for a pickle whose rest would take too much time or memory to read."""
