"""Megatron's folders, in the layout of its checkpointing.py: ranks stay separate, and statecli merges none by guess."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from statecli import formats
from statecli.commands.audit.run import Request, audit
from statecli.file_scan import scan
from statecli.targets.target_result import TargetStatus
from statecli.values.read import read_all_values

from . import attacks


def rank(number: int, dtype: torch.dtype = torch.bfloat16, *, tensor: int = 2, stages: int = 1) -> dict[str, object]:
    """Return the state that a rank saves: its part of each weight, its optimizer's state, the run's arguments."""
    model = {
        "embedding.word_embeddings.weight": torch.full((4, 8), float(number), dtype=dtype),
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.full((6, 8), number + 0.5, dtype=dtype),
    }
    state = {0: {"exp_avg": torch.ones(4, 8), "exp_avg_sq": torch.ones(4, 8)}}
    return {
        "args": Namespace(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages, num_layers=1),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model,
        "optimizer": {"optimizer": {"state": state, "param_groups": [{"lr": 0.01, "params": [0]}]}},
        "rng_state": [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}],
    }


def write(folder: Path, names: tuple[str, ...] = ("mp_rank_00", "mp_rank_01"), **sizes: int) -> Path:
    """Write a folder with a single iteration."""
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    for number, name in enumerate(names):
        (folder / "iter_0000010" / name).mkdir(parents=True)
        torch.save(rank(number, **sizes), folder / "iter_0000010" / name / "model_optim_rng.pt")
    return folder


def test_each_rank_has_its_own_sections(tmp_path):
    """Each rank has its own values; equal names are neither tied weights nor a clash."""
    folder = write(tmp_path / "run")
    for target in (folder, folder / "iter_0000010"):
        state = formats.read(str(target))
        assert state.format == "megatron"
        tensors = {(tensor.section, tensor.fqn): tensor for tensor in state.tensors}
        for number in range(2):
            weight = tensors[f"mp_rank_{number:02d}.model", "embedding.word_embeddings.weight"]
            assert set(read_all_values(weight.data)) == {float(number)}
            assert weight.tied_to == ()
        assert tensors["mp_rank_01.optimizer.optimizer", "state[0]['exp_avg']"].shape == (4, 8)
        assert [oddity.name for oddity in state.oddities if oddity.name != "foreign-globals"] == ["model-parallel"]
        assert state.metadata.values["iteration"] == 10


def test_section_of_a_rank_equals_its_model_file(statecli, tmp_path):
    """`#mp_rank_01.model` is a checkpoint like any other."""
    folder = write(tmp_path / "run")
    for number in range(2):
        torch.save(rank(number)["model"], tmp_path / f"{number}.pt")
        result = statecli("diff", f"{folder}#mp_rank_{number:02d}.model", str(tmp_path / f"{number}.pt"), "-f", "json")
        assert result.json["summary"]["identical"] == 2


@pytest.mark.parametrize("stages", [1, 2])
def test_a_missing_rank_is_a_row(statecli, tmp_path, stages):
    """The arguments give the number of ranks; the present ranks are listed, and the exit status is 2."""
    names = ("mp_rank_00",) if stages == 1 else ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001")
    folder = write(tmp_path / "run", names, tensor=2, stages=stages)
    result = statecli("inspect", str(folder))
    missing_rank = "mp_rank_01" if stages == 1 else "mp_rank_01_001"
    reason = f"the folder has files of {len(names)} of {2 * stages} ranks"
    message = f"{reason} (2 tensor-parallel ranks in {stages} pipeline stages); copy the missing"
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"statecli: {folder}: {missing_rank} is missing: {message}")
    assert "embedding.word_embeddings.weight" in result.out


def test_a_rank_that_cannot_be_read_is_a_row(statecli, tmp_path):
    """One rank is truncated, or has no file: the other rank is listed."""
    folder = write(tmp_path / "run")
    file = folder / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:300])
    result = statecli("inspect", str(folder))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"statecli: {file}: ")
    file.unlink()
    result = statecli("inspect", str(folder))
    assert result.err == f"statecli: {file.parent}: contains no model_optim_rng.pt; copy the folder again\n"
    assert "mp_rank_00.model" in result.out


def test_differences_between_ranks_are_noted(tmp_path):
    """The ranks differ in a name and in a dtype."""
    folder = write(tmp_path / "run")
    state = rank(1, torch.float32)
    state["model"]["extra.weight"] = torch.ones(2)
    torch.save(state, folder / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt")
    messages = [oddity.message for oddity in formats.read(str(folder)).oddities if oddity.name == "ranks-disagree"]
    assert messages == [
        "these tensors are in mp_rank_01 but not in mp_rank_00: model.extra.weight; copy the folder again",
        "model.embedding.word_embeddings.weight: its dtype differs between ranks: bfloat16 in mp_rank_00, float32 in "
        "mp_rank_01",
    ]


TRACKERS = {
    "outside": ("../x", "latest_checkpointed_iteration.txt contains '../x'; expected a number or 'release'"),
    "nothing": (
        "20",
        "latest_checkpointed_iteration.txt points to 20, but the folder iter_0000020 is missing or has no rank files;",
    ),
    "release": (
        "release",
        "latest_checkpointed_iteration.txt points to release, but the folder release is missing or has no rank files;",
    ),
    "long": ("9" * 500, "latest_checkpointed_iteration.txt has 500 bytes, but should contain only a folder name"),
}


@pytest.mark.parametrize("case", TRACKERS)
def test_invalid_tracker_is_refused(line, tmp_path, case):
    """The tracker must be a number or a single word."""
    content, message = TRACKERS[case]
    folder = write(tmp_path / "run")
    (folder / "latest_checkpointed_iteration.txt").write_text(content)
    assert line(folder).startswith(message)


def test_an_iteration_in_the_distributed_format_is_named(line, tmp_path):
    """Newer Megatron saves with torch.distributed.checkpoint, in the same folders."""
    folder = write(tmp_path / "run")
    shutil.rmtree(folder / "iter_0000010" / "mp_rank_00")
    shutil.rmtree(folder / "iter_0000010" / "mp_rank_01")
    (folder / "iter_0000010" / ".metadata").write_bytes(b"x")
    assert line(folder).endswith(f"give the folder of the latest iteration: {folder / 'iter_0000010'}")


def test_flat_optimizer_buffers_are_noted_and_not_read(tmp_path):
    """Only the code that wrote the buffers knows their order."""
    folder = write(tmp_path / "run")
    (folder / "iter_0000010" / "mp_rank_00" / "distrib_optim.pt").write_bytes(b"x")
    oddity = next(oddity for oddity in formats.read(str(folder)).oddities if oddity.name == "not-read")
    assert oddity.message == (
        "no file records the positions of the parameters in the flat optimizer buffers, so these files were not read: "
        "mp_rank_00/distrib_optim.pt"
    )


def test_pickles_of_all_ranks_are_scanned(statecli, tmp_path):
    """An ordinary folder has no finding; a crafted rank is reported, and its code does not run."""
    folder = write(tmp_path / "run")
    assert statecli("audit", str(folder), "--values").code == 0
    assert len(scan.scan_pickles(str(folder))) == 2
    mark = tmp_path / "ran"
    body = attacks.call_function(attacks.global_name("os", "system"), attacks.text(f"touch {mark}"))
    file = folder / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(attacks.build(attacks.records(attacks.build_pickle(body))))
    assert "os.system" in statecli("audit", str(folder)).out
    assert not mark.exists()


def test_zarr_arrays_are_unreadable_rows(tmp_path):
    """The tensors of common.pt are listed; each zarr array is a row that cannot be read, and the audit fails."""
    torch.save({"iteration": 10, "rng": torch.zeros(3)}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    for name in ("model.decoder.weight", "optimizer.state.exp_avg.decoder.weight"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zarray").write_text("{}")
        (tmp_path / name / "0.0").write_bytes(bytes(16))
    state = formats.read(str(tmp_path))
    assert state.format == "megatron"
    damaged = {tensor.fqn: tensor.damage for tensor in state.tensors if tensor.damage}
    assert set(damaged) == {"model.decoder.weight", "optimizer.state.exp_avg.decoder.weight"}
    assert "is a zarr array, which statecli does not read" in damaged["model.decoder.weight"]
    target = next(target for target in audit(Request((str(tmp_path),))).targets if target.target == str(tmp_path))
    assert target.status is TargetStatus.FAILED
    assert formats.members(str(tmp_path)) == ("common.pt", "metadata.json")
