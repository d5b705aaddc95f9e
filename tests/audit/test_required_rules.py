"""An option that no selected rule uses is refused; an unused key of the configuration is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from statecli.commands.audit import required_rules
from statecli.commands.audit.result import Audit
from statecli.rules.audit_subject import needs_class_or_reference, needs_module, needs_values
from statecli.rules.dictionary import RULES
from statecli.rules.policy_config import Policy
from statecli.targets.target_result import Skipped, TargetResult, TargetStatus

NET = "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(1, 1)\n"


@pytest.fixture(autouse=True)
def _locked_checkpoint(in_tmp_path, statecli):
    """Write a checkpoint, its lock and its class."""
    torch.save(torch.nn.Linear(1, 1).state_dict(), "a.pt")
    Path("net.py").write_text(NET)
    assert statecli("lock", "a.pt", "-o", "l.json").code == 0


def test_each_policy_key_has_rules():
    """Each policy key has rules, and the tables name only existing rules or rule groups."""
    assert set(required_rules.RULES_BY_POLICY_KEY) == set(Policy.__struct_encode_fields__)
    names = {name for rule in RULES for name in (rule.name, rule.group)}
    assert {
        name
        for table in (required_rules.RULES_BY_POLICY_KEY, required_rules.RULES_BY_OPTION)
        for names_of_key in table.values()
        for name in names_of_key
    } <= names


@pytest.mark.parametrize(
    ("option", "needs"),
    [
        ("against", {needs_class_or_reference}),
        ("model", {needs_class_or_reference, needs_module}),
        ("values", {needs_values}),
    ],
    ids=["against", "model", "values"],
)
def test_each_rule_that_needs_an_option_is_listed_for_the_option(option, needs):
    """Otherwise the option would be refused when only this rule is selected."""
    for rule in RULES:
        if needs & set(rule.needs):
            assert {rule.name, rule.group} & set(required_rules.RULES_BY_OPTION[option]), rule.name


OPTIONS = [("--lock", "l.json"), ("--against", "a.pt"), ("--model", "net.py:Net"), ("--values",)]


@pytest.mark.parametrize("option", OPTIONS, ids=[case[0] for case in OPTIONS])
@pytest.mark.parametrize("narrowed", ["line", "file"])
def test_option_that_no_selected_rule_uses_is_refused(statecli, option, narrowed):
    """One line names the option, whether the command line or the configuration leaves the rules out."""
    Path("statecli.toml").write_text('select = "pickles"' if narrowed == "file" else "")
    result = statecli("audit", "a.pt", *option, *(("--select", "pickles") if narrowed == "line" else ()))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"statecli: {option[0]}: has no effect, because ")


@pytest.mark.parametrize("rule", ["lock-mismatch", "nan", "missing-entry"])
def test_one_rule_that_uses_the_option_is_enough(statecli, rule):
    """The other rules that use the option may be left out."""
    option = {"lock-mismatch": OPTIONS[0], "nan": OPTIONS[3], "missing-entry": OPTIONS[1]}[rule]
    assert statecli("audit", "a.pt", *option, "--select", rule).code == 0


def test_lock_without_the_rule_lock_mismatch_is_refused(statecli):
    """`values-not-locked` does not compare targets with the lock."""
    assert statecli("audit", "a.pt", *OPTIONS[0], "--ignore", "lock-mismatch").code == 2


def test_configured_settings_without_a_selected_rule_are_noted(statecli):
    """The notes are in the JSON and on stderr; the exit status does not change."""
    Path("statecli.toml").write_text(
        'lock = "l.json"\nvalues = true\npolicy = { dtype = "float32", reference = "a.pt" }'
    )
    assert statecli("audit", "a.pt").code == 0
    result = statecli("audit", "a.pt", "--select", "pickles", "-f", "json")
    assert result.code == 0
    noted_settings = [note["message"].partition(": ")[0] for note in result.json["notes"]]
    assert noted_settings == ["lock", "values", "policy.dtype", "policy.reference"]
    assert [line.split(": ")[1] for line in result.err.splitlines()] == noted_settings


def test_a_configuration_that_leaves_out_its_own_lock_is_refused(statecli):
    """The configuration contradicts itself, whatever the command line selects."""
    Path("statecli.toml").write_text('lock = "l.json"\nignore = "lock"')
    result = statecli("audit", "a.pt")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("statecli: statecli.toml: the key lock: has no effect, because")


@pytest.mark.parametrize("words", [(), ("--ignore", "pickles", "--select", "pickles")], ids=["file", "line"])
def test_audit_without_any_selected_rule_is_refused(statecli, words):
    """An audit that checks nothing never exits with status 0."""
    subjects = sorted({f'"{rule.group}"' for rule in RULES})
    Path(".git").mkdir()
    Path("statecli.toml").write_text("" if words else f"ignore = [{', '.join(subjects)}]")
    result = statecli("audit", "a.pt", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("statecli: no rule is selected: ")


def test_the_rules_of_many_targets_are_joined_once(monkeypatch):
    """Joining the rules for each skipped rule made an audit of 1,000 files take 7 s instead of 2 s."""
    joins = []
    get_ran = Audit.ran.fget
    monkeypatch.setattr(Audit, "ran", property(lambda audit: joins.append(1) or get_ran(audit)))
    skipped_rules = tuple(Skipped(f"rule-{n}", "no values") for n in range(50))
    target = TargetResult("a.pt", TargetStatus.AUDITED, ran=("nan",), skipped=skipped_rules)
    assert Audit((target,) * 100).find_unrun_rules(["rule-7"]) == (skipped_rules[7],)
    assert len(joins) == 2
