"""Modules of a downloaded folder are not imported: only code that the user typed is imported from a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import statecli
from statecli.core import safe_search_path
from statecli.live import search_path

from ..forked_python import run_python

SCRIPT = Path(sys.executable).parent / "statecli"
#: Packages that a command imports on demand, and packages that transformers looks for.
PACKAGES = (
    *("transformers", "huggingface_hub", "accelerate", "tokenizers", "safetensors", "sentencepiece", "kernels", "yaml"),
    *("numpy", "torch", "torchvision", "scipy", "sklearn", "PIL", "gguf", "rich", "jinja2", "markupsafe", "typer"),
    *("fsspec", "s3fs", "urllib3", "dask", "ray", "distributed", "mpi4py", "blake3", "pydantic"),
    *("json", "re", "struct", "typing", "ctypes", "resource", "multiprocessing"),
)
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 8, **SIZES}


@pytest.fixture
def hostile_folder(tmp_path):
    """Create a folder with weights, a config.json and a module with the name of each package."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in PACKAGES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(0)\n"
        )
    (folder / "config.json").write_text(json.dumps(BERT))
    save_file({"embeddings.word_embeddings.weight": torch.zeros(9, 8)}, folder / "model.safetensors")
    yield folder
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def run(folder, *words, command=(SCRIPT,), env=None):
    return subprocess.run([*command, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


COMMANDS = [
    ("inspect", "model.safetensors", "--stats"),
    ("audit", ".", "--values", "-f", "html"),
    ("lock", ".", "-o", "-"),
    ("diff", "model.safetensors", ".", "-f", "table", "--color", "always"),
    ("help", "audit"),
    ("__complete", "zsh", "=model.safetensors#", "inspect"),
    ("__complete", "zsh", "=json.py:", "inspect"),
    ("inspect", "https://127.0.0.1:1/x.pt"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_command_imports_from_the_current_folder(hostile_folder, words, monkeypatch):
    """This holds for every package that a command needs."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    assert run(hostile_folder, *words).returncode == (2 if "https://127.0.0.1:1/x.pt" in words else 0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11: isolated runpy")
def test_python_m_statecli_imports_nothing_from_the_current_folder(hostile_folder):
    """Python puts the folder first on the path; statecli removes the folder before any import."""
    result = run(hostile_folder, "audit", ".", "--values", command=(sys.executable, "-m", "statecli"))
    assert result.returncode == 0, result.stderr


CLASS = "transformers:BertModel(config='config.json')"


def test_auto_imports_nothing_from_the_folders_around(hostile_folder, tmp_path):
    """The folders are the current folder, the folder of the weights, and a relative entry of PYTHONPATH.

    The child process that runs code of models does not import from these folders either.
    """
    pytest.importorskip("transformers")
    for name in ("here", "there"):
        shutil.copytree(hostile_folder, tmp_path / name)
    for name in ("json", "re", "struct", "typing", "ctypes", "resource", "multiprocessing"):
        (tmp_path / "there" / f"{name}.py").unlink()  # Python's own start imports these modules from PYTHONPATH
    environment = {**os.environ, "PYTHONPATH": "../there"}
    result = run(tmp_path / "here", "audit", "../downloaded", "--model", "auto", env=environment)
    assert (result.returncode, "missing-entry" in result.stdout) == (1, True), result.stderr


def test_a_class_of_a_package_imports_nothing_from_the_current_folder(hostile_folder):
    """The forked process has imported torch, but not transformers."""
    pytest.importorskip("transformers")
    result = run_python([SCRIPT, "diff", CLASS, "."], cwd=hostile_folder)
    assert (result.returncode, "embeddings.LayerNorm" in result.stdout) == (1, True), result.stderr


@pytest.mark.parametrize("entry", ["", ".", "./", "../here"])
def test_relative_entries_of_pythonpath_are_dropped(tmp_path, monkeypatch, entry):
    """Python makes the entries absolute before statecli starts."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", entry]))
    monkeypatch.setattr(sys, "path", ["/a", os.getcwd(), "", "/b"])
    monkeypatch.setattr(safe_search_path, "DROPPED_ENTRIES", [])
    safe_search_path.drop_relative_entries()
    assert sys.path == ["/a", "/b"]


def test_auto_in_interactive_python_imports_only_installed_packages(tmp_path, monkeypatch):
    """In interactive Python, the current folder is on the path."""
    pytest.importorskip("transformers")
    (tmp_path / "accelerate.py").write_text("open('ran', 'w')\n")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    save_file({"embeddings.word_embeddings.weight": torch.zeros(9, 8)}, tmp_path / "model.safetensors")
    code = "import statecli; print(len(statecli.inspect('.', model='auto').state.tensors))"
    result = run_python(["-c", code], cwd=tmp_path)
    assert (result.returncode, (tmp_path / "ran").exists()) == (0, False), result.stderr


@pytest.mark.parametrize("spec", ["net:Net", "net.py:Net", "inner.net:Net"])
def test_typed_code_comes_from_the_current_folder(tmp_path, spec):
    """The code's own imports come from the folder too, and from relative entries of PYTHONPATH."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sizes.py").write_text("WIDTH = 3\n")
    text = "import torch\nfrom sizes import WIDTH\n\ndef Net():\n    return torch.nn.Linear(WIDTH, 1)\n"
    (tmp_path / "net.py").write_text(text)
    (tmp_path / "inner" / "net.py").write_text(text)
    result = run_python([SCRIPT, "inspect", spec], cwd=tmp_path, env={**os.environ, "PYTHONPATH": "lib"})
    assert result.returncode == 0, result.stderr


def test_search_path_is_restored_after_the_block(tmp_path, monkeypatch):
    """Entries that an imported package added stay on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", os.getcwd(), "/b"])
    with search_path.use_installed_only("/b"):
        assert sys.path == ["/a"]
        sys.path.append("/c")
    assert sys.path == ["", "/a", os.getcwd(), "/b", "/c"]


def test_the_folder_of_statecli_itself_counts_as_installed(monkeypatch):
    """`pip install --target .` puts the packages that statecli needs into that folder."""
    home = str(Path(statecli.__file__).parent.parent)
    monkeypatch.chdir(home)
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.setattr(sys, "path", ["/a", home])
    safe_search_path.drop_relative_entries()
    with search_path.use_installed_only():
        assert sys.path == ["/a", home]
