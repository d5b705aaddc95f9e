"""Compare a class with a checkpoint: the findings agree with torch's `load_state_dict`."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field, Status
from statecli.commands.diff.run import compare_targets
from statecli.core.errors import NothingMatched, UsageError
from statecli.core.model_state import Kind
from statecli.core.selection import Selection

from .conftest import list_findings, list_notes, map_changes

NET_LINES = """
self.fc = nn.Linear(4, 3)
self.norm = nn.BatchNorm1d(3)
self.register_buffer("mask", torch.ones(2), persistent=False)
self.cache = torch.zeros(3)
"""


def build_net(target):
    """Return an instance of the class that the target's file defines."""
    path = target.rpartition(":")[0]
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net()


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_findings_name_the_keys_that_load_state_dict_names(name, source, save):
    """Missing, unexpected and mismatched names are the names that torch reports, with the class on either side.

    Non-persistent buffers and unregistered tensors are unexpected. test_loading_oracle.py has other models.
    """
    target = source(NET_LINES)
    net = build_net(target)
    state = dict(net.state_dict())
    state |= {"fc2.bias": state.pop("fc.bias"), "mask": torch.ones(2), "cache": torch.ones(3)}
    load = net.load_state_dict(state, strict=False)
    expected = {("missing-entry", fqn) for fqn in load.missing_keys}
    expected |= {("unexpected-entry", fqn) for fqn in load.unexpected_keys}
    state["fc.weight"] = torch.ones(3, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for fc\.weight:"):
        net.load_state_dict(state, strict=False)
    path = save(state, name)
    for result in (compare_targets(Request(target, path)), compare_targets(Request(path, target))):
        assert set(list_findings(result)) == expected | {("shape-mismatch", "fc.weight")}
        assert len(result.findings) == 5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unsaved_tensors_of_a_class_are_not_compared(source, save, device):
    """Non-persistent buffers and unregistered tensors of the class are not compared, and a note counts them.

    The values of a class are only initial values, and its device is the device of its construction.
    """
    target = source(NET_LINES)
    path = save(build_net(target).state_dict(), "net.pt")
    diff = compare_targets(Request(target, path, init_device=device))
    assert not diff.findings
    assert {change.fqn for change in diff.changes}.isdisjoint({"mask", "cache"})
    assert any("2 tensors" in note.message for note in diff.notes if note.name == "not-expected")
    assert "values-not-compared" in list_notes(diff)


def test_kinds_come_from_the_class(source, save):
    """A checkpoint's kinds are guesses and a class's kinds are known, so --kind uses the class on either side."""
    target = source('self.fc = nn.Linear(2, 2)\nself.register_buffer("scale", torch.ones(2))')
    path = save({**build_net(target).state_dict(), "scale": torch.ones(3)}, "net.pt")
    for sides in ((target, path), (path, target)):
        diff = compare_targets(Request(*sides, selection=Selection(kind=(Kind.BUFFER,))))
        assert [change.fqn for change in diff.changes] == ["scale"]
        assert list_findings(diff) == [("shape-mismatch", "scale")]


def test_other_dtype_is_a_change(source, save):
    """load_state_dict casts silently, so the tensor is shown as changed, and --ignore dtype accepts the change."""
    target = source("self.fc = nn.Linear(2, 2, bias=False)")
    path = save({"fc.weight": torch.ones(2, 2).bfloat16()}, "net.pt")
    diff = compare_targets(Request(target, path))
    assert map_changes(diff)["fc.weight"].fields == (Field.DTYPE,)
    assert [f.message for f in diff.findings] == ["fc.weight: dtype float32 → bfloat16"]
    assert not compare_targets(Request(target, path, ignore=(Field.DTYPE,))).findings


def test_shape_and_dtype_are_reported_once_each(source, save):
    """A tensor of another shape and dtype is a mismatch and a change of dtype."""
    target = source("self.fc = nn.Linear(2, 2, bias=False)")
    path = save({"fc.weight": torch.ones(3, 2).bfloat16()}, "net.pt")
    diff = compare_targets(Request(target, path))
    assert list_findings(diff) == [("shape-mismatch", "fc.weight"), ("changed", "fc.weight")]
    assert list_findings(compare_targets(Request(target, path, ignore=(Field.SHAPE,)))) == [("changed", "fc.weight")]


@pytest.mark.parametrize("prefix", ["net.", "_orig_mod.module."])
def test_wrapper_prefix_is_a_single_finding(prefix, source, save):
    """Names are matched without the prefix, and one finding says that load_state_dict would not match them."""
    target = source(NET_LINES)
    path = save({prefix + name: tensor for name, tensor in build_net(target).state_dict().items()}, "net.pt")
    for sides in ((target, path), (path, target)):
        diff = compare_targets(Request(*sides))
        assert not map_changes(diff)
        assert list_findings(diff) == [("wrapper-prefix", None)]
        assert repr(prefix) in diff.findings[0].message


def test_map_renames_before_a_load(source, save):
    """A checkpoint is compared under the names that --map gives; the old prefix is not reported."""
    target = source(NET_LINES)
    path = save({f"student.{name}": tensor for name, tensor in build_net(target).state_dict().items()}, "net.pt")
    assert not compare_targets(Request(path, target, map=(r"^student\.=",))).findings


def test_filter_limits_findings_and_infers_no_prefix(source, save):
    """-i limits the findings to matching names, and no prefix is inferred from the remaining names."""
    target = source(NET_LINES)
    state = dict(build_net(target).state_dict())
    state["x.fc.weight"] = state.pop("fc.weight")
    path = save(state, "net.pt")
    assert list_findings(compare_targets(Request(target, path, selection=Selection(include=("x.*",))))) == [
        ("unexpected-entry", "x.fc.weight")
    ]
    assert list_findings(compare_targets(Request(target, path, selection=Selection(include=("fc.weight",))))) == [
        ("missing-entry", "fc.weight")
    ]
    assert not compare_targets(Request(target, path, selection=Selection(include=("norm.*",)))).findings


def test_only_the_model_of_a_training_checkpoint_is_compared(source, save):
    """The model's section is loaded; optimizer and settings are left out, with a note."""
    target = source("self.fc = nn.Linear(2, 2)")
    net = build_net(target)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    net.fc(torch.ones(2)).sum().backward()
    optimizer.step()
    path = save({"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}, "train.ckpt")
    diff = compare_targets(Request(target, path))
    assert (diff.findings, diff.scalars) == ((), ())
    assert any("optimizer" in note.message for note in diff.notes if note.name == "sections-left-out")


def test_file_with_several_models_needs_a_section(source, save):
    """The error lists the sections; with a section as the target, there is no finding."""
    target = source("self.fc = nn.Linear(2, 2)")
    state = build_net(target).state_dict()
    path = save({"generator": state, "discriminator": state}, "gan.pt")
    with pytest.raises(UsageError, match=r"gan.pt#generator"):
        compare_targets(Request(target, path))
    assert not compare_targets(Request(target, f"{path}#generator")).findings


@pytest.mark.parametrize(
    ("name", "copy"),
    [("model", "ema"), ("net", "ema"), ("net", "swa_state_dict"), ("net", "averaged_model"), ("net", "shadow_params")],
)
def test_average_next_to_a_model_is_not_compared(source, save, name, copy):
    """The model is compared, whatever its name and position; a note says that the average is left out."""
    target = source("self.fc = nn.Linear(2, 2)")
    state = build_net(target).state_dict()
    for checkpoint in ({name: state, copy: {"fc.weight": torch.ones(3)}}, {copy: {"x": torch.ones(3)}, name: state}):
        diff = compare_targets(Request(target, save(checkpoint, "net.pt")))
        assert not diff.findings
        (note,) = [note.message for note in diff.notes if note.name == "sections-left-out"]
        assert note.startswith(f"statecli did not compare {copy} of ")


def test_file_with_only_averages_needs_a_section(source, save):
    """A file with two averages and no model needs the name of a section."""
    target = source("self.fc = nn.Linear(2, 2)")
    state = build_net(target).state_dict()
    with pytest.raises(UsageError, match=r"contains 2 models; choose one of these targets: .*#ema_1, .*#ema_2"):
        compare_targets(Request(target, save({"ema_1": state, "ema_2": state}, "net.pt")))


def test_file_without_a_model_is_an_error(source, save):
    """A file with only an optimizer, or an empty file, cannot be loaded: the diff is an error, not clean."""
    target = source("self.fc = nn.Linear(2, 2)")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    for path in (save(optimizer.state_dict(), "optim.pt"), save({}, "empty.safetensors")):
        with pytest.raises(NothingMatched, match="contains no tensors of a model"):
            compare_targets(Request(target, path))


def test_pickled_module_is_compared_by_its_state_dict(source, save):
    """A whole pickled module is compared by its state_dict: its caches are not unexpected."""
    from . import test_compare

    path = save(test_compare.Net(), "whole.pt")
    target = source(
        """
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        """
    )
    assert not compare_targets(Request(target, path)).findings


def test_a_dropped_tie_is_not_missing(source, save):
    """A safetensors file without the second name of a tied tensor is complete, and a note reports the tie."""
    target = source(
        "self.a = nn.Linear(2, 2, bias=False)\nself.b = nn.Linear(2, 2, bias=False)\nself.b.weight = self.a.weight"
    )
    path = save({"a.weight": torch.ones(2, 2)}, "net.safetensors")
    for sides in ((target, path), (path, target)):
        diff = compare_targets(Request(*sides))
        assert not diff.findings
        assert "tied-entry-left-out" in list_notes(diff)


def test_two_classes_are_compared_without_values(source):
    """Two classes are compared except for values and devices; a class and itself are identical."""
    first = source(NET_LINES)
    second = source(
        NET_LINES.replace("nn.Linear(4, 3)", "nn.Linear(4, 3, bias=False)") + "self.more = nn.Linear(1, 1)", "two.py"
    )
    assert not compare_targets(Request(first, first)).findings
    actual = map_changes(compare_targets(Request(first, second)))
    assert {name: change.status for name, change in actual.items()} == {
        "fc.bias": Status.REMOVED,
        "more.weight": Status.ADDED,
        "more.bias": Status.ADDED,
    }


def test_kind_and_requires_grad_of_two_classes_are_compared(source):
    """A parameter that became a buffer and a parameter that became frozen are differences."""
    first = source("self.w = nn.Parameter(torch.ones(2))\nself.v = nn.Parameter(torch.ones(2))")
    second = source('self.register_buffer("w", torch.ones(2))\nself.v = nn.Parameter(torch.ones(2), False)', "two.py")
    actual = map_changes(compare_targets(Request(first, second)))
    assert actual["w"].fields == (Field.KIND, Field.REQUIRES_GRAD)
    assert actual["v"].fields == (Field.REQUIRES_GRAD,)


def test_a_lazy_parameter_fits_any_shape(source, save):
    target = source("self.fc = nn.LazyLinear(2, bias=False)")
    diff = compare_targets(Request(target, save({"fc.weight": torch.ones(2, 7)}, "net.pt")))
    assert not diff.findings


@pytest.mark.parametrize("has_collection_names", [False, True], ids=["layers", "collections"])
def test_a_flat_model_is_compared_with_the_collections_of_flax(tmp_path, statecli, has_collection_names):
    """`params` and `batch_stats` are one model, by the names of its layers or with the names of its collections."""
    serialization = pytest.importorskip("flax.serialization")
    from safetensors import numpy

    collections = {
        "params": {
            "Dense_0": {"kernel": np.ones((2, 3), np.float32)},
            "BatchNorm_0": {"scale": np.ones(3, np.float32)},
        },
        "batch_stats": {"BatchNorm_0": {"mean": np.zeros(3, np.float32)}},
    }
    flat = {
        f"{collection}.{layer}.{name}" if has_collection_names else f"{layer}.{name}": value
        for collection, layers in collections.items()
        for layer, entries in layers.items()
        for name, value in entries.items()
    }
    (tmp_path / "a.msgpack").write_bytes(serialization.msgpack_serialize(collections))
    numpy.save_file(flat, tmp_path / "b.safetensors")
    for names in (("a.msgpack", "b.safetensors"), ("b.safetensors", "a.msgpack")):
        result = statecli("diff", *(tmp_path / name for name in names), "-f", "json")
        assert (result.code, result.json["summary"]["identical"]) == (0, 3)
        (message,) = (note["message"] for note in result.json["notes"] if note["name"] == "sections-paired")
        assert message.startswith("section 'model' of ")
        assert "is compared with these sections of " in message


SIZED_NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.a, self.b = torch.nn.Linear(d, d), torch.nn.Linear(d, d)
"""


def test_a_refused_load_is_one_problem_with_a_help_in_every_command(statecli, tmp_path, in_tmp_path):
    """A wrong size or a wrong class is one diagnostic, whatever the number of its tensors."""
    (tmp_path / "net.py").write_text(SIZED_NET)
    linear = torch.nn.Linear(8, 8)
    state = {f"{name}.{key}": value for name in "ab" for key, value in linear.state_dict().items()}
    torch.save(state, "sizes.pt")
    torch.save({"c.weight": torch.ones(2)}, "keys.pt")
    words = (
        ("diff", "{}", "net.py:Net", "--all"),
        ("audit", "{}", "--model", "net.py:Net"),
        ("inspect", "{}", "--model", "net.py:Net"),
    )
    for command in words:
        sizes = statecli(*(word.format("sizes.pt") for word in command), "-f", "table").out
        assert sizes.count("error[shape-mismatch]: 4 tensors have another shape") == 1, command
        assert "a.weight: [8, 8], but the class has [4, 4]" in sizes, command
        assert "help  build the class with the arguments of the saved model" in sizes, command
        keys = statecli(*(word.format("keys.pt") for word in command), "-f", "table").out
        assert keys.count("error[missing-entry]: 4 keys of net.py:Net are missing") == 1, command
        assert keys.count("error[unexpected-entry]: c.weight: unexpected") == 1, command
        assert "help  load with strict=False" in keys, command


def test_a_violated_option_is_one_problem(statecli, in_tmp_path):
    """The tensors are the evidence of the problem; a satisfied option says that the changes are allowed."""
    for path, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save(
            {f"{part}.w{n}": torch.full((2,), value * (n + 1)) for n in range(12) for part in ("enc", "dec")}, path
        )
    result = statecli("diff", "a.pt", "b.pt", "--must-not-change", "enc.*", "-f", "table")
    assert (result.code, result.out.count("error[")) == (1, 1)
    assert "error[frozen-changed]: 12 tensors differ, but match --must-not-change 'enc.*'" in result.out
    assert "1 error: exit status 1" in result.out
    output = statecli("diff", "a.pt", "b.pt", "--may-change", "dec.*", "-f", "table").out
    assert "error[outside-only]: 12 tensors differ, but do not match --may-change 'dec.*'" in output
    allowed_result = statecli("diff", "a.pt", "b.pt", "--may-change", "*", "-f", "table")
    assert (allowed_result.code, "24 of 24 parameters changed: all changes are allowed" in allowed_result.out) == (
        0,
        True,
    )
