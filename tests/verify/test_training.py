"""Rounds of training: the further rounds, and the reasons for a further round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from statecli.commands.verify import training_rounds
from statecli.commands.verify.result import Check, Name, Verdict
from statecli.core.finding import Severity

from .proving import build_net, build_subject, cell, of_source, rules, step, verdicts

pytestmark = pytest.mark.usefixtures("in_tmp_path")


# --- tensors that follow a trained parameter ------------------------------------------------------------------------

SLOW = {
    "a frozen parameter": "nn.Parameter(self.used.weight.detach().clone(), requires_grad=False)",
    "a plain tensor": "self.used.weight.detach().clone()",
}
FOLLOWS = "with torch.no_grad():\n    self.slow.lerp_(self.used.weight, 0.1)\nreturn self.used(x) + x @ self.slow"


@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_a_mean_that_starts_equal_to_its_parameter_shows_in_a_second_round(slow):
    """The oracle for an EMA: the first forward does not change the mean, and the forward after a step does."""
    check = step(f"self.slow = {slow}", FOLLOWS)
    net = build_net()
    start, changed = net.slow.clone(), []
    for _ in range(2):
        net(torch.randn(4, 8)).square().sum().backward()
        changed.append(not torch.equal(start, net.slow))
        torch.optim.SGD(net.used.parameters(), lr=1.0).step()
    assert changed == [False, True]
    assert verdicts(check, "forward updates") == {"slow": "passed"}
    assert rules(check) == {}
    assert check.how.startswith("2 rounds")


def test_a_graph_that_is_kept_in_a_tensors_place_shows_in_a_second_round():
    """A hidden state starts as zeros and is never detached, so the second backward fails."""
    forward = "self.hidden = torch.tanh(self.used(x) + self.hidden)\nreturn self.hidden"
    check = step("self.hidden = torch.zeros(4, 8)", forward)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "backward in round 2 raised RuntimeError" in check.reason


@pytest.mark.parametrize(("shape", "rounds"), [("8, 8", "2 rounds"), ("8, 7", "1 round")])
def test_a_second_round_has_a_reason(shape, rounds):
    """Only a tensor with the shape of a trained tensor causes a second round."""
    check = step(f"self.still = nn.Parameter(torch.ones({shape}), requires_grad=False)", "return self.used(x)")
    assert check.verdict is Verdict.PASSED
    assert check.how.startswith(f"{rounds} of")
    assert cell(check, "updated", "still").reason == f"frozen, and unchanged in {rounds}"


# --- chance ---------------------------------------------------------------------------------------------------------

DROPS = """
self.calls += 1
{draw}
y = self.branch(x)
if {when}:
    {drop}
return self.used(x) + y
"""
DRAW = "torch.rand(())"


def dropping(when: str, drop: str = "y = y * 0", draw: str = DRAW) -> Check:
    forward = DROPS.strip().format(when=when, drop=drop, draw=draw)
    return step("self.branch, self.calls = nn.Linear(8, 8), 0", forward)


@pytest.mark.parametrize("drop", ["y = y * 0", "y = y.detach()"])
def test_what_training_drops_by_chance_has_more_rounds(drop):
    """The branch is dropped in the first five calls and forward draws random numbers, so the check passes."""
    check = dropping("self.training and self.calls < 6", drop)
    assert check.verdict is Verdict.PASSED, check
    assert check.how.startswith("5 rounds")  # and a call in eval mode


@pytest.mark.parametrize(("drop", "got"), [("y = y * 0", "zero"), ("y = y.detach()", "no")])
def test_what_training_alone_drops_each_time_cannot_be_told(drop, got):
    """A dropout rate near 1 and a fault look the same; in eval mode, the parameter has a gradient."""
    check = dropping("self.training", drop)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = cell(check, "gradient", "branch.weight").reason
    assert reason.startswith(
        f"{got} gradient in each of 12 rounds, but the parameter has a gradient in eval mode: in train mode, dropout "
        "may have left the parameter out in each round"
    )


DROPOUT = "return self.head(nn.functional.dropout(self.used(x), {}, self.training))"


@pytest.mark.parametrize(("rate", "verdict"), [(0.99999, Verdict.INCONCLUSIVE), (0.9, Verdict.PASSED)])
def test_dropout_of_nearly_all_cannot_be_told(rate, verdict):
    """With the high rate, none of 32 values is kept in any round; with the low rate, about 3 values are kept."""
    check = step("self.head = nn.Linear(8, 8)", DROPOUT.format(rate))
    assert (check.verdict, check.findings) == (verdict, ())


def test_what_is_zero_in_eval_mode_too_is_no_dropout():
    """Forward draws random numbers, but they are not the reason."""
    check = dropping("True")
    assert rules(check) == {"branch.weight": "zero-gradient", "branch.bias": "zero-gradient"}
    text = "the gradient is all zeros in each of 3 rounds and in eval mode, without dropout"
    assert check.findings[0].message == f"branch.weight: {text}"


def test_what_draws_no_random_numbers_drops_nothing_by_chance():
    """The branch is multiplied by zero only in train mode, without random numbers."""
    check = dropping("self.training", draw="pass")
    assert rules(check) == {"branch.weight": "zero-gradient", "branch.bias": "zero-gradient"}
    assert check.how.startswith("3 rounds")


@pytest.mark.parametrize("draw", [DRAW, "__import__('random').random()", "__import__('numpy').random.rand()"])
def test_an_eval_mode_that_cannot_be_called_does_not_tell(draw):
    """The reason has the error of eval mode, for each random generator."""
    check = dropping("self.training", draw=f"{draw}\nif not self.training: raise ValueError('labels')")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = cell(check, "gradient", "branch.weight").reason
    assert (
        "eval mode does not show whether they are the cause: calling the model in eval mode raised ValueError: labels"
        in reason
    )


def test_the_modes_are_as_before_after_a_call_in_eval_mode():
    """A model that keeps a part in eval mode has the same modes in each further round."""
    init = "self.used, self.branch, self.modes = nn.BatchNorm1d(8), nn.Linear(8, 8), []"
    forward = "def forward(self, x):\n    self.modes.append((self.training, self.used.training)); torch.rand(())\n"
    forward += "    return self.used(x) + self.branch(x) * (not self.training)"
    train = "def train(self, mode=True):\n    super().train(mode)\n    self.used.eval()\n    return self"
    of_source(Name.STEP, f"{init}\n---\n{train}\n{forward}", "4x8")
    run, _ = training_rounds.train_fresh_instance(build_subject("net.py:Net", "4x8"), torch.optim.SGD)
    assert run.module.modes == [(True, False)] * 3 + [(False, False)] + [(True, False)] * 9


def test_a_real_drop_path_is_no_fault():
    """Swin drops a whole branch for a batch of 1 in seven of ten calls: some round still uses the branch."""
    pytest.importorskip("transformers")
    sizes = "image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4"
    for rate in (0.1, 0.7):
        text = f"SwinModel(SwinConfig({sizes}, drop_path_rate={rate}))"
        Path("swin.py").write_text(f"from transformers import SwinConfig, SwinModel\ndef make():\n    return {text}\n")
        run, why_not = training_rounds.train_fresh_instance(build_subject("swin.py:make", "1x3x32x32"), torch.optim.SGD)
        assert why_not is None
        assert not [name for name, leaf in run.leaf_records.items() if leaf.is_missing]


def test_what_a_round_draws_does_not_hang_on_the_constructor():
    """Rounds draw different numbers, whatever the constructor draws; the eval call repeats those of the last round."""
    drawn = []
    for count in (1, 1000):
        forward = "self.drawn.append(float(torch.rand(()))); return self.used(x) * 0"
        step(f"torch.rand({count}); self.drawn = []", forward)
        run, _ = training_rounds.train_fresh_instance(build_subject("net.py:Net", "4x8"), torch.optim.SGD)
        drawn.append(run.module.drawn)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0][:3])) == 3
    assert drawn[0][3:] == drawn[0][2:3]


# --- gates that start at zero ---------------------------------------------------------------------------------------

GATES = "self.gates = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range({}))"
THROUGH = "y = self.used(x)\nfor gate in self.gates: y = x + gate * torch.tanh(y)\nreturn y{}"


def test_a_chain_of_gates_that_start_at_zero_has_a_round_for_each():
    """A gate gets its first gradient after the update of the next gate. The oracle: a plain training loop."""
    check = step(GATES.format(5), THROUGH.format(""))
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


def test_a_longer_chain_cannot_be_told():
    """In each of eight rounds, another gate gets its first gradient."""
    check = step(GATES.format(12), THROUGH.format(""))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    text = (
        "the gradient is zero in each of 8 rounds; more rounds may be needed, because another parameter got its first "
        "gradient in the last round"
    )
    assert cell(check, "gradient", "gates.0").reason == text


def test_what_is_zero_when_the_chain_is_open_is_a_fault():
    """The rounds stop when no new gate gets a gradient; a gradient that is still zero is reported."""
    check = step(f"{GATES.format(4)}\nself.off = nn.Parameter(torch.ones(8))", THROUGH.format(" + 0 * self.off"))
    assert rules(check) == {"off": "zero-gradient"}
    assert check.how.startswith("6 rounds")


# --- experts --------------------------------------------------------------------------------------------------------

EXPERTS = "self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))"
CHOSEN = """
index, y = (torch.arange(4) + x[0, 0].sign().long()) % 2, self.used(x)
for number, expert in enumerate(self.experts):
    rows = (index == number).nonzero()[:, 0]
    {}y = y.index_add(0, rows, expert(x[rows]){})
return y
"""


@pytest.mark.parametrize("when", ["", "if rows.numel(): "], ids=["called on no rows", "not called"])
def test_an_expert_without_rows_was_not_chosen(when):
    """An expert called on no rows has a zero gradient, an expert not called has None, and both get the same reason."""
    check = step(EXPERTS, CHOSEN.strip().format(when, ""))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    text = "forward does not use the parameter, but uses experts.0.bias: give more inputs"
    assert cell(check, "gradient", "experts.2.bias").reason == text
    assert verdicts(check, "gradient")["experts.1.bias"] == "passed"


def test_an_expert_with_rows_and_a_factor_of_zero_is_a_fault():
    """The first two experts have rows in each round; the third has no rows, so there is no finding about the third."""
    check = step(EXPERTS, CHOSEN.strip().format("", " * 0"))
    assert rules(check) == {f"experts.{n}.{what}": "zero-gradient" for n in (0, 1) for what in ("weight", "bias")}


def test_an_expert_that_had_rows_in_some_rounds_only():
    """A zero gradient may be due to the few rows of these rounds (e.g. a ReLU that is off)."""
    forward = "self.calls += 1\nreturn self.used(x) + self.few(x[:self.calls - 1]).sum() * 0"
    check = step("self.few, self.calls = nn.Linear(8, 8), 0", forward)
    text = "forward does not use the parameter in 1 of 3 rounds, and the gradient is zero in the others"
    assert cell(check, "gradient", "few.bias").reason == f"{text}: give more inputs"


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
    return of_source(Name.STEP, f"from centre import Centre{NORM.format(forward)}", "2x8")


@pytest.mark.parametrize("draw", ["", "torch.rand(())\n"], ids=["", "with random numbers"])
def test_a_shift_that_batch_statistics_cancel(draw):
    """The batch statistics cancel a shift of all rows. In eval mode, torch computes a gradient for the shift."""
    check = prove_norm(f"{draw}return self.out(self.norm(x + self.shift))")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    shift = cell(check, "gradient", "shift")
    assert shift.verdict is Verdict.SKIPPED
    assert shift.reason.startswith("the gradient is zero in each of 3 rounds, ")
    assert "because a batch norm cancels the effect of the parameter; " in shift.reason
    assert shift.reason.endswith("with the batch norms in eval mode")
    net = build_net()
    for train in (True, False):
        (gradient,) = torch.autograd.grad(net.train(train)(torch.ones(2, 8))[:, 0].sum(), net.shift)
        assert bool(gradient.any()) is not train


def test_a_factor_of_zero_in_front_of_a_batch_norm_is_a_fault():
    """The gradient is also zero with the running statistics."""
    assert rules(prove_norm("return self.out(self.norm(x + 0 * self.shift))")) == {"shift": "zero-gradient"}


def test_batch_norms_that_cannot_be_called_in_eval_mode_do_not_tell():
    """The reason has the error of the batch norm."""
    raises = "if not self.norm.training: raise ValueError('no statistics yet')\n"
    check = prove_norm(f"{raises}return self.out(self.norm(x + self.shift))")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = cell(check, "gradient", "shift").reason
    assert reason.startswith(
        "the gradient is zero, perhaps because a batch norm cancels it; statecli could not check this: calling the "
        "model in train"
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
def test_a_hidden_state_of_zeros_is_a_note(module, call):
    """The hidden weight gets a gradient of zeros in a single step, but the class is correct."""
    check = step(f"self.cell = {module}", f"x = self.used(x)\nreturn {call}")
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
def test_a_hidden_state_that_is_passed_on_trains_its_weight(module, call):
    """A hidden state that is not zero gives the weight a gradient."""
    check = step(f"self.cell = {module}", f"x = self.used(x)\nreturn {call}")
    assert (check.findings, check.verdict) == ((), Verdict.PASSED)


def test_a_hidden_weight_that_is_multiplied_by_zero_stays_a_warning():
    """The hidden state of the GRUCell is not zero, so it does not explain the zero gradient."""
    call = "x = self.used(x)\nreturn self.cell(x)[0] + 0 * self.other(x, torch.ones_like(x))"
    check = step("self.cell = nn.LSTMCell(8, 8)\nself.other = nn.GRUCell(8, 8)", call)
    severities = {finding.fqn: finding.severity for finding in check.findings}
    assert severities["cell.weight_hh"] is Severity.NOTE
    assert severities["other.weight_hh"] is Severity.WARNING
