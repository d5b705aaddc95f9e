"""Folders and globs: each checkpoint once, in natural order, and all else skipped with its reason."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import pickletools
import re
import tarfile
import zipfile
import zlib
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.package
from hypothesis import example, given
from safetensors.torch import save_file

from statecli import inspect
from statecli.commands.audit.run import Request, audit
from statecli.core.errors import UnreadableError
from statecli.core.natural_order import make_natural_key
from statecli.core.run_scope import NotChecked
from statecli.pickle_scan.one_pickle import begins_as_pickle
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.targets import packed_files
from statecli.targets.expand import (
    ModelFolders,
    expand_targets,
    glob_covers,
    is_named_as_checkpoint,
    is_reached,
    skip_file,
    skip_subfolder,
)
from statecli.targets.target_result import TargetStatus

from ..formats.attacks import Call


def expand_paths(*texts):
    """Return the targets' paths and the skipped or failed targets."""
    targets = list(expand_targets([str(text) for text in texts]))
    return [target for target in targets if isinstance(target, str)], [
        target for target in targets if not isinstance(target, str)
    ]


def test_steps_come_in_natural_order(tmp_path):
    """`step-2` comes before `step-10`."""
    for number in (10, 2, 1):
        torch.save({"w": torch.zeros(1)}, tmp_path / f"step-{number}.pt")
    paths, _ = expand_paths(tmp_path)
    assert [path.rpartition("/")[2] for path in paths] == ["step-1.pt", "step-2.pt", "step-10.pt"]


def test_model_folder_and_separate_checkpoint_are_two_targets(tmp_path):
    """Shards belong to their index, and a training's optimizer to the model next to the optimizer file."""
    weights = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}
    for name, shard in weights.items():
        save_file({name: torch.zeros(1)}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / "config.json").write_text("{}")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    torch.save({"w": torch.zeros(1)}, tmp_path / "probe.pt")
    paths, other_targets = expand_paths(tmp_path)
    assert paths == [str(tmp_path), str(tmp_path / "probe.pt")]
    assert [(target.status, target.target.rpartition("/")[2]) for target in other_targets] == [
        (TargetStatus.SKIPPED, "config.json")
    ]
    assert "JSON" in other_targets[0].reason


def test_checkpoint_is_detected_by_its_name_or_content(tmp_path):
    """A checkpoint may have any name; a text file is skipped unless its name is a checkpoint's."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "code.py").write_text("no Python")
    (tmp_path / "broken.pt").write_text("hello")
    paths, other_targets = expand_paths(tmp_path)
    assert [path.rpartition("/")[2] for path in paths] == ["broken.pt", "weights"]
    reason = "is a text file"
    assert map_skip_reasons(other_targets) == {str(tmp_path / "code.py"): reason, str(tmp_path / "notes.txt"): reason}


@pytest.mark.parametrize("suffix", [".pth.tar", ".ckpt.tar", ".pt.tar", ".pth.tar.gz"])
def test_a_damaged_checkpoint_with_the_suffix_of_a_tar_archive_fails(tmp_path, suffix):
    """Training scripts name the output of torch.save `model_best.pth.tar`."""
    assert audit_next_to_a_model(tmp_path, f"model_best{suffix}", b"\x93 no torch file" * 99) is TargetStatus.FAILED


def test_a_folder_stands_for_its_checkpoint_with_the_suffix_of_a_tar_archive(tmp_path):
    """The same holds as for a single `model.pth`, also with an optimizer next to the checkpoint."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "model_best.pth.tar")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pth.tar")
    assert [tensor.fqn for tensor in inspect(tmp_path).state.tensors] == ["w"]


def test_each_target_is_listed_once(tmp_path):
    """A file named by its path, by a glob and by its folder is a single target."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
    paths, _ = expand_paths(tmp_path / "a.pt", tmp_path / "*.pt", tmp_path)
    assert len(paths) == 1


def pack_tar(mode, *members, **options):
    """Return a tar archive of a text file and the given members, (name, bytes)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode, **options) as archive:
        for name, data in (("README.txt", b"read me\n" * 999), *members):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def audit_next_to_a_model(folder, name, content):
    """Write a file next to a clean model and return the file's status."""
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / name).write_bytes(content)
    results = audit(Request((str(folder),))).targets
    return next(result.status for result in results if result.target.endswith(name))


PICKLE = b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R."
OLD_PICKLE = b"cos\nsystem\n(S'true'\ntR."
#: A hard link has no data, whatever its header says: a reader that skips data would miss the next member.
LINK = tarfile.TarInfo("link")
LINK.type, LINK.size = tarfile.LNKTYPE, 4096
TAR_WITH_LINK = LINK.tobuf() + pack_tar("w", ("x.pkl", PICKLE))
GZIP = gzip.compress(PICKLE, mtime=0)


def pack_lzma(data, **filter):
    """Return LZMA data without a container."""
    return lzma.compress(data, format=lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, **filter}])


def pack_sized_lzma(data, dictionary):
    """Return LZMA data whose header has the size of the data and the given dictionary size."""
    return b"\x5d" + dictionary.to_bytes(4, "little") + len(data).to_bytes(8, "little") + pack_lzma(data)[13:]


def pack_zfile(data):
    """Return the data in the compressed format of joblib before 0.10."""
    return b"ZF" + hex(len(data)).encode().ljust(19) + zlib.compress(data)


LZ4 = b"\x04\x22\x4d\x18" + bytes(99)


def flip_byte(data, position):
    """Return the data with one byte changed."""
    return data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :]


ARCHIVES_WITH_CHECKPOINT = {
    **dict.fromkeys(("scaler.pkl.gz", "w.joblib.z", "w.pt.bz2", "w.ckpt.xz", "w.safetensors.zst"), GZIP),
    "w.nemo": pack_tar("w", ("model_weights.ckpt", b"")),
    "x.tar": pack_tar("w", ("a/weights.ckpt", b"")),
    "link.tar": TAR_WITH_LINK,
    "x.tar.gz": pack_tar("w:gz", ("junk", bytes(3_000_000)), ("weights.ckpt", b"")),
    "content.tbz2": pack_tar("w:bz2", ("data", PICKLE)),
    "long.txz": pack_tar("w:xz", ("d/" * 90 + "x.pkl", b""), format=tarfile.PAX_FORMAT),
    "packed.tar.gz": pack_tar("w:gz", ("x.pkl.xz", b"")),
    "joblib.bin": zlib.compress(PICKLE),
    "gz.dat": gzip.compress(OLD_PICKLE),
    "bz2": bz2.compress(OLD_PICKLE),
    "alone.lzma": lzma.compress(PICKLE, format=lzma.FORMAT_ALONE),
    "two.gz": gzip.compress(b"") + bytes(600_000) + gzip.compress(PICKLE),
    "two.bz2": bz2.compress(b"") + bz2.compress(PICKLE),
    "model.tar.zst": b"\x28\xb5\x2f\xfd" + bytes(99),
    "weights.zst": b"\x28\xb5\x2f\xfd" + bytes(99),
    "state.sav": b"\x28\xb5\x2f\xfd" + bytes(99),
    "best_model": b"\x50\x2a\x4d\x18\4\0\0\0abcd\x28\xb5\x2f\xfd" + bytes(99),
    # Python's gzip ignores reserved flags and the header's checksum, and compares the data's checksum last.
    "reserved.sav": GZIP[:3] + bytes([0x20]) + GZIP[4:],
    "header.sav": GZIP[:3] + b"\2" + GZIP[4:10] + b"\0\0" + GZIP[10:],
    "named.sav": GZIP[:3] + b"\x1e" + GZIP[4:10] + b"\2\0ab" + b"n" * 300_000 + b"\0c\0??" + GZIP[10:],
    "checksum.sav": GZIP[:-8] + bytes(8),
    "zlib.sav": zlib.compress(PICKLE)[:-4] + bytes(4),
    "tail.sav": flip_byte(zlib.compress(PICKLE + os.urandom(9000)), 300),
    "zf.sav": pack_zfile(PICKLE),
    "wide_zf.sav": b"ZF" + hex(len(PICKLE)).encode().ljust(20) + zlib.compress(PICKLE),
    "dict.sav": pack_lzma(PICKLE, dict_size=4096),
    "lc0.sav": pack_lzma(PICKLE, lc=0),
    "zero.sav": pack_lzma(PICKLE, lc=0, lp=0, pb=0),
    "large.sav": b"\x5d" + b"\xff" * 4 + pack_lzma(PICKLE)[5:],
    "size.sav": pack_sized_lzma(PICKLE, 2**16),
    "after.sav": pack_sized_lzma(b"", 2**16) + lzma.compress(PICKLE),
    "second.sav": lzma.compress(b"") + pack_lzma(PICKLE, lc=0, lp=0, pb=0),
    "tar.sav": gzip.compress(pack_tar("w", ("m.pkl", PICKLE)))[:-8] + bytes(8),
    "features.lz4": LZ4,
    "lz4.sav": LZ4,
    "second_lz4.sav": b"\x5a\x2a\x4d\x18\2\0\0\0ab" + LZ4,
    "long_lz4.sav": b"\x5a\x2a\x4d\x18\xff\xff\0\0" + bytes(65_535) + LZ4,
    "model.tar.lz4": LZ4,
    # Another program may still read these files.
    "broken.gz": b"\x1f\x8b\x08\0" + b"\xff" * 99,
    "method.gz": b"\x1f\x8b\x09\0" + bytes(99),
    "cut.csv.gz": gzip.compress(b"id,name\n1,some\n")[:-12],
    "checksum.csv.gz": gzip.compress(b"id,name\n1,some\n")[:-8] + bytes(8),
    "broken.xz": flip_byte(lzma.compress(b"a" * 1000 + os.urandom(500)), 60),
    "broken.bz2": flip_byte(bz2.compress(b"id,name\n1,some\n"), 20),
    "cut.tar.gz": pack_tar("w:gz", ("a.jpg", os.urandom(90_000)))[:70_000],
}
ARCHIVES_WITHOUT_CHECKPOINT = {
    "data.tar": pack_tar("w", ("a.jpg", b"\xff\xd8\xff" + bytes(999))),
    "data.tar.gz": pack_tar("w:gz", ("a.jpg", b"\xff\xd8\xff" + bytes(999)), ("b.json", b"{}")),
    "data.tar.zst": b"\x28\xb5\x2f\xfd" + bytes(99),
    "statements.jsonl.zst": b"\x28\xb5\x2f\xfd" + bytes(99),
    "model_scores.csv": b"\x28\xb5\x2f\xfd" + bytes(99),
    "words.csv.gz": gzip.compress(b"id,name\n1,some\n"),
    "idx.gz": gzip.compress(b"\0\0\x08\x03" + bytes(999)),
    "long.csv.gz": flip_byte(gzip.compress(os.urandom(20_000)), 15_000),
    "x.dat": b"\x78\x9c" + b"\xff" * 99,
    "x.txt": b"x^2 + y^2 = z^2, and so on for other numbers\n" * 9,
    "ZF.txt": b"ZF Friedrichshafen, x^2\n" * 9,
    "words.lzma": pack_lzma(b"id,name\n1,some\n"),
    "words.csv.xz": lzma.compress(b"id,name\n1,some\n", preset=9),
    "zeros.dat": bytes(300),
    "words.csv.lz4": LZ4,
    "data.tar.lz4": LZ4,
    "one.dat": b"\1" + bytes(300),
    "numbers.dat": b"".join(n.to_bytes(8, "little") for n in range(1000)),
    "a.tar": b"a" + bytes(99) + pack_tar("w")[100:],
}


@pytest.mark.parametrize("name", ARCHIVES_WITH_CHECKPOINT)
def test_archives_that_hold_a_checkpoint_fail(tmp_path, name):
    """The checkpoint is detected by the name or the first bytes of any member, and in any compressed stream."""
    assert audit_next_to_a_model(tmp_path, name, ARCHIVES_WITH_CHECKPOINT[name]) is TargetStatus.FAILED


def test_a_tar_whose_last_member_is_a_checkpoint_is_to_be_unpacked(tmp_path):
    """The `.nemo` of NeMo: the end of the checkpoint is near the end of the file, but the zip is in a member."""
    checkpoint = io.BytesIO()
    torch.save({"w": torch.ones(9)}, checkpoint)
    path = tmp_path / "m.nemo"
    path.write_bytes(pack_tar("w", ("./model_weights.ckpt", checkpoint.getvalue())))
    (result,) = audit(Request((str(path),))).targets
    assert result.reason == f"{path}: is a tar archive: unpack it first (tar -xf)"
    assert [finding.rule for finding in result.findings] == ["nested-pickle", "unscanned-pickle"]
    assert "damaged" not in str(result.findings)


def test_damaged_archive_error_names_a_remedy(tmp_path):
    """A truncated log fails a check of checkpoints, so the message names a remedy."""
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"epoch 1\nloss 2\n")[:-12])
    (result,) = audit(Request((str(tmp_path),))).targets
    problem = "is a compressed file that may contain a checkpoint and cannot be unpacked (it ends too early)"
    assert result.reason == f"{result.target}: {problem}; replace the file with a valid copy, or remove it"


def pack_compiled(content, name=b""):
    """Return a file of `save_cache_artifacts` or, with a name, of `CompiledArtifact.save`."""

    def put(data):
        return len(data).to_bytes(8, "big") + data

    count = (1).to_bytes(8, "big")
    data = put(name) + put(bytes(32)) if name else count + put(b"aW5kdWN0b3I=") + count + put(b"a2V5")
    data += put(content)
    return zlib.crc32(data).to_bytes(4, "big") + data


COMPILED_FILES = {
    "cache.dat": pack_compiled(PICKLE),
    "model.bin": pack_compiled(bytes(20_000_000)),
    "a.dat": pack_compiled(PICKLE, b"CacheCompiledArtifact"),
    "b.dat": pack_compiled(PICKLE, b"AOTCompiledArtifact"),
}


@pytest.mark.parametrize("name", COMPILED_FILES)
def test_files_of_torch_compile_fail(tmp_path, name):
    """torch unpickles and runs the content; the pickles are hidden between lengths and base64 texts."""
    assert audit_next_to_a_model(tmp_path, name, COMPILED_FILES[name]) is TargetStatus.FAILED
    with pytest.raises(UnreadableError, match=r"is a torch\.compile cache, which statecli does not read"):
        inspect(str(tmp_path / name))


@pytest.mark.parametrize("name", ARCHIVES_WITHOUT_CHECKPOINT)
def test_archives_of_other_files_are_skipped(tmp_path, name):
    """They are counted as not checked."""
    assert audit_next_to_a_model(tmp_path, name, ARCHIVES_WITHOUT_CHECKPOINT[name]) is TargetStatus.SKIPPED


@pytest.mark.parametrize(
    ("name", "status"), [("model.tar.gz", TargetStatus.FAILED), ("data.tar.gz", TargetStatus.SKIPPED)]
)
def test_name_decides_for_an_archive_too_large_to_unpack(tmp_path, monkeypatch, name, status):
    """Only the beginning of a large archive is unpacked."""
    monkeypatch.setattr(packed_files, "MAX_UNPACKED_BYTES", 10**6)
    content = pack_tar("w:gz", ("junk", bytes(2_000_000)), ("x.pkl", PICKLE))
    assert audit_next_to_a_model(tmp_path, name, content) is status


def build_late_pickle(length, opcode=b"X"):
    """Return a pickle without PROTO that starts with a text of `length` bytes and then calls a function."""
    text = os.urandom(length // 2).hex().encode()
    first = opcode + len(text).to_bytes(4, "little") + text if opcode == b"X" else opcode + text + b"\n"
    return first + b"0cbuiltins\nexec\n(S'1'\ntR."


LATE_PICKLE = build_late_pickle(100_000)
#: Blocks that are stored, as lz4 writes incompressible data.
LZ4_BLOCKS = b"".join(
    (len(block) | 1 << 31).to_bytes(4, "little") + block
    for block in (LATE_PICKLE[offset : offset + 65536] for offset in range(0, len(LATE_PICKLE), 65536))
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vectorizer.z", zlib.compress(LATE_PICKLE)),
        ("vectorizer.gz", gzip.compress(LATE_PICKLE)),
        ("a.bz2", bz2.compress(LATE_PICKLE)),
        ("a.xz", lzma.compress(build_late_pickle(1_000_000), preset=0)),
        ("lines.gz", gzip.compress(build_late_pickle(50_000, b"V"))),
        ("head.gz", gzip.compress(build_late_pickle(4088))),
        ("many.gz", gzip.compress(b"X\xa0\x0f\0\0" + b"a" * 4000 + b"0" + LATE_PICKLE)),
        ("data.tar", pack_tar("w", ("junk", b"text"), ("x", LATE_PICKLE), ("y", b"text"))),
        ("data.tar.gz", pack_tar("w:gz", ("x", LATE_PICKLE))),
        ("vectorizer.lz4", b"\x04\x22\x4d\x18" + b"\x60\x40\x82" + LZ4_BLOCKS + bytes(4)),
    ],
)
def test_a_packed_pickle_that_begins_with_a_long_text_is_found(tmp_path, name, content):
    """joblib unpickles the file, and its first global comes after the bytes that are examined first."""
    assert audit_next_to_a_model(tmp_path, name, content) is TargetStatus.FAILED


@pytest.mark.parametrize("first", ["Time,value", "X,y", "Block", "Value", "(((", "Index 1", "S", "label"])
def test_packed_text_is_not_a_pickle(tmp_path, first):
    """The first letter of a text may also be an opcode of pickle."""
    text = (first + "\n" + "1.5,2.5\n" * 100_000).encode()
    assert audit_next_to_a_model(tmp_path, "table.csv.gz", gzip.compress(text)) is TargetStatus.SKIPPED


def test_names_are_sorted_by_their_numbers():
    """The number may have more digits than Python converts, because a server may list any name."""
    names = ["step-" + "9" * 5000, "step-10", "step-2"]
    assert sorted(names, key=make_natural_key) == names[::-1]


def test_an_unpacked_torch_package_fails(tmp_path):
    """`PackageImporter` runs the Python files of a folder like the Python files of an archive."""
    archive = tmp_path / "packed.zip"
    with torch.package.PackageExporter(str(archive)) as exporter:
        exporter.save_source_string("own", "VALUE = 1\n")
    zipfile.ZipFile(archive).extractall(tmp_path / "unpacked")
    (root,) = (tmp_path / "unpacked").iterdir()
    assert torch.package.PackageImporter(str(root)).import_module("own").VALUE == 1
    _, other_targets = expand_paths(tmp_path / "unpacked")
    (failed_target,) = (target for target in other_targets if target.status is TargetStatus.FAILED)
    assert (failed_target.target, "is an unpacked torch.package" in str(failed_target.reason)) == (str(root), True)


def test_class_target_is_not_a_path():
    """Brackets in the arguments of a class are not a glob, and `..` is not a parent folder."""
    texts = ["net.py:Net(sizes=[1, 2])", "net.py:Net('a/../b')", "net.py:Net('b')"]
    assert expand_paths(*texts) == (texts, [])


def map_skip_reasons(other_targets):
    return {target.target: target.reason for target in other_targets if target.status is TargetStatus.SKIPPED}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("before", ["", "x" * 10_000, "y" * 300_000], ids=len)
def test_pickle_of_any_protocol_and_name_is_a_target(tmp_path, protocol, before):
    """Pickles of protocols 0 and 1 begin like text; their calls may come late, and anything may follow."""
    (tmp_path / "model.dat").write_bytes(pickle.dumps([before, Call(print, "called")], protocol) + b"\nnotes\n")
    paths, other_targets = expand_paths(tmp_path)
    assert (paths, other_targets) == ([str(tmp_path / "model.dat")], [])


def test_text_pickle_truncated_after_a_call_is_a_target(tmp_path):
    """The call has already run when unpickling reaches the truncated end."""
    (tmp_path / "model.dat").write_bytes(b"cos\nsystem\n(S'true'\ntR")
    assert expand_paths(tmp_path)[0] == [str(tmp_path / "model.dat")]


def test_source_and_text_files_are_not_detected_as_pickles():
    """Source, prose, JSON, CSV, YAML, TOML, HTML: no text written by people is detected as a pickle."""
    kinds = (".py", ".md", ".txt", ".json", ".csv", ".yaml", ".yml", ".toml", ".html", ".js", ".h", ".cpp", ".rst")
    root = Path(__file__).parents[2]
    own_folders = (
        folder for folder in root.iterdir() if folder.is_dir() and folder.name not in (".git", ".venv", "build")
    )
    beginnings = {b""}  # only the beginning matters: thousands of files begin with the same license or imports
    for folder in (*own_folders, Path(torch.__file__).parent, Path(pytest.__file__).parents[1]):
        for path in itertools.islice((path for path in folder.rglob("*") if path.name.endswith(kinds)), 2000):
            if path.is_file():
                with path.open("rb") as file:
                    beginning = file.read(64)
                if beginning not in beginnings:
                    beginnings.add(beginning)
                    with ByteSource(str(path)) as source:
                        assert not begins_as_pickle(source), path
    assert len(beginnings) > 1000


_PARTS = (
    "cos\nsystem\n",
    "ios\nsystem\n",
    "(",
    "t",
    "R",
    "o",
    "b",
    ".",
    "l",
    "]",
    "}",
    "S'a'\n",
    "I1\n",
    "Vb\n",
    "a",
    "text",
)


@given(st.lists(st.sampled_from(_PARTS), min_size=1).map("".join))
@example("cos\nsystem\n(S'a'\ntR.")
def test_detected_text_pickle_has_a_call_or_a_stop(tmp_path_factory, text):
    """`pickletools` reads the text up to a call or a STOP. Appending to an import also calls its `append`."""
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(text.encode())
    with ByteSource(str(path)) as source:
        if begins_as_pickle(source):
            names = []
            with contextlib.suppress(ValueError):
                names.extend(opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes()))
            calls = {"STOP", "REDUCE", "INST", "OBJ", "BUILD", *(["APPEND"] if "GLOBAL" in names else [])}
            assert calls & set(names)


def test_bin_file_is_detected_by_its_name_or_content(tmp_path):
    """Firmware may have the suffix `.bin` too; unreadable weights and Git LFS pointers remain targets."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "checkpoint.bin")
    (tmp_path / "firmware.bin").write_bytes(b"\x7fELF" + bytes(60))
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(bytes(60))
    (tmp_path / "asset.bin").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n")
    paths, other_targets = expand_paths(tmp_path / "*.bin")
    names = [path.rpartition("/")[2] for path in paths]
    assert names == ["asset.bin", "checkpoint.bin", "pytorch_model-00001-of-00002.bin"]
    assert map_skip_reasons(other_targets) == {str(tmp_path / "firmware.bin"): "is a program (ELF)"}


def test_other_names_of_a_file_are_skipped_with_the_reason(tmp_path):
    """The file's own name comes before a link's, in any order of the arguments."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "model.pt")
    (tmp_path / "best.pt").symlink_to("model.pt")
    for texts in ((tmp_path,), (tmp_path / "best.pt", tmp_path), (tmp_path / "*.pt",)):
        paths, other_targets = expand_paths(*texts)
        assert paths == [str(tmp_path / "model.pt")]
        assert map_skip_reasons(other_targets) == {
            str(tmp_path / "best.pt"): f"is the same file as {tmp_path / 'model.pt'}"
        }
    assert expand_paths(tmp_path / "best.pt") == ([str(tmp_path / "best.pt")], [])


def test_a_hub_cache_is_audited_by_its_snapshots(tmp_path):
    """huggingface_hub keeps the bytes in `blobs`; the names in a snapshot are links to the blobs."""
    model = tmp_path / "models--o--m"
    for folder in ("blobs", "snapshots/abc"):
        (model / folder).mkdir(parents=True)
    save_file({"w": torch.zeros(1)}, model / "blobs" / "deadbeef")
    (model / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/deadbeef")
    paths, other_targets = expand_paths(tmp_path)
    assert paths == [str(model / "snapshots" / "abc")]
    reason = f"is the same file as {model / 'snapshots' / 'abc' / 'model.safetensors'}"
    assert map_skip_reasons(other_targets) == {str(model / "blobs" / "deadbeef"): reason}


def test_folder_and_its_file_named_together_are_two_targets(tmp_path):
    """The file is not reported as another name of the folder."""
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    paths, other_targets = expand_paths(tmp_path, tmp_path / "model.safetensors")
    assert (paths, other_targets) == ([str(tmp_path), str(tmp_path / "model.safetensors")], [])


def test_empty_folder_is_reported(tmp_path):
    """Next to a folder with checkpoints, an empty folder would otherwise go unnoticed."""
    (tmp_path / "full").mkdir()
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    torch.save({"w": torch.zeros(1)}, tmp_path / "full" / "a.pt")
    paths, other_targets = expand_paths(tmp_path / "full", tmp_path / "empty")
    assert paths == [str(tmp_path / "full" / "a.pt")]
    assert map_skip_reasons(other_targets) == {str(tmp_path / "empty"): "a folder without files"}


@pytest.fixture
def shards(tmp_path):
    """A folder with a model in two files and an index."""
    names = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")
    for n, name in enumerate(names):
        save_file({f"w{n}": torch.zeros(1)}, tmp_path / name)
    index = {"weight_map": {f"w{n}": name for n, name in enumerate(names)}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def find_replacement(path, homes):
    """Return the path of the model that replaces a file as the target, if any."""
    model = homes.find_replacement(str(path))
    return model if model is None or isinstance(model, str) else model.path


def test_named_shard_is_replaced_only_with_as_found(shards):
    """With `as_found`, the model's folder replaces the shard."""
    shard = shards / "m-00001-of-00002.safetensors"
    assert find_replacement(shard, ModelFolders()) is None
    assert find_replacement(shard, ModelFolders(as_found=True)) == str(shards)
    assert find_replacement(shards, ModelFolders(as_found=True)) is None


@pytest.mark.parametrize("as_found", [False, True])
def test_lock_decides_which_path_of_a_model_is_audited(shards, as_found):
    """The lock names the shard, the folder, the index, or none of the three."""
    shard, index = shards / "m-00001-of-00002.safetensors", shards / "m.safetensors.index.json"
    for locked, expected in ((shard, None), (shards, str(shards)), (index, str(index))):
        homes = ModelFolders(as_found=as_found, is_locked=lambda path, locked=locked: path == str(locked))
        assert find_replacement(shard, homes) == expected
    empty_folders = ModelFolders(as_found=as_found, is_locked=lambda _: False)
    assert find_replacement(shard, empty_folders) == (str(shards) if as_found else None)


def test_two_spellings_are_one_target(in_tmp_path):
    """The target is a file, or a class or a section, whose text is not a path."""
    torch.save({"w": torch.zeros(1)}, "a.pt")
    texts = ("a.pt", "./a.pt", "a.pt#x", "a.pt#y", "a.pt#x", "net.py:Net")
    paths, other_targets = expand_paths(*texts)
    assert (paths, other_targets) == (["a.pt", "a.pt#x", "a.pt#y", "net.py:Net"], [])


@pytest.mark.parametrize("depth", [64, 65])
def test_folder_below_the_maximum_depth_fails(tmp_path, depth):
    """The deepest allowed folder is walked, and a folder below fails."""
    folder = tmp_path.joinpath(*["d"] * depth)
    folder.mkdir(parents=True)
    torch.save({"w": torch.zeros(1)}, folder / "a.pt")
    paths, other_targets = expand_paths(tmp_path)
    assert (len(paths), [target.status for target in other_targets]) == (
        (1, []) if depth == 64 else (0, [TargetStatus.FAILED])
    )


# --- folders and files that cannot be read ----------------------------------------------------------------------------


def describe_target(result):
    """Return the name, the status and the reason of a target that is not a path."""
    return result.target, result.status, result.reason


LISTING_ERRORS = {
    "not permitted": (PermissionError(13, "Permission denied"), "cannot be listed: permission denied"),
    "of no known reason": (OSError(), "cannot be listed: unknown error"),
    "far away": (UnreadableError("the server answered 503"), "the server answered 503"),
}


@pytest.mark.parametrize("case", LISTING_ERRORS)
def test_a_folder_that_cannot_be_listed_has_failed(tmp_path, monkeypatch, case):
    """Only the unreadable folder fails, with its path and the reason; files next to the folder are audited."""
    error, reason = LISTING_ERRORS[case]
    names = files.list_names
    (tmp_path / "closed").mkdir()
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
    closed = str(tmp_path / "closed")

    def list_names(path):
        if path == closed:
            raise error
        return names(path)

    monkeypatch.setattr(files, "list_names", list_names)
    paths, (failure,) = expand_paths(tmp_path)
    assert paths == [str(tmp_path / "a.pt")]
    assert describe_target(failure) == (closed, TargetStatus.FAILED, f"{closed}: {reason}")


def test_partly_listed_folder_fails_for_the_rest(tmp_path, monkeypatch):
    """The listed files are audited, and the rest of the folder has not passed."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
    monkeypatch.setattr(files, "explain_missing_names", lambda path: "its server stopped")
    paths, (failure,) = expand_paths(tmp_path)
    assert paths == [str(tmp_path / "a.pt")]
    reason = f"{tmp_path}: the folder may contain other files: its server stopped; name the files as targets"
    assert describe_target(failure) == (str(tmp_path / "*"), TargetStatus.FAILED, reason)


def test_a_glob_that_cannot_be_listed_has_failed(tmp_path, monkeypatch):
    """A listing error is not reported as a glob without matches."""

    def matching(pattern):
        raise UnreadableError("the server answered 503")

    monkeypatch.setattr(files, "match_glob", matching)
    paths, (failure,) = expand_paths(tmp_path / "*.pt")
    assert (paths, describe_target(failure)) == (
        [],
        (str(tmp_path / "*.pt"), TargetStatus.FAILED, "the server answered 503"),
    )


def test_broken_link_and_empty_file_are_skipped(tmp_path):
    """A loader cannot load anything from a broken link or an empty file."""
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "empty").touch()
    paths, other_targets = expand_paths(tmp_path)
    assert paths == []
    assert map_skip_reasons(other_targets) == {
        str(tmp_path / "link"): "is a broken link",
        str(tmp_path / "empty"): "is an empty file",
    }
    counts = {target.target.rpartition("/")[2]: target.not_checked for target in other_targets}
    assert counts == {
        "link": (NotChecked("file", 1, "broken link"),),
        "empty": (),
    }


@pytest.mark.parametrize("content", [b"hello", b"a"])
def test_a_file_that_cannot_be_opened_has_failed(tmp_path, monkeypatch, content):
    """An unreadable file may have any content."""
    (tmp_path / "notes").write_bytes(content)

    def refuse_open(path):
        raise UnreadableError("cannot be opened: permission denied")

    monkeypatch.setattr(files, "open_file", refuse_open)
    paths, (failure,) = expand_paths(tmp_path)
    path = str(tmp_path / "notes")
    assert (paths, describe_target(failure)) == (
        [],
        (path, TargetStatus.FAILED, f"{path}: cannot be opened: permission denied"),
    )


def test_an_empty_file_that_cannot_be_opened_is_skipped(tmp_path, monkeypatch):
    """A loader cannot load anything from the file."""
    (tmp_path / "notes").touch()

    def refuse_open(path):
        raise UnreadableError("cannot be opened: permission denied")

    monkeypatch.setattr(files, "open_file", refuse_open)
    paths, (skipped,) = expand_paths(tmp_path)
    path = str(tmp_path / "notes")
    assert (paths, describe_target(skipped)) == (
        [],
        (path, TargetStatus.SKIPPED, "cannot be opened: permission denied"),
    )


@pytest.mark.parametrize("error", [UnreadableError("is not there"), FileNotFoundError(2, "No such file")], ids=type)
def test_file_deleted_during_the_walk_fails(tmp_path, monkeypatch, error):
    """The size of the file cannot be read either, from a server or from the disk."""
    (tmp_path / "notes").write_bytes(b"hello")

    def fails(path):
        raise UnreadableError("is not there")

    def has_no_size(path):
        raise error

    monkeypatch.setattr(files, "open_file", fails)
    monkeypatch.setattr(files, "get_size", has_no_size)
    _, (failure,) = expand_paths(tmp_path)
    assert describe_target(failure) == (
        str(tmp_path / "notes"),
        TargetStatus.FAILED,
        f"{tmp_path / 'notes'}: is not there",
    )


# --- skipped files and folders, and their counts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "noun"),
    [
        ("a 7z archive: unpack it first", "7z archive"),
        ("an ONNX model, which statecli does not read", "ONNX model"),
        ("a program (ELF)", "program"),
        ("source; not read", "source"),
        ("data of a, b: c", "data of a"),
        ("a banana", "banana"),
    ],
)
def test_skipped_file_is_counted_by_its_format(description, noun):
    """The counted noun has no article and no advice."""
    skipped_file = skip_file("x", description)
    assert describe_target(skipped_file) == ("x", TargetStatus.SKIPPED, f"is {description}")
    assert skipped_file.not_checked == (NotChecked("file", 1, noun),)


def test_skipped_folders_are_counted_by_their_reason(tmp_path):
    """Tools' folders and links out of the folder are counted; other links lead to files that are audited anyway."""
    for name in (".git", "__pycache__", "node_modules"):
        (tmp_path / name).mkdir()
    outside_folder = tmp_path.parent / f"{tmp_path.name}_outside"
    outside_folder.mkdir()
    (tmp_path / "out").symlink_to(outside_folder, target_is_directory=True)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    _, other_targets = expand_paths(tmp_path)
    reasons = {target.target: (target.reason, *target.not_checked) for target in other_targets}
    of_tool = (
        "a folder of a tool, such as .git or .venv, with no checkpoint files except in installed packages",
        NotChecked("folder", 1, "of a tool"),
    )
    assert reasons == {
        **{str(tmp_path / name): of_tool for name in (".git", "__pycache__", "node_modules")},
        str(tmp_path / "out"): ("a link to a folder", NotChecked("folder", 1, "link")),
        str(tmp_path / "loop"): ("a link to a folder that statecli reads under another path",),
    }


def test_an_ordinary_folder_is_not_skipped(tmp_path):
    """A lock that covers the code next to the weights checks each subfolder of the model."""
    (tmp_path / "code").mkdir()
    assert skip_subfolder(str(tmp_path / "code")) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.pt", True),
        ("MODEL.PT", True),
        ("far/model.safetensors", True),
        ("data.pkl", False),
        ("data.PICKLE", False),
        ("pytorch_model.bin", True),
        ("firmware.bin", False),
        ("pt", False),
        ("model.pt.txt", False),
        ("model_best.pth.tar", True),
        ("last.CKPT.tar", True),
        ("step.pt.tar", True),
        ("images.tar", False),
        ("pytorch_model.bin/notes", False),
    ],
)
def test_names_of_checkpoints_are_recognised(name, expected):
    """A pickle, and most `.bin` files, may have any content."""
    assert is_named_as_checkpoint(name) is expected


# --- globs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hidden_folders(tmp_path, in_tmp_path):
    """The current folder, with hidden and other folders; `weights` is a pickle under a name that no loader reads."""
    for path in (".git/weights", ".hg/a.pt", ".run/weights", "run/weights", ".last/a.pt"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(PICKLE)


SKIPPED_HIDDEN_FOLDER = (TargetStatus.SKIPPED, "a hidden folder", (NotChecked("folder", 1, "hidden"),))


@pytest.mark.parametrize(
    ("glob", "paths", "passed_folders"),
    [
        ("*", [".hg/a.pt", ".last/a.pt", ".run/weights", "run/weights"], [".git"]),
        ("**", [".hg/a.pt", ".last/a.pt", ".run/weights", "run/weights"], [".git"]),
        ("*[tn]", [".last/a.pt", "run/weights"], [".git", ".run"]),
        (".[grl]*", [".git/weights", ".last/a.pt", ".run/weights"], []),
    ],
)
def test_glob_skips_hidden_folders_that_no_loader_reads(hidden_folders, glob, paths, passed_folders):
    """A shell's `*` does not match hidden folders; accelerate and DeepSpeed read them, and their files by name."""
    found_paths, other_targets = expand_paths(glob)
    assert found_paths == paths
    assert {
        target.target: (target.status, target.reason, target.not_checked) for target in other_targets
    } == dict.fromkeys(passed_folders, SKIPPED_HIDDEN_FOLDER)


@pytest.mark.parametrize("text", [".", "./"])
def test_files_of_the_current_folder_have_no_folder_in_their_names(tmp_path, in_tmp_path, text):
    """A lock or configuration entry `a.pt` applies to the file, with `.` and with `./` as the audited path."""
    (tmp_path / "a.pt").write_bytes(PICKLE)
    assert expand_paths(text) == (["a.pt"], [])


def test_glob_matches_are_in_natural_order(tmp_path):
    """Matches are sorted like the files of a folder, also by leading numbers and numbers of any length."""
    for name in ("10.pt", "2.pt", "a10.pt", "a9b.pt", "a9.pt", "a.pt"):
        torch.save({"w": torch.zeros(1)}, tmp_path / name)
    paths, _ = expand_paths(tmp_path / "*.pt")
    assert [path.rpartition("/")[2] for path in paths] == ["2.pt", "10.pt", "a9.pt", "a9b.pt", "a10.pt", "a.pt"]


def test_glob_with_as_found_lists_the_folder_of_shards_once(shards):
    """With `as_found`, the folder replaces both of its shards and is listed once."""
    pattern = str(shards / "*.safetensors")
    assert list(expand_targets([pattern])) == [str(shards / f"m-0000{n}-of-00002.safetensors") for n in (1, 2)]
    assert list(expand_targets([pattern], model_folders=ModelFolders(as_found=True))) == [str(shards)]


def test_only_file_of_a_model_is_not_replaced(tmp_path):
    """With `as_found`, the folder does not replace the only file of a model."""
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert find_replacement(tmp_path / "model.safetensors", ModelFolders(as_found=True)) is None


def test_as_found_skips_a_named_text_file(tmp_path):
    """Without `as_found`, the file is a target, and its reader reports the content."""
    (tmp_path / "notes.txt").write_text("hello")
    path = str(tmp_path / "notes.txt")
    assert list(expand_targets([path])) == [path]
    (target,) = expand_targets([path], model_folders=ModelFolders(as_found=True))
    assert describe_target(target) == (path, TargetStatus.SKIPPED, "is a text file")


@given(st.lists(st.sampled_from(["a", "b", "*", "**", "a*"]), max_size=4), st.lists(st.sampled_from("ab"), max_size=5))
def test_glob_covers_its_matches_and_their_content(globs, parts):
    """The result is checked against an equivalent regular expression."""
    patterns = {"*": "[ab]+/", "**": "(?:[ab]+/)*", "a*": "a[ab]*/"}
    expected_pattern = "".join(patterns.get(glob, f"{glob}/") for glob in globs)
    text = "".join(f"{part}/" for part in parts)
    assert glob_covers(globs, parts) is bool(re.match(expected_pattern, text))


def test_walk_reaches_files_in_its_folders_and_globs(tmp_path, in_tmp_path):
    """A missing file in a walked folder or under a glob counts as reached; a named file reaches only itself."""
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "a.pt").touch()
    for text in ("runs", "./runs/", f"{tmp_path}/runs", ".", "run*", "runs/*", "**/1", os.sep):
        assert is_reached("runs/1/gone.pt", [text]), text
    for text in ("a.pt", "runs/2", "other*", "runs/1/x*"):
        assert not is_reached("runs/1/gone.pt", ["a.pt", text]), text
    assert is_reached("https://h/a/b/c.pt", ["https://h/a/*"])
    assert not is_reached("https://h/a/b/c.pt", ["https://h/b/*"])


def test_data_folder_without_extern_modules_is_not_a_package(tmp_path):
    """A folder is a torch package only if it has the file `.data/extern_modules`."""
    (tmp_path / "a" / ".data").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "extern_modules").touch()
    _, other_targets = expand_paths(tmp_path)
    assert all(target.status is TargetStatus.SKIPPED for target in other_targets)


@pytest.mark.parametrize(
    ("tracker", "word", "folder"),
    [
        ("latest", "__pycache__", "__pycache__"),
        ("latest", " step\n", "step"),
        ("latest_universal", ".step", ".step"),
        ("latest_checkpointed_iteration.txt", "7", "iter_0000007"),
    ],
)
def test_hidden_folder_that_a_tracker_names_is_audited(tmp_path, tracker, word, folder):
    """DeepSpeed and Megatron unpickle the folder in a tracker: hidden, a link to a hidden folder, or a tool's."""

    def list_rules():
        targets = audit(Request((str(tmp_path),))).targets
        return {finding.rule for target in targets for finding in target.findings}

    (tmp_path / ".real").mkdir()
    torch.save(
        {"w": torch.ones(2), "x": Call(os.system, "touch PWNED")}, tmp_path / ".real" / "mp_rank_00_model_states.pt"
    )
    (tmp_path / folder).symlink_to(".real")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / tracker).write_text(word)
    assert "unsafe-global" in list_rules()
    (tmp_path / folder).unlink()
    (tmp_path / ".real").rename(tmp_path / folder)
    assert "unsafe-global" in list_rules()


@pytest.mark.parametrize("place", ["{}", "."])
def test_tracker_link_out_of_the_target_fails(tmp_path, monkeypatch, place):
    """DeepSpeed unpickles files in the linked folder, which the walk does not reach."""
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / "step").symlink_to("../elsewhere", target_is_directory=True)
    (tmp_path / "root" / "latest").write_text("step")
    monkeypatch.chdir(tmp_path / "root")
    _, other_targets = expand_paths(place.format(tmp_path / "root"))
    (failed_target,) = (target for target in other_targets if target.status is TargetStatus.FAILED)
    assert failed_target.target.rpartition("/")[2] == "step"
    assert "is a link to a folder that loaders read outside of the target" in failed_target.reason


def test_a_link_into_a_folder_of_a_tool_is_walked(tmp_path):
    """The walk passes over `.cache` and its content, but a loader that is given the link reads the linked files."""
    inner = tmp_path / ".cache" / "runs" / "1"
    inner.mkdir(parents=True)
    (inner / "weights").write_bytes(PICKLE)
    (tmp_path / "best").symlink_to(".cache/runs/1", target_is_directory=True)
    assert expand_paths(tmp_path)[0] == [str(tmp_path / "best" / "weights")]


def test_a_link_to_a_hidden_folder_of_the_walk_is_walked(tmp_path):
    """A loader that is given the link unpickles the files in the hidden folder."""

    (tmp_path / ".step9").mkdir()
    (tmp_path / ".step9" / ".metadata").write_bytes(pickle.dumps(Call(os.system, "touch PWNED")))
    (tmp_path / ".step9" / "again").symlink_to(".", target_is_directory=True)
    (tmp_path / ".step9" / "up").symlink_to("..", target_is_directory=True)
    for name in ("step-9", "last"):
        (tmp_path / name).symlink_to(".step9", target_is_directory=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    rules = {finding.rule for target in audit(Request((str(tmp_path),))).targets for finding in target.findings}
    assert "unsafe-global" in rules


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *((name, TargetStatus.FAILED) for name in ("model.pt", ".metadata", "inner/a.pkl", "a/b/c/__0.metadata")),
        *((name, TargetStatus.FAILED) for name in ("step-1/ema/pytorch_model.bin", "weights.pt")),
        *((name, TargetStatus.SKIPPED) for name in ("readme.txt", "inner/deeper/a.txt")),
    ],
)
def test_link_to_checkpoints_outside_the_target_fails(tmp_path, name, status):
    """The linked checkpoints were not audited; a link to a folder without checkpoints is skipped."""
    (tmp_path / "root").mkdir()
    file = tmp_path / "elsewhere" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "root" / "link").symlink_to("../elsewhere", target_is_directory=True)
    _, (change,) = expand_paths(tmp_path / "root")
    assert (change.target, change.status) == (str(tmp_path / "root" / "link"), status)
    mentions = [
        text in change.reason for text in ("with checkpoints outside of the target", "name the link as a target")
    ]
    assert mentions == [status is TargetStatus.FAILED] * 2
