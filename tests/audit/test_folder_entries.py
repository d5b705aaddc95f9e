"""Entries of an audited folder: names that look like a user's text files, devices, pipes, and links through /proc."""

from __future__ import annotations

import os
import pickle
import zlib

import pytest
import torch
import torch.package
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.commands.inspect.run import Request as Inspect, inspect
from statecli.storage import checkpoint_folder, files
from statecli.targets import tool_folders
from statecli.targets.expand import ModelFolders, expand_targets
from statecli.targets.target_result import TargetStatus

from ..formats.attacks import Call

HARM = Call(os.system, "touch PWNED")


def save_harmful(path):
    """Write a file whose unpickling runs a command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save({"x": HARM}, file)


def list_rules(*targets, **options):
    """Return the rules with findings, by target."""
    results = audit(Request(tuple(map(str, targets)), **options)).targets
    return {result.target: {finding.rule for finding in result.findings} for result in results if result.findings}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a clean model."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- names that look like text of the user ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", [".", "./", "*"])
@pytest.mark.parametrize("name", ["-", "-#model", "--help", "a#b", "[a]*", "net.py:Net", "auto", "zip::x"])
def test_a_file_of_any_name_is_read_as_a_file(folder, target, name):
    """`-` in a folder is not standard input."""
    torch.save({"x": HARM}, folder / "t")
    (folder / "t").rename(folder / name)
    (rules,) = list_rules(target).values()
    assert "unsafe-global" in rules


@pytest.mark.parametrize("name", ["-", "s3:", "-#x", "a[b]"])
@pytest.mark.parametrize("target", [".", "*"])
def test_a_folder_of_any_name_is_walked(folder, target, name):
    """The path of the folder may even begin like a URL."""
    save_harmful(folder / name / "mp_rank_00_model_states.pt")
    assert any("unsafe-global" in rules for rules in list_rules(target).values())


def test_a_file_in_a_folder_called_dash_belongs_to_that_folder(folder):
    """The folder around `-/x` is not standard input."""
    save_harmful(folder / "-" / "inner" / "a.pt")
    assert files.get_folder("-/a.pt") == "./-"
    assert "./-" in list(files.iter_parents("-/inner/a.pt"))
    assert files.join("", "-") == "./-"
    assert files.join("", "s3://bucket/a.pt") == "./s3://bucket/a.pt"
    assert list(ModelFolders(as_found=True).iter_around("-/inner/a.pt"))


def test_dash_is_ambiguous_next_to_a_file_of_that_name(folder):
    """A shell's `*` and pre-commit name the file `-`; a pipe is named `-` too."""
    torch.save({"x": HARM}, folder / "t")
    (folder / "t").rename(folder / "-")
    (result,) = expand_targets(["-"])
    assert (result.status, "./-" in result.reason) == (TargetStatus.FAILED, True)


def test_an_index_that_names_dash_reads_the_shard(folder):
    """Standard input is not read for a shard."""
    os.rename("model.safetensors", "-")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "-"}}')
    state = inspect(Inspect("model.safetensors.index.json")).state
    assert [tensor.fqn for tensor in state.tensors] == ["w"]


# --- devices, pipes, and links whose target depends on who follows them ---------------------------------------------


def list_failed(*targets):
    """Return the reasons of failed targets, by the name of their file."""
    results = audit(Request(tuple(map(str, targets)))).targets
    return {files.get_name(result.target): result.reason for result in results if result.status is TargetStatus.FAILED}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX: named pipes")
@pytest.mark.parametrize("name", ["notes", "config.json", "inner/a", "inner/a.py"])
def test_a_pipe_in_a_folder_fails(folder, name):
    """The content that a loader would read from the pipe is unknown."""
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    assert "is a named pipe, not a regular file" in list_failed(".")[name.rpartition("/")[2]]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs POSIX: devices")
@pytest.mark.parametrize("name", ["notes", "latest", "config.json", "a.pt", "inner/x"])
def test_a_link_to_a_device_fails(folder, name):
    """A loader reads the device as an empty file."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("/dev/null")
    assert "a link through /dev" in list_failed(".")[name.rpartition("/")[2]]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs POSIX: devices")
def test_an_unpacked_torch_package_fails_if_its_list_of_modules_is_a_device(folder):
    """`PackageImporter` reads the device as an empty list, and runs the Python files."""
    (folder / "package" / ".data").mkdir(parents=True)
    (folder / "package" / ".data" / "extern_modules").symlink_to("/dev/null")
    (folder / "package" / "own.py").write_text("VALUE = 1\n")
    assert torch.package.PackageImporter("package").import_module("own").VALUE == 1
    assert "is an unpacked torch.package" in list_failed(".")["package"]


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs Linux: /proc")
@pytest.mark.parametrize(
    ("link", "lead"),
    [
        ("model.pt", "/proc/self/cwd/real.pt"),
        ("model.pt", "../{folder}/steps/../../../../../../../../../proc/self/cwd/real.pt"),
        ("model.pt", "/proc/self/root/{path}/real.pt"),
        ("model.pt", "second"),
        ("model.pt", "steps/real.pt"),
        ("notes", "/proc/self/cwd/absent"),
        ("step", "/proc/self/cwd/.empty"),
        ("step", "second"),
    ],
)
def test_a_link_through_proc_fails(folder, link, lead):
    """The target of the link depends on the working directory of the loader, not of the audit."""
    torch.save({"w": torch.ones(2)}, "real.pt")
    (folder / ".empty").mkdir()
    os.mkdir("inner")
    os.symlink("/proc/self/cwd", "inner/steps")
    os.symlink("/proc/self/cwd/real.pt" if link == "model.pt" else "/proc/self/cwd/.empty", "inner/second")
    os.symlink(lead.format(path=str(folder).strip("/"), folder="inner"), f"inner/{link}")
    assert "a link through /proc" in list_failed(".")[link]
    assert "a link through /proc" in list_failed(f"inner/{link}")[link]


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs Linux: /proc")
def test_shard_linked_through_proc_fails(folder):
    """The audit fails even if only the index is named."""
    os.mkdir("inner")
    os.symlink("/proc/self/cwd/model.safetensors", "inner/a.safetensors")
    (folder / "inner" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert "a link through /proc" in list_failed("inner/model.safetensors.index.json")["model.safetensors.index.json"]


def test_ordinary_links_are_followed(folder):
    """Relative and absolute links are followed, as is a link to the audited folder."""
    torch.save({"w": torch.ones(2)}, "real.pt")
    os.mkdir("inner")
    os.symlink("../real.pt", "inner/a.pt")
    os.symlink(folder / "real.pt", "inner/b.pt")
    os.symlink("inner", "outer")
    os.symlink("user@host.123:456", "inner/.#notes")
    assert not list_failed("outer", "inner", "outer/a.pt")


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs POSIX: /dev/fd")
def test_a_descriptor_that_the_user_names_is_read(folder):
    """This is the case of `statecli audit /dev/stdin < model.pt`."""
    with open("model.safetensors", "rb") as file:
        path = f"/dev/fd/{file.fileno()}"
        assert not list_failed(path)


# --- hidden folders, and those of tools ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/.checkpoint_1/custom_checkpoint_0.pkl",
        ".h/model.safetensors.d/x",
        ".git/lfs/mp_rank_00_model_states.pt",
        "__pycache__/.metadata",
        "__pycache__/__0.metadata",
        "node_modules/a/b/pytorch_model.bin",
        ".cache/huggingface/download/model.PKL.gz",
        ".venv/share/a.joblib",
        ".venv/lib/python3.11/site-packages/a.pt",
        ".tox/py/a.ckpt",
        "a/.ipynb_checkpoints/a/training_args.bin",
    ],
)
def test_hidden_or_tool_folder_that_loaders_read_is_walked(folder, path):
    """accelerate loads the folder with the highest number, hidden or not."""
    save_harmful(folder / path)
    assert any("unsafe-global" in rules for rules in list_rules(".").values())


def test_installed_packages_of_an_environment_are_skipped(folder):
    """torch's and numpy's tests have pickles; only an environment's own folder is passed over."""
    packages = folder / "app" / ".venv" / "lib" / "python3.11" / "site-packages"
    save_harmful(packages / "numpy" / "tests" / "a.pkl")
    (folder / "app" / ".venv" / "pyvenv.cfg").touch()
    os.symlink("lib", folder / "app" / ".venv" / "lib64")
    assert not list_rules(".")
    save_harmful(folder / "app" / ".venv" / "lib" / "a.pkl")
    rules = list_rules(".")
    assert [files.get_name(files.get_folder(target)) for target in rules] == ["lib"]


def test_link_out_of_the_target_in_a_tool_folder_fails(folder):
    """A link in a tool's folder is checked like any other link."""
    (folder / "root" / ".git").mkdir(parents=True)
    save_harmful(folder / "elsewhere" / "a.pt")
    os.symlink("../../elsewhere", "root/.git/step9")
    assert "is a link to a folder with checkpoints outside of the target" in list_failed("root")["step9"]


def test_tool_folder_with_too_many_names_is_walked(folder, monkeypatch):
    """A tool's folder is passed over only if all of its names were searched."""
    monkeypatch.setattr(tool_folders, "MAX_SEARCHED_NAMES", 3)
    (folder / ".git").mkdir()
    for number in range(5):
        (folder / ".git" / str(number)).write_bytes(pickle.dumps(HARM))
    assert "unsafe-global" in str(list_rules("."))


@pytest.mark.parametrize(
    ("tracker", "content", "name"),
    [
        ("latest", b".h\rx", ".h\nx"),
        ("latest", b"__pycache__\r\n", "__pycache__"),
        ("latest", b"\n" * 9000 + b".venv/lib/python3.1/site-packages", ".venv/lib/python3.1/site-packages"),
        ("latest_universal", b".gs1", ".gs1"),
        ("latest_checkpointed_iteration.txt", b"1_0", "iter_0000010"),
    ],
)
def test_a_tracker_is_read_as_loaders_read_it(folder, tracker, content, name):
    """Loaders read trackers in text mode, so each line end counts as one character. The harmful file in the named
    folder is found, or the folder of the tracker fails.
    """
    (folder / tracker).write_bytes(content)
    save_harmful(folder / name / "mp_rank_00_model_states.pt")
    (folder / ".venv").mkdir(exist_ok=True)
    (folder / ".venv" / "pyvenv.cfg").touch()
    assert name in checkpoint_folder.list_tracked_folders(".")
    is_found = "unsafe-global" in list_rules(".").get(name, ())
    assert is_found or f"latest points to {name!r}, which is not a plain folder" in list_failed(".")["."]


@pytest.mark.parametrize("tag", ["x/.[h]", "[h]", "?", "*", "a\nb"])
def test_a_tracker_that_is_a_glob_fails(folder, tag):
    """zero_to_fp32 passes the path to `glob`, so files of another folder may match."""
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(tag)
    assert "which is not a plain folder in the checkpoint folder" in str(list_failed("."))


def test_ordinary_folders_have_no_findings(folder):
    """A clone with an environment, a download of the Hub, caches of tools, and a `latest` of another program."""
    for path, content in {
        ".git/objects/ab/cdef": zlib.compress(b"blob 3\0abc"),
        ".git/lfs/objects/ab/cd/" + "ab" * 32: pickle.dumps(HARM),
        ".git/refs/heads/main": b"ab" * 20 + b"\n",
        ".venv/pyvenv.cfg": b"home = /usr/bin\n",
        ".venv/lib/python3.11/site-packages/torch/a.pt": pickle.dumps(HARM),
        ".cache/huggingface/download/model.safetensors.metadata": b"abc\ndef\n1.5\n",
        ".cache/huggingface/download/model.safetensors.lock": b"",
        ".cache/huggingface/.gitignore": b"*",
        ".github/workflows/ci.yml": b"on: push\n",
        "src/__pycache__/a.cpython-311.pyc": b"\xa7\r\r\n" + bytes(12),
        ".ipynb_checkpoints/a-checkpoint.ipynb": b"{}",
        "latest": b"runs/[1]\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    results = audit(Request((".",))).targets
    assert {result.status for result in results} == {TargetStatus.AUDITED, TargetStatus.SKIPPED}
    assert not any(result.findings for result in results)
