"""A diff exits with status 1 for any difference, or for an expectation that is not met."""

from __future__ import annotations

import pytest
import torch

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field
from statecli.commands.diff.run import compare_targets
from statecli.core.errors import NothingMatched
from statecli.core.model_state import Kind
from statecli.core.selection import Selection

from .conftest import list_findings

BEFORE = {
    "backbone.a.w": torch.arange(3.0),
    "backbone.b.w": torch.arange(4.0),
    "head.w": torch.arange(5.0),
    "head.bias": torch.arange(2.0),
}


def build_changed(*names: str) -> dict[str, torch.Tensor]:
    """Return a copy of the tensors in which the named tensors changed."""
    return {name: tensor + (name in names) for name, tensor in BEFORE.items()}


def test_without_expectations_every_difference_is_found(diff):
    """Each tensor is reported by its kind of change and each scalar as metadata, with the target of the finding."""
    result = diff(
        {**BEFORE, "gone": torch.ones(7), "epoch": 1}, {**build_changed("head.w"), "new": torch.ones(6), "epoch": 2}
    )
    assert list_findings(result) == [
        ("changed", "head.w"),
        ("removed", "gone"),
        ("added", "new"),
        ("metadata", "epoch"),
    ]
    assert [finding.target[-4:] for finding in result.findings] == ["b.pt", "a.pt", "b.pt", "b.pt"]
    assert [finding.message for finding in result.findings] == [
        "head.w: values differ",
        "gone: removed (float32 [7])",
        "new: added (float32 [6])",
        "epoch: 1 → 2",
    ]
    assert not result.expected


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
def test_only_failed_expectations_are_findings(options, changed, expected, diff):
    """Only a failed option is a finding; globs of an option are a union, but each --must-change is checked alone."""
    actual_diff = diff(BEFORE, build_changed(*changed), **options)
    assert list_findings(actual_diff) == expected
    assert actual_diff.expected


def test_expectations_apply_to_settings(diff):
    """A changed epoch is outside --may-change 'head.*', unless a glob names the epoch."""
    sides = {**BEFORE, "epoch": 1}, {**build_changed("head.w"), "epoch": 2}
    (finding,) = diff(*sides, only=("head.*",)).findings
    assert (finding.rule, finding.fqn, finding.section) == ("outside-only", "epoch", None)
    assert finding.message == "epoch: changed, but does not match --may-change 'head.*': 1 → 2"
    assert not diff(*sides, only=("head.*", "epoch")).findings
    assert list_findings(diff(*sides, frozen=("epoch",))) == [("frozen-changed", "epoch")]
    assert not diff(*sides, changed=("epoch",)).findings


def test_changed_flag_does_not_satisfy_must_change(diff):
    """A changed flag is not training if the values are the same."""
    actual_diff = diff({"w": torch.ones(3)}, {"w": torch.nn.Parameter(torch.ones(3))}, changed=("w",))
    assert list_findings(actual_diff) == [("unchanged", "w")]


THIRDS = torch.arange(3.0) / 3


@pytest.mark.parametrize(
    "after",
    [{"w": torch.ones(4)}, {"w": THIRDS.bfloat16()}, {"w": THIRDS, "w.b": torch.ones(1)}, {"w": THIRDS, "w.lr": 1}],
    ids=["resized", "rounded", "added", "a setting added"],
)
def test_replaced_tensor_satisfies_must_change(after, diff):
    """--must-change accepts another shape, other values after a cast, and a new tensor."""
    kept_tensors = {"other": torch.arange(9.0)}
    result = diff({**kept_tensors, "w": THIRDS}, {**kept_tensors, **after}, changed=("w*",))
    assert (result.findings, result.broken) == ((), ())


@pytest.mark.parametrize(
    ("after", "glob"),
    [
        ({"head.w": BEFORE["head.w"].bfloat16()}, "head.w"),
        ({"head.w": BEFORE["head.w"].double()}, "head.w"),
        ({"out.w": BEFORE["head.w"]}, "out.w"),
        ({"out.w": BEFORE["head.w"]}, "head.w"),
        ({}, "head.*"),
        ({"head.w": torch.nn.Parameter(BEFORE["head.w"], requires_grad=False)}, "head.w"),
        ({"head.w": BEFORE["head.w"]}, "lr"),
    ],
    ids=["narrowed exactly", "widened", "renamed to", "renamed from", "removed", "a parameter", "a setting removed"],
)
def test_tensor_with_the_same_values_fails_must_change(after, glob, statecli, save):
    """--must-change fails for a cast that keeps all values, equal bytes under another name, and a removed name."""
    other_tensors = {name: tensor for name, tensor in BEFORE.items() if name != "head.w"}
    before = save({**other_tensors, "head.w": BEFORE["head.w"], "lr": 0.1}, "a.pt")
    result = statecli("diff", before, save({**other_tensors, **after}, "b.pt"), "--must-change", glob)
    assert result.code == 1
    assert f"error[unchanged]: --must-change {glob!r}: no matching tensor changed: " in result.out


def test_any_field_counts_unless_ignored(diff):
    """Another dtype is a change of a frozen tensor, and so is an added or removed tensor."""
    half_state = {**BEFORE, "head.w": BEFORE["head.w"].half()}
    assert list_findings(diff(BEFORE, half_state, frozen=("head.*",))) == [("frozen-changed", "head.w")]
    assert not diff(BEFORE, half_state, frozen=("head.*",), ignore=(Field.DTYPE,)).findings
    smaller_state = {name: tensor for name, tensor in BEFORE.items() if name != "head.w"}
    assert list_findings(diff(BEFORE, smaller_state, frozen=("head.*",))) == [("frozen-changed", "head.w")]
    assert list_findings(diff(smaller_state, BEFORE, only=("backbone.*",))) == [("outside-only", "head.w")]


def test_renamed_tensor_is_matched_under_both_names(diff):
    """Bytes that moved out of --may-change, or into --must-not-change, count as a change."""
    moved = {("out.w" if name == "head.w" else name): tensor for name, tensor in BEFORE.items()}
    assert list_findings(diff(BEFORE, moved, only=("head.*",))) == [("outside-only", "out.w")]
    assert not diff(BEFORE, moved, only=("head.*", "out.*")).findings
    assert list_findings(diff(BEFORE, moved, frozen=("head.*",))) == [("frozen-changed", "out.w")]


def test_wrapped_name_is_matched_with_or_without_its_prefix(diff):
    """A glob need match only one of two names that differ by a stripped prefix."""
    wrapped_state = {f"module.{name}": tensor for name, tensor in build_changed("head.w").items()}
    assert not diff(BEFORE, wrapped_state, only=("head.*",)).findings
    assert list_findings(diff(BEFORE, wrapped_state, frozen=("module.head.*",))) == [
        ("frozen-changed", "module.head.w")
    ]


OPTIONS = {"only": "--may-change", "frozen": "--must-not-change", "changed": "--must-change"}


@pytest.mark.parametrize("option", OPTIONS)
def test_glob_without_a_tensor_is_an_error(option, diff):
    """Such a glob would always pass, so an error names the glob."""
    with pytest.raises(NothingMatched, match=rf"{OPTIONS[option]} 'haed\.\*': matches none of the 4 compared"):
        diff(BEFORE, BEFORE, **{option: ("head.*", "haed.*")})


@pytest.mark.parametrize("option", OPTIONS)
def test_module_name_as_glob_suggests_its_tensors(option, diff):
    """The option has `head`, and the error suggests `head.*`."""
    with pytest.raises(NothingMatched, match=r"; did you mean 'head\.\*'\?$"):
        diff(BEFORE, BEFORE, **{option: ("head",)})


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "filters",
    [
        {"selection": Selection(kind=(Kind.PARAMETER,))},
        {"selection": Selection(include=("head.*",))},
        {"selection": Selection(exclude=("epoch",))},
        {"selection": Selection(exclude=("e*",))},
    ],
)
def test_glob_of_a_hidden_setting_is_an_error(option, filters, diff):
    """If a filter hides the setting, nothing is left to check, so diff fails as for tensors."""
    sides = {**BEFORE, "epoch": 1}, {**BEFORE, "epoch": 2}
    with pytest.raises(NothingMatched, match=f"{OPTIONS[option]} 'epoch'"):
        diff(*sides, **{option: ("epoch",)}, **filters)


def test_setting_outside_the_section_is_not_matched(save):
    """The epoch is not part of `a.pt#model`."""
    state = {"model": BEFORE, "epoch": 1}
    first, second = save(state, "a.pt"), save({**state, "epoch": 2}, "b.pt")
    with pytest.raises(NothingMatched):
        compare_targets(Request(f"{first}#model", f"{second}#model", frozen=("epoch",)))


CHECKPOINT_BEFORE_STEP = {
    "model": {"w": torch.ones(3)},
    "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
}
CHECKPOINT_AFTER_STEP = {
    "model": {"w": torch.zeros(3)},
    "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
}


@pytest.mark.parametrize("glob", ["optimizer.*", "optimizer.state[0]['exp_avg']", "state[[]0]*", "state[0]['exp_avg']"])
def test_glob_matches_a_name_with_or_without_its_section(glob, diff):
    """A glob matches the FQN of a tensor or its name with the section; brackets in a name are literal."""
    moment = "state[0]['exp_avg']"
    assert list_findings(diff(CHECKPOINT_BEFORE_STEP, CHECKPOINT_AFTER_STEP, frozen=(glob,))) == [
        ("frozen-changed", moment)
    ]
    assert list_findings(diff(CHECKPOINT_BEFORE_STEP, CHECKPOINT_AFTER_STEP, only=(glob,))) == [("outside-only", "w")]
    assert not diff(CHECKPOINT_BEFORE_STEP, CHECKPOINT_AFTER_STEP, changed=(glob,)).findings
    assert [
        change.fqn
        for change in diff(CHECKPOINT_BEFORE_STEP, CHECKPOINT_AFTER_STEP, selection=Selection(include=(glob,))).changes
    ] == [moment]
    assert [
        change.fqn
        for change in diff(CHECKPOINT_BEFORE_STEP, CHECKPOINT_AFTER_STEP, selection=Selection(exclude=(glob,))).changes
    ] == ["w"]


def test_only_section_is_not_a_part_of_names(diff):
    """`-x 'model.*'` keeps the entries of a state_dict outside of its module `model`."""
    state = {"model.w": torch.ones(3), "lm_head.w": torch.ones(2)}
    assert [change.fqn for change in diff(state, state, selection=Selection(exclude=("model.*",))).changes] == [
        "lm_head.w"
    ]


def test_names_shapes_and_dtypes_are_checked_without_values(diff):
    """Checks that need no values also run without values."""
    half_state = {**BEFORE, "head.w": BEFORE["head.w"].half()}
    assert list_findings(diff(BEFORE, half_state, values=False, frozen=("head.*",))) == [("frozen-changed", "head.w")]
    assert list_findings(diff(BEFORE, half_state, values=False, only=("backbone.*",))) == [("outside-only", "head.w")]
    assert not diff(BEFORE, half_state, values=False, only=("head.*",), changed=("head.*",)).findings


@pytest.mark.parametrize("options", [{"values": False}, {"ignore": (Field.VALUES,)}])
@pytest.mark.parametrize("changed", [build_changed("head.w"), {**BEFORE, "head.w": BEFORE["head.w"].half()}])
def test_must_change_is_inconclusive_without_values(options, changed, diff):
    """--must-change neither passes nor fails for a tensor with unchanged metadata, or with only another dtype."""
    result = diff(BEFORE, changed, changed=("head.w",), **options)
    assert not result.findings
    (pair,) = result.broken
    assert pair.fqn == "head.w"
    assert "cannot check --must-change 'head.w'" in pair.message


def test_must_change_is_inconclusive_for_meta_tensors(diff):
    """The values of a meta tensor are unknown, so the tensor does not count as unchanged."""
    state = {"w": torch.empty(3, device="meta")}
    result = diff(state, state, changed=("w",))
    assert (result.findings, len(result.broken)) == ((), 1)


def test_expectations_apply_to_a_class(source, save):
    """Names, shapes and dtypes of a class are compared with a file; the initial values are not."""
    net = source("self.a = nn.Linear(2, 3)\nself.b = nn.Linear(3, 4)")
    state = {
        "a.weight": torch.ones(3, 2),
        "a.bias": torch.ones(3),
        "b.weight": torch.ones(5, 3),
        "b.bias": torch.ones(4),
    }
    path = save(state, "net.pt")
    assert list_findings(compare_targets(Request(net, path, only=("a.*",)))) == [("outside-only", "b.weight")]
    assert not compare_targets(Request(net, path, frozen=("a.*",), changed=("b.*",))).findings
    assert [tensor.fqn for tensor in compare_targets(Request(net, path, changed=("a.*",))).broken] == ["a.weight"]


def test_unchanged_message_lists_three_tensors(diff):
    """The message lists three of the tensors, and says how many more there are."""
    (finding,) = diff(BEFORE, build_changed(), changed=("*",)).findings
    assert (
        finding.message
        == "--must-change '*': no matching tensor changed: backbone.a.w, backbone.b.w, head.w and 1 more"
    )


def test_inconclusive_tensor_is_not_reported_as_unchanged(diff):
    """A broken pair is not reported as untrained; it is reported as broken."""
    dense = torch.eye(3)
    result = diff({**BEFORE, "sparse": dense}, {**BEFORE, "sparse": dense.to_sparse()}, changed=("sparse",))
    assert not result.findings
    assert [pair.fqn for pair in result.broken] == ["sparse"]


def test_unchanged_setting_fails_only_must_change(diff):
    """An unchanged setting passes --must-not-change and fails --must-change."""
    state = {**BEFORE, "lr": 0.1}
    assert not diff(state, state, frozen=("lr",)).findings
    (unchanged,) = diff(state, state, changed=("lr",)).findings
    assert (unchanged.fqn, unchanged.message) == ("lr", "--must-change 'lr': no matching tensor changed: lr")


def test_frozen_settings_beyond_the_limit_are_inconclusive(diff, monkeypatch):
    """A glob that matches settings covered only by a digest is inconclusive; a glob of a listed setting is checked."""
    monkeypatch.setattr("statecli.formats.torch.settings.MAX_SETTINGS", 200)
    before = {**BEFORE, "args": {f"x{n}": n for n in range(250)}, "epoch": 1}
    result = diff(before, {**before, "args": {**before["args"], "x240": -1}}, frozen=("args.*", "epoch"))
    assert not result.findings
    (pair,) = result.broken
    assert "cannot check --must-not-change 'args.*'" in pair.message
    assert not diff(before, before, frozen=("args.*",)).broken


@pytest.mark.parametrize(
    ("options", "changed", "expected_met"),
    [
        ({"frozen": ("backbone.*",)}, ("head.w",), [("--must-not-change 'backbone.*'", "2 tensors did not change")]),
        ({"frozen": ("backbone.*",)}, ("backbone.a.w",), []),
        ({"frozen": ("*.a.w", "epoch")}, (), [("--must-not-change '*.a.w'", "1 tensor did not change")]),
        (
            {"only": ("head.*", "epoch")},
            ("head.w",),
            [("--may-change 'head.*' 'epoch'", "the other 2 tensors did not change")],
        ),
        ({"only": ("*",)}, ("head.w",), [("--may-change '*'", "all compared names match")]),
        ({"only": ("head.*",)}, ("head.w",), []),
        ({"changed": ("head.*", "back*")}, ("head.w",), [("--must-change 'head.*'", "1 of 2 tensors changed")]),
        ({"changed": ("epoch",)}, (), [("--must-change 'epoch'", "1 of 1 setting changed")]),
    ],
)
def test_a_met_expectation_is_listed_with_its_evidence(diff, options, changed, expected_met):
    """The evidence counts tensors, so that a glob with too few matches is visible; a failed option is a finding."""
    result = diff({**BEFORE, "epoch": 1}, {**build_changed(*changed), "epoch": 2}, **options)
    assert [(item.option, item.evidence) for item in result.met] == expected_met


def test_expectation_is_not_met_without_compared_values(diff):
    """Equal shapes alone prove nothing."""
    assert not diff(BEFORE, BEFORE, frozen=("head.*",), ignore=(Field.VALUES,)).met
    assert diff(BEFORE, BEFORE, frozen=("head.*",)).met


@pytest.mark.parametrize("output", ["table", "plain", "markdown", "html"])
def test_met_expectation_is_shown(statecli, in_tmp_path, output):
    """Under a page of changes, status 0 alone does not say which expectation was checked."""
    torch.save(BEFORE, "a.pt")
    torch.save(build_changed("head.w"), "b.pt")
    result = statecli("diff", "a.pt", "b.pt", "--must-not-change", "backbone.*", "-f", output)
    text = " ".join(result.out.replace("&#39;", "'").split())
    assert result.code == 0
    assert "--must-not-change 'backbone.*'" in text
    assert "2 tensors did not change" in text
