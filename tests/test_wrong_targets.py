"""Frequent first mistakes: the error is one line with the correct input, and the correct input works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import statecli as api
from statecli.core import python_names
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
def class_folder(tmp_path, monkeypatch):
    """A folder with a checkpoint and a file of classes; the file cannot be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)  # of a test before
    (tmp_path / "net.py").write_text(SOURCE)
    torch.save({"w": torch.ones(2)}, "weights.pt")
    (tmp_path / "syntax.py").write_text("import torch\ndef f(:\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "tiny.py").write_text(SOURCE)
    (tmp_path / "empty").mkdir()
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
    ("inspect", "net.py"): f"is a Python file, not a checkpoint; choose one of its classes or functions:{CLASSES}",
    ("verify", "net.py"): f"is a Python file, not a checkpoint; choose one of its classes or functions:{CLASSES}",
    ("inspect", "net"): f"choose a class or function of the file net.py:{CLASSES}",
    ("inspect", "net.Tiny"): "write a colon before the class or function: net.py:Tiny",
    ("inspect", "net.py.Tiny"): "write a colon before the class or function: net.py:Tiny",
    ("verify", "pack/tiny.py.Tiny"): "write a colon before the class or function: pack/tiny.py:Tiny",
    ("inspect", "net.py.Tinny"): f"choose a class or function of the file net.py:{CLASSES}",
    ("inspect", "net.Base(1, depth=2)"): "write a colon before the class or function: 'net.py:Base(1, depth=2)'",
    ("inspect", "pack"): (
        "pack: is a folder without a checkpoint, but with Python files; choose a class or function: "
        "'pack/tiny.py:Base(size=..., depth=...)', pack/tiny.py:Tiny"
    ),
    ("verify", "pack/"): (
        "pack/: is a folder; verify needs a model class:\n  'pack/tiny.py:Base(size=..., depth=...)'\n"
        "  pack/tiny.py:Tiny"
    ),
    ("inspect", "net.Base"): "write a colon before the class or function: 'net.py:Base(size=..., depth=...)'",
    ("inspect", "net.py Tiny"): "write a colon before the class or function: net.py:Tiny",
    ("inspect", "pack.Tiny"): (
        "choose a class or function of the folder pack:\n"
        "  'pack/tiny.py:Base(size=..., depth=...)'\n  pack/tiny.py:Tiny"
    ),
    ("verify", "empty"): f"empty: is a folder; verify needs a model class:{CLASSES}",
    ("verify", "net.Tinny"): f"choose a class or function of the file net.py:{CLASSES}",
    (
        "inspect",
        "net.py:Base(size=..., depth=1)",
    ): "write a value in place of `...` (size): a number, a string or a list",
    (
        "inspect",
        "torch",
    ): "torch is a Python package: give one of its classes or functions, such as 'torch.nn:Linear(2, 3)'",
    ("inspect", "net.py::Tiny"): "write a colon before the class or function: net.py:Tiny",
    ("inspect", "net::Tiny"): "no such file or directory; did you mean net.py:Tiny?",
    ("inspect", "torch.nn::Linear(2,3)"): "file.py:Class or package.module:Class(argument=...)",
    ("inspect", "import torch.nn as nn; nn.Linear(2, 3)"): "cannot be opened: no such file or directory",
    ("inspect", "no-package:Net"): "cannot be opened: no such file or directory",
    ("inspect", "monai"): "'monai.networks.nets:DenseNet121(2, 1, 2)'",
    ("inspect", "torchaudio.models.tacotron2"): "torchaudio.models:tacotron2",
    (
        "inspect",
        "timm",
    ): "timm is a Python package: give one of its classes or functions, such as timm:resnet18",
    ("inspect", "torchvision"): "such as torchvision.models:resnet18",
    (
        "inspect",
        "timm/resnet18",
    ): "for a model of timm, write timm:resnet18; for a repository of the Hugging Face hub, write hf://timm/resnet18",
    ("inspect", "nn.Linear(2, 3, bais=False)"): "write 'torch.nn:Linear(2, 3, bias=False)'",
    ("inspect", "Linear(2,3)"): "the file or module of Linear(...) is missing; write 'torch.nn:Linear(2,3)'",
    ("inspect", "torchvision.models"): "such as torchvision.models:resnet18",
    ("inspect", "own.parts"): "own.parts is a Python module; choose one of its classes or functions: own.parts:Part",
    (
        "inspect",
        "own",
    ): "add one of its classes or functions after a colon, or write a function make() in build.py that builds the "
    "model, then give build.py:make",
    ("inspect", "weigths.pt"): "no such file or directory; did you mean weights.pt?",
    ("diff", "weights.pt", "weigths.pt"): "no such file or directory; did you mean weights.pt?",
    ("inspect", "pack/tiny:Tiny"): "no such file or directory; did you mean pack/tiny.py:Tiny?",
    ("inspect", "weights"): "no such file or directory; did you mean weights.pt?",
    ("inspect", "pakc/tiny.py"): "no such file or directory; did you mean pack/tiny.py?",
    ("inspect", "pack/tinny.py:Tiny"): "pack/tinny.py: no such file; did you mean pack/tiny.py?",
    ("inspect", "weights.pt", "--model", "pakc/tiny.py:Tiny"): "no such file; did you mean pack/tiny.py?",
    ("inspect", "other/tiny.py:Tiny"): "other/tiny.py: no such file (the folder other does not exist)",
    ("inspect", "https:/x.example/y.pt"): "cannot be opened: no such file or directory",
    (
        "audit",
        "weights.pt",
        "--config",
        "packs/x.toml",
    ): "the configuration cannot be opened: no such file or directory",
    ("audit", "weights.pt", "--lock", "weigths.pt"): "no such file or directory; did you mean weights.pt?",
    ("audit", "weights.pt", "--baseline", "./weigths.pt"): "no such file or directory; did you mean ./weights.pt?",
    ("audit", "weights.pt", "--config", "weigths.pt"): "no such file or directory; did you mean weights.pt?",
    ("verify", "weights.pt"): f"is a checkpoint; verify needs a model class:{CLASSES}",
    (
        "inspect",
        "mynet",
    ): "no such file or directory; the Python module mynet was not found; write a model class as file.py:Class or "
    "package.module:Class",
    (
        "verify",
        "mynet",
    ): "is not a model class; the Python module mynet was not found; write a model class as file.py:Class or "
    "package.module:Class",
    (
        "inspect",
        "no_package.create_model('x')",
    ): "the Python module no_package is not installed; install the package, then "
    "give the target \"no_package:create_model('x')\"",
    ("inspect", "no_package:create_model('x')"): "no module is named no_package; install the package of no_package, "
    "or correct the name",
    ("inspect", "Tiny()"): "the file or module of Tiny(...) is missing; write 'net.py:Tiny()'",
    ("inspect", "Small(3)"): "write 'file.py:Small(3)' or 'package.module:Small(3)'",
    ("inspect", "model.bin"): "cannot be opened: no such file or directory",
    ("inspect", "ten.py"): "cannot be opened: no such file or directory",
    (
        "inspect",
        "syntax.py",
    ): "syntax.py: is a Python file with a syntax error in line 2: invalid syntax; correct the error, then "
    "give a class or function of the file, such as net.py:Net",
    (
        "inspect",
        "syntax",
    ): "no such file or directory; syntax.py is a Python file with a syntax error in line 2: invalid syntax; "
    "correct the error, then give a class or function of the file, such as net.py:Net",
    ("inspec", "weights.pt"): "did you mean 'inspect'?",
    ("rules", "NaN"): "did you mean nan?",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_error_about_a_wrong_target_has_the_line_to_type(class_folder, statecli, words):
    """The file is parsed, because an import would fail."""
    result = statecli(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1 + MISTAKES[words].count("\n")
    assert result.err.rstrip().endswith(MISTAKES[words])


def test_an_error_is_not_repeated_where_both_streams_end(class_folder):
    """If both streams end in one pipe or log, only the report has the error; separate streams both have it."""
    run = [sys.executable, "-m", "statecli", "audit", "gone.pt"]
    joined = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert joined.stdout.count("gone.pt: cannot be opened") == 1
    separate = subprocess.run(run, capture_output=True, text=True, check=False)
    assert joined.stdout == separate.stdout
    assert separate.stderr.startswith("statecli: gone.pt: cannot be opened")


def test_the_advice_works(class_folder, statecli):
    """The line for a package names a class."""
    (advice,) = shlex.split(statecli("inspect", "torch").err.partition("such as ")[2])
    assert statecli("inspect", advice).code == 0


def test_only_classes_that_a_command_line_can_build_are_listed(class_folder, statecli):
    """A class that needs a configuration is not listed. Without other classes, functions or an advice are listed."""
    module = "(nn.Module):\n    def __init__(self, {}):\n        super().__init__()\n"
    classes = "".join(f"class A{n}{module.format('size=1')}" for n in range(22))
    (class_folder / "many.py").write_text(f"from torch import nn\nclass C{module.format('cfg')}{classes}")
    lines = statecli("inspect", "many.py").err.splitlines()
    assert lines[1:22] == [*(f"  many.py:A{n}" for n in range(20)), "  or one of 2 more"]
    assert lines[22].startswith("C needs cfg; ")
    (class_folder / "made.py").write_text(f"from torch import nn\nclass C{module.format('x: NetConfig')}"
                                  "def make(): return nn.Linear(2, 2)\ndef main(): print()\n")  # fmt: skip
    assert "choose one of its classes or functions: made.py:make; C needs x; " in statecli("inspect", "made.py").err
    (class_folder / "none.py").write_text("def main(): print()\n")
    assert "write a function make() in build.py that builds the model" in statecli("inspect", "none.py").err


def test_an_error_in_python_is_a_sentence(class_folder):
    """The classes follow the message, without lines."""
    with pytest.raises(
        UnreadableError, match=r"its classes or functions: 'net.py:Base\(size=..., depth=...\)', net.py:Tiny\Z"
    ):
        api.inspect("net.py")
    with pytest.raises(
        UsageError, match=r"its classes or functions: 'net.py:Base\(size=..., depth=...\)', net.py:Tiny\Z"
    ):
        api.verify("net.py")


def test_a_constructor_that_needs_an_object_gets_no_advice_that_cannot_work(class_folder, statecli):
    """A number or text can be written on the command line, a configuration cannot."""
    (class_folder / "needs.py").write_text(
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "class B(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n"
    )
    assert statecli("inspect", "needs.py:A").err.endswith(
        "needs.py:A: the constructor needs config; write a function make() in build.py that builds the model, then "
        "give build.py:make\n"
    )
    assert "write 'needs.py:B(size=...)'" in statecli("inspect", "needs.py:B").err


NEEDS = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    size: int = 3

class Other:
    def __init__(self, size):
        self.size = size

class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.layer = nn.Linear(cfg.size, 2)

class Child(Net):
    pass

class Embedding(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(10, 4))

class Wide(Embedding):
    pass
"""
MAKERS = """
def make_config(): return Config()
def make_other():
    return Other(3)
def make_batch(): return torch.ones(2, 3)
def build():
    model = Net(Config())
    model = model.double()
    return model.eval()
def make_optimizer(): return torch.optim.SGD(Wide().parameters())
def make_weights(): return Wide().state_dict()
def build_again() -> "nn.Module": return build()
def _hidden(): return Net(Config())
def build_wide(width): return Wide()
"""


def test_every_class_of_a_file_is_named(class_folder, statecli):
    """The error lists classes that a command line can build, functions that build others, and missing arguments."""
    (class_folder / "need.py").write_text(NEEDS + MAKERS)
    specs = ["need.py:Net(cfg=Config())", "need.py:Child(cfg=Config())"]
    specs += ["need.py:Embedding", "need.py:Wide", "need.py:build", "need.py:build_again"]
    message, *lines = statecli("inspect", "need.py").err.splitlines()
    assert message.endswith("choose one of its classes or functions:")
    assert lines == [f"  {shlex.quote(spec)}" for spec in specs]
    for spec in specs:
        assert statecli("inspect", spec).code == 0


@pytest.mark.parametrize("target", ["inspect need.py:Child", "inspect need.Child"])
def test_a_class_that_needs_a_configuration_has_the_line_to_type(class_folder, statecli, target):
    """The file has only one class for the configuration, and the advised line works."""
    (class_folder / "need.py").write_text(NEEDS)
    (line,) = statecli(*target.split()).err.splitlines()
    command, spec = "inspect", "need.py:Child(cfg=Config())"
    assert line.endswith(f" {shlex.quote(spec)}")
    assert statecli(command, spec).code == 0


@pytest.mark.parametrize("target", ["need.py", "need.Child", "need.py:Child"])
def test_a_class_that_needs_an_object_has_the_advice_to_write_a_function(class_folder, statecli, target):
    """The file has no class to build the argument."""
    code = NEEDS.replace("@dataclass\nclass Config:\n    size: int = 3", "from types import SimpleNamespace as Config")
    (class_folder / "need.py").write_text(code)
    error = statecli("inspect", target).err
    assert re.search(r"(Child|constructor) needs cfg; write a function make\(\) in build.py", error)
    line = "from need import *\ndef make(): return Child(Config(size=3))\n"
    (class_folder / "build.py").write_text(line)
    assert statecli("inspect", "build.py:make").code == 0


@pytest.mark.parametrize("spec", ["need.py:Other", "need.py:Other(size=3)"])
def test_class_that_is_not_a_module_is_refused_with_alternatives(class_folder, statecli, spec):
    """Arguments would not help; a class of another file is looked up in its own file."""
    (class_folder / "need.py").write_text(NEEDS)
    lines = statecli("verify", spec).err.splitlines()
    assert lines[0] == f"statecli: {spec}: the class Other is not an nn.Module; name a model class or a function:"
    assert lines[3:5] == ["  need.py:Embedding", "  need.py:Wide"]
    assert statecli("verify", "fractions:Fraction").code == 2


@pytest.fixture
def bert():
    """Import BERT of transformers before a broken package torchvision exists."""
    pytest.importorskip("transformers.models.bert.modeling_bert")


@pytest.mark.parametrize("target", ["transformers.BertModel()", "transformers.BertModel", "transformers:BertModel"])
def test_the_line_for_a_class_of_transformers_works(bert, class_folder, statecli, target):
    """The line builds the class from its configuration."""
    (message,) = statecli("verify", target).err.splitlines()
    assert message.endswith("; write 'transformers:BertModel(config=BertConfig())'")
    assert statecli("inspect", "transformers:BertModel(config=BertConfig())", "--init-device", "meta").code == 0


def test_a_checkpoint_has_the_classes_of_files_next_to_it(class_folder, statecli):
    """Classes of the current folder are listed too; without classes the general form is shown."""
    (class_folder / "runs").mkdir()
    torch.save({}, "runs/a.pt")
    (class_folder / "runs" / "own.py").write_text("from torch import nn\nclass Own(nn.Module): pass\n")
    assert statecli("verify", "runs/a.pt").err.splitlines()[1] == "  runs/own.py:Own"
    assert "  net.py:Tiny" in statecli("verify", "runs").err.splitlines()
    (class_folder / "net.py").unlink()
    end = "is a checkpoint; verify needs a model class, such as net.py:Net or package.module:Class\n"
    assert statecli("verify", "weights.pt").err.endswith(end)


def test_error_about_a_function_for_inputs_lists_the_functions(class_folder, statecli):
    """A class of the file is not listed as a function for inputs."""
    (class_folder / "need.py").write_text(
        NEEDS + "def mk_batch(): return torch.ones(2, dtype=torch.int64)\ndef other(): pass\n"
    )
    line = ("verify", "need.py:Wide", "--input-from")
    assert statecli(*line, "need.py:zz").err.endswith("need.py has no zz; its functions are mk_batch, other\n")
    assert statecli(*line, "need.py:mkbatch").err.endswith("need.py has no mkbatch; did you mean mk_batch?\n")
    (class_folder / "none.py").write_text("x = 1\n")
    assert statecli(*line, "none.py:Wide").err.endswith("none.py has no Wide; the file defines no function\n")


@pytest.mark.parametrize("words", [("version",), ("-V",), ("--version",)], ids=" ".join)
def test_the_version_has_three_spellings(statecli, words):
    """The version may be requested by an option, a short option or a command."""
    result = statecli(*words)
    assert (result.code, result.out) == (0, statecli("--version").out)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("scan", "a.pt"), "No such command 'scan'; did you mean 'audit'?"),
        (("compare", "a.pt", "b.pt"), "No such command 'compare'; did you mean 'diff'?"),
        (
            ("inspect", "a.pt", "b.pt"),
            "inspect takes only TARGET; to check several checkpoints, run: statecli audit TARGET...",
        ),
        (
            ("inspect", "a.lock"),
            "is a lock file; to compare a checkpoint with this lock, run: statecli audit CHECKPOINT --lock FILE",
        ),
    ],
)
def test_command_of_another_program_gets_a_suggestion(statecli, in_tmp_path, words, answer):
    """The words are commands of other programs."""
    Path("a.lock").write_text('{"schema": "statecli.lock/1", "digest": "blake3", "targets": []}\n')
    result = statecli(*words)
    assert result.code == 2
    assert answer in result.err


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("bert", "bert"),
        ("bert/my model.pt", "'bert/my model.pt'"),
        ("test", "test"),
        ("net.py:Net", "net.py:Net"),
        ("net.py:Net(3)", "'net.py:Net(3)'"),
        ("torchvision.models:resnet18", "torchvision.models:resnet18"),
        ("https://host/a.pt", "https://host/a.pt"),
    ],
)
def test_a_target_without_a_command_gets_inspect(statecli, in_tmp_path, word, typed):
    """The word is an existing path, a URL or the spelling of a class; no command has a similar name."""
    Path("bert").mkdir()
    Path("test").mkdir()
    Path("bert/my model.pt").touch()
    result = statecli(word)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"statecli: No such command {word!r}; did you mean: statecli inspect {typed}\n"


@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("torch.nn:Linear[3]", "; write a model class as file.py:Class or package.module:Class(argument=...)"),
        ("transformers:bert-base", "; write a model class as file.py:Class or package.module:Class(argument=...)"),
        ("a:b/c.pt", ""),
        (r"C:\models\net.pt", ""),
    ],
)
def test_a_name_that_begins_like_a_class_says_how_to_name_one(statecli, in_tmp_path, target, end):
    assert statecli("inspect", target).err == f"statecli: {target}: cannot be opened: no such file or directory{end}\n"


def test_the_command_of_another_program_is_not_a_target(statecli, in_tmp_path):
    """A folder of the same name next to the checkpoint changes nothing."""
    Path("test").mkdir()
    assert statecli("test", "net.py:Net").err == "statecli: No such command 'test'; did you mean 'verify'?\n"
    assert "did you mean 'inspect'" in statecli("inspct", "a.pt").err


def test_a_group_of_rules_is_listed(statecli):
    """`--select pickles` accepts a group, so the list of rules accepts a group too."""
    names = [rule["name"] for rule in statecli("rules", "pickles", "-f", "json").json["rules"]]
    assert "unsafe-global" in names
    assert "nan" not in names


DEEP = f"class Net(nn.Module):\n    def __init__(self, cfg: a{'.a' * 2000}): pass\n"
ARGUMENTS = "".join(
    f"class A{n}(nn.Module):\n    def __init__(self, a: A{n + 1}, b: A{n + 1}): pass\n" for n in range(40)
)
VARIABLES = "".join(f"    x{n} = x{n - 1}\n" for n in range(1, 2000))
CLASSES = "".join(f"class A{n}(A{n - 1}): pass\n" for n in range(1, 400))


@pytest.mark.parametrize(
    "code",
    [
        DEEP,
        f"def make():\n    x0 = nn.Linear(1, 1)\n{VARIABLES}    return x1999\n",
        f"class A0(nn.Module):\n    def __init__(self, cfg): pass\n{CLASSES}",
        f"{ARGUMENTS}class A40(nn.Module): pass\n",
    ],
    ids=["a deep annotation", "a chain of variables", "a chain of classes", "a chain of arguments"],
)
def test_unusual_code_gets_an_error_quickly(in_tmp_path, statecli, monkeypatch, code):
    """The file is only read, for a suggestion: these were internal errors, and 20 seconds for the classes."""
    Path("odd.py").write_text(f"from torch import nn\n{code}")
    nodes, write_code = [], python_names.write_code
    monkeypatch.setattr(python_names, "write_code", lambda node: nodes.append(node) or write_code(node))
    result = statecli("inspect", "odd.py")
    assert result.code == 2
    assert result.err.startswith("statecli: odd.py: is a Python file, not a checkpoint; ")
    assert len(nodes) < 400 * 500
