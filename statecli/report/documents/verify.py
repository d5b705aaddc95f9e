"""JSON document of `verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from statecli.commands.verify.result import WORST_FIRST, Check, Name, Verdict, Verification
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Oddity
from statecli.core.run_scope import NotChecked
from statecli.core.version import __version__
from statecli.report import Problem
from statecli.report.documents.shared import (
    AcceptedRow,
    ProblemRow,
    TensorRow,
    build_accepted_rows,
    build_problem_row,
    build_tensor_row,
    strip_wordings,
)


class CellRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor's result in a column of a check. `before` and `after` are the measured values, or null."""

    fqn: str
    column: str
    verdict: Verdict
    before: str | None
    after: str | None
    reason: str | None = None


class CheckRow(msgspec.Struct, frozen=True):
    """A check. `passed` is null if the check was skipped or is inconclusive; `how` describes the operation.

    `tensors` has an entry for each tensor and column with a verdict.
    """

    check: Name
    passed: bool | None
    verdict: Verdict
    how: str
    reason: str | None
    columns: tuple[str, ...]
    tensors: tuple[CellRow, ...]


class VerifySummary(msgspec.Struct, frozen=True):
    """Numbers of checks and of tensors by verdict.

    A tensor is `failed` if any check failed for the tensor, else `inconclusive` if any check was inconclusive, else
    `passed`. A tensor without a verdict is `skipped`.
    """

    checks: dict[str, int]
    tensors: dict[str, int]


class VerifyDocument(msgspec.Struct, frozen=True):
    """`statecli verify -f json`. Consumers ignore keys they do not know. `tensors` have the keys of `inspect`."""

    schema: str
    statecli: str
    target: str
    summary: VerifySummary
    checks: tuple[CheckRow, ...]
    tensors: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...] = ()
    verdict: str = ""
    not_checked: tuple[NotChecked, ...] = ()
    problems: tuple[ProblemRow, ...] = ()
    accepted: tuple[AcceptedRow, ...] = ()


def build_verify_document(
    verification: Verification,
    problems: Iterable[Problem],
    verdict: str,
    not_checked: tuple[NotChecked, ...],
) -> VerifyDocument:
    """Return the document of a run of the checks."""
    return VerifyDocument(
        "statecli.verify/1",
        __version__,
        verification.state.target,
        count_verdicts(verification),
        tuple(map(_build_check_row, verification.checks)),
        tuple(map(build_tensor_row, verification.state.tensors)),
        strip_wordings(verification.findings),
        verification.notes,
        verdict,
        not_checked,
        tuple(map(build_problem_row, problems)),
        build_accepted_rows(verification.accepted),
    )


def count_verdicts(verification: Verification) -> VerifySummary:
    """Return the number of checks and of tensors for each verdict."""
    worst = find_worst_verdicts(verification)
    return VerifySummary(
        _count_by_verdict(check.verdict for check in verification.checks),
        _count_by_verdict(worst[tensor.fqn] for tensor in verification.state.tensors),
    )


def find_worst_verdicts(verification: Verification) -> dict[str, Verdict]:
    """Return the worst verdict of each tensor over all columns and findings. A tensor without a verdict is SKIPPED."""
    verdicts_by_fqn: dict[str, set[Verdict]] = {tensor.fqn: {Verdict.SKIPPED} for tensor in verification.state.tensors}
    for check in verification.checks:
        for column in check.columns:
            for fqn, cell in column.cells.items():
                verdicts_by_fqn.setdefault(fqn, set()).add(cell.verdict)
    for finding in verification.findings:
        if finding.fqn is not None and finding.severity is not Severity.NOTE:
            verdicts_by_fqn.setdefault(finding.fqn, set()).add(Verdict.FAILED)
    return {fqn: min(verdicts, key=WORST_FIRST.index) for fqn, verdicts in verdicts_by_fqn.items()}


def _count_by_verdict(verdicts: Iterable[Verdict]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {verdict.value: counts[verdict] for verdict in Verdict}


def _build_check_row(check: Check) -> CheckRow:
    return CheckRow(
        check.check,
        {Verdict.PASSED: True, Verdict.FAILED: False}.get(check.verdict),
        check.verdict,
        check.how,
        check.reason,
        tuple(column.name for column in check.columns),
        tuple(
            CellRow(fqn, column.name, cell.verdict, cell.before, cell.after, cell.reason)
            for column in check.columns
            for fqn, cell in column.cells.items()
        ),
    )
