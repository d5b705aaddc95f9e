"""A finding accepted once, with a reason, no longer fails; a new finding fails."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given, strategies as st
from msgspec import UNSET

from statecli.commands.audit import baseline
from statecli.commands.audit.baseline import Baseline, BaselineEntry
from statecli.commands.audit.result import Audit
from statecli.core.finding import Finding, Severity
from statecli.targets.target_result import TargetResult, TargetStatus


@pytest.fixture
def repository(in_tmp_path, statecli):
    """A checkpoint with two names that differ in case; `audit(…)` runs the rule `case-collision`."""
    save("a.pt", "w", "W", "v", "V")

    def audit(*words, rule="case-collision", target="a.pt"):
        return statecli("audit", target, "--select", rule, *words)

    return audit


def save(path, *names):
    torch.save({name: torch.full((1,), float(n)) for n, name in enumerate(names)}, path)


def read_entries(path="b.json"):
    with open(path, encoding="utf-8") as file:
        return {finding["fqn"]: finding for finding in json.load(file)["findings"]}


def test_accepted_findings_are_counted_and_do_not_fail(repository):
    """The findings are accepted in the run that writes the file, and in later runs; JSON has the reason."""
    assert repository().code == 1
    write_result = repository("--write-baseline", "b.json", "--reason", "older than the rule")
    assert write_result.code == 0
    assert "1 accepted" in write_result.out  # two findings of one problem
    later_result = repository("--baseline", "b.json", "-f", "json")
    assert (later_result.code, later_result.json["findings"], later_result.json["summary"]["accepted"]) == (0, [], 2)
    assert {entry["reason"] for entry in later_result.json["accepted"]} == {"older than the rule"}


def test_finding_in_a_file_whose_name_is_not_utf8_can_be_accepted(in_tmp_path, statecli):
    path = os.fsdecode(b"\xff.pt")
    save(path, "w", "W")
    words = "audit", path, "--select", "case-collision", "--baseline", "b.json"
    for _ in range(2):  # the second command also reads the baseline
        assert statecli(*words[:4], "--write-baseline", "b.json", "--reason", "test").code == 0
    assert statecli(*words).code == 0


def test_new_finding_fails(repository):
    """Only the new finding is reported."""
    repository("--write-baseline", "b.json", "--reason", "old")
    save("a.pt", "w", "W", "v", "V", "new", "New")
    result = repository("--baseline", "b.json", "-f", "json")
    assert result.code == 1
    assert [finding["fqn"] for finding in result.json["findings"]] == ["New"]


def test_fixed_entry_is_reported_and_dropped_by_the_next_baseline(repository):
    """An unneeded entry would hide the same mistake if it returned."""
    repository("--write-baseline", "b.json", "--reason", "old")
    save("a.pt", "w", "W", "v")
    result = repository("--baseline", "b.json")
    assert result.code == 0
    assert "V, but the target no longer has this finding; remove" in result.err
    assert "W: it is fixed" not in result.err
    repository("--write-baseline", "b.json", "--reason", "new")
    assert read_entries().keys() == {"W"}
    assert repository("--baseline", "b.json").err == ""


def test_older_reasons_are_kept(repository):
    """A newly accepted finding has the reason of this run; an older entry keeps its reason."""
    repository("--write-baseline", "b.json", "--reason", "old")
    save("a.pt", "w", "W", "new", "New")
    repository("--write-baseline", "b.json", "--reason", "today")
    assert {name: entry["reason"] for name, entry in read_entries().items()} == {"W": "old", "New": "today"}


def test_new_baseline_keeps_reasons_of_the_given_baseline(repository):
    """The command uses `--baseline OLD --write-baseline NEW`."""
    repository("--write-baseline", "b.json", "--reason", "old")
    repository("--baseline", "b.json", "--write-baseline", "c.json", "--reason", "today")
    assert {entry["reason"] for entry in read_entries("c.json").values()} == {"old"}


@pytest.mark.parametrize("words", [("-x", "*"), ("-i", "w"), ("--kind", "buffer")])
def test_filtered_finding_keeps_its_entry(repository, words):
    """Filters hide a finding and do not fix the problem."""
    repository("--write-baseline", "b.json", "--reason", "old")
    repository("--write-baseline", "b.json", "--reason", "today", *words)
    assert read_entries().keys() == {"V", "W"}


def test_run_keeps_entries_of_other_targets_and_rules(repository):
    """A run changes only entries of the audited targets and rules."""
    repository("--write-baseline", "b.json", "--reason", "old")
    save("other.pt", "w")
    assert repository("--write-baseline", "b.json", "--reason", "today", target="other.pt").err == ""
    assert repository("--write-baseline", "b.json", "--reason", "today", rule="oversized-storage").err == ""
    assert read_entries().keys() == {"V", "W"}


def test_spellings_of_a_path_are_one_target(repository, tmp_path):
    """`./a.pt` and its absolute path are `a.pt`, and no absolute path is written."""
    repository("--write-baseline", "b.json", "--reason", "old", target=str(tmp_path / "a.pt"))
    assert str(tmp_path) not in (tmp_path / "b.json").read_text()
    assert repository("--baseline", "b.json", target="./a.pt").code == 0


@pytest.mark.parametrize(
    ("folder", "target"), [("d", "."), ("d", "a.pt"), (".", "d"), ("e", "../d"), ("e", "{}/d/a.pt")]
)
def test_targets_are_relative_to_the_folder_of_the_baseline(repository, tmp_path, monkeypatch, folder, target):
    """Any current folder and any spelling of the targets give the same entries and the same bytes."""
    (tmp_path / "d").mkdir()
    (tmp_path / "e").mkdir()
    (tmp_path / "a.pt").rename(tmp_path / "d" / "a.pt")
    repository("--write-baseline", "b.json", "--reason", "old", target="d/a.pt")
    first = (tmp_path / "b.json").read_bytes()
    monkeypatch.chdir(tmp_path / folder)
    target = target.format(tmp_path)
    assert repository("--baseline", str(tmp_path / "b.json"), target=target).code == 0
    repository("--write-baseline", str(tmp_path / "b.json"), "--reason", "new", target=target)
    assert (tmp_path / "b.json").read_bytes() == first
    repository("--write-baseline", "new.json", "--reason", "new", "--baseline", str(tmp_path / "b.json"), target=target)
    assert {target["target"] for target in read_entries("new.json").values()} == {
        {"d": "a.pt", ".": "d/a.pt", "e": "../d/a.pt"}[folder]
    }
    assert {entry["reason"] for entry in read_entries("new.json").values()} == {"old"}


def test_deleted_target_is_reported_and_dropped(repository, tmp_path):
    """A deleted file of the audited folder is reported; a deleted file of another folder is not."""
    for folder in ("d", "e"):
        (tmp_path / folder).mkdir()
        save(f"{folder}/x.pt", "w", "W")
        repository("--write-baseline", "b.json", "--reason", "old", target=folder)
        (tmp_path / folder / "x.pt").unlink()
    save("d/y.pt", "w")
    result = repository("--baseline", "b.json", target="d")
    assert result.code == 0
    assert result.err.count("\n") == 1
    assert (
        "d/x.pt: no longer exists, but the baseline accepts 1 finding of this target; "
        "to remove these entries, use --write-baseline" in result.err
    )
    assert "no longer exists" in repository("--write-baseline", "b.json", "--reason", "new", target="d").err
    assert {target["target"] for target in read_entries().values()} == {"e/x.pt"}
    assert repository("--baseline", "b.json", target="d").err == ""


def test_class_imported_by_name_is_never_missing():
    """`pkg.mod:Net` is not a file of any folder."""
    entry = BaselineEntry("pkg.mod:Net", "r", None, None, "why", "m")
    assert not baseline.find_missing_entries(Baseline(baseline.SCHEMA, (entry,)), ["."])


def test_unknown_rule_in_a_baseline_is_an_error(repository, tmp_path):
    """An entry for an unknown rule would stay forever and accept nothing; the error suggests similar names."""
    repository("--write-baseline", "b.json", "--reason", "old")
    path = tmp_path / "b.json"
    path.write_text(path.read_text().replace('"case-collision"', '"case-colision"', 1))
    result = repository("--baseline", "b.json")
    assert (result.code, result.out) == (2, "")
    assert "'case-colision' of a.pt, but this rule does not exist; did you mean case-collision?" in result.err
    path.write_text(path.read_text().replace('"case-colision"', '"zzzz"', 1))
    advice = "remove the entry, or use --plugin to load the plugin that defines the rule"
    assert repository("--baseline", "b.json").err.endswith(f"this rule does not exist; {advice}\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX: named pipes")
def test_pipe_or_device_is_refused_as_baseline(repository, tmp_path):
    """Reading a named pipe would block, and reading a device would not end."""
    os.mkfifo(tmp_path / "pipe")
    for path, file_kind in (("pipe", "a named pipe"), ("/dev/zero", "a character device")):
        result = repository("--baseline", path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert file_kind in result.err


def test_a_report_is_not_written_over_the_baseline(repository, tmp_path):
    """A report does not replace a baseline written in the same run either."""
    result = repository("--write-baseline", "b.json", "--reason", "x", "--report", "json=./b.json")
    assert (result.code, (tmp_path / "b.json").exists()) == (2, False)
    assert "writes to the same file" in result.err


def test_baseline_has_one_sorted_entry_per_line(repository, tmp_path):
    """git can merge the file and a reviewer can read the entries; the order of the checkpoint has no effect."""
    repository("--write-baseline", "b.json", "--reason", "old")
    lines = (tmp_path / "b.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["fqn"] for line in lines[1:-1]] == ["V", "W"]
    save("a.pt", "v", "V", "w", "W")
    repository("--write-baseline", "other.json", "--reason", "old")
    assert (tmp_path / "other.json").read_text().splitlines() == lines


def test_write_baseline_and_reason_require_each_other(repository, tmp_path):
    """A baseline without a reason is refused, and so is a reason without a baseline."""
    for words in (("--write-baseline", "b.json"), ("--write-baseline", "b.json", "--reason", " "), ("--reason", "x")):
        result = repository(*words)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "--reason" in result.err
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is an empty file"),
        (
            '{"schema":"statecli.baseline/2","findings":[{"rule":"nan","target":"a","section":null,"fqn":null,"reason":""}]}',
            "without a reason",
        ),
        ("[" * 50_000, "has lists and objects that are nested too deeply for statecli to read"),
        ('{"schema": "statecli.lock/1"}', "statecli.lock/1"),
        ('{"schema": "statecli.baseline/2"}', "findings"),
        ('{"schema": "statecli.baseline/2", "findings": [{"rule": "x"}]}', "target"),
        ("<<<<<<< ours\n", "conflict markers"),
    ],
)
def test_invalid_baseline_is_refused_and_not_overwritten(repository, tmp_path, text, message):
    """`--write-baseline` leaves the file alone too, because it may be the user's."""
    (tmp_path / "b.json").write_text(text)
    for words in (("--baseline", "b.json"), ("--write-baseline", "b.json", "--reason", "x")):
        result = repository(*words)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "b.json" in result.err
        assert message in result.err
    assert (tmp_path / "b.json").read_text() == text


def test_missing_baseline_is_a_one_line_error(repository):
    """A missing baseline is not treated as an empty baseline."""
    result = repository("--baseline", "none.json")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def build_audit(*findings, ran=("r",)):
    return Audit((TargetResult("a.pt", TargetStatus.AUDITED, findings=findings, ran=ran),))


def build_finding(rule="r", message="m", fqn=None, section=None, about=UNSET, content=UNSET):
    return Finding(rule, Severity.ERROR, message, "a.pt", fqn, section=section, about=about, content=content)


def test_finding_without_a_tensor_is_matched_by_its_message():
    """Accepting one dangerous global does not accept the next."""
    accepted = baseline.build_baseline(
        build_audit(build_finding(message="calls os.getcwd")), None, "why", unfiltered=True
    )
    later_audit = build_audit(build_finding(message="calls os.getcwd"), build_finding(message="calls os.system"))
    result = baseline.accept_findings(later_audit, accepted, unfiltered=True)
    assert [finding.message for finding in result.findings] == ["calls os.system"]


def test_finding_about_a_call_is_matched_by_the_called_name():
    """The position in the pickle may change; the called function may not."""
    seven = build_finding(message="byte 7: calls", about="os.getcwd", content="1f")
    accepted = baseline.build_baseline(build_audit(seven), None, "why", unfiltered=True)
    later_findings = [
        build_finding(message="byte 9: calls", about=text, content="1f") for text in ("os.getcwd", "os.system")
    ]
    result = baseline.accept_findings(build_audit(*later_findings), accepted, unfiltered=True)
    assert [finding.about for finding in result.findings] == ["os.system"]


def test_internal_error_is_never_accepted():
    """A rule with an internal error has no result that a user could accept."""
    bug = build_audit(build_finding("internal-error"))
    assert not baseline.build_baseline(bug, None, "why", unfiltered=True).findings
    entry = BaselineEntry("a.pt", "internal-error", None, None, "why", "m")
    assert baseline.accept_findings(bug, Baseline(baseline.SCHEMA, (entry,)), unfiltered=True).findings


@given(
    st.lists(st.tuples(st.sampled_from(["nan", "inf"]), st.text(max_size=2), st.none() | st.text(max_size=2))),
    st.text(min_size=1).filter(str.strip),
)
def test_written_baseline_accepts_all_findings_and_round_trips(tmp_path_factory, rows, reason):
    """Names and messages may be any text; the document is the same when read back or written again."""
    audit = build_audit(
        *(build_finding(rule, message, fqn, "model") for rule, message, fqn in rows), ran=("nan", "inf")
    )
    document = baseline.build_baseline(audit, None, reason, unfiltered=True)
    path = tmp_path_factory.mktemp("b") / "b.json"
    path.write_bytes(b"".join(baseline.encode_baseline(document, str(path))))
    assert baseline.read_baseline(str(path)) == document
    accepted_audit = baseline.accept_findings(audit, document, unfiltered=True)
    assert (accepted_audit.findings, len(accepted_audit.targets[0].accepted), accepted_audit.targets[0].notes) == (
        (),
        len(rows),
        (),
    )
    assert baseline.build_baseline(accepted_audit, document, "another", unfiltered=True) == document
