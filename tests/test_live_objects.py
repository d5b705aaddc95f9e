"""Live objects as targets: the results are those of files written by torch.save from the same objects."""

from __future__ import annotations

import functools
import os
import tempfile
import types
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import statecli
from statecli.api import live_targets
from statecli.core.errors import NothingMatched


class Tied(nn.Module):
    """Two names of a weight, a buffer in float16, a view of a larger storage, an integer counter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("low", torch.arange(8).half()[2:5])
        self.register_buffer("empty", torch.empty(0, 3))


def step(model, optimizer):
    """Run one training step."""
    loss = sum(parameter.square().sum() for parameter in model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def rows(diff):
    """Everything about the pairs but the places of the bytes."""
    fields = ["fqn", "section", "status", "kind", "fields", "renamed_from", "values", "not_compared", "transformation"]
    return [
        ([getattr(change, field) for field in fields], describe(change.before), describe(change.after))
        for change in diff.changes
    ]


def describe(side):
    """A side of a pair."""
    return side and (side.dtype, side.shape, side.tied_to, side.device)


def diff_objects_and_files(before, after, folder, **options):
    """The diff of two objects, and the diff of their files."""
    paths = [folder / "before.pt", folder / "after.pt"]
    for value, path in zip((before, after), paths, strict=True):
        torch.save(value if isinstance(value, dict) else value.state_dict(), path)
    live = statecli.diff(before, after, **options)
    return live, statecli.diff(*paths, **options)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
VALUES = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, float("nan"), float("inf")])


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    count = int(torch.Size(shape).numel())
    values = draw(st.lists(VALUES, min_size=count, max_size=count))
    floats = torch.tensor(values, dtype=torch.float64).reshape(shape)
    tensor = floats.to(dtype) if dtype.is_floating_point else floats.nan_to_num(0, 3, -3).to(dtype)
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


STATES = st.dictionaries(st.sampled_from(["a.weight", "a.bias", "b.weight", "b.running_mean", "c"]), tensors())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATES, STATES, st.sampled_from([{}, {"bitwise": True}, {"metadata_only": True}, {"atol": 0.6}]))
def test_a_diff_of_objects_is_the_diff_of_their_files(before, after, options):
    """For any state_dicts, objects and files have the same pairs, numbers, findings and notes, or the same error."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "before.pt", Path(folder) / "after.pt"]
        for value, path in zip((before, after), paths, strict=True):
            torch.save(value, path)
        try:
            expected = statecli.diff(*paths, **options)
        except statecli.StateError as error:
            with pytest.raises(type(error)):
                statecli.diff(before, after, **options)
            return
    diff = statecli.diff(before, after, **options)
    assert rows(diff) == rows(expected)
    assert [(f.rule, f.fqn, f.severity) for f in diff.findings] == [
        (f.rule, f.fqn, f.severity) for f in expected.findings
    ]
    assert [note.name for note in diff.notes] == [note.name for note in expected.notes]


def test_a_diff_of_models_is_the_diff_of_their_state_dicts(tmp_path):
    """The models have ties, views, half precision and an empty tensor."""
    torch.manual_seed(0)
    before, after = Tied(), Tied()
    live, files = diff_objects_and_files(before, after, tmp_path)
    assert rows(live) == rows(files)
    assert (live.before.target, live.after.target) == ("Tied", "Tied (2)")


def test_an_optimizer_is_compared_with_its_section(tmp_path):
    """The section of a path, and the optimizer saved in the section: equal until the next step."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
    section = f"{tmp_path / 'train.pt'}#optimizer"
    same = statecli.diff(section, optimizer)
    assert {change.status.value for change in same.changes} == {"identical"}
    step(model, optimizer)
    moved = statecli.diff(section, optimizer)
    assert {change.fqn.rpartition("[")[2] for change in moved.changes if change.values} >= {"'exp_avg']", "'step']"}


@pytest.mark.parametrize(
    "build_object", [Tied, lambda: Tied().state_dict(), lambda: torch.optim.SGD(Tied().parameters(), 0.1)]
)
def test_every_kind_of_object_is_inspected(build_object):
    """The name of the object is the target; SGD without momentum has no tensor."""
    target = build_object()
    inspection = statecli.inspect(target, stats=True)
    assert inspection.state.target == live_targets.name_object(target)
    if isinstance(target, torch.optim.Optimizer):
        assert inspection.state.tensors == ()
        return
    weight = next(tensor for tensor in inspection.state.tensors if tensor.fqn == "embedding.weight")
    assert weight.stats.max == pytest.approx(
        float(torch.as_tensor((target if isinstance(target, dict) else target.state_dict())["embedding.weight"]).max())
    )


def test_a_lock_of_an_object_is_the_lock_of_its_file(tmp_path):
    """A lock of several objects has their names as targets."""
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert statecli.lock(model) == statecli.lock(tmp_path / "a.pt") == statecli.lock(model.state_dict())
    assert [target.target for target in statecli.lock([model, model.state_dict()]).targets] == ["Tied", "state_dict"]


def test_an_audit_of_an_object_is_the_audit_of_its_file(tmp_path):
    """A NaN is found, with the name of the object, and a lock is checked."""
    model = Tied()
    with torch.no_grad():
        model.norm.weight[1] = float("nan")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    of_object, of_file = statecli.audit(model), statecli.audit(tmp_path / "a.pt")
    assert [(f.rule, f.fqn) for f in of_object.findings] == [(f.rule, f.fqn) for f in of_file.findings]
    assert ("nan", "norm.weight") in {(f.rule, f.fqn) for f in of_object.findings}
    assert {finding.target for finding in of_object.findings} == {"Tied"}
    reference = {name: tensor[:1] for name, tensor in model.state_dict().items() if tensor.dim()}
    assert "shape-mismatch" in {finding.rule for finding in statecli.audit(model, against=reference).findings}


def test_the_temporary_file_is_removed(monkeypatch, tmp_path):
    """After a result and after an error, in memory or, without enough free memory, in the temporary folder."""
    monkeypatch.setattr(live_targets, "_MEMORY_FOLDER", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []
    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: folders.append(mkdtemp(**options)) or folders[-1])
    statecli.diff(Tied(), Tied())
    with pytest.raises(NothingMatched):
        statecli.diff(Tied(), Tied(), include="nothing*")
    assert len(folders) == 4
    assert {os.path.dirname(folder) for folder in folders} == {str(tmp_path)}
    assert os.listdir(tmp_path) == []


def test_an_error_names_the_object_and_no_path():
    """The temporary path means nothing to the reader."""
    with pytest.raises(statecli.StateError) as raised:
        statecli.diff({"a": torch.ones(2)}, Tied(), include="nothing*")
    assert "statecli-" not in str(raised.value)
    assert "state_dict and Tied" in str(raised.value)


def test_memory_is_chosen_by_the_size_of_the_storages():
    """A storage counts once, and whole."""
    weight = torch.ones(10)
    assert live_targets._count_bytes({"a": weight, "b": [weight[:2], {"c": torch.ones(3)}]}) == 52


@pytest.mark.parametrize(
    "before",
    [
        nn.LazyLinear(2),
        nn.Linear(2, 2, device="meta"),
        {"weight": torch.eye(2).to_sparse(), "bias": torch.ones(2)},
        {"model": nn.Linear(2, 2).state_dict(), "epoch": 1},
        {"model": nn.Linear(2, 2)},
    ],
    ids=["lazy", "meta", "sparse", "training", "module"],
)
def test_unusual_objects_are_compared_as_their_files(before, tmp_path):
    """Without values, with another layout, with settings, with a module inside."""
    after = nn.Linear(2, 2)
    live, files = diff_objects_and_files(before, after, tmp_path)
    assert rows(live) == rows(files)
    assert len(live.broken) == len(files.broken)
    assert [scalar.key for scalar in live.scalars] == [scalar.key for scalar in files.scalars]


def test_results_call_an_object_in_memory_so(tmp_path):
    """A result names no file format for an object in memory; a checkpoint on disk keeps its format."""
    model = torch.nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert "in memory, 2 tensors" in str(statecli.inspect(model.state_dict()))
    assert "torch-zip, 2 tensors, 36 B → in memory, 2 tensors" in str(statecli.diff(tmp_path / "a.pt", model))
    assert "in memory, 2 tensors" in str(statecli.audit(model))


# --- optimizers without state ----------------------------------------------------------------------------------------


def sgd(lr=0.1):
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr)


@pytest.mark.parametrize("build", [sgd, lambda: torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), 0.1)])
def test_an_optimizer_without_state_has_settings(build):
    """Before the first step, and without momentum, the optimizer contains no tensor."""
    optimizer = build()
    result = statecli.inspect(optimizer)
    assert result.state.tensors == ()
    assert result.state.metadata.values["param_groups.0.lr"] == 0.1
    assert "contains no tensors, only metadata: param_groups.0.lr=0.1" in " ".join(str(result).split())
    assert not statecli.audit(optimizer).findings


def test_the_settings_of_optimizers_without_state_are_compared(tmp_path):
    """The settings of an object, a file and a snapshot are compared; equal settings are identical."""
    torch.save(sgd(0.2).state_dict(), tmp_path / "sgd.pt")
    before = statecli.Snapshot(sgd())
    for old, new in ((sgd(), sgd(0.2)), (sgd(), tmp_path / "sgd.pt"), (before, sgd(0.2))):
        result = statecli.diff(old, new)
        assert [(scalar.key, scalar.before, scalar.after) for scalar in result.scalars] == [
            ("param_groups.0.lr", 0.1, 0.2)
        ]
        assert "neither side contains a tensor; statecli compared only 11 settings" in " ".join(str(result).split())
    assert statecli.diff(sgd(), sgd()).scalars == ()


def test_an_optimizer_without_state_is_compared_with_its_section(tmp_path):
    """The section of a checkpoint has no tensor either."""
    state = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": sgd(0.2).state_dict()}
    torch.save(state, tmp_path / "train.pt")
    result = statecli.diff(f"{tmp_path / 'train.pt'}#optimizer", sgd())
    assert [(scalar.key, scalar.before, scalar.after) for scalar in result.scalars] == [("param_groups.0.lr", 0.2, 0.1)]
    with pytest.raises(statecli.StateError, match="has no section 'optimiser'"):
        statecli.diff(f"{tmp_path / 'train.pt'}#optimiser", sgd())


def test_a_method_that_keeps_another_method_of_the_layer_is_copied():
    """torchao puts the `extra_repr` of each layer into a partial: the copy has its own, and the model stays."""
    layer = nn.Linear(2, 3)
    layer.extra_repr = types.MethodType(
        functools.partial(lambda module, original: original(), original=layer.extra_repr), layer
    )
    weight = layer.weight.detach().clone()
    result = statecli.inspect(layer, to="meta")
    assert "cannot" not in str(result)
    assert layer.weight.device.type == "cpu"
    assert torch.equal(layer.weight, weight)


def test_messages_about_an_object_in_memory_name_no_file():
    """Neither the error nor a note calls the object a file or a pickle."""
    with pytest.raises(statecli.MalformedError) as caught:
        statecli.inspect({"a": 1})
    assert str(caught.value) == "state_dict: contains no tensor: the object is a dict of length 1"
    model = torch.nn.Linear(2, 2)
    text = str(statecli.inspect({"model": model.state_dict(), "optimizer": sgd()}))
    assert "file" not in text
    assert "pickle" not in text
