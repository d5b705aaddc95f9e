"""`per-target-ignore` and `severity`: the targets that a glob matches, and the order of a rule and its group."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def project(tmp_path, monkeypatch, statecli):
    """A configuration above a checkpoint with a single finding; `audit(text, folder, target)` returns the JSON."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "vendor").mkdir()
    (tmp_path / "other").mkdir()
    torch.save({"w": torch.zeros(1), "W": torch.ones(1)}, tmp_path / "vendor" / "a.pt")

    def audit(text, folder=".", target="vendor/a.pt"):
        (tmp_path / "statecli.toml").write_text(text)
        monkeypatch.chdir(tmp_path / folder)
        return statecli("audit", target.format(tmp_path), "--select", "case-collision", "-f", "json").json

    return audit


def format_ignore_entry(glob, rule="case-collision", reason="because"):
    return f'[per-target-ignore."{glob}"]\nrules = "{rule}"\nreason = "{reason}"\n'


@pytest.mark.parametrize(
    ("folder", "target"),
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
def test_glob_is_relative_to_the_folder_of_the_configuration(project, folder, target):
    """The current folder and the spelling of the target do not matter; the file's name alone is enough."""
    for glob in ("vendor/[a].pt", "a.pt"):
        result = project(format_ignore_entry(glob), folder, target)
        assert (result["findings"], [entry["reason"] for entry in result["accepted"]]) == ([], ["because"])


@pytest.mark.parametrize("glob", ["vendor/*.pt", "./vendor/*"])
def test_a_glob_may_have_a_folder(project, glob):
    """`./` before the folder does not matter."""
    assert [entry["reason"] for entry in project(format_ignore_entry(glob))["accepted"]] == ["because"]


@pytest.mark.parametrize("glob", ["other/*", "*.ckpt", "../vendor/*"])
def test_glob_that_does_not_match_accepts_nothing(project, glob):
    """A glob that does not match the target leaves the finding in place."""
    assert len(project(format_ignore_entry(glob))["findings"]) == 1


@pytest.mark.parametrize("order", [1, -1])
def test_reason_of_a_rule_overrides_the_reason_of_its_group(project, order):
    """The rule's own reason comes before its group's, in any order of the tables."""
    tables = [format_ignore_entry("*.pt", "case-collision", "own"), format_ignore_entry("vendor/*", "names", "subject")]
    assert [entry["reason"] for entry in project("".join(tables[::order]))["accepted"]] == ["own"]


@pytest.mark.parametrize("order", [1, -1])
def test_severity_of_a_rule_overrides_the_severity_of_its_group(project, order):
    """The order of the two entries does not matter."""
    entries = ['case-collision = "error"', 'names = "note"'][::order]
    (finding,) = project("\n".join(["[severity]", *entries]))["findings"]
    assert finding["severity"] == "error"
