"""The reason why a leaf gets no gradient, checked against torch's graph and torch's own warning."""

from __future__ import annotations

import pytest
import torch

from statecli.commands.verify.result import Verdict

from .proving import build_net, find_cell, map_rules, prove_step

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def run_net() -> torch.Tensor:
    """Return the output of the class that `step` wrote."""
    return build_net()(torch.randn(4, 8))


CHECKPOINT = "from torch.utils.checkpoint import checkpoint\n"
TIMES = """
class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w
    @staticmethod
    def backward(ctx, gradient):
        return gradient, {}
"""


GRADIENT_LOST = "w: gets no gradient: the output uses the parameter, but grad is None after backward"


@pytest.mark.parametrize("between", ["", " * 2"], ids=["direct", "after an operator"])
def test_backward_without_a_gradient_is_reported(between):
    """torch's graph shows that the output depends on the parameter; with a corrected backward the class passes."""
    parts = "self.w = nn.Parameter(torch.ones(8))", f"return self.used(x) + self.Times.apply(x, self.w{between})"
    check = prove_step(*parts, methods=TIMES.format("None"))
    assert [finding.message for finding in check.findings] == [GRADIENT_LOST]
    assert "a backward of a torch.autograd.Function" in check.findings[0].help
    (_, (times, _)) = run_net().grad_fn.next_functions
    assert times.name() == "TimesBackward"
    assert times.next_functions[1][0] is not None
    assert prove_step(*parts, methods=TIMES.format("gradient.sum(0)")).verdict is Verdict.PASSED


def test_hook_that_removes_the_gradient_is_reported():
    """The oracle: torch.autograd.grad returns a gradient for the parameter."""
    hook = "self.used.bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, 'grad', None))"
    check = prove_step(hook, "return self.used(x)")
    assert [finding.message for finding in check.findings] == [GRADIENT_LOST.replace("w:", "used.bias:")]
    assert check.findings[0].help.startswith("look for a hook")
    net = build_net()
    (given,) = torch.autograd.grad(net(torch.ones(4, 8)).sum(), net.used.bias)
    assert given.tolist() == [4.0] * 8


NO_PATH = "used in forward, but no differentiable path leads to the output"


@pytest.mark.parametrize(
    ("rest", "reason"),
    [("", "the output of forward does not require grad"), (" + self.head(x)", NO_PATH)],
    ids=["all of it", "a part"],
)
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpoint_without_input_grad_is_reported(rest, reason):
    """torch warns and computes no gradient, unless use_reentrant=False or an input requires grad."""
    forward = f"{CHECKPOINT}return checkpoint(self.used, x, use_reentrant=True){rest}"
    check = prove_step("self.head = nn.Linear(8, 8)", forward)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True. Gradients will be None"):
        run_net()
    actual = {finding.fqn: finding for finding in check.findings if "used" in finding.fqn}
    assert [finding.message for finding in actual.values()] == [
        f"used.{what}: gets no gradient: {reason}" for what in ("weight", "bias")
    ]
    assert "use_reentrant=True" in actual["used.weight"].help
    for mended in (forward.replace("=True", "=False"), forward.replace(" x, use", " x.requires_grad_(), use")):
        assert "used.weight" not in map_rules(prove_step("self.head = nn.Linear(8, 8)", mended))


def test_unused_result_of_a_checkpoint_is_reported():
    """The input of the checkpoint requires grad, so the checkpoint is not the reason."""
    forward = f"{CHECKPOINT}y = self.used(x)\ncheckpoint(self.lost, y, use_reentrant=True)\nreturn y"
    check = prove_step("self.lost = nn.Linear(8, 8)", forward)
    assert [finding.message for finding in check.findings] == [
        f"lost.{what}: gets no gradient: {NO_PATH}" for what in ("weight", "bias")
    ]


def test_expert_chosen_by_a_value_is_inconclusive():
    """Each round uses the same expert, but forward chooses by a value, so other inputs may choose another expert."""
    init = "self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])"
    check = prove_step(init, "return self.used(x) + self.experts[int(x.mean() > 9)](x)")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    text = "forward does not use the parameter, but uses experts.0.bias: give more inputs"
    assert find_cell(check, "gradient", "experts.2.bias").reason == text
    fixed = prove_step(init, "return self.used(x) + self.experts[0](x)")
    assert set(map_rules(fixed).values()) == {"no-gradient"}


def test_parameter_used_in_a_later_round_is_inconclusive():
    """Only the fourth call uses the parameter, and forward draws no random number."""
    forward = "self.calls += 1\nreturn (self.late if self.calls == 4 else self.used)(x)"
    check = prove_step("self.late, self.calls = nn.Linear(8, 8), 0", forward)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    text = (
        "no gradient in 3 rounds, but the parameter has a gradient in a later round: forward does not always use the "
        "parameter"
    )
    assert find_cell(check, "gradient", "late.bias").reason == text
