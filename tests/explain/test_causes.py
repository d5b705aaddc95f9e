"""Each cause on a real file, with the printed lines executed, and a similar case without the cause."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.explain.align import align_names
from statecli.commands.explain.certainty import Matching, list_undecided_pairs
from statecli.commands.explain.wrong_value_risks import list_doubts_about_rest


def list_causes(document):
    return [evidence["cause"] for evidence in document["diagnosis"]["causes"]]


def rename_keys(state, change):
    return {change(name): tensor for name, tensor in state.items()}


def equals(loaded, expected):
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


RENAMES = {
    "prefix": (lambda name: f"module.{name}", ["prefix"]),
    "two prefixes": (lambda name: f"module._orig_mod.{name}", ["prefix", "prefix"]),
    "old names": (
        lambda name: name.replace("norm.weight", "norm.gamma").replace("norm.bias", "norm.beta"),
        ["renamed"],
    ),
    "module": (lambda name: name.replace("encoder.", "enc.layer."), ["renamed"]),
    "short words": (
        lambda name: name.replace(".query", ".q").replace(".key", ".k").replace(".value", ".v"),
        ["renamed"],
    ),
    "prefix and module": (lambda name: "net." + name.replace("embed.", "tokens."), ["prefix", "renamed"]),
}


@pytest.mark.parametrize("change", RENAMES)
def test_renamed_tensors_are_proved_and_loaded(desk, net, explain, run_lines, change):
    """The printed lines restore every value of the saved model."""
    rename, expected_causes = RENAMES[change]
    state = net["Net"]().state_dict()
    torch.save(rename_keys(state, rename), "other.pt")
    document = explain("net.py:Net", "other.pt")
    assert document["code"] == 1
    assert list_causes(document) == expected_causes
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


def test_a_prefix_of_two_modules_is_found_next_to_another_tensor(desk, net, explain, run_lines):
    """A tensor without the prefix does not hide it: every tensor of the class is restored."""
    state = net["Net"]().state_dict()
    torch.save({f"base_model.model.{name}": tensor for name, tensor in state.items()} | {"step": torch.ones(1)}, "a.pt")
    document = explain("net.py:Net", "a.pt")
    assert equals(run_lines(document["diagnosis"]["code"]), state)


@pytest.mark.parametrize("command", ["diff", "explain"])
def test_the_file_of_the_class_is_imported_once(desk, net, statecli, command):
    """The imported class is also built with other arguments, and named in the printed lines."""
    torch.save(net["Net"](width=16).state_dict(), "wide.pt")
    with (desk / "net.py").open("a") as file:
        file.write("\nwith open('imports.txt', 'a') as file:\n    file.write('one ')\n")
    assert "width 8 → 16" in statecli(command, "net.py:Net", "wide.pt").out
    assert (desk / "imports.txt").read_text() == "one "


def test_fitting_checkpoint_has_no_diagnosis(desk, net, explain):
    """The checkpoint has either of the two formats."""
    state = net["Net"]().state_dict()
    torch.save(state, "fits.pt")
    save_file(state, "fits.safetensors")
    for name in ("fits.pt", "fits.safetensors"):
        document = explain("net.py:Net", name)
        assert (document["code"], document["loads"], document["diagnosis"]) == (0, True, None)


def test_a_nested_state_dict_is_loaded_by_its_keys(desk, net, explain, run_lines):
    """The state_dict may be nested at any depth."""
    state = net["Net"]().state_dict()
    torch.save({"epoch": 1, "nets": {"generator": state}}, "train.pt")
    document = explain("net.py:Net", "train.pt")
    assert list_causes(document) == ["nested"]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


def test_a_flat_state_dict_of_a_module_called_model_is_not_nested(desk, net, explain):
    """In a flat state_dict, `model` is a prefix of the names."""
    torch.save({f"model.{name}": tensor for name, tensor in net["Net"]().state_dict().items()}, "flat.pt")
    assert list_causes(explain("net.py:Net", "flat.pt")) == ["prefix"]


def test_another_number_of_classes_is_an_argument(desk, net, explain, run_lines):
    """The argument changes from the class's value to the file's; alternative lines load all but the head."""
    state = net["Net"](num_classes=1000).state_dict()
    torch.save(state, "wide.pt")
    document = explain("net.py:Net", "wide.pt")
    assert list_causes(document) == ["width"]
    assert "num_classes 10 → 1000" in document["diagnosis"]["causes"][0]["message"]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)
    (other,) = document["alternatives"]
    assert other["initial"] == ["head.weight", "head.bias"]
    loaded = run_lines(other["code"])
    assert all(torch.equal(loaded[name], state[name]) for name in state if not name.startswith("head."))
    assert loaded["head.weight"].shape == (10, 8)


@pytest.mark.parametrize(("arguments", "cause"), [({"width": 16}, "width"), ({"layers": 5}, "depth")])
def test_sizes_of_the_whole_model_are_arguments(desk, net, explain, run_lines, arguments, cause):
    """The width of every layer, and the number of layers."""
    state = net["Net"](**arguments).state_dict()
    torch.save(state, "other.pt")
    document = explain("net.py:Net", "other.pt")
    assert list_causes(document) == [cause]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


def test_unexplained_head_keeps_its_initial_values(desk, net, explain, run_lines):
    """If no argument explains the head of the file, the lines name the tensors that are not loaded."""
    state = net["Net"]().state_dict()
    other = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    torch.save(other | {"decoder.weight": torch.ones(7, 3, 2)}, "other.pt")
    document = explain("net.py:Net", "other.pt")
    assert list_causes(document) == ["other-part", "other-part"]
    assert document["diagnosis"]["initial"] == ["head.weight", "head.bias"]
    assert document["diagnosis"]["unused"] == ["decoder.weight"]
    assert not document["diagnosis"]["strict"]
    loaded = run_lines(document["diagnosis"]["code"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in other.items())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_new_weight_norm_names_are_renamed_for_the_old_form(desk, net, explain, run_lines):
    """The near miss: torch itself accepts the older names for the newer class."""
    state = net["Normed"]().state_dict()
    torch.save(state, "new.pt")
    document = explain("net.py:Normed(False)", "new.pt")
    assert list_causes(document) == ["weight-norm"]
    assert document["diagnosis"]["proved"]
    loaded = run_lines(document["diagnosis"]["code"])
    assert torch.equal(loaded["conv.weight_v"], state["conv.parametrizations.weight.original1"])
    torch.save(net["Normed"](new=False).state_dict(), "old.pt")
    assert explain("net.py:Normed", "old.pt")["loads"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("function", ["weight_norm", "old weight_norm", "spectral_norm", "old spectral_norm", "prune"])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_part_of_a_computed_weight_is_not_loaded_as_the_weight(write_module, explain, function, in_file):
    """The part has the weight's shape and other values; the near miss is a class with the same function."""
    layer_code = {
        "weight_norm": "torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))",
        "old weight_norm": "torch.nn.utils.weight_norm(nn.Linear(8, 6))",
        "spectral_norm": "torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6))",
        "old spectral_norm": "torch.nn.utils.spectral_norm(nn.Linear(8, 6))",
        "prune": "torch.nn.utils.prune.l1_unstructured(nn.Linear(8, 6), 'weight', 0.5)",
    }[function]
    source = (
        "import torch, torch.nn.utils.prune\nfrom torch import nn\n\n\nclass Part(nn.Module):\n"
        "    def __init__(self, plain=False):\n        super().__init__()\n        self.first = nn.Linear(4, 8)\n"
        f"        self.out = nn.Linear(8, 6) if plain else {layer_code}\n        self.last = nn.Linear(6, 3)\n"
    )
    names = write_module("part.py", source)
    torch.save(names["Part"](plain=not in_file).state_dict(), "a.pt")
    document = explain(f"part.py:Part({in_file})", "a.pt")
    assert not document["diagnosis"]["proved"]
    assert list_causes(document)[0] == "weight-norm"
    assert document["diagnosis"]["code"] == []
    assert function.split()[-1] in document["diagnosis"]["causes"][0]["message"]
    assert explain(f"part.py:Part({not in_file})", "a.pt")["loads"]


def test_codes_are_not_loaded_as_weights(desk, net, explain):
    """torch copies integers into floating-point parameters silently."""
    state = net["Net"]().state_dict()
    torch.save({**state, "head.weight": (state["head.weight"] * 100).to(torch.int8)}, "codes.pt")
    document = explain("net.py:Net", "codes.pt")
    assert list_causes(document) == ["quantized"]
    assert not document["loads"]


@pytest.mark.parametrize(
    ("classes", "new", "old"),
    [
        ("self.qkv = nn.Linear(8, 24)", ("qkv",), {"q": (8, 8), "k": (8, 8), "v": (8, 8)}),
        ("self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)", ("q", "k"), {"qk": (16, 8)}),
    ],
)
def test_fused_projections_are_not_left_out(write_module, explain, classes, new, old):
    """Lines that drop the fused projections load, but are not proved."""
    source = (
        "import torch\nfrom torch import nn\n\n\nclass Part(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        self.embed = nn.Linear(4, 8)\n        {classes}\n"
        "        self.out = nn.Linear(8, 3)\n        self.last = nn.Linear(3, 5)\n"
    )
    names = write_module("part.py", source)
    state = {name: t for name, t in names["Part"]().state_dict().items() if name.split(".")[0] not in new}
    for name, shape in old.items():
        state |= {f"{name}.weight": torch.ones(shape), f"{name}.bias": torch.ones(shape[0])}
    torch.save(state, "a.pt")
    document = explain("part.py:Part", "a.pt")
    assert not document["diagnosis"]["proved"]
    assert "may contain the rows of" in document["diagnosis"]["proof"]


def test_kernels_of_tensorflow_are_in_doubt(desk, net, explain):
    """Kernels are the transposes of weights; a square kernel has the weight's shape."""
    state = rename_keys(net["Net"]().state_dict(), lambda name: name.replace("query.weight", "query.kernel"))
    torch.save(state, "tf.pt")
    document = explain("net.py:Net", "tf.pt")
    assert not document["diagnosis"]["proved"]
    assert "may be transposed" in document["diagnosis"]["proof"]


@pytest.mark.parametrize("embedding", ["embed", "wte", "shared"])
def test_missing_output_layer_may_be_tied(write_module, explain, embedding):
    """The class does not tie the output layer to the embedding, and the file has no output layer."""
    source = (
        "import torch\nfrom torch import nn\n\n\nclass Part(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        self.{embedding} = nn.Embedding(20, 4)\n"
        "        self.mid = nn.Linear(4, 4)\n        self.lm = nn.Linear(4, 20, bias=False)\n"
    )
    names = write_module("part.py", source)
    state = {name: t for name, t in names["Part"]().state_dict().items() if not name.startswith("lm.")}
    torch.save(state, "a.pt")
    document = explain("part.py:Part", "a.pt")
    assert not document["diagnosis"]["proved"]
    assert f"may be tied to {embedding}.weight" in document["diagnosis"]["proof"]


def test_names_of_tied_weights_are_filled(desk, net, explain, run_lines):
    """The missing name is filled from the name in the file."""
    state = net["Tied"]().state_dict()
    save_file({"embed.weight": state["embed.weight"]}, "tied.safetensors")
    document = explain("net.py:Tied", "tied.safetensors")
    assert list_causes(document) == ["tied"]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)
    save_file(
        {"embed.weight": state["embed.weight"], "lm_head.weight": state["embed.weight"].clone()}, "both.safetensors"
    )
    assert explain("net.py:Tied", "both.safetensors")["loads"]


def test_separate_tensors_of_tied_weights_are_not_proved(desk, net, explain):
    """The class keeps only the tensor that is loaded last, and statecli does not read the values."""
    state = net["Tied"]().state_dict()
    separate = state | {"lm_head.weight": state["embed.weight"] + 1}
    torch.save({f"module.{name}": tensor for name, tensor in separate.items()}, "separate.pt")
    diagnosis = explain("net.py:Tied", "separate.pt")["diagnosis"]
    assert not diagnosis["proved"]
    assert "share a tensor in the class, and have separate tensors in the file" in diagnosis["proof"]
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, "shared.pt")
    assert explain("net.py:Tied", "shared.pt")["diagnosis"]["proved"]


EXTRA = """
import torch
from torch import nn


class Part(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)
        self.scale = SCALE

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state
"""


@pytest.mark.parametrize("scale", ["torch.ones(3)", "{'scale': 1}"])
def test_extra_states_are_renamed_with_the_tensors(write_module, explain, run_lines, scale):
    """An extra state may be a tensor; without an extra state, the class keeps its own."""
    state = write_module("part.py", EXTRA.replace("SCALE", scale))["Part"]().state_dict()
    torch.save({f"module.{name}": value for name, value in state.items()}, "extra.pt")
    diagnosis = explain("part.py:Part", "extra.pt")["diagnosis"]
    assert (diagnosis["proved"], diagnosis["initial"]) == (True, [])
    run_lines(diagnosis["code"])
    torch.save({name: state[name] for name in ("weight", "bias")}, "without.pt")
    diagnosis = explain("part.py:Part", "without.pt")["diagnosis"]
    assert (diagnosis["loads"], diagnosis["initial"]) == (True, ["_extra_state"])
    assert diagnosis["warnings"][0].startswith("_extra_state is not loaded from the checkpoint")
    run_lines(diagnosis["code"])


def test_values_of_a_script_next_to_the_tensors_are_left_out(desk, net, explain, run_lines):
    """torch refuses a key that the class does not have, also if the value is a number."""
    state = net["Net"]().state_dict()
    torch.save({**state, "epoch": 3}, "epoch.pt")
    document = explain("net.py:Net", "epoch.pt")
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


def test_pairs_of_equal_candidates_are_not_proved(desk, net, explain):
    """A load accepts any order of query, key and value, and the names do not decide the order."""
    state = rename_keys(
        net["Net"]().state_dict(),
        lambda name: name.replace(".query", ".fa").replace(".key", ".fb").replace(".value", ".fc"),
    )
    torch.save(state, "other.pt")
    diagnosis = explain("net.py:Net", "other.pt")["diagnosis"]
    assert diagnosis["loads"]
    assert not diagnosis["proved"]
    assert "pairs of names: " in diagnosis["proof"]


def test_pairs_with_the_same_words_are_not_proved(write_module, explain):
    """Without `layer`, the names `mid_layer_bias` and `mid_mid_bias` have the same words."""
    source = (
        "from torch import nn\n\n\nclass Part(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.mid = nn.Module()\n        self.mid.layer = nn.Linear(4, 4)\n"
        "        self.mid.mid = nn.Linear(6, 4)\n"
    )
    state = write_module("part.py", source)["Part"]().state_dict()
    save_file({name.replace(".", "_"): tensor for name, tensor in state.items()}, "flat.safetensors")
    diagnosis = explain("part.py:Part", "flat.safetensors")["diagnosis"]
    assert not diagnosis["proved"]
    assert "pairs of names: " in diagnosis["proof"]


@pytest.mark.parametrize("wrap", [lambda state: [state, {"step": torch.ones(1)}], lambda state: {0: state, "epoch": 3}])
def test_a_state_dict_with_short_names_in_a_list_is_loaded_by_its_index(write_module, explain, run_lines, wrap):
    """The names have no dots, so that only the class shows which dict is the state_dict."""
    source = (
        "import torch\nfrom torch import nn\n\n\nclass Part(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.up_w, self.down_w = (nn.Parameter(torch.ones(n)) for n in (2, 3))\n"
    )
    state = write_module("part.py", source)["Part"]().state_dict()
    torch.save(wrap(dict(state)), "list.pt")
    document = explain("part.py:Part", "list.pt")
    assert list_causes(document) == ["nested"]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3)], {0: torch.ones(3)}])
def test_tensors_without_names_are_not_renamed(write_module, explain, value):
    """A file with a tensor, a list or numbered tensors has no state_dict, although a tensor has a fitting shape."""
    write_module("part.py", "from torch import nn\n\n\ndef make():\n    return nn.LayerNorm(3, bias=False)\n")
    torch.save(value, "value.pt")
    diagnosis = explain("part.py:make", "value.pt")["diagnosis"]
    assert "contains tensors without names, not a state_dict" in diagnosis["causes"][0]["message"]
    assert diagnosis["code"] == []


def test_an_entry_under_a_number_makes_the_code_impossible(desk, net, explain):
    """torch refuses a state_dict whose keys are not strings, and no printed name deletes such a key."""
    torch.save({**net["Net"]().state_dict(), 0: {"x": torch.ones(1)}}, "mixed.pt")
    document = explain("net.py:Net", "mixed.pt")
    assert not document["loads"]
    assert document["diagnosis"]["code"] == []


def test_an_average_is_named(desk, net, explain, run_lines):
    """The averaged weights are loaded only if the file has no other weights."""
    state = net["Net"]().state_dict()
    average = {name: tensor + 1 for name, tensor in state.items()}
    torch.save({"model_ema": rename_keys(average, "module.{}".format)}, "ema.pt")
    document = explain("net.py:Net", "ema.pt")
    assert list_causes(document) == ["nested", "averaged", "prefix"]
    assert equals(run_lines(document["diagnosis"]["code"]), average)
    torch.save({"model": state, "model_ema": average}, "both.pt")
    document = explain("net.py:Net", "both.pt")
    assert list_causes(document) == ["nested"]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


def test_a_pickled_module_is_not_proved(desk, net, explain):
    """Loading a pickled module runs code of the file."""
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), "module.pt")
    (desk / "seq.py").write_text("import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(2, 2))\n")
    diagnosis = explain("seq.py:make", "module.pt")["diagnosis"]
    assert diagnosis["causes"][0]["cause"] == "whole-module"
    assert not diagnosis["proved"]


def test_optimizer_file_is_named_without_lines(desk, net, explain):
    """A file with an optimizer's state is named as an optimizer."""
    model = net["Net"]()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "optimizer.pt")
    document = explain("net.py:Net", "optimizer.pt")
    assert list_causes(document) == ["optimizer"]
    assert document["diagnosis"]["code"] == []


@pytest.mark.parametrize(
    ("name", "cause"), [("qweight", "quantized"), ("weight.absmax", "quantized"), ("lora_A.weight", "adapter")]
)
def test_quantized_weights_and_adapters_are_named(desk, net, explain, name, cause):
    """Quantised weights and adapters are not renamed."""
    state = net["Net"]().state_dict()
    save_file(state | {f"encoder.0.query.{name}": torch.zeros(2, 2)}, "other.safetensors")
    document = explain("net.py:Net", "other.safetensors")
    assert list_causes(document) == [cause]
    assert not document["diagnosis"]["proved"]


def test_another_model_is_named_as_the_cause(desk, net, explain):
    """Tensors that happen to have matching shapes are not mapped to each other."""
    save_file({f"a.b{n}.c": torch.zeros(n + 1, 3) for n in range(9)}, "other.safetensors")
    assert list_causes(explain("net.py:Net", "other.safetensors")) == ["other-model"]


def test_a_class_of_plain_data_is_allowed(desk, net, explain, run_lines):
    """`args` of a training script are an argparse.Namespace, refused by weights_only=True."""
    import argparse

    state = net["Net"]().state_dict()
    torch.save({"model": state, "args": argparse.Namespace(lr=1.0)}, "train.pt")
    document = explain("net.py:Net", "train.pt")
    assert list_causes(document) == ["nested", "unsafe-file"]
    assert document["diagnosis"]["proved"]
    assert equals(run_lines(document["diagnosis"]["code"]), state)


def test_error_of_the_class_is_quoted(desk, net, explain, statecli):
    """The error of the class's own code is the answer, without a proof."""
    torch.save({f"module.{name}": tensor for name, tensor in net["Net"]().state_dict().items()}, "other.pt")
    result = statecli("explain", "net.py:Hooked", "other.pt")
    assert "version 1 is too old" in result.out + result.err
    assert "not certain: the load on the meta device failed" in result.out


def test_two_models_that_fit_are_not_proved(desk, net, explain):
    """A student and its teacher both fit."""
    state = net["Net"]().state_dict()
    torch.save({"student": state, "teacher": state}, "both.pt")
    diagnosis = explain("net.py:Net", "both.pt")["diagnosis"]
    assert diagnosis["loads"]
    assert not diagnosis["proved"]


def test_diff_shows_the_cause_instead_of_the_names(desk, net, statecli):
    """--all lists the names and the findings too."""
    state = rename_keys(net["Net"]().state_dict(), lambda name: name.replace("encoder.", "enc.layer."))
    torch.save(state, "other.pt")
    short, long = (statecli("diff", "net.py:Net", "other.pt", "-f", "table", *options) for options in ((), ("--all",)))
    assert short.code == long.code == 1
    assert "enc.layer → encoder" in short.out
    assert "missing-entry" not in short.out
    assert len(short.out.splitlines()) < 30
    assert "missing-entry" in long.out
    assert statecli("diff", "net.py:Net", "other.pt", "-f", "json").json["diagnosis"]["proved"]


@pytest.mark.parametrize("apart", [False, True])
def test_tensors_that_the_class_ties_and_the_file_separates_are_named(desk, statecli, apart):
    """A strict load accepts both tensors and keeps the last, so `loads as it is` alone would be misleading."""
    weight = torch.randn(20, 4)
    torch.save({"embed.weight": weight, "lm_head.weight": weight + 1 if apart else weight}, "a.pt")
    result = statecli("explain", "net.py:Tied", "a.pt")
    assert result.code == 0
    assert (
        "the class ties embed.weight and lm_head.weight and the checkpoint has a tensor for each" in result.out
    ) == apart
    if apart:
        command = result.out.splitlines()[0].partition("to compare the values, run: statecli ")[2].split()
        assert statecli(*command).code == 1


BUFFERS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head, self.frozen = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("positions", torch.arange(4.0))
"""

WEIGHT = "not loaded from the checkpoint: the loaded model has initial values in this weight"
RANDOM = "drawn at random by the constructor and {} not loaded from the checkpoint: the loaded model has other values"


@pytest.mark.parametrize(
    ("lacks", "warnings", "end"),
    [
        (["positions"], [], "the code below is tested"),
        (
            ["table", "positions"],
            [f"table is {RANDOM.format('is')} than the saved model"],
            ", positions at initial values",
        ),
        (
            ["head.bias"],
            [f"head.bias is a weight and {WEIGHT}"],
            "is tested, but leaves head.bias at initial values",
        ),
        (
            ["frozen.weight", "frozen.bias"],
            [f"frozen.weight, frozen.bias are {RANDOM.format('are')} than the saved model"],
            "at initial values",
        ),
    ],
)
def test_initial_values_of_the_loaded_model_are_warned_of(write_module, statecli, explain, lacks, warnings, end):
    """The verdict has the warnings too; a buffer with the same values in each build is left out."""
    names = write_module("buffers.py", BUFFERS)
    state = {name: tensor for name, tensor in names["Net"]().state_dict().items() if name not in lacks}
    torch.save({"model": state}, "older.pt")
    document = explain("buffers.py:Net", "older.pt")
    assert document["diagnosis"]["proved"]
    assert document["diagnosis"]["warnings"] == warnings
    assert document["verdict"].endswith(end)
    text = statecli("explain", "buffers.py:Net", "older.pt", "-f", "markdown").out
    assert all(f"warning: {warning}" in text for warning in warnings)


def test_a_random_buffer_of_a_large_model_is_not_compared(write_module, explain, monkeypatch):
    """The warning says that the buffer was not compared."""
    from statecli.commands.explain import initial_values

    monkeypatch.setattr(initial_values, "MAX_BUILT_ELEMENTS", 10)
    names = write_module("buffers.py", BUFFERS)
    state = names["Net"]().state_dict()
    del state["table"]
    torch.save({"model": state}, "older.pt")
    assert explain("buffers.py:Net", "older.pt")["diagnosis"]["warnings"] == [
        "table keeps initial values, and statecli did not check whether the constructor draws random values"
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_running_statistics_that_are_not_loaded_are_warned_of(desk, explain, version):
    """Each build has the same statistics; a state_dict of torch 0.4 does not have the number of batches."""
    (desk / "norm.py").write_text(
        "from torch.nn import BatchNorm1d, Linear, Sequential\n"
        "def make(): return Sequential(Linear(3, 3), BatchNorm1d(3))\n"
    )
    state = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).state_dict()
    lacks = [name for name in state if "running" in name or (version == 1 and "num_batches" in name)]
    metadata = state._metadata
    state = type(state)((name, tensor) for name, tensor in state.items() if name not in lacks)
    if version == 2:
        state._metadata = metadata
    torch.save(state, "older.pt")
    diagnosis = explain("norm.py:make", "older.pt")["diagnosis"]
    assert diagnosis["proved"]
    assert diagnosis["warnings"] == [
        "1.running_mean, 1.running_var are running statistics and not loaded from the checkpoint: in eval mode, the "
        "loaded model normalizes with the initial values"
    ]


def test_a_second_cause_is_not_the_tail_of_an_example(desk, net, statecli):
    """With a prefix and a renamed layer, the second cause has its own line."""
    torch.save({f"module.{k.replace('head', 'top')}": v for k, v in net["Net"]().state_dict().items()}, "both.pt")
    lines = [line.strip(" |") for line in statecli("explain", "net.py:Net", "both.pt", "-f", "table").out.splitlines()]
    assert any(line.startswith("1 name differs") or "names differ: " in line for line in lines), lines
    assert not any(line.startswith("example: ") and " · " in line for line in lines)


def test_modules_that_share_most_shapes_are_partners():
    """The order of the modules, and the names of their common layer, would pair each with the other."""
    stored = {"one.in": (4, 4), "one.out": (2, 4), "one.x": (3,), "two.in": (4, 4), "two.out": (6, 4), "two.x": (3,)}
    model = {"a.in": (4, 4), "a.out": (6, 4), "a.y": (5,), "b.in": (4, 4), "b.out": (2, 4), "b.y": (5,)}
    names = align_names(stored, model, has_order=True).names
    assert names == {"one.in": "b.in", "one.out": "b.out", "two.in": "a.in", "two.out": "a.out"}


def test_layers_keep_their_partners_if_a_layer_is_left_out():
    """The layer numbers shift, so the longest common sequence of shapes decides."""
    stored = {"net.0.weight": (4, 4), "net.1.weight": (8,), "net.2.weight": (4, 2), "net.3.weight": (2, 2)}
    model = {"net.0.weight": (4, 4), "net.1.weight": (4, 2), "net.2.weight": (2, 2)}
    alignment = align_names(stored, model, has_order=True)
    assert alignment.names == {
        "net.0.weight": "net.0.weight",
        "net.2.weight": "net.1.weight",
        "net.3.weight": "net.2.weight",
    }
    assert alignment.unexpected == ("net.1.weight",)


def test_names_in_the_order_of_the_class_have_a_cause(write_module, explain, statecli, run_lines):
    """No rule turns the names of the file into the names of the class, but the order of the tensors is the same."""
    source = (
        "from torch import nn\n\n\nclass Part(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.model = nn.Linear(4, 4)\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.out_proj = Part()\n"
    )
    weight, bias = write_module("part.py", source)["Net"]().state_dict().values()
    torch.save({"out_proj.weight.model": weight, "out_proj.weight.bias": bias}, "a.pt")
    document = explain("part.py:Net", "a.pt")
    assert list_causes(document) == ["other-names"]
    assert equals(
        run_lines(document["diagnosis"]["code"]), {"out_proj.model.weight": weight, "out_proj.model.bias": bias}
    )
    assert "2 names differ, and " in statecli("explain", "part.py:Net", "a.pt").out


def test_layers_keep_their_order_if_one_tensor_has_another_shape(desk, net, explain, run_lines):
    """Layers 1 and 2 are the layers 0 and 1 of the class, although the name of layer 1 is also a name of the class."""
    state = net["Net"](layers=2).state_dict()
    stored = {re.sub(r"encoder\.(\d)", lambda m: f"encoder.{int(m[1]) + 1}", name): t for name, t in state.items()}
    stored["encoder.1.norm.bias"] = torch.zeros(9)
    torch.save(stored, "a.pt")
    (desk / "two.py").write_text("from net import Net\n\n\ndef two():\n    return Net(layers=2)\n")
    diagnosis = explain("two.py:two", "a.pt")["diagnosis"]
    assert diagnosis["initial"] == ["encoder.0.norm.bias"]
    loaded = run_lines(diagnosis["code"])
    assert all(torch.equal(loaded[name], state[name]) for name in state if name != "encoder.0.norm.bias")


def test_pairs_of_layers_in_another_order_are_undecided():
    """The tensors of layer 1 keep their name, and layer 2 becomes layer 0."""
    for stem in ("net.", "layer"):
        pairs = {f"{stem}1.weight": f"{stem}1.weight", f"{stem}2.weight": f"{stem}0.weight"}
        shapes = dict.fromkeys([*pairs, *pairs.values()], (4, 4))
        matching = Matching(pairs, {}, {}, (), (), (), shapes, shapes)
        assert [pair.name for pair in list_undecided_pairs(matching)] == list(pairs)
        in_order = {f"{stem}0.weight": f"{stem}0.weight", f"{stem}2.weight": f"{stem}1.weight"}
        assert not list_undecided_pairs(Matching(in_order, {}, {}, (), (), (), shapes, shapes))


@pytest.mark.parametrize("unused", ["weight.top", "top.kernel", "top.weight_old", "old.weight"])
def test_an_unused_tensor_with_the_words_of_a_missing_tensor_is_in_doubt(unused):
    """The file has a tensor of the same shape whose name has the last word of the missing name."""
    shapes = {unused: (4, 4), "top.weight": (4, 4), "top.bias": (4,)}
    matching = Matching({"top.bias": "top.bias"}, {}, {}, (unused,), ("top.weight",), (), shapes, shapes)
    assert [f"{unused} may be the missing top.weight" in doubt for doubt in list_doubts_about_rest(matching)] == [True]


def test_an_unused_tensor_with_other_words_is_not_in_doubt():
    """The names share only a number and a module."""
    shapes = {"top.0.scale": (4,), "top.0.bias": (4,)}
    matching = Matching({}, {}, {}, ("top.0.scale",), ("top.0.bias",), (), shapes, shapes)
    assert not list(list_doubts_about_rest(matching))


@pytest.mark.parametrize(
    ("shape", "reason"), [((3, 4), "the dimensions are in another order"), ((4, 3), "both have the same shape")]
)
def test_an_unused_tensor_with_the_dimensions_of_a_missing_tensor_is_in_doubt(shape, reason):
    """A matrix may be transposed; a matrix with another dimension is not in doubt."""
    shapes = {"top.weight": (4, 3)}
    for stored, doubts in (
        (shape, [f"the unused tensor old.weight may be the missing top.weight: {reason}"]),
        ((4, 4), []),
    ):
        own_shapes = {"old.weight": stored}
        matching = Matching({}, {}, {}, ("old.weight",), ("top.weight",), (), own_shapes, shapes)
        assert list(list_doubts_about_rest(matching)) == doubts
