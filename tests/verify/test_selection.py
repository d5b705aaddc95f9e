"""Filtered proofs: the verdict is of the selected tensors, or of the reason why the whole proof is inconclusive."""

from __future__ import annotations

import pytest

from statecli.commands.verify import check_builder
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.result import Cell, Name, Verdict
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import ModelState
from statecli.core.selection import Selection

P, F, U, S = Verdict.PASSED, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.SKIPPED


def filter_check(reason, cells, *kept, failed_fqns=(), noted_fqns=()):
    """Return a proof with a column of `cells` (name -> verdict, reason), restricted to the tensors in `kept`."""
    columns = {"x": {fqn: Cell(verdict, reason=cell_reason) for fqn, (verdict, cell_reason) in cells.items()}}
    findings = [Finding("x", Severity.ERROR, "no", "net", fqn) for fqn in failed_fqns]
    findings += [Finding("x", Severity.NOTE, "no", "net", fqn) for fqn in noted_fqns]
    excluded = frozenset(("a", "b", "c")) - {*kept}
    subject = ModelUnderTest("net", ModelState("net", "module", ()), None, None, rebuilds=True, excluded=excluded)
    reasons = [reason] if reason else []
    return check_builder.build_check(subject, Name.MOVE, "", columns if cells else {}, findings, reasons)


@pytest.mark.parametrize(
    ("proof", "selected_fqn", "verdict", "reason"),
    [
        # an inconclusive cell is filtered out or selected
        ((None, {"a": (P, None), "b": (U, "why")}), "a", P, None),
        ((None, {"a": (P, None), "b": (U, "why")}), "b", U, "b: why"),
        ((None, {"a": (U, "why"), "b": (U, "why")}), "b", U, "b: why"),
        ((None, {"a": (S, "none"), "b": (U, "why")}), "a", S, "a: none"),
        # the reason is of the whole proof
        (("it raised", {"a": (P, None), "b": (U, "why")}), "a", U, "it raised"),
        (("it raised", {}), "a", U, "it raised"),
        # the proof has no failed or inconclusive cell of the selected tensor
        ((None, {"b": (P, None)}), "a", S, "the filters exclude all tensors of this check"),
        ((None, {"b": (F, "why")}, "b"), "a", S, "the filters exclude all tensors of this check"),
        ((None, {"a": (S, "frozen"), "b": (P, None)}), "a", S, "a: frozen"),
        # the failed tensor is filtered out
        ((None, {"a": (P, None), "b": (F, "why")}, "b"), "a", P, None),
        ((None, {"a": (U, "why"), "b": (F, "no")}, "b"), "a", U, "a: why"),
        (("it raised", {"a": (P, None), "b": (F, "no")}, "b"), "a", U, "it raised"),
        # the failed tensor is selected
        ((None, {"a": (F, "why"), "b": (U, "no")}, "a"), "a", F, None),
        (("it raised", {"a": (F, "why")}, "a"), "a", F, "it raised"),
        # a finding without a tensor is always kept
        ((None, {"a": (P, None)}, None), "a", F, None),
    ],
)
def test_verdict_counts_only_the_selected_tensors(proof, selected_fqn, verdict, reason):
    """Without its inconclusive cells, a proof is not inconclusive any more; a reason of the whole proof stays."""
    base_reason, cells, *failed_fqns = proof
    check = filter_check(base_reason, cells, selected_fqn, failed_fqns=failed_fqns)
    assert (check.verdict, check.reason) == (verdict, reason)
    assert all(set(column.cells) <= {selected_fqn} for column in check.columns)


@pytest.mark.parametrize(("other", "verdict", "failed"), [(F, F, ("b",)), (U, U, ())])
def test_note_does_not_fail_with_an_excluded_tensor(other, verdict, failed):
    """A harmless tensor has a skipped cell; the verdict of the tensors outside of the filters does not count."""
    cells = {"a": (F, "harmless"), "b": (other, None), "c": (F, "harmless")}
    noted = {"failed_fqns": failed, "noted_fqns": ("a", "c")}
    check = filter_check(None, cells, "a", **noted)
    assert (check.verdict, check.columns[0].cells["a"].verdict) == (P, S)
    assert filter_check("it raised", cells, "a", **noted).verdict is U
    assert filter_check(None, cells, "a", "b", **noted).verdict is verdict


def test_real_proof_is_filtered():
    """The filters decide which tensors count: the table that stays on the CPU, or the tensors that follow."""
    from .mixes import SAMPLES
    from .proving import run_proof

    target = f"{SAMPLES}/net.py:Net"
    assert run_proof(Name.MOVE, target).verdict is F
    assert run_proof(Name.MOVE, target, selection=Selection(exclude=("table",))).verdict is P
    assert run_proof(Name.MOVE, target, selection=Selection(include=("table",))).verdict is F
