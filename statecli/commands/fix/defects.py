"""Defects of a verified model: the failed checks of tensors, grouped by cause, line and fix."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from statecli.commands.verify.result import Name, Verification
from statecli.commands.verify.rules import (
    DEVICE_MISMATCH,
    IMAGINARY_LOST,
    KEEPS_DTYPE,
    NO_GRADIENT,
    NON_LEAF_ATTRIBUTE,
    NOT_IN_OPTIMIZER,
)
from statecli.core import registration_rules
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.move_rules import LEFT_BEHIND, STALE_VIEW
from statecli.core.units import plural


class DefectCause(Enum):
    """Cause of a defect. The cause decides how the code is edited."""

    UNREGISTERED = "unregistered"
    CACHED_BY_FORWARD = "cached by forward"
    STALE_VIEW = "stale view"
    BUFFER_WITH_GRAD = "buffer with grad"
    CUT_GRAPH = "cut graph"
    COMPLEX_BUFFER = "complex buffer"
    STORED_GRAPH = "stored graph"
    FILE_VARIABLE = "file variable"
    CREATED_IN_FORWARD = "created in forward"
    OTHER = "other"


class Defect(msgspec.Struct, frozen=True):
    """Failed checks with the same cause.

    Attributes:
        cause: The kind of defect.
        rule: Name of the rule shown to the user for the cause.
        names: Names of the tensors; () for a tensor without a name.
        file: File of the line to change, as in the results of `verify`; "" if unknown.
        line: The line to change; 0 if unknown.
        fix: The printed fix: code, or comments.
        message: The problem in one line.
        proofs: The failed checks.
        dtype: The dtype of the first tensor; "" if unknown.
        file_variable: The variable of a file that holds the tensor; None for other tensors.
    """

    cause: DefectCause
    rule: str
    names: tuple[str, ...]
    file: str
    line: int
    fix: str
    message: str
    proofs: tuple[Name, ...]
    dtype: str = ""
    file_variable: str | None = None

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """Key that finds the defect in the next verification: the rule, and the tensor names (or message and line)."""
        return self.rule, self.names or (self.message.partition(" at ")[0], str(self.line))


def find_defects(verification: Verification) -> tuple[Defect, ...]:
    """Return the defects that are warnings or errors, by file and line; defects with an unknown line come last.

    The edit of another defect may repair a defect whose line is unknown.
    """
    rows = {row.fqn: row for row in verification.state.tensors}
    groups: dict[object, list[tuple[Name, Finding]]] = {}
    for check in verification.checks:
        for finding in check.findings:
            if finding.severity is not Severity.NOTE:
                groups.setdefault(_get_cause(finding, rows), []).append((check.check, finding))
    defects = (_build_defect(group, rows) for group in groups.values())
    return tuple(sorted(defects, key=lambda defect: (not defect.line, defect.file, defect.line)))


def _get_cause(finding: Finding, rows: dict[str, TensorInfo]) -> object:
    row = rows.get(finding.fqn or "")
    if finding.rule == STALE_VIEW.name or row is None:
        return (finding.fqn, finding.origin) if finding.fqn else (finding.rule, finding.origin or finding.message)
    if row.kind is Kind.UNREGISTERED:
        return row.kind, row.origin or row.fqn, row.fix
    return finding.rule, row.origin or row.fqn


def _build_defect(group: list[tuple[Name, Finding]], rows: dict[str, TensorInfo]) -> Defect:
    findings = [finding for _, finding in group]
    first = findings[0]
    names = tuple(dict.fromkeys(finding.fqn for finding in findings if finding.fqn))
    row = rows.get(names[0]) if names else None
    origin = row.origin if row is not None else (first.origin or None)
    cause = _choose_cause(findings, row)
    is_registration = cause is DefectCause.UNREGISTERED and row is not None
    rule = _choose_registration_rule([rows[name] for name in names]) if is_registration else first.rule
    message = first.message
    if len(names) > 1:
        other_tensors = plural(len(names) - 1, "more tensor")
        message = f"{names[0]} and {other_tensors}: {first.message.removeprefix(f'{first.fqn}: ')}"
    return Defect(
        cause,
        rule,
        names,
        origin.file if origin else "",
        origin.line if origin else 0,
        (row.fix if is_registration and row else first.strip_line()) or "",
        message,
        tuple(dict.fromkeys(proof for proof, _ in group)),
        row.dtype if row is not None else "",
        first.wording.file_variable,
    )


def _choose_registration_rule(rows: list[TensorInfo]) -> str:
    rules = {registration_rules.choose_rule(row) for row in rows}
    order = (registration_rules.UNREGISTERED_MODULE, registration_rules.UNREGISTERED_PARAMETER)
    return next((rule for rule in order if rule in rules), registration_rules.UNREGISTERED_TENSOR).name


def _choose_cause(findings: list[Finding], row: TensorInfo | None) -> DefectCause:
    return next(
        (cause for cause, applies in _CAUSES if any(applies(finding, row) for finding in findings)), DefectCause.OTHER
    )


#: Rules about a tensor that forward created for another device or dtype.
_CACHE_RULES = frozenset((LEFT_BEHIND.name, KEEPS_DTYPE.name, DEVICE_MISMATCH.name))
#: Causes, each with a test for a finding and its tensor row. The first cause whose test is true counts.
_CAUSES: tuple[tuple[DefectCause, Callable[[Finding, TensorInfo | None], bool]], ...] = (
    (DefectCause.STALE_VIEW, lambda finding, _: finding.rule == STALE_VIEW.name),
    (
        DefectCause.CACHED_BY_FORWARD,
        lambda finding, row: (
            row is not None and row.kind is Kind.UNREGISTERED and row.appeared and finding.rule in _CACHE_RULES
        ),
    ),
    (DefectCause.UNREGISTERED, lambda _, row: row is not None and row.kind is Kind.UNREGISTERED),
    (
        DefectCause.BUFFER_WITH_GRAD,
        lambda finding, row: finding.rule == NOT_IN_OPTIMIZER.name and row is not None and row.kind is Kind.BUFFER,
    ),
    (
        DefectCause.CUT_GRAPH,
        lambda finding, _: finding.rule == NO_GRADIENT.name and finding.wording.has_no_path,
    ),
    (
        DefectCause.COMPLEX_BUFFER,
        lambda finding, row: finding.rule == IMAGINARY_LOST.name and row is not None and row.kind is Kind.BUFFER,
    ),
    (
        DefectCause.STORED_GRAPH,
        lambda finding, row: finding.rule == NON_LEAF_ATTRIBUTE.name and row is not None and row.kind is Kind.BUFFER,
    ),
    (DefectCause.FILE_VARIABLE, lambda finding, _: finding.wording.file_variable is not None),
    (
        DefectCause.CREATED_IN_FORWARD,
        lambda finding, _: finding.rule == DEVICE_MISMATCH.name and finding.fqn is None and bool(finding.origin),
    ),
)
