"""The README's own examples run."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [
    line for block in BLOCKS for line in block.splitlines() if line.startswith(("statecli inspect", "statecli diff"))
]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder that holds every file the examples name."""
    shutil.copy(ROOT / "sample_models" / "net.py", tmp_path / "net.py")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self, hidden=2):\n"
        "        super().__init__(hidden, hidden)\n\n\ndef build():\n    return Net()\n"
    )
    state = {"param": torch.ones(3, 3), "mybuffer1": torch.ones(2, 2)}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "net.pt")
    optimizer = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "train.ckpt")
    torch.save(state, tmp_path / "a.pt")
    for name, prefix in (("old.pt", "net."), ("new.pt", "model.")):
        torch.save({prefix + key: value for key, value in state.items()}, tmp_path / name)
    for name in ("epoch1.ckpt", "epoch2.ckpt"):
        torch.save({"model": state, "optimizer": optimizer}, tmp_path / name)
    save_file(state, tmp_path / "b.safetensors")
    runpy.run_path(str(ROOT / "sample_models" / "finetune.py"))["main"](str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_examples():
    """The pattern finds them."""
    assert len(LINES) >= 21


@pytest.mark.parametrize("line", LINES)
def test_an_example_runs(statecli, desk, line):
    """Each ends 0 or 1, or, where it needs CUDA and there is none, says so."""
    words = shlex.split(re.split(r" #| \|", line)[0])
    result = statecli(*words[1:])
    if result.code == 2 and not torch.cuda.is_available():
        assert "--to meta" in result.err
        assert any("cuda" in word for word in words)
    else:
        assert result.code in (0, 1), result
