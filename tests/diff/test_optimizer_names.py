"""An optimizer keyed by numbers, keyed by names, or flat is the same optimizer; torch writes each form."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from statecli.commands.diff.result import Status

from .conftest import list_notes, map_changes


@pytest.fixture(scope="module")
def optimizer_forms() -> dict[str, dict[str, Any]]:
    """Return each form of the state of AdamW with two groups, after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    decayed_parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    undecayed_parameters = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed_parameters}, {"params": undecayed_parameters, "weight_decay": 0.0}]
    )
    for _ in range(3):
        model(torch.randn(5, 8)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "numbers": optimizer.state_dict(),
        "names": get_optimizer_state_dict(model, optimizer),
        "flat": get_optimizer_state_dict(model, optimizer, options=flat),
    }


@pytest.mark.parametrize(("before", "after"), [*permutations(["numbers", "names", "flat"], 2)])
@pytest.mark.parametrize("is_in_section", [True, False])
def test_optimizer_with_other_keys_is_identical(diff, optimizer_forms, before, after, is_in_section):
    """Tensors and settings of groups are the same, and a note says how they were paired."""
    old, new = optimizer_forms[before], optimizer_forms[after]
    result = diff({"optimizer": old}, {"optimizer": new}) if is_in_section else diff(old, new)
    assert {change.status for change in result.changes} == {Status.IDENTICAL}
    assert result.scalars == ()
    assert "optimizer-keys" in list_notes(result)
    assert len(result.changes) == 18


@pytest.mark.parametrize(("before", "after"), [*permutations(["numbers", "names", "flat"], 2)])
def test_a_changed_moment_and_a_changed_setting_are_the_only_changes(diff, optimizer_forms, before, after):
    """One element of one parameter's moment and the learning rate of one group are changed."""
    changed_form = copy.deepcopy(optimizer_forms[after])
    entries = changed_form if after == "flat" else changed_form["state"]
    key = {"numbers": 1, "names": "2.weight", "flat": "state.2.weight.exp_avg"}[after]
    (entries[key] if after == "flat" else entries[key]["exp_avg"])[0, 3] += 1
    if after == "flat":
        for name in ("0.weight", "2.weight"):
            changed_form[f"param_groups.{name}.lr"] = 0.5
    else:
        changed_form["param_groups"][0]["lr"] = 0.5
    result = diff(optimizer_forms[before], changed_form)
    changes = [change for change in map_changes(result).values() if change.values]
    assert [change.values.changed for change in changes] == [1]
    assert "exp_avg" in changes[0].fqn
    (setting,) = result.scalars
    assert (setting.key.endswith("param_groups.0.lr"), setting.after) == (True, 0.5)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_flat_optimizer_is_paired_through_its_model(diff, is_reversed):
    """Decayed parameters come first, so names are not in the model's order; swapped names of one shape are noticed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    groups = [[p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    numbers = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    sides = [numbers, {"model": model.state_dict(), "optimizer": flat}]
    result = diff(*(sides[::-1] if is_reversed else sides))
    assert {change.status for change in result.changes} == {Status.IDENTICAL}
    assert result.scalars == ()

    flat = copy.deepcopy(flat)  # because it shares tensors with the optimizer
    flat["state.2.weight.exp_avg"][0, 3] += 1
    sides[1] = {"model": model.state_dict(), "optimizer": flat}
    (change,) = map_changes(diff(*(sides[::-1] if is_reversed else sides))).values()
    assert change.values.changed == 1

    first, other = "0.weight", "2.weight"  # of one shape
    names = {name: name.replace(first, "?").replace(other, first).replace("?", other) for name in flat}
    sides[1] = {"model": model.state_dict(), "optimizer": {names[name]: value for name, value in flat.items()}}
    assert "optimizer-keys" not in list_notes(diff(*(sides[::-1] if is_reversed else sides)))


def test_parameters_of_other_shapes_are_not_paired(diff, optimizer_forms):
    """The order alone does not pair the parameters of two models."""
    other = copy.deepcopy(optimizer_forms["names"])
    for state in other["state"].values():
        state["exp_avg"], state["exp_avg_sq"] = torch.ones(3), torch.ones(3)
    result = diff(optimizer_forms["numbers"], other)
    assert "optimizer-keys" not in list_notes(result)
    assert {change.status for change in result.changes} == {Status.ADDED, Status.REMOVED}


def test_parameters_of_one_group_with_different_settings_stay_apart(diff, optimizer_forms):
    """A flat optimizer has settings for each parameter: settings that do not fit a group are shown as they are."""
    other = copy.deepcopy(optimizer_forms["flat"])
    other["param_groups.2.weight.lr"] = 0.25
    result = diff(optimizer_forms["numbers"], other)
    assert any(setting.key.endswith("2.weight.lr") and setting.after == 0.25 for setting in result.scalars)


def test_names_that_look_like_numbers_are_names(diff):
    """A ParameterList has parameters called "0" and "1": text keys are names, even if they look like numbers."""
    parameters = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    names = get_optimizer_state_dict(parameters, optimizer)
    assert set(names["state"]) == {"0", "1"}
    result = diff(optimizer.state_dict(), names)
    assert {change.status for change in result.changes} == {Status.IDENTICAL}


@pytest.mark.parametrize("after", ["names", "flat"])
def test_names_in_another_order_than_the_model_are_not_paired(diff, after):
    """The states of two weights of one shape are swapped, and the model in the file reveals the swap."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6)).pow(2).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=after == "flat")
    honest = get_optimizer_state_dict(model, optimizer, options=options)
    exchanged = {"0.weight": "1.weight", "1.weight": "0.weight"}

    def exchange(value: Any) -> Any:
        if isinstance(value, dict):
            return {exchange(key): exchange(part) for key, part in value.items()}
        if isinstance(value, list):
            return [exchange(part) for part in value]
        if not isinstance(value, str):
            return value
        name = next((name for name in exchanged if name in value), None)
        return value if name is None else value.replace(name, exchanged[name])

    before = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    honest_diff = diff(before, {"model": model.state_dict(), "optimizer": honest})
    assert {change.status for change in honest_diff.changes} == {Status.IDENTICAL}
    exchanged_diff = diff(before, {"model": model.state_dict(), "optimizer": exchange(honest)})
    assert {change.status for change in exchanged_diff.changes} >= {Status.ADDED, Status.REMOVED}
