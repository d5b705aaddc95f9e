"""Errors of reading a pickle."""

from __future__ import annotations

from statecli.core.errors import MalformedError


class TruncatedPickle(MalformedError):
    """Error for bytes that end before the end of the pickle; `needed_bytes` is the length that the pickle states."""

    needed_bytes = 0


class ComputedName(MalformedError):
    """Error for an import whose name is computed, by another import (`posix.__name__`) or by a call."""


class OverBudget(MalformedError):
    """Error for a pickle whose rest would take too much time or memory to read."""
