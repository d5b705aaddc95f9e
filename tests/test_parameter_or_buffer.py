"""Evidence in a checkpoint for the kind of a tensor, and conclusions that the evidence does not allow."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file
from torch import nn

from statecli import formats
from statecli.core import parameter_or_buffer
from statecli.core.model_state import Evidence, Kind, ModelState, OptimizerFacts, OptimizerGroup, TensorInfo
from statecli.targets.load import read_checkpoint


class Net(nn.Module):
    """A model with parameters and buffers of the same shapes, so shapes alone decide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.fc = nn.Linear(4, 4)
        self.register_buffer("index", torch.zeros(4, dtype=torch.long))


def step_optimizer(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def classify_all(tmp_path, thing):
    path = str(tmp_path / "file.pt")
    torch.save(thing, path)
    return parameter_or_buffer.classify_tensors(formats.read(path)).tensors


def classify_saved(tmp_path, thing):
    return {t.fqn: t for t in classify_all(tmp_path, thing) if t.section in ("model", "state_dict")}


def test_a_bare_state_dict_is_assumed_and_conventions_are_named(tmp_path):
    """BatchNorm's statistics and integers are buffers by convention; the rest is only assumed."""
    actual = classify_saved(tmp_path, Net().state_dict())
    assert {n for n, row in actual.items() if row.kind is Kind.BUFFER} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "index",
    }
    assert all(row.evidence is Evidence.CONVENTION for row in actual.values() if row.kind is Kind.BUFFER)
    assert all(row.persistent is True for row in actual.values() if row.kind is Kind.BUFFER)
    assert actual["scale"].evidence is Evidence.ASSUMED
    assert actual["fc.weight"].evidence is Evidence.ASSUMED


def test_groups_of_an_optimizer_are_compared_up_to_a_number(tmp_path, monkeypatch):
    """Each group is compared with each entry; beyond the limit a note reports that no optimizer was compared."""
    net = Net()
    groups = [{"params": [parameter]} for parameter in net.parameters()]
    path = str(tmp_path / "file.pt")
    torch.save({"model": net.state_dict(), "optimizer": step_optimizer(net, torch.optim.Adam(groups))}, path)
    state = formats.read(path)
    assert not parameter_or_buffer.classify_tensors(state).oddities
    monkeypatch.setattr(parameter_or_buffer, "MAX_GROUP_ENTRY_PAIRS", len(groups) * 2)
    (oddity,) = parameter_or_buffer.classify_tensors(state).oddities
    assert oddity.message == (
        f"too many optimizers (1 with {len(groups)} groups), so statecli does "
        "not determine which tensors each optimizer trains"
    )


def test_param_names_of_the_optimizer_are_exact(tmp_path):
    """An optimizer built from named_parameters() records the names of its parameters."""
    net = Net()
    state = step_optimizer(net, torch.optim.AdamW(net.named_parameters()))
    actual = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer": state})
    trained = {n for n, row in actual.items() if row.evidence is Evidence.OPTIMIZER}
    assert trained == {n for n, _ in net.named_parameters()}
    assert actual["scale"].evidence is Evidence.ASSUMED


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda net: torch.optim.AdamW(net.parameters()),
        lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        lambda net: torch.optim.Adagrad(net.parameters()),
        lambda net: torch.optim.RMSprop(net.parameters()),
    ],
    ids=["adamw", "sgd", "adagrad", "rmsprop"],
)
def test_moment_shapes_never_make_a_buffer_a_parameter(tmp_path, optimizer_of):
    """A tensor reported as trained is a parameter of the live model; tensors determined by their shapes are found."""
    net = Net()
    state = step_optimizer(net, optimizer_of(net))
    rows = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer": state})
    trained = {n for n, row in rows.items() if row.evidence is Evidence.OPTIMIZER}
    assert trained <= {n for n, _ in net.named_parameters()}
    assert {"embed.weight", "fc.weight"} <= trained


def test_two_groups_in_model_order_as_trainer_saves_them(tmp_path):
    """Decay and no decay: each group is a subsequence of the entries by itself."""
    net = Net()
    parameters = dict(net.named_parameters())
    decay = [p for n, p in parameters.items() if p.dim() > 1]
    rest = [p for n, p in parameters.items() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    rows = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer": step_optimizer(net, optimizer)})
    trained = {n for n, row in rows.items() if row.evidence is Evidence.OPTIMIZER}
    assert {"embed.weight", "fc.weight"} <= trained <= set(parameters)


def test_fsdp_names_are_exact(tmp_path):
    """Optimizer state keyed by FQN names its parameters."""
    sd = {"a.weight": torch.ones(2), "a.scale": torch.ones(2)}
    optimizer = {
        "state": {"a.weight": {"exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 0.1, "params": ["a.weight"]}],
    }
    actual = classify_saved(tmp_path, {"model": sd, "optimizer": optimizer})
    assert actual["a.weight"].evidence is Evidence.OPTIMIZER
    assert actual["a.scale"].evidence is Evidence.ASSUMED


def test_tied_entries_are_trained_together(tmp_path):
    """parameters() gives a tied tensor once; both of its names are parameters."""
    net = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    state = step_optimizer(net, torch.optim.AdamW(net.parameters()))
    actual = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer": state})
    assert {row.evidence for row in actual.values()} == {Evidence.OPTIMIZER}


def test_an_ema_copy_takes_its_models_evidence(tmp_path):
    """Equal names in another section are parameters as well."""
    net = nn.Linear(2, 2)
    ema = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = step_optimizer(net, torch.optim.AdamW(net.named_parameters()))
    rows = classify_all(tmp_path, {"model": net.state_dict(), "ema": ema, "optimizer": optimizer})
    assert {t.evidence for t in rows if t.section == "ema"} == {Evidence.OPTIMIZER}


def test_a_tied_name_is_trained_in_the_copy_as_well(tmp_path):
    """An EMA copy clones each entry, so its ties are lost; the evidence of the model applies to the same names."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    state = step_optimizer(net, torch.optim.Adam(net.parameters()))
    ema = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    rows = classify_all(tmp_path, {"model": net.state_dict(), "ema": ema, "optimizer": state})
    assert [t.evidence for t in rows if t.section in ("model", "ema")] == [Evidence.OPTIMIZER] * 6


def test_an_averaged_model_is_a_copy_too(tmp_path):
    """AveragedModel puts `module.` before every name: the model itself keeps its evidence."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    averaged = torch.optim.swa_utils.AveragedModel(net)
    optimizer = step_optimizer(net, torch.optim.AdamW(net.parameters()))
    rows = classify_all(tmp_path, {"model": net.state_dict(), "swa": averaged.state_dict(), "optimizer": optimizer})
    evidences = {t.evidence for t in rows if t.section in ("model", "swa") and t.dtype == "float32"}
    assert evidences == {Evidence.OPTIMIZER}


def test_network_with_the_same_shapes_is_not_taken_for_a_copy(tmp_path):
    """Two networks have the same names and shapes: the network trained by the optimizer is unknown."""
    net, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = step_optimizer(net, torch.optim.AdamW(net.named_parameters()))
    rows = classify_all(tmp_path, {"net_a": net.state_dict(), "net_b": twin.state_dict(), "opt_a": optimizer})
    assert {t.evidence for t in rows if t.kind is Kind.PARAMETER} == {Evidence.ASSUMED}


def test_optimizer_of_another_model_is_not_evidence(tmp_path):
    """A generator's optimizer does not make a parameter of the discriminator's buffer of the same name."""
    generator = nn.Linear(3, 3)
    other = {"fc.weight": torch.ones(3, 3), "bias": torch.ones(3), "weight": torch.ones(3, 3), "scale": torch.ones(3)}
    optimizer = step_optimizer(generator, torch.optim.AdamW(generator.named_parameters()))
    states = {"generator": generator.state_dict(), "discriminator": other, "optimizer": optimizer}
    rows = classify_all(tmp_path, states)
    assert {t.evidence for t in rows if t.section == "discriminator"} == {Evidence.ASSUMED}


def test_optimizer_of_a_tensor_outside_the_file_is_not_evidence(tmp_path):
    """A second optimizer trains a weight that is not in the file; by chance a buffer has the same shape."""
    net = Net()
    center = nn.Parameter(torch.ones(4, 4))
    center.grad = torch.ones(4, 4)
    second = torch.optim.AdamW([center])
    second.step()
    actual = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer_center": second.state_dict()})
    assert Evidence.OPTIMIZER not in {row.evidence for row in actual.values()}


def test_weight_of_a_loss_does_not_make_a_buffer_a_parameter(tmp_path):
    """A loss with weights of its own, in the same optimizer, may have the shape of a buffer."""
    net, criterion = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(3, 3, bias=False)
    net.register_buffer("table", torch.ones(3, 3))
    groups = [{"params": list(net.parameters())}, {"params": list(criterion.parameters()), "lr": 0.1}]
    for parameter in (*net.parameters(), *criterion.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(groups)
    optimizer.step()
    actual = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    assert actual["table"].evidence is Evidence.ASSUMED
    assert actual["0.weight"].evidence is Evidence.OPTIMIZER


def test_optimizers_that_share_a_model_are_evidence_together(tmp_path):
    """For example a generator and a discriminator: one optimizer alone trains too little of the model for evidence."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 1))
    shared = [torch.optim.Adam(net[:2].parameters()), torch.optim.SGD(net[2:].parameters(), 0.1, momentum=0.9)]
    states = [step_optimizer(net, optimizer_) for optimizer_ in shared]
    actual = classify_saved(tmp_path, {"state_dict": net.state_dict(), "optimizer_states": states})
    assert {row.evidence for row in actual.values()} == {Evidence.OPTIMIZER}


def test_optimizers_that_do_not_train_a_head_are_not_evidence_for_it(tmp_path):
    """No optimizer trains one head: the tensors of the smaller optimizer could also be those of this head."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(6, 1))
    shared = [torch.optim.Adam(net[:2].parameters()), torch.optim.SGD(net[2:3].parameters(), 0.1, momentum=0.9)]
    states = [step_optimizer(net, optimizer_) for optimizer_ in shared]
    actual = classify_saved(tmp_path, {"state_dict": net.state_dict(), "optimizer_states": states})
    assert {name for name, row in actual.items() if row.evidence is Evidence.OPTIMIZER} <= {
        *(f"{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias"))
    }


def test_groups_split_by_weight_decay_are_matched(tmp_path):
    """Biases are often in a group without weight decay: the groups interleave, and all parameters are trained."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    net.register_buffer("table", torch.ones(3, 3))
    flat = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1]}, {"params": flat, "weight_decay": 0.0}]
    rows = classify_saved(
        tmp_path,
        {"model": net.state_dict(), "optimizer": step_optimizer(net, torch.optim.AdamW(groups, weight_decay=0.1))},
    )
    trained = {n for n, row in rows.items() if row.evidence is Evidence.OPTIMIZER}
    assert trained == {n for n, _ in net.named_parameters()}


def test_optimizer_ids_without_shapes_are_not_evidence(tmp_path):
    """SGD without momentum saves only numbers; an equal count is not evidence."""
    sd = {"a.w": torch.ones(2), "b.w": torch.ones(3), "scale": torch.ones(4)}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1)) for _ in range(3)], 0.1).state_dict()
    actual = classify_saved(tmp_path, {"model": sd, "optimizer": optimizer})
    assert {row.evidence for row in actual.values()} == {Evidence.ASSUMED}


def test_a_file_without_a_models_tensors_cannot_be_grouped(inspect_error, tmp_path, spec):
    """ "Nothing was checked" is never 0."""
    linear = nn.Linear(2, 2)
    torch.save(step_optimizer(linear, torch.optim.AdamW(linear.parameters())), tmp_path / "opt.pt")
    assert "contains no model tensors" in inspect_error(tmp_path / "opt.pt", "--model", spec)


def test_findings_name_their_section(statecli, tmp_path, spec):
    """Two models in one file: each finding names its section, and is in the row of this section."""
    import csv
    import io

    sound_state = {**entries(), "tied.weight": torch.ones(4, 4)}
    damaged_state = {**sound_state, "scale": torch.ones(9)}
    torch.save({"model": sound_state, "ema": damaged_state}, tmp_path / "two.pt")
    result = statecli("inspect", tmp_path / "two.pt", "--model", spec, "-f", "json")
    assert [(f["rule"], f["section"], f["fqn"]) for f in result.json["findings"]] == [
        ("shape-mismatch", "ema", "scale")
    ]
    out = statecli("inspect", tmp_path / "two.pt", "--model", spec, "-f", "csv").out
    assert [row["section"] for row in csv.DictReader(io.StringIO(out)) if row["finding"]] == ["ema"]


def test_several_shapes_of_a_section_have_their_names(statecli, tmp_path, spec):
    """The section comes before each name below the heading, and does not replace the name."""
    sound_state = {**entries(), "tied.weight": torch.ones(4, 4)}
    damaged_state = {**sound_state, "scale": torch.ones(9), "fc.bias": torch.ones(7)}
    torch.save({"model": sound_state, "ema": damaged_state}, tmp_path / "two.pt")
    text = statecli("inspect", tmp_path / "two.pt", "--model", spec, "-f", "table").out
    assert "2 tensors have another shape" in text
    assert "ema: scale: [9], but the class has [4]" in text
    assert "ema: fc.bias: [7], but the class has [4]" in text


def test_optimizer_entries_name_their_parameter(tmp_path):
    """With param_names, `state[0]['exp_avg']` belongs to `weight`."""
    net = nn.Linear(2, 2)
    optimizer = step_optimizer(net, torch.optim.AdamW(net.named_parameters()))
    owners = {t.fqn: t.belongs_to for t in classify_all(tmp_path, optimizer)}
    assert owners["state[0]['exp_avg']"] == "weight"
    assert owners["state[1]['step']"] == "bias"


shapes = st.lists(st.sampled_from([(1,), (2,), (3, 3)]), min_size=1, max_size=9)


@settings(max_examples=100, deadline=None)
@given(shapes, st.data())
def test_tensor_reported_as_trained_is_trained(tensor_shapes, data):
    """If some parameters are frozen, a tensor reported as trained is always a trained tensor."""
    trained = [n for n in range(len(tensor_shapes)) if data.draw(st.booleans())]
    tensors = [TensorInfo(f"t{n}", "float32", shape, 1, 4) for n, shape in enumerate(tensor_shapes)]
    group = OptimizerGroup(tuple(range(len(trained))), None, tuple(tensor_shapes[n] for n in trained))
    actual_trained = parameter_or_buffer.find_trained(
        OptimizerFacts("optimizer", (group,)), list(range(len(tensor_shapes))), tensors
    )
    assert actual_trained <= set(trained)
    if len(trained) == len(tensor_shapes):
        assert actual_trained == set(trained)


def test_a_buffer_name_counts_only_as_the_last_component():
    """`running_mean` is a buffer; a weight in a module of this name is not."""
    tensors = tuple(TensorInfo(fqn, "float32", (1,), 1, 4) for fqn in ("bn.running_mean", "running_mean.weight"))
    classified = parameter_or_buffer.classify_tensors(ModelState("x.pt", "torch-zip", tensors))
    assert [tensor.kind for tensor in classified.tensors] == [Kind.BUFFER, Kind.PARAMETER]


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.fc = nn.Linear(hidden, hidden)
        self.register_buffer("scale", torch.ones(hidden))
        self.register_buffer("scratch", torch.ones(hidden), persistent=False)
        self.tied = nn.Linear(hidden, hidden, bias=False)
        self.tied.weight = self.fc.weight
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "model_of_kinds.py"
    path.write_text(MODEL)
    return f"{path}:Net"


def entries(hidden=4):
    return {"fc.weight": torch.ones(hidden, hidden), "fc.bias": torch.ones(hidden), "scale": torch.ones(hidden)}


def inspect_with_model(statecli, tmp_path, spec, sd):
    save_file(sd, tmp_path / "net.safetensors")
    return statecli("inspect", tmp_path / "net.safetensors", "--model", spec, "-f", "json")


def rules(result):
    return [(finding["rule"], finding["fqn"]) for finding in result.json["findings"]]


def test_a_class_makes_the_grouping_exact(statecli, tmp_path, spec):
    """--model: the kinds are those of the class, without findings. A note names a tied name dropped by safetensors."""
    result = inspect_with_model(statecli, tmp_path, spec, entries())
    assert result.code == 0, result
    assert "does not have tied.weight, which is tied to fc.weight" in result.json["notes"][0]["message"]
    assert {row["evidence"] for row in result.json["tensors"]} == {"registered"}
    assert result.rows()["scale"]["kind"] == "buffer"


def test_a_tied_entry_that_a_pickle_lacks_is_missing(statecli, tmp_path, spec):
    """torch.save keeps both names of a tied tensor; without one of them load_state_dict and statecli fail."""
    torch.save(entries(), tmp_path / "net.pt")
    result = statecli("inspect", tmp_path / "net.pt", "--model", spec, "-f", "json")
    assert result.code == 1
    assert rules(result) == [("missing-entry", "tied.weight")]
    assert "tied to fc.weight, which is present" in result.json["findings"][0]["message"]


def test_shape_mismatch_names_both_shapes(statecli, tmp_path, spec):
    """One line has the shapes of the file and the class."""
    result = inspect_with_model(statecli, tmp_path, spec, {**entries(), "fc.bias": torch.ones(7)})
    assert rules(result) == [("shape-mismatch", "fc.bias")]
    assert "[7]" in result.out
    assert "but [4] in" in result.out


def test_prefix_of_a_wrapper_is_stripped_and_is_one_finding(statecli, tmp_path, spec):
    """`module._orig_mod.` before every name is one finding, not two for each tensor."""
    wrapped = {f"module._orig_mod.{key}": value for key, value in entries().items()}
    result = inspect_with_model(statecli, tmp_path, spec, wrapped)
    assert rules(result) == [("wrapper-prefix", None)]
    assert result.rows()["module._orig_mod.scale"]["kind"] == "buffer"


def test_findings_agree_with_load_state_dict(statecli, tmp_path, spec):
    """The missing and unexpected keys are those of torch; a non-persistent buffer is unexpected, and never missing."""
    import importlib.util

    sd = {"fc.weight": torch.ones(4, 4), "extra": torch.ones(1), "scratch": torch.ones(4)}
    result = inspect_with_model(statecli, tmp_path, spec, sd)
    module_spec = importlib.util.spec_from_file_location("model_of_kinds_oracle", spec.rpartition(":")[0])
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    torchs = module.Net().load_state_dict(sd, strict=False)
    ours = {rule: {fqn for r, fqn in rules(result) if r == rule} for rule in ("missing-entry", "unexpected-entry")}
    assert ours["unexpected-entry"] == set(torchs.unexpected_keys)
    assert ours["missing-entry"] == set(torchs.missing_keys) - {"tied.weight"}
    assert result.code == 1
    assert [result.rows()[name]["kind"] for name in ("extra", "scratch")] == ["unregistered", "buffer"]


def test_a_model_cannot_group_a_class(inspect_error, spec):
    """--model with a class as target is an error in one line."""
    assert "is a class" in inspect_error(spec, "--model", spec)


def test_a_model_must_be_a_class(inspect_error, tmp_path):
    """If --model names a file, the error shows the correct form."""
    save_file(entries(), tmp_path / "net.safetensors")
    assert "write file.py:Class" in inspect_error(tmp_path / "net.safetensors", "--model", tmp_path / "net.safetensors")


def test_direction_of_weight_norm_is_not_a_buffer(tmp_path):
    """`weight_v` next to `weight_g` is trained; next to `weight_orig` it is a vector of the old spectral_norm."""
    actual = classify_saved(tmp_path, {"weight_g": torch.ones(2, 1), "weight_v": torch.ones(2, 2)})
    assert {row.kind for row in actual.values()} == {Kind.PARAMETER}
    spectral = {"weight_orig": torch.ones(2, 2), "weight_u": torch.ones(2), "weight_v": torch.ones(2)}
    actual = classify_saved(tmp_path, spectral)
    assert [row.kind for row in actual.values()] == [Kind.PARAMETER, Kind.BUFFER, Kind.BUFFER]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["pe", "betas", "cluster_size", "freqs_cis"])
def test_the_optimizer_is_stronger_than_a_name(tmp_path, name, named):
    """A parameter with the name of many buffers is a parameter if an optimizer trains the tensor."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net.register_parameter(name, nn.Parameter(torch.ones(3, 4)))
    state = step_optimizer(net, torch.optim.Adam(net.named_parameters() if named else net.parameters()))
    rows = classify_saved(tmp_path, {"model": net.state_dict(), "optimizer": state})
    trained = {n for n, row in rows.items() if row.evidence is Evidence.OPTIMIZER}
    assert trained == {n for n, _ in net.named_parameters()}


def test_single_matching_shape_is_not_evidence(tmp_path):
    """An optimizer with a single id that fits one of two entries may train another tensor of the same shape."""
    centers = nn.Parameter(torch.ones(3, 4))
    centers.grad = torch.ones_like(centers)
    optimizer = torch.optim.Adam([centers])
    optimizer.step()
    model = {"cent": torch.ones(3, 4), "0.weight": torch.ones(4, 4)}
    actual = classify_saved(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    assert {row.evidence for row in actual.values()} == {Evidence.ASSUMED}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (["model", "model_ema"], ["model"]),
        (["teacher", "model"], ["model"]),
        (["state_dict", "current_model_state"], ["state_dict"]),
        (["net", "ema"], ["net"]),
        (["ema_1", "ema_2"], ["ema_1", "ema_2"]),
        (["generator", "discriminator"], ["generator", "discriminator"]),
    ],
    ids=" ".join,
)
def test_names_of_sections_select_the_loaded_model(sections, expected):
    """`model` is chosen, then `state_dict` of Lightning, then sections that are not an average, then all."""
    assert parameter_or_buffer.select_loaded_sections(sections) == expected


@pytest.mark.parametrize("groups", [1, 2])
def test_an_unnamed_optimizer_tensor_has_its_parameter(tmp_path, groups):
    """The parameter is found by order and shape, as torch assigns the tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    parameters = list(model.named_parameters())
    matrices = [p for _, p in parameters if p.dim() > 1]
    others = [p for _, p in parameters if p.dim() < 2]
    optimizer = torch.optim.Adam([{"params": matrices}, {"params": others}] if groups == 2 else model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    owners = parameter_or_buffer.match_optimizer_entries(read_checkpoint(str(tmp_path / "a.pt")))
    names = {id(p): name for name, p in parameters}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    assert {key: name for (_, key), name in owners.items() if "exp_avg'" in key} == {
        f"state[{n}]['exp_avg']": names[id(p)] for n, p in enumerate(order)
    }


def test_ambiguous_optimizer_entries_name_no_parameter(tmp_path):
    """The optimizer trains one of two parameters with the same shape."""
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    moments = {0: {"exp_avg": torch.ones(2)}}
    optimizer = {"state": moments, "param_groups": [{"params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "a.pt")
    assert parameter_or_buffer.match_optimizer_entries(read_checkpoint(str(tmp_path / "a.pt"))) == {}
