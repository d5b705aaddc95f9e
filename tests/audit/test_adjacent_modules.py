"""Modules next to a pickle that Python imports in place of the installed packages."""

from __future__ import annotations

import argparse
import decimal
import fractions
import pathlib
import pickle
import random
import subprocess
import sys
import uuid
import zoneinfo

import numpy as np
import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.storage import files
from statecli.storage.lifetime import forget_command
from statecli.targets.target_result import TargetStatus


def list_findings(*targets):
    """Return the findings about modules next to a pickle, as text."""
    forget_command()
    results = audit(Request(tuple(map(str, targets)))).targets
    findings = [finding for result in results for finding in result.findings if finding.rule == "local-module"]
    return [finding.message for finding in findings if "Python may import" in finding.message]


def build_pickle(module, name):
    """Return a pickle of an instance of a class; the class need not be installed."""
    return b"\x80\x02c%s\n%s\n)\x81." % (module.encode(), name.encode())


def write(path, data=b"open('PWNED', 'w')"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path, in_tmp_path):
    """The current folder."""
    return tmp_path


METADATA = ("omegaconf.base", "Metadata")
TRAINER = ("transformers.trainer_utils", "IntervalStrategy")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (METADATA, "omegaconf.py"),
        (METADATA, "omegaconf.pyc"),
        (METADATA, "omegaconf.cpython-311-x86_64-linux-gnu.so"),
        (METADATA, "omegaconf.abi3.so"),
        (METADATA, "omegaconf/__init__.py"),
        (METADATA, "omegaconf/base.py"),
        (METADATA, "omegaconf/base/__init__.pyc"),
        (TRAINER, "transformers/trainer_utils.so"),
        (("decimal", "Decimal"), "decimal.py"),
        (("torch._utils", "_rebuild_tensor_v2"), "torch.py"),
    ],
)
@pytest.mark.parametrize("target", [".", "cfg.pkl"])
def test_a_clean_name_is_unsafe_next_to_its_module(folder, name, module, target):
    """Python takes the module from the working directory."""
    write(folder / "cfg.pkl", build_pickle(*name))
    assert not list_findings(target)
    write(folder / module)
    (message,) = list_findings(target)
    assert f"Python may import from {module!r}" in message


def test_numpy_package_is_reported_only_next_to_the_pickle(folder):
    """The repository of numpy has its package and, in subfolders, pickles for tests."""
    write(folder / "numpy" / "tests" / "x.pkl", pickle.dumps(np.float64(1)))
    write(folder / "numpy" / "__init__.py")
    assert not list_findings(".")
    write(folder / "x.pkl", pickle.dumps(np.float64(1)))
    assert "'numpy/__init__.py'" in list_findings(".")[0]


def test_python_imports_the_module_of_the_folder(folder):
    """Python also replaces a module of the standard library, if the module has not been imported before."""
    write(folder / "cfg.pkl", pickle.dumps(decimal.Decimal(1)))
    write(folder / "decimal.py", b"open('PWNED', 'w')\nclass Decimal(str): pass\n")
    subprocess.run([sys.executable, "-c", "import pickle; pickle.load(open('cfg.pkl', 'rb'))"], check=True)
    assert (folder / "PWNED").exists()
    assert list_findings("cfg.pkl")


@pytest.mark.parametrize("module", ["tzdata.py", "tzdata/__init__.py"])
def test_a_time_zone_imports_a_package(folder, module):
    """If the system lacks a time zone, Python imports `tzdata`."""
    write(folder / "cfg.pkl", pickle.dumps(zoneinfo.ZoneInfo("UTC")))
    assert not list_findings("cfg.pkl")
    write(folder / module)
    assert "tzdata" in list_findings("cfg.pkl")[0]


@pytest.mark.parametrize(
    ("value", "module"),
    [
        (fractions.Fraction(1, 2), "numbers.py"),
        (decimal.Decimal(1), "numbers/__init__.py"),
        (random.Random(1), "bisect.py"),  # noqa: S311
        (pathlib.PurePosixPath("a"), "fnmatch.py"),
        (argparse.Namespace(a=1), "gettext.py"),
        (uuid.UUID(int=1), "platform.py"),
        (np.float64(1), "numbers.py"),
        (np.random.default_rng(1), "secrets.py"),
    ],
)
def test_a_module_that_the_standard_library_imports_is_reported(folder, value, module):
    """Importing the module of a clean name imports other modules, also from the working directory."""
    write(folder / "cfg.pkl", pickle.dumps(value))
    for unrelated in ("utils.py", "test.py", "types.py", "shelve.py"):
        write(folder / unrelated)
    assert not list_findings("cfg.pkl")
    write(folder / module)
    subprocess.run([sys.executable, "-c", "import pickle; pickle.load(open('cfg.pkl', 'rb'))"], capture_output=True)
    assert (folder / "PWNED").exists()
    assert repr(module) in list_findings("cfg.pkl")[0]


#: Pickles that import a file, and then break off or stop.
IMPORTING_PICKLES = [
    b"N\224cevil\nx\n\220.",
    b"cevil\nx\nfoo",
    b"cevil\nx\n",
    "cévil\nx\n.".encode(),
]


@pytest.mark.parametrize("data", IMPORTING_PICKLES)
def test_text_that_imports_a_file_next_to_it_is_a_pickle(folder, data):
    """The import runs before the unpickler sees that the text is not a pickle."""
    write(folder / "b.dat", data)
    write(folder / "sub" / "model.pkl", pickle.dumps([1]))
    (clean,) = [target for target in audit(Request((".",))).targets if target.target.endswith("b.dat")]
    assert clean.status is TargetStatus.SKIPPED
    for name in ("evil.py", "évil.py"):
        write(folder / name)
    subprocess.run([sys.executable, "-c", "import pickle; pickle._load(open('b.dat', 'rb'))"], capture_output=True)
    assert (folder / "PWNED").exists()
    assert "vil.py'" in list_findings(".")[0]


@pytest.mark.parametrize(
    "data", [b"click\nnumpy\n", b"chat\nchien\n\xe9l\xe8ve\n\xe0\xe0\xe0", b"caf\xe9\nth\xe9\n", b"csv,file\nmodel,1\n"]
)
def test_text_next_to_other_modules_is_not_a_pickle(folder, data):
    """A list of words in any encoding begins like an import."""
    write(folder / "words.txt", data)
    write(folder / "model.pkl", pickle.dumps([1]))
    for name in ("click.py", "numpy.py", "chat.py", "model.py", "file.py"):
        write(folder / name)
    (target,) = [target for target in audit(Request((".",))).targets if target.target.endswith("words.txt")]
    assert target.status is TargetStatus.SKIPPED


def test_a_folder_is_listed_as_often_for_any_number_of_texts(folder, monkeypatch):
    """A table whose first column is `id` begins like an import."""
    listed, list_names, counts = [], files.list_names, []
    monkeypatch.setattr(files, "list_names", lambda path: (listed.append(path), list_names(path))[1])
    for count in (10, 40):
        for number in range(count):
            write(folder / str(count) / f"{number}.csv", b"id,name\n1,a\n")
        write(folder / str(count) / "model.pkl", pickle.dumps([1]))
        forget_command()
        listed.clear()
        audit(Request((str(count),)))
        counts.append(len(listed))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("target", "count"), [(".", 1), ("a", 1), ("a/b/cfg.pkl", 1)])
def test_modules_in_parent_folders_are_reported(folder, target, count):
    """Folders up to the audited folder or the current folder count."""
    write(folder / "a" / "b" / "cfg.pkl", build_pickle(*METADATA))
    write(folder / "omegaconf.py")
    assert len(list_findings(target)) == count


def test_code_of_the_own_repository_is_reported_only_if_it_replaces_a_package(folder):
    """A project's own classes in its checkpoints are unknown names, unless the audited folder has the code."""
    write(folder / "runs" / "own.pkl", build_pickle("project.config", "Config"))
    write(folder / "runs" / "cfg.pkl", build_pickle(*METADATA))
    write(folder / "project" / "config.py")
    assert len(list_findings("runs")) == 1
    (folder / ".git").mkdir()
    assert not list_findings("runs")
    assert len(list_findings(".")) == 1
    write(folder / "omegaconf.py")
    (message,) = list_findings("runs")
    assert "'omegaconf.py'" in message


def test_modules_above_the_current_folder_are_not_reported(folder, monkeypatch):
    """Folders above the current folder belong to the user."""
    write(folder / "a" / "cfg.pkl", build_pickle(*METADATA))
    write(folder / "omegaconf.py")
    monkeypatch.chdir(folder / "a")
    assert not list_findings(".")


def test_torch_has_imported_numpy_before_it_reads_a_pickle(folder):
    """A module that numpy imports is reported only for a pickle that torch.load does not read, and next to it."""
    torch.save({"a": np.float64(1)}, folder / "a.pt")
    write(folder / "sub" / "x.pkl", pickle.dumps(np.float64(1)))
    write(folder / "numbers.py")
    assert not list_findings(".")
    write(folder / "sub" / "numbers.py")
    assert "'numbers.py'" in list_findings(".")[0]


def test_torch_archive_is_checked_for_adjacent_modules(folder):
    """An archive of torch.save is checked as well as a bare pickle."""
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=1)}, folder / "pytorch_model.bin")
    assert not list_findings(".")
    write(folder / "argparse.py")
    assert "argparse.Namespace" in list_findings(".")[0]


def test_other_files_are_not_modules(folder):
    """Folders of data, scripts, and modules that Python has already imported are not reported."""
    torch.save({"w": torch.ones(2)}, folder / "a.pt")
    write(folder / "cfg.pkl", build_pickle(*METADATA))
    write(folder / "x.pkl", pickle.dumps({"a": np.float64(1), "b": argparse.Namespace()}))
    for name in ("train.py", "collections.py", "types.py", "omegaconf.yaml", "omegaconf.py.txt", "omegaconf/base.yaml"):
        write(folder / name)
    for name in ("torch/a.pt", "numpy/x.txt", "transformers/model.txt", "argparse/notes"):
        write(folder / name, b"text")
    assert not list_findings(".")
