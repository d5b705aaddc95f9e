"""Rules that check the policy of a project."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.rules.policy_config import Policy

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"


@pytest.fixture
def pair(tmp_path):
    """A reference checkpoint, and a checkpoint with another value of a single element of the head."""
    tensors = {"encoder.w": torch.zeros(4), "head.w": torch.zeros(2)}
    save_file(tensors, tmp_path / "before.safetensors")
    trained = tensors | {"head.w": torch.tensor([0.0, 1.0])}
    save_file(trained, tmp_path / "after.safetensors", metadata={"license": "mit"})
    return str(tmp_path / "before.safetensors"), tmp_path / "after.safetensors"


def test_missing_metadata_finds_a_missing_key(run_rule, pair):
    """Of two required keys, the missing key is reported."""
    (finding,) = run_rule("missing-metadata", pair[1], policy=Policy(require_metadata=("license", "commit")))
    assert "commit" in finding.message


def test_missing_metadata_spares_a_key_with_a_value(run_rule, pair):
    """The policy requires `license`, and the value is `mit`."""
    assert not run_rule("missing-metadata", pair[1], policy=Policy(require_metadata=("license",)))


@pytest.mark.parametrize("rule", ["unchanged-tensor", "changed-tensor"])
def test_module_name_as_glob_suggests_its_tensors(run_rule, pair, rule):
    """The policy has `head` instead of `head.*`."""
    (finding,) = run_rule(
        rule, pair[1], against=pair[0], policy=Policy(must_change=("head",), must_not_change=("head",))
    )
    assert finding.message.endswith("matches no tensor of the target or the reference; did you mean 'head.*'?")


@pytest.mark.parametrize(
    "metadata", [{"license": ""}, {"license": " "}, {"license": None}, {"args": {"license": None}}]
)
def test_missing_metadata_finds_a_key_without_a_value(run_rule, tmp_path, metadata):
    """A key without a value is as bad as a missing key. The message names the key."""
    torch.save({"model": {"w": torch.zeros(2)}, **metadata}, tmp_path / "a.pt")
    (finding,) = run_rule("missing-metadata", tmp_path / "a.pt", policy=Policy(require_metadata=("license",)))
    assert f"{'args.' if 'args' in metadata else ''}license has no value" in finding.message


@pytest.mark.parametrize("value", [0, False, 3, "mit"])
def test_missing_metadata_spares_zero_and_false(run_rule, tmp_path, value):
    """Zero and False are values. Without a key of the same path, a plain name matches a key inside the settings."""
    torch.save({"model": {"w": torch.zeros(2)}, "args": {"epoch": value}}, tmp_path / "a.pt")
    assert not run_rule("missing-metadata", tmp_path / "a.pt", policy=Policy(require_metadata=("epoch", "args.epoch")))


def test_missing_metadata_takes_the_outer_key_before_a_nested_key(run_rule, tmp_path):
    """`args.epoch` does not make up for an empty `epoch`, and no part of a dotted key is left out."""
    state = {"model": {"w": torch.zeros(2)}, "epoch": "", "args": {"epoch": 3, "in": {"lr": 0.1}}}
    torch.save(state, tmp_path / "a.pt")
    policy = Policy(require_metadata=("epoch", "in.lr", "args.in.lr"))
    assert [finding.message[:7] for finding in run_rule("missing-metadata", tmp_path / "a.pt", policy=policy)] == [
        "epoch: ",
        "in.lr: ",
    ]


def test_missing_metadata_is_skipped_for_a_class():
    """A class has no metadata, and the rule is skipped for this reason."""
    text = f"{SAMPLES / 'net_fixed.py'}:Net"
    request = Request((text,), select=("missing-metadata",), policy=Policy(require_metadata=("license",)))
    (rule,) = audit(request).skipped_rules
    assert rule.reason == "a class has no metadata: audit a checkpoint"


def test_unchanged_tensor_finds_a_tensor_that_must_change(run_rule, pair):
    """The policy expects a change of the encoder, but the encoder is unchanged."""
    (finding,) = run_rule("unchanged-tensor", pair[1], against=pair[0], policy=Policy(must_change=("encoder.*",)))
    assert finding.fqn == "encoder.w"


def test_unchanged_tensor_spares_a_changed_tensor(run_rule, pair):
    """A single changed element of the head is enough."""
    assert not run_rule("unchanged-tensor", pair[1], policy=Policy(must_change=("head.*",), reference=pair[0]))


def test_changed_tensor_finds_a_tensor_that_must_not_change(run_rule, pair):
    """The values of the head changed."""
    (finding,) = run_rule("changed-tensor", pair[1], against=pair[0], policy=Policy(must_not_change=("*",)))
    assert finding.fqn == "head.w"


def test_changed_tensor_spares_an_unchanged_tensor(run_rule, pair):
    """The encoder is the same, bit for bit."""
    assert not run_rule("changed-tensor", pair[1], against=pair[0], policy=Policy(must_not_change=("encoder.*",)))


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        ("missing-metadata", Policy(require_metadata=("commit",))),
        ("unchanged-tensor", Policy(must_change=("encoder.*",))),
        ("unchanged-tensor", Policy(must_change=("none.*",))),
        ("changed-tensor", Policy(must_not_change=("head.*",))),
        ("changed-tensor", Policy(must_not_change=("none.*",))),
        ("too-large", Policy(max_bytes=1)),
    ],
)
def test_findings_of_a_policy_have_a_help_text(run_rule, pair, rule, policy):
    """Each finding of a policy rule has a help text."""
    (finding,) = run_rule(rule, pair[1], against=pair[0], policy=policy)
    assert finding.help


def test_notes_about_dtypes_and_ties_have_a_help_text(run_rule, tmp_path):
    """The help text starts with the intended case and continues with the action for other cases."""
    shared = torch.zeros(4)
    torch.save({"a": shared, "b": shared, "c": torch.zeros(3, dtype=torch.float16)}, tmp_path / "a.pt")
    starts = {
        "mixed-dtypes": "no action is needed if different dtypes are intended; otherwise ",
        "tied-tensors": "intentional for tied weights; otherwise ",
    }
    for rule, start in starts.items():
        (finding,) = run_rule(rule, tmp_path / "a.pt")
        assert finding.help.startswith(start)


@pytest.mark.parametrize("rule", ["unchanged-tensor", "changed-tensor"])
def test_tensor_without_values_is_neither_changed_nor_unchanged(rule, run_rule, tmp_path):
    """Neither file has values, so a finding replaces a silent pass."""
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2, device="meta")}, tmp_path / name)
    policy = Policy(must_change=("w",)) if rule == "unchanged-tensor" else Policy(must_not_change=("w",))
    (finding,) = run_rule(rule, str(tmp_path / "b.pt"), against=str(tmp_path / "a.pt"), policy=policy)
    assert finding.fqn == "w"
    assert "neither side has values" in finding.message
