"""A live model is listed as it is, whatever its class makes of a copy; only copies are moved."""

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
    """A registered and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.t = torch.ones(2)

    def forward(self, x):
        return self.fc(x) + self.t


class Registers(Net):
    """Its copies register what it does not."""

    def __deepcopy__(self, memo):
        other = type(self)()
        del other.t
        other.register_buffer("t", self.t.clone())
        return other


class Drops(Net):
    """Its copies do not hold the plain tensor."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "t"}


class Rebuilds(Net):
    """Its copies are built again, without what was added."""

    def __reduce__(self):
        return type(self), ()


class Locked(Registers):
    """No copy of each of its attributes can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def export_net() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(Net(), (torch.ones(1, 2),)).module()


def row(model: nn.Module, name: str = "t"):
    return next(row for row in statecli.inspect(model).state.tensors if row.fqn == name)


@pytest.mark.parametrize("make", [export_net, Registers, Drops, lambda: nn.Sequential(Registers())[0]])
def test_a_plain_tensor_stays_plain_whatever_a_copy_makes_of_it(make):
    """It is unregistered, not saved, and does not move."""
    actual = row(make())
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
def test_wrappers_of_torch_are_listed_as_they_are(name):
    """Names, kinds and requires_grad are those of the model's own registries; the plain tensor stays plain."""
    model = WRAPPERS[name]()
    rows_by_fqn = {row.fqn: row for row in statecli.inspect(model).state.tensors}
    plain = [name for name, row in rows_by_fqn.items() if row.kind.value == "unregistered"]
    assert [row.rpartition(".")[2] for row in plain] == ["t"]
    assert rows_by_fqn[plain[0]].moves is False
    requires_grad = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
    assert {
        name: row.requires_grad for name, row in rows_by_fqn.items() if row.kind.value == "parameter"
    } == requires_grad


@pytest.mark.parametrize("make", [export_net, Registers, Drops])
def test_verify_fails_for_a_plain_tensor_that_a_copy_registers(make):
    """Proofs work on a copy that holds what the model holds."""
    verification = statecli.verify(make(), checks="move")
    assert [(finding.rule, finding.fqn) for finding in verification.findings] == [("left-behind", "t")]


def test_what_was_added_after_construction_is_there():
    """A class that is rebuilt by its constructor when it is copied has it all the same."""
    model = Rebuilds()
    model.extra = torch.ones(3)
    assert row(model, "extra").moves is False


def test_a_module_in_a_list_is_listed_as_it_is():
    """Also where it is not registered."""
    model = Net()
    model.others = [Registers()]
    assert row(model, "others[0].t").moves is False


def test_where_no_copy_is_like_the_model_nothing_is_said_of_the_move():
    """Neither that it moves nor that it stays; the tensor is listed as it is."""
    model = Locked()
    actual = row(model)
    assert (actual.kind.value, actual.saved, actual.moves) == ("unregistered", False, None)
    assert "a copy of the model has the tensor as a buffer" in actual.note
    (check,) = statecli.verify(model, checks="move").checks
    assert check.verdict.value == "inconclusive"
    assert check.columns[0].cells["fc.weight"].verdict.value == "passed"


def test_a_tie_that_a_copy_parts_is_not_broken_by_the_move():
    """`untied-by-move` is of the move, and the copy had no tie."""

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


@pytest.mark.parametrize("make", [export_net, Registers, Drops, Rebuilds, Locked])
def test_the_model_is_left_as_it_was(make):
    """Its attributes are the same objects with the same values after both commands."""
    model = make()
    before = dict(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    registries = {name: list(map(id, getattr(model, name).values())) for name in ("_parameters", "_buffers")}
    statecli.inspect(model)
    statecli.verify(model, checks="move")
    assert {name: id(value) for name, value in vars(model).items()} == {n: id(v) for n, v in before[0].items()}
    assert registries == {name: list(map(id, getattr(model, name).values())) for name in registries}
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def test_statistics_are_of_the_model_itself():
    """Also where its copies hold other values."""

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
assert not any(map(copy_model._has_own_copying, [nn.Linear, nn.LSTM, nn.MultiheadAttention, Net]))
"""


def test_copies_of_torchs_own_are_made_as_before():
    """A class without copying code of its own is copied by copy.deepcopy, unless a library gave it to nn.Module."""
    from statecli.commands.verify import copy_model

    run_python(["-c", PLAIN_CLASSES], check=True)
    assert all(map(copy_model._has_own_copying, [Registers, Drops, Rebuilds, torch.fx.GraphModule]))
    assert copy.deepcopy(Registers())._buffers  # what these classes are here for
