"""Rules about what is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import run as locking
from statecli.core import kinds
from statecli.core.finding import Severity
from statecli.rules.policy_config import Policy


@pytest.fixture
def train(tmp_path):
    """A training checkpoint of a model, with the optimizer built from these named parameters."""

    def save(module, named):
        optimizer = torch.optim.AdamW(named)
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        optimizer.step()
        model = dict(module.named_parameters())
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
        return tmp_path / "t.pt"

    return save


def small():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_trainable_mismatch_finds_what_should_be_frozen_and_what_should_not(found, tmp_path):
    """Each by the glob that says so."""
    module = small()
    module[1].requires_grad_(False)
    torch.save(module, tmp_path / "m.pt")
    findings = found("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("0.*",), trainable=("1.bias",)))
    assert sorted(finding.fqn for finding in findings) == ["0.bias", "0.weight", "1.bias"]


def test_trainable_mismatch_finds_a_glob_that_matches_nothing(found, tmp_path):
    """A policy with a typo holds nothing."""
    torch.save(small(), tmp_path / "m.pt")
    (finding,) = found("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("encoder.*",)))
    assert "encoder.*" in finding.message


def test_trainable_mismatch_spares_what_is_as_the_policy_has_it(found, tmp_path):
    """And a buffer, which never requires grad, inside a glob of what is trained."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].requires_grad_(False)
    torch.save(module, tmp_path / "m.pt")
    assert not found("trainable-mismatch", tmp_path / "m.pt", policy=Policy(frozen=("0.*",), trainable=("1.*",)))


def test_trainable_mismatch_finds_that_it_cannot_be_told(found, tmp_path):
    """A state_dict records no requires_grad: one warning, whatever the number of tensors and globs."""
    torch.save(small().state_dict(), tmp_path / "s.pt")
    policy = Policy(frozen=("0.*", "1.weight"), trainable=("1.bias",))
    (finding,) = found("trainable-mismatch", tmp_path / "s.pt", policy=policy)
    assert (
        finding.message
        == "policy.frozen and policy.trainable: inconclusive, because a state_dict does not record requires_grad"
    )
    assert finding.severity is Severity.WARNING


def test_trainable_mismatch_spares_what_a_lock_holds(tmp_path):
    """What is frozen, by its values; of what is trained a lock says nothing."""
    torch.save(small().state_dict(), tmp_path / "s.pt")
    asked = locking.Request((str(tmp_path / "s.pt"),))
    lock = locking.build_lock(locking.read_targets(asked), asked)
    frozen, trained = Policy(frozen=("0.*",)), Policy(trainable=("1.*",))
    assert not audit(Request((str(tmp_path / "s.pt"),), policy=frozen, lock=lock)).findings
    (finding,) = audit(Request((str(tmp_path / "s.pt"),), policy=trained, lock=lock)).findings
    assert finding.message.startswith("policy.trainable: inconclusive")


def test_trainable_mismatch_is_skipped_where_there_is_no_model(tmp_path):
    """An optimizer's state alone has nothing to be frozen."""
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    request = Request((str(tmp_path / "o.pt"),), select=("trainable-mismatch",), policy=Policy(frozen=("0.*",)))
    (one,) = audit(request).skipped_rules
    assert one.reason == "the target has no model tensors"


def test_optimizer_orphan_finds_state_of_a_parameter_that_is_gone(found, train):
    """The optimizer was built with a head that the model no longer has."""
    module = small()
    old = [*module.named_parameters(), ("head.weight", nn.Parameter(torch.ones(2)))]
    findings = found("optimizer-orphan", train(module, old))
    assert [finding.fqn for finding in findings] == ["head.weight"]


def test_optimizer_orphan_spares_names_behind_a_wrapper(found, train):
    """`module.0.weight` is DDP's name of `0.weight`."""
    module = small()
    assert not found("optimizer-orphan", train(module, [(f"module.{n}", p) for n, p in module.named_parameters()]))


def test_untracked_parameter_finds_one_that_no_optimizer_has(found, train):
    """The model grew after the optimizer was built."""
    module = small()
    findings = found("untracked-parameter", train(module, list(module.named_parameters())[:2]))
    assert [finding.fqn for finding in findings] == ["1.weight", "1.bias"]


def test_untracked_parameter_spares_frozen_ones(found, train):
    """Who needs no grad needs no optimizer."""
    module = small()
    module[1].requires_grad_(False)
    assert not found("untracked-parameter", train(module, list(module[0].named_parameters(prefix="0"))))


def not_run(path):
    """Why the two rules about an optimizer's parameters did not run."""
    (result,) = audit(Request((str(path),), select=("optimizer-orphan", "untracked-parameter"))).targets
    assert {one.rule for one in result.skipped} == {"optimizer-orphan", "untracked-parameter"}
    return {one.reason for one in result.skipped}


def test_an_optimizer_that_nothing_is_known_of_is_one_all_the_same(train, monkeypatch):
    """Beyond so many entries nobody finds out what it trains, and that is no absence."""
    module = small()
    path = train(module, module.parameters())
    torch.save(torch.load(path) | {"model": module.state_dict()}, path)
    monkeypatch.setattr(kinds, "MAX_OPTIMIZER_ENTRY_PAIRS", 0)
    assert not_run(path) == {UNTOLD}


UNTOLD = "the optimizer state does not name the parameters that it trains"


def test_where_there_is_no_optimizer_that_is_why(tmp_path):
    """Nothing is said of names then."""
    torch.save(small().state_dict(), tmp_path / "m.pt")
    assert not_run(tmp_path / "m.pt") == {"the target has no optimizer state"}
