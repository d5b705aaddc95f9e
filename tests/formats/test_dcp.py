"""Folders of torch.distributed.checkpoint: four ranks' saves, compared with torch's own loader, and invalid folders."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import os
import pickle
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from statecli import formats
from statecli.core import parameter_or_buffer
from statecli.core.errors import UnreadableError
from statecli.core.model_state import Evidence, Kind
from statecli.file_scan import scan
from statecli.formats import dcp as reader
from statecli.formats.shared import dcp_ranks as _dcp_ranks
from statecli.formats.shared.dcp_metadata import NEEDED_NAMES, parse_for_scan, parse_metadata
from statecli.formats.shared.tiling import Chunk, find_fault
from statecli.storage import files
from statecli.values.read import read_all_values

from ..forked_python import run_python
from . import dcp_ranks
from .attacks import Called, build, build_pickle, call_function, global_name, legacy, records, state_dict, tensor, text

CLASSES = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Path:
    """Folder with the checkpoints of four processes that saved together."""
    folder = tmp_path_factory.mktemp("ranks")
    run_python(["-W", "ignore", dcp_ranks.__file__, folder], check=True, timeout=120)
    return folder


@pytest.fixture
def mixed_folder(ranks, tmp_path) -> Path:
    """Copy of the folder `mixed`, which a test may damage."""
    return Path(shutil.copytree(ranks / "mixed", tmp_path / "mixed"))


def values(path: Path | str) -> dict[str, np.ndarray]:
    """Return the values of every tensor."""
    return {t.fqn: read_all_values(t.data).reshape(t.shape) for t in formats.read(str(path)).tensors}


def load_metadata(folder: Path) -> Metadata:
    """Return the metadata as torch reads it."""
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite_metadata(folder: Path, change: Any) -> None:
    """Write `.metadata` again after `change(metadata)`, as torch would."""
    metadata = load_metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# Valid folders.


@pytest.mark.parametrize("name", ["mixed", "fsdp2", "flat"])
def test_checkpoint_equals_dcp_to_torch_save(name, ranks, tmp_path, statecli):
    """Names, shapes, dtypes, values and settings equal the output of dcp_to_torch_save, which loads each chunk."""
    dcp_to_torch_save(ranks / name, tmp_path / "whole.pt")
    for pair in ((ranks / name, tmp_path / "whole.pt"), (tmp_path / "whole.pt", ranks / name)):
        result = statecli("diff", *map(str, pair), "-f", "json")
        assert result.code == 0, result.out + result.err
        assert result.json["summary"]["identical"] == len(formats.read(str(ranks / name)).tensors)
        assert not result.json.get("metadata")


def test_note_describes_each_placement(ranks):
    """Sharded by rows, by columns, in blocks, by the last of three dimensions; replicated; on fewer ranks."""
    state = formats.read(str(ranks / "mixed"))
    assert [(t.fqn, t.dtype, t.shape, t.note) for t in state.tensors] == [
        ("rows", "float32", (10, 3), "4 chunks, cut along dimension 0"),
        ("columns", "float32", (4, 9), "3 chunks, cut along dimension 1"),
        ("blocks", "float32", (5, 7), "4 chunks, cut along dimensions 0 and 1"),
        ("everywhere", "float32", (2, 3), None),
        ("fewer than ranks", "float32", (2, 3), "2 chunks, cut along dimension 0"),
        ("last", "bfloat16", (2, 3, 6), "3 chunks, cut along dimension 2"),
        ("empty", "float32", (0, 3), None),
        ("scalar", "float32", (), None),
        ("half", "float16", (3,), None),
        ("images", "float32", (2, 3, 4, 4), None),
        ("phases", "complex64", (3,), None),
        ("nested['list'][0]", "float32", (2,), None),
        ("nested['list'][1]", "float32", (3,), None),
    ]
    scalars = {"nested.epoch": 3, "nested.words.0": "a", "nested.words.1": "b", "nested.none": None, "nested.lr": 0.5}
    assert (state.format, state.sections, dict(state.metadata.values)) == ("dcp", ("model",), scalars)
    assert {(t.device, t.requires_grad, t.persistent, t.storage) for t in state.tensors} == {(None,) * 4}
    assert state.oddities == ()
    assert np.array_equal(values(ranks / "mixed")["blocks"], np.arange(35.0).reshape(5, 7))


def test_fsdp2_folder_has_model_and_optimizer_sections(ranks):
    """Sections of FSDP2; the names in param_groups identify all parameters and the parameter of each moment."""
    state = parameter_or_buffer.classify_tensors(formats.read(str(ranks / "fsdp2")))
    assert state.sections == ("model", "optimizer", "extra")
    facts = {t.fqn: (t.kind, t.evidence) for t in state.tensors if t.section == "model"}
    assert {fqn for fqn, kind in facts.items() if kind == (Kind.PARAMETER, Evidence.OPTIMIZER)} == {
        fqn for fqn, _ in dcp_ranks.model().named_parameters()
    }
    assert facts["1.running_mean"][0] is Kind.BUFFER
    moments = {t.fqn: t.belongs_to for t in state.tensors if t.section == "optimizer"}
    assert len(moments) == 18
    assert moments["state['2.bias']['exp_avg']"] == "2.bias"
    assert {t.kind for t in state.tensors if t.section == "extra"} == {Kind.OTHER}
    assert state.metadata.values["epoch"] == 4
    assert state.metadata.values["optimizer.param_groups.0.lr"] == 0.25
    assert state.metadata.values["optimizer.param_groups.0.betas.1"] == 0.999


def test_flattened_optimizer_keeps_its_moments(ranks):
    """`flatten_optimizer_state_dict` puts names into keys: the moments still belong to the optimizer."""
    state = parameter_or_buffer.classify_tensors(formats.read(str(ranks / "flat")))
    facts = {t.fqn: (t.kind, t.evidence) for t in state.tensors}
    assert facts["state.0.weight.exp_avg"] == (Kind.OPTIMIZER, Evidence.OPTIMIZER)
    assert facts["0.weight"] == (Kind.PARAMETER, Evidence.OPTIMIZER)
    assert facts["1.running_var"][0] is Kind.BUFFER
    assert state.metadata.values["optimizer.param_groups.2.bias.lr"] == 0.25


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters()),
    "groups": lambda net: torch.optim.SGD([{"params": [w]} for w in net.parameters()], lr=0.5, momentum=0.5),
    "named": lambda net: torch.optim.AdamW(net.named_parameters()),
    "without a state": lambda net: torch.optim.SGD(net.named_parameters(), lr=0.5),
}


@pytest.mark.parametrize(
    ("kind", "has_model"),
    [*((kind, True) for kind in OPTIMIZERS), ("adamw", False), ("groups", False)],
    ids=[*OPTIMIZERS, "adamw alone", "groups alone"],
)
def test_numbered_parameters_equal_those_of_torch_save(kind, has_model, tmp_path, statecli):
    """The planner makes text of every key; keys that param_groups lists as integers are integers again."""
    net = dcp_ranks.model()
    optimizer = OPTIMIZERS[kind](net)
    net(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    checkpoint = (
        {"model": net.state_dict(), "optimizer": optimizer.state_dict()} if has_model else optimizer.state_dict()
    )
    torch.save(checkpoint, tmp_path / "raw.pt")
    dcp.save(checkpoint, checkpoint_id=tmp_path / "raw", no_dist=True)
    result = statecli("diff", str(tmp_path / "raw.pt"), str(tmp_path / "raw"), "-f", "json")
    assert (result.code, result.json["metadata"]) == (0, [])
    states = [parameter_or_buffer.classify_tensors(formats.read(str(tmp_path / name))) for name in ("raw.pt", "raw")]
    first, second = [{(t.fqn, t.kind, t.evidence, t.belongs_to) for t in state.tensors} for state in states]
    assert first == second


def test_keys_that_are_text_stay_text(tmp_path):
    """Digits are a name where the optimizer's groups list names, and outside an optimizer."""
    group = {"params": ["0", "1"], "lr": 0.5}
    checkpoint = {"state": {"0": {"exp_avg": torch.ones(2)}}, "param_groups": [group], "more": {"7": torch.ones(1)}}
    dcp.save(checkpoint, checkpoint_id=tmp_path, no_dist=True)
    assert formats.read(str(tmp_path)).tensors[0].fqn == "state['0']['exp_avg']"


def test_entries_next_to_an_optimizer_are_the_model(tmp_path):
    """torchtitan saves the model's entries in the same dict as the optimizer: the entries are the model."""
    net = dcp_ranks.model()
    moments = {f"state.{fqn}.exp_avg": torch.zeros_like(w) for fqn, w in net.named_parameters()}
    dcp.save({**net.state_dict(), "optimizer": moments, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    state = parameter_or_buffer.classify_tensors(formats.read(str(tmp_path)))
    assert state.sections == ("model", "optimizer")
    facts = {t.fqn: (t.kind, t.evidence) for t in state.tensors}
    assert facts["2.weight"] == (Kind.PARAMETER, Evidence.OPTIMIZER)
    assert facts["1.running_mean"][0] is Kind.BUFFER


def test_ranks_saved_without_collectives_are_one_model(ranks):
    """Without collectives each rank has its own metadata; all ranks together are the model."""
    state = formats.read(str(ranks / "apart"))
    assert [oddity.name for oddity in state.oddities] == ["rank-metadata"]
    expected_values = values(ranks / "fsdp2")
    actual_values = values(ranks / "apart")
    assert list(actual_values) == list(dcp_ranks.model().state_dict())
    assert all(np.array_equal(actual_values[fqn], expected_values[fqn]) for fqn in actual_values)


def test_metadata_parsed_by_the_scan_is_kept_for_a_command(tmp_path):
    """The reader does not parse the metadata again, and the next command finds nothing in memory."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    parsed = parse_for_scan(data, ".metadata")
    assert parse_metadata(data, ".metadata") is parsed
    parsed = parse_for_scan(data, ".metadata")
    files.forget_command()
    assert parse_metadata(data, ".metadata") is not parsed


def test_missing_independent_rank_leaves_holes(ranks, tmp_path, statecli):
    """A missing rank is a hole in the tensors that all ranks share; tensors saved whole by other ranks are read."""
    folder = shutil.copytree(ranks / "apart", tmp_path / "apart")
    (folder / "__1.metadata").unlink()
    (folder / "__1_0.distcp").unlink()
    result = statecli("inspect", str(folder))
    assert result.code == 2
    assert f"statecli: {folder}: 0.weight and 5 more tensors: its 2 chunks cover " in result.err
    notes = {t.fqn: t.note for t in formats.read(str(folder)).tensors}
    reason = "__1.metadata is missing; copy the folder again"
    assert notes["0.weight"] == f"cannot be read: its 2 chunks cover 21 of its 35 elements; {reason}"
    assert result.out.count("1.running_mean") == 1
    assert f"statecli did not read the data of a rank: {reason}" in result.out
    assert statecli("audit", str(folder), "--select", "missing-shard", "-f", "json").json["summary"]["error"] == 1


@pytest.mark.parametrize("rank", [0, 3])
def test_missing_rank_metadata_is_reported(rank, ranks, tmp_path):
    """The rank's data file shows that the rank saved; the first rank and the last rank are reported as missing too."""
    folder = shutil.copytree(ranks / "apart", tmp_path / "apart")
    (folder / f"__{rank}.metadata").unlink()
    state = formats.read(str(folder))
    message = f"statecli did not read the data of a rank: __{rank}.metadata is missing; copy the folder again"
    assert [oddity.message for oddity in state.oddities if oddity.name != "rank-metadata"] == [message]


@pytest.mark.parametrize("data", [b"", b"\x80\x02}q"])
def test_damaged_rank_metadata_is_reported(data, ranks, tmp_path):
    """The other ranks' data is read, and the damage is reported; without readable metadata the folder is refused."""
    folder = shutil.copytree(ranks / "apart", tmp_path / "apart")
    (folder / "__1.metadata").write_bytes(data)
    state = formats.read(str(folder))
    assert state.tensors[0].shape == (5, 7)
    assert "__1.metadata is " in (state.tensors[0].damage or "")
    assert [oddity.name for oddity in state.oddities] == ["missing-rank", "rank-metadata"]
    for path in folder.glob("*.metadata"):
        path.write_bytes(data)
    with pytest.raises(UnreadableError, match=r"__0\.metadata is "):
        formats.read(str(folder))


def save_without_collectives(folder: Path, *ranks: dict[str, Any]) -> None:
    """Save the state of each of two ranks without collectives."""
    for number, state in enumerate(ranks):
        dcp.save(state, checkpoint_id=folder / "other", no_dist=True)
        (folder / "other" / "__0_0.distcp").rename(folder / f"__{number}_0.distcp")
        data = (folder / "other" / ".metadata").read_bytes()
        (folder / f"__{number}.metadata").write_bytes(data.replace(b"__0_0.distcp", b"__%d_0.distcp" % number))
    shutil.rmtree(folder / "other")


def test_values_that_differ_between_ranks_are_named(tmp_path, monkeypatch):
    """Each rank saves a plain tensor whole; the names of values that differ between ranks are reported."""
    first = {"w": torch.ones(3), "v": torch.ones(2), "rank": 0}
    save_without_collectives(tmp_path, first, {"w": torch.full((3,), 2.0), "v": torch.ones(2), "rank": 1})
    prefix = "saved by 2 ranks without communication, so each rank has its own metadata file"
    (oddity,) = formats.read(str(tmp_path)).oddities
    assert (
        oddity.message
        == f"{prefix}; these values differ between ranks, and statecli shows the values of the first rank: rank, w"
    )
    assert values(tmp_path)["w"].tolist() == [1, 1, 1]
    monkeypatch.setattr(_dcp_ranks, "MAX_COMPARED_BYTES", 2600)
    (oddity,) = formats.read(str(tmp_path)).oddities
    assert oddity.message.endswith("; these values were not compared between ranks: w, v")


def test_tensor_with_two_shapes_is_unreadable(tmp_path):
    """The tensor is unreadable, with neither shape."""
    save_without_collectives(
        tmp_path, {"w": torch.ones(3), "v": torch.ones(2)}, {"w": torch.ones(4), "v": torch.ones(2)}
    )
    actual = {t.fqn: t for t in formats.read(str(tmp_path)).tensors}
    reason = "the tensor differs between two ranks: float32 [3] and float32 [4]; save the checkpoint again"
    assert (actual["w"].shape, actual["w"].note) == (None, f"cannot be read: {reason}")
    assert actual["v"].damage is None


def test_save_without_a_process_group_is_read(tmp_path):
    """`no_dist` and an async save write the same files as a process group with a single rank."""
    weights = {"w": torch.arange(6.0).reshape(2, 3), "step": 7}
    dcp.save(weights, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp.async_save(weights, checkpoint_id=tmp_path / "two", no_dist=True).result()
    for name in ("one", "two"):
        assert np.array_equal(values(tmp_path / name)["w"], np.arange(6.0).reshape(2, 3))
        assert formats.read(str(tmp_path / name)).metadata.values == {"step": 7}


@pytest.mark.parametrize("threads", [1, 3])
def test_several_files_for_each_rank_are_read(threads, tmp_path):
    """`single_file_per_rank=False` and `thread_count` write several files for each rank."""
    weights = {f"w{n}": torch.full((4,), float(n)) for n in range(5)}
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=threads > 1, thread_count=threads)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) == {1: 5, 3: 3}[threads]
    assert {fqn: list(actual) for fqn, actual in values(tmp_path).items()} == {f"w{n}": [n] * 4 for n in range(5)}


def test_tensors_of_an_unflattened_state_dict_are_read(tmp_path):
    """The planner then writes no paths, and a nested dict is a single value: its tensors are read from its archive."""
    net, weights = torch.nn.Linear(3, 2), {"scale": torch.ones(2)}
    state = {"model": net.state_dict(), "w": torch.zeros(3), "more": weights}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    actual_values = values(tmp_path)
    assert np.array_equal(actual_values["weight"], net.weight.detach().numpy())
    assert sorted(actual_values) == ["bias", "scale", "w", "weight"]


def test_metadata_before_torch_2_3_is_read(mixed_folder):
    """torch before 2.3 wrote neither version nor storage_meta, and its writers no transforms."""

    def remove_version(metadata: Any) -> None:
        del metadata.__dict__["version"], metadata.__dict__["storage_meta"]

    before = values(mixed_folder)
    rewrite_metadata(mixed_folder, remove_version)
    assert {fqn: tensor.shape for fqn, tensor in values(mixed_folder).items()} == {
        fqn: a.shape for fqn, a in before.items()
    }


def test_extra_states_are_read_before_other_values(tmp_path, monkeypatch):
    """A module may unpickle an extra state, so extra states beyond the budget are rows that no audit passes."""
    state = {"w": torch.ones(2), **{f"a{n}": n for n in range(3)}, **{f"z{n}._extra_state": n for n in range(3)}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(reader, "MAX_ITEMS", 1)
    state = formats.read(str(tmp_path))
    assert [oddity.message for oddity in state.oddities] == [
        "statecli did not read 2 of 6 values that are not tensors: a1, a2"
    ]
    monkeypatch.setattr(reader, "MAX_EXTRA_STATES", 1)
    damaged = [tensor.fqn for tensor in formats.read(str(tmp_path)).tensors if tensor.damage]
    assert damaged == ["z2._extra_state"]


def test_compressed_tensor_has_no_values(mixed_folder, statecli):
    """A tensor written through zstd is listed, with the reason why its values cannot be read."""

    def mark_compressed(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn in ("rows", "nested.epoch"):
                info.transform_descriptors = ("stream.zstd",)

    rewrite_metadata(mixed_folder, mark_compressed)
    state = formats.read(str(mixed_folder))
    rows = next(t for t in state.tensors if t.fqn == "rows")
    assert (rows.shape, rows.data) == ((10, 3), None)
    assert rows.note == (
        "statecli cannot read the values: torch.distributed.checkpoint stored them with the transform "
        "stream.zstd, which statecli cannot reverse"
    )
    assert state.oddities[0].message == "statecli did not read 1 of 4 values that are not tensors: nested.epoch"
    assert statecli("diff", str(mixed_folder), str(mixed_folder)).code == 2


def test_pickled_dtensor_has_its_global_shape(ranks):
    """A DTensor pickled by a rank has its global shape, and a note with the local shape and placement."""
    state = formats.read(str(ranks / "rank0.pt"))
    assert state.tensors[0].shape == (10, 3)
    assert state.tensors[0].note == "DTensor: local shape [3, 3], Shard(0)"


def test_safetensors_shards_equal_the_distributed_checkpoint(ranks, tmp_path, statecli):
    """The shards of HuggingFaceStorageWriter record the start of their pieces: together they are the model."""
    state = formats.read(str(ranks / "shards"))
    expected_values, actual = values(ranks / "apart"), values(ranks / "shards")
    assert state.format == "dcp-safetensors"
    assert {t.fqn: t.note for t in state.tensors}["0.weight"] == "3 chunks"
    assert sorted(actual) == sorted(expected_values)
    assert all(np.array_equal(actual[fqn], expected_values[fqn]) for fqn in actual)
    assert statecli("diff", str(ranks / "shards"), str(ranks / "apart")).code == 0
    assert statecli("audit", str(ranks / "shards"), "--values").code == 0


def test_missing_safetensors_shard_leaves_holes(ranks, tmp_path, statecli):
    """A missing shard in the middle is a hole in each tensor that has a piece in the shard."""
    folder = shutil.copytree(ranks / "shards", tmp_path / "shards")
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    result = statecli("inspect", str(folder))
    assert result.code == 2
    notes = {t.fqn: t.note for t in formats.read(str(folder)).tensors}
    fault = "its 2 chunks cover 21 of its 35 elements"
    assert notes["0.weight"] == f"cannot be read: {fault}; copy the folder again, or save the checkpoint again"


# Refused folders.


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_single_file_of_the_folder_is_refused(name, mixed_folder, line):
    """A single file of the folder is not a checkpoint: the message asks for the folder."""
    message = f"is one file of a torch.distributed.checkpoint folder; give the folder instead: {mixed_folder}"
    assert line(mixed_folder / name) == message


def test_missing_rank_file_is_named_in_one_line(mixed_folder, ranks, statecli):
    """One line names the missing file, or two missing files, and counts files and tensors. All shapes are shown, and
    the rest is compared.
    """
    (mixed_folder / "__2_0.distcp").unlink()
    result = statecli("inspect", str(mixed_folder))
    message = "__2_0.distcp is missing: 3 of the 4 files that .metadata lists exist"
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert (
        f": {message}; this file contains data of 8 of the 17 tensors and other values; copy the file again"
        in result.err
    )
    facts = {t.fqn: (t.dtype, t.shape, t.elements, t.nbytes) for t in formats.read(str(ranks / "mixed")).tensors}
    state = formats.read(str(mixed_folder))
    assert {t.fqn: (t.dtype, t.shape, t.elements, t.nbytes) for t in state.tensors} == facts
    result = statecli("diff", str(ranks / "mixed"), str(mixed_folder), "-f", "json")
    damaged_names = [t.fqn for t in state.tensors if t.damage]
    assert (result.code, result.json["summary"]["identical"]) == (2, len(facts) - len(damaged_names))
    result = statecli("audit", str(mixed_folder), "-f", "json")
    assert result.code == 2
    assert "missing-shard" in {finding["rule"] for finding in result.json["findings"]}
    (mixed_folder / "__1_0.distcp").unlink()
    result = statecli("inspect", str(mixed_folder))
    said = "__1_0.distcp, __2_0.distcp are missing: 2 of the 4 files that .metadata lists exist"
    counts = "these files contain data of 15 of the 17 tensors and other values; copy the files again"
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert f": {said}; {counts}\n" in result.err


def test_metadata_without_rank_files_keeps_all_shapes(mixed_folder, statecli):
    """The metadata still has every shape; only the tensor without elements has values."""
    for path in mixed_folder.glob("*.distcp"):
        path.unlink()
    result = statecli("inspect", str(mixed_folder))
    assert result.code == 2
    assert "0 of the 4 files that .metadata lists exist" in result.err
    tensors = {t.fqn: t for t in formats.read(str(mixed_folder)).tensors}
    assert tensors["images"].shape == (2, 3, 4, 4)
    assert [name for name, tensor in tensors.items() if not tensor.damage] == ["empty"]


def test_unlisted_rank_file_is_reported(mixed_folder):
    """A rank's file that no metadata lists is reported, unless empty because the rank had nothing to save."""
    (mixed_folder / "__8_0.distcp").write_bytes(b"")
    assert formats.read(str(mixed_folder)).oddities == ()
    shutil.copy(mixed_folder / "__0_0.distcp", mixed_folder / "__9_0.distcp")
    (oddity,) = formats.read(str(mixed_folder)).oddities
    assert (
        oddity.message == "no metadata file lists these files, so statecli did not read them: __9_0.distcp; "
        "the files may be from another save"
    )


@pytest.mark.parametrize("data", [b"", b"\x80"])
def test_incomplete_metadata_is_refused(data, mixed_folder, line):
    """`.metadata` is written last, and the process may stop before the end."""
    (mixed_folder / ".metadata").write_bytes(data)
    message_end = (
        "the save did not finish, or the copy is incomplete; copy the folder again, or save the checkpoint again"
    )
    assert line(mixed_folder).startswith(".metadata is ")
    assert line(mixed_folder).endswith(f": {message_end}")


def test_folder_without_metadata_is_refused(mixed_folder, line):
    """Only `.metadata` gives the places of the tensors, so that nothing can be read without the file."""
    (mixed_folder / ".metadata").unlink()
    assert line(mixed_folder) == (
        "is a torch.distributed.checkpoint folder without .metadata: the save did not finish, or the copy failed"
    )


def test_truncated_rank_file_is_reported_in_one_line(mixed_folder, statecli):
    """One line reports all tensors after the truncation; the other tensors are read."""
    os.truncate(mixed_folder / "__1_0.distcp", 100)
    result = statecli("inspect", str(mixed_folder))
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert " more tensors: __1_0.distcp is truncated: .metadata needs " in line
    assert "the file has 100; copy the file again" in line
    assert "float16" in result.out


def move_chunk(fqn: str, chunk: int, start: list[int], shape: list[int]) -> Any:
    """Return a change of metadata: a chunk of a tensor, and its storage entry, get another offset and shape."""

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[fqn].chunks
        old = MetadataIndex(fqn, chunks[chunk].offsets)
        chunks[chunk] = ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
        metadata.storage_data[MetadataIndex(fqn, start)] = metadata.storage_data.pop(old)

    return change


INCONSISTENT_CHUNKS: dict[str, tuple[Any, str]] = {
    "overlap": (move_chunk("rows", 1, [2, 0], [4, 3]), "rows: two chunks overlap: [0:3, 0:3] and [2:6, 0:3]"),
    "hole": (move_chunk("rows", 1, [4, 0], [2, 3]), "rows: its 4 chunks cover 27 of its 30 elements"),
    "a hole at the end": (move_chunk("rows", 3, [9, 0], [1, 2]), "rows: its 4 chunks cover 29 of its 30 elements"),
    "outside": (move_chunk("rows", 3, [9, 0], [2, 3]), "rows: a chunk covers [9:11, 0:3], outside the shape [10, 3]"),
    "dimensions": (
        move_chunk("rows", 3, [9], [1]),
        "rows: a chunk has 1 sizes and 1 offsets, but the tensor has 2 dimensions: [10, 3]",
    ),
    "blocks that overlap": (
        move_chunk("blocks", 3, [2, 4], [3, 3]),
        "blocks: two chunks overlap: [0:3, 4:7] and [2:5, 4:7]",
    ),
    "a value nowhere": (
        lambda metadata: metadata.storage_data.pop(MetadataIndex("nested.epoch")),
        "nested['epoch']: .metadata records 0 positions of this value; expected 1",
    ),
    "stored nowhere": (
        lambda metadata: metadata.storage_data.pop(MetadataIndex("rows", [3, 0])),
        "rows: .metadata does not record the position of the chunk with shape [3, 3] at offset [3, 0]",
    ),
}


@pytest.mark.parametrize("case", INCONSISTENT_CHUNKS)
def test_inconsistent_chunks_are_reported_in_one_line(case, mixed_folder, statecli):
    """One line has the tensor and the boxes; the tensor's shape and all other tensors are still read."""
    change, message = INCONSISTENT_CHUNKS[case]
    facts = {t.fqn: (t.dtype, t.shape, t.elements, t.nbytes) for t in formats.read(str(mixed_folder)).tensors}
    rewrite_metadata(mixed_folder, change)
    actual = {t.fqn: (t.dtype, t.shape, t.elements, t.nbytes) for t in formats.read(str(mixed_folder)).tensors}
    assert {fqn: actual[fqn] for fqn in facts} == facts
    result = statecli("inspect", str(mixed_folder))
    assert (result.code, result.err) == (2, f"statecli: {mixed_folder}: {message}; save the checkpoint again\n")
    assert "columns" in result.out
    assert statecli("audit", str(mixed_folder)).code == 2


def break_offset(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("rows", [3, 0])].offset = -1


INVALID_METADATA: dict[str, tuple[Any, str]] = {
    "version": (
        lambda metadata: setattr(metadata, "version", "2.0.0"),
        ".metadata has version '2.0.0', which a newer torch wrote; statecli knows only 1.0.0; "
        "update statecli, or save the checkpoint again with an older torch",
    ),
    "no version": (
        lambda metadata: setattr(metadata, "version", 7),
        ".metadata has version 7, but torch writes version 1.0.0; save the checkpoint again",
    ),
    "a version that is a list": (
        lambda metadata: setattr(metadata, "version", [1]),
        ".metadata has a version of an unknown type, but torch writes version 1.0.0; save the checkpoint again",
    ),
    "no place": (
        break_offset,
        "rows: .metadata does not record the position of this tensor; save the checkpoint again",
    ),
    "no storage": (
        lambda metadata: setattr(metadata, "storage_data", None),
        ".metadata has no storage_data, so the positions of the tensors are unknown; save the checkpoint again",
    ),
    "no tensors": (
        lambda metadata: setattr(metadata, "state_dict_metadata", 3),
        ".metadata has no state_dict_metadata with a name for each tensor; save the checkpoint again",
    ),
}


@pytest.mark.parametrize("case", INVALID_METADATA)
def test_invalid_metadata_is_refused(case, mixed_folder, line):
    """The folder is refused with one line and exit status 2."""
    change, message = INVALID_METADATA[case]
    rewrite_metadata(mixed_folder, change)
    assert line(mixed_folder) == message


def test_pickle_without_metadata_is_refused(mixed_folder, line):
    """The folder has rank files, but its `.metadata` is another pickle."""
    (mixed_folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert line(mixed_folder) == (
        ".metadata does not contain metadata of torch.distributed.checkpoint; "
        "copy the folder again, or save the checkpoint again"
    )


OUTSIDE_PATHS = ("../x.distcp", "/etc/passwd", "C:x.distcp", "s3://b/x", "~", "..", "")


@pytest.mark.parametrize("name", OUTSIDE_PATHS, ids=[repr(name) for name in OUTSIDE_PATHS])
def test_path_outside_the_folder_is_not_followed(name, mixed_folder, statecli):
    """The path is not followed; tensors in other files are read."""
    place = MetadataIndex("rows", [3, 0])
    rewrite_metadata(mixed_folder, lambda metadata: setattr(metadata.storage_data[place], "relative_path", name))
    result = statecli("inspect", str(mixed_folder))
    reason = f".metadata names {name!r}, which is not a plain file name; this file contains data of 1 of the"
    message = f"rows: {reason} 17 tensors and other values; do not load this checkpoint; save the checkpoint again"
    assert (result.code, result.err) == (2, f"statecli: {mixed_folder}: {message}\n")
    assert [t.fqn for t in formats.read(str(mixed_folder)).tensors if t.damage] == ["rows"]


def test_named_pipe_is_reported_and_not_opened(mixed_folder, statecli):
    """Opening a named pipe would block the reader."""
    (mixed_folder / "__0_0.distcp").unlink()
    os.mkfifo(mixed_folder / "__0_0.distcp")
    result = statecli("inspect", str(mixed_folder))
    assert result.code == 2
    assert ": __0_0.distcp is a named pipe, not a regular file; " in result.err
    assert any(t.damage is None for t in formats.read(str(mixed_folder)).tensors)


def test_chunk_that_contradicts_the_metadata_is_found(tmp_path, statecli):
    """The content of a chunk is compared with the metadata when the values are read."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(3), buffer)
    (tmp_path / "__0_0.distcp").write_bytes(buffer.getvalue())
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [chunk])
    places = {MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", 0, len(buffer.getvalue()))}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": tensor}, None, places)))
    assert statecli("inspect", str(tmp_path)).code == 0
    result = statecli("inspect", str(tmp_path), "--stats")
    assert "the index records float32 [4], but the array at byte 0 has float32 [3]" in result.out + result.err


# Pickles that would run code.


def test_call_in_metadata_is_reported_and_not_run(mixed_folder, tmp_path, statecli):
    """torch unpickles `.metadata`; statecli runs nothing from the file, and inspect and audit name the call."""
    rewrite_metadata(
        mixed_folder,
        lambda metadata: metadata.planner_data.update(x=Called(os.system, (f"touch {tmp_path / 'harm'}",))),
    )
    result = statecli("inspect", str(mixed_folder))
    assert result.code == 1
    assert "unsafe-global" in result.out
    result = statecli("audit", str(mixed_folder))
    assert result.code == 1
    assert "unsafe-global" in result.out
    assert not (tmp_path / "harm").exists()


def test_lists_of_huge_length_are_refused(mixed_folder, statecli):
    """torch makes a list of any length that an index in the paths of `.metadata` requires."""
    for path in (("a", 10**11), ["a", "b", 10**11], ("a",) * 300 + (10**11,)):
        rewrite_metadata(mixed_folder, lambda metadata, path=path: metadata.planner_data.update({"a.b": path}))
        result = statecli("audit", str(mixed_folder))
        assert result.code == 2
        assert "describes lists of 100,000,000,00" in result.out
    rewrite_metadata(mixed_folder, lambda metadata: metadata.planner_data.update({"a.b": ("a", 1000)}))
    assert statecli("audit", str(mixed_folder)).code != 2


LOOKALIKE_NAMES = (
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.run", "main"),
    ("torch.serialization", "load"),
    ("torch", "load"),
    ("evil", "RunPath"),
    ("evil", "Size"),
    ("pathlib", "os.system"),
)


@pytest.mark.parametrize("names", LOOKALIKE_NAMES, ids=[".".join(names) for names in LOOKALIKE_NAMES])
def test_lookalike_names_in_metadata_are_reported(names, mixed_folder, statecli):
    """Only the data classes that make up a `.metadata` are exempt, each by its full name."""
    data = (mixed_folder / ".metadata").read_bytes()
    assert data[:2] == b"\x80\x04"
    (mixed_folder / ".metadata").write_bytes(
        b"\x80\x04" + data[11:-1] + call_function(global_name(*names), text("x")) + b"0."
    )
    (oddity,) = formats.read(str(mixed_folder)).oddities
    prefix = "torch.distributed.checkpoint unpickles .metadata; this imports or calls a function or class"
    assert (oddity.name, oddity.message) == ("foreign-globals", f"{prefix}: {'.'.join(names)}")
    assert statecli("audit", str(mixed_folder)).code == 1


def test_allowed_names_of_metadata_are_data_classes():
    """Each name that exists in this torch is a class of data."""
    assert {f"{class_.__module__}.{class_.__qualname__}" for class_ in (*CLASSES, _StorageInfo)} <= NEEDED_NAMES
    splits = [name.rpartition(".") for name in NEEDED_NAMES]
    loaded_values = {
        last: vars(sys.modules[module])[last] for module, _, last in splits if hasattr(sys.modules.get(module), last)
    }
    functions = {last for last, value in loaded_values.items() if not isinstance(value, (type, torch.dtype))}
    assert functions == {"_get_layout"}


def test_call_in_a_rank_file_is_reported_and_not_run(tmp_path, statecli):
    """A value in a rank file calls a function: nothing runs, and inspect and audit report the call."""
    dcp.save(
        {"w": torch.ones(2), "epoch": Called(os.system, (f"touch {tmp_path / 'harm'}",))},
        checkpoint_id=tmp_path / "x",
        no_dist=True,
    )
    for command in ("inspect", "audit"):
        result = statecli(command, str(tmp_path / "x"))
        assert result.code == 1
        assert "unsafe-global" in result.out
    assert not (tmp_path / "harm").exists()


def test_every_pickle_is_scanned(ranks):
    """The scan covers `.metadata`, and a pickle for each item in each rank's file."""
    items = len(load_metadata(ranks / "mixed").storage_data)
    findings = scan.scan_pickles(str(ranks / "mixed"))
    assert len([finding for finding in findings if finding.where.endswith("data.pkl")]) == items
    assert len([finding for finding in findings if Path(finding.place.path).name == ".metadata"]) == 1
    assert not [finding for finding in findings if finding.unread]


# Archives that `.metadata` locates, wherever they lie.


CALL = call_function(global_name("os", "system"), text("touch HARM"))
HIDDEN_PICKLES = {
    "an archive": build(records(build_pickle(CALL))),
    "a legacy file": legacy(state_dict(w=tensor(), x=CALL), [("0", 4, bytes(16))]),
    "one pickle": build_pickle(CALL),
}


def add_value(folder: Path, file: str, offset: int, length: int, transforms: list[str] | None = None) -> None:
    """Add a value `step` to `.metadata`, at this place of the file."""

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["step"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("step")] = _StorageInfo(file, offset, length, transforms)
        metadata.planner_data["step"] = ("step",)

    rewrite_metadata(folder, change)


def save_tensor_with_data(folder: Path, data: bytes, **other_entries: Any) -> int:
    """Save a tensor whose elements are zeros and `data`; return the offset of `data` in the file."""
    w = torch.zeros(9000, dtype=torch.uint8)
    w[5000 : 5000 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dcp.save({"w": w, **other_entries}, checkpoint_id=folder, no_dist=True)
    return (folder / "__0_0.distcp").read_bytes().index(data)


@pytest.mark.parametrize("kind", HIDDEN_PICKLES)
def test_a_value_hidden_in_a_tensor_is_scanned(kind, tmp_path, statecli):
    """torch loads the elements of a tensor as an archive where `.metadata` says so; statecli only scans them."""
    data = HIDDEN_PICKLES[kind]
    add_value(tmp_path / "x", "__0_0.distcp", save_tensor_with_data(tmp_path / "x", data, x=torch.ones(3)), len(data))
    result = statecli("audit", str(tmp_path / "x"), "-f", "plain")
    assert result.code == 2
    assert "loading the file calls os.system" in result.out
    assert "1 error; 1 failed" in result.out
    assert "two values overlap in __0_0.distcp" in statecli("inspect", str(tmp_path / "x")).err


def test_a_value_hidden_in_the_shards_of_a_training_is_scanned(tmp_path, statecli, in_tmp_path):
    """The shards are in a training's folder, as saved by FSDP. The harm is real: torch unpickles the value."""
    shards, data = tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0", HIDDEN_PICKLES["an archive"]
    add_value(shards, "__0_0.distcp", save_tensor_with_data(shards, data), len(data))
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    result = statecli("audit", str(tmp_path / "checkpoint-5"), "-f", "plain")
    assert result.code == 2
    assert "loading the file calls os.system" in result.out
    assert not (tmp_path / "HARM").exists()
    dcp.load({"w": torch.zeros(9000, dtype=torch.uint8), "step": 0}, checkpoint_id=shards, no_dist=True)
    assert (tmp_path / "HARM").exists()


def test_pickle_bytes_in_a_tensor_are_clean(tmp_path, statecli):
    """`.metadata` gives no value at the place of the bytes."""
    save_tensor_with_data(tmp_path / "x", HIDDEN_PICKLES["an archive"])
    assert statecli("audit", str(tmp_path / "x")).code == 0


def test_value_in_a_file_of_any_name_is_scanned(tmp_path, statecli):
    """The scan does not depend on the name of the file."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    (tmp_path / "x" / "notes.txt").write_bytes(b"notes" + HIDDEN_PICKLES["an archive"])
    add_value(tmp_path / "x", "notes.txt", 5, len(HIDDEN_PICKLES["an archive"]))
    result = statecli("audit", str(tmp_path / "x"))
    assert result.code == 2  # the file is an archive after other bytes as well
    assert "loading the file calls os.system" in result.out


def test_two_names_for_one_archive_are_read(tmp_path, statecli):
    """Both names have all bytes of the archive, so that neither name hides bytes."""
    dcp.save({"w": torch.ones(2), "step": 3}, checkpoint_id=tmp_path / "x", no_dist=True)

    def change(metadata: Any) -> None:
        position = {index.fqn: index for index in metadata.storage_data}
        metadata.state_dict_metadata["v"] = metadata.state_dict_metadata["w"]
        metadata.storage_data[MetadataIndex("v", torch.Size([0]))] = metadata.storage_data[position["w"]]
        metadata.planner_data["v"] = ("v",)

    rewrite_metadata(tmp_path / "x", change)
    assert values(tmp_path / "x")["v"].tolist() == [1, 1]
    assert statecli("audit", str(tmp_path / "x")).code == 0


def test_compressed_value_is_reported_as_not_scanned(tmp_path, statecli):
    """The decompressed content is unknown."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    add_value(tmp_path / "x", "notes.bin", 0, 100, ["zstd"])
    (tmp_path / "x" / "notes.bin").write_bytes(bytes(100))
    result = statecli("audit", str(tmp_path / "x"))
    assert result.code == 1
    assert "1 of the values: torch.distributed.checkpoint stored them with the transform zstd" in result.out


def test_unreadable_rank_metadata_is_an_unscanned_pickle(mixed_folder, statecli):
    """A rank has unreadable metadata next to the global metadata: the archives of the rank are not located."""
    (mixed_folder / "__0.metadata").write_bytes(b"\x80\x02N.")
    result = statecli("audit", str(mixed_folder), "--select", "unscanned-pickle")
    assert result.code == 1
    assert "cannot locate the archives in the file: __0.metadata does not contain metadata" in result.out


# Boxes that fill another box.


def build_boxes(*box_ranges: tuple[tuple[int, int], ...]) -> list[Chunk]:
    """Return boxes from their (start, stop) in each dimension."""
    return [Chunk(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)) for ranges in box_ranges]


def test_pinwheel_of_boxes_covers_a_square():
    """Five boxes in a pinwheel fill a square, though every line across the square cuts a box."""
    wheel = build_boxes(((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2)))
    assert find_fault((3, 3), wheel) is None
    assert find_fault((3, 3), wheel[:-1]) == "its 4 chunks cover 8 of its 9 elements"


def test_scalar_has_exactly_one_box():
    """A scalar has exactly one chunk."""
    assert find_fault((), build_boxes(())) is None
    assert find_fault((), build_boxes((), ())) == "its 2 chunks cover 2 of its 1 elements"
    assert find_fault((), []) == "its 0 chunks cover 0 of its 1 elements"


def test_dimensions_that_torch_does_not_index_are_refused():
    """A check of 20,000 chunks for each of 20,000 dimensions would take minutes for 200 KB."""
    shape = (1,) * 20_000
    begin = time.process_time()
    fault = find_fault(shape, [Chunk((0,) * len(shape), shape)] * 20_000)
    assert fault == "the shape has 20,000 dimensions, but torch can index at most 64"
    assert time.process_time() - begin < 2


def test_box_check_agrees_with_counting():
    """Random boxes are compared with a count of the boxes over each element of a small array."""
    dice = np.random.default_rng(5)
    verdicts = set()
    for _ in range(3000):
        shape = tuple(dice.integers(1, 5, dice.integers(1, 4)).tolist())
        count = np.zeros(shape, int)
        boxes = []
        for _ in range(dice.integers(1, 5)):
            start = [int(dice.integers(0, n)) for n in shape]
            stop = [int(dice.integers(a + 1, n + 1)) for a, n in zip(start, shape, strict=True)]
            boxes.append(Chunk(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True))))
            count[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
        is_covered = bool((count == 1).all())
        verdicts.add(is_covered)
        assert (find_fault(shape, boxes) is None) == is_covered
    assert verdicts == {True, False}


def test_ten_thousand_scattered_boxes_are_refused():
    """The boxes are not compared pair by pair, and a spiral of bands is not followed to its end."""
    stairs = [Chunk((n, n), (2, 1)) for n in range(10_000)]
    assert find_fault((20_000, 20_000), stairs)
    spiral = [Chunk((n, n), (20_000 - n, 1) if n % 2 else (1, 20_000 - n)) for n in range(10_000)]
    assert find_fault((20_000, 20_000), spiral)


@pytest.mark.parametrize(
    ("owner", "name", "is_reported"),
    [(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", False), (Metadata, "__init__", True)],
    ids=["a member", "something else"],
)
def test_enum_member_by_getattr_is_not_reported(owner, name, is_reported, tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.2 pickle a member by `getattr`, which is not reported. Any other use is reported."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (owner, name)))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert b"getattr" in (tmp_path / "x" / ".metadata").read_bytes()
    state = formats.read(str(tmp_path / "x"))
    assert [tensor.fqn for tensor in state.tensors] == ["w"]
    assert ("getattr" in " ".join(oddity.message for oddity in state.oddities)) is is_reported


# Entries that torch reads from a `.metadata`, in a form that no pickler writes.


HARMFUL_PICKLE = b"N0cposix\nsystem\n(S'touch HARM'\ntR."


def hide_value(folder: Path) -> tuple[MetadataIndex, _StorageInfo, dict[Any, Any]]:
    """Save a tensor and `step`; return the place of a pickle inside the tensor, with its index, and the true places."""
    position = save_tensor_with_data(folder, HARMFUL_PICKLE, step=3)
    metadata = load_metadata(folder)
    # the value is listed under an index that torch does not look up
    places = {
        key if key.fqn == "w" else MetadataIndex("step", (0,)): info for key, info in metadata.storage_data.items()
    }
    return MetadataIndex("step"), _StorageInfo("__0_0.distcp", position, len(HARMFUL_PICKLE)), places


def call_with_pairs(index: Any, place: Any, places: Any) -> Any:
    return Called(collections.OrderedDict, (((index, place),),), None, None, iter(places.items()))


def call_with_dict(index: Any, place: Any, places: Any) -> Any:
    return Called(dict, ({index: place},), None, None, iter(places.items()))


def set_state_from_pairs(index: Any, place: Any, places: Any) -> Any:
    """Hide the place of the value in the place's own state, an OrderedDict built from pairs."""
    hidden = Called(collections.OrderedDict, (tuple(vars(place).items()),))
    place.__getstate__ = lambda: hidden
    return {**places, index: place}


def call_with_fields(index: Any, place: Any, places: Any) -> Any:
    """Give the place by a call: `_StorageInfo(file, offset, length)`."""
    return {**places, index: Called(_StorageInfo, (place.relative_path, place.offset, place.length))}


def use_default_factory(index: Any, place: Any, places: Any) -> Any:
    """Hide the place in the default of a defaultdict: a key that is absent has a value all the same."""
    factory = Called(functools.partial, (_StorageInfo, place.relative_path, place.offset, place.length))
    return Called(collections.defaultdict, (factory,), None, None, iter(places.items()))


UNUSUAL_PLACES = (
    call_with_pairs,
    call_with_dict,
    set_state_from_pairs,
    call_with_fields,
    use_default_factory,
)


@pytest.mark.parametrize("storage_data", UNUSUAL_PLACES)
def test_storage_places_from_a_call_fail_the_audit(storage_data, tmp_path, in_tmp_path, statecli, forked_python):
    """torch loads a value from a place that the graph of the pickle does not list."""
    hidden = hide_value(tmp_path / "x")
    rewrite_metadata(tmp_path / "x", lambda metadata: setattr(metadata, "storage_data", storage_data(*hidden)))
    assert statecli("audit", str(tmp_path / "x")).code == 2
    assert not (tmp_path / "HARM").exists()
    assert_load_runs_command(tmp_path, forked_python)


def assert_load_runs_command(folder: Path, forked_python, name: str = "x") -> None:
    """Assert that torch.distributed.checkpoint.load runs the command hidden in the folder's files."""
    code = (
        "import torch, torch.distributed.checkpoint as dcp\n"
        f"dcp.load({{'w': torch.zeros(9000, dtype=torch.uint8), 'step': 0}}, checkpoint_id={name!r}, no_dist=True)"
    )
    process = forked_python(code, cwd=folder)
    assert (folder / "HARM").exists(), process.stderr


def test_storage_places_changed_later_fail_the_audit(tmp_path, statecli, forked_python):
    """BUILD copies the items of a dict; later changes of the dict do not reach the object."""
    index, place, places = hide_value(tmp_path / "x")
    rewrite_metadata(tmp_path / "x", lambda metadata: setattr(metadata, "storage_data", {**places, index: place}))
    data = (tmp_path / "x" / ".metadata").read_bytes()
    offset = b"K" + bytes([place.offset]) if place.offset < 256 else b"M" + place.offset.to_bytes(2, "little")
    position = data.index(offset)
    end = data.index(b"ub", position)  # the items of the place's state, and BUILD
    later_items = b"(X\6\0\0\0offsetK\0X\6\0\0\0lengthK\0u0"
    changed = data[: end + 1] + b"q\xff" + b"b" + b"h\xff" + later_items + data[end + 2 :]
    (tmp_path / "x" / ".metadata").write_bytes(changed.replace(changed[2:11], b"", 1))  # no frame
    result = statecli("audit", str(tmp_path / "x"))
    assert result.code == 2
    assert "sets the contents of an object and later changes them" in result.out
    assert_load_runs_command(tmp_path, forked_python)


# Recognition of a folder.


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("begin", [b"", b"N0" * 40, b"(0" * 40])
def test_metadata_is_recognised_by_its_name(begin, protocol, tmp_path, statecli, forked_python):
    """torch requires neither a mark at the start of the pickle nor a suffix of the other files."""
    _, place, places = hide_value(tmp_path / "x")
    (tmp_path / "x" / "__0_0.distcp").rename(tmp_path / "x" / "data")
    places = {key: _StorageInfo("data", info.offset, info.length) for key, info in places.items()}
    places[MetadataIndex("step")] = _StorageInfo("data", place.offset, place.length)
    metadata = load_metadata(tmp_path / "x")
    metadata.storage_data = places
    head = b"\x80" + bytes([protocol]) if protocol else b""
    data = pickle.dumps(metadata, protocol=protocol).removeprefix(head)
    (tmp_path / "x" / ".metadata").write_bytes(head + begin + data)
    result = statecli("audit", str(tmp_path / "x"))
    assert result.code == 2
    assert ("posix.system" if protocol else "cannot locate the archives in the file") in result.out
    assert_load_runs_command(tmp_path, forked_python)


def test_metadata_of_another_class_fails_the_audit(tmp_path, statecli, forked_python):
    """torch.distributed.checkpoint reads the attributes of any object, whatever its class is."""
    index, place, places = hide_value(tmp_path / "x")
    metadata = load_metadata(tmp_path / "x")
    metadata.storage_data = {**places, index: place}
    namespace = argparse.Namespace(**vars(metadata))
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(namespace))
    assert statecli("audit", str(tmp_path / "x")).code == 2
    assert_load_runs_command(tmp_path, forked_python)


def test_rank_metadata_with_outside_paths_fails_the_audit(mixed_folder, statecli):
    """The metadata of rank 7 is next to the global metadata."""
    metadata = load_metadata(mixed_folder)
    for info in metadata.storage_data.values():
        info.relative_path = "../data"
    (mixed_folder / "__7.metadata").write_bytes(pickle.dumps(metadata))
    result = statecli("audit", str(mixed_folder), "--select", "unscanned-pickle")
    assert result.code == 1
    assert "outside the folder: '../data'" in result.out


def test_a_text_called_metadata_is_not_a_checkpoint(tmp_path, statecli):
    """Other programs write files named `.metadata`."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".metadata").write_text(
        "# This file tracks properties of this project.\nversion:\n  revision: 1\n"
    )
    assert not reader.sniff(str(tmp_path / "x"), b"")
