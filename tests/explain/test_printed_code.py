"""The printed lines, each form executed: a proved load restores every saved value."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def assert_proved_lines_load(document, run_lines, expected):
    """Check that the lines are proved, run without an error, and restore the values."""
    diagnosis = document["diagnosis"]
    assert diagnosis["proved"], diagnosis["proof"]
    loaded = run_lines(diagnosis["code"])
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"nets": {"generator": state}, "epoch": 3, "note": "text"},
        lambda state: {"module": state, "optimizer": {"step": torch.tensor(1.0)}, "epoch": 3},
    ],
)
def test_a_folder_of_torch_distributed_is_loaded(desk, net, explain, run_lines, wrap):
    """The state_dict has keys around it."""
    state = net["Net"]().state_dict()
    dcp.save(wrap(state), checkpoint_id="saved", no_dist=True)
    assert_proved_lines_load(explain("net.py:Net", "saved"), run_lines, state)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_torch_distributed_with_inner_dicts_is_not_proved(desk, net, explain):
    """The flat names of the folder do not show where the inner dict begins."""
    state = net["Net"]().state_dict()
    dcp.save({"model": {**state, "more": {"x": torch.ones(2)}}}, checkpoint_id="saved", no_dist=True)
    assert not explain("net.py:Net", "saved")["diagnosis"]["proved"]


CONFIGURED_NET = """
from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

import parts


class Plain:
    def __init__(self, width):
        self.width = width

    @classmethod
    def from_dict(cls, fields):
        return cls(**fields)


@dataclass
class Inner:
    classes: int = 4


@dataclass
class Cfg:
    width: int = 8
    head: Inner = field(default_factory=Inner)


class Net(nn.Module):
    def __init__(self, config: Cfg, act=None):
        super().__init__()
        self.a = nn.Linear(config.width, config.width)
        self.b = nn.Linear(config.width, config.head.classes)


class ByMethod(nn.Module):
    def __init__(self, depth: int, config: Plain):
        super().__init__()
        self.layers = nn.ModuleList(parts.Layer(config.width, config.width) for _ in range(depth))


class Outer:
    class Model(ByMethod):
        pass


instance = Net(Cfg(16, Inner(3)))
"""
#: The arguments of `statecli explain`, and the code that builds the saved model.
BUILDS = {
    "a configuration with an inner one": (["c.py:Net", "--config-json", "net.json"], "c.Net(c.Cfg(16, c.Inner(3)))"),
    "a configuration with from_dict": (["c.py:ByMethod(2)", "--config-json", "w.json"], "c.ByMethod(2, c.Plain(6))"),
    "classes in the arguments": (
        ["c.py:Net(Cfg(16, head=Inner(classes=3)), act=nn.GELU)"],
        "c.Net(c.Cfg(16, c.Inner(3)))",
    ),
    "an inner class": (["c.py:Outer.Model(1, config=Plain(4))"], "c.Outer.Model(1, c.Plain(4))"),
    "an instance": (["c.py:instance"], "c.instance"),
    "a file in a folder": (["sub/d.py:Net(Cfg(4))"], "c.Net(c.Cfg(4))"),
    "a file whose name is not a name of Python": (["my-net.py:Net(Cfg(4))"], "c.Net(c.Cfg(4))"),
    "a file with the name of a standard module": (["types.py:Net(Cfg(4))"], "c.Net(c.Cfg(4))"),
    "a file of a package": (["pack/net.py:Net(Cfg(4))"], "c.Net(c.Cfg(4))"),
    "a module": (["torch.nn:Bilinear(4, 3, 2)"], "torch.nn.Bilinear(4, 3, 2)"),
}


@pytest.mark.parametrize("build", BUILDS)
def test_printed_lines_build_the_class_like_statecli(desk, explain, run_lines, forked_python, build):
    """The class has a configuration, classes as arguments, or a file in another folder."""
    (model, *options), code = BUILDS[build]
    for folder in ("sub", "pack"):
        (desk / folder).mkdir()
    for file in ("c.py", "sub/d.py", "my-net.py"):
        (desk / file).write_text(CONFIGURED_NET)
    for file in ("parts.py", "sub/parts.py", "pack/parts.py"):
        (desk / file).write_text("from torch import nn\n\n\nclass Layer(nn.Linear):\n    pass\n")
    (desk / "pack/__init__.py").write_text("")
    (desk / "pack/net.py").write_text(CONFIGURED_NET.replace("import parts", "from . import parts"))
    (desk / "net.json").write_text('{"width": 16, "head": {"classes": 3}}')
    (desk / "w.json").write_text('{"width": 6}')
    process = forked_python(
        f"import c, torch\ntorch.save({{'module.' + k: v for k, v in ({code}).state_dict().items()}}, 'saved.pt')",
        cwd=desk,
    )
    assert process.returncode == 0, process.stderr
    if model.startswith("types.py"):
        (desk / "types.py").write_text(CONFIGURED_NET)
    saved = torch.load("saved.pt", weights_only=True)
    expected = {name.removeprefix("module."): tensor for name, tensor in saved.items()}
    assert_proved_lines_load(explain(model, "saved.pt", *options), run_lines, expected)


MATRICES = """
from torch import nn


class Net(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(layers))
        self.head = nn.Linear(8, 4)


class Square(Net):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)


class Conv(Net):
    def __init__(self):
        super().__init__()
        self.out = nn.Conv2d(3, 8, 5)
"""


def save_transposed(desk, forked_python, code):
    """Build a model from `code`, save the model with all weights transposed, and return its state_dict."""
    (desk / "m.py").write_text(MATRICES)
    process = forked_python(f"import m, torch\ntorch.save(m.{code}.state_dict(), 'whole.pt')", cwd=desk)
    assert process.returncode == 0, process.stderr
    state = torch.load("whole.pt", weights_only=True)
    reverse = {name: tensor.permute(*reversed(range(tensor.ndim))).contiguous() for name, tensor in state.items()}
    torch.save({f"module.{name}": tensor for name, tensor in reverse.items()}, "turned.pt")
    return state


@pytest.mark.parametrize("layers", [1, 3])
def test_transposed_weights_are_transposed_back(desk, explain, run_lines, forked_python, layers):
    """The lines list a few weights by name, and select many weights by shape."""
    state = save_transposed(desk, forked_python, f"Net({layers})")
    document = explain(f"m.py:Net({layers})", "turned.pt")
    assert [cause["cause"] for cause in document["diagnosis"]["causes"]] == ["prefix", "transposed"]
    assert_proved_lines_load(document, run_lines, state)


@pytest.mark.parametrize(
    ("model", "doubt"),
    [
        ("Square", "1 square weight, such as out.weight, may be transposed like"),
        ("Conv", "module.out.weight of shape [5, 5, 3, 8] is left out, and may be out.weight of shape [8, 3, 5, 5]"),
    ],
)
def test_weights_that_may_be_transposed_are_not_proved(desk, explain, forked_python, model, doubt):
    """A square weight fits both ways; the kernel of a convolution is left out."""
    save_transposed(desk, forked_python, f"{model}()")
    diagnosis = explain(f"m.py:{model}", "turned.pt")["diagnosis"]
    assert not diagnosis["proved"]
    assert doubt in diagnosis["proof"]


def save_shards(state, folder, save, suffix):
    """Save two shards with an index, as transformers names them, and another file that must not be loaded."""
    folder.mkdir()
    save_file({"extra": torch.zeros(10)}, folder / "consolidated.safetensors")
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = list(state)
    files = {name: f"{stem}-0000{1 + (n >= 4)}-of-00002.{suffix}" for n, name in enumerate(names)}
    for file in dict.fromkeys(files.values()):
        save({name: state[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def save_next_to_a_similar_name(state, folder):
    """Save two shards next to a file that every pattern of the shards matches."""
    save_shards(state, folder, save_file, "safetensors")
    save_file({"extra": torch.zeros(10)}, folder / "model-extra.safetensors")


def save_in_training_folder(state, folder):
    """Save the model next to the state of an optimizer."""
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")


FORMATS = {
    "torch": lambda state, path: torch.save(state, path),
    "nested": lambda state, path: torch.save({"epoch": 1, "state_dict": state}, path),
    "legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "saved.safetensors": lambda state, path: save_file(state, path),
    "safetensors.bin": lambda state, path: save_file(state, path),
    "shards of safetensors": lambda state, path: save_shards(state, path, save_file, "safetensors"),
    "shards of pickles": lambda state, path: save_shards(state, path, torch.save, "bin"),
    "shards next to a similar name": save_next_to_a_similar_name,
    "training folder": save_in_training_folder,
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    "nested dcp": lambda state, path: dcp.save({"model": state}, checkpoint_id=path, no_dist=True),
}
CHANGES = {
    "a prefix": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "a module": lambda state: {name.replace("encoder.", "enc.layer."): tensor for name, tensor in state.items()},
    "many modules": lambda state: {
        name.replace("encoder.", "enc.layer.").replace("embed.", "tokens.").replace(".query", ".q"): tensor
        for name, tensor in state.items()
    },
    "another order": lambda state: {f"net.{name}": state[name] for name in reversed(state)},
    "more tensors": lambda state: (
        state | {f"aux.{n}.weight": torch.ones(3, n + 1) for n in range(4)} | {"bn.extra": torch.ones(3)}
    ),
    "fewer tensors": lambda state: {name: state[name] for name in list(state)[:-2]},
}


#: Each format with several renames, and each change with three formats.
PAIRS = [(form, "many modules") for form in FORMATS]
PAIRS += [(form, change) for form in ("torch", "shards of safetensors", "nested dcp") for change in CHANGES]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "change"), dict.fromkeys(PAIRS))
def test_proved_lines_restore_the_values(desk, net, explain, monkeypatch, form, change):
    """Each format, and each step of a recipe; tensors that keep their initial values are listed."""
    state = net["Net"]().state_dict()
    FORMATS[form](CHANGES[change](state), desk / form)
    document = explain("net.py:Net", form)
    assert document["code"] == 1
    diagnosis = document["diagnosis"]
    assert diagnosis["proved"], diagnosis["proof"]
    monkeypatch.syspath_prepend(desk)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    names: dict[str, torch.nn.Module] = {}
    exec("\n".join(diagnosis["code"]), names)  # noqa: S102 - the printed lines
    loaded = names["model"].state_dict()
    assert bool(diagnosis["initial"]) == (change == "fewer tensors")
    assert all(torch.equal(loaded[name], state[name]) for name in state.keys() - set(diagnosis["initial"]))
    monkeypatch.delitem(sys.modules, "net")
