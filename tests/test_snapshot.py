"""statecli.Snapshot: changes of a step, without a copy of the values, and the limits of a snapshot."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import statecli
from statecli.commands.diff.snapshot import NOTE

from .test_live_objects import STATES, Tied, rows, step


def statuses(diff):
    return {change.fqn: (change.status.value, [field.value for field in change.fields]) for change in diff.changes}


def test_diff_with_a_snapshot_names_the_tensors_changed_by_a_step():
    """The frozen weight is identical, the trained weights changed, and no number is invented."""
    model = Tied()
    model.norm.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    snapshot = statecli.Snapshot(model)
    step(model, optimizer)
    diff = statecli.diff(snapshot, model)
    changed = {name for name, (status, _) in statuses(diff).items() if status == "changed"}
    assert changed == {"embedding.weight", "head.weight", "norm.weight"}
    assert all(change.values is None for change in diff.changes)
    assert NOTE in [note.message for note in diff.notes]
    assert {finding.fqn for finding in diff.findings} == changed
    assert (diff.before.target, diff.after.target) == ("Tied (snapshot)", "Tied")
    assert diff.how.bitwise


def test_snapshot_is_accepted_on_either_side_of_a_diff():
    """Two snapshots are compared without any values."""
    model = Tied()
    first = statecli.Snapshot(model)
    with torch.no_grad():
        model.norm.weight[0] += 1
    second = statecli.Snapshot(model)
    expected = {"norm.weight"}
    for sides in [(first, second), (first, model), (model, first), (second, first), (model.state_dict(), first)]:
        diff = statecli.diff(*sides)
        assert {name for name, (status, _) in statuses(diff).items() if status == "changed"} == expected
    assert {status for status, _ in statuses(statecli.diff(first, first)).values()} == {"identical"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATES, STATES)
def test_diff_with_a_snapshot_agrees_with_a_bitwise_diff(before, after):
    """For any two state_dicts: the same status and fields, up to renames and changed dtypes."""
    try:
        expected = statecli.diff(before, after, bitwise=True, no_renames=True)
        snapshot = statecli.Snapshot(before)
    except statecli.StateError:
        return
    actual, expected_statuses = statuses(statecli.diff(snapshot, after)), statuses(expected)
    for name, (status, fields) in expected_statuses.items():
        if "dtype" in fields:  # whether the values differ too is unknown
            fields = [field for field in fields if field != "values"]
        assert actual[name] == (status, fields)
    assert actual.keys() == expected_statuses.keys()


def test_expectations_are_checked_by_a_snapshot():
    """`only`, `frozen` and `changed` need no sizes."""
    model = Tied()
    snapshot = statecli.Snapshot(model)
    with torch.no_grad():
        model.norm.weight[0] += 1
    assert not statecli.diff(snapshot, model, only="norm.*").findings
    assert {f.fqn for f in statecli.diff(snapshot, model, frozen="norm.*").findings} == {"norm.weight"}
    assert statecli.diff(snapshot, model, changed="head.*").findings


def test_a_changed_dtype_is_reported_and_the_values_are_unknown():
    """A digest of other bytes says nothing about the values."""
    model = Tied()
    snapshot = statecli.Snapshot(model)
    (change,) = [c for c in statecli.diff(snapshot, model.double()).changes if c.fqn == "norm.weight"]
    assert (change.fields, change.not_compared) == (
        (statecli.Field.DTYPE,),
        "the dtypes differ, and a snapshot has only digests",
    )
    problems = statecli.diff(snapshot, model.double(), ignore=["dtype"]).broken
    assert "statecli does not know whether the values differ" in problems[0].message


def test_the_prefix_of_a_wrapper_is_stripped():
    """The prefix of the names is stripped, as in any diff."""
    model = nn.Linear(2, 2)
    snapshot = statecli.Snapshot(model)
    actual = statuses(statecli.diff(snapshot, {f"module.{k}": v for k, v in model.state_dict().items()}))
    assert {status for status, _ in actual.values()} == {"identical"}


def test_snapshot_with_values_gives_the_diff_of_the_states():
    """Numbers, renames and transformations; the copy is removed with the snapshot."""
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before["head.weight"] = before["embedding.weight"]
    snapshot = statecli.Snapshot(model, values=True)
    with torch.no_grad():
        model.norm.weight[0] += 1
    diff = statecli.diff(snapshot, model, atol=1e-3)
    assert rows(diff) == rows(statecli.diff(before, model, atol=1e-3))
    assert diff.before.target == "Tied (snapshot)"
    path = snapshot.path
    assert os.path.exists(path)
    del snapshot
    gc.collect()
    assert not os.path.exists(path)


def test_an_optimizer_has_a_snapshot():
    """The moments of an optimizer change with a step."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    snapshot = statecli.Snapshot(optimizer)
    step(model, optimizer)
    assert {f.rule for f in statecli.diff(snapshot, optimizer).findings} == {"changed"}


def test_a_file_is_compared_with_a_snapshot(tmp_path):
    """The file has the same tensors as the model."""
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert not statecli.diff(tmp_path / "a.pt", statecli.Snapshot(model)).findings


def test_a_model_without_tensors_has_no_snapshot():
    """There is nothing to compare later."""
    with pytest.raises(statecli.StateError, match=r"^ReLU: contains no tensor"):
        statecli.Snapshot(nn.ReLU())
