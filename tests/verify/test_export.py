"""The proof `export`: tensors, numbers and lists of a class that become constants of an exported program."""

from __future__ import annotations

import textwrap
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from statecli.commands.verify.result import Name, Verdict

from .proving import (
    expect_findings,
    find_cell,
    map_rules,
    map_verdicts,
    prove_real,
    prove_source,
    run_proof,
    write_class,
)

TENSOR, PARAMETER, MODULE, STALE, NUMBER = (
    "unregistered-tensor",
    "unregistered-parameter",
    "unregistered-module",
    "stale-view",
    "changing-attribute",
)
RUNNING = "if self.training:\n    self.{0} = 0.9 * self.{0} + 0.1 * x.detach().mean(0)\n"


def net(init: str, forward: str) -> str:
    """Return the source of a class with a layer `fc`, from the code of its constructor and its forward."""
    method = f"def forward(self, x):\n{textwrap.indent(textwrap.dedent(forward), '    ')}"
    return f"self.fc = nn.Linear(3, 3)\n{textwrap.dedent(init)}\n---\n{method}"


#: A class that fails, with the rule of each failed name, and a class of the same purpose that passes.
ZOO = {
    "drawn at random": (
        net("self.t = torch.randn(3)", "return self.fc(x) + self.t"),
        {"t": TENSOR},
        net('self.register_buffer("t", torch.randn(3))', "return self.fc(x) + self.t"),
    ),
    "a tensor that requires grad": (
        net("self.t = torch.ones(3, requires_grad=True)", "return self.fc(x) * self.t"),
        {"t": PARAMETER},
        net("self.t = nn.Parameter(torch.ones(3))", "return self.fc(x) * self.t"),
    ),
    "a plain list of modules": (
        net("self.parts = [nn.Linear(3, 3)]", "return self.parts[0](self.fc(x))"),
        {"parts[0].weight": MODULE, "parts[0].bias": MODULE},
        net("self.parts = nn.ModuleList([nn.Linear(3, 3)])", "return self.parts[0](self.fc(x))"),
    ),
    "a plain dict of tensors": (
        net('self.d = {"a": torch.randn(3)}', 'return self.fc(x) + self.d["a"]'),
        {"d['a']": TENSOR},
        net('self.d = nn.ParameterDict({"a": torch.randn(3)})', 'return self.fc(x) + self.d["a"]'),
    ),
    "a plain list of parameters": (
        net("self.ws = [nn.Parameter(torch.ones(3))]", "return self.fc(x) * self.ws[0]"),
        {"ws[0]": PARAMETER},
        net("self.ws = nn.ParameterList([torch.ones(3)])", "return self.fc(x) * self.ws[0]"),
    ),
    "a running mean": (
        net("self.mean = torch.zeros(3)", RUNNING.format("mean") + "return self.fc(x) - self.mean"),
        {"mean": TENSOR},
        net(
            'self.register_buffer("mean", torch.zeros(3))',
            RUNNING.format("mean") + "return self.fc(x) - self.mean",
        ),
    ),
    "the memory of a parameter": (
        net("self.w = self.fc.weight.data", "return self.fc(x) @ self.w"),
        {"w": STALE},
        net("self.w = self.fc.weight", "return self.fc(x) @ self.w"),
    ),
    "a row of a buffer": (
        net('self.register_buffer("t", torch.ones(2, 3))\nself.row = self.t[0]', "return self.fc(x) + self.row"),
        {"row": STALE},
        net('self.register_buffer("t", torch.ones(2, 3))', "return self.fc(x) + self.t[0]"),
    ),
    "a counter": (
        net("self.n = 0", "self.n += 1\nreturn self.fc(x) * self.n"),
        {"n": NUMBER},
        net("self.n = 0", "self.n += 1\nreturn self.fc(x)"),
    ),
    "a counter of training steps": (
        net("self.n = 0", "if self.training: self.n += 1\nreturn self.fc(x) * 0.9 ** self.n"),
        {"n": NUMBER},
        net("self.n = 0", "if self.training: self.n = 1\nreturn self.fc(x) * 0.9 ** self.n"),
    ),
    "a factor that falls": (
        net("self.rate = 1.0", "self.rate *= 0.5\nreturn self.fc(x) * self.rate"),
        {"rate": NUMBER},
        net("self.rate = 1.0", "return self.fc(x) * self.rate"),
    ),
    "the length of a list": (
        net("self.seen = []", "self.seen.append(1)\nreturn self.fc(x) + len(self.seen)"),
        {"seen": NUMBER},
        net("self.seen = []", "self.seen.append(1)\nreturn self.fc(x)"),
    ),
    "a branch": (
        net("self.n = 0", "self.n += 1\nreturn self.fc(x) if self.n % 2 else x"),
        {"n": NUMBER},
        net("self.n = 0", "self.n = 1 - self.n * 0\nreturn self.fc(x) if self.n % 2 else x"),
    ),
    "an entry of a dict": (
        net('self.d = {"n": 0}', 'self.d["n"] += 1\nreturn self.fc(x) * self.d["n"]'),
        {"d": NUMBER},
        net('self.d = {"n": 2}', 'return self.fc(x) * self.d["n"]'),
    ),
    "in a part": (
        "self.parts = nn.Sequential(Part(), Part())\n---\ndef forward(self, x):\n    return self.parts(x)\n"
        "class Part(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 3)\n        self.n = 0\n"
        "    def forward(self, x):\n        self.n += 1\n        return super().forward(x) * self.n",
        {"parts.0.n": NUMBER, "parts.1.n": NUMBER},
        "self.parts = nn.Sequential(Part(), Part())\n---\ndef forward(self, x):\n    return self.parts(x)\n"
        "class Part(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 3)\n        self.n = 2\n"
        "    def forward(self, x):\n        return super().forward(x) * self.n",
    ),
}


def prove(name: Name, body: str):
    """Run the proof for Net with an input for `fc`."""
    return prove_source(name, body, "2x3")


@pytest.mark.parametrize("name", ZOO)
def test_constant_of_the_class_is_reported(name, in_tmp_path):
    """Each failing class has the findings of the table, and its twin passes."""
    expect_findings(partial(prove, Name.EXPORT), *ZOO[name])


def test_exported_program_keeps_the_number(in_tmp_path):
    """The oracle: a program of torch.export keeps the exported number and ignores the model's later number."""
    write_class(ZOO["a counter"][0])
    from statecli.live.build import build
    from statecli.live.spec import parse_spec

    x = torch.ones(2, 3)
    model = build(parse_spec("net.py:Net")).module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (x,), strict=False).module()
    model.n = 10
    assert not torch.equal(program(x), model(x))
    model.n = 0
    assert torch.equal(program(x), model(x))


def test_table_that_the_constructor_computes_is_a_note(in_tmp_path):
    """The finding is only a note, because loading a checkpoint does not change the table in the model either."""
    check = prove_source(Name.EXPORT, net("self.t = torch.arange(3.0)", "return self.fc(x) + self.t"), "2x3")
    assert check.verdict is Verdict.PASSED
    (finding,) = check.findings
    assert (finding.rule, finding.severity.value) == (TENSOR, "note")
    assert "exported as a constant, read at net.py:9: the constructor always sets the same values" in finding.message


def test_tensor_that_forward_does_not_read_is_skipped(in_tmp_path):
    """The exported program does not contain the tensor."""
    check = prove_source(Name.EXPORT, net("self.t = torch.randn(3)", "return self.fc(x)"), "2x3")
    assert check.verdict is Verdict.PASSED
    assert find_cell(check, "exported", "t").reason == "forward does not read the tensor"


def test_tensor_literal_in_forward_passes(in_tmp_path):
    """A tensor literal in forward belongs to the code."""
    check = prove_source(Name.EXPORT, net("", "return self.fc(x) + torch.tensor([1.0, 2.0, 3.0])"), "2x3")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())


def test_buffer_that_is_not_saved_passes(in_tmp_path):
    """The buffer is registered, and the exported program's module also has a buffer."""
    body = net('self.register_buffer("t", torch.randn(3), persistent=False)', "return self.fc(x) + self.t")
    assert prove_source(Name.EXPORT, body, "2x3").verdict is Verdict.PASSED


def test_model_that_cannot_be_exported_is_inconclusive(in_tmp_path, capfd):
    """The reason is a single line, torch prints nothing, and the class has no finding."""
    body = net("", "return self.fc(x) if x.sum() > 0 else x")
    check = prove_source(Name.EXPORT, body, "2x3")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert check.reason.startswith("torch.export.export() raised")
    assert "\n" not in check.reason
    assert capfd.readouterr() == ("", "")


def test_output_class_without_a_pytree_does_not_prevent_the_proof(in_tmp_path):
    """Forward returns a SimpleNamespace and a tensor; the plain tensor that forward reads is still reported."""
    body = net("self.t = torch.randn(3)", "y = self.fc(x) + self.t\nreturn __import__('types').SimpleNamespace(y=y), y")
    check = prove_source(Name.EXPORT, body, "2x3")
    assert map_rules(check) == {"t": TENSOR}


#: Real classes with plain attributes, a few that torch.export refuses, and others that pass.
REAL = {
    "BertForMaskedLM": "passed",
    "Wav2Vec2Model": "passed",
    "SwinModel": "passed",
    "MambaForCausalLM": "passed",
    "BatchNorm2d": "passed",
    "LSTM": "passed",
    "old weight_norm": "passed",
    "LongformerModel": "inconclusive",
}


def test_real_classes_have_no_constants():
    """The verdicts for a sample of the 150 classes on which the proof was measured."""
    real = prove_real(Name.EXPORT, *REAL)
    assert {name: check.verdict.value for name, check in real.items()} == REAL
    assert [check.findings for check in real.values()] == [()] * len(REAL)
    assert set(map_verdicts(real["LSTM"], "exported").values()) == {"passed"}


@pytest.mark.parametrize(
    ("variable", "use", "name"),
    [("G = torch.randn(3)", "G", "G"), ('G = {"a": torch.ones(3)}', 'G["a"]', "G['a']")],
    ids=["tensor", "table"],
)
def test_variable_of_a_file_is_named(variable, use, name, in_tmp_path):
    """A variable of an imported file is named too, but no tensor created in forward and no unread variable."""
    Path("tables.py").write_text(f"import torch\n{variable}\nUNUSED = torch.ones(3)\n")
    forward = f"return self.fc(x) * {use} + torch.ones(3) + torch.tensor([1.0, 2.0, 3.0])"
    heads = {"own.py": variable, "named.py": "from tables import G", "tables.py": "import tables"}
    for file, head in heads.items():
        text = forward.replace(f"* {use}", f"* tables.{use}") if file == "tables.py" else forward
        path = "other.py" if file == "tables.py" else file
        Path(path).write_text(
            f"import torch\nfrom torch import nn\n{head}\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.fc = nn.Linear(3, 3)\n\n"
            f"    def forward(self, x):\n        {text}\n"
        )
        check = run_proof(Name.EXPORT, f"{path}:Net", "2x3")
        (finding,) = check.findings
        assert check.verdict is Verdict.FAILED
        assert (finding.rule, finding.fqn, finding.severity.value) == (TENSOR, None, "warning")
        assert finding.message.startswith(f"{name} of {file}: exported as a constant, read at {path}:12: ")
