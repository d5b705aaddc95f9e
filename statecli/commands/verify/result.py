"""Result of `verify` as data: a column for each property, with a cell for each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from statecli.core.finding import Finding
from statecli.core.model_state import ModelState, Oddity
from statecli.core.proof_names import DEFAULT_PROOFS as DEFAULT_PROOFS, Name as Name
from statecli.core.result_views import ResultViews

if TYPE_CHECKING:
    from statecli.targets.target_result import Accepted


class Verdict(str, Enum):
    """Result of a proof for a tensor, or for all tensors.

    `skipped`: not applicable or not requested. `inconclusive`: tried without a result, not a pass.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    INCONCLUSIVE = "inconclusive"


class Cell(msgspec.Struct, frozen=True, gc=False):
    """Result of a proof for one tensor, in one column of the table.

    Attributes:
        verdict: Result for this tensor.
        before: Measured value before the operation: a device or a dtype.
        after: Measured value after the operation.
        reason: Reason of a verdict other than passed.
    """

    verdict: Verdict
    before: str | None = None
    after: str | None = None
    reason: str | None = None


class Column(msgspec.Struct, frozen=True):
    """Column of the table: a property that a proof tests for each tensor.

    Attributes:
        name: Name of the property: `moves`, `saved`, `restored`, `gradient`.
        cells: Result for each tensor by FQN. A tensor irrelevant to the proof has no cell.
    """

    name: str
    cells: dict[str, Cell]


class Check(msgspec.Struct, frozen=True):
    """Result of a proof.

    Attributes:
        check: Name of the proof.
        verdict: Worst verdict of the cells and findings.
        how: Short description of the operation.
        reason: Reason of a verdict other than passed.
        columns: Results for each tensor.
        findings: All failures, a finding for each tensor and rule.
    """

    check: Name
    verdict: Verdict
    how: str = ""
    reason: str | None = None
    columns: tuple[Column, ...] = ()
    findings: tuple[Finding, ...] = ()


#: Verdicts, the worst first. The worst verdict of the cells is the verdict of the check.
WORST_FIRST = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)


def find_worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict, or SKIPPED if `verdicts` is empty."""
    return min(verdicts, key=WORST_FIRST.index, default=Verdict.SKIPPED)


def summarize_reasons(columns: Iterable[Column], verdict: Verdict) -> str | None:
    """Return the first reason of cells with this verdict and the number of further reasons, or None."""
    cells = ((fqn, cell) for column in columns for fqn, cell in column.cells.items())
    reasons = [f"{fqn}: {cell.reason}" for fqn, cell in cells if cell.verdict is verdict and cell.reason]
    return f"{reasons[0]}, and {len(reasons) - 1} more" if len(reasons) > 1 else next(iter(reasons), None)


class Verification(ResultViews, msgspec.Struct, frozen=True):
    """Result of `verify`.

    Attributes:
        state: Every tensor of the model; tensors added by forward come last.
        checks: Result of each proof.
        notes: Facts about the model, except findings.
        requested: The proofs requested by name.
        accepted: Findings accepted by `ignore` or a baseline, with the reasons; `findings` does not have them.
    """

    state: ModelState
    checks: tuple[Check, ...]
    notes: tuple[Oddity, ...] = ()
    requested: tuple[Name, ...] = ()
    accepted: tuple[Accepted, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all proofs."""
        return tuple(finding for check in self.checks for finding in check.findings)
