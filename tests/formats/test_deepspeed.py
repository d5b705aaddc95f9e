"""DeepSpeed's folders: statecli shows the state that the library reads, and a missing file spoils only its own part."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from statecli import formats
from statecli.commands.audit.run import Request, audit
from statecli.core.model_state import Evidence, Kind
from statecli.file_scan import scan
from statecli.formats.shared import deepspeed_model_file
from statecli.rules import pickles
from statecli.targets.target_result import TargetStatus
from statecli.values.read import read_all_values

from ..forked_python import run_python
from . import attacks, zero

#: Stage, dtype, groups of the optimizer; `3s` has groups of at most 100 elements, so that parameters cross groups.
RUN_SPECS = ("0-bf16-1", "1-bf16-1", "2-bf16-2", "2-fp32-1", "3-bf16-2", "3s-fp32-2")
PARTITIONED_SPECS = RUN_SPECS[1:]
#: Stage and ranks of folders that `zero.write` writes, including more ranks than elements.
WRITTEN_LAYOUTS = [(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2, 3, 5, 32)]


@pytest.fixture(scope="session")
def deepspeed_folders(tmp_path_factory):
    """Folders of two ranks on the CPU, folders of `WRITTEN_LAYOUTS`, and the output of the library's tools for both."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed: not installed")
    out = tmp_path_factory.mktemp("deepspeed")
    for stage, ranks in WRITTEN_LAYOUTS:
        write_folder(out / f"made-{stage}-{ranks}", stage, ranks)
    script = os.path.join(os.path.dirname(__file__), "deepspeed_run.py")
    process = run_python([script, out, *RUN_SPECS], timeout=300)
    if process.returncode:
        pytest.skip(f"DeepSpeed does not run: {process.stderr.strip().splitlines()[-1:]}")
    return out


def section(state, name):
    return {tensor.fqn: tensor for tensor in state.tensors if tensor.section == name}


def equals(tensor, expected: torch.Tensor) -> bool:
    values = np.asarray(read_all_values(tensor.data), dtype=np.float64)
    return tensor.shape == tuple(expected.shape) and np.array_equal(values, expected.double().numpy().ravel())


def assert_equals_library(folder: Path) -> None:
    """Assert that the float32 copies, the frozen parameters and the buffers equal the output of zero_to_fp32."""
    state, expected = formats.read(str(folder)), torch.load(f"{folder}.fp32")
    module, masters = section(state, "module"), section(state, "optimizer.fp32")
    assert not [tensor for tensor in state.tensors if tensor.damage]
    assert expected.keys() <= module.keys()
    for name, tensor in expected.items():
        assert module[name].shape == tuple(tensor.shape)
        tied = masters.get(name) or next((masters[tie] for tie in module[name].tied_to if tie in masters), None)
        assert equals(tied or module[name], tensor), name


@pytest.mark.parametrize("spec", PARTITIONED_SPECS)
def test_real_folders_agree_with_the_library(deepspeed_folders, spec):
    """The folders cover each stage, one group and two, bfloat16 and float32, tied weights and frozen parameters."""
    assert_equals_library(deepspeed_folders / spec)
    assert formats.read(str(deepspeed_folders / spec)).format == f"deepspeed zero-{spec[0]}"


@pytest.mark.parametrize("spec", RUN_SPECS)
def test_kinds_of_tensors_agree_with_deepspeed(deepspeed_folders, spec):
    """Trained parameters, frozen parameters and buffers agree with DeepSpeed; only tied names share a storage."""
    module = section(formats.read(str(deepspeed_folders / spec)), "module")
    assert {tensor.evidence for tensor in module.values()} == {Evidence.REGISTERED}
    buffers = {name for name, tensor in module.items() if tensor.kind is Kind.BUFFER}
    assert buffers == {"table", "count"}
    assert all(module[name].persistent for name in buffers)
    frozen = {tensor.requires_grad for name, tensor in module.items() if "frozen" in name}
    assert frozen == {None if spec in ("0-bf16-1", "1-bf16-1") else False}  # these two do not save the fact
    if spec[0] != "0":
        learning = {name for name, tensor in module.items() if tensor.requires_grad}
        assert learning == module.keys() - buffers - {"frozen.weight", "frozen.bias"}
    tied = {name: tensor.tied_to for name, tensor in module.items() if tensor.tied_to}
    assert tied == {"embed.weight": ("head.weight",), "head.weight": ("embed.weight",)}


def test_moments_equal_the_slices_of_each_rank(deepspeed_folders):
    """Each rank's `param_slice_mappings` gives the slices of the parameters: another way to the same values."""
    state = formats.read(str(deepspeed_folders / "2-bf16-2"))
    files = sorted((deepspeed_folders / "2-bf16-2").rglob("*optim_states.pt"))
    ranks = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    for moment in ("exp_avg", "exp_avg_sq"):
        pieces: dict[str, list[torch.Tensor]] = {}
        for rank in ranks:
            for group, slices in enumerate(rank["param_slice_mappings"]):
                flat = rank["base_optimizer_state"]["state"][group][moment]
                for name, place in slices.items():
                    pieces.setdefault(name, []).append(flat[place.start : place.start + place.numel])
        actual = section(state, f"optimizer.{moment}")
        assert actual.keys() == pieces.keys()
        for name, tensor in actual.items():
            assert equals(tensor, torch.cat(pieces[name]).reshape(tensor.shape))
            assert (tensor.kind, tensor.belongs_to) == (Kind.OPTIMIZER, name)


def test_unpartitioned_states_in_one_storage_are_two_tensors(tmp_path):
    """Two views of one storage have the places of their elements."""
    zero.write(tmp_path, 1, [{"w": torch.ones(4)}], ranks=1)
    (path,) = (tmp_path / "global_step2").glob("*optim_states.pt")
    document = torch.load(path, weights_only=False)
    table = torch.arange(4.0)
    document["optimizer_state_dict"]["base_optimizer_state"]["state"][0] |= {"a": table[1], "b": table[3]}
    torch.save(document, path)
    offsets = {row.fqn: row.storage_offset for row in formats.read(str(tmp_path)).tensors}
    assert (offsets["state[0]['a']"], offsets["state[0]['b']"]) == (1, 3)


def test_note_names_the_ranks_of_a_partition(deepspeed_folders):
    """The first rank has the first half of the flat vector, so that a parameter lies in both ranks.

    The note of a weight that stage 3 has only in the optimizer says so; a frozen parameter is not a copy.
    """
    masters = section(formats.read(str(deepspeed_folders / "2-bf16-2")), "optimizer.fp32")
    assert masters["embed.weight"].note == "in the partition of rank 0"
    assert masters["proj.weight"].note == "in 2 partitions: ranks 0, 1"
    assert masters["back.weight"].note == "in the partition of rank 1"
    module = section(formats.read(str(deepspeed_folders / "3-bf16-2")), "module")
    copied = "the optimizer's float32 copy; in 2 partitions: ranks 0, 1; bfloat16 in training"
    assert module["proj.weight"].note == copied
    assert module["frozen.weight"].note == "in 2 partitions: ranks 0, 1"


def test_note_of_an_empty_parameter_names_no_partition(tmp_path):
    """The parameter's note mentions no partition."""
    folder = zero.write(tmp_path / "zero", 3, [{"w": torch.ones(3), "none": torch.ones(0, 3)}])
    assert section(formats.read(str(folder)), "module")["none"].note == (
        "the optimizer's float32 copy; bfloat16 in training"
    )


def test_untrained_parameters_of_stage_1_are_noted(tmp_path):
    """Stage 1 writes no `frozen_param_shapes`, so that requires_grad of an untrained parameter is unknown."""
    folder = zero.write(tmp_path / "zero", 1, build_groups(), frozen=FROZEN, buffers=BUFFERS)
    edit_file(
        folder / "global_step2" / "mp_rank_00_model_states.pt", lambda loaded: loaded.update(frozen_param_shapes=None)
    )
    module = section(formats.read(str(folder)), "module")
    untrained = {
        name: tensor.requires_grad
        for name, tensor in module.items()
        if tensor.note == deepspeed_model_file.NOT_TRAINED_NOTE
    }
    assert untrained == {"f": None, "g": None}
    assert module["a"].requires_grad


def test_unread_steps_of_a_run_are_reported(tmp_path):
    """Reading the run's folder reports the unread step; a run with a single step, or a step's folder, has no report."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    assert not formats.read(str(folder)).oddities
    zero.write(folder, 2, build_groups(), tag="global_step4")
    (oddity,) = formats.read(str(folder)).oddities
    message = (
        "statecli read only the checkpoint global_step4; to read another checkpoint, give its folder: global_step2"
    )
    assert (oddity.name, oddity.message) == ("other-checkpoints", message)
    assert not formats.read(str(folder / "global_step2")).oddities


def test_folder_equals_the_folder_of_its_tag(deepspeed_folders):
    """The folder with `latest`, and the folder named by `latest`, have the same tensors."""
    whole_state = formats.read(str(deepspeed_folders / "3-bf16-2"))
    tagged = formats.read(str(deepspeed_folders / "3-bf16-2" / "global_step2"))
    assert [(tensor.fqn, tensor.shape) for tensor in tagged.tensors] == [
        (tensor.fqn, tensor.shape) for tensor in whole_state.tensors
    ]


def test_settings_have_the_same_names_in_all_stages(deepspeed_folders):
    """All stages give the epoch, and the optimizer's learning rate under the same name."""
    for spec in PARTITIONED_SPECS:
        metadata = formats.read(str(deepspeed_folders / spec)).metadata.values
        assert metadata["epoch"] == 3
        assert metadata["optimizer.param_groups.0.lr"] == 0.001
        assert metadata["optimizer.zero_stage"] == int(spec[0])


@pytest.mark.parametrize("spec", RUN_SPECS)
def test_audit_of_a_real_folder_has_only_notes(statecli, deepspeed_folders, spec):
    """DeepSpeed's own classes are data, and every pickle was scanned."""
    result = statecli("audit", str(deepspeed_folders / spec), "--values", "-f", "json")
    assert {finding["severity"] for finding in result.json["findings"]} == {"note"}
    files = list((deepspeed_folders / spec).rglob("*.pt"))
    assert {finding.place.path for finding in scan.scan_pickles(str(deepspeed_folders / spec))} == {
        str(file) for file in files
    }


def build_groups(rows: int = 5) -> list[zero.Tensors]:
    """Return two groups of tensors whose sizes few numbers of ranks divide; `d` is a scalar."""
    generator = torch.Generator().manual_seed(5)
    first = {"a": torch.randn(rows, 3, generator=generator), "b": torch.randn(7, generator=generator)}
    return [first, {"c": torch.randn(11, 2, generator=generator), "d": torch.tensor(2.5)}]


FROZEN = {"f": torch.arange(15).reshape(3, 5).half(), "g": torch.ones(1).half()}
BUFFERS = {"count": torch.arange(3), "table": torch.arange(4.0)}


def write_folder(folder: Path, stage: int, ranks: int) -> None:
    """Write a folder with parameters of each kind."""
    zero.write(folder, stage, build_groups(), frozen=FROZEN, buffers=BUFFERS, shared={"t": "c"}, ranks=ranks)


@pytest.mark.parametrize(("stage", "ranks"), WRITTEN_LAYOUTS)
def test_any_number_of_ranks_agrees_with_the_library(deepspeed_folders, stage, ranks):
    """With more ranks than elements, the last ranks have only padding."""
    folder = deepspeed_folders / f"made-{stage}-{ranks}"
    assert_equals_library(folder)
    state = formats.read(str(folder))
    weights = {name: tensor for group in build_groups() for name, tensor in group.items()}
    for name, part in (("exp_avg", 2), ("exp_avg_sq", 4)):
        moments = section(state, f"optimizer.{name}")
        assert all(equals(moments[fqn], tensor / part) for fqn, tensor in weights.items())


def test_stage_3_equals_the_consolidated_file(statecli, tmp_path):
    """The module equals the file that zero_to_fp32 would write, whichever is compared with the other."""
    folder = zero.write(tmp_path / "zero", 3, build_groups(), ranks=3)
    save_file(
        {name: tensor for group in build_groups() for name, tensor in group.items()}, tmp_path / "all.safetensors"
    )
    pair = [f"{folder}#module", str(tmp_path / "all.safetensors")]
    for first, second in (pair, pair[::-1]):
        result = statecli("diff", first, second, "-f", "json")
        assert result.json["summary"]["identical"] == 4
        assert not result.json["changes"]


def test_float32_copies_can_be_selected(statecli, tmp_path):
    """`#optimizer.fp32` selects the copies, which differ from the bfloat16 module by rounding."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=3)
    save_file(
        {name: tensor for group in build_groups() for name, tensor in group.items()}, tmp_path / "all.safetensors"
    )
    for name, identical in (("optimizer.fp32", 4), ("module", 0)):
        result = statecli("diff", f"{folder}#{name}", str(tmp_path / "all.safetensors"), "-f", "json")
        assert result.json["summary"]["identical"] == identical, result.json["changes"]


# --- damaged folders -------------------------------------------------------------------------------------------------


def list_damaged_names(state) -> dict[str, set[str]]:
    """Return the names of unreadable tensors, by section."""
    names: dict[str, set[str]] = {}
    for tensor in state.tensors:
        if tensor.damage:
            names.setdefault(tensor.section, set()).add(tensor.fqn)
    return names


def test_missing_rank_spoils_only_its_parameters(statecli, tmp_path):
    """The module and the other rank's parameters are read; lost parameters are named, and the exit status is 2."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(1), ranks=2)
    (folder / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    state = formats.read(str(folder))
    assert list_damaged_names(state) == {"optimizer.fp32": {"b", "c", "d"}}
    result = statecli("inspect", str(folder))
    assert result.code == 2
    assert result.err.startswith(
        f"statecli: {folder}: b and 2 more tensors: rank 1 is missing: the folder has files of 1 of 2 ranks; copy"
    )
    assert equals(section(state, "optimizer.exp_avg")["a"], build_groups(1)[0]["a"] / 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_unreadable_rank_is_named(statecli, tmp_path, stage):
    """One line names the file, whatever is wrong with the file."""
    folder = zero.write(tmp_path / "zero", stage, build_groups(), ranks=2)
    file = folder / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:500])
    result = statecli("inspect", str(folder))
    assert result.code == 2
    assert f"rank 1: global_step2/{file.name}: " in result.err
    assert len(section(formats.read(str(folder)), "module")) == 4


def test_missing_frozen_fragment_spoils_one_parameter(tmp_path):
    """Stage 3 partitions frozen parameters too; all other tensors are read."""
    folder = zero.write(tmp_path / "zero", 3, build_groups(), frozen=FROZEN, ranks=2)
    (folder / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    state = formats.read(str(folder))
    assert list_damaged_names(state) == {"module": {"f"}}
    assert [oddity.name for oddity in state.oddities] == ["missing-rank"]


def edit_file(file: Path, change) -> None:
    loaded = torch.load(file, weights_only=False)
    change(loaded)
    torch.save(loaded, file)


@dataclass
class Fragment:
    """Same fields as DeepSpeed's `fragment_address`."""

    numel: int
    start: int


def locate_optimizer(folder: Path, rank: int) -> Path:
    return folder / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def edit_optimizer(folder: Path, rank: int, change) -> None:
    edit_file(locate_optimizer(folder, rank), lambda loaded: change(loaded["optimizer_state_dict"]))


def test_text_in_an_unreadable_rank_does_not_make_it_missing(tmp_path):
    """No text in the file can make the rank count as missing."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=2)
    edit_optimizer(folder, 1, lambda state: state.update(zero_stage="is missing"))
    (oddity,) = formats.read(str(folder)).oddities
    assert (oddity.name, "zero_stage is 'is missing'" in oddity.message) == ("unread-rank", True)


def test_shape_that_differs_between_ranks_spoils_one_parameter(tmp_path):
    """Only this parameter is spoiled; the message has both shapes."""
    folder = zero.write(tmp_path / "zero", 3, build_groups(), ranks=2)
    file = folder / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit_file(file, lambda loaded: loaded["param_shapes"][0].update(a=torch.Size([5, 4])))
    state = formats.read(str(folder))
    assert list_damaged_names(state)["module"] == {"a"}
    damage = section(state, "module")["a"].damage
    assert damage == f"{folder}: a: its shape differs between ranks: [5, 3] in rank 0, [5, 4] in rank 1"


DISAGREEMENTS = {
    "stage": (
        lambda loaded: loaded.update(zero_stage=1),
        "the ZeRO stage differs between ranks: 2 in rank 0, 1 in rank 1",
    ),
    "count": (
        lambda loaded: loaded.update(partition_count=[3, 3]),
        "the number of partitions differs between ranks: 2 in rank 0, 3 in rank 1",
    ),
    "groups": (
        lambda loaded: loaded["single_partition_of_fp32_groups"].pop(),
        "the number of groups differs between ranks: 2 in rank 0, 1 in rank 1",
    ),
    "length": (
        lambda loaded: loaded["single_partition_of_fp32_groups"].__setitem__(1, torch.ones(3)),
        "the parameters of group 1 need 23 elements, but its partitions have 15",
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_different_partitions_of_ranks_are_reported(statecli, tmp_path, case):
    """The optimizer's partitions cannot be joined; the module is still shown."""
    change, message = DISAGREEMENTS[case]
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=2)
    edit_optimizer(folder, 1, change)
    result = statecli("inspect", str(folder))
    assert (result.code, result.err) == (2, f"statecli: {folder}: a and 3 more tensors: {message}\n")
    assert not list_damaged_names(formats.read(str(folder))).keys() - {"optimizer.fp32"}


def test_different_group_counts_of_stage_3_are_reported(tmp_path):
    """All ranks must have the same number of groups."""
    folder = zero.write(tmp_path / "zero", 3, build_groups(), ranks=2)
    edit_optimizer(folder, 1, lambda state: state["fp32_flat_groups"].insert(0, torch.ones(1)))
    damage = section(formats.read(str(folder)), "module")["a"].damage
    assert damage.endswith("the number of groups differs between ranks: 2 in rank 0, 3 in rank 1")


def inspect_in_little_memory(statecli, folder):
    """Inspect the folder; assert that no more than 4 MB are allocated at a time."""
    statecli("inspect", str(folder))  # imports modules
    tracemalloc.start()
    try:
        result = statecli("inspect", str(folder))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    return result


def test_huge_partition_count_is_refused(statecli, tmp_path):
    """A count from a file allocates no memory."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=1)
    edit_optimizer(folder, 0, lambda state: state.update(partition_count=[10**6 - 1] * 2))
    assert inspect_in_little_memory(statecli, folder).code == 0
    edit_optimizer(folder, 0, lambda state: state.update(partition_count=[10**9]))
    message = "partition_count is 1000000000; expected the number of ranks, 1 to"
    assert message in inspect_in_little_memory(statecli, folder).err


def test_stale_rank_file_is_not_read(tmp_path):
    """A rank beyond the number of ranks is from a save by more ranks."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=2)
    shutil.copy(locate_optimizer(folder, 1), locate_optimizer(folder, 2))
    state = formats.read(str(folder))
    assert not list_damaged_names(state)
    assert [oddity.name for oddity in state.oddities] == ["stale-rank"]


INVALID_TAGS = {
    "outside": ("../elsewhere", "latest contains '../elsewhere', which is not a plain folder name"),
    "absolute": ("/etc", "latest contains '/etc', which is not a plain folder name"),
    "nothing": (
        "global_step9",
        "latest points to 'global_step9', but this folder is missing or has no rank files; give one of these folders:",
    ),
    "empty": ("\n", "latest contains '', which is not a plain folder name"),
    "long": ("x" * 600, "latest has 600 bytes, but should contain only a folder name"),
    "escape": ("a\x1b[2J", "latest contains 'a\\x1b[2J', which is not a plain folder name"),
}


@pytest.mark.parametrize("case", INVALID_TAGS)
def test_invalid_latest_file_is_refused(line, tmp_path, case):
    """`latest` must hold one plain name, of a folder that exists."""
    tag, message = INVALID_TAGS[case]
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    (folder / "latest").write_text(tag)
    assert line(folder).startswith(message)


@pytest.mark.parametrize(
    ("tracker", "tag"),
    [
        *(("latest", tag) for tag in ("./.gs1", ".gs1/", "global_step1/../.gs1", "{folder}/.gs1", "a/.b", "../.gs2")),
        *(("latest_universal", tag) for tag in ("./.gs1", "a/.b")),
    ],
)
def test_a_hidden_folder_that_deepspeed_loads_fails_the_audit(tmp_path, tracker, tag):
    """DeepSpeed joins any content of the file with the folder's path, and unpickles the files there."""
    folder = tmp_path / "ds"
    state = {"module": {"w": torch.zeros(2)}}
    for inner in (".gs1", "global_step1", "a/.b", "../.gs2"):
        (folder / inner).mkdir(parents=True)
        torch.save(state, folder / inner / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step1")
    (folder / tracker).write_text(tag.format(folder=folder))
    result = audit(Request((str(folder),)))
    reasons = [target.reason for target in result.targets if target.status is TargetStatus.FAILED]
    assert reasons[0] == (
        f"{folder}: {tracker} points to {tag.format(folder=folder)!r}, which is not a plain folder in the checkpoint "
        "folder; DeepSpeed would load files that statecli did not check"
    )
    # A walk that finds the hidden folder by its name fails the folder too.
    assert [reason.partition(":")[0] for reason in reasons[1:]] in ([], [str(folder / ".gs1")])
    assert str(folder / "global_step1") in {target.target for target in result.targets}


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (" " * 600 + "./.gs1", "mp_rank_00_model_states.pt"),
        ("./.gs1" + "\n" * 2**21, "mp_rank_00_model_states.pt"),
        ("./.gs1", "x_optim_states.pt"),
    ],
    ids=["blanks", "megabytes of blanks", "another name"],
)
def test_hidden_folder_fails_the_audit_under_any_spelling(tmp_path, tag, name):
    """DeepSpeed strips the tag, however long the file is, and zero_to_fp32 looks at the end of the files' names."""
    (tmp_path / ".gs1").mkdir()
    (tmp_path / "global_step1").mkdir()
    torch.save({"module": {"w": torch.zeros(2)}}, tmp_path / ".gs1" / name)
    torch.save({"module": {"w": torch.zeros(2)}}, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text(tag)
    result = audit(Request((str(tmp_path),)))
    reasons = [target.reason for target in result.targets if target.status is TargetStatus.FAILED]
    assert "which is not a plain folder in the checkpoint folder" in reasons[0]
    assert [reason.partition(":")[0] for reason in reasons[1:]] in ([], [str(tmp_path / ".gs1")])


def test_latest_file_of_another_tool_is_not_a_checkpoint(tmp_path):
    """Other tools write paths into a file named `latest`; the path leads to a folder without a rank's file."""
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "latest").write_text("runs/1")
    torch.save({"w": torch.ones(1)}, tmp_path / "runs" / "1" / "model.pt")
    assert TargetStatus.FAILED not in {target.status for target in audit(Request((str(tmp_path),))).targets}


def test_empty_latest_or_pipe_is_refused(line, tmp_path):
    """A pipe is not read, and an empty file is reported."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    (folder / "latest").write_bytes(b"")
    assert line(folder) == "latest is an empty file"
    (folder / "latest").unlink()
    os.mkfifo(folder / "latest")
    assert line(folder) == "latest is a named pipe, not a regular file"


def test_ranks_in_the_legacy_torch_format_are_read(tmp_path):
    """DeepSpeed's fast writer makes torch.save write a stream in place of an archive."""
    folder = zero.write(tmp_path / "zero", 3, build_groups(), frozen=FROZEN, ranks=2)
    before = formats.read(str(folder))
    for file in folder.rglob("*.pt"):
        torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    after = formats.read(str(folder))
    assert [tensor.fqn for tensor in after.tensors] == [tensor.fqn for tensor in before.tensors]
    assert equals(section(after, "module")["a"], build_groups()[0]["a"])


def test_missing_optimizer_files_are_reported(statecli, tmp_path):
    """Without the optimizer's files, stages 1 and 2 have the whole model, and stage 3 has no weights."""
    for stage, code in ((2, 0), (3, 2)):
        folder = zero.write(tmp_path / str(stage), stage, build_groups())
        for file in folder.rglob("*optim_states.pt"):
            file.unlink()
        result = statecli("inspect", str(folder))
        assert result.code == code
        assert "the optimizer's states are missing" in result.out + result.err


INVALID_NUMBERS = {
    "negative paddings": {"group_paddings": [-(2**40), -40], "param_alignment_paddings": [[-9, -9], [-9, -9]]},
    "huge paddings": {"group_paddings": [2**62, 2**62], "param_alignment_paddings": [[2**62] * 2, [2**62] * 2]},
    "no numbers": {"group_paddings": ["x", None], "param_alignment_paddings": {"a": 1}, "param_slice_mappings": 7},
    "no states": {"base_optimizer_state": {"state": [], "param_groups": {0: 1}}},
    "no vectors": {"single_partition_of_fp32_groups": [torch.ones(2, 2), torch.ones(1)]},
    "no groups": {"single_partition_of_fp32_groups": [], "group_paddings": []},
    "no ranks": {"partition_count": []},
    "a strided vector": {"single_partition_of_fp32_groups": [torch.ones(40)[::2], torch.ones(20)]},
}


@pytest.mark.parametrize("case", INVALID_NUMBERS)
def test_invalid_numbers_in_a_rank_leave_the_module_readable(statecli, tmp_path, case):
    """The module is always shown, and at most one line reports the unreadable parameters."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=2)
    for rank in range(2):
        edit_optimizer(folder, rank, lambda state: state.update(INVALID_NUMBERS[case]))
    result = statecli("inspect", str(folder), "-f", "json")
    assert result.code == (0 if case in ("negative paddings", "no numbers", "no states") else 2)
    assert result.err.count("\n") == (result.code == 2)
    assert [row["fqn"] for row in result.json["tensors"] if row["section"] == "module"] == ["a", "b", "c", "d"]


def test_huge_shape_is_reported(statecli, tmp_path):
    """A huge number of elements allocates no memory."""
    folder = zero.write(tmp_path / "zero", 3, build_groups(), ranks=2)
    for file in folder.rglob("*model_states.pt"):
        edit_file(file, lambda loaded: loaded["param_shapes"][0].update(a=torch.Size([2**30, 2**30])))
    result = inspect_in_little_memory(statecli, folder)
    assert result.code == 2
    assert "the parameters need 576460752303423504 elements in each rank, but each rank has 24" in result.err


def test_single_folder_is_read_without_latest(line, tmp_path):
    """Lightning writes no `latest`; of several checkpoints in a folder, the user must name the folder to read."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), tag="checkpoint")
    (folder / "latest").unlink()
    assert section(formats.read(str(folder)), "module")
    shutil.copytree(folder / "checkpoint", folder / "other")
    assert (
        line(folder) == "contains 2 checkpoints, but no file `latest` that selects one of them; "
        "give one of these folders: checkpoint, other"
    )


def test_folder_without_model_files_is_refused(line, tmp_path):
    """The optimizer's files have only flat vectors without names."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    (folder / "global_step2" / "mp_rank_00_model_states.pt").unlink()
    assert line(folder / "global_step2").startswith("the *_model_states.pt files are missing, so ")


def test_unknown_stage_is_refused(statecli, tmp_path):
    """The stage decides the partition."""
    folder = zero.write(tmp_path / "zero", 2, build_groups(), ranks=1)
    edit_optimizer(folder, 0, lambda state: state.update(zero_stage=7))
    result = statecli("inspect", str(folder))
    assert result.code == 2
    assert "zero_stage is 7, but statecli knows only 1 to 3" in result.err


def list_messages(statecli, folder: Path) -> str:
    """Return the messages of the audit's findings, one on a line."""
    return "\n".join(finding["message"] for finding in statecli("audit", str(folder), "-f", "json").json["findings"])


def test_call_in_a_rank_is_reported_and_not_run(statecli, tmp_path):
    """An audit finds the call that loading would run, and statecli does not run the call."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    mark = tmp_path / "ran"
    body = attacks.call_function(attacks.global_name("os", "system"), attacks.text(f"touch {mark}"))
    file = locate_optimizer(folder, 1)
    file.write_bytes(attacks.build(attacks.records(attacks.build_pickle(body))))
    assert statecli("inspect", str(folder)).code == 2
    place = f"{file.relative_to(folder)}: record archive/data.pkl, byte 2"
    assert f"os.system, which runs shell commands ({place})" in list_messages(statecli, folder)
    assert not mark.exists()


def test_model_parallel_ranks_have_separate_sections(tmp_path):
    """No file records the part of a tensor that a rank has, so that each rank has sections of its own."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    files = folder / "global_step2"
    for name in sorted(os.listdir(files)):
        shutil.copy(files / name, files / name.replace("mp_rank_00", "mp_rank_01"))
    state = formats.read(str(folder))
    assert state.sections[0] == "mp_rank_00.module"
    assert "mp_rank_01.optimizer.fp32" in state.sections
    assert [oddity.name for oddity in state.oddities] == ["model-parallel"]


def test_a_missing_model_parallel_rank_is_a_row(statecli, tmp_path):
    """The missing rank is known by its optimizer file, or by `mp_world_size` in another rank's file."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    files = folder / "global_step2"
    model = files / "mp_rank_00_model_states.pt"
    shutil.copy(locate_optimizer(folder, 0), files / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    result = statecli("inspect", str(folder))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"statecli: {folder}: the *_model_states.pt files are missing, so ")
    assert "mp_rank_00.optimizer.fp32" in result.out
    (files / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    edit_file(model, lambda loaded: loaded.update(mp_world_size=4))
    result = statecli("inspect", str(folder))
    message = "mp_world_size is 4, but only 1 model-parallel ranks have files here; copy the files of the other ranks"
    assert (result.code, result.err) == (2, f"statecli: {folder}: {message}\n")


def test_weights_next_to_a_deepspeed_folder_are_read(tmp_path):
    """A Trainer's folder is read as its weights; the DeepSpeed folder inside is a target by itself."""
    folder = zero.write(tmp_path / "zero", 2, build_groups())
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    state = formats.read(str(folder))
    assert [tensor.fqn for tensor in state.tensors] == ["w"]
    message = (
        "statecli did not read DeepSpeed checkpoints of the same training run: global_step2; to read one of these "
        "checkpoints, give its folder"
    )
    assert [oddity.message for oddity in state.oddities] == [message]
    assert formats.read(str(folder / "global_step2")).format == "deepspeed zero-2"


WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([1.5])}


def write_universal(folder: Path) -> Path:
    """Write the layout of ds_to_universal.py: a folder for each parameter, next to the ranks' model files."""
    zero.write(folder, 1, [WEIGHTS], ranks=1, tag="global_step2_universal")
    files = folder / "global_step2_universal"
    (files / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    for name, value in WEIGHTS.items():
        (files / "zero" / name).mkdir(parents=True)
        for state, factor in {"fp32": 1, "exp_avg": 0.5, "exp_avg_sq": 0.25}.items():
            torch.save({"param": value * factor, "cat_dim": 0}, files / "zero" / name / f"{state}.pt")
        torch.save(2, files / "zero" / name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, files / "zero" / "optimizer_state.pt")
    return files


@pytest.mark.parametrize("has_model_file", [True, False], ids=["with the model's file", "alone"])
def test_a_universal_checkpoint_is_read(has_model_file, tmp_path):
    """The rows are each state of each parameter, and the module."""
    files = write_universal(tmp_path / "run")
    if not has_model_file:
        (files / "mp_rank_00_model_states.pt").unlink()
    state = formats.read(str(files))
    assert state.format == "deepspeed universal"
    for name, factor in {"fp32": 1, "exp_avg": 0.5, "exp_avg_sq": 0.25}.items():
        rows = section(state, f"optimizer.{name}")
        assert rows.keys() == WEIGHTS.keys()
        assert all(equals(rows[fqn], value * factor) for fqn, value in WEIGHTS.items())
        assert {(row.kind, row.belongs_to) for row in rows.values()} == {(Kind.OPTIMIZER, fqn) for fqn in WEIGHTS}
    assert section(state, "module").keys() == (WEIGHTS.keys() if has_model_file else set())
    assert "no-optimizer" not in {oddity.name for oddity in state.oddities}


def test_a_file_of_a_universal_checkpoint_that_cannot_be_read_is_a_row(tmp_path):
    """The row is the state of the parameter whose file is unreadable."""
    files = write_universal(tmp_path / "run")
    (files / "zero" / "b" / "exp_avg.pt").write_bytes(b"PK\3\4")
    damaged = [(tensor.section, tensor.fqn) for tensor in formats.read(str(files)).tensors if tensor.damage]
    assert damaged == [("optimizer.exp_avg", "b")]


def list_missing_rows(path: Path) -> list[tuple[str, str]]:
    """Return the rows of missing files; with a row, the rule about missing files has a finding."""
    state = formats.read(str(path))
    rows = [
        (tensor.section, tensor.fqn)
        for tensor in state.tensors
        if tensor.damage and "is missing; copy the file" in tensor.damage
    ]
    assert bool(rows) == any(oddity.name == "missing-shard" for oddity in state.oddities)
    return rows


@pytest.mark.parametrize("missing_path", ["zero/a.weight", "zero/a.weight/fp32.pt", "zero"])
@pytest.mark.parametrize("has_shapes", [True, False], ids=["param_shapes", "names alone"])
def test_a_parameter_that_a_universal_checkpoint_lacks_is_a_row(statecli, tmp_path, missing_path, has_shapes):
    """The model's file names the parameter, but `zero/` has no float32 copy of the parameter."""
    files = write_universal(tmp_path / "run")
    if not has_shapes:
        edit_file(files / "mp_rank_00_model_states.pt", lambda loaded: loaded.update(param_shapes=None))
    assert list_missing_rows(files) == []
    shutil.rmtree(files / missing_path) if (files / missing_path).is_dir() else (files / missing_path).unlink()
    names = [*WEIGHTS] if missing_path == "zero" else ["a.weight"]
    assert list_missing_rows(files) == [("optimizer.fp32", name) for name in names]
    result = statecli("inspect", str(files))
    message = "zero/a.weight/fp32.pt of parameter a.weight is missing; copy the file, or run ds_to_universal.py again"
    assert result.code == 2
    assert f"{files}: {message}" in result.err
    assert statecli("audit", str(files)).code == 2


@pytest.mark.parametrize("state", ["fp32", "exp_avg"])
def test_a_missing_file_of_a_universal_checkpoint_without_models_is_a_row(tmp_path, state):
    """The other files of the parameter, and the files of the other parameter, show that the file is missing."""
    files = write_universal(tmp_path / "run")
    (files / "mp_rank_00_model_states.pt").unlink()
    (files / "zero" / "a.weight" / f"{state}.pt").unlink()
    assert list_missing_rows(files) == [(f"optimizer.{state}", "a.weight")]


def test_a_complete_universal_checkpoint_has_no_missing_file(tmp_path):
    """DeepSpeed writes only the float32 copy of a parameter without gradients.

    A folder may be called universal by the user: the optimizer's states are then in the ranks' files.
    """
    files = write_universal(tmp_path / "run")
    for state in ("exp_avg", "exp_avg_sq", "step"):
        (files / "zero" / "b" / f"{state}.pt").unlink()
    assert list_missing_rows(files) == []
    zero.write(tmp_path / "named", 1, [WEIGHTS], tag="my_universal")
    assert list_missing_rows(tmp_path / "named" / "my_universal") == []


def test_run_folder_is_its_universal_checkpoint_without_models(statecli, tmp_path):
    """`latest_universal` names the checkpoint; inspect and audit agree."""
    files = write_universal(tmp_path / "run")
    (files / "mp_rank_00_model_states.pt").unlink()
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest_universal").write_text(files.name)
    assert formats.read(str(tmp_path / "run")).format == "deepspeed universal"
    (files / "zero" / "a.weight" / "fp32.pt").unlink()
    for command in ("inspect", "audit"):
        assert statecli(command, str(tmp_path / "run")).code == 2


def test_a_universal_checkpoint_without_models_is_not_clean(tmp_path):
    """No file names the parameters that `zero/` lacks."""
    files = write_universal(tmp_path / "run")
    (files / "mp_rank_00_model_states.pt").unlink()
    shutil.rmtree(files / "zero" / "b")
    (target,) = audit(Request((str(files),), select=("missing-shard",))).targets
    (finding,) = target.findings
    assert finding.message.startswith("the *_model_states.pt files are missing, so ")


@pytest.mark.parametrize("spec", ["1-bf16-1", "2-bf16-2", "3-bf16-2"])
def test_output_of_ds_to_universal_is_complete(deepspeed_folders, tmp_path, spec):
    """In the library's own conversion of two ranks no file is missing until the test deletes a folder."""
    shutil.copytree(deepspeed_folders / f"{spec}.universal", tmp_path, dirs_exist_ok=True)
    assert list_missing_rows(tmp_path) == []
    (out,) = (path for path in tmp_path.iterdir() if path.is_dir())
    shutil.rmtree(out / "zero" / "proj.weight")
    assert list_missing_rows(tmp_path) == [("optimizer.fp32", "proj.weight")]


@pytest.mark.filterwarnings("ignore")
def test_companion_objects_of_deepspeed_are_plain_data(deepspeed_folders):
    """Loss scalers, ZeRO stages, places of parameters in their shard, and shapes of parts of a parameter are data."""
    (target,) = audit(
        Request((str(deepspeed_folders / "companions.pt"),), select=tuple(rule.name for rule in pickles.RULES))
    ).targets
    assert target.reason is None
    assert {finding.rule for finding in target.findings} == {"needs-weights-only-false"}


def test_the_pickles_of_a_universal_checkpoint_are_scanned(tmp_path):
    """The scan covers the pickles below `zero/` too."""
    files = write_universal(tmp_path / "run")
    harmful_pickle = attacks.build_pickle(
        attacks.call_function(attacks.global_name("os", "system"), attacks.text("true"))
    )
    (files / "zero" / "b" / "step.pt").write_bytes(attacks.build(attacks.records(harmful_pickle)))
    names = {mention.qualified for finding in scan.scan_pickles(str(files)) for mention in finding.names}
    assert "os.system" in names
    assert len({finding.place.path for finding in scan.scan_pickles(str(files))}) == 10
