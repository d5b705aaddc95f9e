"""Inspect, verify and audit give a tensor the same severity, and --fail-on and --ignore use this severity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from statecli.core.finding import Severity
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.severity import decide_tensor_severity

HEADER = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        {body}
    def forward(self, x):
        return self.fc(x){read}
"""
#: Body of the constructor -> severity of its unregistered tensor, and the expression in forward.
CASES = {
    "random": ("self.t = torch.randn(4)", "", Severity.ERROR),
    "parameter": ("self.t = torch.ones(4, requires_grad=True)", "", Severity.ERROR),
    "module": ("self.t = [nn.Linear(4, 4)]", "", Severity.ERROR),
    "rebuilt": ("self.t = torch.arange(4.0)", "", Severity.WARNING),
    "scalar": ("self.t = torch.tensor(2.0)", "", Severity.NOTE),
    "empty": ("self.t = torch.ones(0)", "", Severity.NOTE),
}


@pytest.fixture
def write(tmp_path, in_tmp_path):
    """Write net.py with this constructor; returns the target."""

    def write_net(body, read=""):
        (tmp_path / "net.py").write_text(HEADER.format(body=body, read=read))
        return "net.py:Net"

    return write_net


def severities(result):
    """The severity of each problem."""
    return {problem["severity"] for problem in result.json["problems"]}


@pytest.mark.parametrize("case", CASES)
def test_severity_is_the_same_in_every_command(write, statecli, case):
    """A note is not shown by inspect without --to, because nothing is wrong."""
    body, read, severity = CASES[case]
    target = write(body, read)
    for arguments in (("inspect", target, "--to", "meta"), ("verify", target, "--check", "move"), ("audit", target)):
        assert severities(statecli(*arguments, "-f", "json")) == {severity.value}, arguments
    listed = statecli("inspect", target, "-f", "json")
    assert severities(listed) == ({severity.value} if severity is not Severity.NOTE else set())
    assert listed.code == (severity is Severity.ERROR)


@pytest.mark.parametrize(("value", "expected"), [("torch.randn(4)", {"error"}), ("torch.arange(4)", set())])
def test_all_commands_agree_about_a_non_persistent_buffer(write, statecli, value, expected):
    """Random values are lost: the constructor computes other values."""
    target = write(f"self.register_buffer('t', {value}, persistent=False)")
    for arguments in (("inspect", target), ("inspect", target, "--to", "meta"), ("verify", target), ("audit", target)):
        assert severities(statecli(*arguments, "-f", "json")) == expected, arguments


@pytest.mark.parametrize("command", [("inspect", "--to", "meta"), ("verify", "--check", "move")])
def test_fail_on_sets_the_exit_status(write, statecli, command):
    """An error by default; a warning if asked for."""
    name, *options = command
    target = write("self.t = torch.arange(4.0)")
    assert statecli(name, target, *options).code == 0
    assert statecli(name, target, *options, "--fail-on", "warning").code == 1
    assert "exit status 0" in statecli(name, target, *options, "-f", "table").out


@pytest.mark.parametrize("command", [("inspect", "--to", "meta"), ("verify", "--check", "move")])
def test_ignore_leaves_a_rule_out(write, statecli, command):
    """The rule is named as in the outputs, as in the finding, or by its group; an unknown name is refused."""
    name, *options = command
    target = write("self.t = torch.randn(4)")
    assert statecli(name, target, *options).code == 1
    for rule in ("unregistered-tensor", "left-behind", "move"):
        assert statecli(name, target, *options, "--ignore", rule).code == 0, rule
    refused = statecli(name, target, *options, "--ignore", "left-behnd")
    assert refused.code == 2
    assert "did you mean left-behind" in refused.err


def test_forward_that_runs_makes_a_warning_a_note(write, statecli):
    """The tensor is left on its device, and forward copies the tensor; a forward that mixes devices is an error."""
    copies = write("self.t = torch.arange(4.0)", " + self.t.to(x.device)")
    assert severities(
        statecli("verify", copies, "--input", "2x4", "--check", "move", "--check", "forward", "-f", "json")
    ) == {"note"}
    mixes = write("self.t = torch.arange(4.0)", " + self.t")
    result = statecli("verify", mixes, "--input", "2x4", "--check", "move", "--check", "forward", "-f", "json")
    assert result.code == 1
    assert severities(result) == {"error"}


#: Body of the constructor and expression in forward -> severity of the tensor in verify with an input.
FORWARDS = {
    "mixes": ("self.t = torch.arange(4.0)", " + self.t", "error"),
    "copies": ("self.t = torch.arange(4.0)", " + self.t.to(x)", "note"),
    "copies without a cast": ("self.t = torch.arange(4.0)", " + self.t.to(x.device)", "warning"),
    "running state": ("self.t = torch.zeros(4)", " + self.update(x)", "error"),
    "scalar": ("self.t = torch.tensor(2.0)", " * self.t", "note"),
    "cache by device": ("self.t = None", " + self.cache(x)", "warning"),
    "cache by device and dtype": ("self.t = None", " + self.cache(x, x.dtype)", None),
    "each time": ("self.t = None", " + (setattr(self, 't', x.detach() * 2) or x)", None),
}
METHODS = """
    def update(self, x):
        if self.training:
            self.t = 0.9 * self.t.to(x.device) + 0.1 * x.detach().mean(0)
        return self.t.to(x.device)
    def cache(self, x, dtype=torch.float32):
        if self.t is None or self.t.device != x.device or self.t.dtype != dtype:
            self.t = torch.arange(4, device=x.device, dtype=dtype)
        return self.t
"""


@pytest.mark.parametrize("case", FORWARDS)
def test_inspect_with_an_input_has_the_severity_of_verify(write, statecli, case):
    """Inspect calls forward too: on a fake GPU, by the proofs of verify."""
    body, read, severity = FORWARDS[case]
    target = write(body, read + METHODS)
    expected = {severity} if severity else set()
    verified = statecli("verify", target, "--input", "2x4", "-f", "json")
    assert severities(verified) == expected
    moved = statecli("inspect", target, "--to", "meta", "--input", "2x4", "-f", "json")
    assert severities(moved) == expected
    assert moved.code == verified.code == (severity == "error")
    assert severities(statecli("inspect", target, "--input", "2x4", "-f", "json")) == expected - {"note"}


def test_inspect_reports_the_result_of_forward_for_the_tensor(write, statecli):
    """The message has the line that mixes devices, or reports that forward ran."""
    mixes = statecli("inspect", write("self.t = torch.arange(4.0)", " + self.t"), "--to", "meta", "--input", "2x4")
    assert "on cpu while the other operands are on cuda:0, in add at net.py:10" in mixes.out
    copies = statecli(
        "inspect", write("self.t = torch.arange(4.0)", " + self.t.to(x)"), "--to", "meta", "--input", "2x4"
    )
    assert "left on cpu when the model moves to meta; forward ran without an error on a fake GPU" in copies.out


def test_inspect_says_if_a_fake_gpu_cannot_tell(write, statecli):
    """Then the severity is the same as without an input."""
    target = write("self.t = torch.arange(4.0)", " + int(torch.cuda.is_available())")
    for move in (("--to", "meta"), ()):
        result = statecli("inspect", target, *move, "--input", "2x4")
        assert result.code == 0
        assert "warning[unregistered-tensor]" in result.out
        assert "statecli does not know whether forward mixes devices: torch.cuda.is_available()" in result.out


def test_a_harmless_tensor_is_not_counted_as_failed(write, statecli):
    """The verdict, the proofs and the groups agree."""
    target = write("self.t = torch.tensor(2.0)")
    result = statecli("verify", target, "--check", "move", "-f", "json")
    assert result.json["summary"]["tensors"]["failed"] == 0
    assert result.json["verdict"] == "1 note: move passed"


def test_a_fix_in_a_row_is_one_line(write, statecli):
    """Two targets are two groups of rows; a line break in a row would be escaped."""
    target = write("self.t, self.u = torch.randn(4), torch.randn(4)")
    for output in ("table", "plain", "junit", "gitlab"):
        text = statecli("audit", target, target.replace("Net", "Net()"), "-f", output).out
        assert "\\n" not in text, output
        assert "# at the end of __init__" in text, output


def test_checks_with_failing_guessed_inputs_are_skipped(statecli, tmp_path, in_tmp_path):
    """The user did not request the proofs with a forward: they are skipped with the reason, and the status is 0."""
    (tmp_path / "odd.py").write_text(
        "from transformers import BertConfig, BertModel\n\n\nclass Net(BertModel):\n"
        "    def __init__(self):\n"
        "        super().__init__(BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=2,"
        " intermediate_size=4))\n"
        "    def forward(self, input_ids=None, **more):\n        raise ValueError('needs two images')\n"
    )
    result = statecli("verify", "odd.py:Net")
    assert result.code == 0, result
    assert "needs two images" in result.out
    assert statecli("verify", "odd.py:Net", "--input", "int64:2x3<8").code == 2


def test_tied_weights_exit_0(statecli, tmp_path, in_tmp_path):
    """A tied language model is complete; safetensors refuses the tie, and a note names the function to call."""
    (tmp_path / "tied.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.embed = nn.Embedding(8, 4)\n"
        "        self.head = nn.Linear(4, 8, bias=False)\n"
        "        self.head.weight = self.embed.weight\n"
        "    def forward(self, ids):\n        return self.head(self.embed(ids))\n"
    )
    result = statecli("verify", "tied.py:Net", "--input", "int64:2x3<8", "-f", "json")
    assert result.code == 0, result
    assert [(problem["rule"], problem["severity"]) for problem in result.json["problems"]] == [
        ("shared-in-safetensors", "note")
    ]
    assert "save_model" in result.out


def test_registered_tensor_that_does_not_move_is_an_error():
    """The class's own code undoes the move."""
    row = TensorInfo("w", "float32", (4,), 4, 16, kind=Kind.BUFFER, moves=False)
    assert decide_tensor_severity(row) is Severity.ERROR


#: Case -> body of the constructor, expression in forward, rule and severity of the tie that a move breaks.
TIES = {
    "view of a parameter": ("self.v = self.fc.weight.detach().t()", " @ self.v", "stale-view", Severity.ERROR),
    "view of a buffer": (
        "self.register_buffer('b', torch.arange(4.0)); self.v = self.b[:]",
        " + self.v.to(x.device)",
        "stale-view",
        Severity.WARNING,
    ),
    "tied buffer": ("self.register_buffer('c', self.fc.weight.data)", "", "untied-by-move", Severity.WARNING),
}


@pytest.mark.parametrize("case", TIES)
def test_broken_tie_has_the_same_severity_in_every_command(write, statecli, case):
    """Other proofs of verify that find the same tie are consequences; the line of the problem created the tie."""
    body, read, rule, severity = TIES[case]
    target = write(body, read)
    for arguments in (
        ("inspect", target),
        ("inspect", target, "--to", "meta"),
        ("audit", target),
        ("verify", target, "--input", "2x4"),
        ("verify", target, "--check", "move"),
    ):
        (problem,) = statecli(*arguments, "-f", "json").json["problems"]
        assert (problem["rule"], problem["severity"], problem["origin"]["line"]) == (rule, severity.value, 8), arguments
        assert problem["help"], arguments


def test_single_check_has_line_and_severity_of_the_broken_tie(write, statecli):
    """The copy and the forward report the tie that a move breaks, although no move is tried."""
    target = write("self.v = self.fc.weight.detach().t()", " @ self.v")
    for check, rule in (("copy", "untied-by-copy"), ("forward", "device-mismatch")):
        result = statecli("verify", target, "--check", check, "--input", "2x4", "-f", "json").json
        (problem,) = result["problems"]
        assert (problem["rule"], problem["severity"], problem["origin"]["line"]) == (rule, "error", 8)
        assert problem["help"].startswith("replace the attribute with a property")


def test_a_proof_that_failed_for_a_name_without_a_row_is_not_called_all_passed(write, statecli):
    """The heading and the line of the proof agree."""
    target = write("self.v = self.fc.weight.detach().t()", " @ self.v")
    text = statecli("verify", target, "--input", "2x4", "-f", "table").out
    assert "forward: all ✓ except v" in text
    assert "v failed" in text


def test_prefix_that_the_class_lacks_is_an_error_in_every_command(write, statecli, tmp_path):
    """Without a class the finding is a warning, because the wrapper itself may load the names."""
    target = write("")
    torch.save(torch.nn.DataParallel(torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 4)})).state_dict(), "dp.pt")
    for arguments in (("audit", "dp.pt", "--model", target), ("diff", "dp.pt", target), ("diff", target, "dp.pt")):
        findings = statecli(*arguments, "-f", "json").json["findings"]
        assert [(finding["rule"], finding["severity"]) for finding in findings] == [("wrapper-prefix", "error")], (
            arguments
        )
    (finding,) = statecli("inspect", "dp.pt", "--model", target, "-f", "json").json["findings"]
    assert (finding["rule"], finding["severity"]) == ("wrapper-prefix", "error")
    (finding,) = statecli("audit", "dp.pt", "-f", "json").json["findings"]
    assert (finding["rule"], finding["severity"]) == ("wrapper-prefix", "warning")


def test_a_prefix_that_the_checkpoint_lacks_is_an_error_of_audit_too(tmp_path, in_tmp_path, statecli):
    """A load into the wrapper refuses the names of the bare model."""
    (tmp_path / "net.py").write_text("import torch\n\ndef make():\n    return torch.compile(torch.nn.Linear(4, 4))\n")
    torch.save(torch.nn.Linear(4, 4).state_dict(), "bare.pt")
    for arguments in (("diff", "bare.pt", "net.py:make"), ("audit", "bare.pt", "--model", "net.py:make")):
        findings = statecli(*arguments, "-f", "json").json["findings"]
        assert [(finding["rule"], finding["severity"]) for finding in findings] == [("wrapper-prefix", "error")], (
            arguments
        )


def test_findings_of_a_refused_load_have_the_line_of_the_class(write, statecli):
    """The line registers the tensor, also for a missing tensor, and for the class on either side."""
    target = write("self.register_buffer('scale', torch.ones(3))")
    torch.save({"fc.weight": torch.zeros(4, 4), "fc.bias": torch.zeros(7)}, "wrong.pt")
    for arguments in (
        ("inspect", "wrong.pt", "--model", target),
        ("audit", "wrong.pt", "--model", target),
        ("diff", "wrong.pt", target),
        ("diff", target, "wrong.pt"),
    ):
        findings = statecli(*arguments, "-f", "json").json["findings"]
        lines = {(finding["rule"], finding["fqn"]): finding.get("origin", {}).get("line") for finding in findings}
        assert lines == {("shape-mismatch", "fc.bias"): 7, ("missing-entry", "scale"): 8}, arguments
        assert "net.py" in statecli(*arguments, "-f", "github").out, arguments


RESULTS = """
import torch
from torch import nn


class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(())) * 0.1

    def forward(self, x):
        return self.l(x) * self.scale


class Kernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.kernel = self.l.weight.softmax(0)

    def forward(self, x):
        return self.l(x) @ self.kernel
"""


@pytest.mark.parametrize("name", ["Mask", "Kernel"])
@pytest.mark.parametrize("command", ["inspect", "inspect --to meta", "verify", "audit"])
def test_the_result_of_an_operation_is_an_error_in_every_command(command, name, statecli, in_tmp_path):
    """deepcopy raises an error, and so does the second backward: the run stops."""
    Path("fx.py").write_text(RESULTS)
    result = statecli(*command.split(), f"fx.py:{name}", "-f", "json")
    assert result.code == 1
    assert {problem["severity"] for problem in result.json["problems"]} == {"error"}
