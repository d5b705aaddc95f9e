"""An installation without torch: every checkpoint command runs, and a class gets one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from .forked_python import run_python

CHILD = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

assert not {modules!r} & {{name.partition(".")[0] for name in sys.modules}}
sys.meta_path.insert(0, Refuse())
from statecli.__main__ import main
main()
"""


def run_without(modules, *args):
    return run_python(["-c", CHILD.format(modules=set(modules)), *args], "statecli")


@pytest.fixture
def files(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = net.state_dict()
    optimizer = torch.optim.AdamW(net.named_parameters())
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(net, tmp_path / "whole.pt")
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "epoch": 1}, tmp_path / "train.pt")
    (tmp_path / "net.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    return tmp_path


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "legacy.pt", "whole.pt", "train.pt"])
def test_checkpoints_are_read_without_torch(files, name):
    """The listing and the statistics need no torch."""
    result = run_without(("torch", "safetensors"), "inspect", files / name, "-f", "json", "--stats")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["tensors"]


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "net.py:Net"),
        ("inspect", "a.pt", "--model", "net.py:Net"),
        ("verify", "net.py:Net"),
        ("lock", "net.py:Net"),
        ("audit", "net.py:Net"),
        ("fix", "net.py:Net"),
        ("explain", "a.pt", "net.py:Net"),
        ("diff", "a.pt", "net.py:Net"),
        ("inspect", "a.pt", "--to", "cpu"),
    ],
    ids=str,
)
def test_a_class_or_a_move_without_torch_is_one_line(files, args):
    """The line names the package to install; the exit status is 2."""
    args = [str(files / arg) if "." in arg else arg for arg in args]
    result = run_without(("torch",), *args)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "pip install 'torch-statecli[torch]'" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "a.safetensors", "--stats"),
        ("diff", "a.safetensors", "b.safetensors", "-v"),
        ("diff", "a.safetensors", "b.safetensors", "--shard", "1/2"),
        ("merge", "part"),
    ],
    ids=lambda args: args[-1],
)
def test_command_that_needs_numpy_fails_in_one_line(tmp_path, args):
    """Small tensors are compared without numpy, but neither their ranks nor a part of the work."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"weight": torch.full((8, 8), value)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "part").write_bytes(b"")
    # A process that is forked from one of the tests has imported numpy.
    words = ["-c", CHILD.format(modules={"numpy"}), *args]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "needs numpy, which is not installed: pip install 'torch-statecli[values]'" in result.stderr


def test_a_url_without_urllib3_is_one_line():
    """torch installs fsspec, but not urllib3."""
    words = ["-c", CHILD.format(modules={"urllib3"}), "inspect", "http://127.0.0.1:1/a.pt"]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    line = "statecli: URLs need the package urllib3: pip install 'torch-statecli[remote]'\n"
    assert (result.returncode, result.stderr) == (2, line)


def test_the_check_can_fail(files):
    """The blocked module really cannot be imported."""
    code = CHILD.format(modules={"statecli"})
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "No module named 'statecli" in result.stderr
