"""Checkpoints for the browser."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from safetensors.torch import save_file

from statecli.browse.screen_state import ScreenModel
from statecli.commands.inspect.quantized_rows import list_rows_by_part
from statecli.commands.inspect.run import Request, inspect


def build_tensors(layers=4, size=8):
    """A small transformer: bfloat16 weights, float32 norms."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    tensors = {"model.embed.weight": draw(32, size)}
    for n in range(layers):
        for name in ("q_proj", "v_proj"):
            tensors[f"model.layers.{n}.attn.{name}.weight"] = draw(size, size)
        tensors[f"model.layers.{n}.norm.weight"] = torch.ones(size)
    tensors["lm_head.weight"] = draw(32, size)
    tensors["lm_head.bias"] = torch.arange(32.0)
    return tensors


def open_model(path):
    """The model of the screen for a file."""
    inspection = inspect(Request(str(path)))
    return ScreenModel(inspection.state, list_rows_by_part(inspection.weights))


@pytest.fixture(scope="session", autouse=True)
def _parse_styles_once():
    """Cache the parsed styles of textual: each of 123 screens parses the same styles of all widgets, twice."""
    if importlib.util.find_spec("textual") is None:
        yield
        return
    from textual.css.stylesheet import Stylesheet

    parse, cached = Stylesheet._parse_rules, {}

    def parse_once(self, css, read_from, **options):
        key = (css, read_from, *options.items(), *self._variables.items())
        if key not in cached:
            cached[key] = parse(self, css, read_from, **options)
        return cached[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture
def first(tmp_path):
    """A checkpoint."""
    path = tmp_path / "first.safetensors"
    save_file(build_tensors(), path)
    return path


@pytest.fixture
def second(tmp_path):
    """The first file with a changed layer, a NaN, a missing and a new tensor."""
    tensors = build_tensors()
    tensors["model.layers.2.attn.q_proj.weight"] *= 2
    tensors["model.layers.3.norm.weight"][1] = float("nan")
    del tensors["lm_head.bias"]
    tensors["added"] = torch.zeros(3)
    path = tmp_path / "second.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture
def model(first):
    """The model of the screen for the first checkpoint."""
    return open_model(first)
