"""The rows of torch's own modules agree with torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from statecli.core.model_state import Kind


def _weight_norm_old():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)))


def _pruned():
    from torch.nn.utils import prune

    return nn.Sequential(prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=2))


def _tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def _shared_module():
    block = nn.Linear(2, 2)
    return nn.ModuleDict({"a": block, "b": nn.Sequential(block, nn.ReLU())})


MODELS = {
    "linear": lambda: nn.Linear(3, 2),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru": lambda: nn.Sequential(nn.GRU(3, 4)),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention-kdim": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "batchnorm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "batchnorm-bare": lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "weight-norm-old": _weight_norm_old,
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "spectral-norm-old": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    "pruned": _pruned,
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "parameter-list": lambda: nn.ParameterList([torch.ones(2), torch.ones(3)]),
    "parameter-dict": lambda: nn.ParameterDict({"a": torch.ones(2)}),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
    "tied": _tied,
    "shared-module": _shared_module,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
}
#: Weights that torch computes from registered tensors.
DERIVED = {"weight-norm-old": ["0.weight"], "spectral-norm-old": ["weight"], "pruned": ["0.weight"]}


def oracle(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Map each name to torch's (kind, dtype, shape, requires_grad, saved)."""
    saved = model.state_dict().keys()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))

    def row(name: str, tensor: torch.Tensor, kind: Kind) -> tuple[object, ...]:
        shape = None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
        return kind, str(tensor.dtype), shape, tensor.requires_grad, name in saved

    return {name: row(name, tensor, Kind.PARAMETER) for name, tensor in parameters.items()} | {
        name: row(name, tensor, Kind.BUFFER) for name, tensor in buffers.items()
    }


def list_registered_rows(state) -> dict[str, tuple[object, ...]]:
    """Return the registered rows of a state in the form of the oracle."""
    return {
        t.fqn: (t.kind, f"torch.{t.dtype}", t.shape, t.requires_grad, t.saved)
        for t in state.tensors
        if t.kind is not Kind.UNREGISTERED
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_the_rows_are_the_tensors_of_torch(name, read_live):
    """Registered rows agree with torch, are in the order of state_dict(), and move; other rows are derived weights.

    Further names of registered tensors (flat weights, lists, cached views) have no rows. The weight that old
    weight_norm, spectral_norm and pruning compute is a row without a fix. The weight of spectral_norm lies in the
    memory of `weight_orig` until the first forward, and is a row then too.
    """
    state, model = read_live(MODELS[name]), MODELS[name]()
    assert list_registered_rows(state) == oracle(model)
    saved = [t.fqn for t in state.tensors if t.saved]
    assert saved == [key for key in model.state_dict() if not key.endswith("_extra_state")]
    assert {t.moves for t in state.tensors if t.kind is not Kind.UNREGISTERED} <= {True}
    allowed = {"none-parameter", "script-module", "recomputed"} | ({"no-tensors"} if not state.tensors else set())
    assert {oddity.name for oddity in state.oddities} <= allowed
    derived = [t for t in state.tensors if t.kind is Kind.UNREGISTERED]
    assert [t.fqn for t in derived] == DERIVED.get(name, [])
    assert all(t.saved is False and "derived" in t.note and t.fix is None for t in derived)


def test_rnn_flat_weights_are_aliases(read_live, rows):
    """`_flat_weights[0]` is another name of weight_ih_l0 and does not have a row."""
    assert rows(read_live(MODELS["lstm"]))["weight_ih_l0"].aliases == ("_flat_weights[0]",)


def test_lazy_parameters_have_no_shape(read_live, rows):
    """An uninitialized parameter has no shape and no elements, and a note says why."""
    weight = rows(read_live(MODELS["lazy"]))["0.weight"]
    assert (weight.shape, weight.elements, weight.nbytes) == (None, 0, 0)
    assert weight.note == "uninitialized (lazy)"


def test_tied_rows_name_each_other(read_live, rows):
    """Tied weights share a storage and each names the other."""
    actual_rows = rows(read_live(_tied))
    assert actual_rows["0.weight"].tied_to == ("1.weight",)
    assert actual_rows["1.weight"].tied_to == ("0.weight",)
    assert actual_rows["0.weight"].storage == actual_rows["1.weight"].storage
