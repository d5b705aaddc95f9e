"""Rules about trained and frozen parameters and the state of their optimizer."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import run as locking
from statecli.core import parameter_or_buffer
from statecli.core.finding import Severity
from statecli.rules.policy_config import Policy


@pytest.fixture
def save_training_checkpoint(tmp_path):
    """Save a training checkpoint of a model, with an optimizer built from the named parameters; return the path."""

    def save(module, named_parameters):
        optimizer = torch.optim.AdamW(named_parameters)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        model = dict(module.named_parameters())
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
        return tmp_path / "t.pt"

    return save


def build_model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_trainable_mismatch_finds_trainable_and_frozen_tensors(run_rule, tmp_path):
    """`frozen` reports matching trainable tensors, and `trainable` reports matching frozen tensors."""
    module = build_model()
    module[1].requires_grad_(False)
    torch.save(module, tmp_path / "m.pt")
    findings = run_rule("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("0.*",), trainable=("1.bias",)))
    assert sorted(finding.fqn for finding in findings) == ["0.bias", "0.weight", "1.bias"]


def test_trainable_mismatch_finds_a_glob_that_matches_nothing(run_rule, tmp_path):
    """A glob with a typo protects no tensor."""
    torch.save(build_model(), tmp_path / "m.pt")
    (finding,) = run_rule("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("0",)))
    assert finding.message.endswith("model tensors; did you mean '0.*'?")
    (finding,) = run_rule("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("encoder.*",)))
    assert "encoder.*" in finding.message


def test_trainable_mismatch_spares_tensors_that_fit_the_policy(run_rule, tmp_path):
    """A buffer never requires grad and is not reported, even if `trainable` matches its name."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].requires_grad_(False)
    torch.save(module, tmp_path / "m.pt")
    assert not run_rule("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("0.*",), trainable=("1.*",)))


def test_trainable_mismatch_warns_that_a_state_dict_is_inconclusive(run_rule, tmp_path):
    """A state_dict does not record requires_grad, so the result is a single warning for all tensors and globs."""
    torch.save(build_model().state_dict(), tmp_path / "s.pt")
    policy = Policy(frozen=("0.*", "1.weight"), trainable=("1.bias",))
    (finding,) = run_rule("trainable-mismatch", tmp_path / "s.pt", policy=policy)
    assert (
        finding.message
        == "policy.frozen and policy.trainable: inconclusive, because a state_dict does not record requires_grad"
    )
    assert finding.severity is Severity.WARNING


def test_trainable_mismatch_spares_frozen_tensors_in_a_lock(tmp_path):
    """The lock checks the values of frozen tensors, but cannot check trainable tensors."""
    torch.save(build_model().state_dict(), tmp_path / "s.pt")
    request = locking.Request((str(tmp_path / "s.pt"),))
    lock = locking.build_lock(locking.read_targets(request), request)
    frozen, trained = Policy(frozen=("0.*",)), Policy(trainable=("1.*",))
    assert not audit(Request((str(tmp_path / "s.pt"),), policy=frozen, lock=lock)).findings
    (finding,) = audit(Request((str(tmp_path / "s.pt"),), policy=trained, lock=lock)).findings
    assert finding.message.startswith("policy.trainable: inconclusive")


def test_trainable_mismatch_is_skipped_without_a_model(tmp_path):
    """An optimizer's state alone has nothing to be frozen."""
    module = build_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    request = Request((str(tmp_path / "o.pt"),), select=("trainable-mismatch",), policy=Policy(frozen=("0.*",)))
    (rule,) = audit(request).skipped_rules
    assert rule.reason == "the target has no model tensors"


def test_optimizer_orphan_finds_state_of_a_missing_parameter(run_rule, save_training_checkpoint):
    """The optimizer was built with a head missing from the model."""
    module = build_model()
    old = [*module.named_parameters(), ("head.weight", nn.Parameter(torch.ones(2)))]
    findings = run_rule("optimizer-orphan", save_training_checkpoint(module, old))
    assert [finding.fqn for finding in findings] == ["head.weight"]


def test_optimizer_orphan_spares_names_with_a_wrapper_prefix(run_rule, save_training_checkpoint):
    """`module.0.weight` is DDP's name of `0.weight`."""
    module = build_model()
    assert not run_rule(
        "optimizer-orphan", save_training_checkpoint(module, [(f"module.{n}", p) for n, p in module.named_parameters()])
    )


def test_untracked_parameter_finds_parameters_outside_the_optimizer(run_rule, save_training_checkpoint):
    """The model grew after the optimizer was built."""
    module = build_model()
    findings = run_rule("untracked-parameter", save_training_checkpoint(module, list(module.named_parameters())[:2]))
    assert [finding.fqn for finding in findings] == ["1.weight", "1.bias"]


def test_untracked_parameter_spares_frozen_parameters(run_rule, save_training_checkpoint):
    """A frozen parameter needs no optimizer."""
    module = build_model()
    module[1].requires_grad_(False)
    assert not run_rule(
        "untracked-parameter", save_training_checkpoint(module, list(module[0].named_parameters(prefix="0")))
    )


def list_skip_reasons(path):
    """Why the two rules about an optimizer's parameters did not run."""
    (result,) = audit(Request((str(path),), select=("optimizer-orphan", "untracked-parameter"))).targets
    assert {finding.rule for finding in result.skipped} == {"optimizer-orphan", "untracked-parameter"}
    return {finding.reason for finding in result.skipped}


def test_optimizer_over_the_limit_gives_its_skip_reason(save_training_checkpoint, monkeypatch):
    """Above the limit of entries, statecli does not search for the trained parameters. The optimizer still counts."""
    module = build_model()
    path = save_training_checkpoint(module, module.parameters())
    torch.save(torch.load(path) | {"model": module.state_dict()}, path)
    monkeypatch.setattr(parameter_or_buffer, "MAX_OPTIMIZER_ENTRY_PAIRS", 0)
    assert list_skip_reasons(path) == {UNKNOWN_PARAMETERS}


UNKNOWN_PARAMETERS = "the optimizer state does not contain the names of the parameters that the optimizer trains"


def test_missing_optimizer_is_the_skip_reason(save_checkpoint):
    """The reason does not mention names."""
    assert list_skip_reasons(save_checkpoint(build_model().state_dict())) == {"the target has no optimizer state"}


def train_fused(cls=torch.optim.AdamW, frozen=0, **settings):
    """A small model and the state of its optimizer after a step of the fused kernel."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    for parameter in list(module.parameters())[:frozen]:
        parameter.requires_grad_(False)
    optimizer = cls([parameter for parameter in module.parameters() if parameter.requires_grad], fused=True, **settings)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def list_mismatches(path):
    result = audit(Request((str(path),), select=("fused-state-mismatch",)))
    assert result.targets[0].ran == ("fused-state-mismatch",)
    return [(finding.severity, finding.message) for finding in result.findings]


def write_training_folder(checkpoint, path):
    """A training folder, whose safetensors file has the weights sorted."""
    path.mkdir()
    save_file(checkpoint["model"], path / "model.safetensors")
    torch.save(checkpoint["optimizer"], path / "optimizer.pt")
    (path / "trainer_state.json").write_text('{"global_step": 1}')
    return path


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD without momentum": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_state_mismatch_spares_states_that_fit_the_model(name, frozen, tmp_path, save_checkpoint):
    """A single file and a training folder with sorted weights pass. An optimizer alone gives a note."""
    cls, settings = OPTIMIZERS[name]
    checkpoint = train_fused(cls, frozen, **settings)
    assert list_mismatches(save_checkpoint(checkpoint)) == []
    assert list_mismatches(write_training_folder(checkpoint, tmp_path / "checkpoint-1")) == []
    ((severity, message),) = list_mismatches(save_checkpoint(checkpoint["optimizer"], "optimizer.pt"))
    assert severity is Severity.NOTE
    assert "the checkpoint does not contain its model" in message


def _shorten_moments(state):
    for states in state.values():
        states.update(exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1))


def _expand_moments(state):
    state[0].update(exp_avg=torch.zeros(1).expand(4, 4), exp_avg_sq=torch.zeros(1).expand(4, 4))


def _stride_moment(state):
    state[0]["exp_avg"] = torch.zeros(16, 4)[::4]


def _swap_states(state):
    state[0], state[1] = state[1], state[0]


STATES = {
    "short": (_shorten_moments, "such as [1]; with fused=True, step() writes outside the memory"),
    "one is short": (lambda state: state[0].update(exp_avg_sq=torch.zeros(1)), "has shape [1], but optimizer.state[0]"),
    "expanded": (_expand_moments, "has strides [0, 0] for shape [4, 4]"),
    "strided": (_stride_moment, "has strides [16, 1] for shape [4, 4]"),
    "permuted": (_swap_states, "do not match the shapes of the model parameters in the same order"),
    "maximum": (lambda state: state[2].update(max_exp_avg_sq=torch.zeros(1)), "has shape [1]"),
}


@pytest.mark.parametrize("name", STATES)
def test_fused_state_mismatch_finds_a_state_that_a_kernel_overruns(name, tmp_path):
    """Loading does not check the shapes of the states."""
    checkpoint = train_fused()
    edit, reason = STATES[name]
    edit(checkpoint["optimizer"]["state"])
    torch.save(checkpoint, tmp_path / "t.pt")
    assert any(
        severity is Severity.ERROR and reason in message for severity, message in list_mismatches(tmp_path / "t.pt")
    )


def test_short_states_in_a_training_folder_are_an_error(tmp_path):
    """If the optimizer trains only a part of the model, the result is a warning. `fused` may have another type."""
    for frozen, severity in ((0, Severity.ERROR), (2, Severity.WARNING)):
        checkpoint = train_fused(frozen=frozen)
        _shorten_moments(checkpoint["optimizer"]["state"])
        checkpoint["optimizer"]["param_groups"][0]["fused"] = 1
        assert [
            actual
            for actual, _ in list_mismatches(write_training_folder(checkpoint, tmp_path / f"checkpoint-{frozen}"))
        ] == [severity]


def test_an_optimizer_deep_in_the_checkpoint_is_a_note(tmp_path):
    """The states are compared with each other, but not with a model."""
    checkpoint = train_fused()
    checkpoint["optimizer"]["state"][0]["exp_avg_sq"] = torch.zeros(1)
    torch.save({"net": checkpoint["model"], "a": {"b": {"c": checkpoint["optimizer"]}}}, tmp_path / "t.pt")
    (error, _), (note, message) = list_mismatches(tmp_path / "t.pt")
    assert (error, note) == (Severity.ERROR, Severity.NOTE)
    assert "a.b.c: the sizes of its states were not checked" in message


def test_text_instead_of_ids_does_not_hide_the_order(save_checkpoint):
    """torch matches parameters by their order, and ignores the names in the optimizer."""
    checkpoint = train_fused()
    state, group = checkpoint["optimizer"]["state"], checkpoint["optimizer"]["param_groups"][0]
    names = ["1.weight", "0.bias", "0.weight", "1.bias", "2.weight", "2.bias"]
    shapes = {name: torch.zeros_like(tensor) for name, tensor in checkpoint["model"].items()}
    checkpoint["optimizer"]["state"] = {
        name: {**state[number], "exp_avg": shapes[name], "exp_avg_sq": shapes[name]}
        for number, name in enumerate(names)
    }
    group["params"] = names
    assert [severity for severity, _ in list_mismatches(save_checkpoint(checkpoint))] == [Severity.ERROR]


def test_states_of_an_optimizer_that_is_not_fused_may_have_any_shape(tmp_path):
    """Kernels without `fused` check shapes, and optimizers like NovoGrad keep a single number for each tensor."""
    checkpoint = train_fused()
    checkpoint["optimizer"]["param_groups"][0]["fused"] = None
    _shorten_moments(checkpoint["optimizer"]["state"])
    torch.save(checkpoint, tmp_path / "t.pt")
    (target,) = audit(Request((str(tmp_path / "t.pt"),), select=("fused-state-mismatch",))).targets
    assert (target.findings, [rule.reason for rule in target.skipped]) == (
        (),
        ["the target has no optimizer with fused=True"],
    )


def test_short_states_of_a_fused_optimizer_crash(tmp_path, forked_python):
    """The code resumes as a training loop: default torch.load, then load_state_dict and steps."""
    module = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    module(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    _shorten_moments(state["state"])
    torch.save({"model": module.state_dict(), "optimizer": state}, tmp_path / "t.pt")
    code = f"""
import torch
module = torch.nn.Linear(512, 512, bias=False)
optimizer = torch.optim.Adam(module.parameters())
optimizer.load_state_dict(torch.load({str(tmp_path / "t.pt")!r})["optimizer"])
for _ in range(20):
    module(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    lost = [torch.zeros(100) for _ in range(50)]
"""
    assert forked_python(code).returncode < 0
    assert [severity for severity, _ in list_mismatches(tmp_path / "t.pt")] == [Severity.ERROR]
