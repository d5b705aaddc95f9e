"""Folders and indexes: files read, files refused, and the error lines; transformers and torch serve as oracles."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from statecli import formats
from statecli.core.errors import UnreadableError
from statecli.file_scan.scanned_files import list_scanned_files
from statecli.formats import sharded
from statecli.storage import files

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def encode_index(weight_map: object, **metadata: object) -> str:
    """Return an index as JSON."""
    return json.dumps({"metadata": metadata, "weight_map": weight_map})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards with one tensor each and their index, as written by save_pretrained."""
    path = tmp_path / "model"
    path.mkdir()
    save_file({"model.a": torch.zeros(2, 3)}, path / ONE, metadata={"format": "pt"})
    save_file({"model.b": torch.ones(4, dtype=torch.float16)}, path / TWO, metadata={"format": "pt"})
    (path / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}, total_size=32))
    return path


def names(path: Path | str) -> list[str]:
    """Return the FQNs read from a target, in order."""
    return [tensor.fqn for tensor in formats.read(str(path)).tensors]


@pytest.fixture
def partial_read_error(inspect):
    """Inspect a partly readable target (exit status 2; the readable rows are shown) and return the error without the
    path.
    """

    def find_error(target: Path | str, *fqns: str) -> str:
        code, out, err = inspect(target)
        assert code == 2
        assert all(f" {fqn} " in out for fqn in fqns or ["model.a"])
        assert err.startswith("statecli: ")
        (message,) = err.splitlines()
        assert message.startswith((f"statecli: {target}: ", f"statecli: {os.path.join(target, '')}"))
        return message.removeprefix(f"statecli: {target}: ")

    return find_error


def oddities(path: Path | str) -> dict[str, str]:
    """Return the oddities of a target's state."""
    return {oddity.name: oddity.message for oddity in formats.read(str(path)).oddities}


# Tensors and metadata of a folder.


def test_index_and_folder_give_the_same_tensors(folder):
    """The folder, with and without a slash, and its index give the same tensors under the name the user typed."""
    states = [formats.read(path) for path in (str(folder), f"{folder}/", str(folder / INDEX))]
    assert [state.target for state in states] == [str(folder), f"{folder}/", str(folder / INDEX)]
    for state in states:
        assert [(t.fqn, t.dtype, t.shape) for t in state.tensors] == [
            ("model.a", "float32", (2, 3)),
            ("model.b", "float16", (4,)),
        ]
        assert (state.format, state.oddities) == ("sharded safetensors", ())
        assert state.metadata.values == {"format": "pt", "total_size": 32}
        assert [Path(t.data.storage.path) for t in state.tensors] == [folder / ONE, folder / TWO]


@pytest.mark.parametrize("target", [".", "./", "../model", INDEX, f"./{INDEX}", f"../model/{INDEX}"])
def test_relative_path_is_reported_as_given(target, folder, monkeypatch, inspect):
    """A relative path is read, and the state and the command line report the path as given."""
    monkeypatch.chdir(folder)
    assert formats.read(target).target == target
    code, out, err = inspect(target, "-f", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["target"] == target
    assert [tensor["fqn"] for tensor in json.loads(out)["tensors"]] == ["model.a", "model.b"]


def test_metadata_that_differs_is_listed_by_shard(folder):
    """Metadata that differs between shards is reported for each shard, not for the whole checkpoint."""
    save_file({"model.b": torch.ones(4)}, folder / TWO, metadata={"format": "pt", "rank": "1"})
    save_file({"model.a": torch.ones(4)}, folder / ONE, metadata={"format": "pt", "rank": "0"})
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}))
    expected = {"format": "pt", f"{ONE}.rank": "0", f"{TWO}.rank": "1"}
    assert formats.read(str(folder)).metadata.values == expected


def test_storages_of_different_shards_are_not_tied(folder):
    """Storage keys count from 0 in each torch.save file: equal keys tie tensors within a shard, not across shards."""
    for name in (ONE, TWO, INDEX):
        (folder / name).unlink()
    weight = torch.ones(2)
    torch.save({"a": weight, "b": weight}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"c": torch.ones(2)}, folder / "pytorch_model-00002-of-00002.bin")
    tied = {tensor.fqn: tensor.tied_to for tensor in formats.read(str(folder)).tensors}
    assert tied == {"a": ("b",), "b": ("a",), "c": ()}


def test_a_dropped_name_needs_no_place_in_the_index(folder):
    """huggingface_hub notes dropped names of tied tensors in every shard and leaves them out of the index."""
    for name, key in ((ONE, "model.a"), (TWO, "model.b")):
        save_file({key: torch.zeros(2)}, folder / name, metadata={"lm_head.a": "model.a"})
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}, total_size=16))
    state = formats.read(str(folder))
    assert {t.fqn: t.tied_to for t in state.tensors} == {
        "model.a": ("lm_head.a",),
        "lm_head.a": ("model.a",),
        "model.b": (),
    }
    assert state.oddities == ()


# The file that is chosen in a folder.

CHOSEN_FILES: dict[str, tuple[tuple[str, ...], str]] = {
    "one file of any name": (("weights.pt", "config.json"), "weights.pt"),
    "one variant": (("model.fp16.safetensors",), "model.fp16.safetensors"),
    "safetensors before bin": (("pytorch_model.bin", "model.safetensors"), "model.safetensors"),
    "the default before its variant": (("model.fp16.safetensors", "model.safetensors"), "model.safetensors"),
    "one file before an index": ((INDEX, "model.safetensors"), "model.safetensors"),
    "a bin file before nothing better": (("pytorch_model.bin", "other.pt"), "pytorch_model.bin"),
    "an adapter alone": (("adapter_config.json", "adapter_model.safetensors"), "adapter_model.safetensors"),
    "a model before its adapter": (("adapter_model.safetensors", "model.safetensors"), "model.safetensors"),
    "a safetensors index before a bin file": ((INDEX, "pytorch_model.bin"), INDEX),
    "a safetensors index before a bin index": (("pytorch_model.bin.index.json", INDEX), INDEX),
    "the default index before a variant": (("model.safetensors.index.fp16.json", INDEX), INDEX),
    "a variant's index": (("model.safetensors.index.fp16.json",), "model.safetensors.index.fp16.json"),
    "diffusers' index": (
        ("diffusion_pytorch_model.safetensors.index.json", "pytorch_model.bin"),
        "diffusion_pytorch_model.safetensors.index.json",
    ),
    "a training folder": (
        ("net.safetensors", "optimizer.pt", "rng_state_0.pth", "scheduler.pt", "training_args.bin", "scaler.pt"),
        "net.safetensors",
    ),
    "an index of an unknown name before its variant": (
        ("net.safetensors.index.fp16.json", "net.safetensors.index.json"),
        "net.safetensors.index.json",
    ),
    "a shard of a series of none": (("model-00001-of-00000.safetensors",), "model-00001-of-00000.safetensors"),
    "a folder named as a file": (("model.safetensors/", "pytorch_model.bin"), "pytorch_model.bin"),
}


@pytest.mark.parametrize("case", CHOSEN_FILES)
def test_folder_is_read_as_transformers_loads_it(case, tmp_path):
    """Of the weights in a folder, statecli reads the file that transformers would load, and notes the rest."""
    names_in_folder, chosen_name = CHOSEN_FILES[case]
    for name in names_in_folder:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        elif name.endswith(".json"):
            save_file({name: torch.zeros(1)}, tmp_path / f"{name}-shard")
            (tmp_path / name).write_text(encode_index({name: f"{name}-shard"}))
        elif name.endswith(".safetensors"):
            save_file({name: torch.zeros(1)}, tmp_path / name)
        else:
            torch.save({name: torch.zeros(1)}, tmp_path / name)
    assert names(tmp_path) == [chosen_name]
    noted_names = oddities(tmp_path).get("other-weights", ": ").split(": ")[-1].split(", ")
    companions = ("config", "optimizer", "rng_", "scheduler", "training_args", "scaler")
    for name in names_in_folder:
        passed_over = (
            name != chosen_name and not name.startswith(companions) and not name.endswith(("/", "config.json"))
        )
        assert (name in noted_names) == passed_over, name


def test_numbered_shards_are_read_without_an_index(folder):
    """All shards of a complete numbered series are read, also of a variant, and the missing index is noted."""
    (folder / INDEX).unlink()
    assert names(folder) == ["model.a", "model.b"]
    assert oddities(folder) == {"no-index": "the folder has no index, so statecli read all 2 numbered shards"}
    for name in (ONE, TWO):
        (folder / name).rename(folder / name.replace(".safetensors", ".fp16.safetensors"))
    assert names(folder) == ["model.a", "model.b"]


def test_missing_numbered_shard_is_a_row(folder, partial_read_error):
    """Without an index, the numbers show the missing shard, which gets a row; the other shard is shown."""
    (folder / INDEX).unlink()
    (folder / ONE).unlink()
    expected = f"shard {ONE} is missing: 1 of 2 exist, according to the numbers in the file names"
    assert partial_read_error(folder, "model.b", ONE) == f"{expected}; copy or download the missing files"
    assert names(folder) == ["model.b", ONE]
    assert oddities(folder) == {"missing-shard": expected}


def test_unreadable_numbered_shard_is_a_row(folder, partial_read_error):
    """The tensors of an unreadable shard are unknown without an index: one row stands for the shard."""
    (folder / INDEX).unlink()
    (folder / ONE).write_bytes(b"")
    assert partial_read_error(folder, "model.b", ONE) == f"statecli: {folder / ONE}: is an empty file"
    assert names(folder) == ["model.b", ONE]


def test_missing_numbered_shards_are_reported_in_one_line(folder, partial_read_error):
    """A series with 1 of 10,000 shards is reported in one line."""
    (folder / INDEX).unlink()
    (folder / ONE).rename(folder / "model-00001-of-10000.safetensors")
    (folder / TWO).unlink()
    shards = ", ".join(f"model-0000{n}-of-10000.safetensors" for n in (2, 3, 4, 5))
    expected = (
        f"shards {shards} and 9995 more are missing: 1 of 10000 exist, according to the numbers in the file names"
    )
    assert partial_read_error(folder) == f"{expected}; copy or download the missing files"


def test_two_series_without_an_index_are_refused(folder, line):
    """Two numberings in one folder are two checkpoints: the user must choose a file."""
    (folder / INDEX).unlink()
    shutil.copy(folder / ONE, folder / "model-00001-of-00003.safetensors")
    assert line(folder) == (
        f"is a folder with 3 weight files and no index; give one of the files: {ONE}, "
        f"model-00001-of-00003.safetensors, {TWO}; "
        f"for all files, write statecli audit {folder} or statecli log {folder}"
    )


# Folders without a checkpoint of their own.

EMPTY_FOLDERS: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": (
        (),
        "is a folder without a checkpoint: it contains no *.safetensors, *.bin, *.pt, *.gguf or *.index.json file",
    ),
    "only companions": (
        ("optimizer.pt", "training_args.bin", "rng_state.pth"),
        "is a folder without a checkpoint: it contains no *.safetensors, *.bin, *.pt, *.gguf or *.index.json file",
    ),
    "a diffusers pipeline": (
        ("model_index.json", "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
        "is a diffusers pipeline, not one model; give one of its components: unet, vae",
    ),
    "a run of the Trainer": (
        ("checkpoint-10/model.safetensors", "runs/events"),
        "is a folder without a checkpoint, but with checkpoints in its subfolders; give one of the "
        "subfolders: checkpoint-10",
    ),
    "more folders than are looked into": (
        tuple(f"{n:03}/model.safetensors" for n in range(201)),
        "is a folder without a checkpoint, but with checkpoints in its subfolders; give one of the "
        "subfolders: 000, 001, 002, 003 and 196 more (statecli looked into the first 200 of 201 folders)",
    ),
    "torch.distributed.checkpoint": (
        (".metadata", "__0_0.distcp"),
        ".metadata: the pickle is damaged: unknown opcode 0x78 (byte 0)",
    ),
    "DeepSpeed": (
        ("latest", "zero_to_fp32.py", "global_step1/optim_states.pt"),
        "latest points to 'x', but this folder is missing or has no rank files; copy the checkpoint again",
    ),
}


@pytest.mark.parametrize("case", EMPTY_FOLDERS)
def test_folder_without_a_checkpoint_is_refused(case, tmp_path, line):
    """The error for a folder without weights of its own names the kind of the folder."""
    names_in_folder, expected = EMPTY_FOLDERS[case]
    for name in names_in_folder:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert line(tmp_path) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root: may list every folder")
def test_folder_without_permission_is_refused(folder, line):
    """Missing permission is reported in one line."""
    folder.chmod(0)
    try:
        assert line(folder) == "cannot be listed: permission denied"
    finally:
        folder.chmod(0o700)


def test_removed_folder_is_reported_in_one_line(folder, monkeypatch):
    """A folder removed during the read is reported in one line."""

    def raise_missing(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file")

    monkeypatch.setattr(os, "scandir", raise_missing)
    with pytest.raises(UnreadableError, match=r"^[^\n]*cannot be listed: no such file$"):
        formats.read(str(folder))


def test_entries_are_files_unless_they_lead_to_a_folder(tmp_path):
    """A link has the kind of its target; a link that leads nowhere or to itself counts as a file."""
    (tmp_path / "z").mkdir()
    (tmp_path / "b").touch()
    for name, link_target in (("folder", "z"), ("file", "b"), ("gone", "nothing"), ("loop", "loop")):
        (tmp_path / name).symlink_to(link_target)
    assert files.list_entries(str(tmp_path)) == (["b", "file", "gone", "loop"], ["folder", "z"])


# Invalid indexes.

#: Names of shards that are refused in an index: case -> name.
OUTSIDE_NAMES = {
    "traversal": "../secret.safetensors",
    "deep traversal": "x/../../secret.safetensors",
    "subfolder": "x/secret.safetensors",
    "absolute": "/etc/passwd",
    "backslash": "..\\secret.safetensors",
    "drive": "C:secret.safetensors",
    "nul": "model\0.safetensors",
    "line break": "m\n.safetensors",
    "line separator": "m\u2028.safetensors",
    "terminal escape": "\x1b[2J.safetensors",
    "url": "https://example.com/m.safetensors",
    "scheme without slashes": "file:m.safetensors",
    "tilde": "~root",
    "dot": ".",
    "dots": "..",
    "empty": "",
    "slash": "/",
}


@pytest.mark.parametrize("case", OUTSIDE_NAMES)
def test_shard_name_outside_the_folder_is_refused(case, folder, line):
    """A shard's name must be one path component; statecli refuses any other name before opening a shard."""
    save_file({"model.b": torch.zeros(1)}, folder.parent / "secret.safetensors")
    (folder / ONE).write_bytes(b"never read")
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": OUTSIDE_NAMES[case]}))
    quoted_name = repr(OUTSIDE_NAMES[case])
    assert line(folder) == f"{INDEX} names {quoted_name}, which is not a plain file name"
    assert line(folder / INDEX) == f"the index names {quoted_name}, which is not a plain file name"


@pytest.mark.parametrize("prefix", ["./", "././", ".//"])
def test_shard_name_may_begin_with_the_current_folder(prefix, folder, run):
    """transformers joins the name with the path of the folder."""
    save_file({"model.a": torch.zeros(2)}, folder / ONE)
    (folder / INDEX).write_text(encode_index({"model.a": f"{prefix}{ONE}"}))
    assert [tensor.fqn for tensor in formats.read(str(folder)).tensors] == ["model.a"]
    assert run("audit", folder / INDEX)[0] == 0
    assert str(folder / ONE) in list_scanned_files(str(folder / INDEX))


def build_case(text: str, expected: str) -> tuple[bytes, str]:
    """Return an index's text and its error line, in which `{}` stands for the name of the index."""
    return text.encode("utf-8", "surrogatepass"), expected


INVALID_INDEXES: dict[str, tuple[bytes, str]] = {
    "map is a list": build_case(encode_index([ONE, TWO]), "{} has no weight_map, or the weight_map is empty"),
    "map is empty": build_case(encode_index({}), "{} has no weight_map, or the weight_map is empty"),
    "no map": build_case('{"metadata":{}}', "{} has no weight_map, or the weight_map is empty"),
    "map to a number": build_case(encode_index({"model.a": 1}), "{} maps model.a to 1, which is not a file name"),
    "map to null": build_case(encode_index({"model.a": None}), "{} maps model.a to None, which is not a file name"),
    "map to a list": build_case(
        encode_index({"model.a": [ONE]}), "{} maps model.a to a list, which is not a file name"
    ),
    "a key twice": build_case(
        f'{{"weight_map":{{"model.a":"{ONE}","model.a":"{TWO}"}}}}',
        "{} has the key 'model.a' twice; programs may read either value",
    ),
    "the map twice": build_case(
        f'{{"weight_map":{{"x":"{ONE}"}},"weight_map":{{"model.a":"{ONE}"}}}}',
        "{} has the key 'weight_map' twice; programs may read either value",
    ),
    "deep": build_case(
        '{"metadata":' + "[" * 100_000, "{} has lists and objects that are nested too deeply for statecli to read"
    ),
    "cut": build_case(
        encode_index({"model.a": ONE})[:-1],
        "{} is not valid JSON: Expecting ',' delimiter: line 1 column 79 (char 78)",
    ),
    "byte order mark": build_case(
        "\ufeff" + encode_index({"model.a": ONE}), "{} is not valid JSON: the text begins with a byte order mark"
    ),
    "no UTF-8": (b'{"weight_map":{"\xff":"m"}}', "{} is not valid UTF-8 near its byte 16"),
    "half a surrogate pair": build_case(
        encode_index({"model.\ud800": ONE}),
        "{} contains only half of a surrogate pair: the escape \\ud800",
    ),
    "NaN": build_case('{"metadata":{"total_size":NaN}}', "{} is not valid JSON: NaN is not a JSON value"),
    "an endless number": build_case(
        '{"metadata":{"total_size":1e999}}',
        "{} is not valid JSON: 1e999 is too large for a float64, and some JSON readers refuse such a number",
    ),
    "missing shard": build_case(
        encode_index({"model.b": "m-9.safetensors"}),
        "shard m-9.safetensors is missing: 0 of 1 exist, according to {}; copy or download the missing files",
    ),
    "a tensor of a missing shard in another": build_case(
        encode_index({"model.a": "m-9.safetensors", "model.b": TWO, "model.c": ONE}),
        f"model.a: the index assigns this tensor to m-9.safetensors, but the tensor is in {ONE}",
    ),
    "itself": build_case(
        encode_index({"model.a": INDEX}), f"shard {INDEX} is itself an index, not a file with tensors"
    ),
    "directory": build_case(
        encode_index({"model.a": "1_Pooling"}), "shard 1_Pooling is a directory, not a regular file"
    ),
    "wrong shard": build_case(
        encode_index({"model.a": TWO, "model.b": ONE}),
        f"model.a: the index assigns this tensor to {TWO}, but the tensor is in {ONE}",
    ),
    "tensor in no shard": build_case(
        encode_index({"model.a": ONE, "model.c": TWO}),
        f"model.c: the index assigns this tensor to {TWO}, but no shard contains the tensor",
    ),
    "a name with a line break": build_case(
        encode_index({"x\ny": ONE}), f"x\\ny: the index assigns this tensor to {ONE}, but no shard contains the tensor"
    ),
}


@pytest.mark.parametrize("case", INVALID_INDEXES)
def test_invalid_index_is_refused(case, folder, line):
    """An impossible index is one error line, which calls the index by its file name, or `the index` if the user gave
    its path.
    """
    data, expected = INVALID_INDEXES[case]
    (folder / "1_Pooling").mkdir()
    (folder / INDEX).write_bytes(data)
    assert line(folder) == expected.replace("{}", INDEX)
    assert line(folder / INDEX) == expected.replace("{}", "the index")


@pytest.mark.parametrize("text", ["", "[]", "not JSON", "<html></html>"])
def test_file_that_is_not_an_index_is_named(text, folder, line):
    """The error for an empty file, a list, a text or a web page named as an index names the kind of the file."""
    (folder / INDEX).write_text(text)
    of_folder, of_index = line(folder), line(folder / INDEX)
    assert INDEX in of_folder
    expected = {
        "": "is an empty file",
        "[]": "is a JSON document",
        "not": "is not a checkpoint (text file)",
        "<ht": "is an HTML page",
    }
    assert of_index.startswith(expected.get(text[:3], "is an HTML page"))


def test_index_over_the_size_limit_is_refused(folder, line):
    """An index longer than the limit is not parsed."""
    with (folder / INDEX).open("r+") as file:
        file.truncate(sharded.MAX_INDEX_BYTES + 1)
    assert line(folder) == f"{INDEX} has 33554433 bytes, more than statecli's limit of 33554432 for an index"


def test_pipe_in_place_of_the_index_is_refused(folder, line):
    """A named pipe in place of the index is refused and does not block the reader."""
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    assert line(folder) == f"{INDEX} is a named pipe, not a regular file"
    assert line(folder / INDEX) == "is a named pipe, not a regular file"


# Missing and unreadable shards.


@pytest.mark.parametrize("target", ["", INDEX], ids=["folder", "index"])
def test_missing_shard_spoils_only_its_tensors(target, folder, partial_read_error, statecli):
    """Other shards are shown; each tensor of the missing shard is a row without dtype and shape; diff, lock and audit
    exit with status 2.
    """
    save_file({"model.b": torch.ones(4), "model.c": torch.ones(2), "model.d": torch.ones(2)}, folder / TWO)
    (folder / INDEX).write_text(
        encode_index({"model.a": ONE, "model.b": TWO, "model.c": TWO, "model.d": TWO}, total_size=9)
    )
    shutil.copytree(folder, folder.parent / "whole")
    (folder / TWO).unlink()
    message = f"shard {TWO} is missing: 1 of 2 exist, according to {INDEX if target == '' else 'the index'}"
    path = folder / target if target else folder
    assert partial_read_error(path) == f"model.b and 2 more tensors: {message}; copy or download the missing files"
    rows = {tensor.fqn: (tensor.dtype, tensor.shape) for tensor in formats.read(str(path)).tensors}
    unknown = ("unknown", None)
    assert rows == {"model.a": ("float32", (2, 3)), "model.b": unknown, "model.c": unknown, "model.d": unknown}
    assert oddities(path) == {"missing-shard": message}
    result = statecli("diff", str(path), str(folder.parent / "whole"), "-f", "json")
    assert (result.code, [tensor["fqn"] for tensor in result.json["broken"]]) == (2, ["model.b", "model.c", "model.d"])
    assert result.json["changes"] == []
    assert statecli("lock", str(path), "-o", str(folder.parent / "l.json")).code == 2
    result = statecli("audit", str(path), "-f", "json")
    assert result.code == 2
    assert [(finding["rule"], finding["target"]) for finding in result.json["findings"]] == [
        ("missing-shard", str(path))
    ]


def test_folder_without_a_readable_shard_is_refused(folder, line):
    """The error line describes the problem of the first shard."""
    (folder / ONE).unlink()
    os.mkfifo(folder / ONE)
    (folder / TWO).write_bytes(b"")
    assert line(folder) == f"{folder / ONE}: is a named pipe, not a regular file"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
PROCESS_LINK_ERROR = "which points to a different file in each process; replace the link with the file"
MISSING_BLOB_ERROR = "the link leads to ../../blobs/gone, which is missing in the cache; download the repository again"
#: What stands in place of a shard -> a function that writes the path, and the end of the error line.
OTHER_SHARDS = {
    "pipe": (os.mkfifo, "is a named pipe, not a regular file"),
    "link to an endless device": (
        lambda path: path.symlink_to("/dev/zero"),
        f"is reached by a link through /dev, {PROCESS_LINK_ERROR}",
    ),
    "link to a text elsewhere": (lambda path: path.symlink_to("../secret"), "is not a checkpoint (text file)"),
    "text": (lambda path: path.write_text("Entry not found"), "is not a checkpoint (text file)"),
    "git-lfs pointer": (
        lambda path: path.write_bytes(POINTER),
        "is a git-lfs pointer (for a file of 4,976,698,672 bytes): run: git lfs pull",
    ),
    "nothing": (Path.touch, "is an empty file"),
    "link that leads nowhere": (
        lambda path: path.symlink_to("../../blobs/gone"),
        f"cannot be opened: {MISSING_BLOB_ERROR}",
    ),
    "link to itself": (
        lambda path: path.symlink_to(path.name),
        "cannot be opened: too many levels of symbolic links",
    ),
    "link to its folder": (lambda path: path.symlink_to("."), "is a directory, not a regular file"),
}


@pytest.mark.parametrize("case", OTHER_SHARDS)
def test_file_of_another_kind_as_a_shard_is_named_once(case, folder, partial_read_error, inspect):
    """The line has the shard's path and no other path, quotes no text of the shard, and has the command that helps."""
    write, problem = OTHER_SHARDS[case]
    (folder.parent / "secret").write_text("root:x:0:0")
    (folder / TWO).unlink()
    write(folder / TWO)
    message = partial_read_error(folder)
    assert message == f"statecli: {folder / TWO}: model.b: its shard {problem}"
    assert inspect(folder / INDEX)[2] == f"{message}\n"


def test_truncated_shard_is_named(folder, partial_read_error):
    """A shard cut short is named by its path."""
    os.truncate(folder / ONE, 70)
    message = partial_read_error(folder, "model.b")
    assert message.startswith(f"statecli: {folder / ONE}: model.a: its shard is truncated: its header claims ")


def test_weight_file_linked_to_its_folder_is_refused(tmp_path, line):
    """A folder whose only weight file is a link to the folder holds no checkpoint."""
    (tmp_path / "model.safetensors").symlink_to(".")
    assert line(tmp_path).startswith("is a folder without a checkpoint: it contains no *.safetensors")


def test_links_are_followed(folder, tmp_path):
    """The files of a Hugging Face cache, also the index, are links into ../../blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for n, name in enumerate((ONE, TWO, INDEX)):
        (folder / name).rename(blobs / str(n))
        (snapshot / name).symlink_to(f"../../blobs/{n}")
    assert names(snapshot) == names(snapshot / INDEX) == ["model.a", "model.b"]


def test_tensor_in_two_shards_is_refused(folder, line):
    """A tensor in two shards is refused, because readers load different copies; the error names both shards."""
    save_file({"model.a": torch.zeros(2), "model.b": torch.zeros(2)}, folder / TWO)
    assert line(folder) == f"model.a: is in two shards, {ONE} and {TWO}; each tensor must be in one shard"


def test_path_precedes_a_tensor_named_like_the_folder(folder, line):
    """The path stands before a message, also if the message begins with a tensor whose name begins with the folder's
    name.
    """
    target = folder.parent / "plain"
    folder.rename(target)
    (target / INDEX).write_text(encode_index({"plain.a": ONE}))
    assert line(target) == f"plain.a: the index assigns this tensor to {ONE}, but no shard contains the tensor"


def test_path_precedes_a_message_with_the_same_start(folder, line, monkeypatch):
    """The path stands before the message, also if the message begins with the same letters."""
    monkeypatch.chdir(folder)
    Path("a").write_bytes(b"\x40" + bytes(7) + b'{"a":{}}' + b" " * 56)
    assert line("a") == "a: its header entry has no dtype"


def test_many_missing_shards_are_refused_quickly(folder, line):
    """An index that names 20,000 missing shards is refused at once, with one short line."""
    (folder / INDEX).write_text(encode_index({f"l.{n}": f"m-{n}.safetensors" for n in range(20_000)}))
    before = time.process_time()
    message = line(folder)
    assert time.process_time() - before < 1.5
    assert message == (
        "shards m-0.safetensors, m-1.safetensors, m-2.safetensors, m-3.safetensors and 19996 more are missing: "
        f"0 of 20000 exist, according to {INDEX}; copy or download the missing files"
    )


# Oddities of readable folders.


def test_tensor_missing_in_the_index_is_listed_and_noted(folder):
    """A shard's tensor that the index omits is listed and noted: not all loaders load such a tensor."""
    save_file({"model.b": torch.zeros(4), "model.extra": torch.zeros(1)}, folder / TWO)
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}))
    assert names(folder) == ["model.a", "model.b", "model.extra"]
    assert oddities(folder) == {"not-in-index": "the index does not list these tensors of the shards: model.extra"}


@pytest.mark.parametrize(("claimed", "difference"), [(40, "8 more"), (30, "2 fewer"), (40.0, "8.0 more")])
def test_wrong_total_size_is_noted(claimed, difference, folder, inspect):
    """A wrong total_size is noted with the difference, and is not an error."""
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}, total_size=claimed))
    expected = f"the index records a total of {claimed} bytes, {difference} than the tensors take (32)"
    assert oddities(folder) == {"index-total": expected}
    code, out, _ = inspect(folder, "-f", "plain")
    assert code == 0
    assert expected in out


def test_a_total_counts_each_storage_once(tmp_path):
    """Views of one storage in a torch.save shard count once, with the size of the largest view."""
    storage = torch.zeros(10)
    torch.save({"whole": storage, "view": storage[:2]}, tmp_path / "m.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        encode_index({"whole": "m.bin", "view": "m.bin"}, total_size=40)
    )
    assert oddities(tmp_path) == {}


@pytest.mark.parametrize("total", ["32", None, [], True])
def test_total_size_that_is_not_a_number_is_ignored(total, folder):
    """A total_size that is not a number is ignored."""
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}, total_size=total))
    assert names(folder) == ["model.a", "model.b"]


def test_weight_file_missing_in_the_index_is_noted(folder):
    """A weight file that is next to the shards, but not in the index, is noted."""
    save_file({"z": torch.zeros(1)}, folder / "model-9.safetensors")
    assert oddities(folder) == {
        "other-weights": "statecli did not read other weights in the same folder: model-9.safetensors"
    }


def test_many_other_weights_are_one_note(folder):
    """A thousand weight files outside the index are reported in a short line."""
    for n in range(1000):
        (folder / f"x{n:03}.bin").touch()
    (message,) = oddities(folder).values()
    assert message.endswith("x000.bin, x001.bin, x002.bin, x003.bin and 996 more")


def test_shards_of_two_formats_are_read(folder):
    """An index over a safetensors and a torch.save shard is read, both formats named."""
    torch.save({"model.b": torch.ones(4)}, folder / "b.bin")
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": "b.bin"}, total_size=40))
    state = formats.read(str(folder))
    assert state.format == "sharded safetensors+torch-zip"
    assert [tensor.fqn for tensor in state.tensors] == ["model.a", "model.b"]


def test_oddity_of_a_shard_names_the_shard(folder):
    """A shard's own oddity names the shard."""
    header = json.dumps({"model.b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    header += b" " * (len(header) % 8 == 0)
    (folder / TWO).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    (folder / INDEX).write_text(encode_index({"model.a": ONE, "model.b": TWO}))
    assert oddities(folder)["misaligned"].startswith(f"{TWO}: the tensor data starts at byte ")


def test_an_index_with_the_files_of_deepspeed_is_refused(folder, line):
    """DeepSpeed unpickles the files of this key, at paths anywhere, and takes no notice of the weight_map."""
    document = {"type": "ds_model", "checkpoints": ["/a.bin"], **json.loads((folder / INDEX).read_text())}
    (folder / "ds.json").write_text(json.dumps(document))
    assert line(folder / "ds.json") == (
        "the index also has the key 'checkpoints': deepspeed.init_inference unpickles the files listed there, and "
        "statecli did not check these files; run statecli audit on each file"
    )


def test_index_under_another_name_is_read(folder):
    """A JSON file with a weight_map is an index under any name."""
    (folder / INDEX).rename(folder / "map.json")
    assert names(folder / "map.json") == ["model.a", "model.b"]


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([ONE, TWO, INDEX, "..", "x"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["weight_map", "metadata", "total_size", "model.a", "model.b"]), inner)
        ),
        max_leaves=8,
    )
)
def test_random_index_is_read_or_refused_in_one_line(folder, document):
    """Any JSON document in place of an index is read or raises UnreadableError with one line."""
    (folder / INDEX).write_text(json.dumps({"weight_map": document} if isinstance(document, dict) else document))
    try:
        formats.read(str(folder))
    except UnreadableError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  # some documents are read


# Comparison with transformers and torch.


@pytest.fixture(scope="module")
def model():
    """A BERT of a few kilobytes, its head tied to its embedding."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    return transformers.BertForMaskedLM(config)


def test_shards_of_save_pretrained_equal_safe_open(model, tmp_path):
    """statecli and safe_open find the same tensors in the shards of save_pretrained, and nothing is odd."""
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    expected = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            expected.update({name: (shard, file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    state = formats.read(str(tmp_path))
    assert {t.fqn: (Path(t.data.storage.path), list(t.shape)) for t in state.tensors} == expected
    assert state.oddities == ()
    assert set(expected) <= set(model.state_dict())


@pytest.mark.parametrize("weights", ["other.safetensors", "model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("index", [None, "other.safetensors.index.json", "model.safetensors.index.json"])
def test_the_weights_that_the_config_names_are_read(model, tmp_path, weights, index):
    """transformers 5 loads `transformers_weights` of config.json in place of model.safetensors."""
    model.save_pretrained(tmp_path)
    other_weights = {name: tensor + 1 for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(other_weights, tmp_path / weights, {"format": "pt"})
    name = index or weights
    if index:
        (tmp_path / name).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(other_weights, weights)}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    state = formats.read(str(tmp_path))
    assert {tensor.data.storage.path for tensor in state.tensors if tensor.data} == {str(tmp_path / weights)}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in other_weights.items())
    assert formats.members(str(tmp_path))[0] == name
    assert "model.safetensors" in next(oddity.message for oddity in state.oddities if oddity.name == "other-weights")


@pytest.mark.parametrize(
    "name", [".hidden/w.safetensors", "../w.safetensors", "missing.safetensors", "/tmp/w.safetensors"]
)
@pytest.mark.parametrize("weights", ["model.safetensors", None])
def test_config_with_an_outside_weight_file_exits_with_2(statecli, model, tmp_path, name, weights):
    """transformers loads the file that the config names, so the weights of the folder prove nothing."""
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    if weights is None:
        (tmp_path / "model.safetensors").unlink()
    for command in ("inspect", "audit", "lock"):
        result = statecli(command, tmp_path)
        assert result.code == 2, command
    if weights is not None:
        assert f"config.json refers to the weight file {name!r}" in statecli("audit", tmp_path).err


def test_weights_next_to_a_distributed_checkpoint_are_noted(tmp_path):
    """transformers loads the weights, torch.distributed.checkpoint the distributed checkpoint."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    before = formats.read(str(tmp_path))
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    after = formats.read(str(tmp_path))
    assert before.oddities == ()
    assert [oddity.message for oddity in after.oddities] == [
        "statecli did not read other weights in the same folder: model.safetensors"
    ]


def test_bin_shards_equal_torch_load(model, tmp_path):
    """pytorch_model.bin shards and their index (written by transformers 4) have the tensors that torch.load returns."""
    state_dict, files = model.state_dict(), ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    halves = [dict(list(state_dict.items())[n::2]) for n in (0, 1)]
    weight_map = {}
    for name, shard_state in zip(files, halves, strict=True):
        torch.save(shard_state, tmp_path / name)
        weight_map.update(dict.fromkeys(shard_state, name))
    (tmp_path / "pytorch_model.bin.index.json").write_text(encode_index(weight_map))
    state = formats.read(str(tmp_path))
    assert state.format == "sharded torch-zip"
    loaded = {}
    for name in files:
        loaded.update(torch.load(tmp_path / name, weights_only=True))
    assert {t.fqn: (f"torch.{t.dtype}", t.shape) for t in state.tensors} == {
        name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in loaded.items()
    }


def test_many_shards_are_read_quickly(tmp_path):
    """36,864 tensors in 128 sparse shards (300 GB if the shards were full) are read within 1.5 seconds."""
    weight_map = {}
    for n in range(128):
        shard = f"model-{n + 1:05d}-of-00128.safetensors"
        entries = {
            f"model.layers.{n}.experts.{i}.up_proj.weight": {
                "dtype": "BF16",
                "shape": [2048, 512],
                "data_offsets": [i << 21, (i + 1) << 21],
            }
            for i in range(288)
        }
        header = json.dumps(entries).encode()
        with (tmp_path / shard).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (288 << 21))
        weight_map.update(dict.fromkeys(entries, shard))
    (tmp_path / INDEX).write_text(encode_index(weight_map, total_size=128 * 288 << 21))
    before = time.process_time()
    state = formats.read(str(tmp_path))
    assert time.process_time() - before < 1.5
    assert len(state.tensors) == 36_864
    assert not [oddity for oddity in state.oddities if oddity.name != "misaligned"]


def test_companions_of_a_training_run_are_named(tmp_path):
    """Next to a file of any name, optimizer.pt and similar files are noted as not read."""
    save_file({"w": torch.ones(1)}, tmp_path / "net.safetensors")
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        (tmp_path / name).write_bytes(b"x")
    messages = {oddity.name: oddity.message for oddity in formats.read(str(tmp_path)).oddities}
    assert messages == {
        "companions": (
            "statecli did not read other files of the training run: optimizer.pt, rng_state.pth, training_args.bin"
        )
    }
