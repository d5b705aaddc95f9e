"""`inspect` of a checkpoint whose pickle calls a harmful function: the finding of `audit`, and exit status 1."""

from __future__ import annotations

import argparse
import os

import pytest
import torch

from statecli.pickle_scan import known_names
from statecli.rules.dictionary import DICTIONARY

from .formats.attacks import Call

FIELDS = ("rule", "severity", "message", "fqn", "help")


def save(path, value, **options):
    torch.save({"w": torch.zeros(3), "x": value}, path, **options)
    return path


@pytest.fixture
def hostile_checkpoint(in_tmp_path, tmp_path):
    save(tmp_path / "net.pt", Call(os.system, "echo hi"))
    return "net.pt"


def list_calls(statecli, command, target):
    """The findings about calls."""
    findings = statecli(command, target, "-f", "json").json["findings"]
    return [{key: row[key] for key in FIELDS} for row in findings if row["rule"] == "unsafe-global"]


@pytest.mark.parametrize("legacy", [False, True])
def test_inspect_reports_the_calls_as_audit_does(legacy, statecli, in_tmp_path, tmp_path):
    """The same rule, severity and message, in both formats of torch.save."""
    save(tmp_path / "net.pt", Call(os.system, "echo hi"), _use_new_zipfile_serialization=not legacy)
    calls = list_calls(statecli, "inspect", "net.pt")
    assert calls == list_calls(statecli, "audit", "net.pt")
    assert [row["severity"] for row in calls] == ["error"]
    assert statecli("inspect", "net.pt", "-q").code == 1


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
def test_the_verdict_names_the_call_and_the_next_step(output, statecli, hostile_checkpoint):
    """The user of a download sees the call and the next step, and the note about imports repeats neither."""
    result = statecli("inspect", hostile_checkpoint, "-f", output)
    text = " ".join(result.out.split())
    verdict = "1 error: loading the file imports or calls posix.system; statecli audit net.pt lists all calls"
    assert result.code == 1
    assert verdict in text
    assert "weights_only=False" not in text


def test_the_next_step_can_be_pasted(statecli, in_tmp_path, tmp_path):
    """Also for a name with a space; further functions are counted."""
    save(tmp_path / "my net.pt", [Call(os.system, "echo hi"), Call(os.getcwd), Call(eval, "1")])
    verdict = statecli("inspect", "my net.pt", "-f", "json").json["verdict"]
    assert verdict == (
        "1 error: loading the file imports or calls posix.system and 2 more functions; "
        "statecli audit 'my net.pt' lists all calls"
    )


def test_the_names_of_one_section_do_not_hide_the_calls(statecli, in_tmp_path, tmp_path):
    """Loading one section loads the whole pickle; filters select tensors only."""
    torch.save({"model": {"w": torch.zeros(3)}, "args": Call(os.system, "echo hi")}, tmp_path / "net.pt")
    assert len(list_calls(statecli, "inspect", "net.pt#model")) == 1
    assert statecli("inspect", "net.pt", "-i", "w*", "-q").code == 1


def test_ignore_and_the_baseline_of_audit_accept_the_call(statecli, hostile_checkpoint):
    """The import is accepted like any finding of inspect."""
    assert statecli("inspect", hostile_checkpoint, "--ignore", "unsafe-global", "-q").code == 0
    assert statecli("audit", hostile_checkpoint, "--write-baseline", "known.json", "--reason", "a test", "-q").code == 0
    assert statecli("inspect", hostile_checkpoint, "--baseline", "known.json", "-q").code == 0


@pytest.mark.parametrize("value", [argparse.Namespace(lr=1), torch.nn.Linear(2, 2)])
def test_other_objects_are_not_scanned(value, statecli, in_tmp_path, tmp_path, monkeypatch):
    """A scan costs more than the listing; the note names the classes."""
    monkeypatch.setattr("statecli.file_scan.scan.scan_pickles", None)
    save(tmp_path / "net.pt", value)
    result = statecli("inspect", "net.pt", "-f", "json")
    assert result.code == 0
    assert result.json["findings"] == []


@pytest.mark.parametrize(
    "name", ["os.system", "argparse.Namespace.__init__.__globals__", "collections.OrderedDict.fromkeys.__self__"]
)
def test_a_name_with_dots_is_harmful(name):
    """The reader lists `module.name`, and both may have dots."""
    assert known_names.may_be_harmful(name)


def test_a_name_of_data_is_not_harmful():
    """These names are in clean files, and need no scan."""
    for name in ("argparse.Namespace", "numpy._core.multiarray.scalar", "pathlib.PosixPath", "my.project.Config"):
        assert not known_names.may_be_harmful(name)


def test_the_rule_lists_both_commands():
    """`statecli rules unsafe-global` lists the commands that report the rule."""
    assert DICTIONARY["unsafe-global"].commands == ("inspect", "audit")
