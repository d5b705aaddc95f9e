"""For unregistered tensors of an installed library, the user's line is shown, without an edit of the library."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

LIBRARY = """import torch
from torch import nn
class Pos(nn.Module):
    kept = torch.ones(3)
    def __init__(self, n=8):
        super().__init__()
        self.table = torch.arange(float(n))
        self.lin = nn.Linear(n, n)
"""
NET = """import copy
import poslib
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {}
"""
#: Line of the statement in the file of `NET`, which begins with two lines of imports.
LINE = 8


@pytest.fixture
def library(request, tmp_path, monkeypatch):
    """Write a package as pip installs packages; `pip install --target` writes a record next to the package."""
    folder = tmp_path / getattr(request, "param", "site-packages")
    (folder / "poslib").mkdir(parents=True)
    (folder / "poslib" / "__init__.py").write_text(LIBRARY)
    if folder.name == "target":
        (folder / "poslib-1.0.dist-info").mkdir()
        (folder / "poslib-1.0.dist-info" / "RECORD").write_text("poslib/__init__.py,sha256=aa,3\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "poslib", raising=False)
    yield folder
    sys.modules.pop("poslib", None)


def rows(state, ending):
    return [row for row in state.tensors if row.fqn.endswith(ending)]


@pytest.mark.parametrize(
    "statement",
    [
        "self.pos = poslib.Pos()",
        "self.seq = nn.Sequential(poslib.Pos(), nn.ReLU())",
        "self.pos = copy.deepcopy(poslib.Pos())",
        "self.many = nn.ModuleList([copy.deepcopy(poslib.Pos()) for _ in range(2)])",
    ],
)
def test_the_line_of_the_user_that_made_the_module_is_shown(library, inspect, statement):
    """This holds for registered tensors too. The fix names the library's own line in a comment, without code."""
    state = inspect(NET.format(statement))
    for row in (*rows(state, "table"), *rows(state, "kept"), *rows(state, "lin.weight")):
        assert (row.origin.file.startswith("net"), row.origin.line) == (True, LINE), row.fqn
    for row in rows(state, "table"):
        assert all(line.startswith("# ") for line in row.fix.splitlines())
        assert "poslib/__init__.py:7 is in an installed package and does not register table" in row.fix


@pytest.mark.parametrize("library", ["site-packages", "dist-packages", "target"], indirect=True)
def test_origin_of_a_subclass_is_the_users_line(library, inspect):
    """The origin is the user's line that runs the library's constructor."""
    source = "import poslib\nclass Net(poslib.Pos):\n    def __init__(self):\n        super().__init__(4)\n"
    (row,) = rows(inspect(source), "table")
    assert row.origin.line == 6
    assert row.fix.startswith("# poslib/__init__.py:7 is in an installed package")


def test_origin_of_a_library_class_is_the_users_function(library, inspect):
    """The model's class is the library's, and the line that built the model is the user's."""
    (row,) = rows(inspect("import poslib\ndef make():\n    return poslib.Pos()\n", "make"), "table")
    assert (row.origin.file.startswith("net"), row.origin.line) == (True, 5)


def test_library_model_without_user_code_shows_the_library_line(library, inspect):
    """Without a line of the user, the library's line is shown, without code to paste."""
    state = inspect("from poslib import Pos as Net\n")
    (row,) = rows(state, "table")
    assert (row.origin.file, row.origin.line) == ("poslib/__init__.py", 7)
    assert row.fix.startswith("# poslib/__init__.py:7 is in an installed package")


def test_tensor_assigned_to_a_library_module_gets_code_as_its_fix(library, inspect):
    """The file belongs to the user, so the fix is code."""
    (row,) = rows(inspect(NET.format("self.pos = poslib.Pos(); self.pos.extra = torch.ones(2)")), "extra")
    assert (row.origin.line, row.fix) == (
        LINE,
        'self.pos = poslib.Pos(); self.pos.register_buffer("extra", torch.ones(2), persistent=False)',
    )


def test_live_model_of_a_library_gets_a_comment_as_its_fix(library, read_live):
    """No line was recorded during construction."""
    import poslib

    (row,) = rows(read_live(poslib.Pos), "table")
    assert row.fix.startswith("# Pos is in an installed package and does not register table")


@pytest.mark.parametrize(
    ("value", "expected_text"),
    [
        ("torch.arange(4.0)", "or move table yourself after each .to()"),
        ("torch.randn(4)", "save it next to the state_dict()"),
        ("torch.ones(4, requires_grad=True)", "pass table to the optimizer"),
        ("[nn.Linear(2, 2)]", "pass table to the optimizer"),
    ],
)
def test_advice_for_a_library_tensor_depends_on_its_value(library, inspect, value, expected_text):
    """A value that each build draws must be saved, and a trainable value must be trained."""
    (library / "poslib" / "__init__.py").write_text(LIBRARY.replace("torch.arange(float(n))", value))
    state = inspect(NET.format("self.pos = poslib.Pos()"))
    assert {expected_text in row.fix for row in state.tensors if row.fqn.startswith("pos.table")} == {True}
