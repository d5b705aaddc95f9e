"""Entries of an audited folder: names that look like text of the user, devices, pipes, and links through /proc."""

from __future__ import annotations

import os

import pytest
import torch
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
