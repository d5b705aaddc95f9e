"""The proof `forward` runs backward on the fake device: hooks, and the backward of a torch.autograd.Function."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import statecli
from statecli.commands.verify.proofs import forward
from statecli.commands.verify.proofs.move import FAKE_CUDA
from statecli.commands.verify.result import Name, Verdict

from .mixes import TABLE, build_live_subject
from .proving import prove_source


class Net(nn.Module):
    """A layer whose gradient a function changes. `a` and `b` are plain tensors; `buffer` moves with the model."""

    def __init__(self, use):
        super().__init__()
        self.fc, self.use = nn.Linear(3, 3), use
        self.a, self.b = torch.ones(3), torch.ones(3)
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, x):
        return self.use(self, self.fc(x))


def build_function(change):
    """A torch.autograd.Function whose backward is `change(model, gradient)`."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, model):
            ctx.model = model
            return y * 2

        @staticmethod
        def backward(ctx, gradient):
            return change(ctx.model, gradient), None

    return lambda model, y: Changed.apply(y, model)


def build_hook(change):
    """A hook on the output of the layer, which calls `change(model, gradient)`."""

    def use(model, y):
        if y.requires_grad:
            y.register_hook(lambda gradient: change(model, gradient))
        return y * 2

    return use


class Hooked(Net):
    """A model whose constructor registers a hook on the weight, the layer or the weight's gradient."""

    def __init__(self, register):
        super().__init__(lambda _, y: y)
        register(self)


WEIGHT_HOOK = lambda change: lambda m: m.fc.weight.register_hook(lambda gradient: change(m, gradient))  # noqa: E731
MODULE_HOOK = lambda change: (  # noqa: E731
    lambda m: m.fc.register_full_backward_hook(lambda _, inputs, outputs: change(m, outputs[0]) is None or None)
)
MODULE_PRE_HOOK = lambda change: (  # noqa: E731
    lambda m: m.fc.register_full_backward_pre_hook(lambda _, outputs: (change(m, outputs[0]),))
)
POST_ACCUMULATE_HOOK = lambda change: (  # noqa: E731
    lambda m: m.fc.bias.register_post_accumulate_grad_hook(lambda p: p.grad.copy_(change(m, p.grad)) is None or None)
)

#: How backward calls a function, the function, the names that are reported (None: created at a line), a legal function.
ZOO = {
    "a tensor made in backward": (
        build_function,
        lambda m, g: g * torch.ones(3),
        [None],
        lambda m, g: g * g.new_ones(3),
    ),
    "a plain attribute": (build_function, lambda m, g: g * m.a, ["a"], lambda m, g: g * m.buffer),
    "two that are combined": (
        build_function,
        lambda m, g: g * (m.a + m.b),
        ["a", "b"],
        lambda m, g: g * m.a.to(g) * m.b.sum(),
    ),
    "a matrix": (
        build_function,
        lambda m, g: g @ torch.outer(m.a, m.b),
        ["a", "b"],
        lambda m, g: g @ torch.eye(3).to(g),
    ),
    "a choice": (
        build_function,
        lambda m, g: torch.where(m.a > 0, g, 0 * g),
        ["a"],
        lambda m, g: torch.where(g > 0, g, 0),
    ),
    "an index": (
        build_function,
        lambda m, g: g.gather(1, torch.zeros(2, 3).long()),
        [None],
        lambda m, g: g[:, torch.zeros(3).long()],
    ),
    "a sum in place": (build_hook, lambda m, g: g.clone().add_(m.a), ["a"], lambda m, g: g.clone().add_(m.a[0])),
    "of a hook of the output": (build_hook, lambda m, g: g * m.a, ["a"], lambda m, g: g * m.buffer),
    "of a variable of the file": (
        build_hook,
        lambda m, g: g * TABLE,
        [None],
        lambda m, g: g * TABLE.to(g.device),
    ),
    "of a hook of the weight": (WEIGHT_HOOK, lambda m, g: g * m.a, ["a"], lambda m, g: g * 2),
    "of a hook of the module": (MODULE_HOOK, lambda m, g: g * m.b, ["b"], lambda m, g: g * m.b.mean()),
    "of a hook before the module": (MODULE_PRE_HOOK, lambda m, g: g * m.b, ["b"], lambda m, g: g / 2),
    "of a hook after the sum": (POST_ACCUMULATE_HOOK, lambda m, g: g * m.a, ["a"], lambda m, g: g * m.buffer),
    "an array": (
        build_hook,
        lambda m, g: g * float(g.detach().numpy().sum()),
        [None],
        lambda m, g: g * g.numel(),
    ),
}


def prove(name, change):
    """Run the proof for a model that calls `change` in backward."""
    build_change = ZOO[name][0]
    build_model = (
        (lambda: Net(build_change(change)))
        if build_change in (build_function, build_hook)
        else (lambda: Hooked(build_change(change)))
    )
    return forward.prove(build_live_subject(build_model, (2, 3)), FAKE_CUDA)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ZOO)
def test_device_mix_in_backward_is_reported(name):
    """Each tensor is named, and the message names backward and not forward as the place."""
    _, change, names, _ = ZOO[name]
    check = prove(name, change)
    assert check.verdict is Verdict.FAILED
    assert sorted((finding.fqn for finding in check.findings), key=str) == sorted(names, key=str)
    assert all(", in backward" in finding.message for finding in check.findings)
    assert all("test_backward.py:" in finding.message for finding in check.findings)
    assert all("in forward" not in finding.message for finding in check.findings)
    failed = {fqn for fqn, cell in check.columns[0].cells.items() if cell.verdict is Verdict.FAILED}
    assert failed == set(filter(None, names))


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ZOO)
def test_backward_without_a_device_mix_passes(name):
    """A tensor on the device of the gradient, or a number, is legal; backward runs to its end."""
    check = prove(name, ZOO[name][3])
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert check.how.startswith("eval mode, train mode, backward on")


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ZOO)
def test_every_sample_runs_backward_on_the_cpu(name):
    """The oracle for the samples: torch refuses no sample if all tensors are on the same device."""
    for change in ZOO[name][1::2]:
        build_change = ZOO[name][0]
        module = (
            Net(build_change(change)) if build_change in (build_function, build_hook) else Hooked(build_change(change))
        )
        module(torch.ones(2, 3)).sum().backward()
        assert module.fc.weight.grad is not None


def test_error_of_backward_does_not_change_the_verdict():
    """A backward that raises another error does not change the verdict of forward, and `how` does not list backward."""

    def fail(model, gradient):
        raise ValueError("no")

    check = forward.prove(build_live_subject(lambda: Net(build_hook(fail)), (2, 3)), FAKE_CUDA)
    assert (check.verdict, check.findings, check.reason) == (Verdict.PASSED, (), None)
    assert check.how.endswith("in eval and train mode")


def test_model_without_a_graph_runs_no_backward():
    """A frozen model, or a model that detaches its output, has no backward to run."""
    check = forward.prove(build_live_subject(lambda: Net(lambda m, y: y.detach()), (2, 3)), FAKE_CUDA)
    assert check.verdict is Verdict.PASSED
    assert check.how.endswith("in eval and train mode")


def test_mismatch_in_grad_mode_is_attributed_to_train_mode():
    """Forward may read whether grad mode is on; a mismatch in this branch is not attributed to backward."""
    check = forward.prove(
        build_live_subject(lambda: Net(lambda m, y: y + m.a if torch.is_grad_enabled() else y), (2, 3)), FAKE_CUDA
    )
    (finding,) = check.findings
    assert finding.fqn == "a"
    assert finding.message.split(";")[0].endswith("in train mode")


def test_outputs_on_several_devices_pass():
    """A model may return a tensor on the cpu and a tensor on the device: statecli has no loss that combines them."""
    check = forward.prove(build_live_subject(lambda: Net(lambda m, y: (y, y.cpu() * m.a)), (2, 3)), FAKE_CUDA)
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert check.how.startswith("eval mode, train mode, backward on")


def test_gradient_computed_in_forward_sees_the_fake_device():
    """A gradient penalty calls torch.autograd.grad in forward; its code reads the device as cuda."""

    def penalty(model, y):
        if not y.requires_grad:
            return y
        (gradient,) = torch.autograd.grad((y**2).sum(), model.fc.weight, create_graph=True)
        return y + gradient.to(y.device.type).norm() + y.new(3).zero_()

    check = forward.prove(build_live_subject(lambda: Net(penalty), (2, 3)), FAKE_CUDA)
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert check.how.startswith("eval mode, train mode, backward on")


def test_live_model_with_parameter_hooks_does_not_list_backward():
    """A copy of a live model lacks the hooks of its parameters, so backward of the copy would prove nothing."""
    for register, words in [
        (WEIGHT_HOOK(lambda m, g: g * m.a), "called on"),
        (lambda m: None, "eval mode, train mode, "),
    ]:
        (check,) = statecli.verify(Hooked(register), checks=["forward"], inputs="2x3", device=FAKE_CUDA).checks
        assert check.how.startswith(words)


@pytest.mark.parametrize(
    ("value", "use"),
    [
        ("self.fc.weight.norm(dim=1)", "y / self.t"),
        ("self.fc.weight.exp()", "y @ self.t"),
        ("self.fc.weight @ self.fc.weight", "torch.relu(y @ self.t)"),
        ("self.fc.weight[0].softmax(0).log()", "torch.cat([y, self.t[None]])"),
    ],
    ids=["saved-input", "saved-result", "two-inputs", "two-operators"],
)
def test_graph_of_the_constructor_gives_no_second_finding(value, use, in_tmp_path):
    """A tensor computed from a parameter is the only finding; backward of its graph has no line of the user."""
    body = (
        f"self.fc = nn.Linear(3, 3)\nself.t = {value}\n---\ndef forward(self, x):\n    y = self.fc(x)\n    return {use}"
    )
    check = prove_source(Name.FORWARD, body, "2x3", device=FAKE_CUDA)
    (finding,) = check.findings
    assert finding.fqn == "t"
    assert " at net.py:10" in finding.message
    assert check.how.startswith("eval mode, train mode, backward on")


def test_message_has_no_line_of_the_caller():
    """A model of torch's own modules has no line of the user, so neither this file nor a console script is named."""
    net = nn.Sequential(nn.Linear(3, 3))
    del net[0].bias
    net[0].bias = torch.ones(3)
    check = forward.prove(build_live_subject(lambda: net, (2, 3)), FAKE_CUDA)
    (finding,) = check.findings
    assert finding.fqn == "0.bias"
    assert ".py:" not in finding.message
