"""Compare a class with a checkpoint if hooks, versions and extra states decide which keys a load accepts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.commands.diff.request import Request
from statecli.commands.diff.run import compare_targets
from statecli.core.selection import Selection

from .conftest import notes, rules

EXTRA = """
self.fc = nn.Linear(2, 2)
type(self).get_extra_state = lambda self: {"steps": 1}
type(self).set_extra_state = lambda self, state: state["gone"]
"""
NORM = "self.bn = nn.BatchNorm1d(3)"


def entries(net, metadata=True, **changes):
    """Return the state_dict of `net` without the entries that are None in `changes`, with or without `_metadata`."""
    state = net.state_dict()
    for name, value in changes.items():
        key = name.replace("__", ".")
        state.pop(key, None) if value is None else state.update({key: value})
    return state if metadata else dict(state)


def test_a_missing_extra_state_is_missing(source, save):
    """A missing extra state is an error, as in torch's strict load; a note says that a present value is not tried."""
    target = source(EXTRA)
    state = nn.Module()
    state.fc = nn.Linear(2, 2)
    diff = compare_targets(Request(target, save(entries(state), "net.pt")))
    assert rules(diff) == [("missing-entry", "_extra_state")]
    assert "does not contain this key" in diff.findings[0].message
    whole = compare_targets(Request(target, save(entries(state, _extra_state={"steps": 2}), "net.pt")))
    assert rules(whole) == []
    assert "extra-state" in notes(whole)


@pytest.mark.parametrize("value", [7, {"a": {"scale": torch.ones(2)}}, torch.ones(2)])
def test_an_unexpected_extra_state_is_unexpected(value, source, save):
    """An extra state of any type is one entry and one finding, under torch's name for the entry."""
    net = nn.Module()
    net.fc = nn.Linear(2, 2)
    path = save(entries(net, fc___extra_state=value), "net.pt")
    assert rules(compare_targets(Request(path, source("self.fc = nn.Linear(2, 2)")))) == [
        ("unexpected-entry", "fc._extra_state")
    ]


def test_a_filter_is_for_extra_states_too(source, save):
    """A glob applies to the names of extra states, too."""
    net = nn.Module()
    net.fc = nn.Linear(2, 2)
    path = save(entries(net, fc___extra_state=1), "net.pt")
    target = source("self.fc = nn.Linear(2, 2)")
    assert not compare_targets(Request(target, path, selection=Selection(exclude=("*_extra_state",)))).findings
    assert not compare_targets(Request(target, path, selection=Selection(include=("fc.weight",)))).findings
    assert compare_targets(Request(target, path, selection=Selection(include=("fc.*",)))).findings


def test_an_optional_counter(source, save):
    """num_batches_tracked is missing only if a module version of 2 or later is recorded; else torch fills it in."""
    target = source(NORM)
    net = nn.Module()
    net.bn = nn.BatchNorm1d(3)
    older = entries(net, bn__num_batches_tracked=None)
    older._metadata["bn"] = {"version": 1}
    cases = [
        (entries(net, bn__num_batches_tracked=None), "net.pt", True),
        (entries(net, metadata=False, bn__num_batches_tracked=None), "net.pt", False),
        (entries(net, bn__num_batches_tracked=None), "net.safetensors", False),
        (older, "net.pt", False),
    ]
    for device in ("cpu", "meta"):
        for state, name, is_missing in cases:
            diff = compare_targets(Request(target, save(state, name), init_device=device))
            assert rules(diff) == ([("missing-entry", "bn.num_batches_tracked")] if is_missing else [])
            assert ("filled-in" in notes(diff)) is not is_missing


def test_versions_behind_a_prefix(source, save):
    """The `_metadata` of a wrapped model is read through its prefix too."""
    net = nn.Module()
    net.module = nn.Module()
    net.module.bn = nn.BatchNorm1d(3)
    path = save(entries(net, module__bn__num_batches_tracked=None), "net.pt")
    diff = compare_targets(Request(source(NORM), path))
    assert rules(diff) == [("wrapper-prefix", None), ("missing-entry", "bn.num_batches_tracked")]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_old_names_that_a_hook_takes(prefix, source, save):
    """The two halves of the old weight_norm load into the new version: no finding, and a note on either side."""
    target = source("self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))")
    state = {"fc.weight_g": torch.ones(2, 1), "fc.weight_v": torch.ones(2, 3), "fc.bias": torch.ones(2)}
    diff = compare_targets(Request(save({prefix + name: tensor for name, tensor in state.items()}, "net.pt"), target))
    assert rules(diff) == ([("wrapper-prefix", None)] if prefix else [])
    assert {"filled-in", "taken-over"} <= set(notes(diff))


def test_a_scalar_saved_as_one_element(source, save):
    """torch loads one element into a scalar, as before 0.4, but not a scalar into a tensor of one element."""
    scalar, first = (
        source("self.w = nn.Parameter(torch.ones(()))"),
        source("self.w = nn.Parameter(torch.ones(1))", "b.py"),
    )
    diff = compare_targets(Request(scalar, save({"w": torch.ones(1)}, "net.pt")))
    assert (rules(diff), "shape-adapted" in notes(diff)) == ([], True)
    assert rules(compare_targets(Request(first, save({"w": torch.ones(())}, "net.pt")))) == [("shape-mismatch", "w")]


def test_what_is_no_tensor_is_refused(source, save):
    """A number in place of a parameter is a finding, and the message names the checkpoint as the cause."""
    diff = compare_targets(
        Request(source("self.w = nn.Parameter(torch.ones(1))"), save({"w": 3, "v": torch.ones(1)}, "a.pt"))
    )
    assert set(rules(diff)) == {("unexpected-entry", "v"), ("load-refused", "w")}
    assert "the entry of the checkpoint is not a tensor" in diff.findings[1].message


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.empty(2, 2, dtype=torch.bits8)])
def test_what_torch_does_not_copy_is_refused(tensor, source, save):
    """A sparse tensor does not load into a dense tensor, nor bits into floats."""
    target = source("self.w = nn.Parameter(torch.ones(2, 2))")
    with pytest.raises(RuntimeError, match="an exception occurred"):
        nn.ParameterDict({"w": torch.ones(2, 2)}).load_state_dict({"w": tensor})
    diff = compare_targets(Request(target, save({"w": tensor}, "net.pt")))
    assert [finding.rule for finding in diff.findings if finding.rule != "changed"] == ["load-refused"]


def test_code_that_looks_at_values_cannot_be_told(source, save):
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
    assert not compare_targets(Request(source(EXTRA), save(net, "whole.pt"))).findings


def test_torch_is_left_as_it_was(source, save):
    """The patches for a load are removed after the load, also if the load failed."""
    before = nn.Module.load_state_dict, torch.Tensor.copy_
    for lines in ("self.w = nn.Parameter(torch.ones(1))", "self.register_load_state_dict_pre_hook(lambda *a: 1 / 0)"):
        compare_targets(Request(source(lines), save({"w": torch.ones(1)}, "net.pt")))
    assert (nn.Module.load_state_dict, torch.Tensor.copy_) == before
    assert "copy_" not in vars(torch.Tensor)
