"""The proof `compile`: numbers that cause a recompilation at each call, and values that a compiled model keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo
from torch import nn

import statecli
from statecli.commands.verify.result import Name, Verdict

from .proving import expect_findings, map_verdicts, prove_source
from .test_export import net, prove

NUMBER, KEPT = "changing-attribute", "kept-by-compile"
CONSTANT = "\n@torch.compiler.assume_constant_result\ndef scale(self):\n    return float({0}.mean())"
COUNT = 'self.register_buffer("n", torch.zeros((), dtype=torch.int64))'
PART = """self.parts = nn.Sequential(Part(), Part())
---
def forward(self, x):
    return self.parts(x)
class Part(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.n = 0
    def forward(self, x):
        {0}
        return super().forward(x) * self.n"""

#: A class that fails, with the rule of each failed name, and a class of the same purpose that passes.
ZOO = {
    "a counter of training steps": (
        net("self.n = 0", "if self.training: self.n += 1\nreturn self.fc(x) * 0.9 ** self.n"),
        {"n": NUMBER},
        net(COUNT, "if self.training: self.n.add_(1)\nreturn self.fc(x) * 0.9 ** self.n"),
    ),
    "a branch on a counter": (
        net("self.n = 0", "self.n += 1\nreturn self.fc(x) if self.n < 100 else x"),
        {"n": NUMBER},
        net("self.n = 0", "self.n = min(self.n + 1, 2)\nreturn self.fc(x) if self.n < 3 else x"),
    ),
    "a long cycle": (
        net("self.n = 0", "self.n = (self.n + 1) % 100\nreturn self.fc(x) * self.n"),
        {"n": NUMBER},
        net("self.n = 0", "self.n = (self.n + 1) % 3\nreturn self.fc(x) * self.n"),
    ),
    "a list": (
        net("self.seen = []", "self.seen.append(1)\nreturn self.fc(x)"),
        {"seen": NUMBER},
        net("self.seen = []", "self.seen = [1]\nreturn self.fc(x)"),
    ),
    "in a part": (PART.format("self.n += 1"), {"parts.0.n": NUMBER, "parts.1.n": NUMBER}, PART.format("self.n = 1")),
    "a counter, a dict and a tuple": (
        net(
            "self.a = 0\nself.b = {}\nself.c = ()",
            "self.a += 1\nself.b[len(self.b)] = 1\nself.c = (*self.c, 1)\nreturn self.fc(x)",
        ),
        {"a": NUMBER, "b": NUMBER, "c": NUMBER},
        net("self.a = 0\nself.b = {}\nself.c = ()", "self.a = 1\nself.b[0] = 1\nself.c = (1,)\nreturn self.fc(x)"),
    ),
    "a constant of a parameter": (
        net("", "return self.fc(x) * self.scale()") + CONSTANT.format("self.fc.weight"),
        {"fc.weight": KEPT},
        net("", "return self.fc(x) * self.fc.weight.mean().item()"),
    ),
    "a constant of a buffer": (
        net('self.register_buffer("t", torch.ones(3))', "return self.fc(x) * self.scale()") + CONSTANT.format("self.t"),
        {"t": KEPT},
        net('self.register_buffer("t", torch.ones(3))', "return self.fc(x) * self.t.mean()"),
    ),
    "a constant of a plain tensor": (
        net("self.t = torch.ones(3)", "return self.fc(x) * self.scale()") + CONSTANT.format("self.t"),
        {"t": KEPT},
        net("self.t = torch.ones(3)", "return self.fc(x) * self.t.mean()"),
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_state_kept_by_the_compiled_model_is_reported(name, in_tmp_path):
    """Each failing class has the findings of the table, and its twin passes."""
    expect_findings(partial(prove, Name.COMPILE), *ZOO[name])


def test_graph_limit_equals_the_limit_of_torch():
    """The number in the message is the number of graphs after which torch.compile stops compiling the function."""
    from statecli.commands.verify.proofs.compile import _LIMIT_SETTING, DEFAULT_GRAPH_LIMIT

    assert getattr(torch._dynamo.config, _LIMIT_SETTING) == DEFAULT_GRAPH_LIMIT


def test_torch_stops_compiling_at_the_limit():
    """torch stops compiling a failing model after 8 graphs; with a tensor in place of the number, 1 graph is enough."""

    class Net(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.n = start

        def forward(self, x):
            self.n = self.n + 1
            return x * self.n

    for start, expected in ((0, 8), (torch.zeros(()), 1)):
        torch._dynamo.reset()
        graphs = []

        def count(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(Net(start), backend=count)
        for _ in range(20):
            compiled(torch.ones(2))
        assert len(graphs) == expected
    torch._dynamo.reset()


def test_plain_tensors_are_inputs_of_a_compiled_model(in_tmp_path):
    """Unlike torch.export, torch.compile reads a plain attribute at each call."""
    body = net("self.t = torch.randn(3)", "return self.fc(x) + self.t")
    check = prove_source(Name.COMPILE, body, "2x3")
    assert check.verdict is Verdict.PASSED
    assert map_verdicts(check, "compiled") == {"fc.weight": "passed", "fc.bias": "passed", "t": "passed"}


def test_tensors_that_cannot_be_changed_are_skipped(in_tmp_path):
    """An expanded, a float8, a sparse and a complex buffer are skipped, because the proof cannot write to them."""
    body = net(
        'self.register_buffer("e", torch.ones(1).expand(3))\n'
        'self.register_buffer("f", torch.ones(3).to(torch.float8_e4m3fn))\n'
        'self.register_buffer("s", torch.eye(3).to_sparse())\n'
        'self.register_buffer("c", torch.ones(3, dtype=torch.complex64))',
        "return self.fc(x)",
    )
    check = prove_source(Name.COMPILE, body, "2x3")
    assert check.verdict is Verdict.PASSED
    assert {name for name, verdict in map_verdicts(check, "compiled").items() if verdict == "skipped"} == set("efsc")


def test_random_numbers_in_forward_pass(in_tmp_path):
    """Dropout draws the same values in the compiled model and in its twin."""
    body = net("self.drop = nn.Dropout()", "return self.drop(self.fc(x)) + torch.rand_like(x)")
    assert prove_source(Name.COMPILE, body, "2x3").verdict is Verdict.PASSED


def test_nondeterministic_model_is_inconclusive(in_tmp_path):
    """Two instances have different outputs, so the outputs cannot be compared."""
    body = net("", "return self.fc(x) + __import__('uuid').uuid4().int % 1000")
    check = prove_source(Name.COMPILE, body, "2x3")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "two equal instances" in check.reason


def test_model_that_torch_does_not_compile_is_inconclusive():
    """torch.compile runs recurrent modules of torch as they are, so nothing is proved."""
    (check,) = statecli.verify(nn.LSTM(2, 2), inputs="3x2x2", checks=["compile"]).checks
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "torch.compile captured no graph" in check.reason


def test_error_of_the_compiler_is_inconclusive(in_tmp_path, capfd):
    """The reason is a single line, and torch prints nothing."""
    body = net("", "if torch.compiler.is_compiling():\n    raise ValueError('no')\nreturn self.fc(x)")
    check = prove_source(Name.COMPILE, body, "2x3")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "\n" not in check.reason
    assert capfd.readouterr() == ("", "")
