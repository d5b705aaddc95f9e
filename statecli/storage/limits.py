"""How patiently, and how many at a time: environment variables, which workers inherit."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import msgspec

from statecli.core.errors import UsageError


class Settings(msgspec.Struct, frozen=True):
    """`timeout`: seconds without a byte. `retries`: how often a request is sent again. `connections` at a time."""

    timeout: float = 30.0
    retries: int = 4
    connections: int = 64


@cache
def settings() -> Settings:
    """From STATECLI_TIMEOUT, STATECLI_RETRIES and STATECLI_CONNECTIONS. Raises UsageError for what is no number."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        name = f"STATECLI_{field.name.upper()}"
        text = os.environ.get(name)
        if text:
            found[field.name] = _number(name, text, field.type)
    return Settings(**found)


def _number(name: str, text: str, kind: type[float] | type[int]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = kind(-1)
    may_be_0 = name.endswith("RETRIES")
    if not 0 <= value < 1e6 or (value == 0 and not may_be_0):
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name}={text}: must be {what} {'from 0 on' if may_be_0 else 'above 0'}, below 1,000,000")
    return value
