"""Entries of an audited folder: names that look like text of the user, devices, pipes, and links through /proc."""

from __future__ import annotations

import os

import pytest
import torch
import torch.package
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.commands.inspect.run import Request as Inspect
from statecli.commands.inspect.run import inspect
from statecli.storage import files
from statecli.targets.expand import ModelFolders, expand_targets
from statecli.targets.target_result import Status


class Harm:
    def __reduce__(self):
        return os.system, ("touch PWNED",)


def save_harmful(path):
    """Write a file whose unpickling runs a command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"x": Harm()}, path)


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
    torch.save({"x": Harm()}, folder / "t")
    (folder / "t").rename(folder / name)
    (rules,) = list_rules(target).values()
    assert "unsafe-global" in rules


@pytest.mark.parametrize("name", ["-", "s3:", "-#x", "a[b]"])
@pytest.mark.parametrize("target", [".", "*"])
def test_a_folder_of_any_name_is_walked(folder, target, name):
    """Also if its path begins as a URL."""
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
    torch.save({"x": Harm()}, folder / "t")
    (folder / "t").rename(folder / "-")
    (result,) = expand_targets(["-"])
    assert (result.status, "./-" in result.reason) == (Status.FAILED, True)


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
    return {files.get_name(result.target): result.reason for result in results if result.status is Status.FAILED}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX: named pipes")
@pytest.mark.parametrize("name", ["notes", "config.json", "inner/a"])
def test_a_pipe_in_a_folder_fails(folder, name):
    """Nobody knows what a loader would read from it."""
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    assert "is a named pipe, not a regular file" in list_failed(".")[name.rpartition("/")[2]]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs POSIX: devices")
@pytest.mark.parametrize("name", ["notes", "latest", "config.json", "a.pt", "inner/x"])
def test_a_link_to_a_device_fails(folder, name):
    """It is an empty file for a loader."""
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
    """The working directory of the loader decides where it leads, not that of the audit."""
    torch.save({"w": torch.ones(2)}, "real.pt")
    (folder / ".empty").mkdir()
    os.mkdir("inner")
    os.symlink("/proc/self/cwd", "inner/steps")
    os.symlink("/proc/self/cwd/real.pt" if link == "model.pt" else "/proc/self/cwd/.empty", "inner/second")
    os.symlink(lead.format(path=str(folder).strip("/"), folder="inner"), f"inner/{link}")
    assert "a link through /proc" in list_failed(".")[link]
    named = list_failed(f"inner/{link}")
    assert "a link through /proc" in str(named) or not os.path.exists(f"inner/{link}")


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs Linux: /proc")
def test_a_shard_behind_proc_cannot_be_read(folder):
    """Also if only the index is named."""
    os.mkdir("inner")
    os.symlink("/proc/self/cwd/model.safetensors", "inner/a.safetensors")
    (folder / "inner" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert "a link through /proc" in list_failed("inner/model.safetensors.index.json")["model.safetensors.index.json"]


def test_ordinary_links_are_followed(folder):
    """Relative and absolute ones, and those of a folder around the audited one."""
    torch.save({"w": torch.ones(2)}, "real.pt")
    os.mkdir("inner")
    os.symlink("../real.pt", "inner/a.pt")
    os.symlink(folder / "real.pt", "inner/b.pt")
    os.symlink("inner", "outer")
    os.symlink("user@host.123:456", "inner/.#notes")
    assert not list_failed("outer", "inner", "outer/a.pt")


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs POSIX: /dev/fd")
def test_a_descriptor_that_the_user_names_is_read(folder):
    """`statecli audit /dev/stdin < model.pt`."""
    with open("model.safetensors", "rb") as file:
        path = f"/dev/fd/{file.fileno()}"
        assert not list_failed(path)
