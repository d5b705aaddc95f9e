"""The proof `resume`: state of a class that is missing after training resumes."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

import statecli
from statecli.commands.verify.result import Name, Verdict
from statecli.core.finding import Severity

from .proving import expect_findings, find_imported_net, map_rules, map_verdicts, prove_source
from .test_export import net

TENSOR, MODULE, LOST = "unregistered-tensor", "unregistered-module", "lost-by-resuming"
COUNT = 'self.register_buffer("n", torch.zeros((), dtype=torch.int64))'
FIRST = "if not self.ready:\n    self.mean.copy_(x.mean(0))\n"
AVERAGE = "if self.training:\n    with torch.no_grad():\n        self.{0}.lerp_(x.mean(0), 0.1)\n"
EXTRA = """
def get_extra_state(self):
    return {0}
def set_extra_state(self, state):
    {1}"""
HELPER = """from types import SimpleNamespace
self.fc = nn.Linear(3, 3)
self.helper = SimpleNamespace(n=0)
---
def forward(self, x):
    self.helper.n += 1
    return self.fc(x) * self.helper.n
{0}"""

STAMPED = """import time
self.fc = nn.Linear(3, 3)
self.state = {{{0}, "at": time.perf_counter()}}
---
def forward(self, x):
    import time
    if self.training:
        {1}
        self.state["at"] = time.perf_counter()
    return self.fc(x - self.state["mean"])"""

#: A class that fails, with the rule of each failed name, and a class of the same purpose that passes.
ZOO = {
    "a counter": (
        net("self.n = 0", "self.n += 1\nreturn self.fc(x) * 0.9 ** self.n"),
        {"n": LOST},
        net(COUNT, "self.n.add_(1)\nreturn self.fc(x) * 0.9 ** self.n"),
    ),
    "a plain average": (
        net("self.mean = torch.zeros(3)", AVERAGE.format("mean") + "return self.fc(x - self.mean)"),
        {"mean": TENSOR},
        net('self.register_buffer("mean", torch.zeros(3))', AVERAGE.format("mean") + "return self.fc(x - self.mean)"),
    ),
    "an average that nothing reads": (
        net("self.mean = torch.zeros(3)", AVERAGE.format("mean") + "return self.fc(x)"),
        {"mean": TENSOR},
        net('self.register_buffer("mean", torch.zeros(3))', AVERAGE.format("mean") + "return self.fc(x)"),
    ),
    "a buffer outside of the checkpoint": (
        net(
            'self.register_buffer("mean", torch.zeros(3), persistent=False)',
            AVERAGE.format("mean") + "return self.fc(x) - self.mean",
        ),
        {"mean": LOST},
        net('self.register_buffer("mean", torch.arange(3.0), persistent=False)', "return self.fc(x) - self.mean"),
    ),
    "a generator": (
        net("self.g = torch.Generator()", "return self.fc(x) + torch.rand(3, generator=self.g)"),
        {"g": LOST},
        net("self.g = torch.Generator()", "return self.fc(x) + torch.rand(3, generator=self.g)")
        + EXTRA.format("self.g.get_state()", "self.g.set_state(state)"),
    ),
    "a generator of Python": (
        net("import random\nself.g = random.Random(1)", "return self.fc(x) * self.g.random()"),
        {"g": LOST},
        net("import random", "import random\nreturn self.fc(x) * random.random()"),
    ),
    "a generator of numpy": (
        net("import numpy\nself.g = numpy.random.default_rng(1)", "return self.fc(x) * self.g.random()"),
        {"g": LOST},
        net("import numpy", "import numpy\nreturn self.fc(x) * numpy.random.random()"),
    ),
    "an array": (
        net("import numpy\nself.a = numpy.zeros(3)", "self.a += 1\nreturn self.fc(x) * self.a[0]"),
        {"a": LOST},
        net("import numpy\nself.a = numpy.zeros(3)", "self.a[:] = 1\nreturn self.fc(x) * self.a[0]"),
    ),
    "a cache that is never cleared": (
        net("self.seen = []", "self.seen.append(x.mean())\nreturn self.fc(x) + sum(self.seen)"),
        {"seen[0]": TENSOR},
        net("self.seen = []", "self.seen = [x.mean()]\nreturn self.fc(x) + sum(self.seen)"),
    ),
    "an average in a dict": (
        net(
            'self.d = {"mean": torch.zeros(3)}',
            'with torch.no_grad():\n    self.d["mean"].add_(x.mean(0))\nreturn self.fc(x) + self.d["mean"]',
        ),
        {"d['mean']": TENSOR},
        net(
            'self.d = {"mean": torch.zeros(3)}',
            'with torch.no_grad():\n    self.d["mean"].copy_(x.mean(0))\nreturn self.fc(x) + self.d["mean"]',
        ),
    ),
    "a queue": (
        net(
            "from collections import deque\nself.q = deque([0.0], maxlen=3)",
            "self.q.append(float(x.mean()))\nreturn self.fc(x) + sum(self.q)",
        ),
        {"q": LOST},
        net(
            "from collections import deque\nself.q = deque([0.0], maxlen=3)",
            "self.q.append(float(x.mean()))\nreturn self.fc(x) + sum(self.q)",
        )
        + EXTRA.format("list(self.q)", "self.q.extend(state)"),
    ),
    "a number in another object": (
        HELPER.format(""),
        {"helper.n": LOST},
        HELPER.format(textwrap.dedent(EXTRA.format("self.helper.n", "self.helper.n = state"))),
    ),
    "an attribute of the class": (
        net("", "type(self).n = getattr(self, 'n', 0) + 1\nreturn self.fc(x) * self.n"),
        {"Net.n": LOST},
        net(COUNT, "self.n += 1\nreturn self.fc(x) * self.n"),
    ),
    "a flag of the first step": (
        net(
            'self.register_buffer("mean", torch.zeros(3))\nself.ready = False',
            "if not self.ready:\n    self.mean.copy_(x.mean(0))\n    self.ready = True\nreturn self.fc(x - self.mean)",
        ),
        {"ready": LOST},
        net(
            'self.register_buffer("mean", torch.zeros(3))\nself.register_buffer("ready", torch.tensor(False))',
            FIRST + "    self.ready.fill_(True)\nreturn self.fc(x - self.mean)",
        ),
    ),
    "a layer in a plain list": (
        net("self.parts = [nn.Linear(3, 3)]", "return self.parts[0](self.fc(x))"),
        {"parts[0].weight": MODULE, "parts[0].bias": MODULE},
        net("self.parts = nn.ModuleList([nn.Linear(3, 3)])", "return self.parts[0](self.fc(x))"),
    ),
    "an average next to the time": (
        STAMPED.format('"mean": torch.zeros(3)', 'self.state["mean"] = self.state["mean"] + 0.1 * x.mean(0)'),
        {"state['mean']": TENSOR},
        STAMPED.format('"mean": 0.0', 'self.state["mean"] = float(x.mean())'),
    ),
    "a number next to the time": (
        STAMPED.format('"mean": 0.0', 'self.state["mean"] += float(x.mean())'),
        {"state['mean']": LOST},
        STAMPED.format('"mean": 0.0', 'self.state["mean"] = float(x.mean())'),
    ),
    "a tensor computed from a parameter": (
        net("self.n = self.fc.weight * 2", "return self.fc(x) * self.n.detach().sum()"),
        {"n": TENSOR},
        net("", "return self.fc(x) * (self.fc.weight * 2).detach().sum()"),
    ),
    "a random number of Python": (
        net("import random\nself.scale = random.random()", "return self.fc(x) * self.scale"),
        {"scale": LOST},
        net("self.scale = 0.5", "return self.fc(x) * self.scale"),
    ),
    "a random order of numpy": (
        net("import numpy\nself.order = numpy.random.permutation(1000)", "return self.fc(x) * self.order[0]"),
        {"order": LOST},
        net("import numpy\nself.order = numpy.arange(1000)", "return self.fc(x) * self.order[1]"),
    ),
    "two causes": (
        net(
            "self.n = 0\nself.mean = torch.zeros(3)",
            AVERAGE.format("mean") + "self.n += 1\nself.scale = 1 / self.n\nreturn self.fc(x - self.mean) * self.scale",
        ),
        {"n": LOST, "mean": TENSOR},
        net(
            COUNT + '\nself.register_buffer("mean", torch.zeros(3))',
            AVERAGE.format("mean") + "self.n += 1\nself.scale = 1 / self.n\nreturn self.fc(x - self.mean) * self.scale",
        ),
    ),
}


def prove(body: str):
    return prove_source(Name.RESUME, body, "2x3")


@pytest.mark.parametrize("name", ZOO)
def test_state_missing_after_resuming_is_reported(name, in_tmp_path):
    """Each failing class has the findings of the table, and its twin passes."""
    expect_findings(prove, *ZOO[name])


#: A class that passes: nothing that a later step reads is lost.
PASSING = {
    "a cache": net("self.last = None", "self.last = self.fc(x)\nreturn self.last"),
    "a cache of the first call": net(
        "self.mask = None", "if self.mask is None:\n    self.mask = torch.ones(3)\nreturn self.fc(x) * self.mask"
    ),
    "dropout and random numbers": net(
        "self.drop = nn.Dropout()", "return self.drop(self.fc(x)) + torch.rand_like(x) + __import__('random').random()"
    ),
    "a random table that nothing reads": net("self.t = torch.randn(3)", "return self.fc(x)"),
    "the time of the call": net("self.t = 0", "import time\nself.t = time.perf_counter()\nreturn self.fc(x)"),
    "a lock": net("import threading\nself.lock = threading.Lock()", "with self.lock:\n    return self.fc(x)"),
    "batch norm": net("self.norm = nn.BatchNorm1d(3)", "return self.norm(self.fc(x))"),
    "no parameters": "self.norm = nn.BatchNorm1d(3, affine=False)\n---\ndef forward(self, x):\n    return self.norm(x)",
    "a second name of a parameter": net("self.d = {0: self.fc.weight}", "return self.fc(x) + self.d[0].sum()"),
    "a limited counter": net("self.n = 0", "self.n = min(self.n + 1, 1)\nreturn self.fc(x)"),
}


@pytest.mark.parametrize("name", PASSING)
def test_values_without_an_effect_pass(name, in_tmp_path):
    """A load does not restore the values, but the resumed training computes the same results."""
    check = prove(PASSING[name])
    assert (check.verdict, check.reason, check.findings) == (Verdict.PASSED, None, ())


def test_counter_without_an_effect_is_a_warning(in_tmp_path):
    """No output depends on the counter, so the resumed training computes the same results."""
    (finding,) = prove(net("self.n = 0", "self.n += 1\nreturn self.fc(x)")).findings
    assert finding.severity is Severity.WARNING
    assert finding.message == (
        "n: 2 when saved, 0 in a new instance after the load, because state_dict() does not contain the value: in "
        "the steps that statecli ran, no output depends on the value"
    )


def test_value_used_only_in_eval_mode_is_an_error(in_tmp_path):
    """The resumed training computes the same results, but the model computes other results in eval mode."""
    body = net("self.n = 0", "if self.training:\n    self.n += 1\n    return self.fc(x)\nreturn self.fc(x) * self.n")
    (finding,) = prove(body).findings
    assert finding.severity is Severity.ERROR
    assert finding.message.endswith("the output in eval mode differs after step 4")


def test_nondeterministic_model_is_inconclusive(in_tmp_path):
    """Two training runs with the same seed differ, so nothing is proved."""
    check = prove(net("self.n = 0", "self.n += 1\nreturn self.fc(x) * self.n + __import__('uuid').uuid4().int % 1000"))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "two training runs with the same seed differ" in check.reason


def test_a_loss_that_no_attribute_alone_explains_is_inconclusive(in_tmp_path):
    """The greater of two counters is correct as long as one of the counters is correct."""
    body = net(
        "self.a = self.b = 0",
        "self.a = self.b = max(self.a, self.b) + 1\nreturn self.fc(x) * self.a",
    )
    check = prove(body)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert check.reason.startswith("after the load, the output of step 3 differs, but no single attribute")


def test_state_in_a_python_generator_is_inconclusive(in_tmp_path):
    """statecli cannot read the position of a Python generator."""
    check = prove(net("self.it = (n for n in range(100))", "return self.fc(x) * next(self.it)"))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert check.reason.startswith("after the load, the output of step 3 differs")


def test_refused_load_is_inconclusive(in_tmp_path):
    """The reason has torch's error; the proof `save` reports the class."""
    body = net("", "if not hasattr(self, 't'):\n    self.register_buffer('t', torch.ones(3))\nreturn self.fc(x)")
    check = prove(body)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "load_state_dict" in check.reason


def test_variables_of_the_file_and_the_class_are_reported(in_tmp_path):
    """The proof trains several instances, and restores variables and attributes of the class."""
    body = net("global STEPS\nSTEPS = 5", "global STEPS\nself.seen.append(1)\nSTEPS += 1\nreturn self.fc(x) * STEPS")
    check = prove(f"{body}\nseen = []")
    assert set(map_rules(check)) == {"net.py:STEPS", "Net.seen"}
    module = find_imported_net()  # the first forward, before the proof, added an item; each constructor sets STEPS to 5
    assert (module.STEPS, module.Net.seen) == (5, [1])


def test_tensor_that_every_copy_of_a_live_model_holds_is_inconclusive():
    """No constructor draws the tensor again, so the resumed copy has the values without a load."""
    model = nn.Linear(2, 2)
    model.t = torch.randn(2)
    model.register_buffer("u", torch.ones(2), persistent=False)
    (check,) = statecli.verify(model, inputs="2x2", checks=["resume"]).checks
    assert map_verdicts(check, "resumed") == {"weight": "passed", "bias": "passed", "t": "inconclusive", "u": "skipped"}
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())


def test_tensor_whose_values_cannot_be_compared_is_inconclusive(in_tmp_path):
    """Equal outputs do not show that the load restored a tensor that statecli cannot read."""
    check = prove(net("self.t = torch.nested.nested_tensor([torch.ones(2)])", "return self.fc(x)"))
    assert map_verdicts(check, "resumed")["t"] == "inconclusive"


def test_sparse_buffer_is_restored(in_tmp_path):
    """The state_dict is copied as a file, because copy.deepcopy refuses sparse CSR tensors."""
    check = prove(net('self.register_buffer("t", torch.eye(3).to_sparse_csr())', "return self.fc(x)"))
    assert check.verdict is Verdict.PASSED, check.reason


def test_tuple_without_a_length_does_not_prevent_the_proof(in_tmp_path):
    """A class of the user may refuse len(), as the irreps of e3nn do."""
    body = net(
        "class Odd(tuple):\n    def __len__(self):\n        raise NotImplementedError\nself.o = Odd((1, 2))",
        "return self.fc(x)",
    )
    for name in (Name.RESUME, Name.EXPORT, Name.COMPILE):
        assert prove_source(name, body, "2x3").verdict is Verdict.PASSED
