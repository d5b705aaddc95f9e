"""What `verify` found, as data: proofs across, tensors down."""

from __future__ import annotations

from enum import Enum

import msgspec
from msgspec import structs

from statecli.core.finding import Finding, Severity
from statecli.core.state import ModelState, Oddity


class Verdict(str, Enum):
    """What a proof says of one tensor, or of all of them.

    `skipped` does not apply or was not asked for; `inconclusive` was tried without a result, and is not a pass.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    INCONCLUSIVE = "inconclusive"


class Name(str, Enum):
    """The proofs, in the order in which they are run and shown."""

    MOVE = "move"
    CAST = "cast"
    SAVE = "save"
    COPY = "copy"
    STEP = "step"
    FORWARD = "forward"


class Cell(msgspec.Struct, frozen=True, gc=False):
    """One tensor in one column. `before` and `after` are what was measured: a device, a dtype, "saved", a norm."""

    verdict: Verdict
    before: str | None = None
    after: str | None = None
    reason: str | None = None


class Column(msgspec.Struct, frozen=True):
    """One thing a proof shows of each tensor: `moves`, `saved`, `restored`, `gradient`. Cells by FQN.

    A tensor without a cell was gone, or has no part in it.
    """

    name: str
    cells: dict[str, Cell]


class Check(msgspec.Struct, frozen=True):
    """One proof. `verdict` is the worst that its cells and findings say; `reason` why it is not simply passed.

    `findings` are what was proved false, one a tensor and rule; `how` says in a few words what was done.
    """

    check: Name
    verdict: Verdict
    how: str = ""
    reason: str | None = None
    columns: tuple[Column, ...] = ()
    findings: tuple[Finding, ...] = ()


#: The order in which one verdict stands for several.
WORST_FIRST = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)


def skip_harmless_cells(check: Check) -> Check:
    """Skip the failed cells of tensors about which the proof reports notes alone, and choose the verdict again."""
    harmful = {finding.fqn for finding in check.findings if finding.severity is not Severity.NOTE}
    harmless = {finding.fqn for finding in check.findings} - harmful
    if not harmless or check.verdict is not Verdict.FAILED:
        return check
    columns = tuple(
        Column(column.name, {fqn: _skip_cell(cell) if fqn in harmless else cell for fqn, cell in column.cells.items()})
        for column in check.columns
    )
    verdicts = {cell.verdict for column in columns for cell in column.cells.values()}
    verdicts |= {Verdict.FAILED} if harmful else {Verdict.PASSED}
    verdict = next(candidate for candidate in WORST_FIRST if candidate in verdicts)
    return structs.replace(check, verdict=verdict, columns=columns)


def _skip_cell(cell: Cell) -> Cell:
    return structs.replace(cell, verdict=Verdict.SKIPPED) if cell.verdict is Verdict.FAILED else cell


class Verification(msgspec.Struct, frozen=True):
    """One run: every tensor of the model (`state`, those that forward added last), and what each proof says."""

    state: ModelState
    checks: tuple[Check, ...]
    notes: tuple[Oddity, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that was proved false."""
        return tuple(finding for check in self.checks for finding in check.findings)
