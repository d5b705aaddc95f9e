"""`per-target-ignore` and `severity`: the targets that a glob matches, and the order of a rule and its group."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def project(tmp_path, monkeypatch, statecli):
    """A configuration above a checkpoint with a single finding; `audit(text, where, target)` returns the JSON."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "vendor").mkdir()
    (tmp_path / "other").mkdir()
    torch.save({"w": torch.zeros(1), "W": torch.ones(1)}, tmp_path / "vendor" / "a.pt")

    def audit(text, where=".", target="vendor/a.pt"):
        (tmp_path / "statecli.toml").write_text(text)
        monkeypatch.chdir(tmp_path / where)
        return statecli("audit", target.format(tmp_path), "--select", "case-collision", "-f", "json").json

    return audit


def ignoring(glob, rule="case-collision", reason="because"):
    return f'[per-target-ignore."{glob}"]\nrules = "{rule}"\nreason = "{reason}"\n'


@pytest.mark.parametrize(
    ("where", "target"),
    [
        (".", "vendor/a.pt"),
        (".", "./vendor//a.pt"),
        (".", "{}/vendor/a.pt"),
        (".", "vendor"),
        ("vendor", "a.pt"),
        ("vendor", "."),
        ("other", "../vendor/a.pt"),
        ("other", "{}/vendor"),
    ],
)
def test_a_glob_is_meant_from_the_configuration_s_folder(project, where, target):
    """The current folder and the spelling of the target do not matter; the file's name alone is enough."""
    for glob in ("vendor/[a].pt", "a.pt"):
        result = project(ignoring(glob), where, target)
        assert (result["findings"], [entry["reason"] for entry in result["accepted"]]) == ([], ["because"])


@pytest.mark.parametrize("glob", ["vendor/*.pt", "./vendor/*"])
def test_a_glob_may_have_a_folder(project, glob):
    """`./` before the folder does not matter."""
    assert [entry["reason"] for entry in project(ignoring(glob))["accepted"]] == ["because"]


@pytest.mark.parametrize("glob", ["other/*", "*.ckpt", "../vendor/*"])
def test_a_glob_of_others_is_not_of_it(project, glob):
    """A glob that does not match the target leaves the finding in place."""
    assert len(project(ignoring(glob))["findings"]) == 1


@pytest.mark.parametrize("order", [1, -1])
def test_the_reason_of_a_rule_s_own_name_is_shown(project, order):
    """The rule's own reason comes before its group's, in any order of the tables."""
    tables = [ignoring("*.pt", "case-collision", "own"), ignoring("vendor/*", "names", "subject")]
    assert [entry["reason"] for entry in project("".join(tables[::order]))["accepted"]] == ["own"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_severity_of_a_rule_s_own_name_counts(project, order):
    """The order of the two entries does not matter."""
    said = ['case-collision = "error"', 'names = "note"'][::order]
    (finding,) = project("\n".join(["[severity]", *said]))["findings"]
    assert finding["severity"] == "error"
