"""Every sample model shows its lesson, and its docstring names a command that works."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from statecli.core.model_state import Kind
from statecli.live.build import build
from statecli.live.model_reader import move, read
from statecli.live.spec import parse_spec

from ..forked_python import run_python

SAMPLES = Path(__file__).parents[2] / "sample_models"
#: The other samples write files and have no model.
MODELS = sorted(path for path in SAMPLES.glob("*.py") if not path.stem.endswith(("_checkpoints", "train")))


def _spec(path: Path) -> str:
    """Return the spec in the docstring's command."""
    match = re.search(r"statecli inspect sample_models/(\S+)", ast.get_docstring(ast.parse(path.read_text())))
    assert match is not None, path.name
    return str(SAMPLES / match[1])


def read_sample(name: str, to: str | None = None):
    """Read a sample; return its rows by name and its state."""
    target = _spec(SAMPLES / f"{name}.py")
    built = build(parse_spec(target))
    state = move(built, target, to) if to else read(built, target)
    return {t.fqn: t for t in state.tensors}, state


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_docstring_of_each_sample_has_a_command_and_a_lesson(path):
    """The docstring has a command for the sample's own file and the lesson, and the class can be read."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert f"sample_models/{path.name}:" in text
    assert "Shows:" in text
    assert read_sample(path.stem)[0]


def test_plain_tensor_of_net_does_not_move():
    """A parameter and a buffer follow; the plain tensor stays, with its line and its fix."""
    actual, _ = read_sample("net", "meta")
    assert {name: t.kind.value for name, t in actual.items()} == {
        "param": "parameter",
        "mybuffer1": "buffer",
        "table": "unregistered",
    }
    assert [t.elements for t in actual.values()] == [9, 4, 9]
    assert {name for name, t in actual.items() if not t.after.followed} == {"table"}
    assert actual["table"].fix == (
        'self.register_buffer("table", torch.randn(size, size))\n'
        "# older checkpoints lack table; load_state_dict(state, strict=False) keeps initial values"
    )


def test_requires_grad_does_not_change_the_kind():
    """A frozen parameter is a parameter, a buffer a buffer, whether it requires grad or not."""
    actual, _ = read_sample("frozen")
    assert (actual["scale"].kind, actual["scale"].requires_grad) == (Kind.PARAMETER, False)
    assert (actual["offset"].kind, actual["offset"].requires_grad) == (Kind.BUFFER, False)
    row = read_sample("grad_buffer")[0]["scale"]
    assert (row.kind, row.requires_grad) == (Kind.BUFFER, True)


def test_running_statistics_are_persistent_buffers():
    """Running statistics are persistent buffers, the count an integer."""
    actual, _ = read_sample("batchnorm")
    buffers = {name for name, t in actual.items() if t.kind is Kind.BUFFER and t.persistent and t.saved}
    assert buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert actual["norm.num_batches_tracked"].dtype == "int64"


def test_non_persistent_table_moves_and_is_not_saved():
    """The table moves and is not saved."""
    row = read_sample("positions", "meta")[0]["positions"]
    assert (row.persistent, row.saved, row.after.followed) == (False, False, True)


def test_tensors_in_a_list_do_not_move():
    """Three tensors in a list do not follow a move."""
    actual, _ = read_sample("anchors", "meta")
    assert [name for name, t in actual.items() if not t.after.followed] == ["anchors[0]", "anchors[1]", "anchors[2]"]


def test_fix_of_a_plain_container_is_an_nn_container():
    """Only `out` is registered; the fix for each container is a container of the same kind."""
    actual, _ = read_sample("plain_lists")
    assert {name for name, t in actual.items() if t.kind is Kind.PARAMETER} == {"out.weight", "out.bias"}
    assert "nn.ParameterList(" in actual["scales[0]"].fix
    assert "nn.ModuleList(" in actual["blocks[0].weight"].fix
    assert "nn.ModuleDict(" in actual["heads['a'].weight"].fix


def test_tied_weight_names_the_other_weight():
    """Each of the two tensors names the other."""
    actual, _ = read_sample("tied")
    assert actual["embed.weight"].tied_to == ("head.weight",)
    assert actual["head.weight"].tied_to == ("embed.weight",)


def test_parameter_set_to_none_is_an_oddity():
    """The reserved name is an oddity, not a tensor."""
    actual, state = read_sample("none_parameter")
    assert set(actual) == {"weight"}
    assert [(o.name, o.fqn) for o in state.oddities] == [("none-parameter", "bias")]


# --- the checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the folder with the files that the script writes."""
    out = tmp_path_factory.mktemp("checkpoints")
    run_python([SAMPLES / "make_checkpoints.py", out], check=True)
    return out


def _load_models() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("_make_checkpoints", SAMPLES / "make_checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MODELS


def test_every_model_is_written():
    """The script lists every model of the folder."""
    assert sorted(_load_models()) == [path.stem for path in MODELS]


@pytest.mark.parametrize("name", [path.stem for path in MODELS])
def test_every_format_holds_the_same_entries(checkpoints, name):
    """The zip, the old stream, the training checkpoint, the shards and safetensors agree."""
    folder = checkpoints / name
    zipped = torch.load(folder / "state_dict.pt", weights_only=True)
    assert torch.load(folder / "legacy.pt", weights_only=True).keys() == zipped.keys()
    assert torch.load(folder / "train.ckpt", weights_only=True)["model"].keys() == zipped.keys()
    bins = [torch.load(path, weights_only=True) for path in sorted((folder / "sharded_bin").glob("*.bin"))]
    assert [key for part in bins for key in part] == list(zipped)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys()) | (set(file.metadata() or {}) - {"format"})
    assert names == set(zipped)
    assert (folder / "sharded" / "model.safetensors.index.json").is_file()
