"""What a command has to say against its target: the reason of every exit 1."""

from __future__ import annotations

from enum import Enum

import msgspec


class Severity(str, Enum):
    """How bad: a note is told, a warning may be meant, an error is wrong."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One problem: the rule's name, one line, the target, the tensor and its section, and what to do."""

    rule: str
    severity: Severity
    message: str
    target: str
    fqn: str | None = None
    help: str | None = None
    section: str | None = None
