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


def of(name: str, to: str | None = None):
    """Read a sample; return its rows by name and its state."""
    target = _spec(SAMPLES / f"{name}.py")
    built = build(parse_spec(target))
    state = move(built, target, to) if to else read(built, target)
    return {t.fqn: t for t in state.tensors}, state


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_each_sample_says_what_to_try_and_what_it_shows(path):
    """The docstring has a command for the sample's own file and the lesson, and the class can be read."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert f"sample_models/{path.name}:" in text
    assert "Shows:" in text
    assert of(path.stem)[0]


def test_net():
    """A parameter and a buffer follow; the plain tensor stays, with its line and its fix."""
    actual, _ = of("net", "meta")
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


def test_frozen_and_grad_buffer():
    """A frozen parameter is a parameter, a buffer a buffer, whether it requires grad or not."""
    actual, _ = of("frozen")
    assert (actual["scale"].kind, actual["scale"].requires_grad) == (Kind.PARAMETER, False)
    assert (actual["offset"].kind, actual["offset"].requires_grad) == (Kind.BUFFER, False)
    row = of("grad_buffer")[0]["scale"]
    assert (row.kind, row.requires_grad) == (Kind.BUFFER, True)


def test_batchnorm():
    """Running statistics are persistent buffers, the count an integer."""
    actual, _ = of("batchnorm")
    buffers = {name for name, t in actual.items() if t.kind is Kind.BUFFER and t.persistent and t.saved}
    assert buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert actual["norm.num_batches_tracked"].dtype == "int64"


def test_positions():
    """The table moves and is not saved."""
    row = of("positions", "meta")[0]["positions"]
    assert (row.persistent, row.saved, row.after.followed) == (False, False, True)


def test_anchors():
    """Three tensors in a list do not follow a move."""
    actual, _ = of("anchors", "meta")
    assert [name for name, t in actual.items() if not t.after.followed] == ["anchors[0]", "anchors[1]", "anchors[2]"]


def test_plain_lists():
    """Only `out` is registered; the fix for each container is a container of the same kind."""
    actual, _ = of("plain_lists")
    assert {name for name, t in actual.items() if t.kind is Kind.PARAMETER} == {"out.weight", "out.bias"}
    assert "nn.ParameterList(" in actual["scales[0]"].fix
    assert "nn.ModuleList(" in actual["blocks[0].weight"].fix
    assert "nn.ModuleDict(" in actual["heads['a'].weight"].fix


def test_tied():
    """Each of the two tensors names the other."""
    actual, _ = of("tied")
    assert actual["embed.weight"].tied_to == ("head.weight",)


def test_none_parameter():
    """The reserved name is an oddity, not a tensor."""
    actual, state = of("none_parameter")
    assert set(actual) == {"weight"}
    assert [(o.name, o.fqn) for o in state.oddities] == [("none-parameter", "bias")]


# --- the checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the folder with the files that the script writes."""
    out = tmp_path_factory.mktemp("checkpoints")
    run_python([SAMPLES / "make_checkpoints.py", out], check=True)
    return out


def _listed() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("_make_checkpoints", SAMPLES / "make_checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MODELS


def test_every_model_is_written():
    """The script lists every model of the folder."""
    assert sorted(_listed()) == [path.stem for path in MODELS]


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
