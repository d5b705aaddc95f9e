"""A live model is listed without changes, even if its class copies differently; only copies are moved."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest

from ..forked_python import run_python

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import statecli  # noqa: E402


class Net(nn.Module):
    """A model with a registered and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.t = torch.ones(2)

    def forward(self, x):
        return self.fc(x) + self.t


class Registers(Net):
    """A class whose copies have the plain tensor as a buffer."""

    def __deepcopy__(self, memo):
        other = type(self)()
        del other.t
        other.register_buffer("t", self.t.clone())
        return other


class Drops(Net):
    """A class whose copies lack the plain tensor."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "t"}


class Rebuilds(Net):
    """A class whose copies are built by the constructor, without attributes that were added later."""

    def __reduce__(self):
        return type(self), ()


class Locked(Registers):
    """A class with an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def export_net() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(Net(), (torch.ones(1, 2),)).module()


def find_row(model: nn.Module, name: str = "t"):
    return next(row for row in statecli.inspect(model).state.tensors if row.fqn == name)


@pytest.mark.parametrize("build_model", [export_net, Registers, Drops, lambda: nn.Sequential(Registers())[0]])
def test_plain_tensor_is_listed_as_unregistered(build_model):
    """The tensor is listed as unregistered, not saved and not moved."""
    actual = find_row(build_model())
    assert (actual.kind.value, actual.saved, actual.moves) == ("unregistered", False, False)


WRAPPERS = {
    "parametrized": lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), Net()),
    "data parallel": lambda: nn.DataParallel(Net()),
    "scripted": lambda: torch.jit.script(Net()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(Net()),
    "compiled": lambda: torch.compile(Net()),
    "frozen": lambda: Net().requires_grad_(False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_is_listed_like_its_registries(name):
    """Names, kinds and requires_grad equal the model's own registries; the plain tensor is listed as plain."""
    model = WRAPPERS[name]()
    rows_by_fqn = {row.fqn: row for row in statecli.inspect(model).state.tensors}
    plain = [name for name, row in rows_by_fqn.items() if row.kind.value == "unregistered"]
    assert [row.rpartition(".")[2] for row in plain] == ["t"]
    assert rows_by_fqn[plain[0]].moves is False
    requires_grad = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
    assert {
        name: row.requires_grad for name, row in rows_by_fqn.items() if row.kind.value == "parameter"
    } == requires_grad


@pytest.mark.parametrize("build_model", [export_net, Registers, Drops])
def test_verify_fails_for_a_plain_tensor_that_a_copy_registers(build_model):
    """Proofs work on a copy with the same attributes as the model."""
    verification = statecli.verify(build_model(), checks="move")
    assert [(finding.rule, finding.fqn) for finding in verification.findings] == [("left-behind", "t")]


def test_tensor_added_after_construction_is_listed():
    """The added tensor is listed, although copies of the class are rebuilt by the constructor."""
    model = Rebuilds()
    model.extra = torch.ones(3)
    assert find_row(model, "extra").moves is False


def test_tensor_of_a_module_in_a_list_does_not_move():
    """The module in the plain list is unregistered, and its copies register the plain tensor."""
    model = Net()
    model.others = [Registers()]
    assert find_row(model, "others[0].t").moves is False


def test_move_is_unknown_if_every_copy_differs():
    """The row does not say whether the tensor moves, because every copy differs from the model."""
    model = Locked()
    actual = find_row(model)
    assert (actual.kind.value, actual.saved, actual.moves) == ("unregistered", False, None)
    assert "a copy of the model has the tensor as a buffer" in actual.note
    (check,) = statecli.verify(model, checks="move").checks
    assert check.verdict.value == "inconclusive"
    assert check.columns[0].cells["fc.weight"].verdict.value == "passed"


def test_tie_broken_by_the_copy_is_not_attributed_to_the_move():
    """The copy already lacks the tied weights, so `untied-by-move` is not reported."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()
            self.a = self.b = nn.Parameter(torch.ones(2))

        def __deepcopy__(self, memo):
            other = type(self)()
            other.b = nn.Parameter(torch.ones(2))
            return other

    state = statecli.inspect(Parts()).state
    assert [oddity.name for oddity in state.oddities if oddity.name == "untied-by-move"] == []
    assert state.tensors[0].tied_to == ("b",)


@pytest.mark.parametrize("build_model", [export_net, Registers, Drops, Rebuilds, Locked])
def test_model_is_unchanged_after_both_commands(build_model):
    """Its attributes are the same objects with the same values after both commands."""
    model = build_model()
    before = dict(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    registries = {name: list(map(id, getattr(model, name).values())) for name in ("_parameters", "_buffers")}
    statecli.inspect(model)
    statecli.verify(model, checks="move")
    assert {name: id(value) for name, value in vars(model).items()} == {n: id(v) for n, v in before[0].items()}
    assert registries == {name: list(map(id, getattr(model, name).values())) for name in registries}
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def test_statistics_are_of_the_model_and_not_of_a_copy():
    """The statistics are of the model, even if its copies have other values."""

    class Zeroed(Net):
        def __deepcopy__(self, memo):
            other = type(self)()
            nn.init.zeros_(other.fc.weight)
            return other

    model = Zeroed()
    nn.init.constant_(model.fc.weight, 3.0)
    tensor = next(row for row in statecli.inspect(model, stats=True).state.tensors if row.fqn == "fc.weight")
    assert (tensor.stats.min, tensor.stats.max) == (3.0, 3.0)


PLAIN_CLASSES = """
from torch import nn
from statecli.commands.verify import copy_model
Net = type("Net", (nn.Module,), {})
classes = [nn.Linear, nn.LSTM, nn.MultiheadAttention, Net]
assert not any(map(copy_model._has_own_copying, classes))
nn.Module.__deepcopy__ = lambda self, memo: self  # as a library patches the class
assert all(map(copy_model._has_own_copying, classes))
"""


def test_own_copying_code_is_detected():
    """A class has its own copying code if it defines a method for copies, or if a library patched nn.Module."""
    from statecli.commands.verify import copy_model

    run_python(["-c", PLAIN_CLASSES], check=True)
    assert all(map(copy_model._has_own_copying, [Registers, Drops, Rebuilds, torch.fx.GraphModule]))
    assert copy.deepcopy(Registers())._buffers  # copies of the class differ from the class
