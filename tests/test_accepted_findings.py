"""`--ignore` and `--baseline` of inspect and verify: accepted findings are counted, named with a reason, and kept."""

from __future__ import annotations

import json

import pytest

NET = """import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.table = torch.randn(5, 5)
"""


@pytest.fixture
def net(in_tmp_path, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return "net.py:Net"


def read_rules(path) -> list[tuple[str, str]]:
    return [(entry["rule"], entry["reason"]) for entry in json.loads(path.read_text())["findings"]]


def test_a_baseline_of_audit_accepts_the_same_cause_in_inspect_and_verify(statecli, net, tmp_path):
    """Each command reports another consequence of the same unregistered tensor."""
    assert statecli("audit", net, "--write-baseline", "known.json", "--reason", "mended in v2", "-q").code == 0
    for words in (["inspect", net], ["inspect", net, "--to", "meta"], ["verify", net, "--check", "move"]):
        assert statecli(*words, "-q").code == 1
        assert statecli(*words, "--baseline", "known.json", "-q").code == 0
        document = statecli(*words, "--baseline", "known.json", "-f", "json").json
        assert not document["findings"]
        assert not document.get("problems")
        assert {(row["fqn"], row["reason"]) for row in document["accepted"]} == {("table", "mended in v2")}


def test_another_tensor_is_not_accepted(statecli, net, tmp_path):
    """A baseline accepts neither another tensor nor the same tensor of another class."""
    statecli("audit", net, "--write-baseline", "known.json", "--reason", "mended in v2", "-q")
    (tmp_path / "net.py").write_text(NET + "        self.other = torch.randn(5, 5)\n" + NET.replace("Net", "Net2"))
    result = statecli("verify", net, "--check", "move", "--baseline", "known.json", "-f", "json")
    assert result.code == 1
    assert {finding["fqn"] for finding in result.json["findings"]} == {"other"}
    assert statecli("verify", "net.py:Net2", "--check", "move", "--baseline", "known.json", "-q").code == 1


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_baseline_is_written_and_read_again(command, statecli, net, tmp_path):
    """The run that writes the baseline accepts its findings; entries written by other commands stay."""
    statecli("audit", net, "--write-baseline", "known.json", "--reason", "by audit", "-q")
    earlier_rules = read_rules(tmp_path / "known.json")
    (tmp_path / "net.py").write_text(NET + "        self.other = torch.randn(5, 5)\n")
    write = (command, net, "--write-baseline", "known.json", "--reason", "later", "-q")
    assert statecli(*write).code == 0
    accepted_rules = read_rules(tmp_path / "known.json")
    assert set(earlier_rules) < set(accepted_rules)
    assert {reason for _, reason in accepted_rules} == {"by audit", "later"}
    assert statecli(command, net, "--baseline", "known.json", "-q").code == 0
    assert statecli(*write).code == 0
    assert read_rules(tmp_path / "known.json") == accepted_rules
    assert not statecli("audit", net, "--baseline", "known.json", "-f", "json").json["findings"]


FOUR = """import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.blocks = [Block() for _ in range(4)]
        {more}
"""
COMMANDS = ("inspect", "verify", "audit")


def test_a_problem_accepted_in_part_is_counted_once(statecli, in_tmp_path, tmp_path):
    """The module is still reported, so its accepted findings are not counted as an accepted problem."""
    (tmp_path / "net.py").write_text(FOUR.format(more=""))
    result = statecli("verify", "net.py:Net", "--ignore", "left-behind", "-f", "plain")
    assert result.out.endswith("\n1 error: exit status 1\n")
    assert "16 accepted findings (left-behind) belong to reported problems: --ignore left-behind" in result.out
    assert "1 problem accepted" not in result.out


@pytest.mark.parametrize("writer", COMMANDS)
def test_a_problem_accepted_in_one_command_is_accepted_in_all(writer, statecli, in_tmp_path, tmp_path):
    """The cause is the same problem in each command; another module is not accepted."""
    (tmp_path / "net.py").write_text(FOUR.format(more="self.v = self.fc.weight.detach().t()"))
    write = (writer, "net.py:Net", "--write-baseline", "known.json", "--reason", "mended in v2", "-q")
    assert statecli(*write).code == 0
    baseline_text = (tmp_path / "known.json").read_text()
    assert statecli(*write).code == 0
    assert (tmp_path / "known.json").read_text() == baseline_text
    assert {rule for rule, _ in read_rules(tmp_path / "known.json")} == {"stale-view", "unregistered-module"}
    for command in COMMANDS:
        result = statecli(command, "net.py:Net", "--baseline", "known.json", "-f", "table")
        assert result.code == 0, command
        assert "nn.ModuleList" not in result.out, command
        assert "(2 problems accepted): exit status 0" in result.out
        document = statecli(command, "net.py:Net", "--baseline", "known.json", "-f", "json").json
        assert (document["findings"], document["problems"]) == ([], []), command
        assert "baseline-fixed" not in result.out + result.err
    more = "self.v, self.others = self.fc.weight.detach().t(), [Block()]"
    (tmp_path / "net.py").write_text(FOUR.format(more=more))
    for command in COMMANDS:
        assert statecli(command, "net.py:Net", "--baseline", "known.json", "-q").code == 1, command


def test_a_result_of_an_operation_is_accepted_in_every_command(statecli, in_tmp_path, tmp_path):
    """Each command knows another consequence of `self.scaled = self.fc.weight * 2`."""
    (tmp_path / "net.py").write_text(FOUR.format(more="self.scaled = self.fc.weight * 2"))
    statecli("verify", "net.py:Net", "--write-baseline", "known.json", "--reason", "why", "-q")
    for command in COMMANDS:
        assert "compute the tensor in forward" in statecli(command, "net.py:Net", "-f", "table").out
        result = statecli(command, "net.py:Net", "--baseline", "known.json", "-f", "json")
        assert (result.code, result.json["findings"]) == (0, []), command
        assert "baseline-fixed" not in result.out, command


def test_audit_reports_the_entry_of_a_fixed_tensor(statecli, in_tmp_path, tmp_path):
    """Only audit runs all rules about registration, so only audit can report an entry of a mended tensor."""
    (tmp_path / "net.py").write_text(FOUR.format(more="self.v = self.fc.weight.detach().t()"))
    statecli("verify", "net.py:Net", "--write-baseline", "known.json", "--reason", "why", "-q")
    (tmp_path / "net.py").write_text(FOUR.format(more=""))
    result = statecli("audit", "net.py:Net", "--baseline", "known.json", "-f", "json")
    assert [note["message"].partition(": ")[2] for note in result.json["notes"]] == [
        "the baseline accepts stale-view of v, "
        "but the target no longer has this finding; remove the entry from the baseline"
    ]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_ignored_problem_is_one_problem_without_a_fix(command, statecli, in_tmp_path, tmp_path):
    """However many rules find its tensors."""
    (tmp_path / "net.py").write_text(FOUR.format(more=""))
    for output in ("plain", "table"):
        text = " ".join(statecli(command, "net.py:Net", "--ignore", "unregistered-module", "-f", output).out.split())
        assert "1 problem accepted (unregistered-module): --ignore unregistered-module" in text
        assert "nn.ModuleList" not in text
    assert "clean (1 problem accepted): exit status 0" in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_every_output_has_the_accepted_findings_and_the_reason(command, statecli, net):
    """The reason explains why "clean" may stand next to a cross."""
    words = (command, net, "--ignore", "unregistered-tensor")
    table = " ".join(statecli(*words, "-f", "table").out.split())
    assert "accepted (" in table
    assert "--ignore unregistered-tensor" in table
    assert "clean (" in table
    assert "--ignore unregistered-tensor" in statecli(*words, "-f", "plain").out
    assert "--ignore unregistered-tensor" in statecli(*words, "-f", "markdown").out
    results = statecli(*words, "-f", "sarif").json["runs"][0]["results"]
    assert results
    assert all(result["suppressions"] for result in results)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--write-baseline", "new.json"), "--write-baseline new.json: add --reason TEXT"),
        (("--reason", "known"), "--reason: works only with --write-baseline FILE"),
        (("--baseline", "missing.json"), "missing.json: the baseline cannot be opened"),
    ],
)
def test_a_wrong_line_is_an_error(command, options, error, statecli, net, tmp_path):
    """The error is one message with status 2, and no file is written."""
    result = statecli(command, net, *options)
    assert result.code == 2
    assert error in result.err
    assert not (tmp_path / "new.json").exists()
