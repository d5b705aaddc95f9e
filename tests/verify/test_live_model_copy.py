"""Copies of a live model: each storage is copied once for all its views, and shares no memory with the original."""

from __future__ import annotations

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402

import statecli  # noqa: E402
from statecli.commands.verify import check_builder, copy_model  # noqa: E402
from statecli.core.errors import ModelError  # noqa: E402
from statecli.live import measure  # noqa: E402
from statecli.live.tensors import find_leaves, is_lazy  # noqa: E402


def build_linear_with(**attributes):
    """A Linear with the given further attributes."""
    module = nn.Linear(4, 4)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def build_pruned():
    module = nn.Linear(4, 4)
    prune.l1_unstructured(module, "weight", 0.5)
    return module


def build_transposed():
    module = nn.Linear(4, 4)
    module.weight.data = module.weight.data.t()
    return module


def build_viewed():
    module = nn.Linear(4, 4)
    module.row = module.weight.data[1]
    return module


CASES = {
    "linear": lambda: nn.Linear(4, 4),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "pruned": build_pruned,
    "transposed": build_transposed,
    "a view of a parameter": build_viewed,
    "sparse": lambda: build_linear_with(table=torch.eye(4).to_sparse()),
    "conjugated": lambda: build_linear_with(table=torch.ones(4, dtype=torch.cfloat).conj()),
    "negated": lambda: build_linear_with(table=torch.ones(4, dtype=torch.cfloat).conj().imag),
    "expanded": lambda: build_linear_with(table=torch.ones(4).expand(3, 4)),
    "empty": lambda: build_linear_with(table=torch.empty(0)),
    "on meta": lambda: nn.Linear(4, 4, device="meta"),
    "double": lambda: nn.Linear(4, 4).double(),
}


def describe_tensor(tensor):
    kind = nn.UninitializedBuffer if isinstance(tensor, nn.UninitializedBuffer) else isinstance(tensor, nn.Parameter)
    return kind, tensor.dtype, tensor.requires_grad, tensor.is_leaf


def describe_layout(tensor):
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, tensor.layout, strides, tensor.is_conj(), tensor.is_neg()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("values", [True, False])
def test_copy_has_equal_tensors_in_its_own_memory(name, values):
    """A copy has the same names, shapes, dtypes, strides, leaves, ties and small values, but its own memory."""
    module = CASES[name]()
    copied = copy_model.copy_live_model(module, values=values)
    before, after = measure.map_tensors(module), measure.map_tensors(copied)
    assert list(before) == list(after)
    for first, second in ((before[key], after[key]) for key in before):
        assert describe_tensor(first) == describe_tensor(second)
        if not is_lazy(first):
            assert describe_layout(first) == describe_layout(second)
            if not first.is_meta:
                assert torch.equal(first.detach().to_dense(), second.detach().to_dense())  # they are small
    stored = [tensor for tensor in before.values() if not is_lazy(tensor)]
    copied_storages = check_builder.list_storage_keys(tensor for tensor in after.values() if not is_lazy(tensor))
    assert check_builder.list_storage_keys(stored).isdisjoint(copied_storages)
    assert list(check_builder.iter_shared_groups(before)) == list(check_builder.iter_shared_groups(after))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_copied_parameters_of_a_script_are_leaves():
    """copy.deepcopy of a scripted module has parameters that are not leaves; statecli's copies have leaves."""
    module = torch.jit.script(nn.Linear(4, 4))
    assert not copy.deepcopy(module).weight.is_leaf
    copied = copy_model.copy_live_model(module, values=True)
    assert [(parameter.is_leaf, parameter.requires_grad) for parameter in copied.parameters()] == [(True, True)] * 2


def test_small_storages_are_always_copied():
    """Storages up to 64 KB are always copied with values, because forward may use the values as indices. Larger
    storages are copied with values only on request.
    """
    module = build_linear_with(small=torch.ones(1 << 14), large=torch.rand(1 << 15))
    empty = copy_model.copy_live_model(module, values=False)
    assert torch.equal(empty.small, module.small)
    assert not torch.equal(empty.large, module.large)
    full = copy_model.copy_live_model(module, values=True)
    assert torch.equal(full.large, module.large)


def test_copied_non_leaf_has_the_same_operation_and_leaves():
    """A copied non-leaf tensor has the same operation and leaves, so proofs of the copy are valid for the model.
    copy.deepcopy refuses to copy a non-leaf tensor.
    """
    module = nn.Linear(4, 4)
    module.scaled = module.weight * 3
    copied = copy_model.copy_live_model(module, values=True)
    assert type(copied.scaled.grad_fn).__name__ == type(module.scaled.grad_fn).__name__ == "MulBackward0"
    assert [id(leaf) for leaf in find_leaves(copied.scaled)] == [id(copied.weight)]
    assert torch.equal(copied.scaled, module.scaled)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(copied)


def test_copied_functions_refer_to_the_copy():
    """A copied function (an attribute, in a list, a hook) refers to the copied module and keeps its own attributes."""
    module = nn.Linear(4, 4)
    seen = []

    def act(x, *, times=2):
        return module.weight.sum() * times * x

    act.note = "kept"
    module.act, module.acts = act, [act]
    module.register_forward_hook(lambda *_: seen.append(module))
    copied = copy_model.copy_live_model(module, values=True)
    with torch.no_grad():
        copied.weight.fill_(1)
    assert copied.act(1).item() == copied.acts[0](1).item() == 32
    assert (copied.act.__name__, copied.act.note) == ("act", "kept")
    copied(torch.ones(1, 4))
    assert [id(module) for module in seen] == [id(copied)]


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent, self.proxies = weakref.ref(parent), [weakref.proxy(parent)]

    def forward(self, x):
        return x * self.parent().scale + self.proxies[0].scale


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.child = Child(self)

    def forward(self, x):
        return self.child(x)


def test_copied_weak_references_refer_to_the_copy():
    """A layer with a weak reference to its parent reads the parameters of the copied parent, so the checks pass."""
    model = Parent()
    copied = copy_model.copy_live_model(model, values=True)
    assert copied.child.parent() is copied
    with torch.no_grad():
        copied.scale.fill_(3)
    assert copied(torch.ones(1)).tolist() == [6, 6, 6, 6]
    verification = statecli.verify(model, inputs="2x4", checks=["move", "forward", "step"])
    assert [check.verdict.value for check in verification.checks] == ["passed"] * 3


class OwnReference(weakref.ref):
    def __deepcopy__(self, memo):
        return self


def test_copied_weak_references_keep_their_callback_and_class():
    """A reference of another class cannot be rebuilt, so the copy keeps the reference to the original."""
    model = Parent()
    model.child.parent = weakref.ref(model, GONE.append)
    model.child.own = own = OwnReference(model)
    copied = copy_model.copy_live_model(model, values=True)
    assert copied.child.parent() is copied
    assert copied.child.parent.__callback__ == GONE.append
    assert copied.child.own is own


GONE = []


def test_checks_are_inconclusive_if_a_copy_reads_the_original():
    """A variable of another module refers to the original, so a call of the copy says nothing about the copy."""
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(4))
    HOLDER["model"] = model
    model.register_forward_hook(lambda _, args, output: output * HOLDER["model"].scale)
    verification = statecli.verify(model, inputs="2x4", checks=["move", "forward", "step"])
    assert [check.verdict.value for check in verification.checks] == ["passed", "inconclusive", "inconclusive"]
    assert verification.checks[1].reason == (
        "the forward of a copy of the model reads scale of the original model, for example through a global variable, "
        "so statecli cannot check the copy; pass the class of the model instead"
    )


HOLDER = {}


def test_copy_that_shares_memory_is_refused():
    """A nested closure refers to the module, so training the copy would also train the original."""
    module = nn.Linear(4, 4)

    def inner(x):
        return module(x)

    module.calls = lambda x: inner(x)
    with pytest.raises(ModelError, match="shares memory with weight of the model"):
        copy_model.copy_live_model(module, values=True)


class CopiesToItself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


def test_module_that_copies_to_itself_is_refused():
    """The `__deepcopy__` of the class returns the module itself."""
    with pytest.raises(ModelError, match="does not return a new module"):
        copy_model.copy_live_model(CopiesToItself(2, 2), values=True)
