"""Build models from source text, and read live models as the command line does."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from statecli.core.model_state import ModelState, TensorInfo

torch = pytest.importorskip("torch")


@pytest.fixture
def write(in_tmp_path) -> Callable[..., str]:
    """Return a function that writes a model file into the current directory and returns the spec of its class."""
    numbers = itertools.count()

    def write_source(source: str, call: str = "Net", name: str | None = None) -> str:
        name = name or f"net{next(numbers)}.py"
        header = "import torch\nfrom torch import nn\n"
        Path(name).write_text(header + textwrap.dedent(source), "utf-8")
        return f"{name}:{call}"

    return write_source


@pytest.fixture
def inspect(write: Callable[..., str]) -> Callable[..., ModelState]:
    """Return a function that reads the class defined in a source text."""
    from statecli.live.build import build
    from statecli.live.model_reader import move, read
    from statecli.live.spec import parse_spec

    def inspect_source(source: str, call: str = "Net", *, to: str | None = None, **options: object) -> ModelState:
        target = write(source, call)
        spec = parse_spec(target)
        assert spec is not None
        built = build(spec, **options)
        return read(built, target) if to is None else move(built, target, to)

    return inspect_source


@pytest.fixture
def read_live() -> Callable[..., ModelState]:
    """Return a function that reads the model of a factory, without a file."""
    from statecli.live.assignment_lines import Origins
    from statecli.live.built_model import BuiltModel
    from statecli.live.model_reader import read
    from statecli.live.spec import ModelSpec

    def read_module(build_module: Callable[[], object]) -> ModelState:
        spec = ModelSpec("live:Net", "live", False, "Net")
        return read(BuiltModel(spec, build_module(), Origins(), "cpu", True, build_module), "live:Net")

    return read_module


@pytest.fixture
def rows() -> Callable[[ModelState], dict[str, TensorInfo]]:
    """Return the rows of a state by name; fail if two rows have the same name."""

    def map_by_name(state: ModelState) -> dict[str, TensorInfo]:
        infos_by_fqn = {info.fqn: info for info in state.tensors}
        assert len(infos_by_fqn) == len(state.tensors)
        return infos_by_fqn

    return map_by_name
