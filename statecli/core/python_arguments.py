"""The arguments of the Python function that runs, so that reasons in its result name them in place of options."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

#: Flags, each with its argument; empty for a command line.
ARGUMENTS: ContextVar[Mapping[str, str]] = ContextVar("arguments", default={})  # noqa: B039 - nobody changes it
