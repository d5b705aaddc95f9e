"""`-f gitlab`: what GitLab calls a Code Quality report, one issue a line.

A note is `info`, a warning `minor`, an error `major`; what could not be read is a `blocker`, so that it never looks
clean. What is accepted is left out. `-q` leaves nothing out: it is read by programs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from statecli.core.escaping import escape, escape_sentence
from statecli.core.finding import Finding, Severity
from statecli.core.json_text import encode_json
from statecli.core.output_rules import CANNOT_READ
from statecli.report import Report, scope_notes
from statecli.targets.location import Located, file_of, fingerprinted, of

if TYPE_CHECKING:
    from statecli.render import Look, Sink

SEVERITIES = {Severity.NOTE: "info", Severity.WARNING: "minor", Severity.ERROR: "major"}


class _Issue(msgspec.Struct, frozen=True):
    description: str
    check_name: str
    fingerprint: str
    severity: str
    location: dict[str, str | dict[str, int]]


def write(report: Report, sink: Sink, look: Look) -> None:  # noqa: ARG001  # every output has the same signature
    before = b"["
    for issue in _issues(report):
        sink.utf8(before + encode_json(issue))
        before = b",\n "
    sink.utf8(b"]\n" if before != b"[" else b"[]\n")


def _issues(report: Report) -> Iterator[_Issue]:
    troubles = (one for one in report.troubles if one.severity is Severity.ERROR)
    unread = [CANNOT_READ.finding(one.message, target=one.target) for one in troubles]
    for finding, fingerprint, which in fingerprinted(unread):
        yield _issue(finding, _unique(fingerprint, which), "blocker", Located(file_of(finding.target)))
    for finding, fingerprint, which in fingerprinted(report.described_findings()):
        yield _issue(finding, _unique(fingerprint, which), SEVERITIES[finding.severity], of(finding))
    for finding, fingerprint, which in fingerprinted(scope_notes(report)):
        yield _issue(finding, _unique(fingerprint, which), SEVERITIES[finding.severity], of(finding))


def _issue(finding: Finding, fingerprint: str, severity: str, where: Located) -> _Issue:
    path = escape(where.path).replace(os.sep, "/").removeprefix("./")
    # A checkpoint has no lines, and GitLab drops an issue without one.
    location: dict[str, str | dict[str, int]] = {"path": path, "lines": {"begin": max(1, where.line or 1)}}
    help = f" ({escape_sentence(finding.help)})" if finding.help else ""
    return _Issue(escape_sentence(finding.message) + help, finding.rule, fingerprint, severity, location)


def _unique(fingerprint: str, which: int) -> str:
    """GitLab shows one issue a fingerprint."""
    import hashlib  # loads OpenSSL, 6 ms

    if which == 1:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}:{which}".encode()).hexdigest()[: len(fingerprint)]
