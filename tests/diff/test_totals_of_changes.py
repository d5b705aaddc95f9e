"""Totals of a diff in its last line: the relative change of all changed parameters, NaN and infinities."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_the_last_line_has_the_relative_change_of_all_changed_parameters(statecli, save):
    """The value is torch's ‖Δ‖/‖w‖ over the changed parameters; unchanged parameters do not count."""
    torch.manual_seed(0)
    before = {name: torch.randn(40) for name in ("a", "b", "c")}
    after = before | {"a": before["a"] + 0.1, "b": before["b"] * 1.5}
    files = save(before, "a.pt"), save(after, "b.pt")
    result = statecli("diff", *files, "-f", "json")
    old, new = (torch.cat([state[name].double() for name in ("a", "b")]) for state in (before, after))
    values = result.json["summary"]["values"]
    assert values["tensors"] == 2
    assert values["l2"] == pytest.approx((new - old).norm().item())
    assert values["relative_l2"] == pytest.approx(((new - old).norm() / old.norm()).item())
    last_line = statecli("diff", *files, "-f", "table").out.splitlines()[-1]
    assert f"; ‖Δ‖/‖w‖ {values['relative_l2']:.3g} of changed parameters" in last_line


def test_a_tensor_that_was_zero_counts_with_its_change(statecli, save):
    """The norm of the tensor before is zero, but its change is part of the total."""
    before = {"a": torch.zeros(4), "b": torch.full((4,), 2.0)}
    after = {"a": torch.ones(4), "b": torch.full((4,), 3.0)}
    values = statecli("diff", save(before, "a.pt"), save(after, "b.pt"), "-f", "json").json["summary"]["values"]
    assert values["relative_l2"] == pytest.approx(8**0.5 / 4)


def test_tensors_with_new_nan_come_first_and_are_counted(statecli, save):
    """This holds without --sort too; the last line has the number of NaN before and after."""
    before = {name: torch.ones(4) for name in ("a", "b", "c")}
    after = before | {"a": torch.full((4,), 2.0), "c": torch.tensor([1.0, float("nan"), float("inf"), 1.0])}
    files = save(before, "a.pt"), save(after, "b.pt")
    lines = statecli("diff", *files, "-f", "table").out.splitlines()
    assert [line.split()[1] for line in lines if line.strip().startswith("M ")] == ["c", "a"]
    assert "; NaN 0 → 1; Inf 0 → 1: exit status 1" in lines[-1]
    changes = statecli("diff", *files, "-f", "json").json["changes"]
    assert [change["fqn"] for change in changes] == ["a", "c"]  # programs read the order of the file
