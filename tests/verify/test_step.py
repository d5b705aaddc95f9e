"""The training step: the verdict for each tensor, checked against a plain training loop of torch."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from statecli.commands.verify.proofs.step import prove
from statecli.commands.verify.result import Check, Name, Verdict
from statecli.core.errors import UsageError
from statecli.core.finding import Severity

from .mixes import SAMPLES
from .proving import build_net, build_subject, find_cell, map_rules, prove_step as train, run_proof

pytestmark = pytest.mark.usefixtures("in_tmp_path")
run_step = partial(run_proof, Name.STEP)


def map_verdicts(check: Check, column: str) -> dict[str, str]:
    """Return the verdicts of a column by tensor name."""
    cells_by_name = {column.name: column.cells for column in check.columns}
    return {fqn: cell.verdict.value for fqn, cell in cells_by_name.get(column, {}).items()}


# --- the samples --------------------------------------------------------------------------------------------

SAMPLE_INPUTS = {
    "grad_buffer.py:Scaled": "2x4",
    "plain_lists.py:Lists": "2x4",
    "unused.py:Net": "4x8",
    "detached.py:Net": "4x8",
}
UNREGISTERED = [*(f"scales[{n}]" for n in (0, 1)), *(f"blocks[{n}].{w}" for n in (0, 1) for w in ("weight", "bias"))]
UNREGISTERED += [f"heads['{key}'].{w}" for key in "ab" for w in ("weight", "bias")]
EXPECTED_RULES = {
    "grad_buffer.py:Scaled": {"scale": "not-in-optimizer"},
    "plain_lists.py:Lists": dict.fromkeys(UNREGISTERED, "not-in-optimizer"),
    "unused.py:Net": {"skip.weight": "no-gradient", "skip.bias": "no-gradient"},
    "detached.py:Net": {"encoder.weight": "no-gradient", "encoder.bias": "no-gradient"},
}


@pytest.mark.parametrize("sample", SAMPLE_INPUTS)
def test_sample_has_exactly_the_expected_findings(sample):
    """The sample breaks exactly the expected rules; `tests/test_samples.py` has the samples that pass."""
    check = run_step(str(SAMPLES / sample), SAMPLE_INPUTS[sample])
    assert map_rules(check) == EXPECTED_RULES[sample]
    assert check.verdict is Verdict.FAILED, check


def test_message_distinguishes_detached_from_unused_layers():
    """Both layers get no gradient, and the message has the reason."""
    unused = run_step(str(SAMPLES / "unused.py:Net"), "4x8").findings[0]
    detached = run_step(str(SAMPLES / "detached.py:Net"), "4x8").findings[0]
    assert unused.message == "skip.weight: gets no gradient: not used in forward"
    thrown_away = "used in forward, but no differentiable path leads to the output"
    assert detached.message == f"encoder.weight: gets no gradient: {thrown_away}"
    assert "unused.py:18" in unused.help
    assert "detached.py:18" in detached.help


def test_buffers_updated_by_forward_pass():
    """Forward changes BatchNorm's three buffers."""
    check = run_step(str(SAMPLES / "batchnorm.py:Block"), "2x3x8x8")
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert map_verdicts(check, "forward updates") == dict.fromkeys(names, "passed")
    assert check.findings == ()


def test_unused_parameter_in_a_plain_list_is_a_warning():
    """Forward does not use heads['b']; a parameter that forward uses but no optimizer trains is an error."""
    severities_by_fqn = {
        finding.fqn: finding.severity for finding in run_step(str(SAMPLES / "plain_lists.py:Lists"), "2x4").findings
    }
    assert severities_by_fqn["heads['b'].weight"] is Severity.WARNING
    assert severities_by_fqn["heads['a'].weight"] is Severity.ERROR


# --- real classes -------------------------------------------------------------------------------------------


def test_parameter_unused_with_the_chosen_inputs_is_inconclusive(tmp_path):
    """XLNet has parameters for segments and masks that its token ids alone do not use, so the requested check is
    inconclusive; `test_zoo.py` has the check that was not requested.
    """
    options = {"vocab_size": 64, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
    (tmp_path / "x.py").write_text(
        "from transformers import XLNetConfig, XLNetModel\n"
        f"def make():\n    return XLNetModel(XLNetConfig(**{options!r}))\n"
    )
    check = run_step(f"{tmp_path}/x.py:make")
    reason = "mask_emb: forward does not use the parameter with the inputs that statecli chose"
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.findings == ()
    assert check.reason.startswith(reason)


def test_metric_without_parameters_is_skipped():
    """A metric has states that forward updates, but no parameter."""
    pytest.importorskip("torchmetrics")
    check = run_step("torchmetrics:MeanMetric", "4")
    assert (check.verdict, check.reason) == (
        Verdict.SKIPPED,
        "no tensor of the model requires grad",
    )


@pytest.mark.parametrize("name", ["sgd", "Adam", "adamw", "rmsprop", "adagrad", "adadelta", "rprop", "radam", "lbfgs"])
def test_optimizers_of_torch_update_all_parameters(name):
    """Each optimizer changes each parameter of a small net, in as many rounds as the optimizer needs."""
    assert run_step(str(SAMPLES / "net_fixed.py:Net"), "2x3", optimizer=name).verdict is Verdict.PASSED


def test_unknown_optimizer_is_refused():
    """The message names the most similar optimizer."""
    with pytest.raises(UsageError, match=r"--optimizer adamm: torch.optim does not have this class; did you mean adam"):
        run_step(str(SAMPLES / "net.py:Net"), "2x3", optimizer="adamm")


def test_optimizer_that_refuses_the_model_is_inconclusive():
    """SparseAdam refuses dense gradients: the check is inconclusive, with the optimizer's own error."""
    check = run_step(str(SAMPLES / "net_fixed.py:Net"), "2x3", optimizer="sparseadam")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "SparseAdam" in check.reason


# --- typical cases ------------------------------------------------------------------------------------------


def test_lora_gets_its_gradient_in_the_second_round():
    """A has no gradient while B is zero, but the check passes."""
    check = train(
        "self.A, self.B = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 8))",
        "return self.used(x) + x @ self.A @ self.B",
    )
    assert check.verdict is Verdict.PASSED
    assert check.how.startswith("2 rounds")


def test_expert_not_chosen_by_any_input_is_inconclusive():
    """Each of the other experts is used only in some rounds, so other inputs may choose this expert."""
    check = train(
        "self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])\nself.turn = 0",
        "self.turn += 1\nreturn self.used(x) + self.experts[self.turn % 2](x)",
    )
    assert check.verdict is Verdict.INCONCLUSIVE
    assert map_verdicts(check, "gradient")["experts.2.weight"] == "inconclusive"
    assert map_verdicts(check, "gradient")["experts.1.weight"] == "passed"


def test_output_with_a_constant_sum_passes():
    """softmax and LayerNorm have outputs whose sum does not depend on anything; the loss does."""
    for last in ("torch.softmax(self.used(x), -1)", "nn.functional.layer_norm(self.used(x), (8,))"):
        check = train(forward=f"return {last}")
        assert check.verdict is Verdict.PASSED, (last, check)


def test_zero_gradient_is_reported():
    """The output is multiplied by zero: the gradient exists, but never changes the parameter."""
    check = train("self.off = nn.Linear(8, 8)", "return self.used(x) + 0 * self.off(x)")
    assert map_rules(check) == {"off.weight": "zero-gradient", "off.bias": "zero-gradient"}
    assert check.findings[0].help.startswith("look for a factor of zero, ")  # no cause was measured
    assert find_cell(check, "updated", "off.weight").reason == "gets no gradient, so the optimizer does not update it"


def test_nan_gradient_of_finite_outputs_is_reported():
    """The derivative of sqrt at zero is infinite, and infinity times zero is NaN."""
    check = train(forward="y = self.used(x)\nreturn y + torch.sqrt(torch.zeros_like(y) * y) * 0")
    assert set(map_rules(check).values()) == {"non-finite-gradient"}
    assert set(map_rules(check)) == {"used.weight", "used.bias"}


def test_non_finite_output_is_inconclusive():
    """The output itself is NaN, and the reason may be the random inputs."""
    check = train(forward="return self.used(x).sqrt()")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.findings == ()


def test_zero_gradient_of_a_non_finite_output_is_inconclusive():
    """The zero gradient comes from statecli's loss, which ignores NaN. The oracle: a plain sum."""
    init = "self.b = nn.Parameter(torch.zeros(8))"
    check = train(init, "return torch.log(-self.used(x).abs()) + self.b")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert find_cell(check, "gradient", "b").reason.startswith(
        "the gradient is zero, but NaN and infinite values of the output"
    )
    b = torch.zeros(8, requires_grad=True)
    (torch.full((4, 8), torch.nan) + b).sum().backward()
    assert b.grad.tolist() == [4.0] * 8
    assert train(init, "return torch.log(self.used(x).abs()) + self.b").verdict is Verdict.PASSED


def test_output_masked_with_minus_infinity_passes():
    """A finite gradient counts, even if the output also has infinite values."""
    check = train(forward="return self.used(x).masked_fill(x > 0, float('-inf'))")
    assert check.verdict is Verdict.PASSED


@pytest.mark.parametrize("output", [
    "{'a': [y], 'b': 1}",
    "(None, (y,))",
    "self.Out(y)",
    "torch.distributions.Normal(y, 1.0)",
    "torch.view_as_complex(y.reshape(-1, 2))",
    "y.to_sparse()",
    "y.bfloat16()",
])  # fmt: skip
def test_outputs_of_any_form_give_a_loss(output):
    """Dicts, lists, dataclasses and distributions; complex, sparse and low-precision numbers."""
    source = "import dataclasses\n@dataclasses.dataclass\nclass Out:\n    y: torch.Tensor\n"
    check = train(forward=f"y = self.used(x)\nreturn {output}", methods=source)
    assert check.verdict is Verdict.PASSED


def test_output_without_floats_is_inconclusive():
    """A model that returns only class indices has no loss."""
    check = train(forward="return self.used(x).argmax(-1)")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "no floating-point tensor" in check.reason


def test_output_that_does_not_require_grad_is_reported():
    """Forward under no_grad trains no parameter, and each parameter is reported."""
    check = train(forward="with torch.no_grad():\n    return self.used(x)")
    assert check.findings[0].message == "used.weight: gets no gradient: the output of forward does not require grad"
    assert set(map_rules(check)) == {"used.weight", "used.bias"}


def test_output_that_refuses_arithmetic_is_inconclusive():
    """A subclass of Tensor runs the user's code for each operator of the loss."""
    class_code = """
class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.isfinite:
            raise ValueError("not a number")
        return super().__torch_function__(func, types, args, kwargs or {})
"""
    check = train(forward="return self.used(x).as_subclass(self.Odd)", methods=class_code)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.reason.startswith("computing a loss from the output raised ValueError: not a number (net.py:")


def test_error_of_forward_is_inconclusive():
    """The reason has the model's own error and line."""
    check = train(forward="raise ValueError('needs labels in training')")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.reason == "calling the model in train mode raised ValueError: needs labels in training (net.py:9)"


def test_graph_kept_between_steps_is_inconclusive():
    """The hidden state is not detached, so the second backward fails; a single round would not show the error."""
    check = train(
        "self.hidden = None",
        "self.hidden = torch.tanh(self.used(x) + (0 if self.hidden is None else self.hidden))\nreturn self.hidden",
    )
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "backward in round 2 raised RuntimeError" in check.reason


AVERAGE = """if self.training:
    self.mean = 0.9 * self.mean + 0.1 * self.used(x).mean(0){0}
return self.used(x - self.mean.detach())"""


def test_buffer_that_keeps_the_graph_of_training_fails():
    """Only a forward in train mode stores the graph, so the check `copy` does not see it; copy.deepcopy raises then."""
    init = 'self.register_buffer("mean", torch.zeros(8))'
    check = train(init, AVERAGE.format(""))
    assert map_rules(check) == {"mean": "non-leaf-attribute"}
    assert map_verdicts(check, "forward updates") == {"mean": "failed"}
    model = build_net()
    model(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(model)
    assert train(init, AVERAGE.format(".detach()")).verdict is Verdict.PASSED


@pytest.mark.parametrize("init", ["self.last = None", "self.last = torch.zeros(4, 8)"])
@pytest.mark.parametrize(
    ("stored", "verdict"), [("h if self.training else h.detach()", "failed"), ("h", "passed"), ("h.detach()", "passed")]
)
def test_tensor_that_keeps_the_graph_only_in_train_mode_fails(init, stored, verdict):
    """The check `copy` reports a tensor that keeps its graph in eval mode too."""
    check = train(init, f"h = self.used(x)\nself.last = {stored}\nreturn h")
    assert map_rules(check) == ({"last": "non-leaf-attribute"} if verdict == "failed" else {})
    assert check.verdict.value == verdict


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_bfloat16_and_float64_models_train(dtype):
    """bfloat16 has three digits: the update is large enough to change the values."""
    check = train(f"self.to(torch.{dtype})", "return self.used(x)", f"{dtype}:4x8")
    assert check.verdict is Verdict.PASSED, check


def test_update_below_the_precision_is_inconclusive():
    """In bfloat16, adding a hundredth to a million changes nothing, so the check is inconclusive."""
    check = train(
        "self.big = nn.Parameter(torch.full((8,), 1e6, dtype=torch.bfloat16))",
        "return self.used(x) + self.big.float()",
    )
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "is too small for values of" in check.reason


def test_frozen_parameter_changed_by_forward_passes():
    """A momentum encoder in a parameter is changed on purpose: the change is shown, but is not a finding."""
    check = train(
        "self.slow = nn.Parameter(torch.zeros(8), requires_grad=False)",
        "self.slow.data.add_(1)\nreturn self.used(x) + self.slow",
    )
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert map_verdicts(check, "forward updates") == {"slow": "passed"}
    assert find_cell(check, "forward updates", "slow").reason == "frozen, but forward changes the tensor"


def test_frozen_parameter_changed_by_the_optimizer_too_fails():
    """The change by forward does not excuse the change by the optimizer."""
    check = train(
        "self.old = nn.Parameter(self.used.weight.data, requires_grad=False)",
        "self.old.data.mul_(0.5)\nreturn self.used(x)",
    )
    assert map_rules(check) == {"old": "frozen-updated"}
    assert map_verdicts(check, "forward updates") == dict.fromkeys(("old", "used.weight"), "passed")


def test_frozen_parameter_with_trained_memory_fails():
    """The optimizer changes shared memory, even if one of its names is frozen."""
    check = train("self.old = nn.Parameter(self.used.weight.data, requires_grad=False)")
    assert map_rules(check) == {"old": "frozen-updated"}
    assert check.findings[0].message == (
        "old: frozen, but the step of the optimizer changes the tensor, because it shares memory with used.weight"
    )


def test_parameter_replaced_by_forward_fails():
    """The optimizer continues to train the old parameter, not the new parameter."""
    check = train(
        "self.scale = nn.Parameter(torch.ones(8))",
        "self.scale = nn.Parameter(self.scale.detach().clone())\nreturn self.used(x) * self.scale",
    )
    assert map_rules(check) == {"scale": "not-in-optimizer"}
    assert "forward replaces the tensor" in check.findings[0].message


def test_parameter_created_by_forward_fails():
    """An optimizer created before the first call does not contain a parameter that this call registers."""
    check = train(
        forward="if not hasattr(self, 'late'):\n    self.late = nn.Parameter(torch.ones(8))\n"
        "return self.used(x) * self.late"
    )
    assert map_rules(check) == {"late": "not-in-optimizer"}
    assert check.findings[0].help.startswith("register the tensor in the constructor")


def test_parameters_omitted_by_the_model_fail():
    """A class may override parameters(): the optimizer does not train a parameter that this method omits."""
    own = "def parameters(self, recurse=True):\n    return self.head.parameters()\n"
    check = train("self.head = nn.Linear(8, 2)", "return self.head(self.used(x))", methods=own)
    assert map_rules(check) == {"used.weight": "not-in-optimizer", "used.bias": "not-in-optimizer"}


def test_both_names_of_a_tied_weight_are_trained():
    """The optimizer updates the shared tensor once; each name has its own cell with the verdict."""
    check = run_step(str(SAMPLES / "tied.py:Tied"), "int64:2x4<100")
    assert map_verdicts(check, "updated") == {"embed.weight": "passed", "head.weight": "passed"}


def test_check_without_inputs_is_skipped():
    """The check is skipped, and the reason has the options for an input."""
    check = run_step(str(SAMPLES / "net.py:Net"))
    assert check.verdict is Verdict.SKIPPED
    assert check.reason.startswith("no input given: --input SHAPE or --input-from FILE.PY:MAKE")


def test_model_on_meta_is_skipped():
    """A model on meta has no values to train."""
    check = run_step(str(SAMPLES / "net.py:Net"), "2x3", init_device="meta")
    assert check.verdict is Verdict.SKIPPED
    assert "meta" in check.reason


def test_process_settings_are_restored():
    """Random generators, default dtype and grad mode are unchanged, whatever forward does."""
    disturb = """if self.training:
    import random, numpy
    torch.manual_seed(7), random.random(), numpy.random.rand()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)
return self.used(x.float())
"""
    train(forward=disturb)
    net = build_subject("net.py:Net", "4x8")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with torch.no_grad():
        assert prove(net).verdict is Verdict.PASSED
        assert not torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_verdicts_agree_with_a_loop_of_torch():
    """The oracle: after a plain training step, the parameters with other values, and the parameters with a gradient."""
    check = train(
        "self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)\nself.c.requires_grad_(False)",
        "return self.used(x) + self.a(x).detach() + self.b(self.c(x))",
    )
    net: nn.Module = build_net()
    before = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    learned = {name for name, tensor in net.named_parameters() if not torch.equal(tensor, before[name])}
    assert {name for name, verdict in map_verdicts(check, "updated").items() if verdict == "passed"} == learned
    assert {name for name, tensor in net.named_parameters() if tensor.requires_grad} - learned == set(map_rules(check))


def test_inputs_without_elements_are_inconclusive():
    """An empty batch gives zero gradients for any model."""
    check = run_step(str(SAMPLES / "batchnorm.py:Block"), "0x8")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert check.reason == "the inputs have no elements (float32 0×8), so no gradient is computed"
