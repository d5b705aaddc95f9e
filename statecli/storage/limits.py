"""Limits of requests (timeout, retries, connections) from environment variables. Workers inherit these variables."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from statecli.core.errors import UsageError
from statecli.storage import lifetime


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits of requests to servers.

    Attributes:
        timeout: Time in seconds without a byte after which a request fails.
        retries: Number of times that a failed request is sent again.
        connections: Maximum number of simultaneous connections.
    """

    timeout: float = 30.0
    retries: int = 4
    connections: int = 64


def settings() -> RequestLimits:
    """Return the request limits of this command. Raises UsageError for a variable that is not a number."""
    return lifetime.for_command(_read_environment)


def _read_environment() -> RequestLimits:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(RequestLimits):
        name = f"STATECLI_{field.name.upper()}"
        text = os.environ.get(name)
        if text:
            values[field.name] = _parse_number(name, text, field.type)
    return RequestLimits(**values)


def _parse_number(name: str, text: str, kind: type[float] | type[int]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = kind(-1)
    may_be_0 = name.endswith("RETRIES")
    if not 0 <= value < 1e6 or (value == 0 and not may_be_0):
        kind_text = "a whole number" if kind is int else "a number"
        raise UsageError(
            f"{name}={text}: must be {kind_text} {'of 0 or more' if may_be_0 else 'above 0'} and below 1,000,000"
        )
    return value
