"""Arguments of the Python API function that is running. Messages name them instead of command-line options."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

#: Argument by flag; empty on the command line.
PYTHON_ARGUMENTS: ContextVar[Mapping[str, str]] = ContextVar("arguments", default=MappingProxyType({}))
