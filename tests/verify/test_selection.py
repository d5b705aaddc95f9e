"""Filtered proofs: the verdict is of the selected tensors, or of the reason why the whole proof is inconclusive."""

from __future__ import annotations

import pytest

from statecli.commands.verify import run
from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.selection import Selection

P, F, U, S = Verdict.PASSED, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.SKIPPED


def filter_check(verdict, reason, cells, *kept, failed_fqns=(), noted_fqns=()):
    """Return a proof with a column of `cells` (name -> verdict, reason), restricted to the tensors in `kept`."""
    columns = (
        (Column("x", {fqn: Cell(verdict_, reason=cell_reason) for fqn, (verdict_, cell_reason) in cells.items()}),)
        if cells
        else ()
    )
    findings = tuple(Finding("x", Severity.ERROR, "no", "net", fqn) for fqn in failed_fqns)
    findings += tuple(Finding("x", Severity.NOTE, "no", "net", fqn) for fqn in noted_fqns)
    check = Check(Name.MOVE, verdict, "", reason, columns, findings)
    whole = ModelState("net", "module", tuple(TensorInfo(fqn, "float32", (), 1, 4) for fqn in ("a", "b", "c")))
    state = ModelState("net", "module", tuple(row for row in whole.tensors if row.fqn in kept))
    return run._restrict_to_selection(check, state, whole)


@pytest.mark.parametrize(
    ("proof", "selected_fqn", "verdict", "reason"),
    [
        # an inconclusive cell is filtered out or selected
        ((U, "b: why", {"a": (P, None), "b": (U, "why")}), "a", P, None),
        ((U, "b: why", {"a": (P, None), "b": (U, "why")}), "b", U, "b: why"),
        ((U, "a: why, and 1 more", {"a": (U, "why"), "b": (U, "why")}), "b", U, "b: why"),
        ((U, "b: why", {"a": (S, "none"), "b": (U, "why")}), "a", S, "a: none"),
        # the reason is of the whole proof
        ((U, "it raised", {"a": (P, None), "b": (U, "why")}), "a", U, "it raised"),
        ((U, "it raised", {}), "a", U, "it raised"),
        ((S, "no input", {}), "a", S, "no input"),
        # the proof has no failed or inconclusive cell of the selected tensor
        ((P, None, {"b": (P, None)}), "a", S, "the filters exclude all tensors of this check"),
        ((F, None, {"b": (F, "why")}, "b"), "a", S, "the filters exclude all tensors of this check"),
        ((P, None, {"a": (S, "frozen"), "b": (P, None)}), "a", S, "a: frozen"),
        ((P, "said", {"a": (P, None), "b": (P, None)}), "a", P, "said"),
        ((P, "the model was not moved", {}), "a", P, "the model was not moved"),
        # the failed tensor is filtered out
        ((F, None, {"a": (P, None), "b": (F, "why")}, "b"), "a", P, None),
        ((F, None, {"a": (U, "why"), "b": (F, "no")}, "b"), "a", U, "a: why"),
        ((F, "it raised", {"a": (P, None), "b": (F, "no")}, "b"), "a", U, "it raised"),
        # the failed tensor is selected
        ((F, None, {"a": (F, "why"), "b": (U, "no")}, "a"), "a", F, None),
        ((F, "it raised", {"a": (F, "why")}, "a"), "a", F, "it raised"),
        # a finding without a tensor is always kept
        ((F, None, {"a": (P, None)}, None), "a", F, None),
    ],
)
def test_verdict_counts_only_the_selected_tensors(proof, selected_fqn, verdict, reason):
    """Without its inconclusive cells, a proof is not inconclusive any more; a reason of the whole proof stays."""
    base, base_reason, cells, *failed_fqns = proof
    check = filter_check(base, base_reason, cells, selected_fqn, failed_fqns=failed_fqns)
    assert (check.verdict, check.reason) == (verdict, reason)
    assert all(set(column.cells) <= {selected_fqn} for column in check.columns)


@pytest.mark.parametrize(("other", "verdict", "failed"), [(F, F, ("b",)), (U, U, ())])
def test_note_does_not_fail_with_an_excluded_tensor(other, verdict, failed):
    """A harmless tensor has a skipped cell; the verdict of the tensors outside of the filters does not count."""
    cells = {"a": (S, "harmless"), "b": (other, None), "c": (S, "harmless")}
    noted = {"failed_fqns": failed, "noted_fqns": ("a", "c")}
    assert filter_check(verdict, None, cells, "a", **noted).verdict is P
    assert filter_check(verdict, None, cells, "a", "b", **noted).verdict is verdict


def test_real_proof_is_filtered():
    """The filters decide which tensors count: the table that stays on the CPU, or the tensors that follow."""
    from .mixes import SAMPLES
    from .proving import run_proof

    target = f"{SAMPLES}/net.py:Net"
    assert run_proof(Name.MOVE, target).verdict is F
    assert run_proof(Name.MOVE, target, selection=Selection(exclude=("table",))).verdict is P
    assert run_proof(Name.MOVE, target, selection=Selection(include=("table",))).verdict is F
