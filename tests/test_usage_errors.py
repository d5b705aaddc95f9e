"""Errors name options as the command line spells them, and for Python as the arguments of the function."""

from __future__ import annotations

import ast
import inspect
import itertools
import pickle
import re
import sys
from pathlib import Path

import pytest

import statecli
from statecli.api.errors import call, map_flags
from statecli.core.errors import EngineError, FilteredOut, ModelError, StateError, UsageError, option, spell_options
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import parameters_of

#: All spellings of all options.
FLAGS = {flag for options in COMMANDS.values() for parameter in parameters_of(options) for flag in parameter.flags}


@pytest.mark.parametrize(
    ("named", "on_line", "in_python"),
    [
        (option("--device", "gpu"), "--device gpu", "device='gpu'"),
        (option("--init-device", "cuda"), "--init-device cuda", "init_device='cuda'"),
        (option("--atol", -1.0), "--atol -1", "atol=-1"),
        (option("--jobs", -2), "--jobs -2", "jobs=-2"),
        (option("--optimizer", ""), "--optimizer ", "optimizer=''"),
        (option("--bitwise"), "--bitwise", "bitwise"),
        (option("--map", "a='b'", quoted=True), "--map \"a='b'\"", "map=\"a='b'\""),
        (option("--map", "\ufdd0\ufdd2", quoted=True), r"--map '\ufdd0\ufdd2'", r"map='\ufdd0\ufdd2'"),
        (option("--device", "\ufdd1x\ufdd2"), r"--device \ufdd1x\ufdd2", r"device='\ufdd1x\ufdd2'"),
    ],
)
def test_an_option_becomes_the_argument(named, on_line, in_python):
    """The value is kept if the option has a value."""
    error = UsageError(f"{named}: no such \ufdd0 {named}")
    assert str(error) == f"{on_line}: no such \ufdd0 {on_line}"
    error.use_arguments(map_flags(["device", "init_device", "atol", "jobs", "optimizer", "bitwise", "map"]))
    assert str(error) == f"{in_python}: no such \ufdd0 {in_python}"


def test_options_with_another_argument_name_are_translated():
    """The table of options has their names."""
    arguments = map_flags(["inputs", "checks", "include", "exclude"])
    flags = ("--input", "--input-from", "--check", "-i", "--include", "-x")
    words = [option(flag, "x", quoted=True) for flag in flags]
    spelled = spell_options(" ".join(words), arguments)
    assert spelled == "inputs='x' inputs='x' checks='x' include='x' include='x' exclude='x'"


def test_option_without_an_argument_is_not_translated():
    """A text that looks like an option stays too."""
    text = f"{option('--device', 'x')} and {option('--shard', '1/2')}: my--device.py, --device"
    assert spell_options(text, {"--device": "device"}) == "device='x' and --shard 1/2: my--device.py, --device"


def test_errors_cross_processes():
    """A pickled error keeps its options."""
    error = pickle.loads(pickle.dumps(FilteredOut(f"{option('--to', 'x')}: no such")))
    assert (type(error), str(error)) == (FilteredOut, "--to x: no such")
    error.use_arguments({"--to": "to"})
    assert str(error) == "to='x': no such"


def raise_error(error):
    raise error


def test_only_usage_errors_get_argument_names():
    """An error of the model's own code may name options of its own."""
    with pytest.raises(UsageError, match=r"^to='x'$") as raised:
        call(lambda to: raise_error(UsageError(option("--to", to))), {"to": "x"})
    assert raised.value.args == ("to='x'",)
    with pytest.raises(ModelError, match=r"^--to x$"):
        call(lambda to: raise_error(ModelError(f"--to {to}")), {"to": "x"})


@pytest.mark.parametrize("error_type", [EngineError, ModelError, UsageError])
def test_every_error_names_the_arguments(error_type):
    """The advice after the message too."""
    with pytest.raises(error_type) as raised:
        call(
            lambda to: raise_error(error_type(option("--to", to), advice=f"give {option('--to', 'cpu')}")), {"to": "x"}
        )
    assert str(raised.value) == "to='x'; give to='cpu'"


def test_error_about_an_executor_names_the_argument(monkeypatch):
    """A missing package is an error about the argument `executor`."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(statecli.MissingDependency, match=r"^executor='dask:tcp://h:1' needs Dask: "):
        statecli.diff("a.pt", "b.pt", executor="dask:tcp://h:1")


def test_error_about_an_input_shape_names_the_argument(tmp_path):
    """The error of the model ends with the input to give."""
    net = tmp_path / "net.py"
    net.write_text("from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(12, 3)\n")
    with pytest.raises(ModelError, match=r"; the first layer takes 12 values in the last dimension: inputs='2x12'$"):
        statecli.inspect(f"{net}:Net", inputs="2x5")


@pytest.fixture(scope="module")
def calls():
    """Return a function that yields each call of a function with one of the names in statecli, with its file."""
    names = "|".join(("option", *error_names()))
    nodes = [
        (path.name, node)
        for path in sorted(Path(statecli.__file__).parent.rglob("*.py"))
        if re.search(rf"\b(?:{names})\b\s*\(", text := path.read_text())  # to parse all files takes a second
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return lambda *names: ((name, node) for name, node in nodes if node.func.id in names)


def texts(node):
    """Yield the literal texts in an expression, without those in `option(…)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option":
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    yield from itertools.chain.from_iterable(map(texts, ast.iter_child_nodes(node)))


def error_names(error=StateError):
    """Yield the names of a class of errors and its subclasses."""
    yield error.__name__
    yield from itertools.chain.from_iterable(map(error_names, error.__subclasses__()))


def test_errors_name_options_by_option(calls):
    """A literal `--device` would be the same for Python; a whole command line is."""
    functions = [getattr(statecli, name) for name in ("inspect", "diff", "verify", "audit", "lock", "merge")]
    python_flags = map_flags({name for function in functions for name in inspect.signature(function).parameters})
    usage_errors = {*error_names(UsageError)}
    flag = re.compile(r"(?<![\w-])--?[a-z][a-z-]*|--$")
    errors = [*calls(*error_names())]
    literal = [
        (path, match)
        for path, node in errors
        for text in texts(node)
        for match in flag.findall(re.sub("statecli [a-z].*", "", text))
        if match in (FLAGS if node.func.id in usage_errors else python_flags) or match == "--"
    ]
    assert len(errors) > 500
    assert literal == []


def test_option_is_given_flags_of_the_table(calls):
    """Each literal argument of `option` is a flag of the table of options."""
    flags = [node.args[0] for _, node in calls("option")]
    named = {flag.value for flag in flags if isinstance(flag, ast.Constant)}
    assert len(named) > 20
    assert named <= FLAGS
