"""Instances of a model that a proof may change: built again, or copied from an unchanged live model."""

from __future__ import annotations

import dataclasses
import resource

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from statecli.commands.verify import model_under_test as subjects  # noqa: E402
from statecli.commands.verify.run import Request, run  # noqa: E402

from .mixes import build_inputs  # noqa: E402


class Tied(nn.Module):
    def __init__(self, rows=10):
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0))
        self.view = self.table[2:]


def test_copy_has_requested_values_and_keeps_ties_and_views():
    """With `values=True`, a copy has all values; otherwise a storage above 64 KB has unwritten memory. Both copies have
    the shapes, tied weights and views.
    """
    module = Tied(rows=5000)
    subject = subjects.prepare_live_model(module)
    full, empty = subject.build_fresh(values=True), subject.build_fresh()
    assert torch.equal(full.embed.weight, module.embed.weight)
    assert full.embed.weight.data_ptr() != module.embed.weight.data_ptr()
    assert not torch.equal(empty.embed.weight, module.embed.weight)
    for copy in (full, empty):
        assert copy.head.weight is copy.embed.weight
        assert copy.view.untyped_storage().data_ptr() == copy.table.untyped_storage().data_ptr()
        assert (copy.view.shape, copy.view.storage_offset()) == ((4,), 2)


def test_copy_without_values_takes_no_memory():
    """Three copies of 256 MB without values allocate no memory pages."""
    module = nn.utils.skip_init(nn.Linear, 8192, 8192, bias=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    subject = subjects.prepare_live_model(module)
    copies = [subject.build_fresh() for _ in range(3)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert all(copy.weight.shape == (8192, 8192) for copy in copies)


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))
        self.register_buffer("indices", torch.full((20_000,), 3))
        self.cache = None

    def forward(self, x):
        self.cache = self.table[self.indices]
        return x + self.cache[:2]


def test_called_copy_has_the_values_of_its_model():
    """Forward may index by a large buffer, so unwritten memory is not enough for a copy that is called."""
    subject = subjects.prepare_live_model(Indexed())
    subject = dataclasses.replace(subject, inputs=build_inputs((2,)), created_by_forward=frozenset(["cache"]))
    assert torch.equal(subject.build_used().indices, torch.full((20_000,), 3))
    assert torch.equal(subject.build_for_call().indices, torch.full((20_000,), 3))


def test_live_model_is_unchanged():
    """Changes to the copies, and the listing of tensors, do not change the live model."""
    module = Tied()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.embed.weight.grad = torch.ones_like(module.embed.weight)
    subject = subjects.prepare_live_model(module)
    subject.build_fresh(values=True).to(torch.float64)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(module.embed.weight.grad, torch.ones(10, 4))
    assert module.training
    assert module.view.untyped_storage().data_ptr() == module.table.untyped_storage().data_ptr()


COUNTER = """
import torch
from torch import nn
class Net(nn.Module):
    count = 0
    def __init__(self):
        super().__init__()
        Net.count += 1
        self.add_module(f"l{Net.count}", nn.Linear(3, 3))
    def forward(self, x):
        self.last = x + 1
        return next(self.children())(x)
"""


def test_instances_with_different_names_are_inconclusive(tmp_path, in_tmp_path):
    """Each proof that compares instances gives this reason; the rows are of the first instance."""
    (tmp_path / "net.py").write_text(COUNTER)
    result = run(Request("net.py:Net", input=("2x3",)))
    assert [row.fqn for row in result.state.tensors] == ["l1.weight", "l1.bias", "last"]
    verdicts = {check.check.value: (check.verdict.value, check.reason) for check in result.checks}
    reason = "statecli cannot compare two instances of the class, because only one has l1.weight"
    assert verdicts.pop("forward")[0] == "passed"
    assert set(verdicts.values()) == {("inconclusive", reason)}
