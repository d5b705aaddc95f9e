"""A live model is listed without changes, even if its class copies differently; only copies are moved."""

from __future__ import annotations

import warnings

import pytest

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


def export_net() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(Net(), (torch.ones(1, 2),)).module()


def find_row(model: nn.Module, name: str = "t"):
    return next(row for row in statecli.inspect(model).state.tensors if row.fqn == name)


COPIES = {
    "has the tensor as a buffer": [export_net, Registers, lambda: nn.Sequential(Registers())[0]],
    "lacks the tensor": [Drops],
}


@pytest.mark.parametrize(("words", "build_model"), [(words, build) for words in COPIES for build in COPIES[words]])
def test_move_is_unknown_if_a_copy_differs(words, build_model):
    """The tensor is listed as unregistered; statecli moves only copies, so the move is not known."""
    model = build_model()
    actual = find_row(model)
    assert (actual.kind.value, actual.saved, actual.moves) == ("unregistered", False, None)
    assert f"a copy of the model {words}" in actual.note
    (check,) = statecli.verify(model, checks="move").checks
    assert (check.verdict.value, check.findings) == ("inconclusive", ())
    assert check.columns[0].cells["fc.weight"].verdict.value == "passed"


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


def test_tie_broken_by_the_copy_is_not_attributed_to_the_move():
    """The copy already lacks the tied weights, so `untied-by-move` is not reported."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Parameter(torch.ones(2))

        def __deepcopy__(self, memo):
            other = type(self)()
            other.b = nn.Parameter(torch.ones(2))
            return other

    state = statecli.inspect(Parts()).state
    assert [oddity.name for oddity in state.oddities if oddity.name == "untied-by-move"] == []
    assert state.tensors[0].tied_to == ("b",)


@pytest.mark.parametrize("build_model", [export_net, Registers, Drops, Rebuilds])
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
