"""Layout of files, created by torch and safetensors or byte by byte."""

from __future__ import annotations

import json
import os
import re
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.formats.torch.archive import compute_data_offset
from statecli.targets.target_result import TargetStatus

from ..formats import zero
from ..formats.attacks import Call, Lies, Member, build, build_pickle, change_record, records, state_dict, tensor, text
from ..formats.torch_archives import read_archive, write_archive


@pytest.fixture
def write_file(tmp_path):
    """Write bytes to a file and return its path."""

    def write(data, name="a.pt"):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def read_place(place):
    """Return the bytes at the place of a finding."""
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    assert len(data) == place.length
    return data


# --- trailing-bytes --------------------------------------------------------------------------------------------------

FILES_WITH_TRAILING_BYTES = {
    "data behind the archive": build(records(), suffix=b"#!evil"),
    "a zip comment": build(records(), Lies(comment=b"#!evil")),
    "data behind a comment": build(records(), Lies(comment=b"no"), suffix=b"#!evil"),
    "bytes behind the pickle": build(records(state_dict(w=tensor()) + b"#!evil")),
}


@pytest.mark.parametrize("data", FILES_WITH_TRAILING_BYTES.values(), ids=FILES_WITH_TRAILING_BYTES)
def test_trailing_bytes_finds_bytes_after_the_content(run_rule, write_file, data):
    """The finding gives the place of the trailing bytes."""
    (finding,) = run_rule("trailing-bytes", write_file(data))
    assert (read_place(finding.place), finding.severity.value) == (b"#!evil", "warning")


def test_trailing_bytes_finds_bytes_after_a_legacy_stream(run_rule, save_checkpoint):
    """The old stream has no end marker: all bytes after the last storage are trailing bytes."""
    path = save_checkpoint({"w": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    with path.open("ab") as file:
        file.write(b"#!evil")
    (finding,) = run_rule("trailing-bytes", path)
    assert read_place(finding.place) == b"#!evil"


def test_trailing_bytes_gives_no_place_in_a_compressed_pickle(run_rule, write_file):
    """The additional bytes are a part of the inflated pickle and have no place in the file."""
    data = build(change_record("data.pkl", data=state_dict(w=tensor()) + b"more", method=8))
    (finding,) = run_rule("trailing-bytes", write_file(data))
    assert not finding.place


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_trailing_bytes_spares_files_of_torch(run_rule, save_checkpoint, legacy):
    """Both containers end where their content does."""
    assert not run_rule(
        "trailing-bytes", save_checkpoint({"w": torch.zeros(3)}, _use_new_zipfile_serialization=not legacy)
    )


# --- unused-bytes ----------------------------------------------------------------------------------------------------


def test_unused_bytes_finds_an_unused_storage(run_rule, write_file):
    """The weights are no longer in the pickle but still in the archive."""
    (finding,) = run_rule("unused-bytes", write_file(build([*records(), Member("archive/data/7", b"secret!")])))
    assert finding.message == "7 bytes belong to storages that no tensor uses: data/7"
    assert read_place(finding.place) == b"secret!"


def test_unused_bytes_finds_an_unknown_record(run_rule, save_checkpoint):
    """The record was added with a zip tool."""
    path = save_checkpoint({"w": torch.zeros(3)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/payload.py", b"import os")
    (finding,) = run_rule("unused-bytes", path)
    assert finding.message == "9 bytes belong to records that torch does not read: payload.py"
    assert read_place(finding.place) == b"import os"


@pytest.mark.parametrize("before", [".format_version", "data/0", "version", "serialization_id"])
def test_unused_bytes_finds_bytes_between_two_records(run_rule, save_checkpoint, tmp_path, before):
    """A record missing from the central directory is still in the file."""
    path = save_checkpoint({"w": torch.zeros(3)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            if name.endswith(f"/{before}"):
                new.writestr("a/hidden", b"SECRET" * 40)
            new.writestr(name, old.read(name))
        new.filelist.remove(new.getinfo("a/hidden"))
    (finding,) = run_rule("unused-bytes", tmp_path / "b.pt")
    assert "belong to no record" in finding.message
    assert b"SECRET" * 40 in read_place(finding.place)


@pytest.mark.parametrize("alignment", [1, 64, 512, 4096])
def test_unused_bytes_spares_the_configured_padding(run_rule, save_checkpoint, alignment):
    """The record `.storage_alignment` contains the alignment of the storages."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        pytest.skip("needs a newer torch: alignment of storages")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("needs a newer torch: alignment of storages")
    with config.patch("save.storage_alignment", alignment):
        path = save_checkpoint({str(n): torch.zeros(n) for n in range(20)})
    assert not run_rule("unused-bytes", path)


def test_unused_bytes_spares_an_archive_rewritten_by_a_zip_tool(run_rule, save_checkpoint, tmp_path):
    """The archive has no padding and no descriptors, but folders and times."""
    path = save_checkpoint({"w": torch.zeros(3), "e": torch.zeros(0)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        new.mkdir("a") if hasattr(new, "mkdir") else None
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert not run_rule("unused-bytes", tmp_path / "b.pt")


# --- misplaced-storage -----------------------------------------------------------------------------------------------


def write_storages_in_order(path, order):
    """Write the archive again as torch does, with its storages in another order."""
    contents = read_archive(path)
    storages = sorted(name for name in contents if name.startswith("data/"))
    names = [name for name in contents if name not in storages] + [storages[position] for position in order]
    write_archive({name: contents[name] for name in names}, str(path))


def load_with_offsets(path):
    """Load with the offsets computed by torch."""
    with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
        return torch.load(path, mmap=True)


STORAGES = {name: torch.full((size,), float(size)) for name, size in (("a", 3), ("b", 100), ("c", 1), ("d", 17))}


def test_misplaced_storage_finds_records_in_another_order(run_rule, save_checkpoint):
    """With records in another order, torch computes wrong offsets and reads wrong values."""
    path = save_checkpoint(STORAGES)
    assert not run_rule("misplaced-storage", path)
    write_storages_in_order(path, [0, 2, 1, 3])
    assert torch.equal(torch.load(path)["b"], STORAGES["b"])
    assert not torch.equal(load_with_offsets(path)["b"], STORAGES["b"])
    (finding,) = run_rule("misplaced-storage", path)
    assert finding.message.startswith("storage 1 starts at byte ")
    write_storages_in_order(path, [0, 1, 2, 3])
    assert torch.equal(load_with_offsets(path)["b"], STORAGES["b"])
    assert not run_rule("misplaced-storage", path)


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_misplaced_storage_spares_files_of_torch(run_rule, save_checkpoint, alignment):
    """Ties, views, empty and repeated storages, of any alignment."""
    base = torch.arange(50.0)
    state = {"e": torch.ones(0), "x": base, "y": base[3:7], "z": torch.ones(0), "w": torch.ones(5, dtype=torch.int8)}
    with torch.utils.serialization.config.patch("save.storage_alignment", alignment):
        path = save_checkpoint({"n": torch.ones(2), **state, "again": state["x"]})
    assert torch.equal(load_with_offsets(path)["y"], base[3:7])
    assert not run_rule("misplaced-storage", path)


@given(
    header=st.one_of(st.integers(0, 2**34), st.integers(2**32 - 300, 2**32 + 3)),
    size=st.one_of(st.integers(0, 2**34), st.integers(2**32 - 3, 2**32 + 3)),
    alignment=st.sampled_from([1, 64, 4096]),
)
def test_computed_offsets_equal_those_of_torch(tmp_path_factory, header, size, alignment):
    """The oracle is torch's own function. Archives of more than 4 GiB have longer headers."""
    path = tmp_path_factory.getbasetemp() / "places.pt"
    if not path.exists():
        torch.save(STORAGES, path)
    reader = torch._C.PyTorchFileReader(str(path))
    expected = reader.get_record_offset_no_read(header, "data/7", size, alignment)
    assert compute_data_offset(header, "places/data/7", size, alignment) == expected


def test_storage_key_that_is_not_a_text_does_not_crash(write_file):
    """A persistent id may be anything."""
    persistent_id = b"(" + text("storage") + text("x") + b"]" + b"tQ"
    data = build(records(build_pickle(b"}(" + text("w") + tensor() + text("x") + persistent_id + b"u")))
    (target,) = audit(Request((str(write_file(data)),), select=("unused-bytes",))).targets
    assert not [finding for finding in target.findings if finding.rule == "internal-error"]


# --- misaligned ------------------------------------------------------------------------------------------------------


def write_safetensors(path, entries, padding=0):
    """A file with the given (name, dtype, bytes). The header is padded to 8 bytes, plus `padding` spaces."""
    header, start = {}, 0
    for name, dtype, size in entries:
        header[name] = {"dtype": dtype, "shape": [size // {"F32": 4, "U8": 1, "C64": 8}[dtype]]}
        header[name]["data_offsets"] = [start, start + size]
        start += size
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % 8 + padding)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(start))
    return path


def test_misaligned_finds_tensors_after_an_unpadded_header(run_rule, tmp_path):
    """A file gives a single finding, with the offset of the first misaligned tensor."""
    path = write_safetensors(tmp_path / "a.safetensors", [("a", "F32", 8), ("b", "F32", 8)], padding=1)
    (finding,) = run_rule("misaligned", path)
    assert finding.message.startswith("a: float32 data begins at byte ")
    assert finding.message.endswith(", which is not a multiple of 4; 1 more tensor is also misaligned")
    assert finding.place.offset % 4


def test_misaligned_finds_a_tensor_after_three_bytes(run_rule, tmp_path):
    """The format does not define the order of tensors in the file."""
    path = write_safetensors(tmp_path / "a.safetensors", [("a", "U8", 3), ("b", "F32", 8)])
    (finding,) = run_rule("misaligned", path)
    assert finding.fqn == "b"


def test_misaligned_spares_bytes_and_complex_numbers(run_rule, tmp_path):
    """Bytes may begin at any offset, and a complex number at a multiple of the size of its parts."""
    path = write_safetensors(tmp_path / "a.safetensors", [("c", "C64", 8), ("a", "U8", 3), ("b", "U8", 8)], padding=4)
    assert not run_rule("misaligned", path)


def test_misaligned_spares_files_of_safetensors_and_torch(run_rule, save_checkpoint, tmp_path):
    """Both libraries align tensors of all types and sizes."""
    state = {str(n): torch.zeros(n, dtype=dtype) for n, dtype in enumerate([torch.uint8, torch.float64, torch.half])}
    save_file(state, tmp_path / "a.safetensors")
    assert not run_rule("misaligned", tmp_path / "a.safetensors")
    assert not run_rule("misaligned", save_checkpoint(state))


def test_misaligned_is_skipped_for_a_legacy_stream(save_checkpoint):
    """No library maps the old stream into memory."""
    path = save_checkpoint({"w": torch.zeros(2)}, _use_new_zipfile_serialization=False)
    (target,) = audit(Request((str(path),), select=("misaligned",))).targets
    assert (target.ran, "legacy-format" in target.skipped[0].reason) == ((), True)


# --- checksum-mismatch -----------------------------------------------------------------------------------------------


def flip_bit(path, needle):
    """Flip a bit in the first place where the file contains `needle`."""
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 1] ^= 1
    path.write_bytes(data)


def test_checksum_mismatch_finds_a_flipped_bit_of_a_storage(run_rule, save_checkpoint):
    """The message names all tensors of the record and no other tensor. torch loads the file silently."""
    big = torch.arange(50.0)
    path = save_checkpoint({"a": big[:20], "b": big[20:], "c": torch.ones(50)})
    flip_bit(path, big.numpy().tobytes())
    torch.load(path)
    (finding,) = run_rule("checksum-mismatch", path, values=True)
    assert finding.message.startswith("a: its bytes do not match the saved checksum: recorded 0x")
    assert finding.message.endswith("; b uses the same bytes")
    assert read_place(finding.place)[4:] == big.numpy().tobytes()[4:]


def test_checksum_mismatch_reads_archives_of_a_distributed_checkpoint(run_rule, tmp_path):
    """Each archive records its own checksums. The message names the damaged file, and no intact file is reported."""
    values = torch.arange(50.0)
    folder = tmp_path / "dcp"
    dcp.save({"w": values, "other": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    assert not run_rule("checksum-mismatch", folder, values=True)
    (file,) = folder.glob("*.distcp")
    flip_bit(file, values.numpy().tobytes())
    (finding,) = run_rule("checksum-mismatch", folder, values=True)
    assert finding.message.startswith(f"w: its bytes in {file.name} do not match the saved checksum: recorded 0x")
    assert read_place(finding.place)[4:] == values.numpy().tobytes()[4:]


def test_checksum_mismatch_gives_both_checksums_of_a_damaged_pickle(run_rule, tmp_path):
    """A distributed checkpoint keeps each tensor in an archive of its own, with a pickle."""
    folder = tmp_path / "dcp"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    flip_bit(file, b"_rebuild_tensor_v2")
    (finding,) = run_rule("checksum-mismatch", folder, values=True)
    assert re.fullmatch(
        r"w: its bytes do not match the saved checksum: computed \w{8}, recorded \w{8}", finding.message
    )


def test_checksum_mismatch_names_each_file_that_has_a_damaged_piece(run_rule, tmp_path):
    """ZeRO split a tensor among ranks. Each damaged piece is reported, with all tensors of its vector."""
    values = torch.arange(1.0, 51.0)
    folder = zero.write(tmp_path / "zero", 2, [{"w": values, "b": -torch.arange(1.0, 3.0)}], moments=False)
    assert not run_rule("checksum-mismatch", folder, values=True)
    files = [folder / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    flip_bit(files[0], values[5:20].numpy().tobytes())
    flip_bit(files[1], values[30:].numpy().tobytes())
    findings = run_rule("checksum-mismatch", folder, values=True)
    expected_starts = [f"optimizer.fp32.w: its bytes in {file.relative_to(folder)}" for file in files]
    assert [
        finding.message.partition(" do not match the saved checksum: ")[0] for finding in findings
    ] == expected_starts
    assert [finding.message.endswith("; optimizer.fp32.b uses the same bytes") for finding in findings] == [False, True]
    assert [finding.place.path for finding in findings] == list(map(str, files))


def test_checksum_mismatch_finds_a_flipped_bit_of_a_shard(run_rule, tmp_path):
    """The target is the index, and the message names the shard."""
    values = torch.arange(50.0)
    torch.save({"w": values}, tmp_path / "pytorch_model-00001-of-00001.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}))
    flip_bit(tmp_path / "pytorch_model-00001-of-00001.bin", values.numpy().tobytes())
    (finding,) = run_rule("checksum-mismatch", index, values=True)
    assert "its bytes in pytorch_model-00001-of-00001.bin do not match the saved checksum: " in finding.message


def test_a_file_next_to_the_arrays_of_an_archive_is_unused(run_rule, tmp_path):
    """Stable-Baselines3 unpickles the text of a record `data`, even in an archive of arrays."""
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    assert not run_rule("unused-bytes", tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("data", "{}")
    (finding,) = run_rule("unused-bytes", tmp_path / "a.npz")
    assert finding.message == "statecli did not read files in the archive that are not arrays: data"


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
def test_checksum_mismatch_compares_uncompressed_bytes(run_rule, tmp_path, packed):
    """An npz records the checksum of each inflated member. A place is a range of the bytes in the file.

    The checksum also covers the header of the array, so the array is not listed and the target fails.
    """
    path = tmp_path / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, w=np.arange(5000.0))
    assert not run_rule("checksum-mismatch", path, values=True)
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("w.npy")
    sum_of = member.CRC.to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(sum_of, (member.CRC ^ 1).to_bytes(4, "little")))
    (target,) = audit(Request((str(path),), select=("checksum-mismatch",), values=True)).targets
    (finding,) = target.findings
    assert (target.status, target.ran, finding.rule) == (TargetStatus.FAILED, (finding.rule,), "checksum-mismatch")
    assert finding.message.startswith("w: its bytes do not match the saved checksum: ")
    assert finding.place.offset + finding.place.length <= path.stat().st_size


def test_checksum_mismatch_does_not_parse_the_path(run_rule, save_checkpoint, tmp_path):
    """The checksums do not come from the text of the error, which begins with the path."""
    values = torch.arange(500.0)
    path = tmp_path / "a: checksum wrong: b.pt"
    os.rename(save_checkpoint({"w": values}), path)
    flip_bit(path, values[8:].numpy().tobytes())
    (finding,) = run_rule("checksum-mismatch", path, values=True)
    assert finding.message.startswith("w: its bytes do not match the saved checksum: recorded 0x")


def test_damaged_values_are_checked_only_by_checksum_mismatch(save_checkpoint, statecli):
    """Only checksum-mismatch judges damaged bytes. With or without this rule, no other rule about values passes."""
    values = torch.arange(500.0)
    values[7] = float("nan")
    path = save_checkpoint({"a": values, "b": torch.ones(50)})
    assert statecli("audit", path, "--values", "--select", "nan").code == 1
    flip_bit(path, values[8:].numpy().tobytes())
    checksum_result = statecli("audit", path, "--values", "--select", "checksum-mismatch", "-f", "json")
    assert (checksum_result.code, checksum_result.json["ran"], checksum_result.json["targets"][0]["status"]) == (
        1,
        ["checksum-mismatch"],
        "audited",
    )
    for options in ((), ("--select", "nan"), ("--ignore", "checksum-mismatch"), ("--select", "unread-values")):
        result = statecli("audit", path, "--values", *options, "-f", "json")
        assert (result.code, result.json["passed"], "nan" in result.json["ran"]) == (2, False, False)
        assert [finding["rule"] for finding in result.json["findings"]] == ["checksum-mismatch"][: not options]
        assert result.err.startswith(f"statecli: {path}: a: checksum wrong: recorded 0x")
    assert statecli("audit", path, "--values", "-x", "a").code == 0
    assert statecli("audit", path, "--no-values", "--select", "layout").code == 0


def test_checksum_mismatch_finds_a_flipped_bit_of_the_pickle(save_checkpoint, statecli):
    """The target fails, whether or not values are read. The finding has the rule and the reason of the failure."""
    path = save_checkpoint({"weight": torch.ones(5)})
    flip_bit(path, b"weight")
    for values in (True, False):
        (target,) = audit(Request((str(path),), values=values)).targets
        assert target.status is TargetStatus.FAILED
        assert [finding.rule for finding in target.findings] == ["checksum-mismatch"]
        assert target.findings[0].message == target.reason
    result = statecli("audit", path, "-f", "json")
    assert (result.code, [finding["rule"] for finding in result.json["findings"]]) == (2, ["checksum-mismatch"])
    assert result.err == f"statecli: {target.reason}\n"


def test_checksum_mismatch_spares_intact_and_unrecorded_bytes(run_rule, save_checkpoint, write_file):
    """0 means no checksum. For a file without checksums the rule is skipped."""
    assert not run_rule("checksum-mismatch", save_checkpoint({"a": torch.ones(3), "e": torch.ones(0)}), values=True)
    path = write_file(build(change_record("data/0", crc=0)))
    (target,) = audit(Request((str(path),), select=("checksum-mismatch",), values=True)).targets
    assert (target.ran, target.skipped[0].reason) == ((), "the file records no tensor checksums")


def test_checksum_mismatch_is_skipped_without_values(save_checkpoint):
    """With --no-values the rule is skipped, and the reason names the option."""
    path = save_checkpoint({"a": torch.arange(50.0)})
    flip_bit(path, torch.arange(50.0).numpy().tobytes())
    (target,) = audit(Request((str(path),), select=("checksum-mismatch",), values=False)).targets
    assert (target.ran, "--no-values" in target.skipped[0].reason) == ((), True)


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def write_shards(tmp_path):
    """Write a folder of two shards. The argument `change` edits the index."""

    def write(change=lambda index: None, metadata=None):
        shards = {"m-1.safetensors": {"a": torch.zeros(2)}, "m-2.safetensors": {"b": torch.zeros(3)}}
        index = {"metadata": metadata or {"total_size": 20}, "weight_map": {}}
        for file, state in shards.items():
            save_file(state, tmp_path / file)
            index["weight_map"] |= dict.fromkeys(state, file)
        change(index["weight_map"])
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return write


def get_failure_reason(path, rule):
    """Reason of a failed target with a single finding, of the given rule."""
    target, *shards = audit(Request((str(path),))).targets
    assert (target.target, target.status) == (str(path), TargetStatus.FAILED)
    assert all(shard.status is TargetStatus.AUDITED for shard in shards)
    assert [finding.rule for finding in target.findings] == [rule]
    assert target.findings[0].severity.value == "error"
    assert target.findings[0].message == target.reason
    return target.reason


def get_missing_shard_message(path):
    """Message of the single finding for a target with missing shards. The target has failed."""
    (target,) = audit(Request((str(path),))).targets
    assert (target.target, target.status) == (str(path), TargetStatus.FAILED)
    (finding,) = target.findings
    assert (finding.rule, finding.severity.value) == ("missing-shard", "error")
    assert finding.help == "copy or download the missing file"
    assert finding.message in target.reason
    return finding.message


def test_missing_shard_finds_a_file_that_the_index_names(write_shards):
    """The target fails, because not all its tensors can be audited."""
    path = write_shards()
    (path / "m-2.safetensors").unlink()
    assert "shard m-2.safetensors is missing: 1 of 2 exist" in get_missing_shard_message(path)
    (path / "m-1.safetensors").unlink()
    assert "shards m-1.safetensors, m-2.safetensors are missing: 0 of 2 exist" in get_missing_shard_message(path)


def test_pickles_next_to_a_missing_shard_are_audited_once(tmp_path, run_rule):
    """A harmful shard is reported for the folder. The shard is not a target of its own."""

    torch.save({"a": torch.zeros(2), "x": Call(os.system, "true")}, tmp_path / "m-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "m-1.bin", "b": "m-2.bin"}}')
    (target,) = audit(Request((str(tmp_path),))).targets
    assert sorted(finding.rule for finding in target.findings) == [
        "missing-shard",
        "needs-weights-only-false",
        "unsafe-global",
    ]


def test_missing_shard_finds_a_gap_in_a_numbered_series(tmp_path):
    """Without an index, the numbers in the file names give the count of shards."""
    save_file({"a": torch.zeros(2)}, tmp_path / "m-00001-of-00002.safetensors")
    assert "m-00002-of-00002.safetensors is missing" in get_missing_shard_message(tmp_path)


def test_missing_shard_spares_a_complete_checkpoint(run_rule, write_shards):
    """Both shards exist."""
    assert not run_rule("missing-shard", write_shards())


def test_index_mismatch_finds_a_tensor_in_another_shard_or_in_none(write_shards):
    """A loader would open the shard named by the index."""
    for change, message in (
        ({"a": "m-2.safetensors", "b": "m-1.safetensors"}, "a: the index assigns this tensor to m-2.safetensors, but "),
        ({"c": "m-2.safetensors"}, "c: the index assigns this tensor to m-2.safetensors, but no shard contains"),
    ):
        assert message in get_failure_reason(
            write_shards(lambda index, change=change: index.update(change)), "index-mismatch"
        )


def test_index_mismatch_finds_a_shard_that_the_index_does_not_name(run_rule, write_shards):
    """If the index is the target, the finding is a note. In a folder, the other files are targets of their own."""
    path = write_shards(lambda index: index.pop("b"), metadata={"format": "pt"})
    (finding,) = run_rule("index-mismatch", path / "model.safetensors.index.json")
    assert (
        finding.message
        == "statecli did not read these weight files next to the shards, because the index does not list them: "
        "m-2.safetensors"
    )
    assert finding.severity.value == "note"
    names = [target.target for target in audit(Request((str(path),), select=("index-mismatch",))).targets]
    assert names == [str(path), str(path / "m-2.safetensors")]


OTHER_CHECKPOINTS = [
    "consolidated.safetensors",
    "model.bin",
    "optimizer.safetensors",
    "model-00001-of-00002.fp16.safetensors",
]


@pytest.mark.parametrize("other_file", OTHER_CHECKPOINTS)
def test_index_mismatch_spares_another_checkpoint_next_to_the_index(run_rule, tmp_path, other_file):
    """The other file is consolidated, in another format, of an optimizer, or of another variant."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    (tmp_path / other_file).touch()
    assert not run_rule("index-mismatch", index)
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert len(run_rule("index-mismatch", index)) == 1


def test_index_mismatch_finds_a_tensor_that_the_index_leaves_out(run_rule, tmp_path):
    """A loader would never load the tensor."""
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m.safetensors"}}')
    (finding,) = run_rule("index-mismatch", tmp_path)
    assert (finding.fqn, finding.severity.value) == ("b", "error")


def test_index_mismatch_finds_a_wrong_total(run_rule, write_shards):
    """The finding is a warning, because the index names the right file for each tensor."""
    (finding,) = run_rule("index-mismatch", write_shards(metadata={"total_size": 24}))
    assert finding.message == "the index records a total of 24 bytes, 4 more than the tensors take (20)"
    assert finding.severity.value == "warning"


def test_index_mismatch_spares_an_index_that_is_right(run_rule, write_shards):
    """Names, files and total are right."""
    assert not run_rule("index-mismatch", write_shards())
    assert not run_rule("index-mismatch", write_shards(metadata={"format": "pt"}))


def test_unselected_rule_has_no_finding_of_a_failed_target(write_shards):
    """The target still fails."""
    path = write_shards()
    (path / "m-2.safetensors").unlink()
    for request in (Request((str(path),), select=("nan",)), Request((str(path),), ignore=("missing-shard",))):
        (target,) = audit(request).targets
        assert (target.status, target.findings) == (TargetStatus.FAILED, ())


# --- legacy-format ---------------------------------------------------------------------------------------------------


def test_legacy_format_finds_a_legacy_stream(run_rule, save_checkpoint):
    """The finding is a note, because statecli reads the old format."""
    (finding,) = run_rule("legacy-format", save_checkpoint({"w": torch.zeros(2)}, _use_new_zipfile_serialization=False))
    assert finding.severity.value == "note"


def test_legacy_format_spares_an_archive(run_rule, save_checkpoint):
    """The pickle of the archive may have any protocol."""
    assert not run_rule("legacy-format", save_checkpoint({"w": torch.zeros(2)}, pickle_protocol=4))


def test_a_tensor_that_contradicts_its_file_fails_the_target(write_file, statecli):
    """Rules report on the other tensors. The target fails even if no other problem exists."""
    bad_tensor = tensor(size=(5,))
    path = write_file(build(records(state_dict(w=tensor(), a=bad_tensor, b=bad_tensor))))
    (target,) = audit(Request((str(path),))).targets
    assert target.status is TargetStatus.FAILED
    message = f"{path}: a and 1 more tensor: shape [5] at offset 0 needs 5 elements, but storage 0 has 4"
    assert target.reason.startswith(message)
    assert "unused-bytes" in target.ran
    result = statecli("audit", path)
    assert (result.code, result.err) == (2, f"statecli: {target.reason}\n")
    assert statecli("audit", path, "-i", "w").code == 0
