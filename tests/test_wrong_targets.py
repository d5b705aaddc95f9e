"""First wrong turns: each is one line with what to type instead, and that line works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

SOURCE = """
import torch
from torch import nn
raise_at_import = 1 / 0
class Base(nn.Module):
    def __init__(self, size, *, depth, name="a"):
        super().__init__()
class Tiny(Base):
    def __init__(self):
        super().__init__(1, depth=1)
class Other:
    pass
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file of classes, which cannot be imported, and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)
    torch.save({"w": torch.ones(2)}, "weights.pt")
    return tmp_path


CLASSES = "net.py:Base(size=..., depth=...), net.py:Tiny"
#: Words -> the end of the line on standard error.
MISTAKES = {
    ("inspect", "net.py"): f"is a Python file, not a checkpoint; name a class in it: {CLASSES}",
    ("verify", "net.py"): f"is a Python file, not a checkpoint; name a class in it: {CLASSES}",
    ("inspect", "net"): f"name a class of the file net.py: {CLASSES}",
    ("verify", "net"): f"name a class of the file net.py: {CLASSES}",
    ("inspect", "torch"): "torch is a Python package: name a class or function in the package, such as torch:CLASS",
    ("inspect", "torch.nn.Linear(2, 3)"): "name a class or function after a colon: torch.nn:Linear(2, 3)",
    ("inspect", "weigths.pt"): "no such file or directory; did you mean weights.pt?",
    ("diff", "weights.pt", "weigths.pt"): "no such file or directory; did you mean weights.pt?",
    ("verify", "weights.pt"): "is a checkpoint; verify needs a model class, such as net.py:Net or package.module:Class",
    ("inspec", "weights.pt"): "did you mean 'inspect'?",
    ("rules", "NaN"): "did you mean nan?",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_with_what_to_type(here, statecli, words):
    """The file is read by its syntax: importing it would fail."""
    result = statecli(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert result.err.rstrip().endswith(MISTAKES[words])


def test_the_advice_works(here, statecli):
    """What the line for a dotted name says to type is listed."""
    advice = re.search(r"colon: (.+)", statecli("inspect", "torch.nn.Linear(2, 3)").err)[1]
    assert statecli("inspect", advice).code == 0


def test_a_constructor_that_needs_an_object_gets_no_advice_that_cannot_work(here, statecli):
    """A number or text can be written on the command line, a configuration cannot."""
    (here / "needs.py").write_text(
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "class B(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n"
    )
    assert "write a function without arguments that builds the model" in statecli("inspect", "needs.py:A").err
    assert "write 'needs.py:B(size=...)'" in statecli("inspect", "needs.py:B").err


@pytest.mark.parametrize("words", [("version",), ("-V",), ("--version",)], ids=" ".join)
def test_the_version_has_three_spellings(statecli, words):
    """As other commands have them."""
    result = statecli(*words)
    assert (result.code, result.out) == (0, statecli("--version").out)


def test_help_is_a_command(statecli):
    """`help`, and `help diff`, print what --help prints; a command that does not exist is a mistake."""
    for words in ((), ("diff",), ("git", "setup")):
        result = statecli("help", *words)
        assert (result.code, result.out, result.err) == (0, statecli(*words, "--help").out, "")
    wrong = statecli("help", "dif")
    assert (wrong.code, wrong.err) == (2, "statecli: No such command 'dif'; did you mean 'diff'?\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("scan", "a.pt"), "No such command 'scan'; did you mean 'audit'?"),
        (("compare", "a.pt", "b.pt"), "No such command 'compare'; did you mean 'diff'?"),
        (
            ("inspect", "a.pt", "b.pt"),
            "inspect takes only TARGET; to check several checkpoints: statecli audit TARGET...",
        ),
        (
            ("inspect", "a.lock"),
            "is a lock file; to check a checkpoint against it: statecli audit CHECKPOINT --lock FILE",
        ),
    ],
)
def test_a_command_of_another_program_is_answered_with_ours(statecli, in_tmp_path, words, answer):
    """Words that users of other programs type first."""
    Path("a.lock").write_text('{"schema": "statecli.lock/1", "digest": "blake3", "targets": []}\n')
    result = statecli(*words)
    assert result.code == 2
    assert answer in result.err


def test_a_group_of_rules_is_listed(statecli):
    """`--select pickles` takes a group, so that the list of rules does too."""
    names = [rule["name"] for rule in statecli("rules", "pickles", "-f", "json").json["rules"]]
    assert "unsafe-global" in names
    assert "nan" not in names
