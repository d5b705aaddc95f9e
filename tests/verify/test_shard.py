"""The proof `shard`: tensors that fully_shard and DDP leave out, or that differ between ranks."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed
from torch import nn

import statecli
from statecli.commands.verify.result import Name, Verdict

from .proving import expect_findings, find_cell, map_rules, map_verdicts, prove_source
from .test_export import net

TENSOR, PARAMETER, MODULE, STALE = (
    "unregistered-tensor",
    "unregistered-parameter",
    "unregistered-module",
    "stale-view",
)
UNSYNCHRONIZED, REFUSED = "not-synchronized", "not-shardable"
MEAN = "if self.training: self.t = 0.9 * self.t + 0.1 * x.detach().mean(0)\nreturn self.fc(x) - self.t"
IGNORE = 'self._ddp_params_and_buffers_to_ignore = ["w"]'
REDUCED = """if self.training:
    step = x.detach().mean(0)
    torch.distributed.all_reduce(step) if torch.distributed.is_initialized() else step.zero_()
    self.t.lerp_(step, 0.1)
return self.fc(x) - self.t"""

QUEUE = """self.register_buffer("queue", torch.zeros(3, 8))
self.register_buffer("position", torch.zeros(1, dtype=torch.int64))"""
#: Forward raises for a smaller position, and not for a larger one.
PUT = """y = self.fc(x)
if self.training:
    position = int(self.position)
    self.queue[:, position : position + 2] = {0}
    self.position[0] = (position + 2) % 8
return y"""

#: A class that fails, with the rule of each failed name, and a class of the same purpose that passes.
ZOO = {
    "drawn at random": (
        net("self.t = torch.randn(3)", "return self.fc(x) + self.t"),
        {"t": TENSOR},
        net("self.t = nn.Parameter(torch.randn(3))", "return self.fc(x) + self.t"),
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
    "a running mean in a plain attribute": (
        net("self.t = torch.zeros(3)", MEAN),
        {"t": TENSOR},
        net('self.register_buffer("t", torch.zeros(3))', REDUCED),
    ),
    "a running mean in a buffer": (
        net('self.register_buffer("t", torch.zeros(3))', MEAN),
        {"t": UNSYNCHRONIZED},
        net('self.register_buffer("t", torch.zeros(3))', "return self.fc(x) - self.t"),
    ),
    "a random buffer that is not saved": (
        net('self.register_buffer("t", torch.randn(3), persistent=False)', "return self.fc(x) + self.t"),
        {"t": UNSYNCHRONIZED},
        net(
            "value = torch.randn(3, generator=torch.Generator().manual_seed(0))\n"
            'self.register_buffer("t", value, persistent=False)',
            "return self.fc(x) + self.t",
        ),
    ),
    "a parameter that DDP ignores": (
        net(f"self.w = nn.Parameter(torch.ones(3))\n{IGNORE}", "return self.fc(x) * self.w"),
        {"w": UNSYNCHRONIZED},
        net("self.w = nn.Parameter(torch.ones(3))", "return self.fc(x) * self.w"),
    ),
    "a buffer that DDP ignores": (
        net(f'self.register_buffer("w", torch.zeros(3))\n{IGNORE}', re.sub(r"self\.t\b", "self.w", MEAN)),
        {"w": UNSYNCHRONIZED},
        net(f'self.register_buffer("w", torch.zeros(3))\n{IGNORE}', "return self.fc(x) - self.w"),
    ),
    "a queue with an index": (
        net(QUEUE, PUT.format("y.detach().t()")),
        {"queue": UNSYNCHRONIZED},
        net(QUEUE, PUT.format("1.0")),
    ),
    "a parameter that forward creates": (
        net("", "if not hasattr(self, 'w'):\n    self.w = nn.Parameter(torch.ones(3))\nreturn self.fc(x) * self.w"),
        {"w": UNSYNCHRONIZED},
        net("self.w = nn.Parameter(torch.ones(3))", "return self.fc(x) * self.w"),
    ),
    "a scalar parameter": (
        net("self.w = nn.Parameter(torch.tensor(1.0))", "return self.fc(x) * self.w"),
        {"w": REFUSED},
        net("self.w = nn.Parameter(torch.ones(1))", "return self.fc(x) * self.w"),
    ),
    "a transposed parameter": (
        net("self.w = nn.Parameter(torch.ones(4, 3).t())", "return self.fc(x) @ self.w"),
        {"w": REFUSED},
        net("self.w = nn.Parameter(torch.ones(4, 3).t().contiguous())", "return self.fc(x) @ self.w"),
    ),
    "a second name in a list": (
        net("self.ws = [self.fc.weight]", "return self.fc(x) @ self.ws[0]"),
        {"ws[0]": STALE},
        net("self.w = self.fc.weight", "return self.fc(x) @ self.w"),
    ),
    "the memory of a parameter": (
        net("self.w = self.fc.weight.data", "return self.fc(x) @ self.w"),
        {"w": STALE},
        net("", "return self.fc(x) @ self.fc.weight.detach()"),
    ),
}


@pytest.fixture(autouse=True)
def in_tmp(in_tmp_path):
    """Each test has its own folder, and leaves no process group."""
    yield
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ZOO)
def test_tensor_that_differs_between_ranks_is_named(name):
    """Each failing class has the findings of the table, and its twin passes."""
    expect_findings(lambda body: prove_source(Name.SHARD, body, "2x3"), *ZOO[name])


def test_fully_shard_refuses_the_same_parameters():
    """torch raises for each kind of parameter of the rule, and for no other of the zoo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from statecli.commands.verify.proofs.shard import _explain_refusal, _use_fake_group

    answers = []
    with _use_fake_group():
        mesh = init_device_mesh("cpu", (2,))
        for tensor in (torch.tensor(1.0), torch.ones(4, 3).t(), torch.ones(1), torch.ones(4, 3), torch.ones(0)):
            module = nn.ParameterList([nn.Parameter(tensor)])
            module.forward = lambda: None
            net = nn.Linear(1, 1)
            net.w = nn.Parameter(tensor)
            refused = False
            try:
                fully_shard(net, mesh=mesh)
            except (ValueError, NotImplementedError):
                refused = True
            assert refused is (_explain_refusal(tensor) is not None)
            answers.append(refused)
    assert set(answers) == {True, False}


def test_ddp_and_fully_shard_have_separate_columns():
    """DDP broadcasts a buffer; fully_shard leaves each rank's own buffer."""
    check = prove_source(Name.SHARD, ZOO["a running mean in a buffer"][0], "2x3")
    assert find_cell(check, "sharded", "t").verdict is Verdict.FAILED
    assert find_cell(check, "replicated", "t").verdict is Verdict.PASSED
    assert set(map_verdicts(check, "replicated").values()) == {"passed"}


def test_statistics_of_batch_norm_are_a_note():
    """BatchNorm documents its statistics of each rank; the help has SyncBatchNorm. A counter of calls is equal."""
    body = net("self.bn = nn.BatchNorm1d(3)", "return self.bn(self.fc(x))")
    check = prove_source(Name.SHARD, body, "4x3")
    assert check.verdict is Verdict.PASSED
    assert map_rules(check) == dict.fromkeys(("bn.running_mean", "bn.running_var"), UNSYNCHRONIZED)
    assert {finding.severity.value for finding in check.findings} == {"note"}
    assert all("SyncBatchNorm" in finding.help for finding in check.findings)


def test_random_buffer_in_the_checkpoint_is_a_note():
    """Its values differ between ranks until a checkpoint is loaded; a mask of pruning is an example."""
    body = net('self.register_buffer("t", torch.randn(3))', "return self.fc(x) + self.t")
    check = prove_source(Name.SHARD, body, "2x3")
    assert check.verdict is Verdict.PASSED
    assert [(finding.rule, finding.severity.value) for finding in check.findings] == [(UNSYNCHRONIZED, "note")]


def test_attention_map_passes():
    """Forward writes the tensor again for each input, so the ranks need not share the tensor."""
    body = net(
        'self.register_buffer("t", torch.zeros(2, 3))', "self.t = self.fc(x).detach()\nreturn self.t + self.fc(x)"
    )
    assert prove_source(Name.SHARD, body, "2x3").verdict is Verdict.PASSED


def test_model_that_ddp_refuses_is_inconclusive():
    """DDP raises for a sparse buffer, which proves nothing about the class; only fully_shard is checked."""
    check = prove_source(
        Name.SHARD, net('self.register_buffer("e", torch.eye(3).to_sparse())', "return self.fc(x)"), "2x3"
    )
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert check.reason == "DistributedDataParallel() raised RuntimeError: No support for sparse tensors."
    assert [column.name for column in check.columns] == ["sharded"]


def test_frozen_model_is_not_wrapped_by_ddp():
    """DDP refuses a model without a trainable parameter, but the class is correct; fully_shard shards the model."""
    check = prove_source(Name.SHARD, net("self.requires_grad_(False)", "return self.fc(x)"), "2x3")
    assert check.verdict is Verdict.PASSED
    assert [column.name for column in check.columns] == ["sharded"]


def test_proof_needs_no_input():
    """Without an input, only the updates of forward are unknown."""
    check = prove_source(Name.SHARD, ZOO["drawn at random"][0])
    assert map_rules(check) == {"t": TENSOR}


def test_process_group_of_the_user_is_kept():
    """A process has a single default group, and the proof does not replace the user's group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        (check,) = statecli.verify(nn.Linear(2, 2), checks=["shard"]).checks
        assert torch.distributed.get_world_size() == 4
    finally:
        torch.distributed.destroy_process_group()
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "this process already has a process group" in check.reason


@pytest.mark.parametrize("name", [Name.SHARD, Name.SAVE])
def test_unknown_updates_of_forward_are_inconclusive(name):
    """Forward raises in train mode, so nobody knows whether it updates the buffer."""
    init = 'self.register_buffer("t", torch.zeros(3), persistent=False)'
    check = prove_source(name, net(init, "assert not self.training\nreturn self.fc(x) - self.t"), "2x3")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "which tensors forward updates in train mode" in check.reason
