"""What makes a diff exit 1: any difference, or what was expected and is not so."""

from __future__ import annotations

import pytest
import torch

from statecli.diff.result import Field
from statecli.errors import NothingMatched

from .conftest import rules

BEFORE = {
    "backbone.a.w": torch.arange(3.0),
    "backbone.b.w": torch.arange(4.0),
    "head.w": torch.arange(5.0),
    "head.bias": torch.arange(2.0),
}


def after(*names: str) -> dict[str, torch.Tensor]:
    """A copy in which these changed."""
    return {name: tensor + (name in names) for name, tensor in BEFORE.items()}


def test_without_expectations_every_difference_is_found(diff):
    """Each tensor by the name of what became of it, each scalar as metadata, with the target it is about."""
    found = diff({**BEFORE, "gone": torch.ones(7), "epoch": 1}, {**after("head.w"), "new": torch.ones(6), "epoch": 2})
    assert rules(found) == [("changed", "head.w"), ("removed", "gone"), ("added", "new"), ("metadata", None)]
    assert [finding.target[-4:] for finding in found.findings] == ["b.pt", "a.pt", "b.pt", "b.pt"]
    assert [finding.message for finding in found.findings] == [
        "head.w: values",
        "gone: removed (float32 [7])",
        "new: added (float32 [6])",
        "epoch: 1 → 2",
    ]
    assert not found.expected


@pytest.mark.parametrize(
    ("options", "changed", "expected"),
    [
        ({"only": ("head.*",)}, ("head.w",), []),
        ({"only": ("head.*",)}, (), []),
        ({"only": ("head.*",)}, ("head.w", "backbone.a.w"), [("outside-only", "backbone.a.w")]),
        ({"only": ("head.w", "*.a.w")}, ("head.w", "backbone.a.w"), []),
        ({"frozen": ("backbone.*",)}, ("head.w",), []),
        ({"frozen": ("backbone.*",)}, ("head.w", "backbone.b.w"), [("frozen-changed", "backbone.b.w")]),
        ({"frozen": ("*.a.w", "*.b.w")}, ("backbone.b.w",), [("frozen-changed", "backbone.b.w")]),
        ({"changed": ("head.*",)}, ("head.bias",), []),
        ({"changed": ("head.*",)}, ("backbone.a.w",), [("unchanged", None)]),
        ({"changed": ("head.w",)}, (), [("unchanged", "head.w")]),
        ({"changed": ("head.*", "backbone.*")}, ("head.w",), [("unchanged", None)]),
        (
            {"only": ("head.*",), "frozen": ("head.bias",), "changed": ("head.w",)},
            ("head.bias",),
            [("frozen-changed", "head.bias"), ("unchanged", "head.w")],
        ),
    ],
)
def test_expectations(options, changed, expected, diff):
    """Only what fails is a finding; several globs of --only and --frozen are a union, each --changed stands alone."""
    found = diff(BEFORE, after(*changed), **options)
    assert rules(found) == expected
    assert found.expected


def test_scalars_are_expected_too(diff):
    """An epoch that moved on is outside --only 'head.*', unless a glob names it; --frozen holds it still."""
    sides = {**BEFORE, "epoch": 1}, {**after("head.w"), "epoch": 2}
    assert rules(diff(*sides, only=("head.*",))) == [("outside-only", None)]
    assert not diff(*sides, only=("head.*", "epoch")).findings
    assert rules(diff(*sides, frozen=("epoch",))) == [("frozen-changed", None)]
    assert not diff(*sides, changed=("epoch",)).findings


@pytest.mark.parametrize("side", [lambda w: w.double(), lambda w: torch.nn.Parameter(w)])
def test_trained_means_other_values(side, diff):
    """--changed is about values: another dtype of the same ones is no training."""
    found = diff({"w": torch.ones(3)}, {"w": side(torch.ones(3))}, changed=("w",))
    assert rules(found) == [("unchanged", "w")]


def test_any_field_counts_unless_ignored(diff):
    """Another dtype is a change of a frozen tensor, added and removed ones too."""
    half = {**BEFORE, "head.w": BEFORE["head.w"].half()}
    assert rules(diff(BEFORE, half, frozen=("head.*",))) == [("frozen-changed", "head.w")]
    assert not diff(BEFORE, half, frozen=("head.*",), ignore=(Field.DTYPE,)).findings
    fewer = {name: tensor for name, tensor in BEFORE.items() if name != "head.w"}
    assert rules(diff(BEFORE, fewer, frozen=("head.*",))) == [("frozen-changed", "head.w")]
    assert rules(diff(fewer, BEFORE, only=("backbone.*",))) == [("outside-only", "head.w")]


def test_a_renamed_tensor_goes_by_both_names(diff):
    """Bytes that moved out of --only, or into --frozen, are a change there."""
    moved = {("out.w" if name == "head.w" else name): tensor for name, tensor in BEFORE.items()}
    assert rules(diff(BEFORE, moved, only=("head.*",))) == [("outside-only", "out.w")]
    assert not diff(BEFORE, moved, only=("head.*", "out.*")).findings
    assert rules(diff(BEFORE, moved, frozen=("head.*",))) == [("frozen-changed", "out.w")]


def test_a_wrapped_name_is_inside_by_either(diff):
    """A prefix that is looked through asks nobody to write two globs."""
    wrapped = {f"module.{name}": tensor for name, tensor in after("head.w").items()}
    assert not diff(BEFORE, wrapped, only=("head.*",)).findings
    assert rules(diff(BEFORE, wrapped, frozen=("module.head.*",))) == [("frozen-changed", "module.head.w")]


@pytest.mark.parametrize("option", ["only", "frozen", "changed"])
def test_a_glob_without_a_tensor(option, diff):
    """It would hold whatever happened: an error that names it."""
    with pytest.raises(NothingMatched, match=rf"--{option} 'haed\.\*': matches none of the 4 names"):
        diff(BEFORE, BEFORE, **{option: ("head.*", "haed.*")})


def test_unchanged_names_a_few(diff):
    """The message lists three of the tensors, and says how many more there are."""
    (finding,) = diff(BEFORE, after(), changed=("*",)).findings
    assert finding.message == "--changed '*': no value in it changed: backbone.a.w, backbone.b.w, head.w and 1 more"


def test_what_could_not_be_read_is_not_unchanged(diff):
    """Of a broken pair nobody can say that it did not train; that it broke is said."""
    dense = torch.eye(3)
    found = diff({**BEFORE, "sparse": dense}, {**BEFORE, "sparse": dense.to_sparse()}, changed=("sparse",))
    assert not found.findings
    assert [broken.fqn for broken in found.broken] == ["sparse"]


def test_settings_that_stood_still(diff):
    """--frozen holds for one, and --changed fails for it."""
    state = {**BEFORE, "lr": 0.1}
    assert not diff(state, state, frozen=("lr",)).findings
    assert rules(diff(state, state, changed=("lr",))) == [("unchanged", None)]
