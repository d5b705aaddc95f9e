"""Findings about the code of an installed library: the help suggests a report to the library, and names the user's
line.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from statecli.commands.verify.result import Name  # noqa: E402

from .proving import prove_source, run_proof  # noqa: E402

LIBRARY = """import torch
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def _apply(self, fn, recurse=True):
        return self
class Positions(nn.Module):
    def forward(self, x):
        return x + torch.arange(4)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
"""


@pytest.fixture(autouse=True)
def library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "own_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)


def test_help_suggests_to_report_a_method_to_its_library():
    """The user cannot edit the library's file; the help also has the user's line that created the module."""
    (finding,) = prove_source(Name.MOVE, "import own_library\nself.own = own_library.Own()").findings
    assert finding.help == (
        "report the problem to the authors of the package (own_library.py:7), with this fix: "
        "call super() in Own._apply and move this tensor too; "
        "assigned at net.py:7"
    )


def test_help_suggests_to_report_a_forward_to_its_library(tmp_path):
    """For the user's own forward, the help still suggests a change of the code."""
    (tmp_path / "net.py").write_text("from own_library import Positions as Net\n")
    (theirs,) = run_proof(Name.FORWARD, "net.py:Net", "2x4", device="fake-cuda").findings
    (tmp_path / "own.py").write_text(LIBRARY)
    (ours,) = run_proof(Name.FORWARD, "own.py:Positions", "2x4", device="fake-cuda").findings
    assert theirs.help == f"report the problem to the authors of the package, with this fix: {ours.help}"
    assert ours.help.startswith("create the tensor with device=x.device")


def test_help_has_no_line_of_a_library(tmp_path):
    """The help has no line of an installed library, because the user cannot edit the library, but lines of the user."""
    (tmp_path / "net.py").write_text(f"{LIBRARY}from own_library import Tied as Theirs\n")
    (ours,), (theirs,) = (run_proof(Name.SAVE, f"net.py:{name}").findings for name in ("Tied", "Theirs"))
    assert ours.help.endswith("; assigned at net.py:17")
    assert theirs.help == ours.help.partition("; assigned")[0]
