"""Rounds of training: the further rounds, and the reasons for a further round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from statecli.commands.verify import training_rounds
from statecli.commands.verify.result import Check, Name, Verdict
from statecli.core.finding import Severity

from .proving import build_net, build_subject, find_cell, map_rules, map_verdicts, prove_source, prove_step

pytestmark = pytest.mark.usefixtures("in_tmp_path")


# --- tensors that follow a trained parameter ------------------------------------------------------------------------

EMA_TENSORS = {
    "a frozen parameter": "nn.Parameter(self.used.weight.detach().clone(), requires_grad=False)",
    "a plain tensor": "self.used.weight.detach().clone()",
}
EMA_FORWARD = "with torch.no_grad():\n    self.slow.lerp_(self.used.weight, 0.1)\nreturn self.used(x) + x @ self.slow"


@pytest.mark.parametrize("slow", EMA_TENSORS.values(), ids=EMA_TENSORS)
def test_ema_is_found_in_the_second_round(slow):
    """The oracle for an EMA: the first forward does not change the mean, and the forward after a step does."""
    check = prove_step(f"self.slow = {slow}", EMA_FORWARD)
    net = build_net()
    start, changed = net.slow.clone(), []
    for _ in range(2):
        net(torch.randn(4, 8)).square().sum().backward()
        changed.append(not torch.equal(start, net.slow))
        torch.optim.SGD(net.used.parameters(), lr=1.0).step()
    assert changed == [False, True]
    assert map_verdicts(check, "forward updates") == {"slow": "passed"}
    assert map_rules(check) == {}
    assert check.how.startswith("2 rounds")


def test_kept_graph_is_found_in_the_second_round():
    """A hidden state starts as zeros and is never detached, so the second backward fails."""
    forward = "self.hidden = torch.tanh(self.used(x) + self.hidden)\nreturn self.hidden"
    check = prove_step("self.hidden = torch.zeros(4, 8)", forward)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "backward in round 2 raised RuntimeError" in check.reason


@pytest.mark.parametrize(("shape", "rounds"), [("8, 8", "2 rounds"), ("8, 7", "1 round")])
def test_frozen_tensor_of_a_trained_shape_causes_a_second_round(shape, rounds):
    """Only a tensor with the shape of a trained tensor causes a second round."""
    check = prove_step(f"self.still = nn.Parameter(torch.ones({shape}), requires_grad=False)", "return self.used(x)")
    assert check.verdict is Verdict.PASSED
    assert check.how.startswith(f"{rounds} of")
    assert find_cell(check, "updated", "still").reason == f"frozen, and unchanged in {rounds}"


# --- chance ---------------------------------------------------------------------------------------------------------

DROPPING_FORWARD = """
self.calls += 1
{draw}
y = self.branch(x)
if {when}:
    {drop}
return self.used(x) + y
"""
DRAW = "torch.rand(())"


def prove_dropping(when: str, drop: str = "y = y * 0", draw: str = DRAW) -> Check:
    forward = DROPPING_FORWARD.strip().format(when=when, drop=drop, draw=draw)
    return prove_step("self.branch, self.calls = nn.Linear(8, 8), 0", forward)


@pytest.mark.parametrize("drop", ["y = y * 0", "y = y.detach()"])
def test_randomly_dropped_branch_gets_more_rounds(drop):
    """The branch is dropped in the first five calls and forward draws random numbers, so the check passes."""
    check = prove_dropping("self.training and self.calls < 6", drop)
    assert check.verdict is Verdict.PASSED, check
    assert check.how.startswith("5 rounds")  # and a call in eval mode


@pytest.mark.parametrize(("drop", "got"), [("y = y * 0", "zero"), ("y = y.detach()", "no")])
def test_branch_dropped_in_every_training_round_is_inconclusive(drop, got):
    """A dropout rate near 1 and a fault look the same; in eval mode, the parameter has a gradient."""
    check = prove_dropping("self.training", drop)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = find_cell(check, "gradient", "branch.weight").reason
    assert reason.startswith(
        f"{got} gradient in each of 12 rounds, but the parameter has a gradient in eval mode: in train mode, dropout "
        "may have left the parameter out in each round"
    )


DROPOUT = "return self.head(nn.functional.dropout(self.used(x), {}, self.training))"


@pytest.mark.parametrize(("rate", "verdict"), [(0.99999, Verdict.INCONCLUSIVE), (0.9, Verdict.PASSED)])
def test_dropout_rate_near_1_is_inconclusive(rate, verdict):
    """With the high rate, none of 32 values is kept in any round; with the low rate, about 3 values are kept."""
    check = prove_step("self.head = nn.Linear(8, 8)", DROPOUT.format(rate))
    assert (check.verdict, check.findings) == (verdict, ())


def test_zero_gradient_in_eval_mode_is_reported():
    """Forward draws random numbers, but they are not the reason."""
    check = prove_dropping("True")
    assert map_rules(check) == {"branch.weight": "zero-gradient", "branch.bias": "zero-gradient"}
    text = "the gradient is all zeros in each of 3 rounds and in eval mode, without dropout"
    assert check.findings[0].message == f"branch.weight: {text}"


def test_zero_gradient_without_random_numbers_is_reported():
    """The branch is multiplied by zero only in train mode, without random numbers."""
    check = prove_dropping("self.training", draw="pass")
    assert map_rules(check) == {"branch.weight": "zero-gradient", "branch.bias": "zero-gradient"}
    assert check.how.startswith("3 rounds")


@pytest.mark.parametrize("draw", [DRAW, "__import__('random').random()", "__import__('numpy').random.rand()"])
def test_error_of_eval_mode_is_inconclusive(draw):
    """The reason has the error of eval mode, for each random generator."""
    check = prove_dropping("self.training", draw=f"{draw}\nif not self.training: raise ValueError('labels')")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = find_cell(check, "gradient", "branch.weight").reason
    assert (
        "eval mode does not show whether they are the cause: calling the model in eval mode raised ValueError: labels"
        in reason
    )


def test_modes_are_restored_after_the_call_in_eval_mode():
    """A model that keeps a part in eval mode has the same modes in each further round."""
    init = "self.used, self.branch, self.modes = nn.BatchNorm1d(8), nn.Linear(8, 8), []"
    forward = "def forward(self, x):\n    self.modes.append((self.training, self.used.training)); torch.rand(())\n"
    forward += "    return self.used(x) + self.branch(x) * (not self.training)"
    train = "def train(self, mode=True):\n    super().train(mode)\n    self.used.eval()\n    return self"
    prove_source(Name.STEP, f"{init}\n---\n{train}\n{forward}", "4x8")
    run, _ = training_rounds.train_fresh_instance(build_subject("net.py:Net", "4x8"), torch.optim.SGD)
    assert run.module.modes == [(True, False)] * 3 + [(False, False)] + [(True, False)] * 9


def test_drop_path_of_swin_misses_no_gradient():
    """Swin drops a whole branch for a batch of 1 in seven of ten calls: some round still uses the branch."""
    pytest.importorskip("transformers")
    sizes = "image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4"
    for rate in (0.1, 0.7):
        text = f"SwinModel(SwinConfig({sizes}, drop_path_rate={rate}))"
        Path("swin.py").write_text(f"from transformers import SwinConfig, SwinModel\ndef make():\n    return {text}\n")
        run, why_not = training_rounds.train_fresh_instance(build_subject("swin.py:make", "1x3x32x32"), torch.optim.SGD)
        assert why_not is None
        assert not [name for name, leaf in run.leaf_records.items() if leaf.is_missing]


def test_random_numbers_of_rounds_ignore_the_constructor():
    """Rounds draw different numbers, whatever the constructor draws; the eval call repeats those of the last round."""
    drawn = []
    for count in (1, 1000):
        forward = "self.drawn.append(float(torch.rand(()))); return self.used(x) * 0"
        prove_step(f"torch.rand({count}); self.drawn = []", forward)
        run, _ = training_rounds.train_fresh_instance(build_subject("net.py:Net", "4x8"), torch.optim.SGD)
        drawn.append(run.module.drawn)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0][:3])) == 3
    assert drawn[0][3:] == drawn[0][2:3]


# --- gates that start at zero ---------------------------------------------------------------------------------------

GATES = "self.gates = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range({}))"
GATED_FORWARD = "y = self.used(x)\nfor gate in self.gates: y = x + gate * torch.tanh(y)\nreturn y{}"


def test_each_gate_that_starts_at_zero_gets_a_round():
    """A gate gets its first gradient after the update of the next gate. The oracle: a plain training loop."""
    check = prove_step(GATES.format(5), GATED_FORWARD.format(""))
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert check.how.startswith("6 rounds")
    net, reached = build_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.ones(4, 8)).sum().backward()
        reached.append(sum(bool(parameter.grad.any()) for parameter in net.parameters()))
        optimizer.step()
    assert reached == [1, 2, 3, 4, 5, 7]


def test_long_chain_of_zero_gates_is_inconclusive():
    """In each of eight rounds, another gate gets its first gradient."""
    check = prove_step(GATES.format(12), GATED_FORWARD.format(""))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    text = (
        "the gradient is zero in each of 8 rounds; more rounds may be needed, because another parameter got its first "
        "gradient in the last round"
    )
    assert find_cell(check, "gradient", "gates.0").reason == text


def test_zero_gradient_after_the_last_gate_is_reported():
    """The rounds stop when no new gate gets a gradient; a gradient that is still zero is reported."""
    check = prove_step(
        f"{GATES.format(4)}\nself.off = nn.Parameter(torch.ones(8))", GATED_FORWARD.format(" + 0 * self.off")
    )
    assert map_rules(check) == {"off": "zero-gradient"}
    assert check.how.startswith("6 rounds")


# --- experts --------------------------------------------------------------------------------------------------------

EXPERTS = "self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))"
ROUTED_FORWARD = """
index, y = (torch.arange(4) + x[0, 0].sign().long()) % 2, self.used(x)
for number, expert in enumerate(self.experts):
    rows = (index == number).nonzero()[:, 0]
    {}y = y.index_add(0, rows, expert(x[rows]){})
return y
"""


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (
            "",
            "the gradient is zero, but experts.0.bias has a gradient, and forward reads values: give more inputs",
        ),
        ("if rows.numel(): ", "forward does not use the parameter, but uses experts.0.bias: give more inputs"),
    ],
    ids=["called on no rows", "not called"],
)
def test_expert_without_rows_is_inconclusive(when, text):
    """An expert called on no rows has a zero gradient, and an expert not called has None."""
    check = prove_step(EXPERTS, ROUTED_FORWARD.strip().format(when, ""))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert find_cell(check, "gradient", "experts.2.bias").reason == text
    assert map_verdicts(check, "gradient")["experts.1.bias"] == "passed"


@pytest.mark.parametrize(
    "lines",
    [
        "for number, expert in enumerate(self.experts):\n    y[index == number] += expert(x[index == number])",
        "rows = x[index.argsort()].split(index.bincount(minlength=3).tolist())\n"
        "y = y + torch.cat([expert(part) for expert, part in zip(self.experts, rows)])",
    ],
    ids=["mask", "split"],
)
def test_rows_of_experts_may_be_chosen_by_mask_or_counts(lines):
    """No operator that torch dispatches reads a value here; the empty rows show that forward chooses."""
    check = prove_step(EXPERTS, f"index, y = torch.arange(4) % 2, self.used(x)\n{lines}\nreturn y")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    text = "the gradient is zero, but experts.0.bias has a gradient, and forward reads values: give more inputs"
    assert find_cell(check, "gradient", "experts.2.bias").reason == text


def test_expert_multiplied_by_zero_is_reported():
    """No expert has a gradient, so the choice of an expert does not explain the zeros."""
    check = prove_step(EXPERTS, ROUTED_FORWARD.strip().format("", " * 0"))
    assert map_rules(check) == {f"experts.{n}.{what}": "zero-gradient" for n in range(3) for what in ("weight", "bias")}


# --- batch statistics -----------------------------------------------------------------------------------------------

NORM = """
self.shift, self.norm, self.out = nn.Parameter(torch.ones(8)), Centre(), nn.Linear(8, 2)
---
def forward(self, x):
    {}
"""
#: For two rows: subtracts the other row from each row, so that a common shift cancels to the last bit, as in BatchNorm.
CENTRE = """
class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
    def forward(self, x):
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(0)
        return x - (x.flip(0) if self.training else self.running_mean)
"""


def prove_norm(forward: str) -> Check:
    Path("centre.py").write_text(f"import torch\nfrom torch import nn\n{CENTRE}")
    forward = forward.replace("\n", "\n    ")
    return prove_source(Name.STEP, f"from centre import Centre{NORM.format(forward)}", "2x8")


@pytest.mark.parametrize("draw", ["", "torch.rand(())\n"], ids=["", "with random numbers"])
def test_shift_cancelled_by_batch_statistics_is_skipped(draw):
    """The batch statistics cancel a shift of all rows. In eval mode, torch computes a gradient for the shift."""
    check = prove_norm(f"{draw}return self.out(self.norm(x + self.shift))")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    shift = find_cell(check, "gradient", "shift")
    assert shift.verdict is Verdict.SKIPPED
    assert shift.reason.startswith("the gradient is zero in each of 3 rounds, ")
    assert "because a batch norm cancels the effect of the parameter; " in shift.reason
    assert shift.reason.endswith("with the batch norms in eval mode")
    net = build_net()
    for train in (True, False):
        (gradient,) = torch.autograd.grad(net.train(train)(torch.ones(2, 8))[:, 0].sum(), net.shift)
        assert bool(gradient.any()) is not train


def test_zero_factor_before_a_batch_norm_is_reported():
    """The gradient is also zero with the running statistics."""
    assert map_rules(prove_norm("return self.out(self.norm(x + 0 * self.shift))")) == {"shift": "zero-gradient"}


def test_error_of_batch_norm_in_eval_mode_is_inconclusive():
    """The reason has the error of the batch norm."""
    raises = "if not self.norm.training: raise ValueError('no statistics yet')\n"
    check = prove_norm(f"{raises}return self.out(self.norm(x + self.shift))")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = find_cell(check, "gradient", "shift").reason
    assert reason.startswith(
        "the gradient is zero, perhaps because a batch norm cancels the gradient; statecli could not check this: "
        "calling the model in train"
    )
    assert "raised ValueError: no statistics yet" in reason


# --- hidden states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("nn.LSTMCell(8, 8)", "self.cell(x)[0]"),
        ("nn.GRUCell(8, 8)", "self.cell(x)"),
        ("nn.RNNCell(8, 8)", "self.cell(x, torch.zeros_like(x))"),
        ("nn.LSTM(8, 8, batch_first=True)", "self.cell(x[:, None])[0]"),
        ("nn.GRU(8, 8, bidirectional=True)", "self.cell(x[None])[0]"),
    ],
)
def test_hidden_state_of_zeros_is_a_note(module, call):
    """The hidden weight gets a gradient of zeros in a single step, but the class is correct."""
    check = prove_step(f"self.cell = {module}", f"x = self.used(x)\nreturn {call}")
    assert {finding.rule for finding in check.findings} == {"zero-gradient"}
    assert {(finding.severity, "weight_hh" in finding.fqn) for finding in check.findings} == {(Severity.NOTE, True)}
    assert check.verdict is Verdict.PASSED
    assert "the hidden state starts at zero" in check.findings[0].message


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("nn.LSTMCell(8, 8)", "self.cell(x, self.cell(x))[0]"),
        ("nn.LSTM(8, 8)", "self.cell(x[None].expand(3, -1, -1))[0]"),
        ("nn.GRUCell(8, 8)", "self.cell(x, torch.ones_like(x))"),
    ],
)
def test_hidden_state_that_is_passed_on_trains_its_weight(module, call):
    """A hidden state that is not zero gives the weight a gradient."""
    check = prove_step(f"self.cell = {module}", f"x = self.used(x)\nreturn {call}")
    assert (check.findings, check.verdict) == ((), Verdict.PASSED)


def test_hidden_weight_that_is_multiplied_by_zero_stays_a_warning():
    """The hidden state of the GRUCell is not zero, so it does not explain the zero gradient."""
    call = "x = self.used(x)\nreturn self.cell(x)[0] + 0 * self.other(x, torch.ones_like(x))"
    check = prove_step("self.cell = nn.LSTMCell(8, 8)\nself.other = nn.GRUCell(8, 8)", call)
    severities = {finding.fqn: finding.severity for finding in check.findings}
    assert severities["cell.weight_hh"] is Severity.NOTE
    assert severities["other.weight_hh"] is Severity.WARNING
