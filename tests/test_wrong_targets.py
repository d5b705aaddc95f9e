"""First wrong turns: each is one line with what to type instead, and that line works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

import statecli as api
from statecli.core.errors import UnreadableError, UsageError

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
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    for file in ("timm/__init__.py", "torchvision/models/__init__.py", "torchvision/__init__.py", "own/__init__.py"):
        (tmp_path / "installed" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "installed" / file).write_text("raise_at_import = 1 / 0")
    parts = "raise_at_import = 1 / 0\nfrom torch import nn\nclass Part(nn.Module):\n    pass\n"
    (tmp_path / "installed" / "own" / "parts.py").write_text(parts)
    return tmp_path


CLASSES = "\n  'net.py:Base(size=..., depth=...)'\n  net.py:Tiny"
#: Words -> the end of the line on standard error.
MISTAKES = {
    ("inspect", "net.py"): f"is a Python file, not a checkpoint; name a class or function in it:{CLASSES}",
    ("verify", "net.py"): f"is a Python file, not a checkpoint; name a class or function in it:{CLASSES}",
    ("inspect", "net"): f"name a class or function of the file net.py:{CLASSES}",
    ("verify", "net"): f"name a class or function of the file net.py:{CLASSES}",
    ("inspect", "net.Tiny"): "name a class or function after a colon: net.py:Tiny",
    ("verify", "net.Tiny"): "name a class or function after a colon: net.py:Tiny",
    ("inspect", "net.Base(1, depth=2)"): "name a class or function after a colon: 'net.py:Base(1, depth=2)'",
    ("verify", "net.Tinny"): f"name a class or function of the file net.py:{CLASSES}",
    ("inspect", "net.py:Base(size=..., depth=1)"): "write a value in place of ... (size): a number, a string or a list",
    ("inspect", "torch"): "torch is a Python package: name a class or function in it, such as 'torch.nn:Linear(2, 3)'",
    ("inspect", "torch.nn.Linear(2, 3)"): "name a class or function after a colon: 'torch.nn:Linear(2, 3)'",
    (
        "inspect",
        "torch.nn.modules.linear.Linear",
    ): "name a class or function after a colon: torch.nn.modules.linear:Linear",
    (
        "inspect",
        "timm",
    ): "timm is a Python package: name a class or function in it, such as \"timm:create_model('resnet18')\"",
    ("inspect", "timm.create_model('resnet18')"): "after a colon: \"timm:create_model('resnet18')\"",
    ("inspect", "torchvision"): "such as torchvision.models:resnet18",
    ("inspect", "torchvision.models"): "such as torchvision.models:resnet18",
    ("inspect", "own.parts"): "own.parts is a Python module; name a class in it: own.parts:Part",
    ("inspect", "own"): "name a class or function in it after a colon, or write a function without arguments that "
    "builds the model, and name it: build.py:make",
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
    assert result.err.count("\n") == 1 + MISTAKES[words].count("\n")
    assert result.err.rstrip().endswith(MISTAKES[words])


def test_the_advice_works(here, statecli):
    """What the line for a dotted name says to type is listed."""
    for words, before in (("torch.nn.Linear(2, 3)", "colon: "), ("torch", "such as ")):
        (advice,) = shlex.split(statecli("inspect", words).err.partition(before)[2])
        assert statecli("inspect", advice).code == 0


def test_only_classes_that_a_command_line_can_build_are_listed(here, statecli):
    """A configuration cannot be typed; of a file without such classes its functions are listed, else what to write."""
    module = "(nn.Module):\n    def __init__(self, {}):\n        super().__init__()\n"
    classes = "".join(f"class A{n}{module.format('size=1')}" for n in range(22))
    (here / "many.py").write_text(f"from torch import nn\nclass C{module.format('cfg')}{classes}")
    lines = statecli("inspect", "many.py").err.splitlines()
    assert lines[1:] == [*(f"  many.py:A{n}" for n in range(20)), "  or one of 2 more"]
    (here / "made.py").write_text(f"from torch import nn\nclass C{module.format('x: NetConfig')}"
                                  "def make(): return nn.Linear(2, 2)\ndef main(): print()\n")  # fmt: skip
    assert statecli("inspect", "made.py").err.endswith("name a class or function in it: made.py:make\n")
    (here / "none.py").write_text("def main(): print()\n")
    assert "write a function without arguments that builds the model" in statecli("inspect", "none.py").err


def test_an_error_in_python_is_a_sentence(here):
    """The classes follow the message, without lines."""
    with pytest.raises(UnreadableError, match=r"in it: 'net.py:Base\(size=..., depth=...\)', net.py:Tiny\Z"):
        api.inspect("net.py")
    with pytest.raises(UsageError, match=r"in it: 'net.py:Base\(size=..., depth=...\)', net.py:Tiny\Z"):
        api.verify("net.py")


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
