"""GitLab's Code Quality report has the required keys, a fingerprint for each issue, and always a line."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from statecli.core.model_state import Origin, Place
from statecli.targets.location import compute_fingerprint

from ..audits import ERROR, NOTE, WARNING, accept_findings, failed_target, finding, render_audit, skipped_target, target
from ..published import gitlab


def issues(*targets, **options):
    return gitlab(render_audit("gitlab", *targets, **options))


def test_reader_of_issues_rejects_incomplete_issues():
    """The reader of these tests can fail."""
    with pytest.raises(KeyError):
        gitlab('[{"description": "x"}]')


def test_issue_has_the_fields_that_gitlab_requires():
    """The issue has the finding's own fingerprint and file, and line 1: GitLab hides an issue without a line."""
    problem = finding(help="go back one epoch")
    assert issues(target("a.pt", problem)) == [
        {
            "description": "fc.weight: is nan (help: go back one epoch)",
            "check_name": "nan",
            "fingerprint": compute_fingerprint(problem),
            "severity": "major",
            "location": {"path": "a.pt", "lines": {"begin": 1}},
        }
    ]


@pytest.mark.parametrize(("severity", "word"), [(ERROR, "major"), (WARNING, "minor"), (NOTE, "info")])
def test_severity_is_major_minor_info_or_blocker(severity, word):
    """Three of GitLab's five severities are used, and an unreadable target is a blocker."""
    assert [issue["severity"] for issue in issues(target("a.pt", finding(severity=severity)))] == [word]
    assert [issue["severity"] for issue in issues(failed_target("no.pt"))] == ["blocker"]


def test_finding_with_the_reason_of_an_unreadable_target_is_a_blocker():
    """The reason is one issue, of the severity of all unreadable targets."""
    problem = finding("unscanned-pickle", message="file is truncated: statecli scanned only a part", fqn=None)
    failed = replace(failed_target("a.pt", "file is truncated"), findings=(problem,))
    assert [issue["severity"] for issue in issues(failed)] == ["blocker"]


def test_issue_has_the_source_line_or_line_1():
    """The line is in the file that assigned the tensor; a place in bytes becomes line 1 of its file."""
    actual = (finding(origin=Origin("pkg/net.py", 9)), finding("inf", place=Place("m/s-1.safetensors", 8, 4)))
    assert [issue["location"] for issue in issues(target("m", *actual))] == [
        {"path": "pkg/net.py", "lines": {"begin": 9}},
        {"path": "m/s-1.safetensors", "lines": {"begin": 1}},
    ]


def test_a_path_does_not_begin_with_a_dot():
    """GitLab compares the path with the paths of the repository."""
    assert issues(target("./a.pt", finding(target="./a.pt")))[0]["location"]["path"] == "a.pt"


def test_fingerprints_are_unique_and_the_same_in_each_run():
    """Two findings of a tensor and a rule are two issues, with the same fingerprints in the next run."""
    numbers = [finding(message=f"fc.weight: {n}", help=str(n)) for n in range(3)]
    first = [issue["fingerprint"] for issue in issues(target("a.pt", *numbers))]
    assert len(set(first)) == 3
    assert first == [issue["fingerprint"] for issue in issues(target("a.pt", *numbers))]


def test_accepted_findings_and_skipped_targets_have_no_issue():
    """The report has only problems to fix."""
    assert issues(target("a.pt", accepted=accept_findings("known", finding())), skipped_target("README.md")) == []


def test_a_clean_run_is_an_empty_list():
    """GitLab compares the empty list with the last report to show the fixed issues."""
    assert render_audit("gitlab", target()) == "[]\n"


def test_quiet_keeps_all_issues():
    """The report stays complete, because programs read it."""
    assert issues(target("a.pt", finding(severity=NOTE)), quiet=True)


def test_a_path_with_a_line_break_is_the_path_of_the_file():
    """JSON encodes the line break; a text `\\n` would name no file of the repository."""
    (issue,) = issues(target("a\nb.pt", finding(target="a\nb.pt")))
    assert issue["location"]["path"] == "a\nb.pt"
