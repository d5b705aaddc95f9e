"""Finding: a problem reported by a command about its target, and a reason for exit status 1."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from statecli.core.model_state import Oddity, Origin, Place

#: Name of the rule about harmful functions that loading a file imports or calls.
UNSAFE_GLOBAL = "unsafe-global"


class Severity(str, Enum):
    """Severity of a finding: a note is informational, a warning may be intentional, an error is wrong."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Return 0 for a note, 1 for a warning, 2 for an error."""
        return list(Severity).index(self)

    def is_at_least(self, other: Severity) -> bool:
        """Return True if this severity is `other` or higher."""
        return self.rank >= other.rank


class Consequence(msgspec.Struct, frozen=True, gc=False):
    """Consequence of a problem. Reports join consequences that differ only in `operators` or `lines`.

    Attributes:
        text: The consequence without the operators and the lines.
        operators: Operators of torch that raise the error.
        file: File with the lines.
        lines: Lines that call the operators.
        of_worst: Whether reports show the consequence only for the worst tensors of a problem.
    """

    text: str
    operators: tuple[str, ...] = ()
    file: str = ""
    lines: tuple[int, ...] = ()
    of_worst: bool = False

    @property
    def message(self) -> str:
        """The consequence as text, such as `on cpu while x is on cuda:0, in addmm at net.py:16, 18`."""
        operators = f", in {', '.join(self.operators)}" if self.operators else ""
        return f"{self.text}{operators}" + (f" at {self.file}:{', '.join(map(str, self.lines))}" if self.lines else "")


class Wording(msgspec.Struct, frozen=True, gc=False):
    """Parts of a message, from which reports build a text about several findings.

    Attributes:
        text: The message without the name at its start.
        name: Name of the tensor at the start of the message; None if the message does not start with a name.
        owner: Class or options in a heading of several findings, see `Rule.heading`.
        short: Text below such a heading, without the words of the heading; None for `text`.
        consequence: The consequence that the finding adds to another problem of the tensor; None for `text`.
        assigned_at: Line that assigns the tensor, at the end of the message.
        has_no_path: Whether forward uses the parameter, or may use it, but no differentiable path leads to the output.
        file_variable: The variable of a file that holds the tensor; None for other tensors.
    """

    text: str
    name: str | None = None
    owner: str | None = None
    short: str | None = None
    consequence: Consequence | None = None
    assigned_at: str | None = None
    has_no_path: bool = False
    file_variable: str | None = None

    @property
    def message(self) -> str:
        """The message of a single finding."""
        return self._add_name(self.text) + (f"; assigned at {self.assigned_at}" if self.assigned_at else "")

    @property
    def short_message(self) -> str:
        """The message below a heading of several findings."""
        return self._add_name(self.text if self.short is None else self.short)

    def _add_name(self, text: str) -> str:
        return text if self.name is None else f"{self.name}: {text}"

    def append(self, text: str) -> Wording:
        """Return the wording with further text at the end of the message."""
        return replace(self, text=self.text + text, short=None if self.short is None else self.short + text)


class Finding(msgspec.Struct, frozen=True, gc=False):
    """One finding of a rule.

    Attributes:
        rule: Name of the rule.
        severity: Severity of this finding.
        message: The problem in one line.
        target: Path, URL or spec of the target.
        fqn: Name of the tensor; None for a finding about the whole target.
        help: The fix: code to paste, or an instruction.
        section: Section of the tensor.
        origin: Source line of a model class; omitted if unknown.
        place: Bytes in a file; omitted if unknown.
        about: Another name, for example `os.system` imported by a pickle; omitted if there is none.
        content: Digest of the checked bytes, "" if there are too many; omitted if there are none.
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

    @property
    def wording(self) -> Wording:
        """Parts of the message. If the parts are unknown, the whole message is the only part."""
        return Wording(self.message)

    def reword(self, wording: Wording) -> WordedFinding:
        """Return the finding with the message made of these parts."""
        values = {name: getattr(self, name) for name in Finding.__struct_fields__}
        return WordedFinding(**values | {"message": wording.message}, wording=wording)

    def merge(
        self,
        rule: str,
        severity: Severity,
        message: str,
        *,
        fqn: str | None,
        help: str | None,
        origin: Origin | UnsetType,
        about: str | UnsetType,
    ) -> Finding:
        """Return one finding for this finding and others with the same cause. Keep this finding's target and place."""
        return Finding(
            rule, severity, message, self.target, fqn, help, self.section, origin, self.place, about, self.content
        )

    def strip_line(self) -> str:
        """Return the help without the source line of `origin`, because reports show this line next to the finding."""
        line = f"{self.origin.file}:{self.origin.line}" if self.origin is not UNSET else ""
        help = self.help or ""
        return help.removeprefix(f"{line}: ").removesuffix(f"assigned at {line}").removesuffix("; ") if line else help

    def summarize(self, message: str, target: str) -> Finding:
        """Return a finding of the same rule and severity for several tensors of `target`."""
        return Finding(self.rule, self.severity, message, target)


class WordedFinding(Finding, frozen=True, gc=False, kw_only=True):
    """A finding with the parts of its message. The JSON documents do not contain these parts."""

    wording: Wording

    def strip_wording(self) -> Finding:
        """Return the finding without the parts of its message."""
        return Finding(*(getattr(self, name) for name in Finding.__struct_fields__))


def select_unreported(oddities: Iterable[Oddity], findings: Iterable[Finding]) -> list[Oddity]:
    """Return the oddities that no finding reports. A finding reports an oddity if its rule has the oddity's name."""
    reported = {(finding.rule, finding.fqn) for finding in findings}
    return [oddity for oddity in oddities if (oddity.name, oddity.fqn) not in reported]
