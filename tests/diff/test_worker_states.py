"""If both files are large, a second process reads AFTER, and its state arrives as if this process had read the file."""

from __future__ import annotations

import collections
import io
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

from statecli import formats
from statecli.commands.diff import read_targets
from statecli.commands.diff.request import Request
from statecli.commands.diff.run import compare_targets
from statecli.core.model_state import Evidence, Kind, ModelState
from statecli.targets.load import read_checkpoint
from statecli.values.stats import StatsTask, stats_batch
from statecli.workers import pool
from statecli.workers.executors import batch

from ..executors.conftest import state as every_dtype
from ..formats import test_megatron
from ..formats.test_format_equality import WRITERS, safetensors

#: Settings whose paths or values a plain map of paths does not tell apart.
SETTINGS = (
    {"id2label": {"0": "cat"}},
    {"x": {0: 3, 1: 4}},
    {"x": [3, 4]},
    {"x": (3, 4)},
    {"x": {"0": 3, "1": 4}},
    {"x": {"a.b": 1, True: 2, None: 3, (1, 2): 4}},
    {"x": collections.OrderedDict(a=1)},
    {"x": -0.0, "y": float("nan"), "z": float("-inf"), "s": 2**63, "v": 2**64, "u": -(2**70)},
    {"x": "\ue000", "y": b"\xff", "z": {1}, "s": "", "v": True},
    {"x": 0.0, "y": 1, "v": 1.0},
)
SHARD_LABELS = {"0": "cat", 1: "dog"}


def write_training_checkpoint(folder: Path) -> Path:
    """Write a training checkpoint with every dtype, an optimizer, and settings of all kinds."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    settings = {f"settings{n}": setting for n, setting in enumerate(SETTINGS)}
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, **settings}, folder / "a.pt"
    )
    return folder / "a.pt"


def write_dtypes(folder: Path) -> Path:
    """Write sparse, quantized, tied, strided and empty tensors."""
    torch.save(every_dtype(0), folder / "a.pt")
    return folder / "a.pt"


def write_module(folder: Path) -> Path:
    """Write a whole pickled module."""
    torch.save(torch.nn.Linear(2, 2), folder / "a.pt")
    return folder / "a.pt"


def write_arrays(folder: Path) -> Path:
    """Write numpy arrays whose bytes are inside the pickle."""
    torch.save({"a": numpy.arange(3.0), "b": numpy.arange(3, dtype=">i4"), "c": torch.ones(2)}, folder / "a.pt")
    return folder / "a.pt"


def write_megatron(folder: Path) -> Path:
    """Write a checkpoint of two ranks."""
    return test_megatron.write(folder / "run")


def write_shards(folder: Path, labels: object = SHARD_LABELS) -> Path:
    """Write shards with torch.save, each with settings."""
    names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    for n, name in enumerate(names):
        torch.save({f"w{n}": torch.ones(2), "labels": labels, "own": {n: "x"}}, folder / name)
    weight_map = {f"w{n}": name for n, name in enumerate(names)}
    (folder / "pytorch_model.bin.index.json").write_text(msgspec.json.encode({"weight_map": weight_map}).decode())
    return folder


ZOO = (
    *WRITERS,
    safetensors,
    write_training_checkpoint,
    write_dtypes,
    write_module,
    write_arrays,
    write_megatron,
    write_shards,
)


@pytest.fixture(params=ZOO, ids=lambda build: build.__name__)
def target(request, tmp_path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(request.param(tmp_path))


@pytest.fixture
def second_process(monkeypatch) -> None:
    """Let another process read the second of two files, however small the file is."""
    monkeypatch.setattr(read_targets, "MIN_BYTES_FOR_PROCESS", 0)
    monkeypatch.setattr(pool, "can_fork", lambda: True)


def test_every_state_survives_the_round_trip(target):
    """For each format, unpacking the worker's data gives the state that was read, with all fields."""
    expected = read_checkpoint(target)
    packed = read_targets.pack_checkpoint(target)
    assert read_targets.unpack_checkpoint(packed) == expected
    assert pickle.loads(pickle.dumps(expected)) == expected


def test_every_tensor_survives_a_batch_of_an_engine(target):
    """A worker of Dask, MPI or Ray receives the task itself."""
    tasks = tuple(StatsTask(tensor, tensor.ranges) for tensor in formats.read(target).tensors)
    call = batch.pack(stats_batch, None, tasks).getvalue()
    assert unpickle_tasks(call) == (None, tasks)


def unpickle_tasks(call: bytes) -> Any:
    """Return the tasks of a packed call as the worker unpickles them."""

    class Words(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert module == "statecli.workers.executors.batch"
            run = lambda build, function, packed: pickle.loads(pickle.loads(packed)[3])  # noqa: E731
            return {"Build": batch.Build, "run_in_worker": run}[name]

    return Words(io.BytesIO(call)).load()


@pytest.mark.parametrize("settings", SETTINGS, ids=ascii)
def test_a_copy_is_identical_with_and_without_a_second_process(settings, tmp_path, second_process):
    """A byte-for-byte copy differs in nothing."""
    torch.save({"w": torch.ones(2), **settings}, tmp_path / "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    paths = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    assert [compare_targets(Request(*paths, jobs=jobs)).scalars for jobs in (1, 2)] == [(), ()]


@pytest.mark.parametrize("container", [{0: 3, 1: 4}, {"0": 3, "1": 4}])
def test_a_list_and_a_dict_of_its_positions_differ(container, tmp_path, second_process):
    """Both read `x.0` and `x.1`; the containers and the keys are not the same."""
    torch.save({"w": torch.ones(2), "x": [3, 4]}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2), "x": container}, tmp_path / "b.pt")
    paths = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    first, second = (compare_targets(Request(*paths, jobs=jobs)).scalars for jobs in (1, 2))
    assert first == second != ()


def test_settings_of_shards_keep_their_types_of_keys(tmp_path):
    """In joined shards, a text `0` and the number 0 are two keys."""
    for name, labels in (("one", {"0": "cat"}), ("two", {0: "cat"}), ("three", {"0": "cat"})):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, labels)
    first_path, second_path, third_path = (str(tmp_path / name) for name in ("one", "two", "three"))
    assert [change.key for change in compare_targets(Request(first_path, second_path, jobs=1)).scalars] == [
        "labels.['0']",
        "labels.0",
    ]
    assert compare_targets(Request(first_path, third_path, jobs=1)).scalars == ()


def test_no_field_of_a_state_is_a_subclass_of_a_builtin():
    """Pickling drops the attributes of a subclass of dict, list or str; an enumeration is restored by its value."""
    built_in = (dict, list, tuple, str, int, float, bytes, frozenset)
    allowed = (*built_in, bool, Evidence, Kind)
    seen_types, open_types = set(), [ModelState]
    while open_types:
        kind = open_types.pop()
        for field in msgspec.structs.fields(kind):
            for inner in list_types(field.type) - seen_types:
                seen_types.add(inner)
                if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                    open_types.append(inner)
                elif isinstance(inner, type) and issubclass(inner, built_in):
                    assert inner in allowed, (kind, field.name, inner)
    assert {str, int, float, bool, Evidence, Kind} <= seen_types


def list_types(annotation: Any) -> set[Any]:
    """Return an annotation and all annotations in its brackets."""
    types = {annotation}
    for inner in getattr(annotation, "__args__", ()):
        types |= list_types(inner)
    return types
