"""JSON document of `audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from statecli.commands.audit.result import Audit
from statecli.core.finding import Finding, Severity
from statecli.core.run_scope import Configuration, NotChecked
from statecli.core.version import __version__
from statecli.report import Problem
from statecli.report.documents.shared import (
    AcceptedRow,
    ProblemRow,
    build_accepted_rows,
    build_problem_row,
    strip_wordings,
)
from statecli.targets.target_result import Skipped, TargetStatus


class AuditSummary(msgspec.Struct, frozen=True):
    """Numbers of targets by status, and of findings by severity. Accepted findings are counted separately."""

    audited: int
    failed: int
    skipped: int
    error: int
    warning: int
    note: int
    accepted: int


class TargetRow(msgspec.Struct, frozen=True):
    """A target: its status, the reason for the status, and the number and size of its tensors."""

    target: str
    status: TargetStatus
    reason: str | None
    format: str | None
    tensors: int
    bytes: int


class AuditDocument(msgspec.Struct, frozen=True):
    """`statecli audit -f json`. Consumers ignore keys they do not know.

    `passed` is true for exit status 0: no finding has the severity of `fail_on` or higher, and no target failed.
    `notes` are printed on standard error too: notes about the whole run, and fixed accepted findings. `verdict` is the
    last line of the text output; `not_checked` lists files and tensors that no rule checked.
    """

    schema: str
    statecli: str
    passed: bool
    fail_on: Severity
    summary: AuditSummary
    targets: tuple[TargetRow, ...]
    findings: tuple[Finding, ...]
    ran: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    accepted: tuple[AcceptedRow, ...] = ()
    notes: tuple[Finding, ...] = ()
    verdict: str = ""
    not_checked: tuple[NotChecked, ...] = ()
    configuration: Configuration = Configuration()
    problems: tuple[ProblemRow, ...] = ()


def build_audit_document(audit: Audit, problems: Iterable[Problem], verdict: str) -> AuditDocument:
    """Return the document of an audit."""
    counts = Counter(finding.severity for finding in audit.findings)
    statuses = Counter(target.status for target in audit.targets)
    accepted_rows = build_accepted_rows(entry for target in audit.targets for entry in target.accepted)
    summary = AuditSummary(
        **{status.value: statuses[status] for status in TargetStatus},
        **{severity.value: counts[severity] for severity in Severity},
        accepted=len(accepted_rows),
    )
    targets = tuple(
        TargetRow(target.target, target.status, target.own_reason, target.format, target.tensors, target.bytes)
        for target in audit.targets
    )
    is_passed = (
        not audit.failing and not statuses[TargetStatus.FAILED] and bool(audit.ran) and not audit.unused_reference
    )
    return AuditDocument(
        "statecli.audit/1",
        __version__,
        is_passed,
        audit.fail_on,
        summary,
        targets,
        strip_wordings(audit.findings),
        audit.ran,
        audit.skipped_rules,
        accepted_rows,
        audit.run_notes,
        verdict,
        audit.not_checked,
        audit.configuration,
        tuple(map(build_problem_row, problems)),
    )
