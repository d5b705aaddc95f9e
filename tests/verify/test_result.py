"""Verdicts of checks with findings that are only notes."""

from __future__ import annotations

import pytest

from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, skip_harmless_cells
from statecli.core.finding import Finding, Severity


@pytest.mark.parametrize(
    ("reason", "verdict"), [("torch refuses the model", Verdict.INCONCLUSIVE), (None, Verdict.PASSED)]
)
def test_reason_outlives_a_finding_that_is_a_note(reason, verdict):
    """A check that did not finish is inconclusive, even if the only finding is a note."""
    note = Finding("not-synchronized", Severity.NOTE, "b: differs", "net", "b")
    columns = (Column("sharded", {"a": Cell(Verdict.PASSED), "b": Cell(Verdict.FAILED)}),)
    check = skip_harmless_cells(Check(Name.SHARD, Verdict.FAILED, "", reason, columns, (note,)))
    assert (check.verdict, check.reason) == (verdict, reason)
