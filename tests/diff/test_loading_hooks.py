"""Compare a class with a checkpoint if hooks, versions and extra states decide which keys a load accepts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.commands.diff.request import Request
from statecli.commands.diff.run import compare_targets
from statecli.core.selection import Selection

from .conftest import list_findings, list_notes

EXTRA_STATE_LINES = """
self.fc = nn.Linear(2, 2)
type(self).get_extra_state = lambda self: {"steps": 1}
type(self).set_extra_state = lambda self, state: state["gone"]
"""
NORM_LINE = "self.bn = nn.BatchNorm1d(3)"


def build_state(net, metadata=True, **changes):
    """Return the state_dict of `net` without the entries that are None in `changes`, with or without `_metadata`."""
    state = net.state_dict()
    for name, value in changes.items():
        key = name.replace("__", ".")
        state.pop(key, None) if value is None else state.update({key: value})
    return state if metadata else dict(state)


def test_missing_extra_state_is_a_missing_entry(source, save):
    """A missing extra state is an error, as in torch's strict load; a note says that a present value is not tried."""
    target = source(EXTRA_STATE_LINES)
    state = nn.Module()
    state.fc = nn.Linear(2, 2)
    diff = compare_targets(Request(target, save(build_state(state), "net.pt")))
    assert list_findings(diff) == [("missing-entry", "_extra_state")]
    assert "does not contain this key" in diff.findings[0].message
    whole_diff = compare_targets(Request(target, save(build_state(state, _extra_state={"steps": 2}), "net.pt")))
    assert list_findings(whole_diff) == []
    assert "extra-state" in list_notes(whole_diff)


@pytest.mark.parametrize("value", [7, {"a": {"scale": torch.ones(2)}}, torch.ones(2)])
def test_unknown_extra_state_is_one_unexpected_entry(value, source, save):
    """An extra state of any type is one entry and one finding, under torch's name for the entry."""
    net = nn.Module()
    net.fc = nn.Linear(2, 2)
    path = save(build_state(net, fc___extra_state=value), "net.pt")
    assert list_findings(compare_targets(Request(path, source("self.fc = nn.Linear(2, 2)")))) == [
        ("unexpected-entry", "fc._extra_state")
    ]


def test_filter_applies_to_extra_states(source, save):
    """A glob applies to the names of extra states, too."""
    net = nn.Module()
    net.fc = nn.Linear(2, 2)
    path = save(build_state(net, fc___extra_state=1), "net.pt")
    target = source("self.fc = nn.Linear(2, 2)")
    assert not compare_targets(Request(target, path, selection=Selection(exclude=("*_extra_state",)))).findings
    assert not compare_targets(Request(target, path, selection=Selection(include=("fc.weight",)))).findings
    assert compare_targets(Request(target, path, selection=Selection(include=("fc.*",)))).findings


def test_counter_is_required_only_from_version_2(source, save):
    """num_batches_tracked is missing only if a module version of 2 or later is recorded; else torch fills it in."""
    target = source(NORM_LINE)
    net = nn.Module()
    net.bn = nn.BatchNorm1d(3)
    older = build_state(net, bn__num_batches_tracked=None)
    older._metadata["bn"] = {"version": 1}
    cases = [
        (build_state(net, bn__num_batches_tracked=None), "net.pt", True),
        (build_state(net, metadata=False, bn__num_batches_tracked=None), "net.pt", False),
        (build_state(net, bn__num_batches_tracked=None), "net.safetensors", False),
        (older, "net.pt", False),
    ]
    for device in ("cpu", "meta"):
        for state, name, is_missing in cases:
            diff = compare_targets(Request(target, save(state, name), init_device=device))
            assert list_findings(diff) == ([("missing-entry", "bn.num_batches_tracked")] if is_missing else [])
            assert ("filled-in" in list_notes(diff)) is not is_missing


def test_versions_are_read_through_a_prefix(source, save):
    """The `_metadata` of a wrapped model is read through its prefix too."""
    net = nn.Module()
    net.module = nn.Module()
    net.module.bn = nn.BatchNorm1d(3)
    path = save(build_state(net, module__bn__num_batches_tracked=None), "net.pt")
    diff = compare_targets(Request(source(NORM_LINE), path))
    assert list_findings(diff) == [("wrapper-prefix", None), ("missing-entry", "bn.num_batches_tracked")]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_old_names_that_a_hook_accepts_are_not_reported(prefix, source, save):
    """The two halves of the old weight_norm load into the new version: no finding, and a note on either side."""
    target = source("self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))")
    state = {"fc.weight_g": torch.ones(2, 1), "fc.weight_v": torch.ones(2, 3), "fc.bias": torch.ones(2)}
    diff = compare_targets(Request(save({prefix + name: tensor for name, tensor in state.items()}, "net.pt"), target))
    assert list_findings(diff) == ([("wrapper-prefix", None)] if prefix else [])
    assert {"filled-in", "taken-over"} <= set(list_notes(diff))


def test_one_element_loads_into_a_scalar_but_not_the_reverse(source, save):
    """torch loads one element into a scalar, as before 0.4, but not a scalar into a tensor of one element."""
    scalar, first = (
        source("self.w = nn.Parameter(torch.ones(()))"),
        source("self.w = nn.Parameter(torch.ones(1))", "b.py"),
    )
    diff = compare_targets(Request(scalar, save({"w": torch.ones(1)}, "net.pt")))
    assert (list_findings(diff), "shape-adapted" in list_notes(diff)) == ([], True)
    assert list_findings(compare_targets(Request(first, save({"w": torch.ones(())}, "net.pt")))) == [
        ("shape-mismatch", "w")
    ]


def test_entry_that_is_not_a_tensor_is_refused(source, save):
    """A number in place of a parameter is a finding, and the message names the checkpoint as the cause."""
    diff = compare_targets(
        Request(source("self.w = nn.Parameter(torch.ones(1))"), save({"w": 3, "v": torch.ones(1)}, "a.pt"))
    )
    assert set(list_findings(diff)) == {("unexpected-entry", "v"), ("load-refused", "w")}
    assert "the entry of the checkpoint is not a tensor" in diff.findings[1].message


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.empty(2, 2, dtype=torch.bits8)])
def test_tensor_that_torch_cannot_copy_is_refused(tensor, source, save):
    """A sparse tensor does not load into a dense tensor, nor bits into floats."""
    target = source("self.w = nn.Parameter(torch.ones(2, 2))")
    with pytest.raises(RuntimeError, match="an exception occurred"):
        nn.ParameterDict({"w": torch.ones(2, 2)}).load_state_dict({"w": tensor})
    diff = compare_targets(Request(target, save({"w": tensor}, "net.pt")))
    assert [finding.rule for finding in diff.findings if finding.rule != "changed"] == ["load-refused"]


def test_hook_that_reads_values_is_inconclusive(source, save):
    """A hook that needs values does not get them: the result is inconclusive, without a guess about missing keys."""
    target = source(
        "self.w = nn.Parameter(torch.ones(1))\nself.register_load_state_dict_pre_hook(lambda *a: a[1]['w'].item())"
    )
    diff = compare_targets(Request(target, save({"w": torch.ones(1), "v": torch.ones(1)}, "net.pt")))
    assert not diff.findings
    assert ["cannot call load_state_dict" in finding.message for finding in diff.broken] == [True]


def test_a_pickled_module_has_the_extra_state_of_its_class(source, save):
    """The state_dict of a whole module contains the extra state, so no entry is missing."""
    net = nn.Sequential()
    net.fc = nn.Linear(2, 2)
    assert not compare_targets(Request(source(EXTRA_STATE_LINES), save(net, "whole.pt"))).findings


def test_patches_of_torch_are_removed(source, save):
    """The patches for a load are removed after the load, also if the load failed."""
    before = nn.Module.load_state_dict, torch.Tensor.copy_
    for lines in ("self.w = nn.Parameter(torch.ones(1))", "self.register_load_state_dict_pre_hook(lambda *a: 1 / 0)"):
        compare_targets(Request(source(lines), save({"w": torch.ones(1)}, "net.pt")))
    assert (nn.Module.load_state_dict, torch.Tensor.copy_) == before
    assert "copy_" not in vars(torch.Tensor)
