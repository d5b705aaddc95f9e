"""What a command has to say against its target: the reason of every exit 1."""

from __future__ import annotations

from enum import Enum

import msgspec
from msgspec import UNSET, UnsetType

from statecli.core.state import Origin, Place


class Severity(str, Enum):
    """How bad: a note is told, a warning may be meant, an error is wrong."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 for a note, 2 for an error."""
        return list(Severity).index(self)


class Finding(msgspec.Struct, frozen=True, gc=False):
    """One problem: the rule's name, one line, the target, the tensor and its section, and what to do.

    `origin` is the source line that it is about, `place` the bytes, `about` what else has a name (`os.system`, which a
    pickle imports), `content` a digest of the bytes that were judged, "" where there are too many of them; each is left
    out where there is none.
    """

    rule: str
    severity: Severity
    message: str
    target: str
    fqn: str | None = None
    help: str | None = None
    section: str | None = None
    origin: Origin | UnsetType = UNSET
    place: Place | UnsetType = UNSET
    about: str | UnsetType = UNSET
    content: str | UnsetType = UNSET

    def summarize(self, message: str, target: str) -> Finding:
        """Return a finding of the same rule and severity that stands for several tensors of `target`."""
        return Finding(self.rule, self.severity, message, target)
