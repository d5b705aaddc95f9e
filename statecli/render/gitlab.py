"""`-f gitlab`: GitLab's Code Quality report. It has an issue for each problem, on a line of its own.

A note is `info`, a warning `minor`, an error `major`; an unreadable target is a `blocker`, so that the target never
looks clean. Accepted findings are left out. `-q` leaves nothing else out, because programs read this output.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from statecli.core.escaping import escape_path, escape_sentence
from statecli.core.finding import Finding, Severity
from statecli.core.json_text import encode_json_lines
from statecli.core.output_rules import CANNOT_READ
from statecli.core.units import format_fix_in_line
from statecli.render import RenderOptions, Sink
from statecli.report import Report, build_scope_notes, label_help
from statecli.targets.location import locate, number_fingerprints

SEVERITIES = {Severity.NOTE: "info", Severity.WARNING: "minor", Severity.ERROR: "major"}


class _Issue(msgspec.Struct, frozen=True):
    description: str
    check_name: str
    fingerprint: str
    severity: str
    location: dict[str, str | dict[str, int]]


def write(report: Report, sink: Sink, options: RenderOptions) -> None:  # noqa: ARG001  # every output has the same signature
    issues = list(_build_issues(report))
    sink.utf8(b"[" + (encode_json_lines(issues, b",\n ") if issues else b"") + b"]\n")


def _build_issues(report: Report) -> Iterator[_Issue]:
    findings = [problem.merge_findings() for problem in report.list_problems()]
    errors = [trouble for trouble in report.troubles if trouble.severity is Severity.ERROR]
    troubles = (trouble for trouble in errors if not any(map(trouble.is_reported_by, findings)))
    unreadable = [CANNOT_READ.finding(trouble.message, target=trouble.target) for trouble in troubles]
    for group in (unreadable, findings, build_scope_notes(report)):
        for finding, fingerprint, number in number_fingerprints(group):
            is_unreadable = group is unreadable or any(trouble.is_reported_by(finding) for trouble in errors)
            severity = "blocker" if is_unreadable else SEVERITIES[finding.severity]
            yield _build_issue(finding, _make_unique(fingerprint, number), severity)


def _build_issue(finding: Finding, fingerprint: str, severity: str) -> _Issue:
    location = locate(finding)
    path = escape_path(location.path).replace(os.sep, "/").removeprefix("./")
    # Line 1 for a checkpoint, because GitLab drops an issue without a line.
    json_location: dict[str, str | dict[str, int]] = {"path": path, "lines": {"begin": max(1, location.line or 1)}}
    help = f" ({escape_sentence(label_help(format_fix_in_line(finding.help)))})" if finding.help else ""
    return _Issue(escape_sentence(finding.message) + help, finding.rule, fingerprint, severity, json_location)


def _make_unique(fingerprint: str, number: int) -> str:
    """Return a fingerprint that differs for each number, because GitLab shows one issue for each fingerprint."""
    import hashlib  # hashlib loads OpenSSL, 6 ms

    if number == 1:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}:{number}".encode()).hexdigest()[: len(fingerprint)]
